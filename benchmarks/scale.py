"""What many machines cost the coordinator's supervisor, in CPU time; machines and their clock are simulated.

Run by hand: ``python benchmarks/scale.py [--nodes 2 64 512] [--ranks 8] [--profile] [--json FILE]``.
The coordinator's loop, its links, frames and decisions are the real ones. The other machines are a few lines
each, which say in real frames what a healthy machine says, and answer as its ranks do; they are not counted.
"turn": one tick of 0.1 s, without and with the looks that come in it. "kill": from the end of a rank until
all ranks have been told to form the next generation; "heard": until all have been told to leave the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import machine, show_machine

from ddp_runner.features.machines.node_link import NodeLink
from ddp_runner.features.machines.rules.node_messages import (
    FROM_COORDINATOR,
    LOOK_EVERY_S,
    FromRank,
    Hello,
    Look,
    NodeMessage,
    RankGone,
    RankLook,
    RankStarted,
    StartRank,
    ToRank,
)
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.board import CELLS_PER_SLOT, Cell
from ddp_runner.kernel.wire.events import Faulted, RankFormed
from ddp_runner.kernel.wire.messages import Abort, Form, Message, Ready, decode, encode
from tests.features.machines.simulated_nodes import TOKEN, NodesSimulation, _Plain
from tests.supervisor.simulated import Process

TICK_S = 0.1
AT_ONCE = 32  # machines that join in one turn


class Home(NodesSimulation):
    """The coordinator, whose own ranks form as soon as they are asked to."""

    def _join(self, process: Process, form: Form) -> None:
        process.generation, process.trains = form.generation, True
        self.stamp(process, Phase.FORWARD)
        self.send(process, formed(process.rank, form))


def formed(rank: int, form: Form) -> RankFormed:
    return RankFormed(
        rank=rank,
        generation=form.generation,
        committed_step=0,
        source=0,
        group_s=0.0,
        transfer_s=0.0,
        rebuild_s=0.0,
    )


class Peer:
    """Another machine, whose ranks do what they are asked for at once."""

    def __init__(self, run: Home, number: int, *, ranks: int) -> None:
        self._run = run
        ours, theirs = _Plain.pair()
        run.sockets += [ours, theirs]
        run.door.knock(theirs)
        self.ranks = range(number * ranks, (number + 1) * ranks)
        self._link = NodeLink(ours, token=TOKEN, listens=False)
        self._process = dict.fromkeys(self.ranks, 0)
        self._looks = number  # they do not all look at one moment
        self.formed = self.heard = 0
        self.generation = 0
        self.steps = 0
        hello = Hello(
            supervisor=f"of {number}",
            host=f"host{number}",
            node_rank=number,
            ranks=ranks,
            run_id="none",
            meaning={},
            versions={},
        )
        self._send(hello)

    def _send(self, message: NodeMessage) -> None:
        self._link.send(wire.encode(message))

    def _say(self, rank: int, message: Message) -> None:
        packet = encode(message)
        self._send(FromRank(rank=rank, process=self._process[rank], packet=packet))

    def look(self) -> None:
        self._looks += 1
        now_ns = self._run.clock.monotonic_ns()
        looks = {str(rank): self._look_at(now_ns) for rank in self.ranks}
        self._send(
            Look(
                number=self._looks,
                now_ns=now_ns,
                can_fork=True,
                has_spare=True,
                round_trip_s=0.0,
                ranks=looks,
            )
        )

    def _look_at(self, now_ns: int) -> RankLook:
        cells = [0] * CELLS_PER_SLOT
        cells[Cell.GENERATION] = self.generation
        cells[Cell.STEP] = cells[Cell.COMMITTED_STEP] = cells[Cell.OWN_STEPS] = self.steps
        cells[Cell.PHASE], cells[Cell.PHASE_SINCE_NS] = Phase.FORWARD, now_ns
        cells[Cell.OWN_NS], cells[Cell.STEP_NS] = self.steps * 10**8, 10**8
        cells[Cell.BUSY_NS] = 10**8
        return RankLook(
            cells=cells,
            pid=1,
            stopped_s=0.0,
            is_killed=False,
            resident_bytes=10**9,
            written_bytes=9,
        )

    def turn(self) -> None:
        for content in self._link.receive():
            match wire.decode(content, FROM_COORDINATOR):
                case StartRank(rank=rank, process=process):
                    self._process[rank] = process
                    started = RankStarted(
                        rank=rank, process=process, pid=1000 + rank, was_spare=False
                    )
                    self._send(started)
                    self._say(rank, self._run.ready(rank, committed_step=self.steps))
                case ToRank(rank=rank, packet=packet):
                    self._hear(rank, decode(packet))
                case _:
                    pass
        self._link.flush()

    def _hear(self, rank: int, message: Message) -> None:
        if isinstance(message, Form):
            self.formed, self.generation = message.generation, message.generation
            self._say(rank, formed(rank, message))
        elif isinstance(message, Abort):
            self.heard = message.generation
            fault = Fault(kind=FaultKind.COLLECTIVE_FAILED, rank=rank, step=1, cause="aborted")
            self._say(rank, Faulted(generation=message.generation, fault=fault))
            self._say(rank, self._run.ready(rank, committed_step=self.steps))

    def lose(self, rank: int) -> None:
        """SIGKILL of one of its ranks."""
        self._send(
            RankGone(
                rank=rank,
                process=self._process[rank],
                exit_code=None,
                signal_number=9,
                age_s=0.0,
                killed_for_memory=False,
                last="",
                when_asked="",
                before_log="",
                now_ns=self._run.clock.monotonic_ns(),
                cells=self._look_at(self._run.clock.monotonic_ns()).cells,
            )
        )


class Coordinator:
    """The run, and what its turns have taken."""

    def __init__(self, folder: Path, *, nodes: int, ranks: int) -> None:
        self.run = Home(folder, nodes=1, least=nodes, most=nodes, ranks=ranks, hang_min_s=2.0)
        self.run.ready = self._ready
        self.turns_s: list[float] = []
        self.profile: cProfile.Profile | None = None
        self._turn_loop = self.run.loop._turn  # noqa: SLF001 - it is what is measured
        self.run.loop._turn = self._timed_turn  # noqa: SLF001 - as above
        self.peers: list[Peer] = []
        for number in range(1, nodes):
            self.peers.append(Peer(self.run, number, ranks=ranks))
            if number % AT_ONCE == 0:
                self.turn()
                self.turn()
        self.until(self.all_train)

    def _ready(self, rank: int, *, committed_step: int) -> Ready:
        return Ready(
            rank=rank,
            committed_step=committed_step,
            run_id="",
            total_steps=10**6,
            steps_per_epoch=10,
            train_samples=80,
            parameters=7,
            device="cpu",
        )

    def all_train(self) -> bool:
        return self.run.supervisor.world.counts.are_all_present(RankState.TRAINING)

    def until(self, check: Callable[[], bool]) -> None:
        for _ in range(2000):
            if check():
                return
            self.turn()
        raise RuntimeError(self.run.outputs.said[-5:])

    def _timed_turn(self) -> None:
        began_s = time.process_time()
        if self.profile is not None:
            self.profile.enable()
        self._turn_loop()
        if self.profile is not None:
            self.profile.disable()
        self.turns_s.append(time.process_time() - began_s)

    def turn(self, *, looks: bool = True) -> None:
        """One tick; each machine looks when it is its time."""
        run = self.run
        every = round(LOOK_EVERY_S / TICK_S)
        number = len(self.turns_s)
        for process in run.processes.values():
            if process.rank >= 0 and process.trains:
                run.stamp(process, Phase.FORWARD)
                run.slot(process).set(Cell.OWN_STEPS, 10)
        for place, peer in enumerate(self.peers):
            peer.turn()
            if looks and place % every == number % every:
                peer.steps += 1
                peer.look()
        run._turn()  # noqa: SLF001 - as a test's run_until does
        for peer in self.peers:
            peer.turn()


def measure(nodes: int, *, ranks: int, profile: bool) -> dict:
    with tempfile.TemporaryDirectory(prefix="ddp_bench_") as folder:
        bench = Coordinator(Path(folder), nodes=nodes, ranks=ranks)
        for _ in range(20):
            bench.turn()
        bench.profile = cProfile.Profile() if profile else None
        quiet_s, busy_s = [], []
        for number in range(60):
            bench.turn(looks=number % 2 == 0)
            (busy_s if number % 2 == 0 else quiet_s).append(bench.turns_s[-1])
        show_profile(bench, f"{nodes} nodes, turns without faults")
        bench.profile = cProfile.Profile() if profile else None
        kills_s, heard_s = [], []
        for number in range(3):
            peer = bench.peers[(7 * number + 3) % len(bench.peers)]
            generation = bench.peers[0].generation
            before = len(bench.turns_s)
            peer.lose(peer.ranks[1])
            bench.until(lambda newest=generation: all(p.heard >= newest for p in bench.peers))
            heard_s.append(sum(bench.turns_s[before:]))
            bench.until(lambda newest=generation: all(p.formed > newest for p in bench.peers))
            kills_s.append(sum(bench.turns_s[before:]))
            bench.until(bench.all_train)
        show_profile(bench, f"{nodes} nodes, kills")
        bench.run.close()
    return {
        "nodes": nodes,
        "ranks": ranks,
        "turn_ms": statistics.median(quiet_s) * 1e3,
        "turn_with_looks_ms": statistics.median(busy_s) * 1e3,
        "heard_cpu_ms": statistics.median(heard_s) * 1e3,
        "kill_cpu_ms": statistics.median(kills_s) * 1e3,
    }


def show_profile(bench: Coordinator, title: str) -> None:
    if bench.profile is not None:
        print(f"\n{title}")
        with contextlib.suppress(BrokenPipeError):
            pstats.Stats(bench.profile).sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 64, 512])
    parser.add_argument("--ranks", type=int, default=8, help="of each")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    facts = machine()
    show_machine(facts)
    print(
        "| nodes | ranks | turn, ms | with looks, ms | kill until all have heard of it, CPU ms | until all are told to form |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for nodes in asked.nodes:
        row = measure(nodes, ranks=asked.ranks, profile=asked.profile)
        rows.append(row)
        values = " | ".join(f"{row[name]:.2f}" for name in list(row)[2:])
        print(f"| {nodes} | {nodes * asked.ranks} | {values} |", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
