"""Starts a run from settings that a form has: the same command that a person types, in a session of its own."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ddp_runner import start
from ddp_runner.config import check_relations, home_files, resolve
from ddp_runner.config.fields import known_fields
from ddp_runner.core.settings.whole_run import LOGS
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import open_new
from ddp_runner.observe.format import printable
from ddp_runner.observe.history.json_lines import last_lines

VALUE_CHARACTERS_MAX = 10_000
_REFUSED_WITHIN_S = (
    6.0  # wrong input is found within this time; what comes later is in the run's folder
)
_LOOK_EVERY_S = 0.1
_NOT_ASKED = (
    "run.log_dir",
    "run.checkpoint_dir",
    "log.console",
    "log.display",
    "log.page",
    "log.page_port",
    "log.page_can_inject",
)
SETTINGS = tuple(key for key in known_fields() if key not in _NOT_ASKED)


class RunStarter:
    """Runs in ``root``, each in a folder of its name. They outlive this process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._started: list[subprocess.Popen[bytes]] = []

    def words(self, values: Mapping[str, str]) -> list[str]:
        """The words of the command line; empty values are left out. Raises BadInputError for what is none."""
        given = []
        for key, value in values.items():
            if key not in SETTINGS:
                raise BadInputError(key[:80], "", "cannot be set here")
            if len(value) > VALUE_CHARACTERS_MAX or "\0" in value:
                raise BadInputError(key, f"{value[:40]}...", "is too long, or no text")
            if value.strip():
                given.append(f"{key}={value.strip()}")
        assignments = [(key, value.strip()) for key, value in values.items() if value.strip()]
        settings = resolve(
            files=home_files(os.environ), environment=os.environ, command_line=assignments
        ).settings
        check_relations(settings)
        folder = self._root / settings.run.name
        is_usual = self._root.resolve() == Path(LOGS).resolve()
        return ["train", *([] if is_usual else [f"--log-dir={folder}"]), *given]

    def shown(self, words: list[str]) -> str:
        """Return the command as a person types it."""
        return shlex.join([start.COMMAND, *words])

    async def start(self, values: Mapping[str, str]) -> str:
        """Start it; what is to be said. Raises BadInputError for what is wrong, also where the run finds it."""
        words = self.words(values)
        self._reap()
        process, output = self._spawn(words)
        self._started.append(process)
        for _ in range(int(_REFUSED_WITHIN_S / _LOOK_EVERY_S)):
            await asyncio.sleep(_LOOK_EVERY_S)
            if (code := process.poll()) is not None:
                said = [line for line in last_lines(output) if line.strip()]
                output.unlink(missing_ok=True)
                if code:
                    raise BadInputError("train", "", printable("\n".join(said[-8:])))
                return "the run has ended already: it is in the list"
        return f"started, process {process.pid}; the list shows it once it may write its folder"

    def _spawn(self, words: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
        """The process, and the file that it prints into."""
        output = self._root / f".started_{os.getpid()}_{len(self._started)}.txt"
        output.unlink(missing_ok=True)
        descriptor = open_new(output)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and command
                [sys.executable, start.__file__, "ddp_runner.__main__", *words],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,  # it goes on without this page, and no Ctrl-C here is its
            )
        finally:
            os.close(descriptor)
        return process, output

    def _reap(self) -> None:
        """Take the exit codes of those that have ended."""
        for process in self._started:
            process.poll()
