"""Streams over many files, a shard each: lines of text, JSON lines, tar files. Never decides who reads which.

Datasets(train=Shuffled(JsonLines("data/*.jsonl"), size=10_000))
"""

from __future__ import annotations

import glob
import json
import tarfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO


class _Files:
    """A shard for each file. ``lengths`` reads all of them once, where somebody asks."""

    deterministic = True  # what is read needs no random numbers

    def __init__(self, files: str | Path | Iterable[str | Path]) -> None:
        """``files``: a pattern such as ``data/*.jsonl``, or paths. Raises FileNotFoundError where there is none."""
        if isinstance(files, (str, Path)):
            found = sorted(glob.glob(str(files), recursive=True))  # noqa: PTH207 - of any folder
        else:
            found = [str(path) for path in files]
        if not found:
            raise FileNotFoundError(f"no file matches {files}")
        self.names = found

    @property
    def shards(self) -> int:
        """How many files there are."""
        return len(self.names)

    @cached_property
    def lengths(self) -> list[int]:
        """How many items each file has."""
        return [self._count(Path(name)) for name in self.names]

    def _count(self, path: Path) -> int:
        raise NotImplementedError


class TextLines(_Files):
    """Lines of UTF-8 text, without their end; empty ones are left out. A position is a place in the file, in bytes.

    A line that is no UTF-8 is an item that cannot be read (``data.on_bad_sample``).
    """

    def read(self, shard: int, position: int | None) -> Iterator[tuple[Any, int]]:
        """Yield each line from ``position`` on, and the place behind it."""
        with Path(self.names[shard]).open("rb") as file:
            place = position or 0
            file.seek(place)
            for line in file:
                begin, place = place, place + len(line)
                if line.isspace():
                    continue
                try:
                    item = self._item(line)
                except ValueError as error:  # of JSON, and of Unicode
                    item = ValueError(f"the line at byte {begin}: {error}")
                yield item, place

    def _item(self, line: bytes) -> Any:
        return line.decode("utf-8").rstrip("\r\n")

    def _count(self, path: Path) -> int:
        with path.open("rb") as file:
            return sum(1 for line in file if not line.isspace())


class JsonLines(TextLines):
    """A JSON value a line. What is no JSON is an item that cannot be read (``data.on_bad_sample``)."""

    def _item(self, line: bytes) -> Any:
        return json.loads(line)


class TarSamples(_Files):
    """Samples in tar files as WebDataset lays them out: files that follow each other and share a name.

    A sample is a dict: ``__key__``, the name up to the first dot of its last part, and the bytes of each file by
    what follows that dot. A position is where a sample begins, in bytes. The archives are not compressed; one
    that is cut short ends the run. Source: https://github.com/webdataset/webdataset.
    """

    def read(self, shard: int, position: int | None) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each sample from ``position`` on, and the place behind it."""
        with Path(self.names[shard]).open("rb") as file:
            file.seek(position or 0)
            sample: dict[str, Any] = {}
            end = position or 0
            for member in _members(file):
                key, suffix = _name_of(member.name)
                if sample and sample["__key__"] != key:
                    yield sample, member.offset
                    sample = {}
                sample["__key__"] = key
                sample[suffix] = _content(file, member)
                end = member.offset_data + member.size
            if sample:
                yield sample, -(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE

    def _count(self, path: Path) -> int:
        with path.open("rb") as file:
            keys = [_name_of(member.name)[0] for member in _members(file)]
        return sum(key != before for key, before in zip(keys, [None, *keys], strict=False))


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The regular files of the archive from where ``file`` stands; their places are those in ``file``.

    Raises tarfile.ReadError where the archive is cut short or damaged.
    """
    with tarfile.open(fileobj=file, mode="r:", errorlevel=2) as archive:
        members: Any = archive
        while (member := archive.next()) is not None:
            members.members.clear()  # or it keeps one for each file that it has read
            if member.isreg():
                yield member
        # Behind its first member an archive ends for tarfile where there is no header, whatever is there.
        place = file.seek(archive.offset)
        block = file.read(tarfile.BLOCKSIZE)
        if block.strip(b"\0") or len(block) not in (0, tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no file begins at byte {place}, where one should")


def _content(file: BinaryIO, member: tarfile.TarInfo) -> bytes:
    if member.issparse():
        raise tarfile.ReadError(f"{member.name} is a sparse file")
    file.seek(member.offset_data)
    content = file.read(member.size)
    if len(content) < member.size:
        raise tarfile.ReadError(f"{member.name} is cut short")
    return content


def _name_of(path: str) -> tuple[str, str]:
    """The key of a file's sample, and what it is of that."""
    folder, slash, name = path.rpartition("/")
    key, _, suffix = name.partition(".")
    return f"{folder}{slash}{key}", suffix
