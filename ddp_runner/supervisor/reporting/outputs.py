"""Every file and screen that shows a run. Before the run may touch the disk, lines are held back."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner import config
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.processes.resources import remove_temporary_files
from ddp_runner.kernel.rules.secrets import hidden_texts, without_secrets
from ddp_runner.kernel.system.run_files import is_regular, not_written, replace_file
from ddp_runner.kernel.wire.events import Event
from ddp_runner.kernel.wire.messages import brief
from ddp_runner.observe.console import Alarms, ConsoleLine, LogTail, Shown, hidden_levels
from ddp_runner.observe.display import make_display
from ddp_runner.observe.files import LineFile, Outage, Warn, encode_record
from ddp_runner.observe.journal import Journal, MetricsFile
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.observe.summary import RunSummary, Summary, write_summary
from ddp_runner.observe.view import RunView, status_record

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Files:
    """The open files, once the directories are claimed."""

    def __init__(
        self,
        settings: Settings,
        *,
        ranks: int,
        warn: Warn,
        seal: str,
        shown_bytes: int,
        alarms: Alarms,
    ) -> None:
        directory = Path(settings.run.log_dir)
        self.logger = _logger(directory / "supervisor.log", debug=settings.run.debug, warn=warn)
        self.journal = Journal(directory / "events.jsonl", warn=warn)
        self.metrics = MetricsFile(directory / "metrics.jsonl", warn=warn)
        self.status = StatusFile(directory / "status.json", warn=warn)
        self.tail = LogTail(
            directory,
            ranks=range(ranks),
            shows=Shown(hidden=hidden_levels(settings), seal=seal, alarms=alarms),
            shown_bytes=shown_bytes,
        )
        self.summary_path = directory / "summary.json"

    def close(self) -> None:
        """Close all open files."""
        self.tail.close()
        self.journal.close()
        self.metrics.close()
        self.logger.close()


def _logger(path: Path, *, debug: bool, warn: Warn) -> DDPLogger:
    """The supervisor's own log. No log is worth a run: without the file its lines are on the console."""
    try:
        logger = DDPLogger(rank=None, path=path, debug=debug)
    except OSError as error:
        warn(not_written(path, error))
        logger = DDPLogger(rank=None)
        logger.close()
    else:
        logger.report_outages(path, warn)
    return logger


