"""Bad samples of a run and what stands in for them. Never loads, never finds them.

A sample that cannot be loaded never can, so every rank that meets it comes to the same stand-in
without asking anybody. The file only spares them the try, and informs people.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_runner.kernel.system.run_files import SMALL_BYTES_MAX, from_json, open_to_append, reading
from ddp_runner.values.generators import mix64

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "quarantine.jsonl"
_SALT = 0xBAD5A3B1E0DDBA11
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def file_name_of_validation(name: str) -> str:
    """Return the file name for validation data ``name``, which has its own sample indices; empty: the only data."""
    return f"quarantine_validation{'_' if name else ''}{name}.jsonl"


class QuarantineFullError(Exception):
    """Raised if no further sample may be replaced; the text says why."""


class Quarantine:
    """The known bad samples. ``bad_max`` bounds them over all ranks; 0: none may be replaced."""

    def __init__(self, *, seed: int, dataset_size: int, bad_max: int) -> None:
        self._seed = seed
        self._size = dataset_size
        self.bad_max = bad_max
        self._bad: dict[int, str] = {}
        self._path: Path | None = None
        self._run_id = self._stage = ""
        self._read_bytes = 0

    def __len__(self) -> int:
        return len(self._bad)

    def attach(self, path: Path, *, run_id: str, stage: str = "") -> None:
        """Share with the other ranks of this run through ``path``, from now on.

        ``stage``: of the run, which has data of its own, so that indices of others mean other samples.
        """
        self._path, self._run_id, self._stage = path, run_id, stage
        self._read_bytes = 0
        self.refresh()

    def refresh(self) -> None:
        """Take over what other ranks have written since the last time."""
        if self._path is None:
            return
        try:
            if self._path.lstat().st_size == self._read_bytes:
                return
            with reading(self._path) as file:
                file.seek(self._read_bytes)
                text = file.read(SMALL_BYTES_MAX)
        except OSError:
            return  # there is none yet, or it cannot be read now: found again if need be
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            self._take_over(line)

    def _take_over(self, line: bytes) -> None:
        try:
            record = from_json(line)
            if (record["run_id"], record.get("stage", "")) == (self._run_id, self._stage):
                self._bad.setdefault(int(record["index"]), str(record["reason"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            return  # cut off by a death while it was written; found again if need be

    def add(self, index: int, *, reason: str, step: int, rank: int) -> int:
        """Never load ``index`` again; returns what stands in for it.

        Raises :class:`QuarantineFullError` beyond ``bad_max``.
        """
        if self._is_new(index):
            self._bad[index] = reason
            self._write(index, reason, step, rank, self.stand_in(index))
        return self.stand_in(index)

    def leave_out(self, index: int, *, reason: str, step: int, rank: int) -> bool:
        """Record an item of a stream like :meth:`add`; the next item takes its place. False: known before."""
        if not self._is_new(index):
            return False
        self._bad[index] = reason
        self._write(index, reason, step, rank, None)
        return True

    def _is_new(self, index: int) -> bool:
        """Return True if ``index`` is new. Raises QuarantineFullError if no more may be added."""
        self.refresh()
        if index in self._bad:
            return False
        if not self.bad_max:
            raise QuarantineFullError("data.on_bad_sample=substitute would replace it")
        if len(self._bad) >= self.bad_max or len(self._bad) + 1 >= self._size:
            raise QuarantineFullError(f"data.max_bad_samples={self.bad_max} are replaced already")
        return True

    def _write(
        self, index: int, reason: str, step: int, rank: int, replacement: int | None
    ) -> None:
        if self._path is None:
            return
        record = {
            "run_id": self._run_id,
            **({"stage": self._stage} if self._stage else {}),
            "index": index,
            "reason": reason,
            "step": step,
            "rank": rank,
            "replacement": replacement,
        }
        # One write to a file opened for appending: lines of several ranks do not mix.
        line = (json.dumps(record) + "\n").encode()
        with (
            contextlib.suppress(OSError),  # worth having, never worth a run: see same-stand-in
            os.fdopen(open_to_append(self._path), "wb", buffering=0) as file,
        ):
            file.write(line)

    def stand_in(self, index: int) -> int:
        """Return the index to load in place of ``index``: itself, unless it is bad."""
        # INVARIANT same-stand-in: the first draw of (seed, index) that can be loaded, whoever asks
        # and whatever else is known by then: a bad draw is passed over now or found bad later.
        # Broken if: the draw depends on the rank, the step or the number of known bad samples.
        # Guarded by: test_the_stand_in_does_not_depend_on_what_else_is_known.
        return self.draw(index) if index in self._bad else index

    def draw(self, index: int) -> int:
        """Return the replacement that ``index`` would get; itself if there is no other sample left."""
        if len(self._bad.keys() | {index}) >= self._size:
            return index
        drawn, base = index, mix64(mix64((self._seed ^ _SALT) & _MASK) ^ (index * _GOLDEN & _MASK))
        draw = 0
        while drawn == index or drawn in self._bad:
            drawn = mix64((base + draw) & _MASK) % self._size
            draw += 1
        return drawn

    def to_record(self) -> dict[str, object]:
        """Plain values, for checkpoint and wire, of all ranks as far as they have reported."""
        self.refresh()
        return {"bad": sorted(self._bad.items())}

    def merge(self, record: Mapping[str, object]) -> None:
        """Take over what a checkpoint or another rank knew; nothing is ever forgotten."""
        bad = record.get("bad", ())
        assert isinstance(bad, Sequence)
        for index, reason in bad:
            self._bad.setdefault(int(index), str(reason))
