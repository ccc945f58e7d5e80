"""Hands a launch that a command or a program starts over to tests.ready, and stands in its place.

It is on the ``PYTHONPATH`` that ``tests.ready.environment()`` gives. The command that runs is a fork which has
imported torch, with the limits of this process; this one passes its signals on, ends as it ends, and takes it along if
it is killed.
"""

import os
import sys


def _given():
    """Return the interpreter's words, but for what torchrun adds for prompt output."""
    return sys.orig_argv[2:] if sys.orig_argv[1:2] == ["-u"] else sys.orig_argv[1:]


def _program():
    """Return the words of the program that this interpreter was started for; None for anything else."""
    given = _given()
    is_torchrun = given[:2] == ["-m", "torch.distributed.run"]
    return given if is_torchrun or (given and _is_of_others(given[0])) else None


def _is_of_others(file):
    return file.endswith(".py") and not file.endswith("ddp_runner/start.py")


def _launch():
    """Return the words of the launch that this interpreter was started for; None for anything else."""
    given = _given()
    if given[:2] == ["-m", "ddp_runner"]:
        words = given[2:]
    elif given[:1] == ["-c"] and given[1].endswith("sys.exit(main(sys.argv[2:]))"):  # launch()
        words = given[3:]
    elif given[1:2] == ["ddp_runner.__main__"] and given[0].endswith("start.py"):
        words = given[2:]
    elif given[1:2] == ["ddp_runner.cli.python_environment"] and "--run" in given:
        words = given[given.index("--run") + 1 :]
    else:
        return None
    return None if words[:1] in (["page"], ["docs"]) else words


def _stand_for(words, path, *, is_program):
    import json
    import resource
    import signal
    import socket
    from array import array

    pid, waiting = 0, []

    def pass_on(number, frame):
        if pid:
            os.kill(pid, number)
        else:
            waiting.append(number)

    passed = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    ignored = [number for number in passed if signal.getsignal(number) is signal.SIG_IGN]
    for number in passed:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(path)
    asked = {
        "words": words,
        "cwd": os.getcwd(),  # noqa: PTH109 - imports little
        "env": dict(os.environ),
        "is_bound": True,
        "is_program": is_program,
        "ignored": ignored,
        "limits": [
            (number, resource.getrlimit(number))
            for number in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
        ],
    }
    text = json.dumps(asked).encode()
    link.sendmsg(
        [len(text).to_bytes(4, "little")],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [1, 2]).tobytes())],
    )
    link.sendall(text)
    pid = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")
    for number in waiting:
        os.kill(pid, number)
    status = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code in passed:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


if _path := os.environ.get("TESTS_READY"):
    try:
        if (_asked := _launch()) is not None:
            _stand_for(_asked, _path, is_program=False)
        if os.environ.get("TESTS_READY_PROGRAMS") and (_asked := _program()) is not None:
            _stand_for(_asked, _path, is_program=True)
    except BaseException as error:  # noqa: BLE001 - the interpreter would go on, as if nothing had been asked
        os.write(2, f"tests/forked: {error!r}\n".encode())
        os._exit(99)
