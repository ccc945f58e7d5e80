"""All ranks are killed at once, at every moment of a step, of a copy and of a save: the newest whole state goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from ddp_runner.checkpoint.manifest import step_of
from ddp_runner.checkpoint.memory_slots import MemorySlots
from tests import ready
from tests.processes import poll
from tests.scenarios import moments
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import ROOT, Run, assert_every_sample_once

SHELL = ("bash", str(ROOT / "launch_training.sh"), "train")
CHECKOUT = {"DDP_RUNNER_PYTHON": sys.executable}
WORLD = 2
COPY_EVERY, SAVE_EVERY = 4, 20
ALL = tuple(range(WORLD))
SETTINGS = (
    *("-b", 8, "--audit", "num_workers=0", "save_interval=0", f"save_every_steps={SAVE_EVERY}"),
    *("evaluate_interval=0", "task.pace_s=0", "recovery.max_restarts=1000", *PATIENT),
    *("recovery.no_progress_generations=20", "keep_last=2", f"memory_every={COPY_EVERY}"),
)


class Moment(NamedTuple):
    """Where the process of ``rank`` stays while all ``ranks`` are killed, and who is named in ``also``."""

    place: str
    step: int = 0
    nth: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = ALL
    also: tuple[str, ...] = ()


# What a copy comes to in this order, and which of them is the last before it counts.
IN_HAND = ("before room", "room", "half copied", "copied", "seal", "described", "half a header")
FEW = (
    Moment("startup"),
    Moment("forming"),
    Moment("backward", 1),  # before there is any copy
    Moment("half copied", COPY_EVERY),  # of the first one
    Moment("half a header", COPY_EVERY + 1, also=("ddp:spare",)),
    Moment("described", COPY_EVERY + 2),
    Moment("optimizer", 13),
    Moment("commit", 14, rank=1),
    Moment("reading"),  # what is taken is still there
    Moment("sync_file", SAVE_EVERY),  # the first file
    Moment("forward", SAVE_EVERY + 2, ranks=(0,)),
    Moment("sealed", SAVE_EVERY + 3),  # by the next rank 0, beside what it finds
    Moment("checkpoint", 34),  # the last save
)
PHASES = ("data", "forward", "reducing", "reduced", "optimizer", "commit", "compare", "evaluate")


class Killed(NamedTuple):
    """``whole_step``: of the newest state that was whole then."""

    at_s: float
    pids: tuple[int, ...]
    moment: Moment
    held_step: int
    whole_step: int


def train_through(folder, chosen, *settings):
    """A run that is hit at each of these moments, and each time it was."""
    killed = []
    ask(folder, 0, chosen[0])
    with Run(folder, *SETTINGS, *settings, world=WORLD, task=moments.TASK) as run:
        for number, moment in enumerate(chosen):
            following = chosen[number + 1] if number + 1 < len(chosen) else None
            killed.append(kill_all(run, number, moment, following))
        assert run.wait() == 0, run.console
    return run, killed


def ask(folder, number, moment):
    """Have a process stay there; for None have it go on."""
    if moment is None:
        Path(folder, moments.WANTED_NAME).unlink()
    else:
        moments.want(
            folder, number, moment.place, step=moment.step, nth=moment.nth, rank=moment.rank
        )


def kill_all(run, number, moment, following):
    """Kill all ranks where one stays. The supervisor hears of it when what is whole is known."""

    def is_there():
        assert run.process.poll() is None, f"ended before {moment}:\n{run.console}"
        return moments.reached(run.folder, number) is not None

    poll(is_there, what=f"{moment}")
    pids = [run.rank_pid(rank) for rank in moment.ranks]
    pids += [process.pid for process in run.processes() if process.name in moment.also]
    run.signal(signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    poll(lambda: all(has_ended(pid) for pid in pids), what=f"the end of {pids}")
    found = Killed(
        at_s=time.monotonic(),
        pids=tuple(pids),
        moment=moment,
        held_step=moments.reached(run.folder, number),
        whole_step=newest_whole(run),
    )
    ask(run.folder, number + 1, following)
    run.signal(signal.SIGCONT)
    return found


def has_ended(pid):
    """Whether nothing is left of it but what its parent has not yet read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def newest_whole(run):
    """The step of the newest state in memory or on disk; 0 where there is none."""
    files = [step_of(path.name) for path in run.checkpoints.glob("step_*.pt")]
    descriptors = []
    for path in Path(f"/proc/{run.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "state_copy_" in path.readlink().name:
                descriptors.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    assert len(descriptors) == 2
    try:
        copy, wrong = MemorySlots(descriptors).load()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert not wrong, "what says that it is whole is"
    return max([*files, 0 if copy is None else copy.manifest.step])


def check(run, killed, digest):
    """Each time it went on from what was whole, never from a copy in hand; and no bit differs."""
    ends = [*(each.at_s for each in killed[1:]), float("inf")]
    formed = run.events("rank_formed")
    for each, end_s in zip(killed, ends, strict=True):
        if each.moment.ranks != ALL:
            continue
        if each.moment.place in IN_HAND:
            assert each.whole_step < each.held_step, each
        elif each.moment.place == "sealed":
            assert each.whole_step == each.held_step, each
        after = [one for one in formed if each.at_s < one["mono_s"] < end_s]
        steps = {one["committed_step"] for one in after if one["pid"] not in each.pids}
        assert steps <= {each.whole_step}, (each, after)
    assert sum(one["all_ranks_dead"] for one in run.events("plan")) >= len(killed) * 3 // 4
    assert (run.digest, run.summary()["exact"]) == (digest, True)
    assert_every_sample_once(run, WORLD, samples=192)


def test_wherever_all_ranks_are_killed_the_newest_whole_state_goes_on(made_once, tmp_path):
    """In a step, amid a copy, its header and its reading, while a file is written and at the end."""
    steps = ("--max-steps", 34)
    run, killed = train_through(tmp_path, FEW, *steps)
    plain = ("-b", 8, "num_workers=0", "warm_spare=false", "task.pace_s=0", *steps)
    check(run, killed, made_once(*plain, world=WORLD).digest)
    actions = [one["action"] for one in run.summary()["faults"] if one["all_ranks_dead"]]
    assert sum("from the newest checkpoint (in memory, of step" in one for one in actions) >= 4
    assert re.search(
        r"no rank was left: continuing from the copy in memory of step \d+", run.console
    )


def test_a_supervisor_killed_amid_a_copy_leaves_the_disk_as_it_was(made_once, tmp_path):
    """Its memory goes with it, and nothing else of it is there; the next launch resumes from the file.

    Both begun by the script of the checkout: a person's command, given again.
    """
    steps = ("--max-steps", 34)
    how = {"command": SHELL, "environment": CHECKOUT | ready.environment()}
    how |= {"world": WORLD, "task": moments.TASK}
    ask(tmp_path, 0, Moment("half copied", SAVE_EVERY + 1))
    with Run(tmp_path, *SETTINGS, *steps, **how) as run:
        poll(lambda: moments.reached(tmp_path, 0), what=f"a copy: {run.console}")
        run.wait_for_checkpoint(SAVE_EVERY)  # which the saver writes beside the steps since
        run.signal(signal.SIGKILL)
        run.assert_gone()
        run.assert_machine_clean()
    ask(tmp_path, 1, None)
    with Run(tmp_path, *SETTINGS, *steps, **how) as run:
        assert run.wait() == 0, run.console
    assert run.events("run_begins")[-1]["resumed_step"] == SAVE_EVERY
    plain = ("-b", 8, "num_workers=0", "warm_spare=false", "task.pace_s=0", *steps)
    assert run.digest == made_once(*plain, world=WORLD).digest


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_fifty_times_all_ranks_are_killed_in_one_run(made_once, tmp_path):
    """Each phase on either rank, each part of a copy, each write of a file, and who could help with them."""
    spare, zygote = ("ddp:spare",), ("ddp:spare", "ddp:zygote")
    chosen = [Moment("startup"), Moment("forming"), Moment("backward"), Moment("forward", 1)]
    step = COPY_EVERY
    for number, place in enumerate((*IN_HAND, *IN_HAND, "sealed")):
        chosen.append(Moment(place, step, also=(spare, ())[number % 2]))
        step += COPY_EVERY - 1
    for place in PHASES:
        chosen += [Moment(place, step + 1, rank=rank) for rank in range(WORLD)]
        step += COPY_EVERY + 1
    chosen += [Moment("reading"), Moment("startup", rank=1), Moment("reading", also=zygote)]
    for place, times in zip(moments.DISK, (2, 4, 2, 3, 3, 1), strict=True):
        for nth in range(1, times + 1):
            step += SAVE_EVERY
            chosen.append(Moment(place, step, nth=nth, also=zygote if nth == 3 else ()))
    step += SAVE_EVERY
    chosen += [Moment("checkpoint", step), Moment("write", step)]  # whoever writes it then ends it
    steps = ("--max-steps", step, "evaluate_every_steps=6")
    assert len(chosen) >= 50
    run, killed = train_through(tmp_path, chosen, *steps)
    plain = ("-b", 8, "num_workers=0", "warm_spare=false", "task.pace_s=0", "--max-steps", step)
    check(run, killed, made_once(*plain, world=WORLD).digest)
