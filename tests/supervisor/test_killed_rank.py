"""The supervisor's part of a killed rank happens in the order that docs/protocols.md draws."""

from __future__ import annotations

import contextlib
import re
import sys

from tests.supervisor.judging import assert_done
from tests.test_architecture import PACKAGE, PROTOCOLS, calls_of_a_killed_rank, section


def _drawn():
    """The supervisor's functions in the order of the picture, as (file, name)."""
    files = {name: file for _, name, file in calls_of_a_killed_rank()}
    picture = section(PROTOCOLS, "A killed rank, call by call").split("```")[1]
    arrows = re.findall(r"^ *S->>\w: ([^:\n]+)", picture, re.MULTILINE)
    names = dict.fromkeys(name for arrow in arrows for name in arrow.split(", "))
    return [(files[name], name.rpartition(".")[2]) for name in names]


@contextlib.contextmanager
def _calls():
    """Each call of a function of the package in the block, as (file, name), oldest first."""
    found = []

    def called(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            found.append((code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_name))

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_killed_rank_is_replaced_in_the_order_that_is_drawn(simulate):
    """From SIGKILL to the fork of the next spare."""
    run = simulate()
    run.to_step(15)
    run.run_until(lambda: run.events("spare_ready"))
    with _calls() as made:
        run.kill(1)
        run.run_until(lambda: len(run.events("spare_ready")) == 2)
    assert_done(run)
    assert len(run.events("spare_taken")) == 1
    later = iter(made)
    assert [call for call in _drawn() if call not in later] == []
