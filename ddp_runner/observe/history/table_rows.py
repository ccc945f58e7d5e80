"""Rows of the tables about a run: its faults and repairs (and their marks on curves), its ranks and their GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_runner.kernel.rules.faults import rank_list
from ddp_runner.observe.format import byte_size, count, duration, percent, rate
from ddp_runner.observe.history.json_lines import epoch_s, number, whole

MARK_KINDS = ("fault", "repair", "save", "roll back", "injected", "stage", "start", "end")
ROWS_MAX = 5_000
MARKS_MAX = 20_000
_FOLLOWED_MAX = 200  # of one fault
_PLANS = {"GiveUp": "give up"}
_VICTIM = "collective_failed"
Columns = tuple[tuple[str, str], ...]
RANK_COLUMNS: Columns = (
    ("rank", "rank"),
    ("node", "node"),
    ("state", "state"),
    ("step", "step"),
    ("phase", "phase"),
    ("device", "device"),
    ("memory", "memory"),
    ("loaders", "loaders"),
    ("cores", "cores"),
    ("samples", "samples/s"),
    ("wait", "data wait"),
    ("own", "own time a step"),
    ("slow", "slow"),
)
GPU_COLUMNS: Columns = (
    ("gpu", "GPU"),
    ("ranks", "ranks"),
    ("use", "use"),
    ("memory", "memory"),
    ("temperature", "temperature"),
    ("power", "power"),
    ("clock", "clock"),
    ("said", "age"),
    ("trouble", "throttled, problems"),
)
_OLD_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something to be seen on the curves, at a step and a time (seconds since 1970)."""

    kind: str
    step: int
    at_s: float
    text: str


@dataclass(slots=True, kw_only=True)
class FaultRow:
    """A fault with what it led to. ``followed``: a line for each event that names it as its cause."""

    id: int
    at_s: float
    kind: str
    rank: int
    step: int
    phase: str
    text: str
    origin: str
    detail: str
    generation: int = 0
    host: str = ""
    is_tolerated: bool = False
    all_ranks_dead: bool = False
    outcome: str = "being repaired"
    plan: str = ""
    repair_s: float | None = None
    steps_lost: int = 0
    victims: tuple[int, ...] = ()
    followed: list[str] = field(default_factory=list)
    others: dict[tuple[int, str], Mapping[str, Any]] = field(
        default_factory=dict
    )  # of its incident

    @property
    def said(self) -> str:
        """Return the kind of the fault, its rank and phase, its cause and its victims, in words."""
        who = f"rank {self.rank}" if self.rank >= 0 else "all ranks"
        who += f" on {self.host}" if self.host else ""
        phase = f" in {self.phase}" if self.phase else ""
        victims = f"; lost their peer: {rank_list(self.victims)}" if self.victims else ""
        return f"{self.kind}, {who}{phase}; cause: {self.origin or 'unknown'}{victims}"

    @property
    def caption(self) -> str:
        """Return the plan, if there is one, and the outcome."""
        return f"{self.plan}; {self.outcome}" if self.plan else self.outcome

    @property
    def details(self) -> list[tuple[str, str]]:
        """The written details, each with its source: tracebacks, and the stacks of ranks that were killed."""
        found = [(self.text, self.detail)] if self.detail else []
        for event in self.others.values():
            detail = str(event.get("detail", ""))
            if detail and all(detail != one for _, one in found):
                found.append((str(event.get("text", "")), detail))
        return found


