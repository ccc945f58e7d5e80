"""Follows the rank logs and picks what the console shows. Never writes, never waits.

Shown, unless other ranks are asked for: rank 0's raw output and its records, but for the levels that are hidden; WARNING and
ERROR of every rank; never STEP records. The same warning of several ranks within one poll is one line; an identical one
that comes again is held back and shown with its count.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.kernel.rules.faults import rank_list
from ddp_runner.observe.format import printable, without_styles
from ddp_runner.observe.logger import CONTINUATION, HELD_BACK, parse_line, split_records
from ddp_runner.observe.tail import BACKLOG_BYTES_MAX, CHUNK_BYTES, FollowedFile, FollowedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ddp_runner.core.settings import Settings

RAW = "RAW"
_HIDDEN = {
    "quiet": frozenset({"STEP", "DEBUG", "DETAIL", "INFO"}),
    "normal": frozenset({"STEP", "DEBUG", "DETAIL"}),
    "verbose": frozenset({"STEP", "DEBUG"}),
}
LINES_PER_POLL_MAX = 200  # of one rank, warnings and errors not counted
REPEAT_WINDOW_S = 10.0
_REPEATS_KEPT_MAX = 256
_DRAIN_ROUNDS_MAX = 2 * BACKLOG_BYTES_MAX // CHUNK_BYTES
_ALARMS = ("WARNING", "ERROR")
# What faulthandler writes when stacks are asked for, or when the process crashes: meant for the file.
_STACK_LINE = re.compile(
    r'(?:Current thread|Thread) 0x[0-9a-f]+|  File ".*", line \d+ in |Extension modules: '
    r"|Fatal Python error: |  <no Python frame>"
)
# Torch's profiler (kineto) writes its own stages at a level above that of its errors, so that its setting
# KINETO_LOG_LEVEL has only both or neither. Errors and warnings are shown.
_PROFILER_STAGE = re.compile(r"(?:USDT|STAGE):\d{4}-\d\d-\d\d [\d:]+ \d+:\d+ \w+\.(?:cpp|h):\d+\] ")


def hidden_levels(settings: Settings) -> frozenset[str]:
    """Return the levels of records that the console leaves out."""
    return frozenset({"STEP"}) if settings.run.debug else _HIDDEN[settings.log.console]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleLine:
    """A line, or a record of several lines, for the console. ``level`` is RAW for raw output."""

    rank: int
    level: str
    text: str


@dataclass(slots=True, kw_only=True)
class _Record:
    level: str
    step: int | None
    lines: list[str]


@dataclass(slots=True, kw_only=True)
class _Alarm:
    """A warning or error that was shown as said by ``of``, and what came of it since."""

    shown_at_s: float
    of: frozenset[int]
    ranks: set[int] = field(default_factory=set)
    held_back: int = 0

    def is_news(self, level: str) -> bool:
        """Return False if nothing was held back, or only a warning that other ranks have given once each."""
        is_each_once = self.held_back == len(self.ranks) and not self.ranks & self.of
        return bool(self.held_back) and not (level == "WARNING" and is_each_once)


Alarms = OrderedDict[tuple[str, str], _Alarm]  # by level and text


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The lines of ranks that a console shows.

    ``ranks``: by their place in the tail, from 0, the ranks of which more than warnings is shown. Only lines with
    ``seal`` are records; others that look like one are a task's output. ``hidden``: levels of records that are left out.
    ``marks_lines``: each raw line stands behind ``[default0]:``, as torchrun has it. ``alarms``: the warnings and errors
    that were shown, also by the tail before this one.
    """

    hidden: Collection[str] = _HIDDEN["normal"]
    seal: str = ""
    ranks: Collection[int] = (0,)
    marks_lines: bool = False
    alarms: Alarms = field(default_factory=OrderedDict)


