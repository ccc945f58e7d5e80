"""Streams over many files, a shard each: lines of text, JSON lines, tar files. Never decides who reads which.

Files that end in ``.gz`` or ``.tgz`` are read unpacked.

Datasets(train=JsonLines("data/*.jsonl"))
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

from ddp_runner.kernel.rules.errors import BadInputError

_PACKED = (".gz", ".tgz")


class _Files:
    """A shard for each file. ``lengths`` reads all of them once, where somebody asks."""

    deterministic = True  # what is read needs no random numbers

    def __init__(self, files: str | Path | Iterable[str | Path]) -> None:
        """``files``: a pattern such as ``data/*.jsonl``, or paths. Empty ones are left out.

        Raises BadInputError where there is none, or where one cannot be read.
        """
        kind = type(self).__name__
        if isinstance(files, (str, Path)):
            found = sorted(glob.glob(str(files), recursive=True))  # noqa: PTH207 - of any folder
            named = [name for name in found if not Path(name).is_dir()]
            if found and not named:
                expected = f"is a folder: give a pattern, such as {Path(files, '*')}"
                raise BadInputError(kind, files, expected)
        else:
            named = [str(path) for path in files]
        if not named:
            expected = f"matches no file (the working directory is {Path.cwd()})"
            raise BadInputError(kind, files if isinstance(files, (str, Path)) else "[]", expected)
        bytes_of = {name: _bytes_in(name, kind) for name in named}
        self.names = [name for name in named if bytes_of[name]]
        if not self.names:
            raise BadInputError(kind, named[0], "is empty, and so is each other file")
        packed = {name.endswith(_PACKED) for name in self.names}
        # How much there is in each, where that can be compared.
        self.sizes = [bytes_of[name] for name in self.names] if len(packed) == 1 else []

    @property
    def shards(self) -> int:
        """The number of files."""
        return len(self.names)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of items of each file."""
        return [self._count(name) for name in self.names]

    def _count(self, name: str) -> int:
        raise NotImplementedError


class TextLines(_Files):
    """Lines of UTF-8 text, without their end; empty ones are left out. A position is a place in the file, in bytes.

    A line that is no UTF-8 is an item that cannot be read (``data.on_bad_sample``).
    """

    def read(self, shard: int, position: int | None) -> Iterator[tuple[Any, int]]:
        """Yield each line from ``position`` on, and the place behind it."""
        with _opened(self.names[shard]) as file:
            for begin, line, place in _lines(file, position or 0):
                try:
                    item = self._item(line)
                except ValueError as error:  # of JSON, and of Unicode
                    item = ValueError(f"the line at byte {begin}: {error}")
                yield item, place

    def _item(self, line: bytes) -> Any:
        return line.decode("utf-8").rstrip("\r\n")

    def _count(self, name: str) -> int:
        with _opened(name) as file:
            return sum(1 for _ in _lines(file, 0))


class JsonLines(TextLines):
    """A JSON value a line. What is not JSON is an item that cannot be read (``data.on_bad_sample``)."""

    def _item(self, line: bytes) -> Any:
        return json.loads(line.decode("utf-8"))


class TarSamples(_Files):
    """Samples in tar files as WebDataset lays them out: files that follow each other and share a name.

    A sample is a dict: ``__key__``, the name up to the first dot of its last part, and the bytes of each file by
    what follows that dot. A position is where a sample begins, in bytes. An archive that is cut short ends
    the run. Source: https://github.com/webdataset/webdataset.
    """

    def read(self, shard: int, position: int | None) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each sample from ``position`` on, and the place behind it."""
        with _opened(self.names[shard]) as file:
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

    def _count(self, name: str) -> int:
        with _opened(name) as file:
            keys = [_name_of(member.name)[0] for member in _members(file)]
        return sum(key != before for key, before in zip(keys, [None, *keys], strict=False))


def _bytes_in(name: str, kind: str) -> int:
    try:
        if not stat.S_ISDIR((found := Path(name).stat()).st_mode) and os.access(name, os.R_OK):
            return found.st_size
        with Path(name).open("rb"):  # says why not
            return found.st_size
    except OSError as error:
        raise BadInputError(kind, name, f"cannot be read: {error.strerror}") from error


def _opened(name: str) -> IO[bytes]:
    """A compressed one gives its content; to get to a place in it all before that is read."""
    if name.endswith(_PACKED):
        return cast("IO[bytes]", gzip.open(name, "rb"))
    return Path(name).open("rb")


def _lines(file: IO[bytes], place: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield each line's place, its text, and the place behind it; empty lines are left out."""
    file.seek(place)
    for line in file:
        begin, place = place, place + len(line)
        text = line if begin else line.removeprefix(codecs.BOM_UTF8)  # as some editors begin a file
        if text and not text.isspace():
            yield begin, text, place


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
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


def _content(file: IO[bytes], member: tarfile.TarInfo) -> bytes:
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
