"""State dicts: differences, the digest of the weights, what may be stored."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from enum import IntEnum

import numpy as np
import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.codec import (
    check_state_dict,
    stored_bytes,
    weights_sha256,
)


def test_differences_are_reported_in_words():
    """Missing, unexpected and misshapen entries are named, at most five of each; a fit is empty."""
    expected = {"w": torch.zeros(2, 3), "b": torch.zeros(()), "n": torch.zeros(1)}
    assert check_state_dict(expected, expected) == []
    for kind in (torch.float16, torch.float64, torch.int64, torch.complex64):
        (reported,) = check_state_dict({**expected, "w": torch.zeros(2, 3, dtype=kind)}, expected)
        assert reported == f"type: w {str(kind)[6:]} where the model has float32"
    for built, how in (
        (torch.zeros(2, 3).to_sparse(), "sparse_coo"),
        (torch.zeros(2, 3, device="meta"), "without values"),
    ):
        (reported,) = check_state_dict({**expected, "w": built}, expected)
        assert reported == f"type: w float32 ({how}) where the model has float32"
    stored = {"w": torch.zeros(3, 2), "b": 1.0, **{f"x{i}": torch.zeros(1) for i in range(7)}}
    assert check_state_dict(stored, expected) == [
        "missing: n",
        "unexpected: x0, x1, x2, x3, x4 and 2 more",
        "shape: w 3x2 where the model has 2x3, b float where the model has scalar",
    ]


def _independent_digest(state: dict[str, torch.Tensor]) -> str:
    """The definition again, element by element through struct."""
    formats = {
        torch.float32: "<f",
        torch.float64: "<d",
        torch.int64: "<q",
        torch.uint8: "<B",
        torch.bool: "<?",
        torch.float16: "<e",
    }
    out = b""
    for key in sorted(state):
        tensor = state[key]
        out += key.encode() + b"\0" + str(tensor.dtype).encode() + b"\0"
        out += ",".join(map(str, tensor.shape)).encode() + b"\0"
        for value in tensor.flatten().tolist():
            if tensor.dtype is torch.bfloat16:
                out += struct.pack("<f", value)[2:]  # the upper half of the same float32
            else:
                out += struct.pack(formats[tensor.dtype], value)
    return hashlib.sha256(out).hexdigest()


def test_weights_digest_is_the_one_that_is_documented():
    """Key, dtype, shape and little-endian bytes, sorted by key, for every sort of tensor."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(4, 6, generator=generator)
    state = {
        "z.weight": noise,
        "a.transposed": noise.t(),
        "a.sliced": noise[:, ::2],
        "b.half": noise.half(),
        "b.bf16": noise.bfloat16(),
        "c.double": noise.double(),
        "c.count": torch.tensor(17),
        "c.mask": noise > 0,
        "c.empty": torch.empty(0, 3),
        "c.bytes": torch.arange(5, dtype=torch.uint8),
        "d.parameter": nn.Parameter(torch.ones(2)),
    }
    assert weights_sha256(state) == _independent_digest(state)
    assert weights_sha256({**state, "extra": {"no": "tensor"}}) == weights_sha256(state)
    shuffled = {key: state[key] for key in reversed(state)}
    assert weights_sha256(shuffled) == weights_sha256(state)


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([1.0, -0.0])},
        {"v": torch.tensor([1.0, 0.0])},
        {"w": torch.tensor([[1.0, 0.0]])},
        {"w": torch.tensor([1.0, 0.0]).double()},
    ],
)
def test_weights_digest_sees_every_difference(other):
    """A sign of zero, a name, a shape or a dtype changes the digest."""
    assert weights_sha256({"w": torch.tensor([1.0, 0.0])}) != weights_sha256(other)


def test_state_of_real_optimizers_may_be_stored(tmp_path):
    """What torch's own parts give is accepted, its size is not underestimated, and it comes back."""
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng": torch.get_rng_state(),
        "plain": [None, True, 1, 2.5, "text", b"bytes", (1, 2), {3: OrderedDict(a=1)}],
        "torch": [torch.float32, torch.device("cpu"), torch.Size([1]), torch.empty(0)],
    }
    estimate = stored_bytes(state)
    torch.save(state, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size <= estimate
    again = torch.load(tmp_path / "x.pt", weights_only=True)
    assert again["plain"] == state["plain"]
    assert again["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]


def test_figures_without_a_tensor_hardly_add_to_the_estimate(tmp_path):
    """A long history of losses is no record of the archive each; the file of it is not 25 times smaller."""
    state = {"history": [0.1 * step for step in range(900)], "weight": torch.zeros(4)}
    torch.save(state, tmp_path / "x.pt")
    size_bytes = (tmp_path / "x.pt").stat().st_size
    assert size_bytes <= stored_bytes(state) < 8 * size_bytes


def test_shared_storage_is_counted_once():
    """Tied weights take their bytes once, in the file and in the estimate."""
    weight = torch.zeros(1000, 100)
    assert stored_bytes({"a": weight, "b": weight.t()}) < 410_000
    assert stored_bytes({"a": weight, "b": weight.clone()}) > 790_000


class _Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize("value", [np.float64(0.1), _Level.LOW, object(), {1, 2}, np.zeros(2)])
def test_what_plain_load_would_refuse_is_refused_when_saved(value):
    """A value that weights_only=True does not give back is named before anything is written."""
    with pytest.raises(TypeError, match=r"state\['optimizer'\]\['groups'\]\[1\] is a "):
        stored_bytes({"optimizer": {"groups": [0.1, value]}})
