"""Text corpora: which files there are, how they split, what names their content. Never torch.

A corpus is a list of *spans* of files; training reads it as one long run of bytes
(``windows.ByteWindows``). Scanning opens each file once, for its first 8 KiB.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OPTION = "--data"
_PROBE_BYTES = 8192
_NOT_TEXT_DIRS = frozenset({"__pycache__", ".git", ".hg", ".svn"})
_NOT_LIBRARY_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedFiles:
    """Text under ``root``: of ``files[i]`` the ``sizes[i]`` bytes that begin at ``starts[i]``.

    ``skipped_unreadable`` holds "path: reason" texts.
    """

    root: Path
    files: tuple[Path, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    skipped_binary: int = 0
    skipped_unreadable: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of text."""
        return sum(self.sizes)


def scan_text_files(path: Path, *, suffixes: tuple[str, ...] | None = None) -> ScannedFiles:
    """The text file ``path``, or every one below the folder ``path``, sorted by name.

    Binary files (a NUL byte in the first 8 KiB) and unreadable ones are counted and left out,
    empty ones, folders of version control and symbolic links to folders are passed by; with
    ``suffixes``, so is any other file. Raises BadInputError if there is not text at all.
    """
    return _scan(path, suffixes=suffixes, without_dirs=_NOT_TEXT_DIRS)


def standard_library_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def scan_standard_library() -> ScannedFiles:
    """The standard library's Python sources, without installed packages and tests."""
    return _scan(
        standard_library_root(),
        suffixes=(".py",),
        without_dirs=_NOT_TEXT_DIRS | _NOT_LIBRARY_DIRS,
    )


def _scan(
    root: Path, *, suffixes: tuple[str, ...] | None, without_dirs: frozenset[str]
) -> ScannedFiles:
    files: list[Path] = []
    sizes: list[int] = []
    unreadable: list[str] = []
    binary = 0
    for path in _candidates(root, without_dirs, unreadable):
        if suffixes is not None and path.suffix not in suffixes:
            continue
        try:
            probe = _probe(path)
        except OSError as error:
            unreadable.append(f"{path}: {error.strerror}")
            continue
        if probe is None:
            continue
        size, head = probe
        if b"\0" in head:
            binary += 1
        elif size > 0:
            files.append(path)
            sizes.append(size)
    if not files:
        raise BadInputError(OPTION, root, _why_no_text(binary, unreadable))
    return ScannedFiles(
        root=root,
        files=tuple(files),
        starts=(0,) * len(files),
        sizes=tuple(sizes),
        skipped_binary=binary,
        skipped_unreadable=tuple(unreadable),
    )


def _candidates(root: Path, without_dirs: frozenset[str], unreadable: list[str]) -> Iterator[Path]:
    """Files at or below ``root`` in a fixed order; folders that cannot be listed are noted."""
    try:
        mode = root.stat().st_mode
    except OSError as error:
        expected = f"an existing file or folder with text ({error.strerror})"
        raise BadInputError(OPTION, root, expected) from error
    if not stat.S_ISDIR(mode):
        yield root
        return

    def note(error: OSError) -> None:
        unreadable.append(f"{error.filename}: {error.strerror}")

    for folder, subfolders, names in os.walk(root, onerror=note, followlinks=False):
        subfolders[:] = sorted(name for name in subfolders if name not in without_dirs)
        for name in sorted(names):
            yield Path(folder, name)


def _probe(path: Path) -> tuple[int, bytes] | None:
    """Size and first bytes of a regular file; None for pipes, sockets and devices."""
    if not stat.S_ISREG(path.stat().st_mode):
        return None
    with path.open("rb") as file:
        head = file.read(_PROBE_BYTES)
        # Of what was opened, and only now: the file may be replaced or written meanwhile.
        return os.fstat(file.fileno()).st_size, head


