"""Several machines on loopback: seconds to a script's first sum, and from the death of the coordinator to the next step.

Run by hand: ``python benchmarks/coordinator.py [--rounds 5] [--rows launch takeover] [--json FILE]``. ``launch``: ``run``
of a script on two machines of one rank each, beside torchrun (c10d), in turn; from the start of both commands to the
first all_reduce. ``takeover``: a task on three machines of one rank each with checkpoint folders of their own, or with
one that they share, ``--nnodes 2:3`` and no patience; from SIGKILL of the coordinator's supervisor to the next step that
another machine has written down. torchrun's rendezvous ends with the machine of its endpoint, so it has no such row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import ROOT, end_by_signal, machine, show_machine, stamp_s

LIMIT_S = 120.0
STEPS_BEFORE = 20  # of the run, before its coordinator dies
SCRIPT = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(str(time.time()))
dist.barrier()
"""
OURS = (sys.executable, "-m", "ddp_runner")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TASK = (
    *("--cpu", "-n", 1, "--nnodes", "2:3", "--task", "bytes", "-b", 4, "--max-steps", 100_000),
    *(
        "log_interval=1",
        "hidden_size=16",
        "num_layers=1",
        "num_heads=1",
        "seq_len=8",
        "num_workers=0",
    ),
    *(
        "recovery.node_patience_s=0",
        "recovery.drill_at=off",
        "evaluate_interval=0",
        "log.display=plain",
    ),
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30.0)
        process.kill()
        process.wait()


def started(words: tuple[object, ...], folder: Path, number: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DDP_RUNNER_TOKEN": "of a benchmark on loopback",
    }
    with (folder / f"machine_{number}.txt").open("wb") as output:
        return subprocess.Popen(
            [str(word) for word in words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def until(found: object, what: str) -> object:
    limit_s = time.monotonic() + LIMIT_S
    while time.monotonic() < limit_s:
        if (value := found()) is not None:  # type: ignore[operator] # a function
            return value
        time.sleep(0.01)
    raise SystemExit(f"no {what} within {LIMIT_S:.0f} s")


def launch_s(name: str) -> float:
    """Seconds to the first sum of a script on two machines."""
    with tempfile.TemporaryDirectory() as made:
        folder, port = Path(made), free_port()
        (folder / "train.py").write_text(SCRIPT)
        at = folder / "at.txt"
        meet = (
            "--nnodes",
            2,
            "--nproc-per-node",
            1,
            "--rdzv-id",
            "bench",
            "--rdzv-backend",
            "c10d",
        )
        began_s, processes = time.time(), []
        try:
            for number in range(2):
                endpoint = ("--rdzv-endpoint", f"127.0.0.1:{port}")
                words = (*TORCHRUN, *meet, *endpoint)
                if name == "ddp_runner":
                    own = ("--cpu", "--node-rank", number, "-l", f"logs_{number}")
                    words = (*OURS, "run", *meet, *endpoint, *own)
                processes.append(started((*words, folder / "train.py", at), folder, number))
            until(lambda: at.read_text() if at.exists() and at.stat().st_size else None, "sum")
            return float(at.read_text()) - began_s
        finally:
            end(processes)


def newest(folder: Path) -> tuple[int, float] | None:
    """The last step in a machine's metrics, and when it was written."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        return int(line["step"]), stamp_s(line["utc"])
    return None


def takeover_s(*, shared: bool) -> float:
    """Seconds from the death of the coordinator's supervisor to the next step under another one."""
    with tempfile.TemporaryDirectory() as made:
        folder, port, processes = Path(made), free_port(), []
        try:
            for number in range(3):
                kept = "checkpoints" if shared else f"checkpoints_{number}"
                meet = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", number)
                own = ("-l", f"logs_{number}", "-c", kept)
                processes.append(started((*OURS, "train", *TASK, *meet, *own), folder, number))
            logs = [folder / f"logs_{number}" for number in range(3)]

            def trains() -> bool | None:
                at = newest(logs[0])
                return True if at is not None and at[0] >= STEPS_BEFORE else None

            until(trains, f"step {STEPS_BEFORE}")
            time.sleep(2.0)  # each machine knows what follows
            killed_s = time.time()
            processes[0].kill()

            def again() -> float | None:
                seen = [at for at in map(newest, logs[1:]) if at is not None and at[1] > killed_s]
                return min(at[1] for at in seen) if seen else None

            return float(until(again, "step after the kill")) - killed_s  # type: ignore[arg-type]
        finally:
            end(processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rows", nargs="*", choices=["launch", "takeover"], default=["launch", "takeover"]
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    end_by_signal()
    facts = machine()
    show_machine(facts)
    contenders = {}
    if "launch" in asked.rows:
        contenders["launch ddp_runner"] = lambda: launch_s("ddp_runner")
        contenders["launch torchrun"] = lambda: launch_s("torchrun")
    if "takeover" in asked.rows:
        contenders["takeover own folders"] = lambda: takeover_s(shared=False)
        contenders["takeover shared folder"] = lambda: takeover_s(shared=True)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(asked.rounds):
        for name, measure in contenders.items():
            seconds[name].append(measure())
    for name, taken in seconds.items():
        shown = (
            f"{statistics.median(taken):.2f} ({min(taken):.2f}-{max(taken):.2f}, n={len(taken)})"
        )
        print(f"{name:<24}{shown}")
    if asked.json:
        asked.json.write_text(json.dumps({"machine": facts, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
