"""The zygote: imports torch once, then forks ranks and the store host in milliseconds.

It stays single-threaded and never touches CUDA, so that its forks start clean: what it imports for a user
and leaves either behind is left to the ranks, and it starts again without that. It is started as
``start.py ddp_runner.kernel.rank.zygote DESCRIPTOR SUPERVISOR_PID MODULE:WORDS [LEFT_OUT...]``, MODULE being that of its ranks, and ends with its supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ddp_runner import start
from ddp_runner.kernel.rank.signals import leave_stops_to_supervisor, release_stops, stops_held
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.wire.events import ZygoteReady
from ddp_runner.kernel.wire.fork_specs import PROGRAMS, ForkKind, ImportsSpec
from ddp_runner.kernel.wire.messages import NO_PROCESS, Fork, Forked

_CUDA_NOT_INITIALIZED = 3  # cuda.h: CUDA_ERROR_NOT_INITIALIZED


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What a zygote imports before it forks, as ``ahead(words)`` of the module of its ranks returns it.

    ``ours``: modules that each fork needs. ``settle``: called once they are imported. ``theirs``: modules of the user's;
    ``take`` imports one of them. One after which forks would not start clean is left to the ranks: ``says`` is what
    the user reads then, with ``{name}`` and ``{left}``.
    """

    ours: tuple[str, ...]
    settle: Callable[[], object] = _nothing
    theirs: tuple[str, ...] = ()
    take: Callable[[str], object] = importlib.import_module
    says: str = "--preload: {name} is left to each rank: after importing it {left}"


class UnfitForForksError(Exception):
    """Raised if an import leaves something behind that no fork can use. ``wanted``: the modules left to import."""

    def __init__(self, wanted: str, left_out: str) -> None:
        super().__init__(left_out)
        self.wanted = wanted


class ProgramBegins(BaseException):
    """Raised in a fork that is a program of its own from here on: it is to run at the bottom of the stack.

    So it ends as the interpreter does, and no frame of ours is below its own.
    """

    def __init__(self, run: Callable[[], int]) -> None:
        super().__init__()
        self.run = run


def preload(wanted: str) -> float:
    """Import everything that forks will need; returns the seconds it took.

    ``wanted``: the module of the ranks, a colon, and words that it reads (:class:`Ahead`). Raises what an import raises,
    and UnfitForForksError for the first of the user's modules after which forks would not start clean.
    """
    began_s = time.monotonic()
    gc.disable()  # looking for garbage while importing takes a quarter of the time, for 7 MB
    module, _, words = wanted.partition(":")
    ahead: Ahead = importlib.import_module(module).ahead(words)
    for name in ahead.ours:
        importlib.import_module(name)
    ahead.settle()
    was_fit = not ahead.theirs or not what_forks_inherit()
    for name in ahead.theirs:
        ahead.take(name)
        left = what_forks_inherit()
        if left and was_fit:
            others = ",".join(one for one in ahead.theirs if one != name)
            raise UnfitForForksError(f"{module}:{others}", ahead.says.format(name=name, left=left))
    gc.freeze()  # keeps the collector from touching, and so copying, shared pages
    gc.enable()
    return time.monotonic() - began_s


def fork_to_supervisor(supervisor_pid: int, run: Callable[[], int]) -> int:
    """Fork a process that is the supervisor's child, not ours; returns its pid. May raise OSError.

    Forked twice: when the process between ends, the kernel hands its child to the nearest
    "child subreaper", the supervisor. So a rank outlives its zygote, and dies with its supervisor.
    """
    reader, writer = os.pipe()
    with stops_held():
        between = os.fork()
    if between == 0:
        # Asked before the fork: a child that is scheduled late has its new parent already.
        between_pid = os.getpid()
        os.close(reader)
        with contextlib.suppress(
            OSError
        ):  # no more processes: nothing is written, and that shows it
            child = os.fork()
            if child == 0:
                os.close(writer)
                _become(between_pid, supervisor_pid, run)
            os.write(writer, child.to_bytes(8, "little"))
        os._exit(0)
    os.close(writer)
    os.waitpid(between, 0)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read(8)
    if len(answer) < 8:
        raise OSError("no further process can be forked: a limit on processes is reached")
    return int.from_bytes(answer, "little")


