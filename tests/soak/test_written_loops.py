"""Loops that ``loop_writer`` writes from a seed: hit, stopped and resumed, they end as without that, or say why not.

By hand: ``pytest -m soak tests/soak/test_written_loops.py -s``; ``LOOPS_ROUNDS``, ``LOOPS_FIRST`` and ``LOOPS_SEED`` ask for more.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

from tests.scenarios.test_attached import final, run_loop
from tests.soak.loop_writer import PLACES, written

SEED = os.environ.get("LOOPS_SEED", "1")
FIRST = int(os.environ.get("LOOPS_FIRST", "0"))
ROUNDS = int(os.environ.get("LOOPS_ROUNDS", "10"))
LIMIT_S = 300.0
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
HITS = (KILL, KILL, KILL, "raise RuntimeError('a cosmic ray')", "os._exit(7)")
# The rank's parent is the supervisor.
STOP = "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(0.1)"
LOSE = "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(5)"

pytestmark = [pytest.mark.soak, pytest.mark.whole_run, pytest.mark.timeout(1200)]


def launched(folder, program, world, plants):
    """Run the program once; return its summary, and what it has saved at its end, if it came there."""
    folder.mkdir(exist_ok=True)
    for name, text in plants.items():
        (folder / name).write_text(text, encoding="utf-8")
    is_lost = LOSE in plants.values()
    with run_loop(folder, world=world, loop=program, options=("recovery.drill_at=2,5",)) as run:
        code = run.process.wait(LIMIT_S) if is_lost else run.wait(LIMIT_S, hurries=False)
        if is_lost:
            time.sleep(1.0)  # the guardian ends what is left
        console = run.console
    path = folder / "final.pt"
    return code, console, run, final(folder) if path.exists() else None


def courses(chance, world, steps):
    """Return where each course hits the run: some ranks, all at once, a stop, and the supervisor."""
    places = [f"{chance.randrange(steps)}_{chance.choice(PLACES)}" for _ in range(3)]
    at = f"{chance.randrange(1, steps - 2)}_{chance.choice(PLACES[:-1])}"
    return {
        "some": {
            f"harm_{chance.randrange(world)}_{place}": chance.choice(HITS)
            for place in places[: chance.choice((1, 2, 3))]
        },
        "all": {f"harm_{rank}_{at}": KILL for rank in range(world)},
        "stop": {f"harm_{chance.randrange(world)}_{at}": STOP},
        "supervisor": {f"harm_{chance.randrange(world)}_{at}": LOSE},
    }


@pytest.mark.parametrize("number", range(FIRST, FIRST + ROUNDS))
def test_a_written_loop_keeps_its_weights_or_says_why_not(tmp_path, number):
    """Every second one keeps all that it must; the other ones forget something."""
    chance = random.Random(f"{SEED}:{number}")
    text, parts = written(chance, is_careless=number % 2 == 1)
    world = chance.choice((2, 2, 3))
    print(f"{SEED}:{number}: {world} ranks, {parts}", file=sys.stderr)
    program = Path(tmp_path, "loop.py")
    program.write_text(text, encoding="utf-8")
    code, console, run, wanted = launched(tmp_path / "calm", program, world, {})
    assert code == 0, console
    for name, plants in courses(chance, world, run.summary()["steps"]).items():
        code, console, run, found = launched(tmp_path / name, program, world, plants)
        if code and name in ("stop", "supervisor"):
            code, console, run, found = launched(tmp_path / name, program, world, {})
        assert code == 0, f"{name}: {plants}\n{console}"
        if run.summary()["exact"]:
            kept = [one for one in wanted if one not in parts["forgets"]]
            differing = [one for one in kept if found[one] != wanted[one]]
            assert not differing, f"{name}: {plants}: exact, and {differing} differ"
        else:
            print(f"{SEED}:{number}: {name}: {run.summary()['inexact_reasons']}", file=sys.stderr)
