"""A profile of some steps: files, tables, and that neither a repair nor its own failure matters."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ddp_runner.config import from_flat
from ddp_runner.core.run_stages import StagePlace
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.training.figures.phase_times import phase_values, timed
from ddp_runner.training.figures.profiling import StepProfile, first_only, step_profile

CPU = torch.device("cpu")


def surroundings(rank=0):
    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    logger = DDPLogger(rank=rank)
    return SimpleNamespace(slot=slot, logger=logger, rank_info=SimpleNamespace(rank=rank))


def profile_of(folder, text, *, runtime=None, total_steps=20, stage=None):
    settings = from_flat({"profile": text, "log_dir": str(folder)})
    settings = replace(settings, stage=stage)
    runtime = runtime or surroundings()
    return step_profile(settings, runtime, device=CPU, total_steps=total_steps)


def train(profile, steps):
    for step in steps:
        profile.before(step)
        torch.ones(16, 16).mm(torch.ones(16, 16))
        profile.after(step + 1)


def steps_in(folder, rank=0):
    trace = json.loads((folder / f"profile_rank_{rank}.json").read_text(encoding="utf-8"))
    names = {one.get("name", "") for one in trace["traceEvents"]}
    return sorted(name for name in names if name.startswith("step "))


def test_the_steps_that_were_asked_for_are_in_the_trace(tmp_path):
    """Counted from 1, both included, with a table of operations beside."""
    profile = profile_of(tmp_path, "steps=3:4")
    train(profile, range(8))
    assert steps_in(tmp_path) == ["step 3", "step 4"]
    table = (tmp_path / "profile_rank_0.txt").read_text(encoding="utf-8")
    assert table.startswith("steps 3 to 4 of rank 0")
    assert "aten::mm" in table
    assert {path.name for path in tmp_path.iterdir()} == {
        "profile_rank_0.json",
        "profile_rank_0.txt",
    }


def test_steps_that_are_done_again_are_profiled_again(tmp_path):
    """A generation that breaks amid them leaves nothing; the next one begins where it stands."""
    profile = profile_of(tmp_path, "steps=2:4")
    train(profile, [0, 1])
    profile.before(2)
    profile.leave()
    assert list(tmp_path.iterdir()) == []
    train(profile, [2, 3, 4])
    assert steps_in(tmp_path) == ["step 3", "step 4"]


def test_a_run_that_ends_amid_the_steps_writes_what_there_is(tmp_path):
    """A stop, say; nothing where no step was made."""
    profile = profile_of(tmp_path, "steps=2:9")
    train(profile, [0, 1, 2])
    profile.leave()
    profile.conclude()
    assert steps_in(tmp_path) == ["step 2", "step 3"]
    nothing = profile_of(tmp_path / "none", "steps=2:9")
    train(nothing, [0])
    nothing.leave()
    nothing.conclude()
    assert not (tmp_path / "none").exists()


def test_a_stage_that_ends_before_the_steps_profiles_nothing(tmp_path, capsys):
    """The next one does; where the last one ends too early that is a warning, as stages were trained before."""
    names = ("pre", "tune")
    first, last = StagePlace(names=names, number=0), StagePlace(names=names, number=1)
    assert type(profile_of(tmp_path, "steps=10:12", total_steps=3, stage=first)) is StepProfile
    profile = profile_of(tmp_path, "steps=10:12", total_steps=33, stage=last)
    train(profile, range(3, 33))
    assert steps_in(tmp_path) == ["step 10", "step 11", "step 12"]
    assert "beyond" not in capsys.readouterr().err
    assert type(profile_of(tmp_path, "steps=34:35", total_steps=33, stage=last)) is StepProfile
    assert "steps=34:35: is beyond the end of the run, which has 33" in capsys.readouterr().err
    with pytest.raises(BadInputError, match="which has 33 steps"):
        profile_of(tmp_path, "steps=34:35", total_steps=33)


def test_beginning_and_writing_stand_on_the_board(tmp_path):
    """They may take seconds, in which the rank is no straggler; the phase before comes back."""
    runtime = surroundings()
    seen = []
    stamp = type(runtime.slot).stamp

    class Noted(type(runtime.slot)):
        __slots__ = ()

        def stamp(self, phase, now_ns):
            seen.append(phase)
            stamp(self, phase, now_ns)

    runtime.slot = Noted(runtime.slot._ints, runtime.slot._floats, 0)
    profile = profile_of(tmp_path, "steps=1:1", runtime=runtime)
    runtime.slot.stamp(Phase.OPTIMIZER, time.monotonic_ns())
    train(profile, [0])
    assert seen[1:3] == [Phase.PROFILE, Phase.OPTIMIZER]
    assert seen[-1] is Phase.OPTIMIZER


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    """The run goes on, and the next step is made."""
    gone = tmp_path / "gone"
    profile = profile_of(gone, "steps=1:1")
    train(profile, [0, 1])
    assert not gone.exists()
    assert "--profile: no profile" in capsys.readouterr().err


def test_without_the_option_nothing_is_made(tmp_path):
    """The control; and steps beyond the end are refused before the first one."""
    assert type(profile_of(tmp_path, None)) is StepProfile
    with pytest.raises(BadInputError, match="beyond the end"):
        profile_of(tmp_path, "steps=3:21")


def test_memory_on_the_cpu_says_what_there_is_instead(tmp_path, capsys):
    """One line, of one rank; the trace has the memory of each operation."""
    profile = profile_of(tmp_path, "steps=1,memory")
    assert "a snapshot is of a GPU's allocator" in capsys.readouterr().err
    profile_of(tmp_path, "steps=1,memory", runtime=surroundings(rank=1))
    assert capsys.readouterr().err == ""
    train(profile, [0])
    assert "CPU Mem" in (tmp_path / "profile_rank_0.txt").read_text(encoding="utf-8")


def test_only_the_first_lack_of_memory_is_written():
    """Later ones follow from it, and a snapshot is large."""
    written = []
    observer = first_only(lambda: written.append(1))
    observer(0, 1, 2, 3)
    observer(0, 1, 2, 3)
    assert written == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_allocators_history_is_written_at_the_first_lack_of_memory(tmp_path):
    """A real allocation that is too large; and once more after the steps."""
    settings = from_flat({"profile": "steps=1,memory", "log_dir": str(tmp_path)})
    device = torch.device("cuda:0")
    profile = step_profile(settings, surroundings(), device=device, total_steps=5)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    assert (tmp_path / "memory_out_of_memory_rank_0.pickle").stat().st_size > 0
    train(profile, [0])
    assert (tmp_path / "memory_profile_rank_0.pickle").stat().st_size > 0


def test_phases_are_summed_between_stamps():
    """Of each part of a step its time, a device waited for at each; what is between steps is of none."""
    waits = []
    board = Board(memoryview(bytearray(SLOT_BYTES)), 1)
    slot = timed(board.slot(0), "cpu")
    assert phase_values(board.slot(0), 1) == {}
    slot._await_device = lambda: waits.append(1)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER):
        slot.stamp(phase, time.monotonic_ns())
        end_ns = time.monotonic_ns() + 2_000_000
        while time.monotonic_ns() < end_ns:
            pass
    found = phase_values(slot, 1)
    assert list(found) == [
        "data_ms",
        "forward_ms",
        "backward_ms",
        "communication_ms",
        "optimizer_ms",
    ]
    assert all(took >= 2.0 for took in found.values())
    assert len(waits) == 6
    assert board.slot(0).read().phase is Phase.OPTIMIZER
    slot.stamp(Phase.EVALUATE, time.monotonic_ns())
    assert all(took == 0.0 for took in phase_values(slot, 1).values())


def test_a_slot_that_injects_faults_is_not_timed():
    """What is injected happens at its stamps."""

    class Injecting(type(Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0))):
        __slots__ = ()

    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    other = Injecting(slot._ints, slot._floats, 0)
    assert timed(other, "cpu") is other
