"""The weights' hash: every single change shows, nothing else does."""

from __future__ import annotations

import pytest
import torch

from ddp_runner.training.components import tensor_hash as module
from ddp_runner.training.components.tensor_hash import combined, state_hashes, tensor_hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [1, 7, 8, 1001, 300_000])
def test_equal_bytes_have_equal_hashes_and_one_flipped_bit_shows(size, dtype):
    """Also at the very end, where the last word is padded."""
    tensor = torch.randint(0, 2, (size,)).to(dtype)
    assert tensor_hash(tensor) == tensor_hash(tensor.clone())
    for index in {0, size // 2, size - 1}:
        other = tensor.clone()
        other.view(torch.uint8)[index * tensor.element_size()] ^= 1
        assert tensor_hash(other) != tensor_hash(tensor)


@pytest.mark.parametrize("bit", [62, 63, 30, 31, 0])
@pytest.mark.parametrize(
    "words",
    [(0, 1), (1, 3), (0, 2**18), (0, 1, 2, 3), (1, 2, 4, 5), (5, 2**18, 2**18 + 1, 2**18 + 2)],
)
def test_the_same_bit_flipped_in_several_words_shows(words, bit):
    """Also the topmost, of which a product modulo 2**64 keeps one bit; whatever the bits were."""
    torch.manual_seed(len(words))
    for tensor in (torch.randn(2**19 + 100).view(torch.int64), torch.zeros(2**18 + 50).long()):
        other = tensor.clone()
        other[list(words)] ^= torch.tensor(1 << bit if bit < 63 else -(2**63))
        assert tensor_hash(other) != tensor_hash(tensor)


@pytest.mark.parametrize("flips", [2, 4, 50])
def test_signs_that_change_at_random_show(flips):
    """Of a few small weights, where a hash that kept one bit would miss half of the cases."""
    generator = torch.Generator().manual_seed(flips)
    for _ in range(200):
        tensor = torch.randn(200, generator=generator)
        other = tensor.clone()
        other[torch.randperm(200, generator=generator)[:flips]] *= -1
        assert tensor_hash(other) != tensor_hash(tensor)


@pytest.mark.parametrize("distance", [74, 2**18, 2**19])
def test_two_values_that_changed_places_show(distance):
    """A plain sum would not notice; nor would multipliers that come again in each chunk of 2**18."""
    tensor = torch.arange(2**19 + 100)
    other = tensor.clone()
    other[[3, 3 + distance]] = tensor[[3 + distance, 3]]
    assert tensor_hash(other) != tensor_hash(tensor)


def test_layout_does_not_matter():
    """A transposed copy and an unaligned slice hash as their values do."""
    tensor = torch.randn(13, 17)
    assert tensor_hash(tensor.t().contiguous().t()) == tensor_hash(tensor)
    whole = torch.randint(0, 255, (1000,), dtype=torch.uint8)
    assert tensor_hash(whole[3:]) == tensor_hash(whole[3:].clone())


def test_a_state_is_hashed_by_name_in_its_order():
    """Empty tensors have no bytes and no hash."""
    state = {"a": torch.ones(3), "empty": torch.empty(0), "b": torch.zeros(3)}
    hashes = state_hashes(state)
    assert list(hashes) == ["a", "b"]
    assert combined(list(hashes.values())) != combined(list(hashes.values())[::-1])


@pytest.mark.parametrize("size", [0, 1, 7, 2**18, 3 * 2**21 + 5])
def test_a_device_comes_to_the_same_hash_with_one_look_at_it(size):
    """Replicas on unlike devices are compared; what a GPU would sum is summed here on the CPU."""
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    on_device = int(module._total_on_device(module._chunks(tensor), torch.device("cpu")))
    assert module._as_text(on_device) == tensor_hash(tensor)
