"""Shows a start while it lasts: how long each part of it took, and at once what the task prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_runner.core.settings import Settings
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.lifecycle import NO_PROCESS_LEFT, RankState
from ddp_runner.kernel.rules.phases import Stage
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import Built
from ddp_runner.observe.console import LogTail, Shown, hidden_levels
from ddp_runner.observe.tail import FollowedMemory
from ddp_runner.supervisor.reporting.recorder import Recorder

IMPORTING, STARTING, FORMING, FIRST_STEP = (
    "importing",
    "starting ranks",
    "connecting ranks",
    "first step",
)
_CHECKPOINT_SHOWN_FROM_S = 0.1  # to look for one, and find none, is not worth a line


@dataclass(slots=True, kw_only=True)
class _Follow:
    """The output of one process, followed from its beginning; ``who`` it is among all there were.

    ``whole``: the same for the supervisor's log, where the process has none of its own.
    """

    who: tuple[str, int]
    tail: LogTail
    whole: FollowedMemory | None

    def close(self) -> None:
        self.tail.close()
        if self.whole is not None:
            self.whole.close()


class Start:
    """Owned by the supervisor's loop; over when the first step is. Later starts are repairs."""

    def __init__(
        self,
        *,
        node: Node,
        world: World,
        recorder: Recorder,
        settings: Settings,
        waits_for: Callable[[], str],
    ) -> None:
        """``waits_for`` says in words what the run cannot begin without; empty: nothing."""
        self._facts = recorder.facts
        self._node = node
        self._world = world
        self._recorder = recorder
        self._hidden = hidden_levels(settings)
        self._built_s: dict[Stage, dict[int, float]] = {}
        self._reported: set[Stage] = set()
        self._has_imported = False
        self._formed_s: float | None = None
        self._is_over = False
        self._doing = ""
        self._doing_since_s = 0.0
        self._zygote: _Follow | None = None
        self._rank: _Follow | None = None
        self._shown: set[str] = set()
        self._waits_for = waits_for

    def imported(self, now_s: float) -> None:
        """The zygote has torch and the task; the run has waited for that since its beginning."""
        self._has_imported = True
        if not self._is_over and not self._facts.ever_formed:
            self._say(IMPORTING, now_s - self._recorder.accounting.began_s)

    def built(self, message: Built) -> None:
        """A rank has come so far; a line when all have, with the seconds of the slowest."""
        stage = Stage(message.stage)
        if self._facts.ever_formed or stage in self._reported:
            return
        took_s = self._built_s.setdefault(stage, {})
        took_s[message.rank] = message.seconds
        if stage is Stage.CHECKPOINT:
            if message.seconds >= _CHECKPOINT_SHOWN_FROM_S:
                self._reported.add(stage)
                self._say(stage.label, message.seconds)
        elif all(handle.rank in took_s for handle in self._world.present):
            self._reported.add(stage)
            self._say(stage.label, max(took_s.values()))

    def formed(self, now_s: float) -> None:
        """Every rank is in its first generation."""
        if self._formed_s is None:
            self._formed_s = now_s
            self._say(FORMING, now_s - self._facts.formed_at_s)

    def look(self, now_s: float) -> None:
        """Show what is new; called at each tick."""
        if self._is_over:
            return
        self.show_output()
        if self._recorder.may_write and self._rank is not None:
            self._stop_following()
        doing = self._what()
        if doing != self._doing:
            began_s = self._recorder.accounting.began_s
            self._doing, self._doing_since_s = doing, began_s if doing == IMPORTING else now_s
        if self._formed_s is not None and not doing:
            self._is_over = True
            if committed_ns := self._committed_ns():
                self._say(FIRST_STEP, max(0.0, committed_ns / 1e9 - self._formed_s))

    def doing(self, now_s: float) -> tuple[str, float]:
        """Return the current activity of the start, and its duration; empty when it is over."""
        return (self._doing, now_s - self._doing_since_s) if self._doing else ("", 0.0)

    def shown_bytes(self) -> int:
        """Show the rest of rank 0's output, and return the bytes shown, before its log file is followed."""
        self.show_output()
        return 0 if self._rank is None else self._rank.tail.taken_bytes(0)

    def without_shown(self, text: str) -> str:
        """Return the part of a process's last output that is still to be shown; a dump stays in one piece."""
        lines = text.splitlines()
        while lines and (lines[0] in self._shown or not lines[0].strip()):
            del lines[0]
        return "\n".join(lines)

    def _what(self) -> str:
        world = self._world
        ranks = world.present
        if self._formed_s is not None:
            is_made = self._committed_ns() or self._facts.generation > 1
            return "" if is_made else FIRST_STEP
        if waits_for := self._waits_for():
            return waits_for
        if any(handle.state is RankState.FORMING for handle in ranks):
            return FORMING
        return _slowest(ranks) or (STARTING if self._has_imported else IMPORTING)

    def _committed_ns(self) -> int:
        return max(handle.slot.get(Cell.LAST_COMMIT_NS) for handle in self._world.present)

    def _say(self, what: str, seconds: float) -> None:
        self.show_output()  # what was printed meanwhile goes first
        self._recorder.say(f"{what:<18}{seconds:>7.1f} s")

    def show_output(self) -> None:
        """Show what the zygote and rank 0 have printed, as long as there is no log file."""
        if self._recorder.may_write:
            return
        here = [one for one in self._world.present if one.rank in self._node.processes]
        if not here:
            return
        first = here[0]
        zygote = ("zygote", self._node.zygote_pid or 0), self._node.zygote_output
        rank = ("rank", first.processes), self._node.processes[first.rank].output
        self._zygote = self._followed(self._zygote, *zygote)
        self._rank = self._followed(self._rank, *rank)

    def _followed(
        self, follow: _Follow | None, who: tuple[str, int], output: int | None
    ) -> _Follow | None:
        """Show what is new of a process's output; one that has ended gives way to the next."""
        if follow is not None:
            self._show(follow)
        if follow is not None and (follow.who == who or output is None):
            return follow
        if follow is not None:
            follow.close()
        if output is None:
            return None
        has_no_log = who[0] == "zygote"
        kept_in = "supervisor.log" if has_no_log else "rank_0.log"
        seal = self._node.log_seal
        shows = Shown(hidden=self._hidden, seal=seal, alarms=self._recorder.outputs.alarms)
        tail = LogTail([output], ranks=[0], shows=shows, kept_in=kept_in)
        whole = FollowedMemory(output) if has_no_log else None
        new = _Follow(who=who, tail=tail, whole=whole)
        self._show(new)
        return new

    def _show(self, follow: _Follow) -> None:
        for line in follow.tail.poll():
            self._shown.update(line.text.splitlines())
            self._recorder.outputs.show_line(line)
        while follow.whole is not None:
            for text in follow.whole.read_lines():
                self._recorder.outputs.keep(text)
            if not follow.whole.has_more:
                break

    def _stop_following(self) -> None:
        for follow in (self._zygote, self._rank):
            if follow is not None:
                follow.close()
        self._zygote = self._rank = None


def _slowest(ranks: Sequence[RankHandle]) -> str:
    """Return the activity of the ranks that have come least far; empty if one has not begun."""
    waits = {RankState.STARTING, RankState.KILLING, *NO_PROCESS_LEFT}
    behind = [handle for handle in ranks if handle.state in waits]
    if any(not (handle.is_alive and handle.has_begun) for handle in behind):
        return ""
    stages = [Stage(handle.slot.get(Cell.STAGE)) for handle in behind]
    busy = [stage for stage in stages if stage is not Stage.NONE]
    return min(busy).label if busy else FORMING
