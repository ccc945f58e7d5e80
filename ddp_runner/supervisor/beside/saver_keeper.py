"""Keeps what the process that writes checkpoints is owed: gives it the orders, ends one that is stuck over one.

When one is started, and when the next one follows, is its role's to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.kernel.parent.ports import EventRecorder, Observer, Turn
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.helper_process import Helper
from ddp_runner.kernel.processes.keeper import Keeper
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.helper_roles import SAVER
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import NO_PROCESS, CopyWritten, Forked, SaverReady, WriteCopy

# While nobody is there to write: one that ended is replaced in a fraction of that
PATIENCE_S = 20.0
TRIES_MAX = 3  # of savers that end over one order


class SaverKeeper(Observer):
    """Driven by :class:`Supervisor`: ``look`` at each turn, ``ended`` when it was reaped.

    ``owed``: what ranks have ordered and nobody has answered, oldest first. The first is in the saver's hands while
    ``_tries`` counts it.
    """

    role = SAVER

    def __init__(
        self, plan: LaunchPlan, *, node: Node, recorder: EventRecorder, clock: Clock
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._keeper = Keeper(SAVER, node, stopped_max_s=plan.settings.recovery.stopped_max_s)
        self._node = node
        self._recorder = recorder
        self.owed: deque[WriteCopy] = deque()
        self._answered: CopyWritten | None = None  # the newest
        self._saving_rank = 0
        self._tries = 0  # savers that were given the first
        self._is_given = False  # to the present one
        self._waits_since_s = 0.0  # for the answer, or for somebody who writes
        self._computed: int | None = None  # CPU time of the saver by then, in ticks
        self._was_refused = False

    def hears(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear the orders of ranks."""
        return {WriteCopy: self._ordered_by}

    def _ordered_by(self, order: WriteCopy, handle: RankHandle) -> None:
        is_fenced = bool(handle.slot.get(Cell.FENCED))
        self.ordered(order, self._clock.monotonic(), is_fenced=is_fenced)

    def said(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear what the process answers."""
        return {SaverReady: self._is_ready, CopyWritten: self.written}

    def _is_ready(self, message: SaverReady, now_s: float) -> None:
        del now_s
        self._node.helper_is_ready(SAVER, message)

    def zygote_ended(self, now_s: float) -> None:
        """Nothing follows here: the next one is due in its turn."""

    def ordered(self, order: WriteCopy, now_s: float, *, is_fenced: bool) -> None:
        """A rank has a copy for it, or asks again what came of that."""
        # INVARIANT ordered-by-the-living: what a rank that was declared dead has copied becomes no file.
        # Broken if: an order is taken from a rank that is fenced out of its own disk.
        # Guarded by: test_a_rank_that_is_declared_dead_orders_nothing.
        if is_fenced:
            return
        if self._answered is not None and self._answered.sealed == order.sealed:
            self._pass_on(self._answered, order.rank)
        elif all(one.sealed != order.sealed for one in self.owed):
            self.owed.append(order)
            self._wait_from(now_s)
            self._give()

    def written(self, answer: CopyWritten, now_s: float) -> None:
        """The first has been answered: whoever waits for it hears so."""
        if not self.owed or self.owed[0].sealed != answer.sealed:
            return  # it was withdrawn
        order = self.owed.popleft()
        self._answered, self._tries, self._is_given = answer, 0, False
        for rank in {order.rank, self._saving_rank}:
            self._pass_on(answer, rank)
        self._wait_from(now_s)
        self._give()

    def forms(self, first: RankHandle) -> None:
        """Let ``first``, which saves from now on, wait for what is still to be written."""
        self._saving_rank = first.rank
        if self.owed:
            self._node.send(first.rank, self.owed[0])

    def look(self, turn: Turn) -> None:
        """Start it once there is a world whose copies it may write; end one that is stuck."""
        now_s = turn.now_s
        if not self._node.shared.has_saver or not self._recorder.facts.ever_formed:
            return
        self._keeper.look(now_s)
        if self._keeper.is_due(now_s):
            self._keeper.start(
                now_s, self._node.shared.saver_spec(self._plan.settings.run.checkpoint_dir)
            )
        self._give()
        waits_s = now_s - self._waits_since_s if self.owed else 0.0
        saver = self._keeper.process
        if self._is_given and saver is not None:
            self._end_if_stuck(saver, waits_s, now_s)
        elif waits_s > PATIENCE_S:
            self._nobody_writes(now_s)

    def _end_if_stuck(self, saver: Helper, waits_s: float, now_s: float) -> None:
        limit_s = self._plan.settings.recovery.checkpoint_timeout_s
        if waits_s <= limit_s:
            return
        if self._does_nothing(saver):
            self._recorder.say(
                f"the process that writes checkpoints made no progress for {limit_s:g} s; ending it",
                level="WARNING",
            )
            self._keeper.kill()
        self._wait_from(now_s)

    def _give(self) -> None:
        """Hand the first to the saver, once that is ready for it."""
        saver = self._keeper.process
        if self.owed and not self._is_given and saver is not None and saver.give(self.owed[0]):
            self._is_given, self._tries = True, self._tries + 1

    def _pass_on(self, answer: CopyWritten, rank: int) -> None:
        self._node.send(rank, answer)

    def _wait_from(self, now_s: float) -> None:
        self._waits_since_s, saver = now_s, self._keeper.process
        pid = None if saver is None else saver.pid
        self._computed = None if pid is None else self._node.system.cpu_ticks(pid)

    def _does_nothing(self, saver: Helper) -> bool:
        """Return True if it has used no CPU since then; while it waits for a disk, ending it would free nothing."""
        system, pid = self._node.system, saver.pid
        if pid is None:
            return False
        return system.cpu_ticks(pid) == self._computed and not system.waits_for_disk(pid)

    def _nobody_writes(self, now_s: float) -> None:
        """Refuse all owed saves: the rank that has made the copies writes them itself."""
        while self.owed:
            self._refuse("nobody", "no process is there that writes checkpoints", now_s)

    def _refuse(self, problem: str, text: str, now_s: float) -> None:
        order = self.owed[0]
        answer = CopyWritten(sealed=order.sealed, step=order.step, problem=problem, text=text)
        self.written(answer, now_s)

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """The zygote's answer to its fork; without it a rank writes by itself."""
        if forked.pid == NO_PROCESS:
            self._keeper.refused(now_s)
            self._nobody_writes(now_s)
            if not self._was_refused:
                self._was_refused = True
                self._recorder.say(
                    "no process to write checkpoints could be forked; until one can, ranks write them",
                    level="WARNING",
                )

    def ended(self, ended: Ended, output: str, now_s: float) -> None:
        """It was reaped: no fault of the run, whose copies another one goes on with."""
        self._keeper.ended(now_s)
        step = self.owed[0].step if self.owed else -1
        said = output.splitlines()[-1] if output else ""
        self._recorder.record(
            events.SaverEnded(
                exit_code=ended.exit_code, signal=ended.signal_number, step=step, said=said
            )
        )
        if self._is_given and self._tries >= TRIES_MAX:
            # Nor is it left to the rank, which the same may end.
            text = f"{self._tries} processes in a row have ended while they wrote it"
            self._refuse("other", text, now_s)
        self._is_given = False
        self._wait_from(now_s)
        if self._keeper.tries.failures > 1:
            return  # said of the first one
        goes_on = "" if step < 0 else f", and continues with that of step {step}"
        self._recorder.say(
            f"the process that writes checkpoints ended ({ended.how}): another one takes its place{goes_on}",
            level="WARNING",
        )
