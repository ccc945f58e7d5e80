"""What a step is given, each time once: its micro-batches, and copies of them. Never loads."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward takes: the dataset's samples at ``indices``, collated."""

    indices: tuple[int, ...]
    batch: Any


class NotCopiedError(Exception):
    """The batches hold something of which there is no copy; says what."""


def copied(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The same batches in other memory. Raises :class:`NotCopiedError`."""
    try:
        copies = copy.deepcopy([batch.batch for batch in batches])
    except Exception as error:  # whatever a type of the task's own raises
        lines = str(error).splitlines() or [""]
        raise NotCopiedError(f"{type(error).__name__}: {lines[0]}") from error
    return [
        MicroBatch(indices=batch.indices, batch=other)
        for batch, other in zip(batches, copies, strict=True)
    ]


class Ahead:
    """One step's batches that were loaded, and not given to anybody yet."""

    def __init__(self) -> None:
        self._step = -1
        self._batches: list[MicroBatch] = []

    def keep(self, step: int, batches: list[MicroBatch]) -> None:
        """They are ``step``'s."""
        self._step, self._batches = step, batches

    def drop(self) -> None:
        """Nobody will ask for them."""
        self._step, self._batches = -1, []

    def take(self, step: int) -> list[MicroBatch] | None:
        """``step``'s, which are gone then; None where there are none, or another step's."""
        if step != self._step:
            return None
        batches = self._batches
        self.drop()
        return batches
