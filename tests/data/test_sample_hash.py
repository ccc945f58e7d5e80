"""sample_hash: equal for equal content, other for other content, empty for what cannot be compared."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch

from ddp_runner.data.sample_hash import sample_hash


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    name: str


class Picture:
    """As an image of a library gives its pixels."""

    def __init__(self, value):
        self._pixels = np.full((2, 2), value, dtype=np.uint8)

    @property
    def __array_interface__(self):
        return self._pixels.__array_interface__


MADE = {
    "tensor": lambda: torch.arange(6.0).reshape(2, 3),
    "another shape": lambda: torch.arange(6.0).reshape(3, 2),
    "another type": lambda: torch.arange(6).reshape(2, 3),
    "another bit": lambda: torch.arange(6.0).reshape(2, 3) + torch.eye(2, 3) * 1e-7,
    "bfloat16": lambda: torch.arange(6.0, dtype=torch.bfloat16),
    "no element": lambda: torch.empty(0, 3),
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "objects": lambda: np.array(["a", None], dtype=object),
    "scalar": lambda: np.float32(3),
    "number": lambda: 3.0,
    "integer": lambda: 3,
    "text": lambda: "3",
    "bytes": lambda: b"3",
    "none": lambda: None,
    "list": lambda: [1, [2, 3]],
    "flat list": lambda: [1, 2, 3],
    "dict": lambda: {"x": torch.ones(2), "y": 3},
    "other dict": lambda: {"x": 3, "y": torch.ones(2)},
    "set": lambda: {"a", "b", "c"},
    "item": lambda: Item(torch.ones(2), "a"),
    "other item": lambda: Item(torch.ones(2), "b"),
    "enum": lambda: Color.RED,
    "other enum": lambda: Color.BLUE,
    "image": lambda: Picture(1),
    "other image": lambda: Picture(2),
}


def test_content_alone_decides():
    hashes = {name: sample_hash(make()) for name, make in MADE.items()}
    assert all(hashes.values())
    assert len(set(hashes.values())) == len(MADE)
    assert hashes == {name: sample_hash(make()) for name, make in MADE.items()}


def test_neither_memory_layout_nor_order_of_a_set_or_mapping_counts():
    square = torch.arange(9.0).reshape(3, 3)
    assert sample_hash(square.t()) == sample_hash(square.t().contiguous())
    assert sample_hash({"a": 1, "b": 2}) == sample_hash(OrderedDict([("b", 2), ("a", 1)]))
    letters = "abcdefghijklmnopqrstuvwxyz"
    code = f"from ddp_runner.data.sample_hash import sample_hash as h; s={{*'{letters}'}}; print(*s, h(s))"
    # One process only, as it imports torch: this one has another seed.
    done = subprocess.check_output(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "1"}, text=True
    )
    *order, found = done.split()
    assert order != list(set(letters)), "or nothing is shown"
    assert found == sample_hash(set(letters))


@pytest.mark.parametrize(
    "sample", [object(), iter([1]), {"x": object()}, torch.eye(3).to_sparse(), Color, lambda: 1]
)
def test_what_is_not_known_is_not_compared(sample):
    assert sample_hash(sample) == ""


def test_a_list_that_holds_itself_is_not_compared():
    endless = []
    endless.append(endless)
    assert sample_hash(endless) == ""
