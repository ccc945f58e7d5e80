"""A supervised rank that is a program of the user's own, whose loop attaches to this runner."""

from __future__ import annotations

import sys
from pathlib import Path

from ddp_runner.core.errors import BadInputError
from ddp_runner.core.fork_specs import RankSpec
from ddp_runner.core.messages import Fork
from ddp_runner.rank import attach, process, trained
from ddp_runner.rank.main_program import run_as_main


def run(request: Fork, descriptors: list[int]) -> int:
    """Be rank ``request.rank``; to be called at the bottom of the stack, once a process.

    What the program raises leaves it as of a script's rank. ``descriptors``: channel, board, output.
    """
    settings, runtime = trained.begin(request, descriptors)
    attach.be_supervised(settings, runtime)
    assert isinstance(request.spec, RankSpec)
    program = request.spec.program
    assert program is not None
    source = Path(program.source).read_bytes() if program.source else None

    def failed(error: BaseException) -> None:
        if not attach.has_ended():
            process.report_end(runtime, error)
        if isinstance(error, BadInputError):
            sys.excepthook = _say_in_one_line

    def ended() -> None:
        """Report the program's end if it left its loop early although it exits with code 0."""
        early = attach.left_early()
        if early:
            where, _, expected = early.partition(": ")
            process.report_end(runtime, BadInputError(where, "", expected))

    try:
        code = run_as_main(
            program.path,
            program.module,
            list(program.arguments),
            source=source,
            on_error=failed,
        )
    except SystemExit as error:
        if not error.code:
            ended()
        raise
    if code == 0:
        ended()
    return code


def _say_in_one_line(kind: type[BaseException], error: BaseException, trace: object) -> None:
    del kind, trace
    sys.stderr.write(f"ddp_runner: error: {error}\n")
