"""Plays the supervisor in a process of its own, on a real node, at the command of a test."""

from __future__ import annotations

import os
import selectors
import socket
import time

from ddp_runner import config
from ddp_runner.core.events import SpareReady, ZygoteReady
from ddp_runner.core.fork_specs import SpareSpec
from ddp_runner.core.helper_roles import STORE
from ddp_runner.core.launch_plan import DevicePlan, LaunchPlan
from ddp_runner.core.lifecycle import RankEvent
from ddp_runner.core.messages import Forked, StoreReady, decode
from ddp_runner.features.spare.rules import SPARE
from ddp_runner.supervisor.processes.helper_process import RankEnded
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.processes.operating_system import Linux
from ddp_runner.supervisor.processes.rank_start import RankStart
from ddp_runner.supervisor.world import World
from ddp_runner.system import parent_death
from tests.processes import DEADLINE_S

TASK = f"{__file__}:WaitingTask"
GONE_WITHIN_S = 30.0


class WaitingTask:
    """Small enough to be built at once."""

    def build_model(self):
        from torch import nn

        print("said before the log exists", flush=True)
        return nn.Linear(2, 1)

    def build_datasets(self):
        import torch
        from torch.utils.data import TensorDataset

        from ddp_runner.training.task import Datasets

        return Datasets(train=TensorDataset(torch.ones(8, 2), torch.ones(8, 1)))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()


def plan_for(folder, *, world_size, **changes):
    """A checked run of the waiting task on the CPU."""
    settings = config.from_flat(
        {
            "task": TASK,
            "log_dir": str(folder / "logs"),
            "checkpoint_dir": str(folder / "checkpoints"),
            "device": "cpu",
            "batch_size": 2,
            "max_steps": 2,
            "num_workers": 0,
            "use_amp": False,
            **changes,
        }
    )
    cpu = DevicePlan(device="cpu", name="CPU", visible_index=None)
    return LaunchPlan(
        settings=settings,
        origins={},
        devices=(cpu,) * world_size,
        world_size=world_size,
        threads_per_rank=1,
        resume_key={},
        settings_digest="0",
        command=("test",),
        notes=(),
    )


class PlayedSupervisor:
    """Forks what it is told to, and keeps what it hears."""

    def __init__(self, folder, world_size):
        parent_death.adopt_orphans()
        self._selector = selectors.DefaultSelector()
        plan = plan_for(folder, world_size=world_size)
        self.node = Node(plan, self._selector, system=Linux(), clock=time)
        self.world = World(self.node)
        self.heard = []
        self.ended = []
        self.store_pid = None
        self.node.start_zygote()

    @property
    def zygote_pid(self):
        return self.node.zygote_pid

    def until(self, check, *, timeout_s=DEADLINE_S):
        """Receive and reap until ``check`` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < deadline_s, f"heard only {self.heard}, reaped {self.ended}"
            for key, _ in self._selector.select(0.02):
                self._receive(*key.data)
            for ended in self.node.reap():
                self.ended.append((ended.pid, ended.exit_code, ended.signal_number))
                departure = self.node.departed(ended)
                if isinstance(departure, RankEnded):
                    handle = self.world.ranks[departure.rank]
                    handle.machine.advance(RankEvent.EXITED)
                    handle.released()

    def _receive(self, channel, rank):
        received = self.node.receive(channel, rank)
        if received is None:
            return
        message = decode(received[0])
        self.heard.append(message)
        if isinstance(message, ZygoteReady):
            self.node.zygote_is_ready()
        if isinstance(message, StoreReady):
            self.node.helper_is_ready(STORE, message)
        if isinstance(message, SpareReady):
            self.node.helper_is_ready(SPARE, message)
        if isinstance(message, Forked):
            rank, _ = self.node.claim(message)
            if rank is not None:
                self.world.ranks[rank].pid = message.pid
            self.store_pid = (
                None if self.node.helper(STORE) is None else self.node.helper(STORE).pid
            )

    def count(self, kind):
        """How many messages of a kind were heard."""
        return sum(isinstance(message, kind) for message in self.heard)

    def spawn_store(self):
        """Fork a store host and wait for it."""
        forks = self.count(Forked)
        self.node.start_store()
        self.until(lambda: self.node.has_ready_store and self.count(Forked) > forks)

    def spawn_spare(self, kind):
        """Ask for a spare."""
        spec = SpareSpec(**self.node.surroundings(self.node.ranks[0]), kind=kind)
        self.node.start_helper(SPARE, spec)

    def spawn_rank(self, handle, *, loads):
        """Fork a rank."""
        start = RankStart(loads=loads, resume="auto", may_take_spare=True)
        self.world.spawn_rank(handle, start, now_s=time.monotonic())


def threads_of(pid):
    """How many threads a process has once those that have ended are gone."""
    # A thread that has been joined stands in /proc a moment longer.
    by_s = time.monotonic() + GONE_WITHIN_S
    while (count := len(os.listdir(f"/proc/{pid}/task"))) > 1 and time.monotonic() < by_s:  # noqa: PTH208 - names only
        time.sleep(0.002)
    return count


def parent_of(pid):
    """The process id of its parent."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123
        return int(file.read().rpartition(")")[2].split()[1])


def answers_on(port):
    """Whether somebody accepts on the port."""
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
