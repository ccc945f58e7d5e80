"""Which mode a run takes, and which contradictions are refused: decided from values alone."""

from __future__ import annotations

import pytest

from ddp_runner.config import from_flat
from ddp_runner.core.modes import (
    Collectives,
    Mode,
    asks_for_collectives,
    choose_mode,
    mode_problems,
    refuse_of_processes,
)
from ddp_runner.kernel.rules.errors import BadInputError

NCCL = Collectives(backend="nccl", found="NCCL 2.28.9")
GLOO = Collectives(backend="gloo", found="NCCL was tried and does not work, gloo does")
NOTHING = Collectives(backend="", found="neither works")


@pytest.mark.parametrize(
    ("given", "devices", "found", "chosen"),
    [
        ({}, "2 CPU", None, (Mode.DISTRIBUTED, "", "no GPU, 2 ranks on the CPU")),
        ({}, "1 CPU", None, (Mode.SINGLE, "", "there is the CPU alone")),
        ({}, "1 GPU", None, (Mode.SINGLE, "", "there is one GPU")),
        ({}, "4 GPU", NCCL, (Mode.DISTRIBUTED, "", "4 GPUs, NCCL 2.28.9")),
        ({}, "4 GPU", GLOO, (Mode.DISTRIBUTED, "gloo", "4 GPUs, NCCL was tried")),
        ({}, "4 GPU", NOTHING, (Mode.DATA_PARALLEL, "gloo", "4 GPUs, and neither works")),
        ({"compile": True}, "4 GPU", NOTHING, (Mode.SINGLE, "gloo", "run.compile is not for")),
        ({"backend": "gloo"}, "4 GPU", None, (Mode.DISTRIBUTED, "", "ddp.backend=gloo")),
        ({"mode": "single"}, "4 GPU", None, (Mode.SINGLE, "", "as asked, one rank on a GPU")),
        ({"mode": "distributed"}, "4 GPU", None, (Mode.DISTRIBUTED, "", "as asked, 4 GPUs")),
        ({"mode": "data_parallel"}, "4 GPU", None, (Mode.DATA_PARALLEL, "", "rank over 4 GPUs")),
        ({"mode": "data_parallel"}, "2 CPU", None, (Mode.DATA_PARALLEL, "", "2 parts of the CPU")),
    ],
)
def test_the_mode_follows_from_devices_and_collectives(given, devices, found, chosen):
    """Each row of the table in docs/modes.md, with the reason that people read."""
    count, _, kind = devices.partition(" ")
    mode, backend, words = chosen
    choice = choose_mode(
        from_flat(given), devices=int(count), is_on_gpu=kind == "GPU", collectives=found
    )
    assert (choice.mode, choice.backend) == (mode, backend)
    assert words in choice.words
    assert choice.words.startswith(mode.value)


@pytest.mark.parametrize(
    ("given", "devices", "is_on_gpu", "asks"),
    [
        ({}, 4, True, True),
        ({}, 1, True, False),
        ({}, 4, False, False),
        ({"mode": "distributed"}, 4, True, False),
        ({"backend": "nccl"}, 4, True, False),
        ({"gpus": "0,0"}, 2, True, False),
    ],
)
def test_collectives_are_asked_only_where_they_decide(given, devices, is_on_gpu, asks):
    """To try them takes seconds, which a run with one device, or a choice of its own, does not wait."""
    settings = from_flat(given)
    assert asks_for_collectives(settings, devices=devices, is_on_gpu=is_on_gpu) is asks


@pytest.mark.parametrize(
    ("given", "option", "words"),
    [
        ({"mode": "single", "gpus": "0,1,2,3"}, "--gpus", "one rank on one GPU: give one, or"),
        ({"mode": "single", "nproc_per_node": 4}, "--nproc-per-node", "leave it out, or take"),
        ({"mode": "data_parallel", "gpus": "0,0"}, "--gpus", "each GPU once"),
        ({"mode": "data_parallel", "compile": True}, "run.compile", "leave it out, or take"),
        ({"mode": "data_parallel", "sync_batchnorm": True}, "ddp.sync_batchnorm", "is one rank"),
    ],
)
def test_a_contradiction_is_one_line_with_the_cure(given, option, words):
    """It names the option that the user wrote and what to write instead."""
    settings = from_flat(given)
    (problem,) = mode_problems(settings)
    assert problem.option == option
    assert words in str(problem)
    assert "run.mode=distributed" in str(problem)
    with pytest.raises(BadInputError):
        choose_mode(settings, devices=4, is_on_gpu=True)


def test_what_fits_is_no_contradiction():
    """The control: one GPU, or one rank, is what single means; and the others take any number."""
    for given in (
        {"mode": "single", "gpus": "3"},
        {"mode": "single", "nproc_per_node": 1},
        {"mode": "distributed", "gpus": "0,1", "compile": True},
        {"mode": "data_parallel", "gpus": "0,1"},
        {"compile": True, "sync_batchnorm": True},
    ):
        assert not mode_problems(from_flat(given)), given


@pytest.mark.parametrize("mode", ["single", "data_parallel"])
def test_several_machines_are_distributed_or_refused(mode):
    """One rank is on one machine."""
    several = choose_mode(from_flat({}), devices=1, is_on_gpu=True, machines=2)
    assert (several.mode, several.reason) == (Mode.DISTRIBUTED, "2 machines")
    with pytest.raises(BadInputError, match="one machine: leave out --nnodes"):
        choose_mode(from_flat({"mode": mode}), devices=1, is_on_gpu=True, machines=2)


def test_ranks_of_another_launcher_keep_their_mode():
    """A process that is one rank already cannot become more or fewer."""
    for mode, world_size in (("data_parallel", 1), ("single", 2)):
        with pytest.raises(BadInputError, match="ranks that this command starts itself"):
            refuse_of_processes(from_flat({"mode": mode}), world_size=world_size)
    for mode, world_size in (("auto", 2), ("distributed", 2), ("single", 1)):
        refuse_of_processes(from_flat({"mode": mode}), world_size=world_size)
