"""A rank that joins as torch would, and stops for good at one chosen store operation."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ddp_runner.kernel.group.signed import SignedStore, key_prefix

from .joining import SECRET


class StoppingStore(dist.Store):
    """A store that SIGSTOPs its process at operation number ``stop_at``, counted from 1."""

    def __init__(self, inner, *, stop_at):
        super().__init__()
        self._inner = inner
        self._stop_at = stop_at
        self._count = 0

    def _step(self):
        self._count += 1
        if self._count == self._stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    def set(self, key, value):
        self._step()
        self._inner.set(key, value)

    def get(self, key):
        self._step()
        return self._inner.get(key)

    def wait(self, keys, *timeout):
        self._step()
        self._inner.wait(keys, *timeout)

    def add(self, key, amount):
        self._step()
        return self._inner.add(key, amount)

    def check(self, keys):
        self._step()
        return self._inner.check(keys)

    def set_timeout(self, timeout):
        self._inner.set_timeout(timeout)


def form_and_stop(me, port, *, stop_at, generation=1):
    """Begin to form ``generation`` of this package; stopped at a store operation, or once connected."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=20)
    inner = TCPStore("127.0.0.1", port, None, False, timeout=limit)
    keys = PrefixStore(key_prefix(SECRET, generation), inner)
    signed = SignedStore(keys, SECRET, timeout_s=20.0)  # torch alone would not keep it alive
    scoped = PrefixStore("group", signed)
    dist.init_process_group(
        "gloo",
        store=StoppingStore(scoped, stop_at=stop_at),
        rank=me.rank,
        world_size=me.world_size,
        timeout=limit,
    )
    os.kill(os.getpid(), signal.SIGSTOP)  # before it has shown that it belongs to the generation
