"""Streams that shard themselves are reported, in worlds of real ranks; and a loss that is no scalar."""

from __future__ import annotations

import os

import pytest
import torch

from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.training.task import Datasets
from tests.processes import hosted_store, run_ranks
from tests.training.test_guard import BrokenTask, _break_in_a_world
from tests.training.test_trainer import SmallTask, _train_in_a_world, settings

WHOLE = "Every rank must read the whole stream"


class Items(torch.utils.data.IterableDataset):
    """``length`` items on rank 0 and ``more`` besides on rank 1, which begins at ``first``."""

    def __init__(self, length, more, first):
        second = os.environ["RANK"] == "1"
        self._numbers = range(first * second, first * second + length + more * second)

    def __iter__(self):
        for number in self._numbers:
            inputs = torch.randn(5, generator=torch.Generator().manual_seed(number))
            yield inputs, inputs.sum().unsqueeze(0)


class ShardedTask(SmallTask):
    """As one that was written for ranks that each read their own part."""

    def __init__(self, length=20, more=0, first=0):
        super().__init__()
        self._made = (length, more, first)

    def build_datasets(self):
        return Datasets(train=Items(*self._made))


class VectorTask(SmallTask):
    """Forgets to take the mean."""

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]) ** 2


class RowsInShards:
    """Twelve shards of eight samples."""

    shards = 12

    def read(self, shard, position):
        for n in range(position or 0, 8):
            inputs = torch.randn(5, generator=torch.Generator().manual_seed(8 * shard + n))
            yield (inputs, inputs.sum().unsqueeze(0)), n + 1


class InShardsTask(BrokenTask):
    """The fourth and fifth losses of rank 1 are no number in a process that is asked so."""

    def build_datasets(self):
        return Datasets(train=RowsInShards())


def _end(me, port, config):
    try:
        return _train_in_a_world(me, port, config).steps
    except FaultError as error:
        return error.fault.cause


def _ends(folder, task, **arguments):
    config = settings(
        folder, task=f"{__file__}:{task}", max_steps=12, num_workers=0,
        **{f"task.{name}": value for name, value in arguments.items()},
    )  # fmt: skip
    with hosted_store() as port:
        ends = run_ranks(_end, 2, port, config)
    return ends, (folder / "logs" / "rank_0.log").read_text()


def test_streams_of_different_lengths_end_the_run(tmp_path):
    """One is an epoch ahead: half of the data would never be seen, without an error."""
    ends, _ = _ends(tmp_path, "ShardedTask", more=12)
    for cause in ends:
        assert (
            "not of one length, they stand at item 8 of epoch 2, item 24 of epoch 1" in cause
            or ("not of one length" in cause and WHOLE in cause)
        )


@pytest.mark.parametrize(("first", "warnings"), [(20, 1), (0, 0)], ids=["shards", "the whole"])
def test_streams_that_begin_differently_are_warned_of_once(tmp_path, first, warnings):
    """As many items on each rank, but not the same ones; those of one stream are no matter."""
    ends, log = _ends(tmp_path, "ShardedTask", first=first)
    assert ends == [12, 12]
    assert log.count(WHOLE) == warnings


def test_a_roll_back_to_what_other_ranks_have_saved(tmp_path):
    """Two ranks go back to before their first step, to where three have stood."""
    config = settings(
        tmp_path, task=f"{__file__}:InShardsTask", max_errors_per_epoch=1, save_interval=0,
        save_every_steps=4, global_batch_size=6, max_steps=4,
    )  # fmt: skip
    with hosted_store() as port:
        run_ranks(_train_in_a_world, 3, port, config)
    config |= {"resume": "auto", "max_steps": 12, "save_every_steps": 0}
    with hosted_store() as port:
        ends = run_ranks(_break_in_a_world, 2, port, config)
    assert ends == [12, 12]
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("rolled back to step 4, learning rate x 0.5") == 1
    assert log.count("from step 4 on the stream's shards are dealt to 2 ranks") == 2


def test_a_loss_that_is_no_scalar_is_named(tmp_path):
    """By its shape; the reduction that DDP would complain of is none of it."""
    ends, _ = _ends(tmp_path, "VectorTask")
    assert any("loss() returned a tensor of shape (4, 1)" in str(end) for end in ends)
