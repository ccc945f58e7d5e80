"""Loops of frameworks, repaired in place, against the framework's own DDP under torchrun; by turns, on two ranks.

    python benchmarks/integrations.py [--frameworks transformers,accelerate,lightning] [--rounds 3] [--kills 3]

Prints a line for each run. For each framework: the steps per second of either at steps of 50 ms and their ratio;
the seconds from SIGKILL of rank 1 to its next step, in place and where torchrun starts the whole script again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOP = str(ROOT / "benchmarks" / "framework_loop.py")
PRELOADED = {
    "transformers": "transformers.trainer,transformers.models.gpt2.modeling_gpt2",
    "accelerate": "transformers.models.gpt2.modeling_gpt2,accelerate",
    "lightning": "lightning.pytorch",
}
WARM_UP = 10  # steps that are not counted
FIRST_STEP_S = 120.0
KILL_EVERY = 5  # steps of the killed rank's process
BEGAN_S = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds since the beginning."""
    print(f"[{time.monotonic() - BEGAN_S:5.0f} s] {text}", flush=True)


def command(folder: str, framework: str, *words: object, in_place: bool) -> list[str]:
    """The command of a run of two ranks."""
    loop = [LOOP, framework, *map(str, words)]
    if not in_place:
        plain = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [sys.executable, *plain, "--max-restarts", "100", *loop]
    places = ["-l", f"{folder}/logs", "-c", f"{folder}/kept", "save_every_steps=0"]
    ours = ["-m", "ddp_runner", "run", "--cpu", "-n", "2", "--max-restarts", "100"]
    preload = ["--preload", PRELOADED[framework]]
    return [sys.executable, *ours, *preload, *places, *loop]


@contextlib.contextmanager
def running(
    folder: str, framework: str, *words: object, in_place: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Have a run of two ranks, which ends with the block; what it prints is dropped."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(folder, framework, *words, in_place=in_place),
        env={**environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps_of(folder: str, rank: int) -> list[tuple[int, float]]:
    """The process and the end of each whole step of a rank."""
    path = Path(folder, f"steps_{rank}.txt")
    text = path.read_text() if path.exists() else ""
    lines = (line.split() for line in text.rpartition("\n")[0].splitlines())
    return [(int(process), float(at_s)) for process, at_s in lines]


def steps_per_s(framework: str, steps: int, step_ms: float, *, in_place: bool) -> float:
    """Return the steps per second of a run of its own, by the mean of a step: some steps wait for a core, most do not."""
    with tempfile.TemporaryDirectory() as folder:
        with running(folder, framework, steps, step_ms, in_place=in_place) as process:
            process.wait()
        if process.returncode != 0:
            raise RuntimeError(f"{framework}: the run has ended with {process.returncode}")
        ends_s = [at_s for _, at_s in steps_of(folder, 0)][WARM_UP:]
    return (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])


def restarts_s(framework: str, kills: int, *, in_place: bool) -> list[float]:
    """Return the seconds from each SIGKILL of rank 1 to the first step of the process that takes its place."""
    found_s: list[float] = []
    place = "in place" if in_place else "torchrun"
    with (
        tempfile.TemporaryDirectory() as folder,
        running(folder, framework, 2000, 50, in_place=in_place) as process,
    ):
        killed, at_s = 0, time.monotonic()
        while len(found_s) < kills:
            time.sleep(0.005)
            if process.poll() is not None or time.monotonic() > at_s + FIRST_STEP_S:
                raise RuntimeError(f"{framework}: no step of rank 1 after a kill")
            steps = steps_of(folder, 1)
            newest = steps[-1][0] if steps else killed
            own = [end_s for one, end_s in steps if one == newest]
            if newest == killed or len(own) < KILL_EVERY:
                continue
            if killed:
                found_s.append(own[0] - at_s)
                say(f"{framework}, {place}: {found_s[-1]:.2f} s from SIGKILL to the next step")
            killed, at_s = newest, time.monotonic()
            os.kill(newest, signal.SIGKILL)
    return found_s


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frameworks", default=",".join(PRELOADED))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--step-ms", type=float, default=50.0)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else its runs would outlive it
    rows = []
    for framework in asked.frameworks.split(","):
        ratios = []
        for number in range(asked.rounds):
            order = (True, False) if number % 2 else (False, True)
            found = {
                one: steps_per_s(framework, asked.steps, asked.step_ms, in_place=one)
                for one in order
            }
            ratios.append(found[True] / found[False])
            text = f"torchrun {found[False]:.2f}, in place {found[True]:.2f} steps/s"
            say(f"{framework}: {text}, ratio {ratios[-1]:.3f}")
        after_s = {
            one: restarts_s(framework, asked.kills, in_place=one) if asked.kills else [0.0]
            for one in (True, False)
        }
        ours_s, theirs_s = statistics.median(after_s[True]), statistics.median(after_s[False])
        ratio = statistics.median(ratios) if ratios else 0.0
        rows.append(f"| {framework} | {ratio:.3f} | {ours_s:.2f} | {theirs_s:.2f} |")
    print("| framework | steps/s, in place / torchrun | SIGKILL to next step | torchrun |")
    print("|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
