"""Seconds that a checkpoint takes from training, against copying, torch.save, async_save and a plain write.

Run by hand: ``python benchmarks/checkpoint.py [--parameters MILLIONS] [--rounds N] [--batch N] [--only NAME ...]``. A
model of square layers trains with AdamW (12 bytes a parameter to save); in each round every contender
saves once, after an optimizer step, in an order that rotates. *Blocked* is what the training thread
gives to the save: the call, and for ours the wait before the next optimizer step, for the hash of what
several ranks compare and for the copy. *Step* is that
next step as a whole (forward, backward, optimizer), against one without a save. *Written* is from the
call until everything is on disk. *Cpu* is what the training process has used from the call
until then, its step included, *beside* what the process that writes has. Background work ends before the next contender begins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from ddp_runner.checkpoint.background import BackgroundSaver
from ddp_runner.checkpoint.manifest import CheckpointFacts
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.checkpoint.writer import CopyWriter, saved_of
from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.kernel.wire.messages import WriteCopy, decode, encode
from ddp_runner.training.components.tensor_hash import state_hashes
from ddp_runner.training.exactness.state_hashes import StateHashing

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

WIDTH = 1024


class Training:
    """A model, its optimizer, and one step, between whose parts a save may run."""

    def __init__(self, parameters: int, batch: int) -> None:
        torch.manual_seed(1)
        layers = max(1, parameters // (WIDTH * WIDTH))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self._inputs = torch.randn(batch, WIDTH)

    def step(self, before_optimizer: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Seconds of forward and backward, and of ``before_optimizer``."""
        began_s = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        computed_s = time.perf_counter()
        before_optimizer()
        waited_s = time.perf_counter()
        self.optimizer.step()
        return computed_s - began_s, waited_s - computed_s

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def replicated(self) -> dict[str, torch.Tensor]:
        """As a rank's state names what it hashes."""
        weights, learnt = self.replicated_parts()
        return {**weights, **learnt}

    def replicated_parts(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The same in two."""
        weights = {name: each.detach() for name, each in self.model.named_parameters()}
        learnt = {
            f"{number} {key}": value
            for number, entry in enumerate(self.optimizer.state.values())
            for key, value in entry.items()
        }
        return weights, learnt

    def written_storages(self) -> frozenset[int]:
        """What forward writes."""
        return frozenset()

    def steady_tensors(self) -> list[torch.Tensor]:
        kept = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *kept]


class Contender:
    """Saves once: ``save`` is called after a step, ``wait`` before the next optimizer step."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training = training
        self.directory = directory

    def save(self) -> None:
        """Do what training waits for."""

    def wait(self) -> None:
        """Wait for what must be done before the state changes."""

    def end(self) -> None:
        """Wait until everything is on disk."""

    def cpu_beside_s(self) -> float:
        """What another process has used for it, since that one began."""
        return 0.0

    def close(self) -> None:
        """No more saves come."""


class Copy(Contender):
    """A copy into memory that is there already."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        self._pairs = [(torch.empty_like(tensor), tensor) for tensor in training.steady_tensors()]

    def save(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)


class TorchSave(Contender):
    """As most scripts do: not synced."""

    def save(self) -> None:
        torch.save(self.training.state(), self.directory / "plain.pt")


class RawSynced(Contender):
    """The same bytes as one plain file, synced."""

    def save(self) -> None:
        with (self.directory / "raw.bin").open("wb", buffering=0) as file:
            for tensor in self.training.steady_tensors():
                file.write(tensor.reshape(-1).numpy().data)
            os.fsync(file.fileno())


class AsyncSave(Contender):
    """torch.distributed.checkpoint.async_save, in a group of one."""

    def save(self) -> None:
        self._future = dcp.async_save(
            self.training.state(), checkpoint_id=str(self.directory / "dcp")
        )

    def end(self) -> None:
        self._future.result()


class OursInThread(Contender):
    """The save of ddp_runner beside training, where there is no supervisor: a thread writes."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        self._saver = BackgroundSaver()
        self._store = CheckpointStore(directory / "store", keep_last=1)
        self._steps = itertools.count(1)

    def _facts(self) -> CheckpointFacts:
        return CheckpointFacts(
            step=next(self._steps), epoch=1, samples=1, run_id="benchmark",
            meaning={}, settings_digest="", monitored=None, reason="benchmark",
        )  # fmt: skip

    def write(self) -> Callable[[dict[str, object]], object]:
        return partial(self._store.save, facts=self._facts())

    def save(self) -> None:
        write = self.write()
        self._save = self._saver.begin(
            self.training.state(), steady=self.training.steady_tensors(), write=write
        )
        self.prove()

    def prove(self) -> None:
        self._save.prove()

    def wait(self) -> None:
        self._saver.release_state()

    def end(self) -> None:
        self._saver.take_ended(None).result()


def _serve(parent: int, files: list[int], connection: Connection) -> None:
    """As ``ddp:saver`` does."""
    torch.set_num_threads(1)
    own = [os.open(f"/proc/{parent}/fd/{one}", os.O_RDWR) for one in files]
    writer = CopyWriter(MemorySlots(own), disk=RealDisk())
    while True:
        connection.send_bytes(encode(writer.write(decode(connection.recv_bytes()))))


class Ours(OursInThread):
    """The save of ddp_runner beside training: a process of its own writes what a thread has copied."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        files = [os.memfd_create(f"slot{number}") for number in (0, 1)]
        self._slots = MemorySlots(files)
        self._saver = BackgroundSaver(self._slots)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(os.getpid(), files, theirs), daemon=True
        )
        self._process.start()

    def write(self) -> Callable[[dict[str, object]], object]:
        facts, store = self._facts(), self._store

        def order(content: dict[str, object]) -> object:
            sealed = self._slots.seal(content, facts)
            order = WriteCopy(
                rank=0,
                sealed=sealed,
                step=facts.step,
                directory=str(store.directory),
                keep_last=store.keep_last,
                keep_every=store.keep_every,
            )
            self._connection.send_bytes(encode(order))
            return saved_of(decode(self._connection.recv_bytes()), store)

        return order

    def cpu_beside_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class OursCompared(Ours):
    """With what several ranks do: each hashes its state, the saving one its copy, beside the step."""

    def save(self) -> None:
        super().save()
        self._hashing = StateHashing(self.training, source=self._save.copies_of)

    def prove(self) -> None:
        """Where nothing is compared, nothing is waited for."""

    def wait(self) -> None:
        self._hashing.result()  # a rank now exchanges a line with the others
        self._save.prove()
        super().wait()


class OursComparedFirst(Ours):
    """The same comparison between two steps, as it was before."""

    def save(self) -> None:
        state_hashes(self.training.replicated())
        super().save()


class OursAtOnce(Ours):
    """The last save of a run: in the training thread, from the live tensors."""

    def save(self) -> None:
        self._store.save(self.training.state(), self._facts())

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def end(self) -> None:
        """As above."""


KINDS: dict[str, type[Contender]] = {
    "no save": Contender,
    "memcpy": Copy,
    "torch.save": TorchSave,
    "async_save": AsyncSave,
    "raw write + fsync": RawSynced,
    "ours, beside": Ours,
    "ours, in a thread": OursInThread,
    "compared beside": OursCompared,
    "compared first": OursComparedFirst,
    "ours, at once": OursAtOnce,
}


def measure(
    training: Training, names: list[str], *, rounds: int, directory: Path
) -> dict[str, list[dict[str, float]]]:
    kinds = {name: KINDS[name] for name in names}
    contenders = {}
    for number, (name, kind) in enumerate(kinds.items()):
        (directory / str(number)).mkdir()
        contenders[name] = kind(training, directory / str(number))
    figures = {name: [] for name in kinds}
    for index in range(rounds + 1):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            row = one_save(training, contenders[name])
            if index > 0:  # the first round warms up
                figures[name].append(row)
            os.sync()  # nobody pays for the pages of the contender before
    report(training, figures, rounds)
    for contender in contenders.values():
        contender.close()
    return figures


def one_save(training: Training, contender: Contender) -> dict[str, float]:
    for path in contender.directory.glob("*.*"):
        path.unlink()  # nor for the truncation of an older file
    for name in (
        "dcp",
        "store",
    ):  # nor for its deletion, which in a run follows once the new one is on disk
        shutil.rmtree(contender.directory / name, ignore_errors=True)
    training.step()
    beside_s, own_s = contender.cpu_beside_s(), time.process_time()
    began_s = time.perf_counter()
    contender.save()
    called_s = time.perf_counter()
    computed_s, waited_s = training.step(contender.wait)
    stepped_s = time.perf_counter()
    contender.end()
    ended_s = time.perf_counter()
    return {
        "blocked": called_s - began_s + waited_s,
        "compute": computed_s,
        "step": stepped_s - called_s - waited_s,
        "written": ended_s - began_s,
        "cpu": time.process_time() - own_s,
        "beside": contender.cpu_beside_s() - beside_s,
    }


def report(training: Training, figures: dict[str, list[dict[str, float]]], rounds: int) -> None:
    size_bytes = sum(tensor.nbytes for tensor in training.steady_tensors())

    def median(name: str, column: str) -> float:
        return statistics.median(row[column] for row in figures[name])

    print(
        f"\n{size_bytes / 1e6:.0f} MB, {rounds} rounds, medians in seconds (quartiles of blocked)"
    )
    print(
        f"{'':<20}{'blocked':>9}{'quartiles':>16}{'x memcpy':>10}{'fwd+bwd':>9}{'step':>8}{'written':>9}"
        f"{'cpu':>8}{'beside':>8}"
    )
    for name, rows in figures.items():
        blocked = sorted(row["blocked"] for row in rows)
        low, _, high = statistics.quantiles(blocked, n=4)
        ratio = median(name, "blocked") / median("memcpy", "blocked")
        print(
            f"{name:<20}{median(name, 'blocked'):>9.4f}{f'{low:.4f}-{high:.4f}':>16}{ratio:>10.2f}"
            f"{median(name, 'compute'):>9.3f}{median(name, 'step'):>8.3f}{median(name, 'written'):>9.3f}"
            f"{median(name, 'cpu'):>8.3f}{median(name, 'beside'):>8.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=50, help="millions")
    parser.add_argument("--batch", type=int, default=48, help="samples: how long a step computes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--threads", type=int, default=1, help="of a rank: cores / ranks")
    parser.add_argument(
        "--directory", type=Path, help="where to write (default: the temporary one)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    training = Training(int(arguments.parameters * 1e6), arguments.batch)
    training.step()  # the optimizer's state is there from now on
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        names = ["memcpy", *(name for name in arguments.only if name != "memcpy")]
        figures = measure(training, names, rounds=arguments.rounds, directory=Path(directory))
    if arguments.json:
        rows = [
            {"contender": name, **{key: [row[key] for row in taken] for key in taken[0]}}
            for name, taken in figures.items()
        ]
        size_bytes = sum(tensor.nbytes for tensor in training.steady_tensors())
        record = {"megabytes": size_bytes / 1e6, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
