"""The summary.json of a script's run, its attempts and how it ended, and the report on that. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.system.run_files import from_json, read_small
from ddp_runner.observe.format import counted, duration
from ddp_runner.observe.summary import OtherReport

_LABEL_COLUMNS = 12
_FAULTS_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One start of all ranks.

    ``steps``: optimizer steps it made; ``seconds`` from its start to its end, ``first_step_s`` to the end
    of its first optimizer step, None where it made none. ``rank``, ``cause``, ``detail`` (a traceback,
    if there was one) and ``exit_code`` are of the rank that failed first; None and empty where none did.
    ``host``: its machine's name, where there are several.
    """

    attempt: int
    steps: int
    seconds: float
    first_step_s: float | None
    rank: int | None
    cause: str
    detail: str
    exit_code: int | None
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSummary:
    """The content of summary.json. ``steps``: optimizer steps of the newest attempt."""

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

    @property
    def called(self) -> str:
        """Name and id, as people are shown them."""
        return f"{self.name} ({self.run_id})" if self.name else self.run_id

    def to_record(self) -> dict[str, object]:
        """The content of summary.json."""
        return {**asdict(self), "status": self.status.value}

    def with_use(
        self, *, gpus: Mapping[str, object], rank_use: Mapping[str, object]
    ) -> ScriptSummary:
        """Return the same with what GPUs and ranks have used."""
        return replace(self, gpus=gpus, rank_use=rank_use)


def read_script_summary(path: Path) -> ScriptSummary | None:
    """Read ``path`` back; None where it is of no script. Raises OSError, or ValueError where it cannot be understood."""
    record = from_json(read_small(path))
    if not isinstance(record, dict) or "script" not in record:
        return None
    try:
        known = {f.name: record[f.name] for f in fields(ScriptSummary) if f.name in record}
        known["status"] = RunStatus(known["status"])
        known["arguments"] = tuple(known["arguments"])
        known["attempts"] = tuple(AttemptRecord(**one) for one in known["attempts"])
        return ScriptSummary(**known)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a script's summary: {error}") from error


def read(path: Path) -> OtherReport | None:
    """Return the report; None where the summary is of no script. Raises OSError and ValueError."""
    summary = read_script_summary(path)
    return None if summary is None else OtherReport("a script", tuple(_lines(summary)))


def _lines(summary: ScriptSummary) -> Iterator[str]:
    """Yield what is known: a script has its own checkpoints, so nothing is known of its weights."""
    attempts = len(summary.attempts)
    newest = f" in the newest of {attempts} attempts" if attempts > 1 else ""
    failed = [one for one in summary.attempts if one.cause]
    rows = (
        ("run", summary.called),
        ("status", f"{summary.status.words} (exit {summary.exit_code})"),
        ("script", summary.script),
        (
            "trained",
            f"{counted(summary.steps, 'optimizer step')} on {counted(summary.world_size, 'rank')}{newest}",
        ),
        ("wall time", duration(summary.wall_s)),
        ("faults", str(len(failed))),
    )
    yield from (f"{name:<{_LABEL_COLUMNS}}{value}" for name, value in rows)
    for one in failed[:_FAULTS_SHOWN_MAX]:
        who = "" if one.rank is None or one.cause.startswith("rank ") else f"rank {one.rank}: "
        who = f"{one.host}: {who}" if one.host else who
        yield (
            f"  attempt {one.attempt}  {who}{one.cause}, after {counted(one.steps, 'optimizer step')}"
            f" in {duration(one.seconds)}"
        )
    if len(failed) > _FAULTS_SHOWN_MAX:
        yield f"  and {len(failed) - _FAULTS_SHOWN_MAX} more in summary.json"
