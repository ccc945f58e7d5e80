"""Loader: a sample that cannot be loaded is found, named, and replaced where it may be."""

from __future__ import annotations

import re

import pytest
import torch

from ddp_runner.core.loader_recovery import VAIN_WAITS_MAX
from ddp_runner.data.order import SampleOrder
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultKind
from tests.data.failing import (
    BAD,
    Kills,
    KillsMany,
    KillsOrHangs,
    OnceStuck,
    Plain,
    Raises,
    RaisesMany,
    RaisesOnce,
    Stuck,
    Unpicklable,
    hang,
    indices_of,
    make,
    quarantine,
    take_fault,
    take_on,
    take_until,
)


def test_a_hung_worker_says_where_it_is_before_it_is_killed(hangs_are_shown):
    """Its stack is in the log, down to the line of the dataset."""
    lines, reported = [], []
    with make(OnceStuck(), log=lines.append, on_repaired=reported.append) as loader:
        take_until(reported, loader, 0)
    (line,) = [line for line in lines if line.startswith("the stack of loader worker")]
    assert "in hang" in line
    assert "in __getitem__" in line


@pytest.mark.parametrize("dataset", [Raises(), RaisesMany()], ids=["one", "many"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_raising_sample_is_named(dataset, workers):
    """An exception of the dataset is a bad sample, with its index, first line and traceback."""
    with make(dataset, num_workers=workers) as loader:
        fault = take_fault(loader)
    assert (fault.kind, fault.step) == (FaultKind.BAD_SAMPLE, 4)
    assert re.fullmatch(
        r"sample 17 \(epoch 1\) could not be loaded: ValueError: broken image \(failing\.py:\d+\)"
        r" \(data\.on_bad_sample=substitute would replace it\)",
        fault.cause,
    )
    assert "in __getitem__" in fault.detail


def test_samples_that_do_not_fit_together_are_named_together():
    """Where collating fails, the smallest part of the micro-batch that fails is named."""

    class Ragged(Plain):
        def __getitem__(self, index):
            return torch.zeros(index % 2)

    with make(Ragged()) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert "one of the samples 0, 1 " in fault.cause


def test_what_cannot_be_sent_is_refused_with_its_type():
    """It is no bad sample, which another one could replace: the dataset returns the wrong thing."""
    with make(Unpicklable(), collate_fn=list, quarantine=quarantine()) as loader:
        take_on(loader, 0, 4)
        with pytest.raises(BadInputError, match=r"cannot send.*'generator'.*num_workers=0"):
            loader.take(4)


@pytest.mark.parametrize("dataset", [Kills(), KillsMany()], ids=["stamped", "bisected"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_sample_that_kills_every_worker_is_found(dataset, workers):
    """Two deaths over one batch: its parts are tried alone, and the sample is named."""
    with make(dataset, num_workers=workers) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert fault.cause.startswith("sample 17 (epoch 1) could not be loaded: no worker survives it")


def test_a_sample_that_hangs_every_worker_is_found(hangs_are_shown):
    """The same for one that never returns; the rank waits three times for it."""
    with make(Stuck()) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert "sample 17 " in fault.cause
    assert "is sleeping" in fault.cause
    assert "loading sample 17 of samples 16, 17, 18, 19" in fault.cause


@pytest.mark.parametrize("dataset", [Raises(), Kills(), KillsMany()], ids=["raises", "one", "many"])
def test_a_bad_sample_is_replaced_once_and_for_all(dataset):
    """The stand-in takes its place in every epoch; the workers stay; the rest is untouched."""
    reported, known = [], quarantine()
    with make(dataset, on_repaired=reported.append, quarantine=known) as loader:
        for step in range(40):
            (taken,) = loader.take(step)
            expected = tuple(known.stand_in(index) for index in indices_of(step))
            assert taken.indices == expected
            assert taken.batch.tolist() == list(expected)
        assert loader.workers == 1
    assert known.stand_in(BAD) != BAD
    assert reported[-1].fault.kind is FaultKind.BAD_SAMPLE
    assert "not tried again" in reported[-1].action
    assert reported[-1].inexact_reason
    assert [repaired.fault.kind for repaired in reported].count(FaultKind.BAD_SAMPLE) == 1


@pytest.mark.parametrize(
    ("bad", "many", "workers"),
    [
        ((17, 18, 19), False, 1),
        ((17, 21), True, 2),
        ((17, 21, 25), False, 2),
        ((0, 1, 2, 3), True, 1),
        ((0, 1, 2, 3), True, 2),
    ],
    ids=["one batch", "two batches", "three batches", "all of the first", "first of two workers"],
)
def test_several_samples_that_kill_every_worker_are_all_replaced(bad, many, workers):
    """In one batch or in successive ones, which two workers load at a time: none reaches the rank."""
    reported, known = [], quarantine(bad_max=len(bad))
    dataset = KillsOrHangs(*bad, many=many)
    with make(
        dataset, num_workers=workers, on_repaired=reported.append, quarantine=known
    ) as loader:
        loader.workers = workers  # also where the machine has one core
        for step in range(20):
            (taken,) = loader.take(step)
            expected = [known.stand_in(index) for index in indices_of(step)]
            assert taken.batch.tolist() == expected
        assert loader.workers >= 1
    assert [known.stand_in(index) == index for index in bad] == [False] * len(bad)
    assert len(known) == len(bad)
    named = [one.fault for one in reported if one.fault.kind is FaultKind.BAD_SAMPLE]
    assert len(named) == len(bad)


def test_the_first_sample_of_a_run_may_be_the_bad_one():
    """Alone in its batch, with nothing loaded before it that could show that others load."""
    known = quarantine()
    with make(KillsOrHangs(0), micro_batch_size=1, quarantine=known) as loader:
        first = loader.take(0)
    assert first[0].indices == (known.stand_in(0),) != (0,)


def test_a_hanging_sample_is_waited_for_a_bounded_number_of_times(hangs_are_shown):
    """However large its batch, which is loaded all at once: the other ranks wait meanwhile."""
    size = 32
    dataset, known = KillsOrHangs(BAD, hangs=True, many=True), quarantine()
    order = SampleOrder(seed=0, dataset_size=64, global_batch_size=size, shuffle=False)
    settings = {"order": order, "micro_batch_size": size, "quarantine": known}
    with make(dataset, **settings) as loader:
        for step in range(BAD // size + 1):
            loader.take(step)
    assert known.stand_in(BAD) != BAD
    assert dataset.touched <= VAIN_WAITS_MAX


def test_a_batch_that_only_hangs_as_a_whole_is_named_as_one(hangs_are_shown):
    """Control: no sample of it can be blamed alone."""

    class HangsTogether(Plain):
        deterministic = True

        def __getitems__(self, indices):
            if BAD in indices and len(indices) > 1:
                hang()
            return [self[index] for index in indices]

    with make(HangsTogether(), quarantine=quarantine()) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert fault.cause.startswith("one of the samples 16, 17, 18, 19 (epoch 1)")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_loads_when_it_is_tried_again_is_kept(workers):
    """Control: a moment without its storage makes no bad sample, and no bit differs."""
    reported = []
    with make(RaisesOnce(), num_workers=workers, on_repaired=reported.append) as loader:
        take_until(reported, loader)
        take_on(loader, 5)
    (repaired,) = reported
    assert repaired.action == "loaded when it was tried again"
    assert repaired.inexact_reason == ""


def test_bad_samples_beyond_the_budget_end_the_run():
    """The last one is named, and so is the budget."""

    class OddRaises(Plain):
        def __getitem__(self, index):
            if index in (3, 9, 17):
                raise ValueError("broken")
            return torch.tensor(index)

    known = quarantine(bad_max=2)
    with make(OddRaises(), quarantine=known) as loader:
        fault = take_fault(loader)
    assert len(known) == 2
    assert fault.cause.startswith("sample 17 ")
    assert "data.max_bad_samples=2" in fault.cause