class Outputs:
    """Owned by the supervisor's loop. ``seal``: of the records that ranks write."""

    def __init__(self, settings: Settings, *, ranks: int, seal: str = "") -> None:
        self._seal = seal
        # Secrets: no line on the console, and none of the supervisor's own, has them.
        of_tasks = [settings.task, *settings.stages]
        self.hidden: tuple[str, ...] = hidden_texts(of_tasks, os.environ)
        self._settings = settings
        self._ranks = ranks
        self.alarms: Alarms = OrderedDict()  # of all ranks, from the first line of the start on
        self._files: _Files | None = None
        self._keeps_result = False
        self._held: list[tuple[str, str]] = []
        self._early_events: list[Event] = []
        self._hidden = hidden_levels(settings)
        self._display = make_display(settings.log.display, stream=sys.stdout, settings=settings)
        self._display.start()

    @property
    def may_write(self) -> bool:
        """True if files are open."""
        return self._files is not None

    def keep_result(self) -> None:
        """Leave the files unchanged from now on that say what the run was, and how it ended."""
        self._keeps_result = True

    def open(self, *, shown_bytes: int = 0) -> None:
        """Open the files; the directories exist and are ours. Writes config.yaml.

        ``shown_bytes`` of what rank 0 will write to its log first have been shown already.
        """
        self._files = _Files(
            self._settings,
            ranks=self._ranks,
            warn=self.warn_console,
            seal=self._seal,
            shown_bytes=shown_bytes,
            alarms=self.alarms,
        )
        for level, text in self._held:
            self._log(level, text)
        self._held.clear()
        for event in self._early_events:
            self._files.journal.write(event.name, **event.written())
        self._early_events.clear()
        directory = Path(self._settings.run.log_dir)
        if self._settings.run.debug:  # writing them as YAML takes a tenth of a launch's time
            for line in config.to_yaml(self._settings).splitlines():
                self._log("DEBUG", without_secrets(f"setting: {line}", self.hidden))
        remove_temporary_files(directory)
        if not self._keeps_result:
            self.write_config()
        for rank in range(self._ranks):
            path = directory / f"rank_{rank}.log"
            if os.path.lexists(path) and not is_regular(path):
                self.warn_console(
                    f"{path} is not a regular file: what rank {rank} says is not kept"
                )

    def follow(
        self, paths: Sequence[Path], *, shown: Collection[int], marks_lines: bool = False
    ) -> None:
        """Show from now on the new lines of these files, one file for each rank.

        Only ranks that are ``shown``; with ``marks_lines`` each line names its rank, as torchrun does.
        """
        if self._files is not None:
            self.show_rest()
            self._files.tail.close()
            self._files.tail = LogTail(
                paths,
                ranks=range(len(paths)),
                shows=Shown(
                    hidden=self._hidden,
                    seal=self._seal,
                    ranks=frozenset(shown),
                    marks_lines=marks_lines,
                ),
            )

    def write_config(self) -> None:
        """Write config.yaml."""
        path = Path(self._settings.run.log_dir) / "config.yaml"
        with contextlib.suppress(OSError):  # worth having, never worth a run
            replace_file(path, config.to_yaml(self._settings).encode())

    def write(self, event: Event, *, cause: int | None = None) -> int:
        """Journal an event; its id, or -1 while it is held back."""
        if self._files is None:
            self._early_events.append(event)
            return -1
        cause = None if cause == -1 else cause
        self._log("DEBUG", without_secrets(brief(event), self.hidden))
        return self._files.journal.write(event.name, cause=cause, **event.written())

    def say(self, text: str, *, level: str = "INFO") -> None:
        """Show a line of the supervisor on the console, unless its level is hidden there, and keep it in its log."""
        text = without_secrets(text, self.hidden)
        self._display.line(text, level=level)
        self._log(level, text)

    def show_line(self, line: ConsoleLine) -> None:
        """A line on the console only: it stands, or will stand, in its rank's log."""
        self._display.line(without_secrets(line.text, self.hidden), level=line.level)

    def keep(self, text: str) -> None:
        """Write a line to supervisor.log only."""
        self._log("INFO", without_secrets(text, self.hidden))

    def announce(self, text: str) -> None:
        """A line on the console that must stand in no file."""
        self._display.line(text, level="INFO")

    def keep_words(self, rank: int, text: str) -> None:
        """Put what a rank said before it had a log file into that file, now that it has ended."""
        if self._files is not None and text:
            file = LineFile(Path(self._settings.run.log_dir) / f"rank_{rank}.log")
            file.append(text.encode() + b"\n")
            file.close()

    def warn_console(self, text: str) -> None:
        """A warning about the very files that would hold it."""
        self._display.line(text, level="WARNING")

    def metrics(
        self, step: int, rank: int, values: Mapping[str, float], *, stage: str = ""
    ) -> None:
        """One logged step."""
        if self._files is not None:
            self._files.metrics.write(step, rank, values, stage=stage)

    def keep_points(self) -> None:
        """The run goes on where it was: a point that stands in metrics.jsonl already is not written twice."""
        if self._files is not None:
            self._files.metrics.keep_points()

    def show(self, view: RunView) -> None:
        """Bring the display and the console lines up to date."""
        if self._files is not None:
            for line in self._files.tail.poll():
                self.show_line(line)
        self._display.update(view)

    def status(self, view: RunView) -> None:
        """Replace status.json."""
        if self._files is not None and not self._keeps_result:
            self._files.status.write(status_record(view))

    def show_rest(self) -> None:
        """Show the last lines of the ranks, which have all ended, before the run's last line."""
        if self._files is not None:
            for line in self._files.tail.drain():
                self.show_line(line)

    def leave(self) -> None:
        """Stop writing if another supervisor continues the run in the same files."""
        # INVARIANT superseded-writes-nothing: a supervisor whose run another one has taken over leaves the files of that
        # one unchanged. Broken if: one that was suspended ends long after, and replaces the summary of the run.
        # Guarded by: test_who_has_a_successor_leaves_that_ones_files.
        if self._files is not None and self._files.status.is_anothers:
            self._files.close()
            self._files = None

    def finish(self, view: RunView, summary: Summary | None) -> None:
        """The last look, the summary on disk and on the screen, and everything closed."""
        self.show_rest()
        files = self._files
        if files is not None:
            self.status(view)
            if summary is not None and not self._keeps_result:
                try:
                    write_summary(files.summary_path, summary)
                except OSError as error:
                    self.warn_console(
                        f"{files.summary_path} could not be written ({error.strerror or error})"
                    )
            files.close()
        self._display.update(view)
        shown = summary if isinstance(summary, RunSummary) else None
        self._display.finish(shown if files is not None else None)

    def _log(self, level: str, text: str) -> None:
        if self._files is None:
            self._held.append((level, text))
            return
        write = {
            "DEBUG": self._files.logger.debug,
            "DETAIL": self._files.logger.detail,
            "WARNING": self._files.logger.warning,
            "ERROR": self._files.logger.error,
        }.get(level, self._files.logger.info)
        write(text)


# Owns status.json: the newest state of the run, readable whole at every moment. Never raises.


_Mark = tuple[int, int, int]


def _mark(path: Path) -> _Mark | None:
    """Return a mark that distinguishes this file from others of its name; None if there is no file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


class StatusFile:
    """Replaces status.json; not synced, since it is worth nothing after a power cut."""

    def __init__(self, path: Path, *, warn: Warn | None = None) -> None:
        self._path = path
        self._outage = Outage(path, warn)
        self._written: _Mark | None = None  # the file as this process last wrote it

    @property
    def is_anothers(self) -> bool:
        """True if another process has replaced the file since this one wrote it."""
        return self._written is not None and _mark(self._path) not in (None, self._written)

    def write(self, record: Mapping[str, object]) -> None:
        """Replace the file by ``record``; the old one stays if the disk fails."""
        try:
            replace_file(self._path, encode_record(record))
        except OSError as error:
            self._outage.failed(error)
            return
        self._outage.ended()
        self._written = _mark(self._path)
