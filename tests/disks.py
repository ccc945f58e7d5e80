"""A small real filesystem for tests, where mounting is permitted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(directory: Path, *, size_kb: int) -> Iterator[None]:
    """``directory`` is a tmpfs of that size for the length of the block; skips where none can be."""
    directory.mkdir(parents=True)
    with _mounted(directory, f"size={size_kb}k"):
        yield


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Nothing can be written in ``directory`` for the length of the block; skips as :func:`small_disk`."""
    with _mounted(directory, "ro"):
        yield


@contextlib.contextmanager
def _mounted(directory: Path, options: str) -> Iterator[None]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not permitted: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
