"""The resources of a supervised run on this machine: the store's port and the board."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_runner.kernel.processes.node_plan import NodePlan
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.reach import LOOPBACK, why_unreachable
from ddp_runner.kernel.system.run_files import left_over
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board
from ddp_runner.kernel.wire.fork_specs import Program, SaverSpec


def remove_temporary_files(directory: Path) -> list[Path]:
    """Remove what writers of this machine that have ended left half written; what was removed.

    A folder that cannot be read, such as one whose disk is gone, must not stop the end of a run.
    """
    removed = []
    try:
        dead, _ = left_over(directory)
    except OSError:
        return []
    for path in dead:
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def bind_store_port(port: int, *, address: str = LOOPBACK) -> socket.socket:
    """A listening socket for the store on ``address``, held by the supervisor for the whole run.

    Raises BadInputError where the port is taken or none is left, or ranks could not reach it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without it, the connections of a run that has just ended would block the same --port.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        expected = (
            f"is not free ({error.strerror}); 0 takes any free one"
            if port
            else f"no port is free on {address} ({error.strerror}); end other programs"
        )
        raise BadInputError("ddp.port", port, expected) from error
    if why := why_unreachable(address):
        listening.close()
        raise BadInputError(address, "", why)
    return listening


class StorePlace:
    """The meeting place of a run's ranks: a listening socket here, or an address on another machine."""

    def __init__(self, host: str, port: int, *, listening: socket.socket | None = None) -> None:
        self.host, self.port = host, port
        self._listening = listening

    @classmethod
    def on_this_machine(cls, port: int, *, address: str = LOOPBACK) -> StorePlace:
        """Listening on ``address``; port 0: any that is free. Raises as :func:`bind_store_port` does."""
        listening = bind_store_port(port, address=address)
        return cls(address, int(listening.getsockname()[1]), listening=listening)

    def fileno(self) -> int:
        """The listening socket, for the process that serves the store."""
        assert self._listening is not None, "the store is on another machine"
        return self._listening.fileno()

    def move(self, host: str, port: int) -> None:
        """The store on another machine is another one by now, at this address."""
        self.host, self.port = host, port

    def close(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            self._listening.close()


class BoardMemory:
    """The progress board in unnamed shared memory: no file, gone with the last process."""

    def __init__(self, slots: int) -> None:
        self.descriptor = os.memfd_create("progress_board")
        os.ftruncate(self.descriptor, slots * SLOT_BYTES)
        self._memory = mmap.mmap(self.descriptor, 0)
        self._view = memoryview(self._memory)
        self.board = Board(self._view, slots)
        for rank in range(slots):
            self.board.slot(rank).set_loss(math.nan)  # a loop may never report one

    def close(self) -> None:
        """Unmap and close."""
        self.board.close()
        self._view.release()
        with contextlib.suppress(BufferError):  # a slot is still held: the process ends anyway
            self._memory.close()
        os.close(self.descriptor)


class SharedMemory:
    """Memory files that ranks share, such as samples, or copies of the state. ``paths``: how ranks open them.

    They have no name, and are this process's: no rank's end takes them along.
    """

    def __init__(self, *names: str) -> None:
        self._descriptors = [os.memfd_create(name) for name in names]
        self.paths = tuple(f"/proc/{os.getpid()}/fd/{number}" for number in self._descriptors)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the memory in this process."""
        return tuple(self._descriptors)

    def close(self) -> None:
        """Close the memory: no further rank starts."""
        for descriptor in self._descriptors:
            os.close(descriptor)


class SharedByRanks:
    """The memory that a machine's ranks share besides the board: samples, copies of the state, disk trouble."""

    def __init__(self, plan: NodePlan) -> None:
        self._held = {field: SharedMemory(*names) for field, names in plan.shared.items()}
        self._trouble = SharedMemory(*(["disk_trouble"] if plan.shares_trouble else []))
        for descriptor in self._trouble.descriptors:
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.has_saver = plan.has_saver
        # The fields of Surroundings that say where all that is.
        self.paths: dict[str, Any] = {
            **{field: held.paths for field, held in self._held.items()},
            "has_saver": self.has_saver,
            "saver_trouble": "".join(self._trouble.paths) if self.has_saver else "",
        }

    def descriptors(self, name: str) -> tuple[int, ...]:
        """Return the descriptors, in this process, of the memory that stands under this name in the node's plan."""
        return self._held[name].descriptors

    def saver_spec(self, folder: str) -> SaverSpec:
        """Return the specification that the process that writes checkpoints into ``folder`` is forked with."""
        return SaverSpec(
            folder=folder,
            memory_slots=self.paths["memory_slots"],
            saver_trouble=self.paths["saver_trouble"],
        )

    def close(self) -> None:
        """Close the memory: no further rank starts."""
        for held in (*self._held.values(), self._trouble):
            held.close()


class ProgramMemory:
    """The content of the user's program at launch, for ranks that start later. ``program``: its wire form."""

    def __init__(self, program: Program, source: bytes) -> None:
        self._descriptor: int | None = None
        path = ""
        if source:
            self._descriptor = os.memfd_create("program")
            with open(self._descriptor, "wb", closefd=False) as file:
                file.write(source)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.program = replace(program, source=path)

    def close(self) -> None:
        """Close the memory: no further rank starts."""
        if self._descriptor is not None:
            os.close(self._descriptor)
