"""What guards the numbers, in worlds of real ranks: replicas that differ, gradients that are broken."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from ddp_runner.config import from_flat
from ddp_runner.core.board import Cell
from ddp_runner.core.faults import FaultError, FaultKind
from ddp_runner.core.phases import Phase
from ddp_runner.training.guard import Guard
from ddp_runner.training.loss_monitor import Verdict
from ddp_runner.training.step import StepResult
from tests.collective.joining import join
from tests.processes import hosted_store, poll, ranks, run_ranks
from tests.training.building import build_state, make_slot
from tests.training.test_trainer import STEPS, SmallTask, _train_in_a_world, settings


class WrongTask(SmallTask):
    """On rank 1 a weight is changed in the training calls that ``at`` lists, or from ``since`` on."""

    def __init__(self, at="", since=1_000):
        super().__init__()
        self._at = {int(call) for call in str(at).split("+") if call}
        self._since = since
        self._training_calls = 0

    def loss(self, model, batch):
        self._training_calls += model.training
        call, wrong = self._training_calls, os.environ["RANK"] == "1"
        assert call < 10 * STEPS, "rolled back for ever"
        if model.training and wrong and (call in self._at or call >= self._since):
            with torch.no_grad():
                model[3].bias += 0.125
        return super().loss(model, batch)


def _end_in_a_world(me, port, config):
    try:
        return _train_in_a_world(me, port, config).steps
    except FaultError as error:
        return error.fault.kind, error.fault.cause, error.fault.may_retry


def _ends(folder, **task):
    """How both ranks end that compare and save every five steps, and the log of rank 0."""
    config = settings(
        folder, task=f"{__file__}:WrongTask", replica_check_steps=5, save_every_steps=5,
        **{f"task.{name}": value for name, value in task.items()},
    )  # fmt: skip
    with hosted_store() as port:
        ends = run_ranks(_end_in_a_world, 2, port, config)
    return ends, (folder / "logs" / "rank_0.log").read_text()


def test_replicas_that_always_differ_again_end_the_run(tmp_path):
    """A device that computes wrongly every time is not mended by going back: two tries, then the end."""
    ends, log = _ends(tmp_path, since=7)
    for kind, cause, may_retry in ends:
        assert kind is FaultKind.REPLICA_DIVERGED
        assert "again from the same checkpoint, of step 5: suspect a device" in cause
        assert not may_retry
    assert log.count("no majority agrees: rolled back to step 5") == 2


@pytest.mark.parametrize(
    ("at", "back_to"),
    [("7+12", [5, 5]), ("7+12+22", [5, 5, 10])],
    ids=["twice", "and once more, after a newer checkpoint"],
)
def test_replicas_that_differ_now_and_then_do_not_end_it(tmp_path, at, back_to):
    """Control: what goes away is mended, however often, as long as there are new checkpoints."""
    ends, log = _ends(tmp_path, at=at)
    assert ends == [STEPS, STEPS]
    assert [log.count(f"no majority agrees: rolled back to step {step}") for step in (5, 10)] == [
        back_to.count(5), back_to.count(10)
    ]  # fmt: skip


def _broken_step():
    return StepResult(
        step=3, loss=1.0, grad_norm=float("nan"), learning_rate=0.1, applied=False, explosion="",
        overflowed=False, broken_ranks=(), waited_ns=0, stop=None, save=False,
    )  # fmt: skip


def _trace(me, port, norms, waits):
    """Look for where a broken gradient came from; rank 1 computes until it is told to stop."""
    slot, lines = make_slot(), []
    logger = SimpleNamespace(warning=lines.append)
    runtime = SimpleNamespace(slot=slot, logger=logger, place=SimpleNamespace(rank=me.rank))
    parts = SimpleNamespace(
        settings=from_flat({}), state=build_state(), store=None, saving=None, runtime=runtime
    )

    def recompute():
        slot.stamp(Phase.BACKWARD, 1)
        if waits and me.rank == 1:
            me.hear()
        return norms[me.rank]

    def watch():
        poll(lambda: slot.get(Cell.PHASE) == Phase.REDUCE, what="waiting for rank 1")
        me.say("waits")

    watcher = threading.Thread(target=watch)
    with join(me, port) as group:
        if waits and me.rank == 0:
            watcher.start()
        guard = Guard(parts, group)
        assert not guard.skipped(_broken_step(), Verdict.CONTINUE, [], recompute=recompute)
        if waits and me.rank == 0:
            watcher.join()
    return lines


def test_who_waits_for_another_s_gradient_is_not_late_itself():
    """It stands in the reduction, so that of the two only the one that computes is late."""
    with hosted_store() as port, ranks(_trace, 2, port, (1.0, 1.0), True) as world:
        assert world[0].hear() == "waits"
        world[1].say("go on")
        for process in world:
            assert "on no rank when computed once more" in process.result()[0]


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ((1.0, float("nan")), "gradient norm is nan, first on rank 1: step"),
        ((1.0, None), "gradient norm is nan: step"),
    ],
    ids=["one is broken", "one cannot tell"],
)
def test_a_broken_gradient_is_traced_where_all_can_tell(norms, words):
    """Where one rank cannot compute it again nobody is blamed."""
    with hosted_store() as port:
        for (line,) in run_ranks(_trace, 2, port, norms, False):
            assert words in line
