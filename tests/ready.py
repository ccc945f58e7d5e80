"""Launches that need import nothing: the command and its zygote are forks of a process that has done so.

Importing torch is nearly all that a run of a few steps costs. All processes of the run are there, each the
child of whom it always is, and get real signals; a zygote that is lost is followed by an ordinary one, unless ZYGOTES
in the environment says how many are there.
What differs: the interpreters' options and what they read once of the environment (PYTHONHASHSEED), that
the supervisor has torch in its memory, that torch has computed a step, and that a program which ends leaves its memory to the kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from array import array
from pathlib import Path
from typing import NoReturn

from ddp_runner import installed, start
from ddp_runner.core.launch_plan import TRAINED
from ddp_runner.features.script.rules import RANK
from ddp_runner.kernel.rank.exit_functions import run_exit_functions
from ddp_runner.kernel.system import parent_death
from ddp_runner.system import launch_folder
from tests.huge_pages import use_huge_pages

ROOT = Path(__file__).resolve().parents[1]
# As the supervisor has it for two ranks on two cores: read when torch is imported.
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": str(ROOT),
}
# What the command imports on its way, beside the features: the supervisor, the screens and all that they need.
_PRELOADED = (
    *(
        "ddp_runner.cli.planning",
        "ddp_runner.cli.train",
        "ddp_runner.features.script.run_command",
        "ddp_runner.supervisor.assembly",
    ),
    "ddp_runner.observe.display",
)
WHOLE_END = "TESTS_WHOLE_END"
ZYGOTES = "TESTS_ZYGOTES"
_POPEN = subprocess.Popen
_STARTED = "started"
_READY_WITHIN_S = 250.0
# For the environments of all that is forked, in the memory from which the kernel shows them.
_ROOM = {"_ROOM": "0" * 16384}


class Launcher:
    """The process that forks launches, and the way to it. Ends with its owner, or when closed."""

    def __init__(
        self,
        folder: str = "",
        *,
        owner_pid: int = 0,
        imports: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        """``variables`` are added to those of its interpreter. The owner is this process, unless said.

        ``imports``: modules that it imports beside.
        """
        self._folder = Path(folder or tempfile.mkdtemp(prefix="launcher_"))
        self.path = str(self._folder / "socket")
        owner_pid = owner_pid or os.getpid()
        self._pid = 0
        if (self._folder / _STARTED).exists():
            return
        # No posix_spawn: glibc's leaves a signal of its own ignored in all that it starts.
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ready", self.path, str(owner_pid), *imports],
            env={**os.environ, **ENVIRONMENT, **_ROOM, **variables},
            stdin=subprocess.DEVNULL,
        )
        self._pid, process.returncode = process.pid, 0  # else it warns where it is forgotten
        (self._folder / _STARTED).touch()

    def close(self) -> None:
        """End it; runs that go on are not its matter."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        shutil.rmtree(self._folder)

    def connect(self) -> socket.socket:
        """A link to it, once it is ready."""
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.connect(self.path)
            except (FileNotFoundError, ConnectionRefusedError):
                link.close()
                assert not self._pid or os.waitpid(self._pid, os.WNOHANG) == (0, 0), "it has ended"
                assert time.monotonic() < deadline_s, f"not ready within {_READY_WITHIN_S:g} s"
                time.sleep(0.02)
            else:
                return link

    def start(self, words, *, cwd, output, env, namespaces=(), cgroup=None, program_stdin=None):
        """The command with these words, as ``subprocess.Popen`` would start it.

        ``namespaces``: files of those that it enters first, that of its users before others. ``cgroup``: the folder of
        that which it lives in. What it has imported is in the memory of another one.
        ``program_stdin``: the words are those of a program that ends with this process, and that is its input.
        """
        link = self.connect()
        asked = {"words": words, "cwd": str(cwd), "env": env, "namespaces": namespaces}
        if cgroup is not None:
            asked["cgroup"] = str(cgroup)
        fds = [output.fileno()]
        if program_stdin is not None:
            asked |= {"is_program": True, "is_bound": True, "has_stdin": True}
            fds.append(program_stdin)
        asked = json.dumps(asked).encode()
        fds = array("i", fds).tobytes()
        link.sendmsg(
            [len(asked).to_bytes(4, "little")],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)],
        )
        link.sendall(asked)
        return _Process(link)


