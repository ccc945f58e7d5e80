"""Reads a run from its log folder: its state, curves, faults and timeline. Never raises for a file."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from ddp_runner.config.fields import STAGES, known_fields
from ddp_runner.config.stage_list import own_settings
from ddp_runner.config.usual import is_usual
from ddp_runner.kernel.rules.lifecycle import RunState
from ddp_runner.kernel.rules.secrets import masked
from ddp_runner.kernel.system.run_files import from_json, is_regular, read_small
from ddp_runner.observe.format import count, duration, figure, percent, printable, rate
from ddp_runner.observe.history.json_lines import GrowingLines, number, opened, read_at, whole
from ddp_runner.observe.history.metrics_history import MetricsHistory
from ddp_runner.observe.history.table_rows import FaultRow, FaultRows
from ddp_runner.observe.history.timeline import Timeline
from ddp_runner.system.run_holder import holder_of

ROOT = "~"  # what the folder itself is called; a browser would drop a dot from an address
RECORDS = ("status.json", "summary.json", "events.jsonl")
_ENDED = (RunState.DONE.value, RunState.FAILED.value)
STACKS_OF_MAX = 16  # ranks
EVALUATED_SHOWN_MAX = 4
_READ_AGAIN_S = 0.2  # however many look on
_BEATS_S = 5.0  # a status of another machine's run that is newer is of a live one
_SETTINGS_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStanding:
    """The status of a run. ``what``: running, recovering, ..., completed, failed, lost."""

    name: str
    what: str
    is_live: bool
    pid: int
    step: int
    max_steps: int
    loss: float | None
    samples_per_s: float | None
    eta_s: float | None
    elapsed_s: float | None
    faults: int
    goodput: float | None
    world_size: int
    title: str
    doing: str = ""
    ranks: tuple[Mapping[str, Any], ...] = ()
    gpus: tuple[Mapping[str, Any], ...] = ()
    stage: str = ""
    time_s: Mapping[str, Any] = field(default_factory=dict)  # where the time went
    stragglers: Mapping[int, float] = field(
        default_factory=dict
    )  # how many times as slow as the others
    inexact_reasons: tuple[str, ...] = ()
    is_script: bool = False  # of whose weights nothing is known
    evaluated: Mapping[str, float] = field(default_factory=dict)  # the newest, by name

    @property
    def shown(self) -> dict[str, str]:
        """Return the known figures as people are shown them, by name; those of the newest evaluation follow the loss."""
        total = f" / {count(self.max_steps)}" if self.max_steps else ""
        evaluated = list(self.evaluated.items())[:EVALUATED_SHOWN_MAX]
        known = {
            "step": f"{count(self.step)}{total}",
            "loss": None if self.loss is None else figure(self.loss),
            **{name.replace("_", " "): figure(value) for name, value in evaluated},
            "samples/s": None if self.samples_per_s is None else rate(self.samples_per_s),
            "elapsed": None if self.elapsed_s is None else duration(self.elapsed_s),
            "time left": None if self.eta_s is None else duration(self.eta_s),
            "faults": count(self.faults),
            "goodput": None if self.goodput is None else percent(self.goodput),
            "ranks": count(self.world_size),
        }
        return {name: text for name, text in known.items() if text is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """A setting of the run, and whether somebody has set it to what it is not by itself."""

    key: str
    value: object
    default: object = field(compare=False)
    differs: bool


class RunHistory:
    """Reads one folder. One thread at a time reads; who comes meanwhile waits for it."""

    def __init__(self, folder: Path, *, name: str = "") -> None:
        self.folder = folder
        self.name = name or folder.name
        self.metrics = MetricsHistory(folder / "metrics.jsonl")
        self.faults = FaultRows()
        self.timeline = Timeline()
        self.status: Mapping[str, Any] = {}
        self.summary: Mapping[str, Any] = {}
        self.version = 0  # rises with each change that a reader could see in a figure
        self._events = GrowingLines(folder / "events.jsonl")
        self._read_s = float("-inf")
        self._lock = threading.Lock()
        self.state = self._state()

    @property
    def is_due(self) -> bool:
        """True if a read would check the files again."""
        return time.monotonic() - self._read_s >= _READ_AGAIN_S

    def read(self) -> None:
        """Take in what the run has written since."""
        with self._lock:
            if not self.is_due:
                return
            self.read_status()
            has_new = self.metrics.read()
            while (new := self._events.read()).records:
                if new.is_fresh:
                    self.faults, self.timeline = FaultRows(), Timeline()
                for event in new.records:
                    self.faults.add(event)
                    self.timeline.add(event)
                has_new = True
            self.version += has_new
            self._read_s = time.monotonic()

    def read_status(self) -> None:
        """Read only the run's status: for a list of many runs."""
        self.status = _record(self.folder / "status.json")
        self.summary = _record(self.folder / "summary.json")
        self.state = self._state()

    def settings(self) -> list[SettingRow]:
        """Return the settings of the newest launch; chosen ones come first.

        A stage's own settings are named ``stages.NAME.section.name``, and have no secrets.
        """
        try:
            text = read_small(self.folder / "config.yaml", bytes_max=_SETTINGS_BYTES_MAX)
            sections = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return []
        rows: list[SettingRow] = []
        found: dict[str, object] = {}
        for section, values in sections.items() if isinstance(sections, dict) else ():
            if section == STAGES:
                rows += _stage_rows(values)
            for name, value in values.items() if isinstance(values, dict) else ():
                found[f"{section}.{name}"] = value
        rows += [_row(key, found) for key in found]
        return sorted(rows, key=lambda row: (not row.differs, row.key))

    def checkpoint_folder(self) -> Path | None:
        """Return the checkpoint folder by the run's settings; a relative one is resolved where the run started."""
        found = {row.key: row.value for row in self.settings()}
        saved, logs = found.get("run.checkpoint_dir"), found.get("run.log_dir")
        if not isinstance(saved, str) or not isinstance(logs, str):
            return None
        path, own = Path(saved), self.folder.resolve()
        if path.is_absolute():
            return path
        parts = Path(logs).parts
        is_below = not Path(logs).is_absolute() and own.parts[-len(parts) :] == parts
        return own.parents[len(parts) - 1] / path if is_below else None

    def log_names(self) -> list[str]:
        """The text logs in the folder: those of the ranks, then the others."""
        try:
            names = [path.name for path in self.folder.iterdir() if path.suffix == ".log"]
        except OSError:
            return []
        found = [name for name in names if not name.startswith(".")]
        return sorted(
            (name for name in found if is_regular(self.folder / name)),
            key=lambda name: (not name.startswith("rank_"), len(name), name),
        )

    def stacks(self, row: FaultRow) -> list[tuple[str, str]]:
        """Return the ranks' stacks when that fault was noticed, by their logs, with the log's name."""
        known = "\n".join(detail for _, detail in row.details)
        first = f"rank_{row.rank}.log"
        names = [name for name in self.log_names() if name.startswith("rank_")]
        names.sort(key=lambda name: name != first)
        found = []
        for name in names[:STACKS_OF_MAX]:
            text = stacks_in(self.folder / name, row.at_s)
            if text and text not in known:
                found.append((name, text))
        return found

    @property
    def nodes(self) -> dict[int, int]:
        """The machine of each rank, as far as it is known."""
        return {whole(one.get("rank")): whole(one.get("node"), 0) for one in self.state.ranks}

    def _state(self) -> RunStanding:
        status, summary = self.status, self.summary
        pid = whole(status.get("pid"), 0)
        what = str(status.get("state", "unknown"))
        is_live = what not in _ENDED and bool(status) and self._is_held(pid)
        if not status or (what in _ENDED and summary):
            what = str(summary.get("status", what)).replace("_", " ")
        elif not is_live and what not in _ENDED:
            what = "lost"
        reasons = status.get("inexact_reasons") or summary.get("inexact_reasons")
        account = status if is_live else summary or status
        time_s = account.get("time_s")
        return RunStanding(
            name=str(status.get("name") or summary.get("name") or self.name),
            what=what,
            is_live=is_live,
            pid=pid,
            step=whole(status.get("step", summary.get("steps")), 0),
            max_steps=whole(status.get("max_steps", summary.get("steps")), 0),
            loss=number(status.get("loss", summary.get("final_loss"))),
            samples_per_s=number(status.get("samples_per_s")),
            eta_s=number(status.get("eta_s")) if is_live else None,
            elapsed_s=number(status.get("elapsed_s", summary.get("wall_s"))),
            faults=whole(status.get("faults_total"), len(summary.get("faults", ()))),
            goodput=number(account.get("goodput")),
            world_size=whole(status.get("world_size", summary.get("world_size")), 0),
            title=str(status.get("title", "")),
            doing=str(status.get("doing", "")),
            ranks=_records(status.get("ranks")),
            gpus=_records(status.get("gpus")),
            stage=str(status.get("stage") or ""),
            time_s=time_s if isinstance(time_s, dict) else {},
            stragglers=_by_rank(status.get("stragglers") or summary.get("stragglers")),
            inexact_reasons=tuple(map(str, reasons)) if isinstance(reasons, list) else (),
            evaluated=_figures(status.get("evaluated") or summary.get("figures")),
            is_script="script" in summary or (self.folder / "attempt_0").is_dir(),
        )

    def _is_held(self, pid: int) -> bool:
        """Return True if its supervisor lives: it holds the folder, or writes its status on another machine."""
        if pid > 0 and holder_of(self.folder) == pid:
            return True
        return time.time() - modified_s(self.folder / "status.json") < _BEATS_S


