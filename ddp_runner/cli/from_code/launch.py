"""``launch()``: starts the command as a child of a Python program or notebook and waits for it."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, cast

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus
from ddp_runner.kernel.system.run_files import from_json, read_small
from ddp_runner.start import FOLDERS_VARIABLE, IMPORT_FOLDER, LAUNCHED_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddp_runner.core.settings import Settings

# The child ties its life to ours before it does anything else. Unlike subprocess's preexec_fn this
# runs in a fresh interpreter, so that threads of this program cannot deadlock it.
_HEARS = "import signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]);"
_CHILD = (
    "import sys; from ddp_runner.kernel.system.parent_death import die_with_parent;"
    " die_with_parent(int(sys.argv[1]));"
    " from ddp_runner.__main__ import main; sys.exit(main(sys.argv[2:]))"
)
# "python -c" looks in the working directory first, for whatever is imported; see start.py.
_NOT_HERE = "import sys; sys.path[:] = [folder for folder in sys.path if folder];"
_BEGINS = _NOT_HERE + "from ddp_runner.start import clean_search_path; clean_search_path();"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run. ``summary`` is the content of summary.json, None if the run wrote none."""

    exit_code: int
    summary: dict[str, Any] | None
    log_dir: Path
    checkpoint_dir: Path
    settings: Settings | None = field(default=None, repr=False)

    def load_model(self) -> Any:
        """Return the task's model, a ``torch.nn.Module`` with the weights of the last checkpoint, on the CPU, ready for use.

        With ``ema_decay`` the weights are the average. Raises BadInputError if there is no checkpoint, or if
        the launch was refused: its folder's content then belongs to another run.
        """
        if self.exit_code == ExitCode.BAD_USAGE:
            raise BadInputError("launch", "", "was refused and trained nothing: see its error line")
        assert self.settings is not None
        # By name: this module is the command line's too, which never imports torch.
        given = import_module("ddp_runner.training.loading.given")
        return given.load_trained(self.settings, self.checkpoint_dir)


def launch(
    task: str | type | None = None,
    *,
    nproc: int | Literal["auto"] = "auto",
    config: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
) -> RunResult:
    """Train with ``nproc`` supervised ranks, as the command would; blocks until done.

    ``task`` is what ``--task`` takes, or a Task class that a file defines. ``config`` holds flat,
    dotted or nested settings; ``arguments`` are words of the command line and win over it. The
    run's output goes to this program's. KeyboardInterrupt asks the run to save and end; a second
    one ends it at once. SIGTERM and SIGHUP are passed on, and end this program as usual once the run
    has saved. The run dies with this process. Of a run that was complete before the result is the
    one of then.

    Raises BadInputError for wrong settings and RuntimeError when called by the ranks themselves.
    """
    refuse_in_rank("launch()")
    with prepared(task, nproc=nproc, config=config, arguments=arguments) as ready:
        return ready.result(run_child("train", ready.words, config_file=ready.config_file))