class _Process:
    """What of ``subprocess.Popen`` the harness needs."""

    def __init__(self, link):
        self._link = link
        self.pid = int.from_bytes(_received(link, 4), "little")
        self.returncode = None

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.001)
        return None

    def wait(self, timeout=None):
        if self.returncode is None:
            self._link.settimeout(timeout)
            try:
                status = _received(self._link, 4)
            except (TimeoutError, BlockingIOError):  # the latter where nothing is left of the time
                raise subprocess.TimeoutExpired("ddp_runner", timeout) from None
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
            self._link.close()
        return self.returncode


_shared: list[Launcher] = []


def shared() -> Launcher:
    """The one of all test processes, started by the first that asks for it; it ends with their parent."""
    if not _shared:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        if run is None:
            _shared.append(Launcher())
            atexit.register(_shared[0].close)
        else:
            folder = Path(tempfile.gettempdir()) / f"launcher_{run}"
            folder.mkdir(exist_ok=True)
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                _shared.append(Launcher(str(folder), owner_pid=os.getppid()))
    return _shared[0]


def environment(
    imports: str = str(ROOT), *, programs: bool = False, launcher: Launcher | None = None
) -> dict[str, str]:
    """Variables for a command or a program that starts launches of its own: these are forks, too.

    The command itself is one where it is started by an interpreter that has them. See tests/forked.
    ``imports``: what is on its path beside. ``programs``: so is any program that is a file, and torchrun.
    ``launcher``: whose forks they are; none: that of all tests.
    """
    path = f"{ROOT / 'tests' / 'forked'}{os.pathsep}{imports}"
    more = {"TESTS_READY_PROGRAMS": "1"} if programs else {}
    launcher = launcher or shared()
    launcher.connect().close()
    return {"PYTHONPATH": path, "TESTS_READY": launcher.path, **more}


def _received(link, size):
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _serve(path: str, owner_pid: int, imports: list[str]) -> None:
    from ddp_runner.kernel.rank import zygote

    owner = os.pidfd_open(owner_pid)
    zygote.preload(f"{TRAINED}:")
    zygote.preload(f"{RANK}:")
    for name in (*_PRELOADED, *imports):
        importlib.import_module(name)
    assert not (left := zygote.what_forks_inherit()), f"{imports}: {left}"
    installed.parts("parent")
    _make_step()
    assert not zygote.what_forks_inherit()
    gc.freeze()
    use_huge_pages()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen()
    while True:
        readable, _, _ = select.select([listening, owner], [], [])
        if owner in readable:
            shutil.rmtree(Path(path).parent, ignore_errors=True)
            return
        link, _ = listening.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if os.fork() == 0:
            listening.close()
            os.close(owner)
            _keep(link)
        link.close()


