"""Which samples are the largest, and that looking for them changes nothing else."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddp_runner.config import from_flat
from ddp_runner.training.largest_samples import SAMPLES_MEASURED, byte_count, largest_only
from ddp_runner.training.task import Datasets

SETTINGS = from_flat({"task": "synthetic"})


class Texts(torch.utils.data.Dataset):
    """A sample's size is ``sizes[index]`` numbers; a size of 0 raises."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.loaded = []

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        self.loaded.append(index)
        if not self.sizes[index]:
            raise ValueError("cannot be read")
        return {"text": torch.zeros(self.sizes[index]) + random.random(), "label": index}


def labels(datasets):
    return [datasets.train[place]["label"] for place in range(len(datasets.train))]


def test_the_largest_of_all_are_taken_where_all_are_measured():
    """As many as a step has, largest first."""
    data = Texts([5, 9, 1, 0, 7, 8, 2, 3])
    found = largest_only(SETTINGS, Datasets(train=data), count=3)
    assert labels(found) == [1, 5, 1]  # 7 were measured of 8: two of those stand for three of all
    assert sorted(data.loaded[:8]) == list(range(8))


def test_of_many_samples_some_are_measured_and_the_largest_come_again():
    """Twelve of 1,024 samples are three of the 256 that are measured."""
    size = SAMPLES_MEASURED * 4
    data = Texts([1 + place % 701 for place in range(size)])
    found = largest_only(SETTINGS, Datasets(train=data), count=12)
    assert len(data.loaded) == SAMPLES_MEASURED
    measured = sorted((data.sizes[place] for place in data.loaded), reverse=True)
    data.loaded.clear()
    sizes = [len(found.train[place]["text"]) for place in range(12)]
    assert sizes == measured[:3] * 4
    again = largest_only(SETTINGS, Datasets(train=data), count=12)
    assert labels(again) == labels(found), "the same on every rank"


def test_random_numbers_of_the_task_are_not_used_up():
    """What it draws after that is what it would have drawn."""
    random.seed(3)
    torch.manual_seed(3)
    before = (random.getstate(), torch.random.get_rng_state().tolist())
    largest_only(SETTINGS, Datasets(train=Texts([3, 2])), count=1)
    assert (random.getstate(), torch.random.get_rng_state().tolist()) == before


def test_data_of_which_nothing_can_be_loaded_stays():
    """The run says what is wrong with it."""
    given = Datasets(train=Texts([0, 0]))
    assert largest_only(SETTINGS, given, count=1) is given


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), 96),
        (np.zeros((2, 2), dtype=np.int16), 8),
        (("text", b"bytes", 3, 0.5), 25),
        ({"a": [torch.zeros(2)], "b": {"c": torch.zeros(1)}}, 12),
        (SimpleNamespace(image=torch.zeros(10, dtype=torch.uint8), label=1), 18),
    ],
)
def test_bytes_of_a_sample_are_counted(sample, size):
    assert byte_count(sample) == size


def test_a_sample_that_holds_itself_is_counted_once():
    """Control: no endless walk."""
    sample = {"data": torch.zeros(2)}
    sample["self"] = sample
    assert byte_count(sample) == 8