def refuse_in_rank(called: str) -> None:
    """Raise RuntimeError where the ranks of a launch import the file that has made it."""
    if os.environ.get(LAUNCHED_VARIABLE):
        raise RuntimeError(
            f"{called} was called while a rank imported this file; "
            "put the call under: if __name__ == '__main__':"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that can be started: ``words`` for ``train``, and what its folders had before.

    ``config_file``: what the program's settings were written to; empty where it gave none.
    """

    words: Sequence[str]
    config_file: str
    settings: Settings
    before: tuple[int, int] | None

    @property
    def log_dir(self) -> Path:
        """The log folder of the run."""
        return Path(self.settings.run.log_dir).absolute()

    def result(self, exit_code: int) -> RunResult:
        """The run has ended."""
        summary_file = self.log_dir / "summary.json"
        changed = identity(self.log_dir) not in (None, self.before)
        return RunResult(
            exit_code=exit_code,
            summary=from_json(read_small(summary_file))
            if changed
            else _kept(summary_file, exit_code),
            log_dir=self.log_dir,
            checkpoint_dir=Path(self.settings.run.checkpoint_dir).absolute(),
            settings=self.settings,
        )


@contextmanager
def prepared(
    task: str | type | None,
    *,
    nproc: int | Literal["auto"],
    config: Mapping[str, object] | None,
    arguments: Sequence[str],
) -> Iterator[Prepared]:
    """Prepare the command for :func:`launch`, and delete its configuration file afterwards. Raises BadInputError."""
    words = ["--nproc-per-node", str(nproc)]
    if task is not None:
        words += ["--task", task if isinstance(task, str) else task_spec(task)]
    config = _with_task_named(config or {})
    arguments, secrets = _without_secrets(arguments)
    with _config_file({**config, **secrets}) as config_words:
        words += [*config_words, *arguments]
        settings = _settings(words)
        yield Prepared(
            words=words,
            config_file=config_words[1] if config_words else "",
            settings=settings,
            before=identity(settings.run.log_dir),
        )


def _with_task_named(config: Mapping[str, object]) -> dict[str, object]:
    """``config`` with its task by name, where it holds the class itself."""
    named = dict(config)
    for key in ("task", "run.task"):
        if inspect.isclass(named.get(key)):
            named[key] = task_spec(cast("type", named[key]))
    run = named.get("run")
    if isinstance(run, Mapping) and inspect.isclass(run.get("task")):
        named["run"] = {**run, "task": task_spec(run["task"])}
    return named


def task_spec(task: type) -> str:
    """``FILE.py:NAME`` or ``module:NAME`` for a Task class, so that other processes can import it.

    Raises BadInputError for a class that no file defines at its top level.
    """
    if "." in task.__qualname__:
        raise BadInputError(
            "task", task.__qualname__, "must be a class at the top level of a module or file"
        )
    module = sys.modules.get(task.__module__)
    file = getattr(module, "__file__", None)
    if task.__module__ != "__main__" and "." in task.__module__:
        return f"{task.__module__}:{task.__qualname__}"
    if file is None or not inspect.isclass(task) or not Path(file).is_file():
        raise BadInputError(
            "task",
            task.__qualname__,
            "is defined in a notebook or at a prompt, where the ranks cannot import it; "
            "write it to a file and pass 'FILE.py:NAME' (%%writefile in a notebook), or train it in"
            " this process: DDPTrainer(TASK).train()",
        )
    return f"{Path(file).resolve()}:{task.__qualname__}"


def _without_secrets(arguments: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """``arguments``, and of those that name a secret its value: every user can read a command line."""
    from ddp_runner.cli.parser import parse_train  # noqa: PLC0415 - see _config_file
    from ddp_runner.config.sources import from_command_line  # noqa: PLC0415
    from ddp_runner.kernel.rules.secrets import masked_words  # noqa: PLC0415

    if masked_words(arguments) == tuple(arguments):
        return list(arguments), {}
    secrets, words = {}, list(arguments)
    for given in from_command_line(parse_train(arguments).assignments):
        name = given.name
        held = [word for word in words if word.lstrip("-").partition("=")[0] == name]
        if masked_words([f"{name}={given.value}"])[0].endswith("=***") and held:
            secrets[name] = given.value
            for word in held:
                place = words.index(word)
                del words[place : place + (1 if "=" in word else 2)]
    return words, secrets


@contextmanager
def _config_file(config: Mapping[str, object] | None) -> Iterator[list[str]]:
    """``--config FILE`` for ``config``; the file is gone afterwards."""
    if not config:
        yield []
        return
    import yaml  # noqa: PLC0415 - imported when used: this module loads with the public names

    from ddp_runner.config import from_flat  # noqa: PLC0415

    from_flat(config)  # wrong values are reported as the caller wrote them, not by the file's name
    with tempfile.NamedTemporaryFile("w", prefix="ddp_runner_", suffix=".yaml") as file:
        try:
            yaml.safe_dump(_plain(config), file, sort_keys=False)
        except yaml.YAMLError as error:
            raise BadInputError("config", "", "must hold plain values only") from error
        file.flush()
        yield ["--config", file.name]


def _plain(value: object) -> object:
    """Mappings as dicts, and sequences and paths as YAML knows them."""
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _settings(words: Sequence[str]) -> Settings:
    """The settings of the run that ``words`` ask for, as its ranks get them. Raises BadInputError."""
    from ddp_runner.cli.parser import parse_train  # noqa: PLC0415 - see _config_file
    from ddp_runner.cli.planning import asked_settings, plan_launch  # noqa: PLC0415

    parsed = parse_train(words)
    if parsed.finding.option:
        expected = "is for the command line: launch() trains"
        raise BadInputError(parsed.finding.option, "", expected)
    settings = asked_settings(parsed, dict(os.environ)).settings
    with contextlib.suppress(BadInputError):  # of the machine: the run says so itself
        return plan_launch(parsed, words=words, has_modes=False).settings
    return settings


def identity(log_dir: str | Path) -> tuple[int, int] | None:
    """Return a key that distinguishes a newly written summary.json from an older one; None if there is none."""
    try:
        status = (Path(log_dir) / "summary.json").stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _kept(file: Path, exit_code: int) -> dict[str, Any] | None:
    """The summary of a run that was complete before: then there was nothing to train, nor to write."""
    if exit_code != ExitCode.DONE or not file.exists():
        return None
    summary: dict[str, Any] = from_json(read_small(file))
    return summary if summary.get("status") == RunStatus.COMPLETED.value else None


def child_command(words: Sequence[str], command: str = "train") -> list[str]:
    """Our own interpreter with ``command`` and these words; it ends with this process."""
    return [sys.executable, "-c", _BEGINS + _HEARS + _CHILD, str(os.getpid()), command, *words]


def run_child(
    command: str,
    words: Sequence[str],
    *,
    config_file: str = "",
    take: Callable[[str], object] | None = None,
) -> int:
    """Run a command; forwards output and interrupts. ``take`` gets each line of its standard output instead."""
    environment = child_environment(config_file)
    if take is not None:  # what measures launches runs itself, whose ranks are marked then
        del environment[LAUNCHED_VARIABLE]
    inherits = writes_to_descriptor_1()
    is_piped = take is not None or not inherits
    # INVARIANT no-run-without-a-waiter: an interrupt comes once there is a child to pass it on to.
    # Broken if: it may be raised inside Popen, which leaves a run behind that nobody waits for.
    # Guarded by: test_an_interrupt_while_the_run_is_started_reaches_it.
    with (
        _interrupts_held() as before,
        # A session of its own: the terminal's Ctrl-C then reaches the run once, through us, and not
        # a second time as a member of the foreground group, which would end it without saving.
        subprocess.Popen(  # noqa: S603 - our own interpreter
            child_command(words, command),
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_piped else None,
            stderr=None if inherits else subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child,
    ):
        try:
            with _ends_passed_on(child):
                while (exit_code := _wait(child, before, take)) is None:
                    child.send_signal(signal.SIGINT)
        except BaseException:
            child.kill()
            raise
    return exit_code


@contextmanager
def _interrupts_held() -> Iterator[set[signal.Signals]]:
    """Hold back this thread's interrupts; yield the earlier signal mask, which is restored afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ends_passed_on(child: subprocess.Popen[str]) -> Iterator[None]:
    """Have what would end this program reach the run first, which saves; it acts here afterwards.

    Nothing is changed where the program has said itself what such a signal means, or in a thread,
    which cannot.
    """
    heard: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        heard.append(number)
        child.send_signal(number)

    taken = []
    if threading.current_thread() is threading.main_thread():
        ends = (signal.SIGTERM, signal.SIGHUP)
        taken = [number for number in ends if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if heard:
            signal.raise_signal(heard[0])


def _wait(
    child: subprocess.Popen[str],
    held: set[signal.Signals],
    take: Callable[[str], object] | None,
) -> int | None:
    """Copy the child's output until it ends; None when interrupted before, as by what came earlier."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if child.stdout is not None:
            for line in child.stdout:
                (take or sys.stdout.write)(line)
        return child.wait()
    except KeyboardInterrupt:
        return None


def writes_to_descriptor_1() -> bool:
    """False in a notebook or under capture, where only ``sys.stdout`` reaches the reader."""
    try:
        return sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):
        return False


def child_environment(config_file: str) -> dict[str, str]:
    """Return our environment, able to import what this process can, marked for ``launch``.

    The mark names the generated configuration, so that no ``.env`` is looked for next to it.
    """
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    search = [IMPORT_FOLDER, *(part for part in before if part != IMPORT_FOLDER)]
    folders = [str(Path(folder).absolute()) for folder in sys.path if folder]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search),
        FOLDERS_VARIABLE: os.pathsep.join(folders),
        LAUNCHED_VARIABLE: config_file or "1",
    }
