"""A supervised rank that is a program of the user's own, whose loop attaches to this runner."""

from __future__ import annotations

import sys

from ddp_runner import installed
from ddp_runner.kernel.rank import process
from ddp_runner.kernel.rank.zygote import Ahead
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.wire.fork_specs import RankSpec
from ddp_runner.kernel.wire.messages import Fork
from ddp_runner.rank import attach, trained
from ddp_runner.rank.main_program import run_attached
from ddp_runner.system.launch_folder import begin_here


def ahead(modules: str) -> Ahead:
    """Return what is imported before ranks of a program, and the user's ``modules``, parted by commas."""
    return Ahead(
        ours=trained.IMPORTED_AHEAD,
        settle=_settle,
        theirs=tuple(filter(None, modules.split(","))),
    )


def _settle() -> None:
    begin_here()
    installed.parts("child")
    trained.compute_once()


def run(request: Fork, descriptors: list[int]) -> int:
    """Be rank ``request.rank``; to be called at the bottom of the stack, once a process.

    What the program raises leaves it as of a script's rank. ``descriptors``: channel, board, output.
    """
    settings, runtime = trained.begin(request, descriptors)
    attach.be_supervised(settings, runtime)
    assert isinstance(request.spec, RankSpec)
    program = request.spec.program
    assert program is not None

    def failed(error: BaseException) -> None:
        if not attach.has_ended():
            process.report_end(runtime, error)
        if isinstance(error, BadInputError):  # the supervisor shows the line, once for all ranks
            sys.excepthook = lambda *_: runtime.logger.detail(str(error))

    def ended() -> None:
        """Report the program's end if it left its loop early although it exits with code 0."""
        early = attach.left_early()
        if early:
            where, _, expected = early.partition(": ")
            process.report_end(runtime, BadInputError(where, "", expected))

    try:
        code = run_attached(program, on_error=failed)
    except SystemExit as error:
        if not error.code:
            ended()
        raise
    if code == 0:
        ended()
    return code
