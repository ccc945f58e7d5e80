"""What the last step was given, and whether it is still what was given. Never loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward takes: the dataset's samples at ``indices``, collated."""

    indices: tuple[int, ...]
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The last step's batches, and torch's count of in-place changes to each of their tensors."""

    step: int
    batches: list[MicroBatch]
    versions: tuple[int, ...] | None  # None: something in there cannot be told to be unchanged

    @classmethod
    def of(cls, step: int, batches: list[MicroBatch]) -> Delivered:
        """Note what is being given to ``step``."""
        return cls(step=step, batches=batches, versions=_versions(batches))

    def is_intact(self, step: int) -> bool:
        """Whether these are ``step``'s batches as they were delivered."""
        # INVARIANT same-bytes: a step that is redone sees the very samples of its first try.
        # Broken if: a task changes its batch in place and gets it again.
        # Guarded by: test_a_batch_changed_in_place_is_loaded_anew.
        known = step == self.step and self.versions is not None
        return known and self.versions == _versions(self.batches)


def _versions(batches: list[MicroBatch]) -> tuple[int, ...] | None:
    found: list[int] = []
    pending = [batch.batch for batch in batches]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            found.append(value._version)  # noqa: SLF001 - what autograd itself goes by
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif not isinstance(value, (int, float, complex, str, bytes, bool, type(None))):
            return None
    return tuple(found)
