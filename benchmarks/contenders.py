"""Starts, pauses and reads the two that are compared: ``ddp_runner train`` and ``plain_ddp.py``.

Both train the same model on the same samples with 2 gloo ranks and a loader worker each, and write
a line of metrics every :data:`LOG_INTERVAL` steps. Not a benchmark itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
LOG_INTERVAL = 10
START_TIMEOUT_S = 120.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and a batch, ``batch_size`` samples per rank."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    batch_size: int
    seq_len: int = 128
    num_workers: int = 1

    def fields(self) -> dict[str, int]:
        values = asdict(self)
        del values["name"]
        return values


SIZES = {
    "light": Size(
        name="light", hidden_size=64, num_layers=1, num_heads=2, batch_size=4, seq_len=64
    ),
    "small": Size(name="small", hidden_size=128, num_layers=2, num_heads=4, batch_size=8),
    "tiny": Size(name="tiny", hidden_size=16, num_layers=1, num_heads=1, batch_size=1, seq_len=8),
    # 2,400 tensors, nearly all of a hundred numbers or fewer.
    "many": Size(name="many", hidden_size=16, num_layers=200, num_heads=1, batch_size=1, seq_len=8),
    "large": Size(name="large", hidden_size=256, num_layers=7, num_heads=8, batch_size=4),
}
NAMES = ("ddp_runner", "plain", "plain, find_unused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The steps between two lines of metrics. ``ended_s`` is wall time, as a time stamp."""

    step: int
    steps: int
    ended_s: float
    duration_s: float


class Contender:
    """One started run in a folder of its own; a context manager that leaves nothing behind."""

    def __init__(
        self,
        name: str,
        size: Size,
        *,
        steps: int,
        settings: tuple[str, ...] = (),
        terminal: int = -1,
        root: Path = ROOT,
    ) -> None:
        """``root``: the checkout whose code runs."""
        self.name = name
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="ddp_bench_"))
        self._said = (self._folder / "said.txt").open("wb")
        self.started_s = time.time()
        command = (
            _our_command(size, self._folder, steps, settings)
            if name.startswith("ddp_runner")
            else _plain_command(size, self._folder, steps, settings, find_unused="find" in name)
        )
        output = self._said if terminal < 0 else terminal
        self.process = psutil.Popen(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of a run that came to its end."""
        return next(iter((self._folder / "checkpoints").glob("*.pt")))

    def lines(self) -> list[dict]:
        """Rank 0's lines of metrics that hold a step's loss, so far."""
        path = self._folder / "logs" / "metrics.jsonl"
        if not path.exists():
            return []
        whole = path.read_bytes().rpartition(b"\n")[0]
        records = [json.loads(line) for line in whole.splitlines()]
        return [record for record in records if record["rank"] == 0 and "loss" in record]

    def wait_for_lines(self, count: int) -> list[dict]:
        """Wait until ``count`` lines are there. Raises RuntimeError if the run ends, or takes too long."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while len(lines := self.lines()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name} made no progress:\n{self._state()}")
            time.sleep(_POLL_S)
        return lines

    def wait(self) -> None:
        """Wait for its end. Raises RuntimeError unless it exits with 0."""
        code = self.process.wait(START_TIMEOUT_S)
        if code != 0:
            raise RuntimeError(f"{self.name} exited with {code}:\n{self.said()[-2000:]}")

    def _state(self) -> str:
        """For an error: its processes, and the end of what it printed."""
        alive = self.tree() if self.process.poll() is None else []
        processes = ", ".join(f"{each.name()} {each.pid} {each.status()}" for each in alive)
        return f"{processes or 'it has ended'}\n{self.said()[-2000:]}"

    def said(self) -> str:
        """What it printed."""
        return (self._folder / "said.txt").read_text(errors="replace")

    def intervals(self) -> list[Interval]:
        """The stretches between lines of metrics, from the second line on."""
        found = []
        before = 0
        for line in self.lines():
            steps = line["step"] - before
            rate = line.get("steps_per_s") or line["samples_per_s"] / (RANKS * self.size.batch_size)
            found.append(
                Interval(
                    step=line["step"],
                    steps=steps,
                    ended_s=stamp_s(line["utc"]),
                    duration_s=steps / rate,
                )
            )
            before = line["step"]
        return found[1:]

    def tree(self) -> list[psutil.Process]:
        """Launcher, ranks, loader workers and whatever else it started."""
        return [self.process, *psutil.Process(self.process.pid).children(recursive=True)]

    def cpu_s(self) -> float:
        """User and system time of the whole tree so far."""
        times = [process.cpu_times() for process in self.tree()]
        return sum(each.user + each.system for each in times)

    def beside_cpu_s(self) -> float:
        """The same of those of its processes that are no rank's: launcher, supervisor, watches, trackers."""
        ranks = [one for one in self.tree() if one.name().startswith("ddp:rank")]
        of_ranks = {one.pid for rank in ranks for one in (rank, *rank.children(recursive=True))}
        times = [one.cpu_times() for one in self.tree() if one.pid not in of_ranks]
        return sum(each.user + each.system for each in times)

    def pause(self) -> None:
        """Stop every process of the tree where it stands."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):  # a drill that has just ended
                process.send_signal(number)

    def end(self) -> None:
        """End it, however far it is, and remove its folder."""
        left = []
        if self.process.poll() is None:
            self.resume()
            left = self.tree()
            self.process.terminate()
        _, alive = psutil.wait_procs(left, timeout=20)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._said.close()
        shutil.rmtree(self._folder)


def _our_command(size: Size, folder: Path, steps: int, settings: tuple[str, ...]) -> list[str]:
    return [
        *(sys.executable, "-m", "ddp_runner", "train", "--cpu", "-n", str(RANKS)),
        *("--max-steps", str(steps), "--log-dir", str(folder / "logs")),
        *("--checkpoint-dir", str(folder / "checkpoints"), "optim.learning_rate=1e-4"),
        *("optim.beta2=0.999", "optim.warmup_steps=100", "model.dropout=0", "log.display=plain"),
        *(f"log.log_interval={LOG_INTERVAL}", "log.evaluate_interval=0", "log.evaluate_batches=1"),
        *("log.evaluate_every_steps=0", "checkpoint.save_every_steps=0"),
        *(f"{name}={value}" for name, value in size.fields().items()),
        *settings,
    ]


def _plain_command(
    size: Size, folder: Path, steps: int, settings: tuple[str, ...], *, find_unused: bool
) -> list[str]:
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir()
    options = [f"--{name.replace('_', '-')}={value}" for name, value in size.fields().items()]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), str(ROOT / "benchmarks" / "plain_ddp.py"), *options),
        *("--steps", str(steps), "--log-interval", str(LOG_INTERVAL)),
        *("--metrics", str(folder / "logs" / "metrics.jsonl")),
        *("--checkpoint", str(folder / "checkpoints" / "last.pt")),
        *(["--find-unused-parameters"] if find_unused else []),
        *(one for one in settings if one.startswith("--")),
    ]


def stamp_s(utc: str) -> float:
    """Seconds since 1970 of ``2026-11-20T18:47:20.123Z``."""
    return datetime.fromisoformat(utc.replace("Z", "+00:00")).timestamp()


def end_by_signal() -> None:
    """Have SIGTERM end this benchmark as an error would: whatever it has started is ended, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def machine() -> dict[str, object]:
    """What the figures depend on."""
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "processor": ", ".join(sorted(models)),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": _torch_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def show_machine(facts: dict[str, object]) -> None:
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
