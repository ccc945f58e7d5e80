"""Lists the checkpoints of a directory, and checks that each is intact. Never imports torch, never deletes one.

A checkpoint is ``step_<number>.pt`` with its manifest ``step_<number>.json``. A file whose manifest
is missing or damaged can still be whole (a save that was cut off between the two); it is then
checked by the CRC-32 that its own archive keeps of each record.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ddp_runner.checkpoint.file_hash import digest_of
from ddp_runner.checkpoint.manifest import (
    AMID_SKIPPED,
    Manifest,
    best_of,
    checkpoint_name,
    is_judged_as,
    manifest_name,
    rank_of,
    stage_name,
    step_of,
)
from ddp_runner.config.ways_on import resume_as_given
from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.disk import Disk, RealDisk
from ddp_runner.kernel.system.run_files import (
    is_regular,
    left_over,
    open_given,
    read_small,
    reading,
    replace_file,
)

if TYPE_CHECKING:
    from ddp_runner.core.settings import JsonValue

POINTERS = ("last", "best")
SPARED = (
    ".spared"  # the pointer to a checkpoint that this launch may roll back to, and retention spares
)
FINAL, FINAL_AVERAGE = "final.pt", "final_ema.pt"  # bare weights at the end of a run
WORDS = ("auto", "last", "best", "none")
NO_MANIFEST = "no manifest: the save was cut off before it was published"
NO_FILE = "a manifest without its file"
_POINTER_BYTES_MAX = 4096
_MANIFEST_BYTES_MAX = 4 * 1024 * 1024
_NAMED_BY_PID = re.compile(r"\.step_\d{8,}\.pt\.tmp-\d+")  # as earlier versions named them


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCheckpoint:
    """The newest checkpoint in a folder: its ``step`` and the run that wrote it."""

    step: int
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One checkpoint of a directory. ``problem`` is what a look at names, manifest and size shows."""

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None


