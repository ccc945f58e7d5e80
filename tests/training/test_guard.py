"""What guards the numbers, in worlds of real ranks: replicas that differ, gradients that are broken."""

from __future__ import annotations

import os

import pytest
import torch

from ddp_runner.core.faults import FaultError, FaultKind
from tests.processes import hosted_store, run_ranks
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
