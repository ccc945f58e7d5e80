"""The digest of a file's bytes, while they pass by: plain SHA-256, or one of blocks that several cores make.

``sum64-1MiB`` is the SHA-256 over the sums (``word_sums``) of all its blocks of 1 MiB, the last of which may be
shorter, and behind them the file's size in 8 bytes, all little-endian. It finds damage, not forgery. ``sha256-1MiB``, of
files of before, is the SHA-256 over the SHA-256 digests of such blocks.
The blocks are that small because a file comes tensor by tensor, and a tensor must be hashed by several threads
while its bytes are there.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ddp_runner.kernel.system.run_files import open_to_read
from ddp_runner.kernel.system.threads import THREADS_MAX, cores_here

PLAIN, BLOCKS, SUMS = "sha256", "sha256-1MiB", "sum64-1MiB"
BLOCK_BYTES = 1 << 20
# From here on a file is hashed in blocks; a smaller one is hashed in no time, and `sha256sum` can check it.
BLOCKS_FROM_BYTES = 64 << 20
# Below this a hand-over to another thread costs more than the hash.
PIECE_BYTES_MIN = 256 * 1024
_READ_BYTES = 8 << 20


def algorithm_for(size_bytes: int) -> str:
    """Return the name of the algorithm that hashes a file of about that size."""
    return SUMS if size_bytes >= BLOCKS_FROM_BYTES else PLAIN


class _Hash(Protocol):
    """A hash of hashlib, or a sum of a block."""

    def update(self, view: memoryview, /) -> None:
        """Take the next bytes."""
        ...

    def digest(self) -> bytes:
        """Return the digest of all of them."""
        ...


class FileHash:
    """The digest of a stream; large pieces are hashed by threads of its own, beside who hands them over.

    No executor of the standard library: those take no work once the interpreter is ending, when a
    plain script's last save may still be under way. ``threads_max=0``: the caller hashes, within :meth:`begin`.
    """

    def __init__(self, algorithm: str = PLAIN, *, threads_max: int = THREADS_MAX) -> None:
        self.algorithm = algorithm
        self._threads_max = min(threads_max, 1 if algorithm == PLAIN else cores_here())
        self._new: Callable[[], _Hash] = _new_sum() if algorithm == SUMS else hashlib.sha256
        self._hash = self._new()  # of the file, or of the block that is not full
        self._size_bytes = 0
        self._left_bytes = BLOCK_BYTES  # of that block
        self._digests = bytearray()  # of the blocks that are full
        self._full: list[_Hash] = []  # whose digests are to come
        self._parts: queue.SimpleQueue[tuple[_Hash, memoryview] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._owed = 0
        self._threads: list[threading.Thread] = []

    def begin(self, view: memoryview) -> None:
        """Take the next piece, which must stay as it is until :meth:`wait` returns."""
        self._size_bytes += view.nbytes
        parts = [(self._hash, view)] if self.algorithm == PLAIN else self._in_blocks(view)
        if view.nbytes < PIECE_BYTES_MIN or not self._threads_max:
            for one, part in parts:
                one.update(part)
            return
        while len(self._threads) < min(self._threads_max, len(parts)):
            thread = threading.Thread(target=self._run, name="checkpoint-hash")
            thread.start()
            self._threads.append(thread)
        self._owed = len(parts)
        for pair in parts:
            self._parts.put(pair)

    def _in_blocks(self, view: memoryview) -> list[tuple[_Hash, memoryview]]:
        parts, at = [], 0
        while at < view.nbytes:
            count = min(self._left_bytes, view.nbytes - at)
            parts.append((self._hash, view[at : at + count]))
            at += count
            self._left_bytes -= count
            if not self._left_bytes:
                self._full.append(self._hash)
                self._hash, self._left_bytes = self._new(), BLOCK_BYTES
        return parts

    def wait(self) -> None:
        """Return once the piece is hashed."""
        wrong: Exception | None = None
        while self._owed:
            wrong = self._done.get() or wrong
            self._owed -= 1
        if wrong is not None:
            raise wrong
        self._digests += b"".join(one.digest() for one in self._full)
        self._full.clear()

    def _run(self) -> None:
        while (pair := self._parts.get()) is not None:
            one, part = pair
            try:
                one.update(part)
            except Exception as error:  # noqa: BLE001 - raised by wait(): memory may be short
                self._done.put(error)
            else:
                self._done.put(None)

    def close(self) -> str:
        """End the threads; the digest as hexadecimal digits."""
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()
        if self.algorithm == PLAIN:
            return self._hash.digest().hex()
        last = b"" if self._left_bytes == BLOCK_BYTES else self._hash.digest()
        size = self._size_bytes.to_bytes(8, "little") if self.algorithm == SUMS else b""
        return hashlib.sha256(bytes(self._digests) + last + size).hexdigest()


def _new_sum() -> Callable[[], _Hash]:
    from ddp_runner.values.word_sums import BlockSum  # noqa: PLC0415 - numpy; a supervisor has none

    return BlockSum


def digest_of(path: Path, algorithm: str = PLAIN) -> str:
    """The digest of a file, read in pieces. Raises OSError."""
    found = FileHash(algorithm)
    try:
        with open(open_to_read(path), "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            size = max(1, min(_READ_BYTES, os.fstat(file.fileno()).st_size))
            pieces = [memoryview(bytearray(size)) for _ in (0, 1)]  # one is read, the other hashed
            while count := file.readinto(pieces[0]):
                found.wait()
                found.begin(pieces[0][:count])
                pieces.reverse()
        found.wait()
    finally:
        digest = found.close()
    return digest