def _become(between_pid: int, supervisor_pid: int, run: Callable[[], int]) -> None:
    """Wait in the new process for its new parent, run, and never return."""
    status = 1
    try:
        leave_stops_to_supervisor()  # until a rank takes them
        release_stops()
        while os.getppid() == between_pid:
            time.sleep(0.0005)
        parent_death.die_with_parent(supervisor_pid)
        status = run()
    except ProgramBegins:
        raise
    except BaseException:  # noqa: BLE001 - top of a process: say why and end
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def serve(channel: Channel, supervisor_pid: int) -> None:
    """Fork whatever is asked for, until the supervisor closes the channel."""
    while True:
        try:
            message, descriptors = channel.receive()
        except ChannelClosedError:
            return
        if not isinstance(message, Fork):
            raise TypeError(f"a zygote only forks; got {type(message).__name__}")
        parent_death.set_process_name("ddp:zygote")  # also one that stood by until now
        request, inherited = message, descriptors

        def run(request: Fork = request, inherited: list[int] = inherited) -> int:
            channel.close()
            return _run(request, inherited, supervisor_pid)

        try:
            pid = fork_to_supervisor(supervisor_pid, run)
        except OSError:
            if not message.is_dispensable:
                raise
            pid = NO_PROCESS
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(Forked(token=message.token, pid=pid))


def _run(request: Fork, inherited: list[int], supervisor_pid: int) -> int:
    """Run the work that a fork is for, and return its exit code."""
    if request.kind is ForkKind.STANDBY:
        return stand_by(*inherited, supervisor_pid=supervisor_pid)
    module = importlib.import_module(request.module)
    if request.kind in PROGRAMS:
        raise ProgramBegins(lambda: int(module.run(request, inherited)))
    return int(module.main(request, inherited))


def stand_by(channel_descriptor: int, output: int, *, supervisor_pid: int) -> int:
    """Be the next zygote, with all that this one has imported: wait for the first fork to be asked for."""
    parent_death.set_process_name("ddp:standby")
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    serve(Channel.from_descriptor(channel_descriptor), supervisor_pid)
    return 0


def what_forks_inherit() -> str:
    """Describe what imports have left behind that no fork can use; empty if there is nothing."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    uses_cuda = sys.modules["torch"].cuda.is_initialized() or driver_has_started()
    left = [f"{threads} threads run"] * (threads > 1) + ["CUDA is in use"] * uses_cuda
    return " and ".join(left)


def driver_has_started(library: str = "libcuda.so.1") -> bool:
    """Return whether code in this process has initialised CUDA's driver, after which no fork can use it.

    ``torch.cuda.is_available()`` initialises it, and ``torch.cuda.is_initialized()`` does not show that.
    """
    try:
        driver = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not even loaded
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_NOT_INITIALIZED


def _start_again(
    descriptor: int, words: Sequence[str], environment: Mapping[str, str], folder: int
) -> NoReturn:
    """Be a new zygote in the same process: of what was imported nothing is left, no thread and no driver."""
    os.fchdir(folder)
    os.set_inheritable(descriptor, True)
    command = [sys.executable, start.__file__, "ddp_runner.kernel.rank.zygote", *words]
    os.execve(command[0], command, environment)  # noqa: S606 - our own interpreter and module


def main(arguments: list[str]) -> int:
    """Entry point."""
    descriptor, supervisor_pid = int(arguments[0]), int(arguments[1])
    parent_death.die_with_parent(supervisor_pid)
    parent_death.set_process_name("ddp:zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_stops_to_supervisor()
    start.write_stacks_when_asked()  # a user's module may import for ever
    channel = Channel.from_descriptor(descriptor)
    wanted, left_out = arguments[2], arguments[3:]
    # Before anybody's import changes them.
    environment, folder = dict(os.environ), os.open(".", os.O_RDONLY | os.O_CLOEXEC)
    ahead_s = 0.0
    if wanted.startswith(start.ZYGOTE_AHEAD):
        ahead_s = preload(wanted.removeprefix(start.ZYGOTE_AHEAD))
        try:
            message, _ = channel.receive()
        except ChannelClosedError:
            return 0
        assert isinstance(message, Fork), "what else to import is sent first of all"
        assert isinstance(message.spec, ImportsSpec)
        wanted = message.spec.wanted
    try:
        import_s = ahead_s + preload(wanted)
    except UnfitForForksError as unfit:
        words = [*arguments[:2], unfit.wanted, *left_out, str(unfit)]
        _start_again(descriptor, words, environment, folder)
    os.close(folder)
    torch_version = str(sys.modules["torch"].__version__)
    if left := what_forks_inherit():
        left_out = [*left_out, f"after the imports {left}: ranks that are forked may not work"]
    channel.send(ZygoteReady(torch=torch_version, import_s=import_s, warning="\n".join(left_out)))
    try:
        serve(channel, supervisor_pid)
    except ProgramBegins as begins:
        run = begins.run
    else:
        return 0
    return run()
