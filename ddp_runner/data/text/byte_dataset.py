"""ByteWindows: a text corpus as a map-style dataset of fixed-size windows of bytes.

Reads through memory maps, opened where they are first needed and bounded in number; copies
nothing but the windows it returns.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ddp_runner.core.faults import BadInputError
from ddp_runner.data.text.corpus import OPTION, ScannedFiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_OPEN_MAPS_MAX = 512  # each costs an open file; the usual soft limit is 1024


class ByteWindows(Dataset[torch.Tensor]):
    """Non-overlapping windows of ``seq_len + 1`` bytes over the files of ``text``, end to end.

    Sample ``i`` is a uint8 tensor of shape ``(seq_len + 1,)``: inputs are its first ``seq_len``
    bytes, targets its last. A window may span files; the last bytes that fill none are left out.
    Raises BadInputError if not one window fits, and when a file has shrunk since it was scanned.
    """

    deterministic = True

    def __init__(self, text: ScannedFiles, *, seq_len: int) -> None:
        self._text = text
        self._window_bytes = seq_len + 1
        self._ends = np.cumsum(np.asarray(text.sizes, dtype=np.int64))
        self._windows = text.total_bytes // self._window_bytes
        self._maps: OrderedDict[int, memoryview] = OrderedDict()
        if self._windows == 0:
            raise BadInputError(
                OPTION,
                text.root,
                f"at least {self._window_bytes} bytes (seq_len + 1) in each of training and "
                f"validation; one of them has {text.total_bytes}",
            )

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The windows at ``indices``, rows of one tensor."""
        out = np.empty((len(indices), self._window_bytes), dtype=np.uint8)
        for row, index in zip(out, indices, strict=True):
            self._fill(row.data, index)
        return list(torch.from_numpy(out))

    def _fill(self, row: memoryview, index: int) -> None:
        if not 0 <= index < self._windows:
            raise IndexError(f"window {index} of {self._windows}")
        position = index * self._window_bytes
        number = int(np.searchsorted(self._ends, position, side="right"))
        filled = 0
        while filled < self._window_bytes:
            content = self._map(number)
            left = int(self._ends[number]) - position
            count = min(left, self._window_bytes - filled)
            begin = len(content) - left
            row[filled : filled + count] = content[begin : begin + count]
            filled += count
            position += count
            number += 1

    def _map(self, number: int) -> memoryview:
        """The span of file ``number``, mapped."""
        content = self._maps.get(number)
        if content is not None:
            self._maps.move_to_end(number)
            return content
        content = _mapped(
            self._text.files[number],
            start=self._text.starts[number],
            size=self._text.sizes[number],
        )
        while len(self._maps) >= _OPEN_MAPS_MAX:
            self._maps.popitem(last=False)
        self._maps[number] = content
        return content

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}


def _mapped(path: Path, *, start: int, size: int) -> memoryview:
    with path.open("rb") as file:
        size_now = os.fstat(file.fileno()).st_size
        if size_now < start + size:
            # Reading past the end of a map is no exception but SIGBUS.
            expected = f"unchanged while it is used; it had {start + size} bytes, now {size_now}"
            raise BadInputError(OPTION, path, expected)
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return memoryview(content)[start : start + size]
