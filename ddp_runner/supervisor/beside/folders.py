"""Keeps a live run's folders: those that somebody removed are made again, locked, and it is said."""

from __future__ import annotations

from collections.abc import Callable

from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.lifecycle import IN_WORLD
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.messages import ReopenLog
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.system.run_directories import RunDirectories


class FolderKeeper:
    """Looked through by the supervisor's loop, once the run may write."""

    def __init__(
        self,
        directories: RunDirectories,
        *,
        node: Node,
        world: World,
        recorder: Recorder,
        ask_save: Callable[[], None],
    ) -> None:
        self._directories = directories
        self._node = node
        self._world = world
        self._recorder = recorder
        self._ask_save = ask_save

    def look(self) -> None:
        """Make again what is gone. The files in it are made by whoever writes them next."""
        for change in self._directories.look():
            self._recorder.record(
                events.FolderMadeAgain(
                    folder=str(change.folder), option=change.option, text=change.text
                )
            )
            if change.is_new and change.option == "--log-dir":
                self._recorder.outputs.write_config()
            if change.is_new and change.option == "--checkpoint-dir":
                self._ask_save()  # whatever was there cannot be gone back to
        for rank, process in self._node.processes.items():
            handle = self._world.ranks[rank]
            if handle.membership in IN_WORLD and handle.has_log and process.log_is_gone():
                self._world.send(handle, ReopenLog())
