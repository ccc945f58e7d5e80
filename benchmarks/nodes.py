"""Two machines of two ranks: seconds from a fault to the next committed step, beside torchrun; and what the link costs.

Run by hand: ``python benchmarks/nodes.py [--rounds 7] [--torchrun-rounds 3] [--rows kill node cut heal] [--json FILE]``.
With ``--loop`` a loop that attaches (``paced_loop.py``) is a third contender.
Each machine is a network namespace of one bridge (``unshare -Urnm``, no root), and a link is cut by
``ip link set down``. Both contenders train the same model at the same pace (``paced.py``), ours and torchrun
(``--nnodes 1:2``, c10d) in turn, a new start for each fault. Steps per second and the costs of the link are
of runs without faults: two machines of two ranks, and one of four, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from contenders import end_by_signal, machine, show_machine

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[1]
NETWORK = """
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 up
for k in 0 1; do
    ip netns add node$k
    ip link add wire$k type veth peer name end$k
    ip link set end$k netns node$k
    ip link set wire$k master bridge0 up
    ip -n node$k link set lo up
    ip -n node$k addr add 10.9.0.$((k + 1))/24 dev end$k
    ip -n node$k link set end$k up
done
"""
LOOP = "attached loop"
PORT = 29500
PACE_S = 0.016
SETTLED = 60  # steps before a fault
START_S = 120.0
GAP_S = 0.3  # after a fault no step of torchrun's is committed before it has restarted


class Job:
    """One contender on its two machines, in a folder of its own; a context manager that leaves nothing."""

    def __init__(
        self, contender: str, *, nodes: int = 2, ranks: int = 2, words: tuple = ()
    ) -> None:
        self.contender = contender
        self.folder = Path(tempfile.mkdtemp(prefix="ddp_bench_"))
        self._mark = f"NODES_BENCH={uuid.uuid4().hex}"
        self._shell = subprocess.Popen(
            ["unshare", "-Urnm", "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.run(NETWORK)
        self._nodes, self._ranks = nodes, ranks
        for number in range(nodes):
            self.start(number, words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with self._shell:
            os.killpg(self._shell.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, line: str) -> list[str]:
        """A line in the shell that has the network; what it says."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{line}\necho ran\n")
        self._shell.stdin.flush()
        said = []
        while (text := self._shell.stdout.readline()) not in ("ran\n", ""):
            said.append(text)
        return said

    def start(self, number: int, words: tuple = ()) -> None:
        """The supervisor, or agent, of one machine."""
        folder = self.folder if self.contender == "torchrun" else self.folder / f"node{number}"
        folder.mkdir(exist_ok=True)
        commands = {"torchrun": self._torchrun, LOOP: partial(self._loop, words=words)}
        command = commands.get(self.contender, partial(self._ours, words=words))(number)
        environment = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "DDP_RUNNER_TOKEN": "0123456789abcdef",
            "GLOO_SOCKET_IFNAME": f"end{number}",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if self._nodes == 1:
            del environment["GLOO_SOCKET_IFNAME"]
        values = " ".join(f"{name}={value}" for name, value in environment.items())
        self.run(
            f"cd {folder}; {self._mark} {values} ip netns exec node{number}"
            f" {' '.join(map(str, command))} > said{number}.txt 2>&1 &"
        )

    def _loop(self, number: int, words: tuple) -> list:
        return [
            *(sys.executable, "-m", "ddp_runner", "run", "--cpu", "-n", self._ranks),
            *("-l", "logs", "-c", "kept", "save_every_steps=25", "save_interval=0"),
            *("log.display=plain", "log_interval=1000", "--nnodes", "1:2", "--node-rank", number),
            *("--rdzv-endpoint", f"10.9.0.1:{PORT}", *words),
            *(ROOT / "benchmarks" / "paced_loop.py", "progress.jsonl", PACE_S),
        ]

    def _ours(self, number: int, words: tuple) -> list:
        several = ("--nnodes", "1:2", "--rdzv-endpoint", f"10.9.0.1:{PORT}", "--node-rank", number)
        return [
            *(sys.executable, "-m", "ddp_runner", "train", "--cpu", "-n", self._ranks),
            *("--task", f"{ROOT / 'benchmarks' / 'paced.py'}:Paced", "--audit", "-l", "logs"),
            *("-c", "kept", "--max-steps", 1_000_000, "task.state_mb=2", f"task.pace_s={PACE_S}"),
            *("-b", 8, "num_workers=0", "save_every_steps=25", "save_interval=0"),
            *("evaluate_interval=0", "log.display=plain", "log_interval=1000"),
            *(several if self._nodes > 1 else ()),
            *words,
        ]

    def _torchrun(self, number: int) -> list:
        conf = f"last_call_timeout=5,is_host={number == 0}"
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", self._ranks, "--rdzv-backend", "c10d", "--rdzv-id", "bench"),
            *("--rdzv-endpoint", f"10.9.0.1:{PORT}", "--rdzv-conf", conf),
            *("--local-addr", f"10.9.0.{number + 1}"),
            *("--max-restarts", 100, ROOT / "benchmarks" / "plain_restart.py", "--state-mb=2"),
            *(f"--pace-s={PACE_S}", "--batch-size=8", "--save-every=25"),
        ]

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Its processes, all or those of this name."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if self._mark.encode() in environment and process.name().startswith(name):
                    found.append(process)
        return found

    def of_node(self, number: int) -> list[psutil.Process]:
        """Those of one machine, by the interface that they were told to use, or by their folder."""
        mark = f"GLOO_SOCKET_IFNAME=end{number}".encode()
        return [
            one for one in self.processes() if mark in Path(f"/proc/{one.pid}/environ").read_bytes()
        ]

    def progress(self) -> Path:
        """A line for each step that rank 0 has committed."""
        if self.contender == "torchrun":
            return self.folder / "progress.jsonl"
        if self.contender == LOOP:
            return self.folder / "node0" / "progress.jsonl"
        return self.folder / "node0" / "logs" / "audit_rank_0.jsonl"

    def lines(self) -> int:
        path = self.progress()
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_lines(self, count: int, *, within_s: float = START_S) -> None:
        deadline_s = time.monotonic() + within_s
        while self.lines() < count:
            if time.monotonic() > deadline_s:
                raise TimeoutError(self.said())
            time.sleep(0.002)

    def wait_for_both(self) -> None:
        """Until ranks of both machines train together."""
        self.wait_lines(SETTLED)
        deadline_s = time.monotonic() + START_S
        while self.contender != "torchrun" and "4 ranks" not in self.said():
            if time.monotonic() > deadline_s or self._all_there():
                break
            time.sleep(0.05)
        self.wait_lines(self.lines() + SETTLED)

    def _all_there(self) -> bool:
        return len(self.processes("ddp:rank")) == self._nodes * self._ranks

    def next_step_s(self, at_s: float, *, within_s: float) -> float:
        """From ``at_s`` to the first step that is committed after a gap."""
        deadline_s = at_s + within_s
        count, newest_s = self.lines(), time.monotonic()
        gap_s = GAP_S if self.contender == "torchrun" else 4 * PACE_S
        while time.monotonic() < deadline_s:
            now_s, found = time.monotonic(), self.lines()
            if found > count:
                if now_s - newest_s > gap_s:
                    return now_s - at_s
                count, newest_s = found, now_s
            time.sleep(0.001)
        raise TimeoutError(self.said())

    def said(self) -> str:
        return "".join(path.read_text()[-1500:] for path in self.folder.rglob("said*.txt"))

    def rank_of_second(self) -> psutil.Process:
        """The last rank, which is on the second machine."""
        if self.contender != "torchrun":
            return self.processes("ddp:rank3")[0]
        ranks = [
            one
            for one in self.of_node(1)
            if any("plain_restart" in word for word in one.cmdline()) and "-m" not in one.cmdline()
        ]
        return ranks[-1]

    def end_node(self, number: int) -> None:
        """SIGKILL of all that runs on one machine."""
        for process in self.of_node(number):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


