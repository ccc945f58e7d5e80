"""Runs of a few steps in a scratch folder, for what looks for a setting: started, watched, ended."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from ddp_runner.cli.from_code.launch import launch
from ddp_runner.kernel.processes.memory_limits import container_limit, free_bytes
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.observe.format import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddp_runner.cli.parser import TrainArguments

_LOOK_S = 0.02
_SEARCH_S = 0.5  # between two looks at which processes there are
_INSIST_S = 0.3  # a second interrupt ends a run at once
_RANK = re.compile(r"ddp:rank(\d+)")
# What a run of a few steps has no use for, or would be ended by.
_OVERRIDES = (
    *("run.max_time=none", "run.target_loss=none", "run.audit=false", "data.preload=false"),
    *("run.early_stopping_patience=0", "run.early_stopping_min_delta=0"),
    *("optim.plateau_patience=0", "optim.plateau_min_delta=0", "optim.plateau_factor=0.5"),
    *("optim.plateau_cooldown=0", "optim.ema_start_step=0"),
    *(
        "log.trackers=",
        "log.profile=none",
        "log.page=false",
        "log.display=plain",
        "log.log_interval=1",
        "log.evaluate_interval=0",
    ),
    *("log.evaluate_every_steps=0", "log.evaluate_batches=1"),
    *("checkpoint.save_interval=0", "checkpoint.save_every_steps=0", "checkpoint.keep_every=0"),
    "checkpoint.after_save=none",
    *("recovery.explosion_window=0", "recovery.explosion_loss_max=none"),
    *("recovery.max_errors_per_epoch=1000000", "recovery.drill_at=none"),
    "recovery.require_exact=false",
)

Look = Callable[[psutil.Process], bool]


def refuse_ranks(arguments: TrainArguments, *, is_rank: bool) -> None:
    """Raise BadInputError where an outside launcher has started this process as a rank."""
    if is_rank:
        expected = "starts its ranks itself: start it without a launcher"
        raise BadInputError(arguments.instead, "", expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run that has ended. ``was_ended``: by who watched it."""

    exit_code: int
    summary: Mapping[str, Any]
    log_dir: Path
    output: str
    was_ended: bool

    @property
    def faults(self) -> tuple[str, ...]:
        """The kinds of its faults; that a rank was killed is one where it was by SIGKILL."""
        faults = self.summary.get("faults", ())
        return tuple(
            fault["kind"]
            for fault in faults
            if fault["kind"] != FaultKind.RANK_KILLED.value or "SIGKILL" in fault["cause"]
        )

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes of its faults, in words."""
        return tuple(fault["cause"] for fault in self.summary.get("faults", ()))

    @property
    def error(self) -> str:
        """Its error line, or how it ended."""
        lines = [line for line in self.output.splitlines() if "error: " in line]
        if lines:
            return lines[-1].partition("error: ")[2]
        ended = f"the run ended with exit code {self.exit_code}"
        return self.causes[-1] if self.causes else ended

    def show_failure(self) -> ExitCode:
        """Print its error line; return the exit code of the command that has made it."""
        print(printable(f"ddp_runner: error: {self.error}"), file=sys.stderr)
        is_refused = self.exit_code == ExitCode.BAD_USAGE
        return ExitCode.BAD_USAGE if is_refused else ExitCode.FAILED


def train(words: Sequence[str], *more: str, ranks: int, folder: Path, look: Look) -> Trial:
    """Train as ``words`` and ``more`` say, in ``folder``, until the end, or until ``look`` says so.

    ``look`` is called often, in a thread, with the run's own process. KeyboardInterrupt ends the run first.
    """
    log_dir = folder / "logs"
    arguments = [
        *words,
        *_OVERRIDES,
        f"--log-dir={log_dir}",
        f"--checkpoint-dir={folder / 'checkpoints'}",
        f"checkpoint.rescue_dir={folder / 'rescue'}",
        *more,
    ]
    output = io.StringIO()
    # Neither is a descriptor, so that the child's output comes through a pipe.
    with redirect_stdout(output), redirect_stderr(output), _watched(look) as is_ended:
        result = launch(nproc=ranks, arguments=arguments)
    was_ended = is_ended.is_set()
    if result.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED) and not was_ended:
        raise KeyboardInterrupt
    return Trial(
        exit_code=result.exit_code,
        summary=result.summary or {},
        log_dir=log_dir,
        output=output.getvalue(),
        was_ended=was_ended,
    )


def steps_of(log_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the records of each step in ``metrics.jsonl``: one for each rank, the newest if a step was repeated.

    Evaluations are left out.
    """
    found: dict[int, dict[int, dict[str, Any]]] = {}
    try:
        lines = (log_dir / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return {}
    for record in filter(None, map(_record, lines)):
        found.setdefault(record["step"], {})[record["rank"]] = record
    return {step: list(found[step].values()) for step in sorted(found)}


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:  # half a line, while it is written
        return None
    return record if "learning_rate" in record else None


@contextmanager
def _watched(look: Look) -> Iterator[threading.Event]:
    over, is_ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=_watch, args=(look, over, is_ended), name="watch")
    thread.start()
    try:
        yield is_ended
    finally:
        over.set()
        thread.join()


def _watch(look: Look, over: threading.Event, is_ended: threading.Event) -> None:
    """Thread: look at the run, and interrupt it until it is over once that is enough."""
    run: psutil.Process | None = None
    while not over.wait(_LOOK_S):
        try:
            if run is None or not run.is_running():
                run = next(iter(psutil.Process().children()), None)
            if run is None or not (look(run) or is_ended.is_set()):
                continue
            is_ended.set()
            run.send_signal(signal.SIGINT)
        except psutil.Error:  # it has just ended
            run = None
        over.wait(_INSIST_S)


class MemoryWatch:
    """Watches the host memory of a run's ranks, and ends them if one takes too much, before the machine suffers.

    ``limit_bytes``: of a rank, 0 for none. ``floor_bytes``: the memory that must stay free on the machine.
    """

    def __init__(self, *, limit_bytes: int, floor_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._floor_bytes = floor_bytes
        self._container = container_limit()
        self._ranks: dict[int, psutil.Process] = {}
        self._searched_s = 0.0
        self.peak_bytes = 0

    def look(self, run: psutil.Process) -> bool:
        """Look once; whether the ranks were ended."""
        now_s = time.monotonic()
        if now_s >= self._searched_s + _SEARCH_S:
            self._searched_s = now_s
            self._ranks = {one.pid: one for one in run.children() if _is_rank(one)}
        sizes = {pid: _resident(one) for pid, one in self._ranks.items()}
        if not sizes:
            return False
        most_bytes = max(sizes.values())
        self.peak_bytes = max(self.peak_bytes, most_bytes)
        is_over = 0 < self._limit_bytes < most_bytes
        if not is_over and free_bytes(self._container) >= self._floor_bytes:
            return False
        for process in self._ranks.values():  # the others grow as this one did
            with contextlib.suppress(psutil.Error):
                process.kill()
        return True


def _is_rank(process: psutil.Process) -> bool:
    try:
        return _RANK.fullmatch(process.name()) is not None
    except psutil.Error:
        return False


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
