"""The values by which a node starts the processes of a run. It asks for no more of the run than these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.kernel.wire.fork_specs import ForkKind, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """A run as the processes of one machine have it.

    ``kind`` and ``module``: of each rank's process. ``wanted``: for the zygote to import; ``environment``: of it, and so
    of every rank. ``settings``: their record. ``around``: by rank, the fields of ``Surroundings`` that follow from the plan;
    ``has_own_device``: by rank. ``store_port``: 0 for any. ``log_seal``: ends the time of each record. ``program``: a loop
    that attaches, and ``source`` what its file held at launch. ``shared``: names of memory that ranks share, by the
    field of ``Surroundings`` that leads to it; ``has_saver``: a process makes files of the copies there.
    ``shares_trouble``: what is injected into a disk is the saver's, too.
    """

    kind: ForkKind
    module: str
    wanted: str
    environment: Mapping[str, str] = field(repr=False)  # may hold secrets
    settings: dict[str, object]
    around: tuple[Mapping[str, Any], ...]
    has_own_device: tuple[bool, ...]
    ranks_per_node: int
    is_alone: bool  # no other machine has ranks of the run
    log_dir: Path
    store_port: int
    log_seal: str = field(repr=False)
    shared: Mapping[str, tuple[str, ...]]
    has_saver: bool
    shares_trouble: bool
    program: Program | None = None
    source: bytes = b""

    @property
    def world_size(self) -> int:
        """The number of ranks of the run, on all machines."""
        return len(self.around)
