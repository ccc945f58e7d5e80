"""GPUs as values: what there are, and which of them a variable leaves visible. Asks nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this machine; ``index`` is its tool's, ``memory`` is text (``143771 MiB``)."""

    index: int
    uuid: str
    name: str
    memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """GPUs in the order in which torch counts them; ``why_none`` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""
    is_surprising: bool = False  # a GPU could be expected here: people should hear of it
    is_unsupported: bool = False  # torch was built for GPUs that this runner cannot use


def visible(
    present: Sequence[Gpu], mask: str | None, *, variable: str = CUDA_VISIBLE
) -> VisibleGpus:
    """Apply such a variable as CUDA does: indices or UUID prefixes, up to the first bad."""
    if mask is None:
        return VisibleGpus(gpus=tuple(present))
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in mask.split(",")):
        gpu = _named(present, entry)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return VisibleGpus(
        gpus=tuple(chosen),
        why_none="" if chosen else f"{variable}={mask!r} hides every GPU",
    )


def _named(present: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in present if gpu.index == int(entry)), None)
    if entry.startswith("MIG-"):
        return Gpu(index=-1, uuid=entry, name="MIG slice", memory="")
    matches = [gpu for gpu in present if entry and gpu.uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None
