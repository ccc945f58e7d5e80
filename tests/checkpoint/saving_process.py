"""Forks children that save checkpoints, for tests that kill them. Run as a script; torch loads once.

Reads lines ``MODE DIRECTORY`` from stdin. ``loop``: a child resumes from the newest checkpoint and
saves every next step until it is killed. ``beside``: the same, beside steps that change the state
in place. ``limited``: a child saves one checkpoint that is larger
than the files that it may write. Children and parent answer on stdout, a line each time.
"""

from __future__ import annotations

import os
import resource
import sys
from functools import partial
from pathlib import Path

import torch

from ddp_runner.checkpoint.background import BackgroundSaver
from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.system.parent_death import die_with_parent

from tests.checkpoint.states import facts_of, save  # isort: skip  # found through PYTHONPATH

LIMIT_BYTES = 64 * 1024


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _loop(directory: Path) -> None:
    Catalog(directory).clean_leftovers()
    loaded = CheckpointStore(directory, keep_last=2).load()
    step = 0 if loaded is None else loaded.manifest.step
    while True:
        step += 1
        state = {"weight": torch.full((200, 500), float(step)), "step": step}
        save(directory, step, monitored=1.0 + step % 7, state=state)
        _say(f"saved {step}")


def _beside(directory: Path) -> None:
    """As a rank does: the state changes as soon as its copy is made, while that is still written."""
    store = CheckpointStore(directory, keep_last=2)
    store.catalog.clean_leftovers()
    loaded = store.load()
    step = 0 if loaded is None else loaded.manifest.step
    weight, saver = torch.full((200, 500), float(step)), BackgroundSaver()
    while True:
        saver.release_state()
        weight += 1.0
        step += 1
        ended = saver.take_ended()
        if ended is not None:
            _say(f"saved {ended.result().manifest.step}")
        if not saver.is_busy:
            write = partial(store.save, facts=facts_of(step, monitored=1.0 + step % 7))
            saver.begin({"weight": weight, "step": step}, steady=[weight], write=write).prove()


def _limited(directory: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES))
    try:
        save(directory, 20, state={"weight": torch.zeros(200_000)})
    except FaultError as error:
        _say(f"fault {error.fault.kind.value} {error.fault.cause}")


def _child(mode: str, directory: Path, parent: int) -> None:
    die_with_parent(parent)
    status = 1
    try:
        {"loop": _loop, "beside": _beside, "limited": _limited}[mode](directory)
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    _say("ready")
    for line in sys.stdin:
        mode, directory = line.split(maxsplit=1)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(mode, Path(directory.strip()), parent)
        _say(f"pid {pid}")
        _, status = os.waitpid(pid, 0)
        _say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
