"""Loader: workers that read an open file through one position get wrong samples, and are refused."""

from __future__ import annotations

import mmap
import os
from contextlib import closing

import pytest
import torch

from ddp_runner.kernel.rules.errors import BadInputError
from tests.data import sharded
from tests.data.failing import Plain, make

SAMPLES = 200


class FromFile(Plain):
    """Each sample is the number of its line, read through a handle that is opened here."""

    def __init__(self, path, **how):
        self._path = path
        path.write_bytes(b"".join(number.to_bytes(4, "little") for number in range(SAMPLES)))
        self._file = path.open(**{"mode": "rb", **how})

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        for file in self._open_files():
            file.close()

    def _open_files(self):
        return [self._file]

    def __getitem__(self, index):
        return torch.tensor(int.from_bytes(self._read(index), "little"))

    def _read(self, index):
        self._file.seek(4 * index)
        return self._file.read(4)


class ByPread(FromFile):
    def _read(self, index):
        return os.pread(self._file.fileno(), 4, 4 * index)


class Mapped(FromFile):
    def __init__(self, path):
        super().__init__(path, buffering=0)
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def _open_files(self):
        return [self._map, self._file]

    def _read(self, index):
        return self._map[4 * index : 4 * index + 4]


class OpenedAnew(FromFile):
    """Closes what it has inherited: the new handle may have its very number."""

    _owner = None

    def _read(self, index):
        if self._owner != os.getpid():
            self._file.close()
            self._file, self._owner = self._path.open("rb"), os.getpid()
        return super()._read(index)


class Logs(Mapped):
    """Writes a log that all workers have open."""

    def __init__(self, path):
        super().__init__(path)
        self._log = path.with_suffix(".log").open("ab", buffering=0)

    def _open_files(self):
        return [self._log, *super()._open_files()]

    def _read(self, index):
        self._log.write(b"read\n")
        return super()._read(index)


@pytest.mark.parametrize(
    "how", [{"buffering": 0}, {}, {"mode": "r+b"}], ids=["unbuffered", "buffered", "read_write"]
)
def test_a_file_position_that_workers_share_is_refused_at_once(tmp_path, how):
    """The first batch names the file: nothing has been trained on it."""
    refused = pytest.raises(BadInputError, match=r"samples\.bin.*open the file in __getitem__")
    dataset = FromFile(tmp_path / "samples.bin", **how)
    with dataset, make(dataset, num_workers=2) as loader, refused:
        loader.take(0)


class StreamOfLines:
    """Each shard is lines of one file, which was opened with the dataset."""

    shards = 4

    def __init__(self, path):
        path.write_text("".join(f"{number:07}\n" for number in range(200)))
        self._file = path.open("rb")

    def read(self, shard, position):
        for number in range(position or 0, 50):
            self._file.seek(8 * (50 * shard + number))
            yield int(self._file.readline()), number + 1


def test_a_position_that_workers_of_a_stream_share_is_refused(tmp_path):
    """Streams have workers of the same kind."""
    dataset = StreamOfLines(tmp_path / "lines.txt")
    loader = sharded.make(dataset, num_workers=2)
    with dataset._file, closing(loader), pytest.raises(BadInputError, match=r"lines\.txt"):
        sharded.taken(loader, 0)


class ReadByItsRank(Mapped):
    """Its rank reads on in the file while workers load through the map."""

    def read_on(self):
        self._file.read(8)


def test_a_file_that_the_rank_reads_meanwhile_is_not_refused(tmp_path):
    """A task may read its prompts from a file that lies open."""
    with ReadByItsRank(tmp_path / "samples.bin") as dataset, make(dataset, num_workers=2) as loader:
        for step in range(8):
            dataset.read_on()
            for batch in loader.take(step):
                assert batch.batch.tolist() == list(batch.indices)


@pytest.mark.parametrize("kind", [ByPread, Mapped, OpenedAnew, Logs])
def test_readers_without_a_shared_position_are_not_refused(tmp_path, kind):
    """None of them moves what another worker reads at."""
    with kind(tmp_path / "samples.bin") as dataset, make(dataset, num_workers=2) as loader:
        for step in range(8):
            for batch in loader.take(step):
                assert batch.batch.tolist() == list(batch.indices)


@pytest.mark.parametrize("workers", [0, 1])
def test_one_reader_of_an_open_file_is_not_refused(tmp_path, workers):
    """Nobody else moves its position."""
    dataset = FromFile(tmp_path / "samples.bin", buffering=0)
    with dataset, make(dataset, num_workers=workers) as loader:
        for step in range(3):
            for batch in loader.take(step):
                assert batch.batch.tolist() == list(batch.indices)