def _make_step() -> None:
    """Compute and save once: torch's first forward and first save set up what each fork would, for 8 ms."""
    torch = sys.modules["torch"]
    nn = torch.nn
    layers = (nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    model = nn.Sequential(*layers)
    with torch.no_grad():
        nn.functional.mse_loss(model(torch.zeros(8, 8)), torch.zeros(8, 1))
    torch.save(model.state_dict(), io.BytesIO())


def _keep(link) -> None:
    """Start one launch, report its pid, and, once it has ended, how."""
    size, ancillary, _, _ = link.recvmsg(4, socket.CMSG_SPACE(8))
    if not size:  # it was asked whether it is ready
        os._exit(0)
    [(_, _, fds)] = ancillary
    outputs = array("i", fds)
    asked = json.loads(_received(link, int.from_bytes(size, "little")))
    pid = os.fork()
    if pid == 0:
        link.close()
        _launch(asked, outputs)
    for number in outputs:
        os.close(number)
    link.sendall(pid.to_bytes(4, "little"))
    if asked.get("is_bound"):
        _end_with(link, pid)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        link.sendall(status.to_bytes(4, "little"))
    os._exit(0)


def _end_with(link, pid) -> None:
    """Wait until it ends; kill it if who asked for it has ended before."""
    ended = os.pidfd_open(pid)
    readable, _, _ = select.select([link, ended], [], [])
    if ended not in readable:
        os.kill(pid, signal.SIGKILL)
    os.close(ended)


def _launch(asked, outputs) -> None:
    """Be the command. Its zygotes wait, as children that know nothing, for what they are to be."""
    os.setsid()
    if folder := asked.get("cgroup"):
        Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    for path in asked.get("namespaces", ()):
        _enter(path)
    for number in asked.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    for number, limits in asked.get("limits", ()):
        resource.setrlimit(number, limits)
    os.chdir(asked["cwd"])
    given = outputs.pop() if asked.get("has_stdin") else os.open(os.devnull, os.O_RDONLY)
    _become(asked["env"], outputs, given)
    if asked.get("is_program"):
        _run_to_end(lambda: _be_program(asked["words"]))
    supervisor_pid, waiting = os.getpid(), []
    for _ in range(int(os.environ.get(ZYGOTES, "1"))):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote_pid = os.fork()
        if zygote_pid == 0:
            for link in (ours, *(link for _, link in waiting)):
                link.close()
            _be_zygote(theirs, supervisor_pid)
        theirs.close()
        waiting.append((zygote_pid, ours))
    _hold_zygotes(waiting)
    from ddp_runner.__main__ import main
    from ddp_runner.cli import preimport

    preimport.start = lambda *asked: None  # torch is imported already
    sys.argv = ["ddp_runner", *asked["words"]]
    os.environ["DDP_RUNNER_COMMAND"] = "python -m ddp_runner"  # as the command itself does
    code = 1
    try:
        code = main(asked["words"])
    finally:
        sys.stdout.flush()
        for zygote_pid, _ in waiting:  # it was refused before it needed one
            # Or ended with all that the command had.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(zygote_pid, signal.SIGKILL)
                os.waitpid(zygote_pid, 0)
        os._exit(code)


def _enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    os.close(descriptor)


def _be_program(words) -> None:
    """Run a file, or a module behind ``-m``, as the interpreter that was started for it would."""
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = words[0]
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def _run_to_end(program) -> NoReturn:
    """Run it, and end as an interpreter does, but for what that has imported: to take it down copies what forks share.

    That would be 0.3 CPU s. Who needs that moment between the last connection and the end has WHOLE_END in its
    environment, or starts cold. What is raised and no exit is the interpreter's matter.
    """
    if WHOLE_END in os.environ:
        sys.exit(program())
    try:
        code = program()
    except SystemExit as error:
        code = error.code
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    run_exit_functions()
    if (names := vars(sys.modules["__main__"])) is not globals():  # a module's are gone by now
        names.clear()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit((code or 0) & 0xFF)


def _become(environment, outputs, given) -> None:
    """Have another process's environment, also in the eyes of others, and its input; write to one output or to two."""
    os.environ.clear()
    _show(environment)
    os.environ.update(environment)
    tempfile.tempdir = None
    launch_folder.begin_here()  # an interpreter that has just begun means its own directory
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    start.clean_search_path()
    for number, stream in enumerate((given, outputs[0], outputs[-1])):
        os.dup2(stream, number)
    for number in {given, *outputs}:
        if number > 2:
            os.close(number)


def _show(environment) -> None:
    """Write it to where the kernel reads what a process was started with."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(shown) <= end - begin, "more room is needed"
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _be_zygote(link, supervisor_pid) -> None:
    from ddp_runner.kernel.rank import zygote

    parent_death.die_with_parent(supervisor_pid)
    message, ancillary, _, _ = link.recvmsg(1 << 20, socket.CMSG_SPACE(8))
    if not message:  # the command has ended without one
        os._exit(0)
    [(_, _, fds)] = ancillary
    channel, output = array("i", fds)
    link.close()
    asked = json.loads(message)
    os.setsid()
    _become(asked["env"], [output], os.open(os.devnull, os.O_RDONLY))
    # Which torch has read already, as it stood in the launcher's environment.
    sys.modules["torch"].set_num_threads(int(asked["env"]["OMP_NUM_THREADS"]))
    sys.argv = ["zygote", str(channel), *asked["arguments"][1:]]
    own_pid = os.getpid()

    def serve():
        code = 1
        try:
            code = zygote.main(sys.argv[1:])
        finally:
            if os.getpid() == own_pid:
                os._exit(code)
        return code  # of a rank that is a script

    _run_to_end(serve)


def _hold_zygotes(waiting) -> None:
    """Have the supervisor's first zygotes be these processes, which are none of ``waiting`` then."""

    def first(words, **how):
        if "ddp_runner.kernel.rank.zygote" not in words:
            return _POPEN(words, **how)
        pid, link = waiting.pop(0)
        if not waiting:
            subprocess.Popen = _POPEN
        message = json.dumps({"arguments": words[3:], "env": how["env"]}).encode()
        fds = array("i", [how["pass_fds"][0], how["stdout"]]).tobytes()
        link.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        link.close()
        return _Zygote(pid)

    subprocess.Popen = first


class _Zygote:
    returncode = None

    def __init__(self, pid):
        self.pid = pid


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