PATIENT = ("recovery.node_patience_s=0",)


def kill(contender: str) -> dict:
    with Job(contender) as job:
        job.wait_for_both()
        victim = job.rank_of_second()
        at_s = time.monotonic()
        victim.kill()
        return {"s": job.next_step_s(at_s, within_s=90)}


def node(contender: str) -> dict:
    with Job(contender, words=PATIENT) as job:
        job.wait_for_both()
        at_s = time.monotonic()
        job.end_node(1)
        return {"s": job.next_step_s(at_s, within_s=90)}


def cut(contender: str) -> dict:
    with Job(contender, words=PATIENT) as job:
        job.wait_for_both()
        at_s = time.monotonic()
        job.run("ip link set wire1 down")
        return {"s": job.next_step_s(at_s, within_s=90)}


def heal(contender: str) -> dict:
    """The link is down for 10 of the 30 seconds for which it is waited for; counted from its return."""
    with Job(contender) as job:
        job.wait_for_both()
        before = {one.pid for one in job.processes("ddp:rank")}
        job.run("ip link set wire1 down")
        time.sleep(10.0)
        at_s = time.monotonic()
        job.run("ip link set wire1 up")
        took_s = job.next_step_s(at_s, within_s=90)
        after = {one.pid for one in job.processes("ddp:rank")}
        return {"s": took_s, "same_pids": before == after}


