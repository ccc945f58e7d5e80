"""The curves of a run from metrics.jsonl: of a huge file a sample at once, and every line of a stretch on request."""

from __future__ import annotations

import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.observe.history.json_lines import epoch_s, opened, parsed, read_at, whole

READ_WHOLE_BYTES_MAX = 6 * 1024 * 1024  # a stretch of the file up to this size is read line by line
_READ_BYTES = 1024 * 1024
_BLOCK_BYTES = 8 * 1024  # of a larger one, so much at a time from places that are equally far apart
_POINTS_MAX = 40_000  # of a series in memory; beyond it every second one is dropped
_ABOUT_THE_LINE = ("step", "rank", "utc")


@dataclass(slots=True)
class Series:
    """A figure of one rank: steps rise. ``times`` are seconds since 1970, NaN stands for "not finite"."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, time_s: float, value: float) -> None:
        """A point. What was rolled back, or done again after a resume, gives way to it."""
        # INVARIANT no-step-twice: of a step that was done twice, a curve has the last one.
        # Broken if: a point is appended without dropping those of its step and later ones.
        # Guarded by: test_what_was_rolled_back_is_not_drawn_twice.
        if self.steps and step <= self.steps[-1]:
            first = bisect_left(self.steps, step)
            del self.steps[first:], self.times[first:], self.values[first:]
        self.steps.append(step)
        self.times.append(time_s)
        self.values.append(value)

    def halve(self) -> None:
        """Drop every second point but the newest ones."""
        for one in (self.steps, self.times, self.values):
            del one[1 : _POINTS_MAX // 2 : 2]


class Curves:
    """Series by name and rank."""

    def __init__(self) -> None:
        self._series: dict[str, dict[int, Series]] = {}
        self.is_thinned = False  # not every logged step is in it

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take in lines of the file, in its order."""
        for record in records:
            step, rank = whole(record.get("step")), whole(record.get("rank"))
            if step < 0 or rank < 0:
                continue
            time_s = epoch_s(record.get("utc")) or math.nan
            for name, value in record.items():
                if name in _ABOUT_THE_LINE or isinstance(value, (str, bool, list, dict)):
                    continue
                series = self._series.setdefault(name, {}).setdefault(rank, Series())
                series.add(step, time_s, math.nan if value is None else float(value))
                if len(series.steps) > _POINTS_MAX:
                    series.halve()
                    self.is_thinned = True

    def names(self) -> list[str]:
        """The figures there are."""
        return list(self._series)

    def ranks(self, name: str) -> Mapping[int, Series]:
        """Return the figure's series of each rank."""
        return self._series.get(name, {})

    def longest(self) -> int:
        """Return the number of points of the longest series."""
        every = (one for ranks in self._series.values() for one in ranks.values())
        return max((len(one.steps) for one in every), default=0)

    def of_run(self, name: str) -> Series:
        """The figure as the first rank has it; where that was given up, as the next one goes on."""
        found = Series()
        for _, series in sorted(self.ranks(name).items()):
            last = found.steps[-1] if found.steps else -1
            first = bisect_left(series.steps, last + 1)
            # A rank is a logged step ahead now and then; only who goes on alone counts.
            if len(series.steps) - first > 1 or not found.steps:
                found.steps.extend(series.steps[first:])
                found.times.extend(series.times[first:])
                found.values.extend(series.values[first:])
        return found

    def newest(self, name: str) -> dict[int, float]:
        """The last value that each rank has logged."""
        return {rank: one.values[-1] for rank, one in sorted(self.ranks(name).items())}

    def between(self, first: float, last: float) -> Curves:
        """Return the curves of these steps only."""
        cut = Curves()
        cut.is_thinned = self.is_thinned
        for name, ranks in self._series.items():
            for rank, one in ranks.items():
                begin, end = bisect_left(one.steps, first), bisect_left(one.steps, last + 1)
                kept = Series(one.steps[begin:end], one.times[begin:end], one.values[begin:end])
                if kept.steps:
                    cut._series.setdefault(name, {})[rank] = kept
        return cut


