"""A spare's building of data and model in advance: its cost, and the proof that it is the same for every rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddp_runner.core.fork_specs import Surroundings
from ddp_runner.core.settings import Settings
from ddp_runner.system import parent_death
from ddp_runner.training.built_ahead import BuiltAhead, build_ahead
from ddp_runner.training.runtime import RankInfo

OF_A_RANK = ("RANK", "LOCAL_RANK")  # variables that a spare has no value for
A_COPY = "a copy of the environment"  # asked for: what is read of it later is not known
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class AsksForRankError(Exception):
    """Raised if a task's building asks for its rank, which is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The parts that were built, the memory that they hold in this process, and the time they took."""

    ahead: BuiltAhead
    held_bytes: int
    took_s: float


def build(settings: Settings, spec: Surroundings) -> Built:
    """Build it as any rank of this machine would. Raises AsksForRankError, and what the task raises."""
    parent_death.mark_own_children()
    began_s, before_bytes = time.monotonic(), own_bytes()
    rank_info = RankInfo(
        rank=-1,
        local_rank=-1,
        world_size=spec.world_size,
        local_world_size=spec.local_world_size,
        device=spec.device or "cpu",
        loads=False,
        other_devices=spec.other_devices,
    )
    os.environ.update(
        {
            "WORLD_SIZE": str(spec.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(spec.node),
            "MASTER_ADDR": spec.store_host,
            "MASTER_PORT": str(spec.store_port),
        }
    )
    with noticing(OF_A_RANK) as asked:
        ahead = build_ahead(settings, rank_info)
    if asked:
        raise AsksForRankError(f"the task asks for {min(asked)} when it is built")
    took_s = round(time.monotonic() - began_s, 4)
    return Built(ahead=ahead, held_bytes=max(0, own_bytes() - before_bytes), took_s=took_s)


@contextlib.contextmanager
def noticing(names: tuple[str, ...]) -> Iterator[set[str]]:
    """Run the block without the variables ``names``; yield the set of those it reads, or A_COPY if it copies all."""
    for name in names:
        os.environ.pop(name, None)
    asked: set[str] = set()
    kind = type(os.environ)

    class Noticing(kind):  # type: ignore[misc, valid-type] # os has no name for it in public
        def __getitem__(self, key: str | bytes) -> str | bytes:
            if os.fsdecode(key) in names:
                asked.add(os.fsdecode(key))
            value: str | bytes = super().__getitem__(key)
            return value

        def __iter__(self) -> Iterator[str | bytes]:
            asked.add(A_COPY)
            return iter(super().__iter__())

    variables: tuple[Any, ...] = (os.environ, os.environb)
    for one in variables:
        one.__class__ = Noticing
    try:
        yield asked
    finally:
        for one in variables:
            one.__class__ = kind


@contextlib.contextmanager
def first_to_end() -> Iterator[str]:
    """Within the block the kernel ends this process before others, where memory is short; its score of before."""
    before = ""
    with contextlib.suppress(OSError):
        before = _OOM_SCORE.read_text(encoding="ascii")
        _OOM_SCORE.write_text("1000", encoding="ascii")
    try:
        yield before
    finally:
        with contextlib.suppress(OSError):
            if before:
                _OOM_SCORE.write_text(before, encoding="ascii")


def spare_children(score: str) -> None:
    """Give what this process has started the kernel's score of before: a rank's children are not first to end.

    Looks at every process of the machine, so not while anybody waits.
    """
    for child in psutil.Process().children(recursive=True) if score else ():
        with contextlib.suppress(OSError):
            Path(f"/proc/{child.pid}/oom_score_adj").write_text(score, encoding="ascii")


def own_bytes() -> int:
    """Memory of this process that is no file's; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