@dataclass(slots=True, kw_only=True)
class FaultRows:
    """Fed with the events in their order, of all launches."""

    rows: list[FaultRow] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    step: int = 0  # the newest that an event has named
    launches: int = 0
    started_s: float | None = None  # of the newest launch
    resumed_step: int = 0  # of the newest launch, too
    command: tuple[str, ...] = ()
    _of_cause: dict[int, FaultRow] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event."""
        at_s = epoch_s(event.get("utc")) or 0.0
        self.step = max(self.step, whole(event.get("step")))
        row = self._of_cause.get(whole(event.get("cause")))
        match event.get("event"):
            case "run_begins":
                self._begins(event, at_s)
            case "fault" | "fault_tolerated":
                self._fault(event, at_s, row)
            case "plan":
                self._plan(event, row)
            case "repaired" | "repaired_in_place":
                self._repaired(event, at_s, row)
            case "checkpoint_saved":
                step = whole(event.get("step"))
                self._mark("save", step, at_s, f"checkpoint of step {count(step)}")
            case "injected":
                text = f"--inject {event.get('kind')} into rank {event.get('rank')}"
                self._mark("injected", whole(event.get("step")), at_s, text)
            case "stage_begins":
                first = whole(event.get("first_step"), whole(event.get("step"), self.step))
                self._mark("stage", first, at_s, f"stage {event.get('stage')}")
            case "run_ends":
                how = str(event.get("status")).replace("_", " ")
                self._mark("end", self.step, at_s, f"ended: {how}")
        if row is not None and len(row.followed) < _FOLLOWED_MAX:
            row.followed.append(f"+{duration(at_s - row.at_s)}  {as_line(event)}")

    def _mark(self, kind: str, step: int, at_s: float, text: str) -> None:
        if len(self.marks) >= MARKS_MAX:
            del self.marks[: MARKS_MAX // 10]
        self.marks.append(Mark(kind=kind, step=max(0, step), at_s=at_s, text=text))

    def _begins(self, event: Mapping[str, Any], at_s: float) -> None:
        self.launches += 1
        self.started_s = at_s
        words = event.get("command")
        self.command = tuple(map(str, words)) if isinstance(words, list) else ()
        self.step = self.resumed_step = resumed = whole(event.get("resumed_step"), 0)
        self._mark("start", resumed, at_s, f"resumed at step {resumed}" if resumed else "started")

    def _fault(self, event: Mapping[str, Any], at_s: float, row: FaultRow | None) -> None:
        if row is not None:  # of the same incident
            row.others[_who(event)] = event
            if row.kind == _VICTIM:
                self._blame(row, event)
            return
        is_tolerated = event.get("event") == "fault_tolerated"
        found = FaultRow(
            id=whole(event.get("id")),
            at_s=at_s,
            kind=str(event.get("kind", "")),
            rank=whole(event.get("rank")),
            step=whole(event.get("step")),
            phase=str(event.get("phase", "")),
            text=str(event.get("text", "")),
            origin=str(event.get("origin", "")),
            detail=str(event.get("detail", "")),
            generation=whole(event.get("generation"), 0),
            host=str(event.get("host", "")),
            is_tolerated=is_tolerated,
        )
        if is_tolerated:
            found.outcome = f"no repair needed: {event.get('action', '')}".rstrip(": ")
        if len(self.rows) >= ROWS_MAX:
            self._of_cause.pop(self.rows.pop(0).id, None)
        self.rows.append(found)
        self._of_cause[found.id] = found
        self._mark("fault", found.step, at_s, found.text)

    def _blame(self, row: FaultRow, event: Mapping[str, Any]) -> None:
        """The row is of that fault: who noticed first may only have lost its peer."""
        was = row.text
        row.kind, row.rank = str(event.get("kind", "")), whole(event.get("rank"))
        row.step = whole(event.get("step"), row.step)
        for name in ("phase", "text", "origin", "detail", "host"):
            setattr(row, name, str(event.get(name, "")))
        for place in range(len(self.marks) - 1, -1, -1):
            mark = self.marks[place]
            if mark.at_s < row.at_s:
                break
            if (mark.kind, mark.at_s, mark.text) == ("fault", row.at_s, was):
                self.marks[place] = replace(mark, step=max(0, row.step), text=row.text)

    def _plan(self, event: Mapping[str, Any], row: FaultRow | None) -> None:
        if row is None:
            return
        culprit = row.others.get((whole(event.get("culprit"), row.rank), str(event.get("kind"))))
        if culprit is not None and _who(culprit) != (row.rank, row.kind):
            self._blame(row, culprit)
        name = str(event.get("plan", ""))
        row.all_ranks_dead = event.get("all_ranks_dead") is True
        row.victims = _ranks(event, "victims")
        replaced, dropped = _ranks(event, "replaced"), _ranks(event, "dropped")
        parts = [
            f"replace {rank_list(replaced)}" if replaced else "",
            f"go on without {rank_list(dropped)}" if dropped else "",
        ]
        said = ", ".join(part for part in parts if part)
        row.plan = said or _PLANS.get(name, "form again")
        if name == "GiveUp":
            row.outcome = "gave up"

    def _repaired(self, event: Mapping[str, Any], at_s: float, row: FaultRow | None) -> None:
        lost, seconds = whole(event.get("steps_lost"), 0), number(event.get("seconds"))
        named = whole(event.get("step"))  # where training goes on
        step = self.step if named < 0 else named + lost
        what = str(event.get("action") or "repaired")
        if row is not None:
            row.repair_s, row.steps_lost = seconds, lost
            step = row.step if named < 0 else step
            row.outcome = what if seconds is None else f"{what} in {duration(seconds)}"
            if lost:
                row.outcome += f", {count(lost)} steps again"
        of = "" if row is None else f": {row.text}"
        if lost:
            self._mark("roll back", step - lost, at_s, f"{count(lost)} steps are done again{of}")
        self._mark("repair", step - lost, at_s, f"{what} after {duration(seconds or 0)}{of}")


def _who(event: Mapping[str, Any]) -> tuple[int, str]:
    return whole(event.get("rank")), str(event.get("kind"))


def _ranks(event: Mapping[str, Any], key: str) -> tuple[int, ...]:
    found = event.get(key)
    return tuple(map(whole, found)) if isinstance(found, list) else ()


_HEAD = ("id", "utc", "mono_s", "event", "cause", "detail")


def as_line(event: Mapping[str, Any]) -> str:
    """An event as one line: its name, and what it says."""
    name = str(event.get("event", "")).replace("_", " ")
    said = [
        f"{key} {value}"
        for key, value in event.items()
        if key not in _HEAD and value not in (None, "", [], False)
    ]
    return f"{name}: {', '.join(said)}" if said else name


def rank_rows(
    ranks: Iterable[Mapping[str, Any]],
    *,
    own_s: Mapping[int, float],
    slow: Mapping[int, float],
) -> list[dict[str, Any]]:
    """A row a rank; what a run does not say is a dash. ``own_s``: own time a step; ``slow``: how many times the others'."""
    return [_rank(rank, own_s, slow) for rank in ranks]


