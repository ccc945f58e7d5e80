"""An attached loop against the same loop in plain DDP under torchrun, by turns; and its repair after SIGKILL.

    python benchmarks/attached.py [--rounds 5] [--widths 128,512]

Prints, for each width, the milliseconds of a step of either, round by round, and the ratio of their steps per
second; then, at three ranks, the seconds from each of five SIGKILLs to the ranks that train again, as summary.json has them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOP = str(ROOT / "benchmarks" / "own_loop.py")


def environment(folder: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PACE_FILE": f"{folder}/pace.json",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def run_command(folder: str, ranks: int) -> list[str]:
    words = ["-m", "ddp_runner", "run", "--cpu", "-n", str(ranks), "-l", f"{folder}/logs"]
    return [sys.executable, *words, "-c", f"{folder}/kept", LOOP, "--attached"]


def pace_ms(*words: str, attached: bool) -> float:
    """The mean time of a step, of a run of its own.

    Not the median: with two ranks on two cores some steps wait for a slice of the scheduler's time and most do not.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", LOOP]
        command = run_command(folder, 2) if attached else [sys.executable, *plain]
        subprocess.run(
            [*command, *words], check=True, env=environment(folder), capture_output=True, cwd=folder
        )
        return float(json.loads(Path(folder, "pace.json").read_text())["mean_ms"])


def repair_s(kills: int) -> list[float]:
    """Seconds of each repair of one run of three ranks, of which a rank is killed again and again."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--steps", "1500", "--width", "128"]
        process = subprocess.Popen(
            [*run_command(folder, 3), *words],
            env=environment(folder),
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        status = Path(folder, "logs", "status.json")
        done, by_s = 0, time.monotonic() + 120
        while done < kills and process.poll() is None and time.monotonic() < by_s:
            time.sleep(1.0)
            if not status.exists():
                continue
            now = json.loads(status.read_text())
            if now["state"] == "running" and now["ranks"][1]["pid"]:
                os.kill(int(now["ranks"][1]["pid"]), signal.SIGKILL)
                done += 1
        process.wait()
        summary = json.loads(Path(folder, "logs", "summary.json").read_text())
        assert summary["exact"], summary["inexact_reasons"]
        return [fault["seconds"]["total"] for fault in summary["faults"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", default="128,640")
    asked = parser.parse_args()
    for width in asked.widths.split(","):
        ratios = []
        for number in range(asked.rounds):
            order = (True, False) if number % 2 else (False, True)
            found = {one: pace_ms("--width", width, attached=one) for one in order}
            ratios.append(found[False] / found[True])
            print(f"width {width}: plain {found[False]:.2f} ms, attached {found[True]:.2f} ms")
        print(f"width {width}: attached / plain steps per second {statistics.median(ratios):.3f}")
    found_s = repair_s(5)
    print("seconds of each repair:", [round(one, 3) for one in found_s])


if __name__ == "__main__":
    main()
