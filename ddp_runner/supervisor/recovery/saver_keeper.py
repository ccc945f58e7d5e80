"""Keeps the process that writes checkpoints: starts it, replaces it, ends one that does not come on."""

from __future__ import annotations

from collections.abc import Callable

from ddp_runner.core import events
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.messages import NO_PROCESS, Forked
from ddp_runner.supervisor.processes.children import Ended
from ddp_runner.supervisor.processes.helper_process import Helper
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.rank_host import Notes

PAUSE_S = (
    1.0  # after one that could not be forked, or ended at once; doubled with each that does so
)
PAUSE_MAX_S = 60.0
LIVED_S = 5.0  # and so was of use


class SaverKeeper:
    """Driven by :class:`Supervisor`: ``look`` at each turn, ``ended`` when it was reaped."""

    def __init__(self, plan: LaunchPlan, *, node: Node, recorder: Notes) -> None:
        self._settings = plan.settings.recovery
        self._node = node
        self._recorder = recorder
        self._asked_at_s = 0.0
        self._not_before_s = 0.0
        self._ended_at_once = 0  # in a row
        self._pause_s = PAUSE_S
        self._in_hand: tuple[int, int] | None = None  # number and tries of the oldest order
        self._in_hand_since_s = 0.0
        self._computed: int | None = None  # CPU time of the saver by then, in ticks
        self._was_refused = False

    def look(self, now_s: float) -> None:
        """Start it once there is a world whose copies it may write; end one that is stuck."""
        lines = self._node.shared.saver
        if not lines.is_used or not self._recorder.facts.ever_formed:
            return
        saver = self._node.saver
        if saver is None:
            if self._node.can_fork and now_s >= self._not_before_s:
                self._asked_at_s, self._not_before_s = now_s, now_s + PAUSE_S
                self._node.start_saver()
            return
        oldest = next(iter(lines.owed()), None)
        in_hand = None if oldest is None else (oldest.sealed, oldest.tries)
        if in_hand != self._in_hand:
            self._in_hand = in_hand
            self._begin_to_wait(saver, now_s)
        limit_s = self._settings.checkpoint_timeout_s
        if in_hand is not None and now_s > self._in_hand_since_s + limit_s:
            if self._does_nothing(saver):
                self._recorder.say(
                    f"the process that writes checkpoints has done nothing for {limit_s:g} s: it is ended",
                    level="WARNING",
                )
                self._node.kill(saver)
            self._begin_to_wait(saver, now_s)
        if self._node.helper_stopped_s(saver, now_s) > self._settings.stopped_max_s:
            self._node.kill(saver)

    def _begin_to_wait(self, saver: Helper, now_s: float) -> None:
        self._in_hand_since_s = now_s
        self._computed = None if saver.pid is None else self._node.system.cpu_ticks(saver.pid)

    def _does_nothing(self, saver: Helper) -> bool:
        """Whether it has computed nothing since then; while it waits for a disk, to end it frees nothing."""
        system, pid = self._node.system, saver.pid
        if pid is None:
            return False
        return system.cpu_ticks(pid) == self._computed and not system.waits_for_disk(pid)

    def finish(self, *, is_cut_short: Callable[[], bool]) -> None:
        """The run ends: wait until what ranks have left to be written is written, and say what is not."""
        lines = self._node.shared.saver
        if lines.owed() and self._node.saver is None and self._node.can_fork:
            self._node.start_saver()
        lines.wait(limit_s=self._settings.checkpoint_timeout_s, is_cut_short=is_cut_short)
        for order in lines.owed():
            self._recorder.say(
                f"nobody has written the copy of step {order.step}: it ends with the run",
                level="WARNING",
            )

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """The zygote's answer to its fork; without it a rank writes by itself."""
        del now_s
        if forked.pid == NO_PROCESS and not self._was_refused:
            self._was_refused = True
            self._recorder.say(
                "no process could be forked that writes checkpoints: until one can, ranks write them",
                level="WARNING",
            )

    def ended(self, ended: Ended, output: str, now_s: float) -> None:
        """It was reaped: no fault of the run, whose copies another one goes on with."""
        if now_s > self._asked_at_s + LIVED_S:
            self._not_before_s, self._ended_at_once, self._pause_s = now_s, 0, PAUSE_S
        else:
            self._not_before_s = max(self._not_before_s, self._asked_at_s + self._pause_s)
            self._ended_at_once += 1
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        oldest = next(iter(self._node.shared.saver.owed()), None)
        said = output.splitlines()[-1] if output else ""
        self._recorder.record(
            events.SaverEnded(
                exit_code=ended.exit_code,
                signal=ended.signal_number,
                step=-1 if oldest is None else oldest.step,
                said=said,
            )
        )
        if self._ended_at_once > 1:
            return  # said of the first one
        goes_on = "" if oldest is None else f", and goes on with that of step {oldest.step}"
        self._recorder.say(
            f"the process that writes checkpoints ended ({ended.how}): another one takes its place{goes_on}",
            level="WARNING",
        )