def shown_columns(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns without those that are empty in every row."""
    return tuple(
        (key, label) for key, label in columns if any(row[key] not in ("-", "") for row in rows)
    )


def _rank(rank: Mapping[str, Any], own: Mapping[int, float], slow: Mapping[int, float]) -> dict[str, Any]:  # fmt: skip
    number_ = whole(rank.get("rank"), 0)
    phase = str(rank.get("building") or rank.get("phase", ""))
    age_s = number(rank.get("phase_age_s")) or 0.0
    own_s = own.get(number_)
    return {
        "rank": number_,
        "node": whole(rank.get("node"), 0) or "-",
        "state": str(rank.get("state", "")),
        "step": _said(rank, "step", lambda value: count(int(value))),
        "phase": f"{phase} {duration(age_s)}" if age_s >= 2 else phase,
        "device": str(rank.get("device", "")),
        "memory": _said(rank, "rss_bytes", byte_size),
        "loaders": _said(rank, "loader_bytes", byte_size),
        "cores": _said(rank, "cpu_share", rate),
        "samples": _said(rank, "samples_per_s", rate),
        "wait": _said(rank, "data_wait_share", percent),
        "own": "-" if own_s is None else f"{own_s * 1e3:.1f} ms",
        "slow": f"{slow[number_]:.1f} times the others" if number_ in slow else "",
    }


def gpu_rows(gpus: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a GPU that ranks compute on."""
    rows = []
    for gpu in gpus:
        node, index = whole(gpu.get("node"), 0), whole(gpu.get("index"), 0)
        age_s = number(gpu.get("age_s"))
        rows.append(
            {
                "id": f"{node}:{index}",
                "gpu": f"{f'node {node}, ' if node else ''}{index} {gpu.get('name') or ''}".strip(),
                "ranks": _listed(gpu.get("ranks")),
                "use": _said(gpu, "use", percent),
                "memory": _of_total(gpu, "memory_used_bytes", "memory_total_bytes", byte_size),
                "temperature": _said(gpu, "temperature_c", lambda value: f"{value:.0f} °C"),
                "power": _of_total(gpu, "power_w", "power_limit_w", lambda value: f"{value:.0f} W"),
                "clock": _said(gpu, "clock_mhz", lambda value: f"{value:.0f} MHz"),
                "said": "-" if age_s is None or age_s < _OLD_S else f"{duration(age_s)} old",
                "trouble": ", ".join(
                    one for key in ("throttling", "problems") if (one := _listed(gpu.get(key)))
                ),
            }
        )
    return rows


def _said(record: Mapping[str, Any], key: str, form: Any) -> str:
    value = number(record.get(key))
    is_none = value is None or (form is byte_size and not value)  # of a process that has ended
    return "-" if is_none else str(form(value))


def _of_total(record: Mapping[str, Any], key: str, total: str, form: Any) -> str:
    used = _said(record, key, form)
    return used if record.get(total) is None else f"{used} of {_said(record, total, form)}"


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else ""
