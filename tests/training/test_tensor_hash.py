"""The weights' hash: every single change shows, nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddp_runner.training.components import tensor_hash as module
from ddp_runner.training.components.tensor_hash import combined, state_hashes, tensor_hash
from ddp_runner.values.word_sums import FOLD


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


@pytest.mark.parametrize("size", [1, 3, 50, 3000, 300_000])
def test_a_value_with_all_its_bits_turned_shows(size):
    """As -1 in place of 0, alone and among many, and as 255 in place of 0."""
    for tensor in (torch.zeros(size).long(), torch.randint(-9, 9, (size,)), torch.arange(size)):
        for other in (~tensor, torch.cat([~tensor[:1], tensor[1:]])):
            assert tensor_hash(other) != tensor_hash(tensor)
            assert state_hashes({"a": other}) != state_hashes({"a": tensor})
    dark, light = torch.zeros(size, dtype=torch.uint8), torch.full((size,), 255, dtype=torch.uint8)
    assert tensor_hash(dark) != tensor_hash(light)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 4, 8, 64, 3000, 300_000])
def test_signs_that_all_change_show(size, dtype):
    """Numbers that share a word change alike; an even count of words must not cancel."""
    for tensor in (torch.zeros(size, dtype=dtype), torch.randn(size).to(dtype)):
        assert tensor_hash(-tensor) != tensor_hash(tensor)
        assert state_hashes({"a": -tensor}) != state_hashes({"a": tensor})


@pytest.mark.parametrize(("bits", "times"), [(8, 0x0101010101010101), (16, 0x0001000100010001)])
def test_of_each_pattern_of_changed_bits_half_the_word_counts(bits, times):
    """Of a product the bits above the lowest changed one count; the same change in all numbers of a word is likely."""
    masks = np.arange(1, 1 << bits, dtype=np.uint64) * np.uint64(times)
    upper = np.uint64(2**64 - 1) << np.arange(64, dtype=np.uint64)
    for changed in (masks, upper, np.uint64(1) << np.arange(64, dtype=np.uint64)):
        mixed = changed ^ (changed >> np.uint64(FOLD))
        assert (mixed & np.uint64(2**33 - 1)).all()


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


def _small_of(dtype):
    """Small tensors of one type, in every way that they may lie in memory, and of many lengths."""
    generator = torch.Generator().manual_seed(5)
    flat = (torch.randn(40_000, generator=generator) * 50).to(dtype)
    sizes = {f"{size}": flat[size : 2 * size].clone() for size in (1, 2, 3, 7, 8, 9, 1001)}
    return sizes | {
        "zero-dim": flat[5].clone(),
        "empty": flat[:0],
        "transposed": flat[:35].view(5, 7).t(),
        "every third": flat[3:60:3],
        "a part of a storage": flat[3:11],
        "the same memory": flat[3:11],
        "trained": torch.nn.Parameter(flat[:6].clone(), requires_grad=dtype.is_floating_point),
        "large": flat[: module.PACKED_BYTES // dtype.itemsize + 1],
        "largest": flat[: module.PACKED_BYTES // dtype.itemsize],
    }


_TYPES = [*module._PACKED_TYPES, torch.float8_e4m3fn]


def test_many_tensors_at_once_have_the_hashes_that_each_has_alone():
    """Of all types mixed, whatever their layout: who has one has the other's."""
    state = {
        f"{name} {dtype}": tensor
        for name, *tensors in zip(_small_of(torch.float32), *map(_items_of, _TYPES), strict=True)
        for dtype, tensor in zip(_TYPES, tensors, strict=True)
    }
    expected = {name: tensor_hash(one) for name, one in state.items() if one.numel()}
    assert state_hashes(state) == expected
    assert list(state_hashes(state)) == list(expected)


def _items_of(dtype):
    return list(_small_of(dtype).values())


def test_what_torch_has_only_marked_as_conjugated_is_hashed_as_its_values():
    """The bits in memory are others then."""
    one = torch.randn(5, dtype=torch.complex64)
    state = {"conjugated": one.conj(), "negative": one.conj().imag, "itself": one}
    values = {name: tensor.resolve_conj().resolve_neg() for name, tensor in state.items()}
    assert state_hashes(state) == {name: tensor_hash(value) for name, value in values.items()}


@pytest.mark.parametrize("dtype", module._PACKED_TYPES)
@pytest.mark.parametrize("begin", [1, 3])
def test_one_small_tensor_that_begins_between_words_is_hashed(dtype, begin):
    """As a buffer that is the rest of another one; nothing else is in its pack."""
    whole = torch.arange(24).to(dtype)
    part = whole[begin : begin + 16]
    assert state_hashes({"part": part}) == {"part": tensor_hash(part.clone())}


def test_each_flipped_bit_of_many_small_tensors_shows_in_its_own_tensor():
    """Nothing of a neighbour, nor of what fills a last word up, is in a hash."""
    state = {str(number): torch.randn(number) for number in range(1, 40)}
    before = state_hashes(state)
    for name, tensor in state.items():
        place = int(name) // 2
        tensor.view(torch.int32)[place] ^= 1
        after = state_hashes(state)
        assert [one for one in after if after[one] != before[one]] == [name]
        tensor.view(torch.int32)[place] ^= 1


def test_more_small_tensors_than_are_packed_together_are_hashed_in_several_packs():
    """A pack is of a bounded size, whatever there is."""
    state = {str(number): torch.full((2000,), float(number)) for number in range(600)}
    packs = list(module._packs(state, torch.float32))
    assert len(packs) > 1
    assert max(pack.words.numel() for _, pack in packs) <= 2 * module.WORDS_MAX
    assert state_hashes(state) == {name: tensor_hash(one) for name, one in state.items()}


@pytest.mark.parametrize("dtype", module._PACKED_TYPES)
def test_a_device_comes_to_the_same_hashes_of_many_small_tensors(dtype):
    """What a GPU would sum is summed here on the CPU."""
    small = {n: one for n, one in _small_of(dtype).items() if 0 < one.numel() <= 1001}
    for _, pack in module._packs(small, dtype):
        assert pack.sums_on_device().tolist() == pack.sums_on_host()


@pytest.mark.parametrize("size", [0, 1, 7, 2**18, 3 * 2**21 + 5])
def test_a_device_comes_to_the_same_hash_with_one_look_at_it(size):
    """Replicas on unlike devices are compared; what a GPU would sum is summed here on the CPU."""
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    on_device = int(module._total_on_device(module._chunks(tensor), torch.device("cpu")))
    assert module._as_text(on_device) == tensor_hash(tensor)
