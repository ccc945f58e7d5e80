"""Starts those that are compared under faults, harms them, and times how they come back.

They train the same model at the same pace (``paced.py``): ``ddp_runner train``, and ``plain_restart.py``
under ``torchrun --max-restarts`` or ``ddp_runner run``. All is measured from outside, by the clock that both share: a line
that rank 0 appends for every step that it has committed. Not a benchmark itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from paced import TROUBLE_NAME

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[1]
SAVE_EVERY = 25
BATCH_SIZE = 8
START_TIMEOUT_S = 120.0
POLL_S = 0.001
_TAIL_BYTES = 4096


class Harm(Enum):
    """What is done to a rank, or to all of them at one moment."""

    KILL = "SIGKILL"
    ALL = "SIGKILL of all ranks"
    STOP = "SIGSTOP"
    RAISE = "exception"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained. ``timeout_s`` is the plain script's group timeout; 0 leaves torch's own."""

    world: int
    state_mb: float
    pace_s: float = 0.016
    timeout_s: float = 0.0
    tensors: int = 0  # of so many parameters, if not as they come


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The newest committed step; ``generation`` counts restarts or re-formings."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comeback:
    """From a fault to ``first_s``, the next step committed after it, and to ``beyond_s``, the first
    step that had not been committed before. ``steps_redone`` lie between the two."""

    first_s: float
    beyond_s: float
    steps_redone: int


class NoComebackError(RuntimeError):
    """No step was committed within the time."""


class Faulted(ABC):
    """One started run in a folder of its own; a context manager that leaves nothing behind."""

    name = ""
    progress_name = ""
    harms_at_most = 1000  # in one run

    def __init__(self, job: Job) -> None:
        self.job = job
        self.folder = Path(tempfile.mkdtemp(prefix="ddp_bench_"))
        self._progress = self.folder / self.progress_name
        self._said = (self.folder / "said.txt").open("wb")
        self.process = psutil.Popen(
            self.command(),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.variables()},
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @abstractmethod
    def command(self) -> list[str]:
        """What starts it."""

    def variables(self) -> dict[str, str]:
        """Environment variables that it needs."""
        return {}

    @abstractmethod
    def pid_of(self, rank: int) -> int:
        """The process of a rank that trains."""

    def mark(self) -> Mark:
        """How far it is; step 0 before the first."""
        with contextlib.suppress(FileNotFoundError, ValueError), self._progress.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
            line = json.loads(whole)
            return Mark(step=line["step"], generation=line["generation"])
        return Mark(step=0, generation=-1)

    def wait_past(self, step: int, *, generation: int = -1, timeout_s: float) -> float:
        """The moment at which a step after ``step``, of a later generation, was committed.

        Raises NoComebackError when the time is over or the run has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        size_before = -1
        while time.monotonic() < deadline_s:
            now_s = time.monotonic()
            size = self._progress.stat().st_size if self._progress.exists() else 0
            if size != size_before:
                size_before = size
                mark = self.mark()
                if mark.step > step and mark.generation > generation:
                    return now_s
            if self.process.poll() is not None:
                raise NoComebackError(f"{self.name} ended:\n{self.said()[-3000:]}")
            time.sleep(POLL_S)
        raise NoComebackError(f"{self.name}: no step within {timeout_s:g} s")

    def living_pid(self, rank: int) -> int:
        """The process of a rank, once it lives: with some contenders the others train on before it is back.

        Raises NoComebackError where it does not live in time.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self.pid_of(rank))
                if process.status() != psutil.STATUS_ZOMBIE:
                    return process.pid
            time.sleep(POLL_S)
        raise NoComebackError(f"{self.name}: rank {rank} has no process")

    def harm(self, harm: Harm, rank: int) -> float:
        """Harm a rank; returns the moment at which it happened. Raises NoComebackError if there is no such rank."""
        if harm is Harm.ALL:
            pids = [self.pid_of(one) for one in range(self.job.world)]
            now_s = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return now_s
        if harm is not Harm.RAISE:
            pid = self.living_pid(rank)
            now_s = time.monotonic()
            os.kill(pid, signal.SIGKILL if harm is Harm.KILL else signal.SIGSTOP)
            return now_s
        trouble = self.folder / f"{TROUBLE_NAME}{self.living_pid(rank)}"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        trouble.touch()
        while trouble.exists():
            if time.monotonic() > deadline_s:
                raise NoComebackError(f"{self.name}: rank {rank} takes no step")
            time.sleep(POLL_S / 4)
        return time.monotonic()

    def comeback(self, harm: Harm, rank: int, *, timeout_s: float) -> Comeback:
        """Harm a rank and time the recovery. Raises NoComebackError."""
        at_s = self.harm(harm, rank)
        before = self.mark()
        first_s = self.wait_past(0, generation=before.generation, timeout_s=timeout_s)
        resumed = self.mark().step
        beyond_s = (
            first_s if resumed > before.step else self.wait_past(before.step, timeout_s=timeout_s)
        )
        return Comeback(
            first_s=first_s - at_s,
            beyond_s=beyond_s - at_s,
            steps_redone=max(0, before.step - resumed + 1),
        )

    def said(self) -> str:
        """What it printed."""
        return (self.folder / "said.txt").read_text(errors="replace")

    def end(self) -> None:
        """End it, however far it is, and remove its folder."""
        if self.process.poll() is None:
            tree = [*self.process.children(recursive=True), self.process]
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(tree, timeout=20)
        self._said.close()
        shutil.rmtree(self.folder)


