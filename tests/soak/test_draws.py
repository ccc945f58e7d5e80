"""Rounds drawn from a seed: layout, surroundings and faults, held against a run without the faults.

By hand: ``pytest -m soak tests/soak/test_draws.py -s``; ``DRAWS_ROUNDS``, ``DRAWS_FIRST`` and ``DRAWS_SEED`` ask for more.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from dataclasses import dataclass

import pytest

from tests.disks import small_disk
from tests.scenarios.harness import TRAIN, Run
from tests.scenarios.test_attached import final, run_loop
from tests.scenarios.test_disk import full

SEED = int(os.environ.get("DRAWS_SEED", "1"))
FIRST = int(os.environ.get("DRAWS_FIRST", "0"))
ROUNDS = int(os.environ.get("DRAWS_ROUNDS", "6"))
STEPS = 24
LIMIT_S = 300.0
SETTINGS = (
    *("-b", 4, "--max-steps", STEPS, "save_every_steps=4", "save_interval=0", "--audit"),
    *("task.pace_s=0.03", "log.display=plain", "on_bad_sample=substitute"),
)
LAYOUTS = (
    ("find_unused_parameters=false",),
    ("find_unused_parameters=auto", "relax_after_steps=3"),
    ("static_graph=true", "find_unused_parameters=false"),
    (),
)
PLACES = ("plain", "full disk", "small shared memory", "attached loop")
BREAKS = ("kill", "exit", "raise")
PHASES = ("data", "forward", "reduce", "optimizer", "commit")
# A mount namespace of its own: the machine's /dev/shm stays what it is.
IN_LITTLE_SHARED_MEMORY = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=$0k tmpfs /dev/shm && exec "$@"',
)

pytestmark = [pytest.mark.soak, pytest.mark.whole_run, pytest.mark.timeout(1200)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One round. ``course`` belongs to the run without faults as well."""

    world: int
    place: str
    settings: tuple[str, ...]
    course: tuple[str, ...]
    faults: tuple[str, ...]
    full_steps: tuple[int, int]
    shared_kb: int


def drawn(number):
    """Return round ``number``: the same for the same seed."""
    chance = random.Random(f"{SEED}:{number}")
    world = chance.choice((2, 3, 3))
    place = PLACES[number % len(PLACES)]
    steps = chance.sample(range(4, STEPS - 4), 3)
    faults = [
        f"{chance.choice(BREAKS)}:rank={chance.randrange(world)},step={step},phase={chance.choice(PHASES)}"
        for step in steps[: chance.choice((1, 2))]
    ]
    if place != "attached loop" and chance.random() < 0.5:
        faults.append(f"oom:rank={chance.randrange(world)},step={steps[2]},phase=backward")
    is_bad = place != "attached loop" and chance.random() < 0.5
    begin = chance.randrange(4, 12)
    return Draw(
        world=world,
        place=place,
        settings=(f"num_workers={chance.choice((0, 1, 2))}", *chance.choice(LAYOUTS)),
        course=(f"bad_sample:rank={chance.randrange(world)},step={steps[0]}",) if is_bad else (),
        faults=tuple(faults),
        full_steps=(begin, begin + chance.randrange(2, 8)),
        shared_kb=chance.choice((64, 256, 1024)),
    )


def launched(folder, draw, *, faults):
    """The exit code and the run; ``faults`` and surroundings are left out of the one to compare with."""
    words = [word for one in (*draw.course, *faults) for word in ("--inject", one)]
    if draw.place == "attached loop":
        options = (*draw.settings, *words)
        with run_loop(folder, world=draw.world, options=options) as run:
            return run.wait(LIMIT_S, hurries=False), run
    command = None
    if faults and draw.place == "small shared memory":
        command = (*IN_LITTLE_SHARED_MEMORY, str(draw.shared_kb), *TRAIN)
    is_small = faults and draw.place == "full disk"
    disk = small_disk(folder / "checkpoints", size_kb=512) if is_small else contextlib.nullcontext()
    settings = (*SETTINGS, *draw.settings, *words)
    with disk, Run(folder, *settings, world=draw.world, command=command) as run:
        if is_small:
            begin, end = draw.full_steps
            run.wait_for_step(begin)
            with full(run.checkpoints):
                run.wait_for_step(end)
        return run.wait(LIMIT_S, hurries=False), run


@pytest.mark.parametrize("number", range(FIRST, FIRST + ROUNDS))
def test_a_drawn_round_keeps_its_weights_or_says_why_not(tmp_path, number):
    """Exit code 0, nothing left; other weights only with a reason that the run without faults has not."""
    draw = drawn(number)
    print(f"{SEED}:{number}: {draw}", file=sys.stderr)
    code, plain = launched(tmp_path / "plain", draw, faults=())
    assert code == 0, plain.console
    code, run = launched(tmp_path / "hit", draw, faults=draw.faults)
    assert code == 0, run.console
    here, there = run.summary(), plain.summary()
    assert here["steps"] == there["steps"]
    assert here["faults"], "what was injected is in the summary"
    assert here["exact"] or here["inexact_reasons"]
    if here["inexact_reasons"] == there["inexact_reasons"]:
        assert run.digest == plain.digest
        if draw.place == "attached loop":
            assert final(run.folder) == final(plain.folder)
    else:
        print(f"{SEED}:{number}: {here['inexact_reasons']}", file=sys.stderr)
