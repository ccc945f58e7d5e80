"""Runs a program of the user's as the real ``__main__`` of a fork, as python would; ends no process.

The fork ends as the interpreter ends: threads are joined, ``atexit`` is called, the exit code is the program's.
"""

from __future__ import annotations

import builtins
import io
import linecache
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import FrozenImporter, PathFinder, SourceFileLoader
from importlib.util import decode_source
from pathlib import Path

from ddp_runner.kernel.wire.fork_specs import Program
from ddp_runner.start import IMPORTED_BY_PYTHON

_IN_PLACE = "ddp_runner.integrations.transformers"  # no rank of another kind needs the library

# Those that no file can take the place of.
_KEPT = {"__main__", "ddp_runner", *sys.builtin_module_names, *IMPORTED_BY_PYTHON}


def run_attached(program: Program, *, on_error: Callable[[BaseException], None]) -> int:
    """Run a program that attaches, in a rank and in a drill, as ``run_as_main`` does."""
    source = Path(program.source).read_bytes() if program.source else None
    if program.in_place:
        sys.argv[1:] = program.arguments  # it attaches before the program begins
        import_module(_IN_PLACE).take_name()
    return run_as_main(
        program.path,
        program.module,
        list(program.arguments),
        source=source,
        on_error=on_error,
    )


def run_as_main(
    path: str,
    module: str,
    arguments: list[str],
    *,
    source: bytes | None = None,
    on_error: Callable[[BaseException], None],
) -> int:
    """Run a file, or a module, as ``python FILE`` and ``python -m MODULE`` do.

    ``source``: what the file is taken to hold; None: what it holds.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None)
    sys.modules["__main__"] = main
    try:
        if module:
            _search_first(os.getcwd())  # noqa: PTH109 - as python does
            sys.argv[:] = ["-m", *arguments]
            runpy._run_module_as_main(module)  # type: ignore[attr-defined] # noqa: SLF001 - what ``python -m`` calls
        else:
            _search_first(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
            sys.argv[:] = [path, *arguments]
            main.__dict__.update(
                __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path)
            )
            if source is None:
                with io.open_code(path) as file:
                    source = file.read()
            code = compile(source, path, "exec")
            _show_as_read(path, source)
            exec(code, main.__dict__)  # noqa: S102 - the user's program
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the top of a program: shown as python shows it
        error.__traceback__ = _of_the_program(error.__traceback__)
        on_error(error)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _show_as_read(path: str, source: bytes) -> None:
    """Have whoever reads the lines of a file that runs read those that run: it may be edited meanwhile."""
    lines = io.StringIO(decode_source(source)).readlines()
    # Without a time it is never compared with the file.
    linecache.cache[path] = (len(source), None, lines, path)


def _search_first(folder: str) -> None:
    """Have the program find what is in ``folder`` before anything else, though it is a fork of a process that has imported.

    A module that ``folder`` has as well is forgotten, so the program imports its own; who has imported it keeps it.
    """
    sys.path.insert(0, folder)
    for name in {name.partition(".")[0] for name in sys.modules} - _KEPT:
        found = PathFinder.find_spec(name, [folder])
        if found is None or found.loader is None or FrozenImporter.find_spec(name):
            continue
        known = getattr(sys.modules.get(name), "__file__", None)
        if known is None or os.path.realpath(known) != os.path.realpath(str(found.origin)):
            for one in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[one]


def _of_the_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames that have started the program."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace
