"""Runs the drills of ranks on a machine that only follows. The coordinator asks for them and judges their results."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ddp_runner.features.proof.rules import (
    DRILL,
    FOLDER,
    SHARE,
    STATE,
    DrillFacts,
    folder_name,
    may_begin,
    must_end,
)
from ddp_runner.kernel.parent.ports import Observer, Turn
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.keeper import Keeper, Stuck
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.fork_specs import DrillSpec
from ddp_runner.kernel.wire.messages import DrillPart, Forked
from ddp_runner.supervisor.around import OfMachine


def how_it_ended(ended: Ended, output: str) -> str:
    """Return how a drill's process has ended without a result, in words."""
    signal = ended.signal_number
    how = f"exit {ended.exit_code}" if signal is None else f"signal {signal}"
    said = f": {output.splitlines()[-1]}" if output else ""
    return f"its process ended ({how}){said}"


def remove_drill(folder: Path, step: int) -> None:
    """Remove the files of a drill in this folder of checkpoints."""
    path = folder / folder_name(step)
    if not path.parent.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # of another drill, or gone
            path.parent.rmdir()


def remove_drills(folder: Path) -> None:
    """Remove all that drills have left in this folder of checkpoints."""
    path = folder / FOLDER
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


class DrillRunner(Observer):
    """Starts the process of a drill, and says what is known of it; at most one at a time on a machine."""

    role = DRILL

    def __init__(self, around: OfMachine) -> None:
        settings, node = around.plan.settings, around.node
        self._folder = Path(settings.run.checkpoint_dir)
        self._node = node
        self._recorder = around.recorder
        self._limit_s = settings.recovery.startup_timeout_s
        self._keeper = Keeper(
            replace(DRILL, ready_s=self._limit_s),
            node,
            stopped_max_s=settings.recovery.stopped_max_s,
        )
        self._parts: dict[int, dict[str, int]] = {}  # step -> what is there, from which rank
        # Step and rank of the drill that has all it needs, and of the one that runs.
        self._waiting: tuple[int, int] | None = None
        self._running: tuple[int, int] | None = None
        self._is_given_up = (
            False  # while its process is still there, or its fork still owed, perhaps
        )

    def _facts(self, stuck: Stuck | None, *, fault_free: bool, is_running: bool) -> DrillFacts:
        return DrillFacts(
            fault_free=fault_free,
            can_fork=self._node.can_fork,
            waits=self._waiting is not None,
            is_running=is_running,
            is_wanted=not self._is_given_up,
            is_stopped=stuck is Stuck.STOPPED,
            is_late=stuck is Stuck.LATE,
            limit_s=self._limit_s,
        )

    def _begin(self, drill: tuple[int, int], now_s: float) -> None:
        self._running, self._waiting, self._is_given_up = drill, None, False
        step, rank = drill
        around, folder = self._node.surroundings(rank), str(self._folder / folder_name(step))
        spec = DrillSpec(**around, rank=rank, step=step, folder=folder, program=self._node.program)
        self._keeper.start(now_s, spec)

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """Do nothing: the process computes now, and the next look finds one that could not be forked."""

    def zygote_ended(self, now_s: float) -> None:
        """Do nothing: the next look finds a drill that was never forked."""


class LocalDrills(DrillRunner):
    """Observes a follower. A drill's state, share and process are all on the machine of the drilled rank."""

    def hears(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear of the parts that ranks write."""
        return {DrillPart: self.part}

    def said(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear the results of drills."""
        return {
            events.Drill: self.drilled,
            events.DrillSkipped: self.drilled,
            events.Diagnosed: self.drilled,
        }

    def part(self, message: DrillPart, handle: RankHandle) -> None:
        """Take in that a rank has written its part, or could not."""
        del handle
        step = message.step
        if self._running is not None and self._running[0] == step:  # its files are others now
            self._end_running("all ranks have gone back to an earlier step", removes=False)
        if message.problem:
            self._parts.pop(step, None)
            remove_drill(self._folder, step)
            return
        parts = self._parts.setdefault(step, {})
        parts[message.part] = message.rank
        if not parts.keys() >= {STATE, SHARE}:
            return
        del self._parts[step]
        for other in [one for one in self._parts if one < step]:  # no part of it comes any more
            del self._parts[other]
            remove_drill(self._folder, other)
        before, self._waiting = self._waiting, (step, parts[SHARE])
        if before is not None and before[0] != step:
            self._skip(before, "a newer one is ready")

    def look_after_repair(self, turn: Turn) -> None:
        """Begin the waiting drill, or end the running one, as the facts require."""
        is_running, stuck = self._keeper.process is not None, self._keeper.look(turn.now_s)
        if not is_running and self._running is not None:
            self._end_running("its process could not be forked")
        facts = self._facts(stuck, fault_free=turn.is_fault_free, is_running=is_running)
        if why := must_end(facts):
            self._end_running(why)
        waiting = self._waiting
        if waiting is None:
            return
        if not turn.is_fault_free:
            self._waiting = None
            self._skip(waiting, "something is being repaired, or the run ends")
        elif may_begin(facts):
            self._begin(waiting, turn.now_s)

    def drilled(
        self, message: events.Drill | events.DrillSkipped | events.Diagnosed, now_s: float
    ) -> None:
        """Report the result of a drill to the coordinator."""
        if self._running != (message.step, message.rank):
            return
        self._running = None
        remove_drill(self._folder, message.step)
        if isinstance(message, events.Drill):
            message = replace(message, seconds=round(now_s - self._keeper.began_s, 3))
        self._recorder.record(message)

    def ended(self, ended: Ended, output: str, now_s: float) -> None:
        """Take in that the drill's process was reaped. One that has reported has nothing to add."""
        del now_s
        if self._running is not None:
            self._end_running(how_it_ended(ended, output))

    def tidies_up(self) -> None:
        """Remove leftover files. In a shared folder they are the coordinator's to remove."""
        if not self._node.shares_checkpoints:
            remove_drills(self._folder)

    def _end_running(self, why: str, *, removes: bool = True) -> None:
        self._keeper.kill()
        self._is_given_up = True
        running, self._running = self._running, None
        if running is not None:
            self._skip(running, why, removes=removes)

    def _skip(self, drill: tuple[int, int], why: str, *, removes: bool = True) -> None:
        step, rank = drill
        if removes:
            remove_drill(self._folder, step)
        self._recorder.record(events.DrillSkipped(rank=rank, step=step, text=why))
