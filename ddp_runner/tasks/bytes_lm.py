"""The default task: a language model of the bytes of real text found on the machine."""

from __future__ import annotations

import math
import mmap
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ddp_runner.config.run_names import at_home
from ddp_runner.data.text.corpus import (
    OPTION,
    ScannedFiles,
    fingerprint,
    scan_standard_library,
    scan_text_files,
    split_by_file,
    summary,
)
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.tasks.transformer import TransformerLM, generate, likeliest_tokens, next_token_loss
from ddp_runner.training.task import Batch, Datasets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from ddp_runner.core.settings import Settings


BYTE_VALUES = 256
SAMPLE_BYTES = 200
SAMPLE_TEMPERATURE = 0.8
PYTHON_PROMPT = b"def "
TEXT_PROMPT = b"\n"  # of text that nothing is known about: the start of a line


class BytesTask:
    """``--task bytes``: the text of ``data.path``, or the interpreter's standard library.

    ``model.vocab_size`` and ``model.dataset_size`` are not read: the vocabulary is the 256 bytes,
    and the data is as large as it is. Its own defaults are the recipe of ``bytes`` in ``config.presets``.
    """

    takes_settings = True

    def __init__(self, settings: Settings) -> None:
        self._model = settings.model
        self._data = settings.data
        self._seed = settings.run.seed

    def build_model(self) -> nn.Module:
        """A fresh :class:`TransformerLM` over bytes."""
        return TransformerLM.shaped(self._model, vocab_size=BYTE_VALUES)

    @property
    def tokens_per_sample(self) -> int:
        """Bytes that a sample is trained to predict."""
        return self._model.seq_len

    def build_datasets(self) -> Datasets:
        """Windows of ``seq_len + 1`` bytes, train and validation split by file.

        Raises BadInputError if ``data.path`` cannot be read or holds too little text.
        """
        path = self._data.path
        text = scan_text_files(at_home(path)) if path else scan_standard_library()
        train, validation = split_by_file(
            text, validation_fraction=self._data.validation_fraction, seed=self._seed
        )
        self._refuse_empty_side(text, train, validation)
        split = (
            f"{_megabytes(train.total_bytes)} to train on, "
            f"{_megabytes(validation.total_bytes)} held out to validate on"
        )
        return Datasets(
            train=ByteWindows(train, seq_len=self._model.seq_len),
            validation=ByteWindows(validation, seq_len=self._model.seq_len),
            fingerprint=fingerprint(text.files, text.sizes, text.root),
            notes=(f"{text.root}: {summary(text)}", split),
        )

    def _refuse_empty_side(
        self, text: ScannedFiles, train: ScannedFiles, validation: ScannedFiles
    ) -> None:
        """Raise BadInputError where it is the split, not the text, that leaves too little."""
        fraction, window_bytes = self._data.validation_fraction, self._model.seq_len + 1
        if text.total_bytes < 2 * window_bytes:
            return  # no split would do
        # Of what was asked for: whole files are moved, and the one that is left may hold more.
        to_train_bytes = min(train.total_bytes, round(text.total_bytes * (1 - fraction)))
        for size, purpose in ((to_train_bytes, "train"), (validation.total_bytes, "validate")):
            if size < window_bytes:
                raise BadInputError(
                    "data.validation_fraction",
                    fraction,
                    f"leaves {size} of {text.total_bytes} bytes to {purpose} on, and one sample "
                    f"takes {window_bytes} (model.seq_len + 1)",
                )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy over next bytes, in nats. ``batch`` is ``[B, seq_len + 1]``."""
        return next_token_loss(model, batch)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The likeliest byte at each place after the first, ``[B, seq_len]``."""
        return likeliest_tokens(model, batch)

    def figures(self, loss: float) -> Mapping[str, float]:
        """The loss in bits, as a compressor would count it."""
        return {"bits_per_byte": loss / math.log(2)}

    def sample(self, model: nn.Module) -> str:
        """About 200 bytes that the model writes after a prompt; the same ones for the same weights."""
        assert isinstance(model, TransformerLM), "the bare module of build_model()"
        prompt = TEXT_PROMPT if self._data.path else PYTHON_PROMPT
        generator = torch.Generator().manual_seed(self._seed)
        written = generate(
            model,
            torch.tensor(list(prompt)),
            length=SAMPLE_BYTES,
            temperature=SAMPLE_TEMPERATURE,
            generator=generator,
        )
        return _printable(bytes(written.tolist()))


def _megabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:,.2f} MB"


def _printable(text: bytes) -> str:
    """Return ``text`` as a terminal may safely show it: unprintable characters become U+FFFD."""
    decoded = text.decode(errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded
    )


# ByteWindows: a text corpus as a map-style dataset of fixed-size windows of bytes. Reads
# through memory maps, opened where they are first needed and bounded in number; copies nothing
# but the windows it returns.

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
