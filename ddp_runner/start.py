"""Begins every process that we start: the search path first, then the module that is wanted.

Run by its path, ``python .../ddp_runner/start.py MODULE WORDS...``: both ``python -m`` and
``python -c`` look in the working directory before anywhere else, so that a ``random.py`` which lies
there would run as the user. Until the path is clean nothing may be imported but what is built in.
"""

import sys

# What python itself has imported before a program begins: no program finds a file of such a name.
# Run by its path, this file is __main__, and has seen that.
IMPORTED_BY_PYTHON = frozenset(getattr(sys.modules["__main__"], "IMPORTED_BY_PYTHON", sys.modules))

# INVARIANT no-code-from-here: the working directory is on no search path of ours, unless the user
# names it. Broken if: anything is imported above, or a process of ours is started in another way.
# Guarded by: test_nothing_in_the_working_directory_is_executed.
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder

import faulthandler  # noqa: E402 - the path had to be clean
import os  # noqa: E402
import signal  # noqa: E402

_PACKAGE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes 5 ms
PACKAGE_PARENT = os.path.dirname(_PACKAGE)  # noqa: PTH120
# On search paths in place of that one: of a checkout it finds the package alone.
IMPORT_FOLDER = os.path.join(_PACKAGE, "on_path")  # noqa: PTH118
# Where launch() found what its program imports; searched last, behind the standard library.
FOLDERS_VARIABLE = "DDP_RUNNER_FOLDERS"
# Set for what launch() starts: the file with the program's settings, or "1" where it has given none.
LAUNCHED_VARIABLE = "DDP_RUNNER_LAUNCHED"
# Before what a zygote is to import that is started ahead; the rest is sent later.
ZYGOTE_AHEAD = "ahead:"
_INTERRUPTED = 130
STACKS_SIGNAL = signal.SIGRTMIN  # nobody sends it to all processes of a run
# How a person starts us: what stands beside the package in a checkout is not installed with it.
_SCRIPT = "launch_training.sh"
IS_CHECKOUT = os.path.isfile(os.path.join(PACKAGE_PARENT, _SCRIPT))  # noqa: PTH113, PTH118
_INSTALLED = "ddp-runner"
_USUAL = f"./{_SCRIPT}" if IS_CHECKOUT else _INSTALLED
# As it was typed, for a shell: set by launch_training.sh, or by the process that began otherwise.
_COMMAND_VARIABLE = "DDP_RUNNER_COMMAND"


def clean_search_path() -> None:
    """Take the working directory off, where only an empty part of PYTHONPATH has put it on.

    Then this package can be found, first, and what :func:`launch` has passed on, last.
    """
    given = os.environ.get("PYTHONPATH", "")
    named = [part for part in given.split(os.pathsep) if part]
    if given and os.pathsep.join(named) != given:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
        here = _working_directory()
        if here in sys.path and here not in map(os.path.abspath, named):
            sys.path.remove(here)
    sys.path[:] = [folder for folder in sys.path if folder]
    if not {PACKAGE_PARENT, IMPORT_FOLDER} & set(sys.path):
        sys.path.insert(0, IMPORT_FOLDER)
    passed_on = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    sys.path += [folder for folder in passed_on if folder and folder not in sys.path]


def leave_working_directory() -> None:
    """Undo what ``python -m`` has done, when it is this package that it looks for."""
    if sys.argv[:1] == ["-m"] and _is_ours(sys.orig_argv):
        if not getattr(sys.flags, "safe_path", False):
            del sys.path[0]
        clean_search_path()


def leave_script_folder() -> None:
    """Undo what starting the installed command has done: its folder is on the path, first."""
    folder = os.path.dirname(os.path.realpath(sys.argv[0]))  # noqa: PTH120
    if os.path.basename(sys.argv[0]) == "ddp-runner" and sys.path[:1] == [folder]:  # noqa: PTH119
        del sys.path[0]
        clean_search_path()


def _is_ours(words: list[str]) -> bool:
    """Return True if the first ``-m`` (perhaps with others, ``-um``) of a command line names this package."""
    for word, following in zip(words, words[1:], strict=False):  # noqa: RUF007 - not yet
        if word.startswith("-") and not word.startswith("--") and word.endswith("m"):
            return following.partition(".")[0] == "ddp_runner"
    return False


def _typed() -> str:
    """Return the command as a person has typed it; the usual one where a program has started this process."""
    program, words = (sys.argv or [""])[0], sys.orig_argv
    if program in ("-m", os.path.join(_PACKAGE, "__main__.py")) and _is_ours(words):  # noqa: PTH118
        at = next(at for at, word in enumerate(words) if word.partition(".")[0] == "ddp_runner")
        typed = words[: at + 1]
    elif os.path.basename(program) == _INSTALLED:  # noqa: PTH119
        is_found_by_name = os.path.dirname(program) in os.environ.get("PATH", "").split(os.pathsep)  # noqa: PTH120
        typed = [_INSTALLED if is_found_by_name else program]
    else:
        return os.environ.get(_COMMAND_VARIABLE) or _USUAL
    from shlex import join  # noqa: PLC0415 - only one process of a run needs it

    os.environ[_COMMAND_VARIABLE] = join(typed)  # for the processes that this one starts
    return join(typed)


COMMAND = _typed()  # the first words of each command line that a message proposes


def is_command() -> bool:
    """Return whether our command has begun this process, or one that led to it; else a program of the user's has."""
    return _COMMAND_VARIABLE in os.environ


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return ""  # it was removed


def open_standard_streams() -> None:
    """Let what is closed of standard input, output and error lead nowhere.

    The next file that is opened would take the free number, and be written to by every ``print``.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def forget_inspection() -> None:
    """Begin this process again without PYTHONINSPECT, with which Python ends in a traceback and with exit code 1."""
    if os.environ.pop("PYTHONINSPECT", ""):
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - ourselves


def read_names_as_utf8() -> None:
    """Begin this process again in UTF-8 mode, where the locale has no names of files but ASCII or Latin-1.

    Such a name cannot be hashed, sent or stored otherwise. What we start inherits the mode.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - ourselves


def write_stacks_when_asked(descriptor: int = 2) -> None:
    """Have this process, and its forks, write the stacks of all threads to ``descriptor`` at each STACKS_SIGNAL.

    Also while the interpreter waits or another thread holds it. For a process that hangs: threads that continue
    meanwhile may crash it (CPython issue 116008).
    """
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)


def answer_signals_of_a_run() -> None:
    """Keep the signals that a run answers from ending this process before the run begins.

    SIGUSR2, which asks for a checkpoint, does nothing until then.
    """
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    write_stacks_when_asked()


def _answer_interrupts() -> None:
    """One line for a Ctrl-C that comes while modules are imported, in place of a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _end(number: int, frame: object) -> None:
    del number, frame
    os.write(2, b"ddp_runner: interrupted\n")
    os._exit(_INTERRUPTED)


def interrupts_raise() -> None:
    """Let a Ctrl-C raise KeyboardInterrupt again from now on: there may be something to clean up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _main() -> int:
    forget_inspection()
    open_standard_streams()
    answer_signals_of_a_run()
    _answer_interrupts()
    clean_search_path()
    from importlib import import_module  # noqa: PLC0415 - the path had to be clean

    _, module, *words = sys.argv
    sys.argv[1:] = words
    code = int(import_module(module).main(words))
    # While the interpreter ends, its handlers are gone: a Ctrl-C would change how it has ended.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    return code


if __name__ == "__main__":
    sys.exit(_main())