class Catalog:
    """Reads one checkpoint directory; one that does not exist holds nothing."""

    def __init__(self, directory: Path, *, disk: Disk | None = None) -> None:
        self.directory = Path(directory)
        self._disk: Disk = RealDisk() if disk is None else disk

    def entries(self) -> list[Entry]:
        """Every checkpoint, newest (highest step) first. Reads manifests and sizes, no content."""
        steps = {step for name in self._names() if (step := step_of(name)) is not None}
        return [_entry(self.directory, step) for step in sorted(steps, reverse=True)]

    def newest(self) -> NewestCheckpoint | None:
        """The newest one that looks sound; None where there is none, or the folder cannot be read."""
        with contextlib.suppress(OSError):
            for entry in self.entries():
                if entry.problem is None and entry.manifest is not None:
                    return NewestCheckpoint(step=entry.step, run_id=entry.manifest.run_id)
        return None

    def published(self) -> frozenset[tuple[str, int]]:
        """The manifests and when each was written, to know later what is new. Never raises."""
        found = set()
        with contextlib.suppress(OSError):
            for name in self._names():
                if step_of(name) is not None and name.endswith(".json"):
                    with contextlib.suppress(FileNotFoundError):  # retention works beside us
                        found.add((name, (self.directory / name).lstat().st_mtime_ns))
        return frozenset(found)

    def to_go_back_to(self) -> list[Entry]:
        """Return the entries like :meth:`entries`, without states that may have caused the skipped steps."""
        return [entry for entry in self.entries() if not _is_amid_skipped(entry)]

    def verify(self, entry: Entry) -> str | None:
        """Read the whole file; None if it is what its manifest says, else the reason in words.

        Without a usable manifest the file must pass the CRC-32 of its own archive.
        """
        try:
            with reading(entry.path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if entry.manifest is None:
                    return _archive_problem(file, size_bytes)
                if size_bytes != entry.manifest.size_bytes:
                    return f"{size_bytes} bytes, its manifest says {entry.manifest.size_bytes}"
            if digest_of(entry.path, entry.manifest.hashed) != entry.manifest.sha256:
                return "its SHA-256 is not the one in its manifest"
        except FileNotFoundError:
            return NO_FILE
        except OSError as error:
            if lacks_memory(error):
                raise
            return f"cannot be read: {error.strerror or error}"
        return None

    def damaged_after(self, step: int) -> list[tuple[Entry, str]] | None:
        """The checkpoints of later steps, each with what is wrong with it; None where one of them verifies."""
        damaged = []
        for entry in self.entries():
            if entry.step <= step:
                break
            problem = self.verify(entry)
            if problem is None:
                return None
            damaged.append((entry, problem))
        return damaged

    def pointer(self, name: str) -> Path | None:
        """The checkpoint that pointer file ``last`` or ``best`` names; None if it names none."""
        return self._follow(name)[0]

    def spare(self, step: int) -> None:
        """Have retention spare the newest checkpoint up to ``step``, and no other that was spared before.

        Leaves what is spared as it is where there is none up to that step, or the folder cannot be written.
        """
        with contextlib.suppress(OSError):
            found = next(
                (one for one in self.entries() if one.step <= step and not one.problem), None
            )
            if found is not None and self.pointer(SPARED) != found.path:
                replace_file(self.directory / SPARED, f"{found.path.name}\n".encode())

    def spare_none(self) -> None:
        """Have retention spare nothing more."""
        with contextlib.suppress(OSError):
            (self.directory / SPARED).unlink()

    def pointer_problem(self, name: str) -> str | None:
        """Why :meth:`pointer` gives None, in words; None while it gives a path."""
        return self._follow(name)[1]

    def best_so_far(self, now: Manifest) -> dict[str, JsonValue]:
        """The best monitored value up to a step, its own or one that an earlier manifest of its stage knows."""
        known: list[tuple[float, int]] = []
        if now.monitored is not None:
            known.append((now.monitored, now.step))
        with contextlib.suppress(
            OSError
        ):  # no folder yet, or a disk that the save itself will name
            for entry in self.entries():
                before = entry.manifest
                if before is None or entry.step >= now.step:
                    continue
                if stage_name(before) != stage_name(now) or not is_judged_as(before, now):
                    continue
                if before.monitored is not None:
                    known.append((before.monitored, entry.step))
                known += best_of(before)
        if not known:
            return {}
        value, at = min(known, key=lambda one: (rank_of(one[0], now.mode), one[1]))
        return {"best": {"step": at, "value": value}}

    def best(self, stage: str | None = None) -> Entry | None:
        """The entry with the best monitored value, the oldest of equals, by the manifests.

        Of ``stage``, or of the one that the newest is of: that which the newest of it knows to be the best so far.
        Without it the best of those that are judged by the same figure as the newest judged one. The pointer file is derived from this, so a torn one loses nothing.
        """
        entries = [entry for entry in self.entries() if entry.manifest is not None]
        if stage is None and entries:
            stage = stage_name(entries[0].manifest)
        known = self.best_step(stage)
        for entry in entries:
            if (
                entry.step == known
                and entry.problem is None
                and stage_name(entry.manifest) == stage
            ):
                return entry
        judged = [
            (entry.manifest, entry)
            for entry in entries
            if entry.problem is None
            and entry.manifest is not None
            and entry.manifest.monitored is not None
            and stage_name(entry.manifest) == stage
        ]
        ranked = [
            (rank_of(manifest.monitored or 0.0, manifest.mode), entry.step, entry)
            for manifest, entry in judged
            if is_judged_as(manifest, judged[0][0])
        ]
        return min(ranked, key=lambda item: item[:2])[2] if ranked else None

    def best_step(self, stage: str | None = None) -> int | None:
        """Return the best step of a stage, or of the newest one, by its newest manifest; its file may be gone."""
        for entry in self.entries():
            if entry.manifest is not None and stage in (None, stage_name(entry.manifest)):
                return next((step for _, step in best_of(entry.manifest)), None)
        return None

    def best_is_gone(self, taken: Entry, stage: str | None = None) -> str:
        """A line where the best that there is, ``taken``, is not the best that evaluations have found; else empty."""
        known = self.best_step(stage)
        if known in (None, taken.step):
            return ""
        name = taken.manifest.monitor if taken.manifest is not None else ""
        return (
            f"step {taken.step:,} is the best of the checkpoints there are, and {name or 'the run'} was best after"
            f" step {known:,}, of which there is none: load_best_at_end=true keeps it"
        )

    def of_past_stages(self) -> frozenset[int]:
        """Steps of the newest and of the best checkpoint of each stage that is over: others may begin with them."""
        newest: dict[str, int] = {}
        for entry in self.entries():
            if entry.manifest is not None and entry.problem is None:
                newest.setdefault(stage_name(entry.manifest), entry.step)
        past = list(newest)[1:]
        best = [found.step for stage in past if (found := self.best(stage)) is not None]
        return frozenset([*best, *(newest[stage] for stage in past)])

    def resolve(self, which: str) -> list[Entry]:
        """Return the checkpoints to try for ``--resume``, in order.

        ``auto`` and ``last``: newest to oldest. ``best``: the best one, then newest to oldest.
        ``none``: nothing. Else a path of a checkpoint file, its manifest, a pointer file or a
        checkpoint directory. Raises BadInputError if the path is none of these.
        """
        if which == "none":
            return []
        if which not in WORDS:
            return self._resolve_path(Path(which))
        entries = self.entries()
        best = self.best() if which == "best" else None
        if best is None:
            return entries
        return [best, *(entry for entry in entries if entry.step != best.step)]

    def set_all_aside(self, stamp: str) -> Path | None:
        """Move every checkpoint, manifest, pointer and set-aside bad file into ``set_aside_<stamp>/``.

        Returns that directory (a number is added if it exists), None if there was nothing to move.
        """
        return self.set_aside([name for name in self._names() if _is_ours(name)], stamp)

    def set_later_aside(self, step: int, stamp: str) -> Path | None:
        """The same with what is later than ``step``, and with pointers that name such a one."""
        later = {name for name in self._names() if (step_of(name) or 0) > step}
        named = {name: self.pointer(name) for name in POINTERS}
        pointers = [name for name, path in named.items() if path is not None and path.name in later]
        if later:  # what a run has ended with is of its last step
            pointers += [name for name in self._names() if name in (FINAL, FINAL_AVERAGE)]
        return self.set_aside([*sorted(later), *pointers], stamp)

    def set_other_branch_aside(self, begun_from: Path | None, stamp: str) -> Path | None:
        """The same with what a run does not go on from: what is later, or all where it began elsewhere.

        Until its first save, the newest one that is left is ``begun_from``; None if it starts from nothing.
        """
        if begun_from is None or begun_from.parent.resolve() != self.directory.resolve():
            return self.set_all_aside(stamp)
        return self.set_later_aside(step_of(begun_from.name) or 0, stamp)

    def set_aside(self, names: list[str], stamp: str) -> Path | None:
        """Move the files called ``names`` into a new ``set_aside_<stamp>/``; None if there are none."""
        if not names:
            return None
        target = self.directory / f"set_aside_{stamp}"
        number = 1
        while target.exists():
            number += 1
            target = self.directory / f"set_aside_{stamp}_{number}"
        self._disk.make_directory(target)
        # Manifests go first, and durably: cut off in between, a file without its manifest is still
        # a checkpoint, a manifest without its file is none.
        manifests = [name for name in names if name.endswith(".json")]
        for group in (manifests, [name for name in names if name not in manifests]):
            for name in group:
                self._disk.replace(self.directory / name, target / name)
            self._disk.sync_directory(target)
            self._disk.sync_directory(self.directory)
        return target

    def clean_leftovers(self) -> list[Path]:
        """Remove temporary files of writers of this machine that have ended; returns what was removed.

        Those of this very process count as left over: call it while this process is not saving.
        """
        removed, _ = left_over(self.directory)
        for path in removed:
            self._disk.remove(path)
        return removed

    def foreign_leftovers(self) -> list[Path]:
        """Temporary files of writers of other machines, or of nobody knows which, that may write now."""
        names = [name for name in self._names() if _NAMED_BY_PID.fullmatch(name)]
        found = left_over(self.directory)[1] + [self.directory / name for name in names]
        return sorted(found)

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []

    def _follow(self, name: str) -> tuple[Path | None, str | None]:
        """The target of a pointer file, or why it has none."""
        try:
            with reading(self.directory / name) as file:
                return _target(self.directory, name, file.read(_POINTER_BYTES_MAX))
        except OSError as error:
            return None, f"pointer {name!r}: {error.strerror or error}"

    def _resolve_path(self, path: Path) -> list[Entry]:
        expected = (
            "expected auto, last, best, none, a checkpoint file step_<number>.pt or a directory"
            " that holds some"
        )
        try:
            entries = checkpoints_at(path)
        except (NoCheckpointError, OSError) as error:
            raise BadInputError(
                *resume_as_given(str(path)), f"{reason_of(error)}; {expected}"
            ) from error
        if not entries:
            raise BadInputError(
                *resume_as_given(str(path)), f"is not named like a checkpoint; {expected}"
            )
        return entries


def _is_amid_skipped(entry: Entry) -> bool:
    return entry.manifest is not None and entry.manifest.reason == AMID_SKIPPED


class NoCheckpointError(Exception):
    """A user's path leads to no checkpoint; the text says why."""


def checkpoints_at(path: Path) -> list[Entry]:
    """The checkpoints that a user's path means: of a folder, of a pointer, or one by its own name.

    Empty where it is another file. The user's own links are followed. Raises NoCheckpointError for a
    folder without any and for a pointer that leads nowhere, and OSError where nothing can be read.
    """
    path = Path(os.path.realpath(path.expanduser(), strict=True))
    if path.is_dir():
        if not (entries := Catalog(path).entries()):
            raise NoCheckpointError("is a folder without checkpoints")
        return entries
    with os.fdopen(open_given(path), "rb") as file:
        begin = file.read(_POINTER_BYTES_MAX)
    if step_of(path.name) is None and len(begin) < _POINTER_BYTES_MAX:
        target, problem = _target(path.parent, path.name, begin)
        if target is not None:
            path = target
        elif path.name in POINTERS or _is_name(begin):
            raise NoCheckpointError(str(problem))
    step = step_of(path.name)
    return [] if step is None else [_entry(path.parent, step)]


def _target(directory: Path, name: str, content: bytes) -> tuple[Path | None, str | None]:
    """The checkpoint that a pointer of that content names, or why it names none."""
    text = content.decode(errors="replace")
    if not _is_name(content):
        return None, f"pointer {name!r} is torn: it holds {text[:40]!r}"
    path = directory / text[:-1]
    if not is_regular(path):
        return None, f"pointer {name!r} names {text[:-1]}, which does not exist"
    return path, None


def _is_name(content: bytes) -> bool:
    text = content.decode(errors="replace")
    return text.endswith(".pt\n") and step_of(text[:-1]) is not None


def reason_of(error: Exception) -> str:
    """Why something could not be read, to follow its name."""
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    return (
        f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
    )


def _entry(directory: Path, step: int) -> Entry:
    path = directory / checkpoint_name(step)
    manifest, problem = None, None
    try:
        manifest = read_manifest(directory / manifest_name(step))
    except FileNotFoundError:
        problem = NO_MANIFEST
    except OSError as error:
        problem = f"its manifest cannot be read: {error.strerror or error}"
    except ValueError as error:
        problem = f"its manifest is damaged: {error}"
    size_bytes = _size_of(path)
    if size_bytes is None:
        problem = NO_FILE
    elif manifest is not None and size_bytes != manifest.size_bytes:
        problem = f"{size_bytes} bytes, its manifest says {manifest.size_bytes}"
    return Entry(step=step, path=path, manifest=manifest, problem=problem)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises OSError, or ValueError where it is none."""
    return Manifest.from_json(read_small(path, bytes_max=_MANIFEST_BYTES_MAX).decode())


def _size_of(path: Path) -> int | None:
    """The size of a file, in one look: retention works beside us. None where there is no such file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _archive_problem(file: BinaryIO, size_bytes: int) -> str | None:
    """Check the records of a torch archive (a ZIP file) against their CRC-32; None if all match."""
    if size_bytes == 0:
        return "it is empty, and it has no usable manifest"
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) as error:
        return f"no usable manifest, and its archive is damaged: {error}"
    if damaged is not None:
        return f"no usable manifest, and its record {damaged!r} is damaged"
    return None


def _is_ours(name: str) -> bool:
    """A checkpoint, manifest, pointer, bad file that was set aside, or the weights of a run's end."""
    stem = name.split(".bad", maxsplit=1)[0]
    return name in (*POINTERS, FINAL, FINAL_AVERAGE) or step_of(stem) is not None