def _why_no_text(binary: int, unreadable: Sequence[str]) -> str:
    found = [f"{binary} binary"] if binary else []
    found += [f"{len(unreadable)} unreadable, first {unreadable[0]}"] if unreadable else []
    return "a file or folder with text; found none" + (f" ({', '.join(found)})" if found else "")


def split_by_file(
    scanned: ScannedFiles, *, validation_fraction: float, seed: int
) -> tuple[ScannedFiles, ScannedFiles]:
    """``(train, validation)``, both with text, the same for the same files, fraction and seed.

    Whole files, in an order that ``seed`` decides, go to validation while they fit in its part of
    the bytes. Where they fill less than half of it (a single file, or a few large ones), the end
    of the largest remaining file makes it up. Raises BadInputError if there are fewer than 2 bytes.
    """
    total_bytes = scanned.total_bytes
    if total_bytes < 2:
        expected = f"text for training and validation; there are only {total_bytes} bytes"
        raise BadInputError(OPTION, scanned.root, expected)
    target_bytes = min(max(int(total_bytes * validation_fraction), 1), total_bytes - 1)
    held_out, held_bytes = set(), 0
    for number in sorted(range(len(scanned.files)), key=lambda number: _draw(seed, number)):
        if held_bytes + scanned.sizes[number] <= target_bytes:
            held_out.add(number)
            held_bytes += scanned.sizes[number]
    kept = [number for number in range(len(scanned.files)) if number not in held_out]
    train, validation = _select(scanned, kept), _select(scanned, sorted(held_out))
    if held_bytes * 2 >= target_bytes:
        return train, validation
    return _move_tail(train, validation, tail_bytes=target_bytes - held_bytes)


def _draw(seed: int, number: int) -> bytes:
    """A sort key that no version of Python changes, as a shuffle might."""
    return hashlib.sha256(f"{seed}:{number}".encode()).digest()


def _select(scanned: ScannedFiles, numbers: Sequence[int]) -> ScannedFiles:
    return replace(
        scanned,
        files=tuple(scanned.files[number] for number in numbers),
        starts=tuple(scanned.starts[number] for number in numbers),
        sizes=tuple(scanned.sizes[number] for number in numbers),
    )


def _move_tail(
    train: ScannedFiles, validation: ScannedFiles, *, tail_bytes: int
) -> tuple[ScannedFiles, ScannedFiles]:
    """Give the last ``tail_bytes`` of train's largest file to validation, leaving it one byte."""
    number = max(range(len(train.sizes)), key=lambda number: train.sizes[number])
    tail_bytes = min(tail_bytes, train.sizes[number] - 1)
    if tail_bytes == 0:
        return train, validation
    sizes = list(train.sizes)
    sizes[number] -= tail_bytes
    cut = train.starts[number] + sizes[number]
    return replace(train, sizes=tuple(sizes)), replace(
        validation,
        files=(*validation.files, train.files[number]),
        starts=(*validation.starts, cut),
        sizes=(*validation.sizes, tail_bytes),
    )


def fingerprint(files: Sequence[Path], sizes: Sequence[int], root: Path) -> str:
    """SHA-256, in hexadecimal, over the names below ``root`` and the sizes, in order."""
    digest = hashlib.sha256()
    for path, size in zip(files, sizes, strict=True):
        name = path.relative_to(root).as_posix() if path != root else path.name
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def summary(scanned: ScannedFiles) -> str:
    """Return a line on what was found and what was left out, by reason."""
    kinds = Counter(path.suffix or "no suffix" for path in scanned.files)
    common = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3))
    line = f"{len(scanned.files)} text files ({common}), {scanned.total_bytes / 1e6:.1f} MB"
    skipped = [f"{scanned.skipped_binary} binary"] if scanned.skipped_binary else []
    if scanned.skipped_unreadable:
        skipped.append(f"{len(scanned.skipped_unreadable)} unreadable")
    return line + (f"; skipped {' and '.join(skipped)}" if skipped else "")
