"""Loader: a batch is nobody else's, whatever a step does to it."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from tests.data.failing import make


class Mutable:
    """Samples of one changeable tensor each."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class Rows:
    """Samples as people write them: a dict of a tensor, an array and a list, collated to lists."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        rows = torch.full((2,), float(index))
        return {"x": rows, "array": np.full(2, index), "words": [str(index)]}


def listed(samples):
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _shown(batches):
    return repr([(each.indices, each.batch) for each in batches])


CHANGES = {
    "in place": lambda batch: batch["x"][0].mul_(2),
    "assigned": lambda batch: batch.update(x=[2 * x for x in batch["x"]]),
    "popped": lambda batch: batch.pop("x"),
    "as an array": lambda batch: np.multiply(batch["x"][0].numpy(), 2, out=batch["x"][0].numpy()),
    "an array": lambda batch: np.multiply(batch["array"][0], 2, out=batch["array"][0]),
    "a list": lambda batch: batch["words"][0].append("more"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_taken_again_is_as_it_was_at_first(num_workers, change):
    """What was prefetched is used once only; the workers that are ahead stay."""
    with make(Rows(), num_workers=num_workers, collate_fn=listed) as loader:
        loader.take(3)
        first = loader.take(4)
        before, pids = _shown(first), loader.worker_pids
        for _ in range(2):
            for each in first:
                change(each.batch)
            assert _shown(first) != before, "control"
            first = loader.take(4)
            assert _shown(first) == before
        assert loader.worker_pids == pids
        assert [each.indices for each in loader.take(5)] != [each.indices for each in first]
        assert loader.worker_pids == pids


class Kept(Rows):
    """Hands out what it keeps."""

    def __init__(self):
        self.rows = [super(Kept, self).__getitem__(index) for index in range(64)]

    def __getitem__(self, index):
        return self.rows[index]


def _arrays_as_tensors(samples):
    return {"x": [torch.from_numpy(sample["array"]) for sample in samples]}


@pytest.mark.parametrize(
    "collate_fn", [list, listed, _arrays_as_tensors], ids=["list", "dict", "the same memory"]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_no_part_of_the_dataset(num_workers, collate_fn):
    """What a loss does to its batch is not done to the next epoch."""
    with make(Kept(), num_workers=num_workers, collate_fn=collate_fn) as loader:
        batch = loader.take(1)[0].batch
        before = repr(batch)
        for rows in [batch[0]["x"]] if isinstance(batch, list) else batch["x"]:
            rows.mul_(3)
        assert repr(batch) != before, "control"
        assert repr(loader.take(1)[0].batch) == before


def test_a_batch_that_is_made_again_is_not_copied():
    """Nor is it looked at for long."""
    made = []

    def stacked(samples):
        made.append(torch.stack([sample["x"] for sample in samples]))
        return made[-1]

    with make(Kept(), num_workers=0, collate_fn=stacked) as loader:
        for step in range(3):
            assert loader.take(step)[0].batch is made[-1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_copy_taken_before_a_step_changes_nothing_for_the_step(num_workers):
    """Also where there is no copy: then the step is loaded again."""

    def uncopied(samples):
        return [*samples, (each for each in ())] if num_workers == 0 else samples

    for collate_fn in (listed, uncopied):
        with make(Rows(), num_workers=num_workers, collate_fn=collate_fn) as loader:
            copy = loader.take_copy(2)
            assert len(copy) == 1
            content = copy[0].batch if collate_fn is listed else copy[0].batch[0]
            content.pop("x")
            batch = loader.take(2)[0].batch
            assert "x" in (batch if collate_fn is listed else batch[0])
            if collate_fn is listed:
                assert loader.waited_s < 0.01
            assert loader.take(3)[0].indices != copy[0].indices


def test_a_copy_that_is_not_taken_holds_nobody_up():
    """Another step, another share: what is at hand is of no use then."""
    with make(Rows(), num_workers=1, collate_fn=listed) as loader:
        two = loader.take_copy(2)
        five = loader.take(5)
        assert five[0].indices != two[0].indices
        loader.take_copy(6)
        loader.assign(rank=1, world_size=2, micro_batch_size=4)
        assert len(loader.take(6)[0].indices) == 2


class DiesAgain(Rows):
    """Loads each sample once, by the files that say so; then its worker dies, so often."""

    def __init__(self, folder, *, index, times):
        self._folder, self._index, self._left = folder, index, times

    def __getitem__(self, index):
        tries = len(list(self._folder.glob(f"{index}_*")))
        (self._folder / f"{index}_{tries}").touch()
        if index == self._index and 1 <= tries <= self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_workers_that_die_as_they_load_again_are_repaired_as_any(tmp_path):
    """One death costs the workers that were ahead, and nothing else; another one is reported."""
    reported = []
    for times, faults in ((1, 0), (2, 1)):
        folder = tmp_path / str(times)
        folder.mkdir()
        dataset = DiesAgain(folder, index=9, times=times)
        reported.clear()
        with make(dataset, num_workers=1, collate_fn=listed, on_repaired=reported.append) as loader:
            before = _shown(loader.take(2))
            assert 9 in loader.take(2)[0].indices
            assert _shown(loader.take(2)) == before
            assert loader.take(3)[0].indices == (12, 13, 14, 15)
        assert len(reported) == faults


def test_another_share_is_loaded_after_assign():
    """Fewer ranks share the same global batch; nobody loads what is not theirs."""
    with make(Mutable(), num_workers=1) as loader:
        alone = [i for batch in loader.take(2) for i in batch.indices]
        loader.assign(rank=1, world_size=2, micro_batch_size=4)
        half = [i for batch in loader.take(2) for i in batch.indices]
        assert half == alone[-len(half) :]
        assert 2 * len(half) == len(alone)
