"""Which checkpoint of its own a script resumes from: the newest that is whole. Reads files, and imports no torch."""

from __future__ import annotations

import glob
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ddp_runner.features.script.rules import NEWEST, ResumeWith

# What libraries write last into a folder: (its name, or a file that shows whose it is; the file that comes last).
_WRITTEN_LAST = (
    (re.compile(r"checkpoint-\d+|training_args\.bin"), "trainer_state.json"),  # transformers
    (
        re.compile(r"checkpoint_\d+|(optimizer|scheduler|sampler)(_\d+)?\.bin"),
        "random_states_0.pkl",
    ),  # accelerate
)
_NEVER_EMPTY = {".pt", ".pth", ".bin", ".pkl", ".ckpt"}
_HEADER_BYTES = 8  # of a safetensors file: the length of the header that follows


def words_to_resume(resume_with: Sequence[ResumeWith]) -> tuple[list[str], list[str]]:
    """Return the words that a script is given for what it resumes from, and lines about what was passed over.

    Words that name no ``{}`` count where any file matches; else ``{}`` is the newest match that is whole.
    """
    words: list[str] = []
    notes: list[str] = []
    for one in resume_with:
        found = [Path(name) for name in glob.glob(one.pattern)]  # noqa: PTH207 - as a shell has it
        if not any(NEWEST in word for word in one.words):
            words += one.words if found else ()
            continue
        for path in sorted(found, key=_age, reverse=True):
            if lack := what_is_lacking(path):
                notes.append(f"--resume-with: {path} is passed over: {lack}")
                continue
            words += (word.replace(NEWEST, str(path)) for word in one.words)
            break
    return words, notes


def what_is_lacking(path: Path) -> str:
    """Why a checkpoint, a file or a folder of files, is not whole; empty where nothing shows that."""
    try:
        if not path.is_dir():
            return _lacking_in_file(path)
        files = _files_in(path)
        if not files:
            return "it is empty"
        names = {path.name, *(file.name for file in files)}
        rows = (last for marks, last in _WRITTEN_LAST if any(map(marks.fullmatch, names)))
        last = next(rows, "")
        if last and last not in names:
            return f"{last} is missing"
        return next((f"{one.name}: {lack}" for one in files if (lack := _lacking_in_file(one))), "")
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _lacking_in_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(start, "little")
            header = file.read(header_bytes) if header_bytes < size else b""
            return (
                "" if size >= _HEADER_BYTES + header_bytes + _data_bytes(header) else "half a file"
            )
    if path.suffix == ".json":
        return "" if _is_json(path.read_bytes()) else "half a file"
    if not size and path.suffix in _NEVER_EMPTY:
        return "it is empty"
    # torch.save writes an archive, whose table of contents comes last.
    return "half a file" if start.startswith(b"PK") and not zipfile.is_zipfile(path) else ""


def _data_bytes(header: bytes) -> float:
    """How long the tensors behind a safetensors header are; no file is long enough for one that is cut off."""
    try:
        parts = json.loads(header)
        return max(
            (part["data_offsets"][1] for key, part in parts.items() if key != "__metadata__"),
            default=0,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return float("inf")


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _files_in(folder: Path) -> list[Path]:
    return sorted(one for one in folder.rglob("*") if one.is_file())


def _age(path: Path) -> tuple[float, list[tuple[int, str]]]:
    """When it was written last; of equals the one with the higher number in its name is the newer."""
    try:
        written = max(
            (one.stat().st_mtime for one in _files_in(path)), default=path.stat().st_mtime
        )
    except OSError:
        written = 0.0
    parts = re.split(r"(\d+)", str(path))
    return written, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