class Ours(Faulted):
    """``ddp_runner train``, with its defaults but for the paced task and a large budget."""

    name = "ddp_runner"
    progress_name = "logs/audit_rank_0.jsonl"

    def command(self) -> list[str]:
        job = self.job
        return [
            *(sys.executable, "-m", "ddp_runner", "train", "--cpu", "-n", str(job.world)),
            *("--task", f"{ROOT / 'benchmarks' / 'paced.py'}:Paced", "--audit"),
            *("-l", "logs", "-c", "checkpoints", "--max-steps", "1000000"),
            *(f"task.state_mb={job.state_mb}", f"task.tensors={job.tensors}"),
            *(f"task.pace_s={job.pace_s}", "-b", str(BATCH_SIZE), "num_workers=0"),
            *(f"save_every_steps={SAVE_EVERY}", "save_interval=0", "evaluate_interval=0"),
            *("log.display=plain", "log_interval=1000", "recovery.max_restarts=100000"),
        ]

    def pid_of(self, rank: int) -> int:
        name = f"ddp:rank{rank}"
        found = [c for c in self.process.children(recursive=True) if c.name() == name]
        return int(found[0].pid)

    def finish(self) -> dict:
        """Have it stop in good order; returns its summary."""
        self.process.terminate()
        self.process.wait(START_TIMEOUT_S)
        return json.loads((self.folder / "logs" / "summary.json").read_text())


class Torchrun(Faulted):
    """``torchrun --max-restarts`` with the variable without which gloo does not recover at all."""

    name = "torchrun"
    progress_name = "progress.jsonl"

    def variables(self) -> dict[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self.job.world), "--max-restarts", "100000"),
            *self.script(),
        ]

    def script(self) -> list[str]:
        """The plain script and its words."""
        job = self.job
        return [
            *(str(ROOT / "benchmarks" / "plain_restart.py"), f"--state-mb={job.state_mb}"),
            *(f"--pace-s={job.pace_s}", f"--batch-size={BATCH_SIZE}"),
            *(f"--save-every={SAVE_EVERY}",),
            *([f"--timeout-s={job.timeout_s}"] if job.timeout_s else []),
            f"--tensors={job.tensors}",
        ]

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"rank_{rank}.pid").read_text())


class Supervised(Torchrun):
    """The same script under ``ddp_runner run``."""

    name = "ddp_runner run"

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "ddp_runner", "run", "--cpu", "-n", str(self.job.world)),
            *("--max-restarts", "100000", "-l", "logs"),
            *self.script(),
        ]