def _stage_rows(entries: object) -> Iterator[SettingRow]:
    stages = own_settings(entries)
    if stages:
        names = [name for name, _ in stages]
        yield SettingRow(key=STAGES, value=tuple(names), default=None, differs=True)
    for name, own in stages:
        for key, value in own.items():
            yield _row(key, {key: masked(value, key)}, below=f"{STAGES}.{name}.")


def _row(key: str, values: Mapping[str, object], *, below: str = "") -> SettingRow:
    """``values``: of the run, by dotted key: what is usual depends on its task."""
    spec, value = known_fields().get(key), values[key]
    shown = tuple(value) if isinstance(value, list) else value
    differs = not is_usual(key, values)
    default = shown if not differs else None if spec is None else spec.default
    return SettingRow(key=f"{below}{key}", value=shown, default=default, differs=differs)


def modified_s(path: Path) -> float:
    """When it was written, as seconds since 1970; 0 where it is not there."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def runs_below(root: Path) -> dict[str, Path]:
    """The folders with a run in them by name: ``root`` itself (as ROOT), and those in it. Links are left out."""
    found = {ROOT: root} if _holds_a_run(root) else {}
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return found
    return found | {path.name: path for path in folders if _holds_a_run(path)}


def _holds_a_run(folder: Path) -> bool:
    return any(is_regular(folder / name) for name in RECORDS)


def _records(value: object) -> tuple[Mapping[str, Any], ...]:
    found = value if isinstance(value, list) else ()
    return tuple(one for one in found if isinstance(one, dict))


def _figures(value: object) -> dict[str, float]:
    found = value.items() if isinstance(value, dict) else ()
    known = {str(name): number(one) for name, one in found}
    return {name: one for name, one in known.items() if one is not None}


def _by_rank(value: object) -> dict[int, float]:
    found = value.items() if isinstance(value, dict) else ()
    known = {str(rank): number(one) for rank, one in found}
    return {int(rank): one for rank, one in known.items() if rank.isdecimal() and one is not None}


def _record(path: Path) -> Mapping[str, Any]:
    try:
        found = from_json(read_small(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# The stacks that ranks wrote into their logs around a moment: a fault's. Reads; never raises
# for a file.

CHARACTERS_MAX = 20_000  # of one log
_BEFORE_S, _AFTER_S = (
    2.0,
    5.0,
)  # stacks are asked for when a fault is noticed, and again before a kill
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3,} ")
_BEGINS = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ ")
_GOES_ON = ("  File ", "  <", "  ...")
_NEAR_BYTES = 1024 * 1024
_READ_BYTES = 4 * 1024 * 1024
_LOOK_BYTES = 64 * 1024


def stacks_in(path: Path, at_s: float) -> str:
    """Return the stacks in one log. ``at_s``: seconds since 1970."""
    with opened(path) as descriptor:
        if descriptor is None:
            return ""
        begin = _before(descriptor, at_s - _BEFORE_S)
        data = read_at(descriptor, begin, _READ_BYTES)
    return stacks_around(data.decode(errors="replace").splitlines(), at_s)


def stacks_around(lines: Iterable[str], at_s: float) -> str:
    """The stacks between records of which one may be of that moment: they have no time of their own."""
    kept: list[str] = []
    block: list[str] = []
    before_s = float("-inf")

    def close(after_s: float) -> None:
        if before_s <= at_s + _AFTER_S and after_s >= at_s - _BEFORE_S:
            kept.extend(block)
        block.clear()

    for line in lines:
        stamp_s = _stamp_s(line)
        if stamp_s is not None:
            close(stamp_s)
            before_s = stamp_s
            if stamp_s > at_s + _AFTER_S:
                break
        elif _BEGINS.match(line) or (block and line.startswith(_GOES_ON)):
            block.append(line)
    close(float("inf"))
    return printable("\n".join(kept)[:CHARACTERS_MAX])


def _stamp_s(line: str) -> float | None:
    if not _STAMP.match(line):
        return None
    try:
        return datetime.fromisoformat(line[:23]).timestamp()  # logs have the time of their machine
    except (ValueError, OverflowError):
        return None


def _before(descriptor: int, at_s: float) -> int:
    """A place in the file before whose records are older; their stamps rise."""
    low, high = 0, os.fstat(descriptor).st_size
    while high - low > _NEAR_BYTES:
        middle = (low + high) // 2
        text = read_at(descriptor, middle, _LOOK_BYTES).decode(errors="replace")
        found = (one for line in text.split("\n")[1:] if (one := _stamp_s(line)) is not None)
        if next(found, float("inf")) < at_s:
            low = middle
        else:
            high = middle
    return max(0, low - _LOOK_BYTES)
