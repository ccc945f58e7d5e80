"""DDP's sums over gloo on one GPU, by the product's own hook, against sums by hand: bit by bit.

Before torch 2.11 DDP took what gloo had not copied back yet (pytorch#155714, #170812).
"""

from __future__ import annotations

import itertools
import socket
import time
from datetime import timedelta

from tests.gpu import group as by_hand
from tests.gpu.facts import rehearses

STEPS = 300  # 30 where the command is only tried out
WIDTH = 400  # layers of 640 kB: more than one bucket of 1 MB
RATE = 0.01


def free_port():
    """One that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def compare(facts, rank, world_size, port):  # noqa: PLR0915 - a process, from its imports on
    """One rank: how many steps had a wrong sum, after how many."""
    import torch
    from torch import nn

    from ddp_runner.core.settings import DdpSettings
    from ddp_runner.kernel.group.abort import AbortSwitch
    from ddp_runner.kernel.group.group import Membership, joined
    from ddp_runner.kernel.group.tcp_store import StoreLink
    from ddp_runner.kernel.replica.loss_module import Signal
    from ddp_runner.kernel.replica.replica import Replica
    from ddp_runner.kernel.wire.board import SLOT_BYTES, Board

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # ranks share the cores, where torch's threads wait for each other
    device = by_hand.device()
    served = _serve(port) if rank == 0 else None

    def fresh():
        torch.manual_seed(3)
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*layers).to(device)

    def loss_of(model, batch):
        return model(batch).square().mean()

    def batch_of(step, of_rank):
        generator = torch.Generator().manual_seed(1000 * step + of_rank)
        return torch.randn(16, WIDTH, generator=generator).to(device)

    own, other = fresh(), fresh()
    weights = (0.5, 0.3, 0.2)
    membership = Membership(
        generation=1, rank=rank, world_size=world_size, local_rank=rank,
        local_world_size=world_size,
    )  # fmt: skip
    link = StoreLink("127.0.0.1", port, timeout_s=20.0)
    wrong = begun_s = 0
    with joined(
        membership, link=link, backend="gloo", device=device, timeout_s=20.0, switch=AbortSwitch()
    ) as group:
        slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
        settings = DdpSettings(bucket_cap_mb=1)
        replica = Replica(own, loss_of, group=group, settings=settings, slot=slot)
        votes = [0.0] * len(Signal)
        begun_s = time.monotonic()
        steps = 30 if rehearses() else STEPS
        for step in range(steps):
            replica.zero_gradients()
            replica.forward(batch_of(step, rank), weight=weights[rank], votes=votes).backward()
            replica.check_reduced()
            found = [p.grad for p in own.parameters()]
            parts = []
            for of_rank in range(world_size):
                other.zero_grad(set_to_none=True)
                (loss_of(other, batch_of(step, of_rank)) * weights[of_rank]).backward()
                parts.append([p.grad.clone() for p in other.parameters()])
            wrong += not all(
                _is_a_sum(one, each)
                for one, each in zip(found, zip(*parts, strict=True), strict=True)
            )
            with torch.no_grad():
                for mine, hand, gradient in zip(
                    own.parameters(), other.parameters(), found, strict=True
                ):
                    mine.sub_(gradient, alpha=RATE)
                    hand.copy_(mine)
            if step % 50 == 49 or step == steps - 1:
                facts.note("steps", step + 1)
                facts.note("wrong", wrong)
        facts.note("step_ms", 1000 * (time.monotonic() - begun_s) / steps)
        group.all_reduce(torch.zeros(1, device=device))  # nobody leaves before all have ended
        replica.close()
    del served


def _is_a_sum(found, parts):
    """Whether each element is the sum of the parts in some order: gloo's ring turns for each chunk."""
    import torch

    orders = {
        (min(a, b), max(a, b), *rest) for a, b, *rest in itertools.permutations(range(len(parts)))
    }
    fits = torch.zeros_like(found, dtype=torch.bool)
    for order in orders:
        total = parts[order[0]]
        for number in order[1:]:
            total = total + parts[number]
        fits |= total == found
    return bool(fits.all())


def _serve(port):
    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