class LogTail:
    """Tails ``rank_<r>.log`` of a directory for each of ``ranks``, or one path (or memory file) for each, in their order.

    What stands behind a record ``HELD_BACK`` is for the log alone: a traceback, where somebody else knows
    whose is to be shown.
    With ``from_end`` what stands in the files now is not shown; a file that appears later is
    shown from its start. Of the first rank the next ``shown_bytes`` are not shown either. ``kept_in`` is
    the log in which the lines of a memory file are kept.
    """

    def __init__(
        self,
        where: Path | Sequence[Path | int],
        *,
        ranks: Sequence[int],
        shows: Shown,
        from_end: bool = True,
        shown_bytes: int = 0,
        kept_in: str = "",
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        paths = [where / f"rank_{rank}.log" for rank in ranks] if isinstance(where, Path) else where
        if len(paths) != len(ranks):
            raise ValueError(f"{len(paths)} log paths for {len(ranks)} ranks")
        self._files = [
            FollowedMemory(path, kept_in=kept_in)
            if isinstance(path, int)
            else FollowedFile(path, from_end=from_end, skipped_bytes=0 if rank else shown_bytes)
            for rank, path in enumerate(paths)
        ]
        self._open: list[_Record | None] = [None] * len(ranks)
        self._ranks = ranks
        self._shows = shows
        self._held_back: set[int] = set()  # ranks of which nothing more is shown
        self._now_s = now_s
        self._alarms = shows.alarms

    def poll(self) -> list[ConsoleLine]:
        """Return the new lines since the last poll; a bounded number, and without blocking."""
        return self._show([file.read_lines() for file in self._files])

    def drain(self) -> list[ConsoleLine]:
        """Return everything up to the end of the files, with unfinished last lines and counts."""
        shown: list[ConsoleLine] = []
        for _ in range(_DRAIN_ROUNDS_MAX):
            shown += self.poll()
            if not any(file.has_more for file in self._files):
                break
        shown += self._show([file.take_partial() for file in self._files])
        return shown + self._repeats(final=True)

    def taken_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's output that were read, in whole lines."""
        return self._files[rank].taken_bytes

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.close()

    def _show(self, read: list[list[str]]) -> list[ConsoleLine]:
        shown: list[ConsoleLine] = []
        alarms: OrderedDict[tuple[str, str], tuple[_Record, list[int]]] = OrderedDict()
        for rank, texts in enumerate(read):
            plain: list[ConsoleLine] = []
            for record in self._records(rank, texts):
                if record.level in _ALARMS:
                    key = (record.level, "\n".join(record.lines))
                    alarms.setdefault(key, (record, []))[1].append(self._ranks[rank])
                elif self._is_last_shown(record):
                    self._held_back.add(rank)
                elif rank in self._shows.ranks and rank not in self._held_back:
                    mark = f"[default{rank}]:" if self._shows.marks_lines else ""
                    text = "\n".join(mark + line for line in record.lines)
                    plain.append(ConsoleLine(rank=rank, level=record.level, text=text))
            shown += self._bounded(plain)
        for (level, text), (record, ranks) in alarms.items():
            shown += self._alarm(level, text, record.step, ranks)
        return shown + self._repeats(final=False)

    def _records(self, rank: int, lines: list[str]) -> list[_Record]:
        """Group lines into records; a record's later lines may come in later polls."""
        records: list[_Record] = []
        for line in lines:
            newest = line.rstrip("\r").rsplit("\r", 1)[-1]  # a progress bar's last state
            shown = printable(without_styles(newest))
            for text in split_records(shown, seal=self._shows.seal):
                before = self._open[rank]
                if before is None or not text.startswith(CONTINUATION):
                    records.append(_begin(text, self._shows.seal))
                elif records and records[-1] is before:
                    before.lines.append(text)
                    continue
                else:
                    records.append(_Record(level=before.level, step=before.step, lines=[text]))
                self._open[rank] = records[-1] if records[-1].level != RAW else None
        return [record for record in records if self._worth_showing(record)]

    def _is_last_shown(self, record: _Record) -> bool:
        return record.level == "DEBUG" and bool(self._shows.seal) and record.lines[0] == HELD_BACK

    def _worth_showing(self, record: _Record) -> bool:
        if self._is_last_shown(record):
            return True
        if record.level == RAW:
            first = record.lines[0]
            is_for_the_file = _STACK_LINE.match(first) or _PROFILER_STAGE.match(first)
            return bool(first.strip()) and not is_for_the_file
        return record.level not in self._shows.hidden

    def _bounded(self, lines: list[ConsoleLine]) -> list[ConsoleLine]:
        if len(lines) <= LINES_PER_POLL_MAX:
            return lines
        kept = lines[:LINES_PER_POLL_MAX]
        more = len(lines) - len(kept)
        text = f"{more:,} more lines stand in {self._files[lines[0].rank].path}"
        return [*kept, ConsoleLine(rank=lines[0].rank, level="INFO", text=text)]

    def _alarm(
        self, level: str, text: str, step: int | None, ranks: list[int]
    ) -> list[ConsoleLine]:
        now_s = self._now_s()
        known = self._alarms.get((level, text))
        if known is not None:
            known.held_back += len(ranks)
            known.ranks.update(ranks)
            return []
        first = _Alarm(shown_at_s=now_s, of=frozenset(ranks))
        first.held_back = len(ranks) - len(set(ranks))
        first.ranks.update(ranks if first.held_back else ())
        self._alarms[level, text] = first
        reported = rank_list(ranks) if step is None else f"{rank_list(ranks)}, step {step}"
        return [ConsoleLine(rank=ranks[0], level=level, text=_with_note(text, reported))]

    def _repeats(self, *, final: bool) -> list[ConsoleLine]:
        """The counts of what was held back, once its window is over (or the log ends)."""
        now_s = self._now_s()
        shown: list[ConsoleLine] = []
        for (level, text), alarm in list(self._alarms.items()):
            crowded = len(self._alarms) > _REPEATS_KEPT_MAX
            if not (final or crowded or now_s - alarm.shown_at_s >= REPEAT_WINDOW_S):
                continue
            del self._alarms[level, text]
            if alarm.is_news(level):
                times = "once more" if alarm.held_back == 1 else f"{alarm.held_back:,} times more"
                note = _with_note(text.split("\n")[0], f"{rank_list(alarm.ranks)}, {times}")
                shown.append(ConsoleLine(rank=min(alarm.ranks), level=level, text=note))
                if not final:
                    said = alarm.of | alarm.ranks
                    self._alarms[level, text] = _Alarm(shown_at_s=now_s, of=said)
        return shown


def _begin(text: str, seal: str) -> _Record:
    line = parse_line(text, seal=seal)
    if line is None:
        return _Record(level=RAW, step=None, lines=[text])
    return _Record(level=line.level, step=line.step, lines=[line.message])


def _with_note(text: str, note: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([f"{first} ({note})", *rest])