class MetricsHistory:
    """Follows one metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget((0, 0))

    def _forget(self, file: tuple[int, int]) -> None:
        self.curves = Curves()
        self._file = file
        self._end = 0  # up to here it is known
        self._places: list[tuple[int, int]] = []  # (where a line begins, its step), offsets rise

    def read(self) -> bool:
        """Take in what is new. Whether there was anything."""
        with opened(self._path) as descriptor:
            if descriptor is None:
                return False
            stat = os.fstat(descriptor)
            if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._end:
                self._forget((stat.st_dev, stat.st_ino))
            if stat.st_size <= self._end:
                return False
            begin, self._end = self._end, self._stretch(descriptor, self._end, stat.st_size)
            return self._end > begin

    def window(self, first: float, last: float) -> Curves:
        """Return the curves between two steps, with every line of the file unless that is too much to read at once."""
        if not self.curves.is_thinned:
            return self.curves.between(first, last)
        stretches = self._stretches(first, last)
        found = Curves()
        if sum(end - begin for begin, end in stretches) > READ_WHOLE_BYTES_MAX:
            stretches = [(stretches[0][0], stretches[-1][1])]
            found.is_thinned = True
        with opened(self._path) as descriptor:
            if descriptor is not None:
                for begin, end in stretches:
                    for _, records in _blocks(descriptor, begin, end):
                        found.add(records)
        return found.between(first, last)

    def _stretches(self, first: float, last: float) -> list[tuple[int, int]]:
        """Return the file's stretches with those steps: one for each time that they were done."""
        found: list[tuple[int, int]] = []
        places = [*self._places, (self._end, self._places[-1][1] if self._places else 0)]
        for number in range(len(places) - 1):
            offset, step = places[number]
            after_offset, after_step = places[number + 1]
            is_last = number == len(places) - 2
            low, high = min(step, after_step), math.inf if is_last else max(step, after_step)
            if low > last or high < first:
                continue
            if found and offset <= found[-1][1]:
                found[-1] = (found[-1][0], after_offset)
            else:
                found.append((offset, after_offset))
        return found

    def _stretch(self, descriptor: int, begin: int, end: int) -> int:
        """Take in that part of the file; where its last whole line ends."""
        self.curves.is_thinned |= end - begin > READ_WHOLE_BYTES_MAX
        known = begin
        for place, records in _blocks(descriptor, begin, end):
            self.curves.add(records)
            steps = [step for record in records if (step := whole(record.get("step"))) >= 0]
            if steps:
                self._places.append((place.begin, steps[0]))
            known = place.end
        return known


@dataclass(frozen=True, slots=True)
class _Place:
    """Whole lines of the file, from ``begin`` to ``end``."""

    begin: int
    end: int


def _blocks(descriptor: int, begin: int, end: int) -> Iterator[tuple[_Place, list[dict[str, Any]]]]:
    """Records from ``begin``, where a line begins, to ``end``: all, or those of equally distant blocks."""
    if end - begin <= READ_WHOLE_BYTES_MAX:
        offset = begin
        while offset < end:
            data = read_at(descriptor, offset, min(_READ_BYTES, end - offset))
            cut = data.rfind(b"\n") + 1
            if not cut and (offset + len(data) >= end or not data):
                return
            cut = cut or len(data)  # a line that is longer than anybody writes
            yield _Place(offset, offset + cut), parsed(data[:cut])
            offset += cut
        return
    blocks = READ_WHOLE_BYTES_MAX // _BLOCK_BYTES
    for number in range(blocks):
        offset = begin + (end - begin - _BLOCK_BYTES) * number // (blocks - 1)
        data = read_at(descriptor, offset, _BLOCK_BYTES)
        first = data.find(b"\n") + 1 if number else 0
        cut = data.rfind(b"\n") + 1
        if cut > first:
            yield _Place(offset + first, offset + cut), parsed(data[first:cut])
