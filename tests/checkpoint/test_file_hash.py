"""Digests of files: plain ones as every tool makes them, and those of blocks, whoever cuts the pieces how."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from dataclasses import replace

import pytest
import torch

from ddp_runner.checkpoint import file_hash
from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.file_hash import (
    BLOCK_BYTES,
    BLOCKS,
    PLAIN,
    SUMS,
    FileHash,
    digest_of,
)
from ddp_runner.checkpoint.manifest import Manifest, manifest_name
from ddp_runner.values import word_sums
from ddp_runner.values.word_sums import odd_numbers

from .states import save


def of_blocks(data):
    """By the words of the module's docstring."""
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in blocks)).hexdigest()


def of_sums(data):
    """The same of sums, here by Python's own numbers."""
    odd = [int(one) for one in odd_numbers()[: BLOCK_BYTES // 8]]
    sums = b""
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        block += bytes(-len(block) % 8)
        words = struct.unpack(f"<{len(block) // 8}q", block)
        total = sum(
            ((word >> 33 & 0x7FFFFFFF) ^ word) * factor
            for word, factor in zip(words, odd, strict=False)
        )
        sums += (total % 2**64).to_bytes(8, "little")
    return hashlib.sha256(sums + len(data).to_bytes(8, "little")).hexdigest()


def streamed(data, algorithm, cuts):
    found = FileHash(algorithm)
    view = memoryview(data)
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        found.begin(view[begin:end])
        found.wait()
    return found.close()


@pytest.mark.parametrize(
    "size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 77]
)
def test_the_digest_depends_on_the_bytes_alone(tmp_path, size):
    """Not on the pieces in which they come, of which some are small, some many blocks long."""
    numbers = random.Random(size)
    data = numbers.randbytes(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    for expected, algorithm in (
        (hashlib.sha256(data).hexdigest(), PLAIN),
        (of_blocks(data), BLOCKS),
        (of_sums(data), SUMS),
    ):
        assert digest_of(path, algorithm) == expected
        for count in (0, 1, 7):
            cuts = sorted(numbers.randint(0, size) for _ in range(count))
            assert streamed(data, algorithm, cuts) == expected


def test_a_changed_or_moved_block_is_another_digest():
    """Of each algorithm."""
    data = bytearray(random.Random(1).randbytes(3 * BLOCK_BYTES))
    swapped = data[BLOCK_BYTES : 2 * BLOCK_BYTES] + data[:BLOCK_BYTES] + data[2 * BLOCK_BYTES :]
    changed = bytearray(data)
    changed[-1] ^= 1
    zeros = bytes(3 * BLOCK_BYTES - 3)
    for algorithm in (PLAIN, BLOCKS, SUMS):
        digests = {streamed(one, algorithm, []) for one in (data, swapped, changed, data[:-1])}
        assert len(digests) == 4
        assert streamed(zeros, algorithm, []) != streamed(zeros[:-1], algorithm, [])


@pytest.mark.parametrize("size", [8, 512, 4096])
def test_a_part_that_is_inverted_is_another_digest(size):
    """As zeros are that a disk gives back as ones, and a sector with all its bits turned."""
    data = random.Random(2).randbytes(BLOCK_BYTES) + bytes(BLOCK_BYTES)
    for begin in (16, BLOCK_BYTES // 2 + 8, BLOCK_BYTES, 2 * BLOCK_BYTES - size):
        part = bytes(255 - one for one in data[begin : begin + size])
        other = data[:begin] + part + data[begin + size :]
        assert streamed(other, SUMS, []) != streamed(data, SUMS, [])


def test_a_thread_that_has_no_memory_to_hash_with_is_heard_of(monkeypatch):
    """Whoever waits for it gets its error, and does not wait for ever."""

    def lacks_memory(words, *, first=0):
        raise MemoryError

    monkeypatch.setattr(word_sums, "sum_of", lacks_memory)
    found = FileHash(SUMS)
    found.begin(memoryview(bytes(4 * BLOCK_BYTES)))
    with pytest.raises(MemoryError):
        found.wait()
    monkeypatch.undo()
    found.close()


def test_a_large_file_is_hashed_in_blocks_and_its_manifest_says_so(tmp_path, monkeypatch):
    """All sorts verify beside each other, also one of before, and are read; a flipped bit is found in each."""
    monkeypatch.setattr(file_hash, "BLOCKS_FROM_BYTES", 3 * BLOCK_BYTES)
    large = {"weight": torch.arange(1_000_000.0), "step": 2}
    small, sums = save(tmp_path, 1), save(tmp_path, 2, state=large)
    assert [one.manifest.hashed for one in (small, sums)] == [PLAIN, SUMS]
    assert sums.manifest.sha256 == of_sums(sums.path.read_bytes())
    text = (tmp_path / manifest_name(2)).read_text()
    assert '"format": 3' in text, "what an older version refuses, rather than take it for damaged"
    assert '"format": 1' in (tmp_path / manifest_name(1)).read_text()
    assert Manifest.from_json(text) == sums.manifest
    catalog = Catalog(tmp_path)
    assert [catalog.verify(one) for one in catalog.entries()] == [None, None]
    older = replace(small.manifest, sha256=of_blocks(small.path.read_bytes()), hashed=BLOCKS)
    (tmp_path / manifest_name(1)).write_text(older.to_json())
    assert [catalog.verify(one) for one in catalog.entries()] == [None, None]
    for saved in (small, sums):
        data = bytearray(saved.path.read_bytes())
        data[len(data) // 2] ^= 8
        saved.path.write_bytes(data)
    assert all("is not the one in its manifest" in catalog.verify(one) for one in catalog.entries())


def test_a_manifest_of_before_is_of_a_plain_digest():
    """It has no word about that."""
    text = Manifest(
        step=1, epoch=0, samples=8, run_id="r", file="step_00000001.pt", size_bytes=3,
        sha256="0" * 64, monitored=None, meaning={}, settings_digest="", versions={},
        created_utc="", reason="",
    ).to_json()  # fmt: skip
    values = json.loads(text)
    del values["hashed"], values["facts_sha256"]
    assert Manifest.from_json(json.dumps(values)).hashed == PLAIN
