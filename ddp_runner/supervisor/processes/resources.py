"""The resources of a supervised run on this machine: the store's port and the board."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from pathlib import Path
from typing import Any

from ddp_runner.core.board import SLOT_BYTES, Board
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.fork_specs import Program, SaverSpec
from ddp_runner.core.launch_plan import LaunchPlan, LoopPlan
from ddp_runner.system.reach import LOOPBACK, why_unreachable
from ddp_runner.system.run_files import left_over


def remove_temporary_files(directory: Path) -> list[Path]:
    """Remove what writers of this machine that have ended left half written; what was removed."""
    removed = []
    dead, _ = left_over(directory)
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
    """The memory that a machine's ranks share besides the board: samples, copies of the state, disk trouble.

    ``has_saver``: whether a process is to make files of the copies. On several machines who may write is a
    matter of leases, which only a rank has.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        settings = plan.settings
        samples = ("training_samples", "validation_samples") if settings.data.preload else ()
        copies = ("state_copy_0", "state_copy_1") if settings.checkpoint.memory_every else ()
        self._samples, self._copies = SharedMemory(*samples), SharedMemory(*copies)
        self.has_saver = bool(copies) and plan.opaque is None and plan.nodes is None
        self._trouble = SharedMemory(*(["disk_trouble"] if settings.run.inject else []))
        for descriptor in self._trouble.descriptors:
            os.ftruncate(descriptor, mmap.PAGESIZE)
        # The fields of Surroundings that say where all that is.
        self.paths: dict[str, Any] = {
            "preload": self._samples.paths,
            "memory_slots": self._copies.paths,
            "has_saver": self.has_saver,
            "saver_trouble": self._trouble_path,
        }

    @property
    def _trouble_path(self) -> str:
        return "".join(self._trouble.paths) if self.has_saver else ""

    def saver_spec(self, plan: LaunchPlan) -> SaverSpec:
        """Return the specification that the process that writes checkpoints is forked with."""
        return SaverSpec(
            folder=plan.settings.run.checkpoint_dir,
            memory_slots=self._copies.paths,
            saver_trouble=self._trouble_path,
        )

    def close(self) -> None:
        """Close the memory: no further rank starts."""
        for held in (self._samples, self._copies, self._trouble):
            held.close()


class ProgramMemory:
    """The content of the user's program at launch, for ranks that start later. ``program``: its wire form."""

    def __init__(self, loop: LoopPlan) -> None:
        self._descriptor: int | None = None
        path = ""
        if loop.source:
            self._descriptor = os.memfd_create("program")
            with open(self._descriptor, "wb", closefd=False) as file:
                file.write(loop.source)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.program = Program(
            path=loop.path, module=loop.module, arguments=tuple(loop.arguments), source=path
        )

    def close(self) -> None:
        """Close the memory: no further rank starts."""
        if self._descriptor is not None:
            os.close(self._descriptor)
