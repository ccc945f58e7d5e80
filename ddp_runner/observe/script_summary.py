"""The summary.json of a script's run: its attempts, and how the run ended. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ddp_runner.core.exits import RunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One start of all ranks.

    ``steps``: optimizer steps it made; ``seconds`` from its start to its end, ``first_step_s`` to the end
    of its first optimizer step, None where it made none. ``rank``, ``cause``, ``detail`` (a traceback,
    if there was one) and ``exit_code`` are of the rank that failed first; None and empty where none did.
    """

    attempt: int
    steps: int
    seconds: float
    first_step_s: float | None
    rank: int | None
    cause: str
    detail: str
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSummary:
    """What summary.json holds. ``steps``: optimizer steps of the newest attempt."""

    run_id: str
    status: RunStatus
    exit_code: int
    script: str
    arguments: tuple[str, ...]
    world_size: int
    steps: int
    wall_s: float
    attempts: tuple[AttemptRecord, ...]
    name: str = ""
    # Means and peaks by log.gpu_watch_s, of each GPU and each rank.
    gpus: Mapping[str, object] = field(default_factory=dict)
    rank_use: Mapping[str, object] = field(default_factory=dict)

    def to_record(self) -> dict[str, object]:
        """The content of summary.json."""
        return {**asdict(self), "status": self.status.value}