ROWS = {"kill": kill, "node": node, "cut": cut, "heal": heal}
OURS_ALONE = ("heal",)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def pace(nodes: int, *, seconds: float) -> dict:
    """Steps per second, the supervisor's share of a core, and bytes of control a second, both ways."""
    with Job("ddp_runner", nodes=nodes, ranks=4 // nodes) as job:
        job.wait_for_both()
        supervisor = job.processes("ddp:supervisor")[0]
        steps, used_s, sent, began_s = (
            job.lines(),
            cpu_s(supervisor),
            control(job),
            time.monotonic(),
        )
        time.sleep(seconds)
        took_s = time.monotonic() - began_s
        return {
            "nodes": nodes,
            "steps_per_s": (job.lines() - steps) / took_s,
            "cpu_share": (cpu_s(supervisor) - used_s) / took_s,
            "control_bytes_per_s": (control(job) - sent) / took_s,
        }


def control(job: Job) -> int:
    """Bytes that the link to the coordinator has carried."""
    said = " ".join(job.run(f"ip netns exec node1 ss -tinH dport = :{PORT}"))
    return sum(map(int, re.findall(r"bytes_(?:sent|received):(\d+)", said)))


def spread(values: list[float]) -> str:
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{statistics.median(values):.2f} ({low:.2f}-{high:.2f}, n={len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torchrun-rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--pace-rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measure of the pace")
    parser.add_argument("--loop", action="store_true", help="a loop that attaches, too")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    end_by_signal()
    facts = machine()
    show_machine(facts)
    found: dict[str, list[dict]] = {}
    print("| fault | contender | s to the next step (median, least-most) |")
    print("|---|---|---|")
    for name in asked.rows:
        for number in range(asked.rounds):
            for contender in ("ddp_runner", "torchrun", *((LOOP,) if asked.loop else ())):
                is_theirs = contender == "torchrun"
                if is_theirs and (number >= asked.torchrun_rounds or name in OURS_ALONE):
                    continue
                try:
                    row = ROWS[name](contender)
                except TimeoutError as error:
                    row = {"never": str(error)[-600:]}
                found.setdefault(f"{name} | {contender}", []).append(row)
        for key in [key for key in found if key.startswith(f"{name} |")]:
            rows = found[key]
            same = {row.get("same_pids") for row in rows if "same_pids" in row}
            never = sum("never" in row for row in rows)
            extra = f"; same pids: {same}" if same else ""
            extra += f"; never: {never}" if never else ""
            print(
                f"| {key} | {spread([row['s'] for row in rows if 's' in row])}{extra} |", flush=True
            )
    paces = [
        pace(nodes, seconds=asked.seconds) for _ in range(asked.pace_rounds) for nodes in (2, 1)
    ]
    for row in paces:
        print({name: round(value, 4) for name, value in row.items()}, flush=True)
    if paces:
        ratios = [
            two["steps_per_s"] / one["steps_per_s"]
            for two, one in zip(paces[::2], paces[1::2], strict=True)
        ]
        print(f"steps per second, two machines over one: {spread(ratios)}")
    if asked.json:
        asked.json.write_text(
            json.dumps({"machine": facts, "rows": found, "paces": paces}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
