"""Two more that repair in place, where they are installed: torchft and NVIDIA's in-process restart.

Install ``torchft`` and ``nvidia-resiliency-ext`` beside ours, and ``recovery.py`` and ``python -m benchmarks`` add them.
Both train what ``plain_restart.py`` trains. As a command this file starts the processes of one of them and waits for all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from faulted import BATCH_SIZE, SAVE_EVERY, Faulted

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
PORTS = 3  # the store of the ranks, that of the wrapper, one in reserve


class Rival(Faulted):
    """A contender of several commands: this file starts them."""

    progress_name = "progress.jsonl"
    package = ""
    script = ""

    @classmethod
    def installed(cls) -> bool:
        """Say whether its package is there."""
        return importlib.util.find_spec(cls.package) is not None

    def variables(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def command(self) -> list[str]:
        job = self.job
        return [
            *(sys.executable, str(Path(__file__).resolve()), self.package, str(job.world)),
            *(str(HERE / self.script), f"--state-mb={job.state_mb}", f"--pace-s={job.pace_s}"),
            *(f"--batch-size={BATCH_SIZE}", f"--save-every={SAVE_EVERY}"),
            f"--tensors={job.tensors}",
        ]

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"rank_{rank}.pid").read_text())


class TorchFT(Rival):
    """torchft: a replica group for each rank, under a torchrun each, and a lighthouse."""

    name = "torchft"
    package = "torchft"
    script = "plain_torchft.py"


class InProcess(Rival):
    """NVIDIA's in-process restart with one rank in reserve. It starts no process again, so it is harmed once."""

    name = "NVRx in-process"
    harms_at_most = 1
    package = "nvidia_resiliency_ext"
    script = "plain_inprocess.py"


RIVALS = tuple(kind for kind in (TorchFT, InProcess) if kind.installed())


def _free_ports() -> int:
    """The first of several free ports in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            first = int(probe.getsockname()[1])
        try:
            for number in range(1, PORTS):
                with socket.socket() as probe:
                    probe.bind((HOST, first + number))
        except OSError:
            continue
        return first


def _torchft(world: int, script: list[str]) -> list[subprocess.Popen]:
    port = _free_ports()
    lighthouse = shutil.which("torchft_lighthouse", path=Path(sys.executable).parent)
    if lighthouse is None:
        raise FileNotFoundError("torchft_lighthouse is not beside the interpreter")
    words = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
    started = [subprocess.Popen([lighthouse, "--bind", f"{HOST}:{port}", *words])]
    for replica in range(world):
        shared = {"TORCHFT_LIGHTHOUSE": f"http://{HOST}:{port}", "NUM_REPLICA_GROUPS": str(world)}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words = ["--nproc-per-node=1", "--max-restarts=100000", *script]
        own = {**os.environ, **shared, "REPLICA_GROUP_ID": str(replica)}
        started.append(subprocess.Popen([*command, *words], env=own))
    return started


def _in_process(world: int, script: list[str]) -> list[subprocess.Popen]:
    place = {"MASTER_ADDR": HOST, "MASTER_PORT": str(_free_ports())}
    shared = {**os.environ, **place, "ACTIVE_RANKS": str(world), "WORLD_SIZE": str(world + 1)}
    return [
        subprocess.Popen([sys.executable, *script], env={**shared, "RANK": str(rank)})
        for rank in range(world + 1)
    ]


def main() -> None:
    package, world, *script = sys.argv[1:]
    start = {TorchFT.package: _torchft, InProcess.package: _in_process}[package]
    for process in start(int(world), script):
        process.wait()


if __name__ == "__main__":
    main()
