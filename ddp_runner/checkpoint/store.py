"""Saves and loads checkpoints so that an announced one is never lost; never decides when.

A checkpoint is one file for plain ``torch.load(weights_only=True)``: the caller's dict plus the key
``manifest``, which says what the file is even when its manifest file is gone.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp_runner.checkpoint.catalog import POINTERS, SPARED, WORDS, Catalog, Entry
from ddp_runner.checkpoint.codec import stored_bytes, tensor_bytes
from ddp_runner.checkpoint.file_hash import digest_of
from ddp_runner.checkpoint.manifest import CheckpointFacts, Manifest, manifest_name
from ddp_runner.checkpoint.publish import publish, publish_text
from ddp_runner.checkpoint.weights import (
    Content,
    UnreadableError,
    load_weights,
    read_archive,
)
from ddp_runner.config.ways_on import resume_as_given, words_of
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.system.disk import Disk, RealDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["MANIFEST_KEY", "CheckpointStore", "Loaded", "Saved", "load_weights"]

MANIFEST_KEY = "manifest"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A published checkpoint. ``blocked_s`` is the whole call, ``write_s`` its main file alone.

    ``notes``: what was cleaned up or moved on the way, a line each.
    """

    path: Path
    manifest: Manifest
    blocked_s: float
    write_s: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that verified, and those that were passed over, newest first, with the reason."""

    state: dict[str, Any]
    manifest: Manifest
    path: Path
    rejected: tuple[tuple[Path, str], ...] = ()
    remark: str = ""  # what is wrong with it though it is whole


class CheckpointStore:
    """The checkpoints of one run in one directory. One process writes; any may load.

    Keeps the newest ``keep_last``, the best one (by the monitored value), each of a step that
    ``keep_every`` divides, where that is not 0, of a stage that is over the last and the best, and the one
    that ``Catalog.spare`` names. Not thread-safe.
    """

    def __init__(
        self, directory: Path, *, keep_last: int, keep_every: int = 0, disk: Disk | None = None
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: at least 1")
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._disk: Disk = RealDisk() if disk is None else disk
        self.catalog = Catalog(self.directory, disk=self._disk)
        self._has_cleaned = False
        self._proved: set[int] = set()  # steps whose files were read once more and found whole
        self._reported_damaged: set[int] = set()
        self._notes: list[str] = []

    def save(
        self,
        state: Mapping[str, Any],
        facts: CheckpointFacts,
        *,
        confirm: Callable[[], None] | None = None,
    ) -> Saved:
        """Publish ``state`` as the checkpoint of its step; returns when it survives a loss of power.

        Blocks for the write and its sync; device tensors are copied to the host one at a time. The
        model's entries must have the bare model's names (``naming``). A monitored value that is not
        finite counts as None.
        ``confirm`` is called when the file is written, before it appears: what it raises is raised.
        Checkpoints of later steps belong to a branch that was left (a rollback, a resume from an older file): they are moved into
        ``set_aside_<utc>/``. The first save of a store removes what killed writers left over.

        Raises FaultError (STORAGE_FAILED) if the disk refuses: then every earlier checkpoint stands
        as before. Once the new one is published, pointers or clean-up that fail are a note. Raises
        TypeError or ValueError for a state that could not be read again.
        """
        started_s = time.perf_counter()
        if facts.monitored is not None and not math.isfinite(facts.monitored):
            facts = replace(facts, monitored=None)
        manifest = Manifest.of(facts)
        # What evaluations have found goes before what the files that are there tell.
        about = {**self.catalog.best_so_far(manifest), **facts.about}
        manifest = replace(manifest, about=about)
        if MANIFEST_KEY in state:
            raise ValueError(f"state has the key {MANIFEST_KEY!r}, which the store writes itself")
        content = {**state, MANIFEST_KEY: manifest.facts()}
        least_bytes = tensor_bytes(content)
        try:
            published, write_s = self._publish(
                content, manifest, least_bytes=least_bytes, confirm=confirm
            )
            self._set_later_aside(published)
        except OSError as error:
            where = self.directory / manifest.file
            room = self._missing_room(error, needed_bytes=stored_bytes(content))
            raise _storage_fault(error, where, step=facts.step, room=room) from error
        try:
            self._point_and_retain(published)
        except OSError as error:  # the next save makes up for it
            self._notes.append(
                f"{self.directory / published.file} is saved, but not all that follows from it "
                f"({error.filename or 'pointers, retention'}: {error.strerror or error})"
            )
        notes, self._notes = tuple(self._notes), []
        return Saved(
            path=self.directory / published.file,
            manifest=published,
            blocked_s=time.perf_counter() - started_s,
            write_s=write_s,
            notes=notes,
        )

    def publish_weights(self, name: str, weights: Mapping[str, Any]) -> Path:
        """Put a bare state dict beside the checkpoints; returns when it survives a loss of power.

        Raises FaultError (STORAGE_FAILED) if the disk refuses: a file of that name stands as before.
        """
        path = self.directory / name
        try:
            self._disk.make_directory(self.directory)
            publish(self._disk, path, lambda out: torch.save(weights, out))  # type: ignore[arg-type]
            self._disk.sync_directory(self.directory)
        except OSError as error:
            room = self._missing_room(error, needed_bytes=stored_bytes(weights))
            raise _storage_fault(error, path, step=0, room=room) from error
        return path

    def withdraw_weights(self, name: str) -> None:
        """Remove such a file, if there is one. Raises FaultError (STORAGE_FAILED) if the disk refuses."""
        path = self.directory / name
        try:
            if path.exists():
                self._disk.remove(path)
                self._disk.sync_directory(self.directory)
        except OSError as error:
            raise _storage_fault(error, path, step=0, room="") from error

    def _publish(
        self,
        content: dict[str, Any],
        manifest: Manifest,
        *,
        least_bytes: int,
        confirm: Callable[[], None] | None,
    ) -> tuple[Manifest, float]:
        """Put file and manifest in place; the finished manifest and the seconds of the file."""
        disk, directory = self._disk, self.directory
        disk.make_directory(directory)
        if not self._has_cleaned:  # a predecessor that was killed may hold the room that we need
            for path in self.catalog.clean_leftovers():
                self._notes.append(f"removed {path}, which a writer that was killed had left")
            for path in self.catalog.foreign_leftovers():
                self._notes.append(
                    f"{path} is left alone: it is of a save for which only its own machine knows"
                    " whether it goes on"
                )
            self._has_cleaned = True
        # The tensors alone: what fits is written, and no reserve is kept from it.
        if disk.free_bytes(directory) < least_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        self._withdraw_manifest(manifest.step)
        started_s = time.perf_counter()
        written = publish(
            disk,
            directory / manifest.file,
            lambda out: torch.save(content, out),  # type: ignore[arg-type]  # write and flush do
            least_bytes=least_bytes,
            confirm=confirm,
        )
        disk.sync_directory(directory)
        write_s = time.perf_counter() - started_s
        finished = replace(
            manifest,
            size_bytes=written.size_bytes,
            sha256=written.sha256,
            hashed=written.algorithm,
        )
        # INVARIANT publish-last: a manifest is written only after the file that it names is on disk.
        # Broken if: this publish_text() moves above the sync_directory() that follows the file.
        # Guarded by: test_a_crash_at_any_disk_operation_keeps_the_newest_announced_checkpoint.
        publish_text(disk, directory / manifest_name(manifest.step), finished.to_json())
        disk.sync_directory(directory)
        return finished, write_s

    def _missing_room(self, error: OSError, *, needed_bytes: int) -> str:
        """Return what to free, and where, in words; empty if the error is not about room."""
        if error.errno not in _NO_ROOM:
            return ""
        try:
            free_bytes = self._disk.free_bytes(self.directory)
        except OSError:
            return ""
        room = f"{needed_bytes:,} bytes are needed and {free_bytes:,} are free"
        if free_bytes >= needed_bytes:
            return f" ({room}: a quota, or no files are left)"
        return f" ({room}: free {needed_bytes - free_bytes:,} more in {self.directory})"

    def _withdraw_manifest(self, step: int) -> None:
        """Remove the manifest of ``step`` before its file is replaced by another of the same step."""
        # INVARIANT one-truth: a manifest never stands beside a file that it does not describe.
        # Without one, old and new file alike are checked by their own archive and stay loadable.
        # Broken if: the same step is saved again while the old manifest is still there.
        # Guarded by: test_saving_the_same_step_again_survives_a_crash_anywhere.
        path = self.directory / manifest_name(step)
        if path.exists():
            self._disk.remove(path)
            self._disk.sync_directory(self.directory)

    def _set_later_aside(self, published: Manifest) -> None:
        """A later checkpoint that stays would be taken for the newest."""
        aside = self.catalog.set_later_aside(published.step, _utc("%Y%m%dT%H%M%SZ"))
        if aside is not None:
            self._notes.append(
                f"later checkpoints, of the branch that was left, are now in {aside}"
            )

    def _point_and_retain(self, published: Manifest) -> None:
        """Update the pointers and delete old files after a publication; loading does not need either."""
        directory = self.directory
        publish_text(self._disk, directory / "last", f"{published.file}\n")
        best = self.catalog.best()
        if best is not None and self.catalog.pointer("best") != best.path:
            publish_text(self._disk, directory / "best", f"{best.path.name}\n")
        self._disk.sync_directory(directory)
        self._retain(published, best=best)

    def _retain(self, published: Manifest, *, best: Entry | None) -> None:
        """Delete what is older than the newest ``keep_last`` sound checkpoints, but for what is kept for good."""
        entries = self.catalog.entries()
        self._proved &= {entry.step for entry in entries}
        if sum(entry.problem is None for entry in entries) <= self.keep_last:
            return
        # INVARIANT replaced-first: only what newer, synced and published checkpoints replace is
        # deleted, each of which was read once more since it was written, save the one of now.
        # Broken if: retention runs before the manifest is synced, or counts damaged entries.
        # Guarded by: test_retention_counts_only_sound_checkpoints, also with a bit flipped.
        self._proved.discard(published.step)
        calm = self.catalog.to_go_back_to()
        sound = (entry.step for entry in calm if self._is_sound(entry, published))
        kept = list(itertools.islice(sound, self.keep_last))
        if len(kept) < self.keep_last:
            return
        oldest_kept = kept[-1]
        assert oldest_kept <= published.step
        of_stages = self.catalog.of_past_stages()
        # INVARIANT kept-to-go-back: retention spares the checkpoint that a roll-back for a wrong gradient would need.
        # Broken if: it goes with the others of its age. Guarded by: test_retention_spares_what_a_roll_back_would_need.
        spared = self.catalog.pointer(SPARED)
        for entry in entries:
            if self.is_for_good(entry.step) or entry.step in of_stages or entry.path == spared:
                continue
            if entry.step < oldest_kept and (best is None or entry.step != best.step):
                for path in (self.directory / manifest_name(entry.step), entry.path):
                    if path.exists():
                        self._disk.remove(path)
        self._disk.sync_directory(self.directory)

    @property
    def proved(self) -> list[int]:
        """The steps whose files were read once more and found whole."""
        return sorted(self._proved)

    def trust(self, proved: Iterable[int]) -> None:
        """Trust the files of these steps, which another store has read once more."""
        self._proved.update(proved)

    def is_for_good(self, step: int) -> bool:
        """Return True if the checkpoint of ``step`` is kept, however many newer ones there are."""
        return bool(self.keep_every and step and step % self.keep_every == 0)

    def _is_sound(self, entry: Entry, published: Manifest) -> bool:
        """Return True if ``entry`` can replace older ones; its content is read once, not at each save."""
        if entry.problem is not None:
            return False
        if entry.step == published.step or entry.step in self._proved:
            return True
        damage = self.catalog.verify(entry)
        if damage is None:
            try:
                _content_of(entry, map_location="cpu", content=Content.MAPPED)
            except UnreadableError as error:
                damage = str(error)
        if damage is None:
            self._proved.add(entry.step)
        elif entry.step not in self._reported_damaged:
            self._reported_damaged.add(entry.step)
            self._notes.append(f"{entry.path} is unusable ({damage}): an older one is kept for it")
        return damage is None

    def load(
        self,
        which: str = "auto",
        *,
        map_location: str | torch.device = "cpu",
        set_bad_aside: bool = False,
    ) -> Loaded | None:
        """The first checkpoint for ``which`` (see :meth:`Catalog.resolve`) that verifies.

        None when there is none at all, or for ``none``. With ``set_bad_aside``, damaged ones that
        were passed over are renamed to ``<name>.bad`` with the reason in ``<name>.bad.reason``:
        one process does that, and only once a sound one is found, so that a relaunch after a
        failure does not take the directory for an empty one.

        Raises BadInputError (``--resume``) for a path that does not exist or does not verify, and
        FaultError (CHECKPOINT_BAD), naming each with its reason, when none verifies.
        """
        candidates = self.catalog.resolve(which)
        rejected: list[tuple[Path, str]] = []
        damaged: list[tuple[Entry, str]] = []
        for entry in candidates:
            reason = self.catalog.verify(entry)
            if reason is None:
                found = _read(entry, map_location=map_location)
                if not isinstance(found, str):
                    if set_bad_aside and which in WORDS:
                        problem = self.set_damaged_aside(damaged)
                        rejected = [(path, f"{why}{problem}") for path, why in rejected]
                    return replace(found, rejected=tuple(rejected))
                reason = found
            damaged.append((entry, reason))
            rejected.append((entry.path, reason))
        if not candidates:
            return None
        listed = "; ".join(f"{path}: {reason}" for path, reason in rejected)
        if which not in WORDS:
            raise BadInputError(*resume_as_given(which), f"does not verify: {listed}")
        raise FaultError(
            _fault(
                FaultKind.CHECKPOINT_BAD,
                f"no checkpoint in {self.directory} can be loaded; {words_of(resume='none')} sets them"
                f" aside and starts fresh ({listed})",
                step=candidates[0].step,
            )
        )

    def remarks(self, loaded: Loaded) -> list[str]:
        """Return a line for each file found damaged before ``loaded``, and its consequence."""
        remarks = [f"checkpoint {path} is unusable: {why}" for path, why in loaded.rejected]
        if loaded.remark:
            remarks.append(f"checkpoint {loaded.path} is whole, by its archive: {loaded.remark}")
        unusable = [path.name for path, _ in loaded.rejected]
        for name in POINTERS:
            problem = self.catalog.pointer_problem(name)
            if problem is None or not (self.directory / name).exists():
                continue
            if not any(known in problem for known in unusable):  # said already
                remarks.append(f"{problem}: nothing is lost, the next save writes it again")
        return remarks

    def set_damaged_aside(self, damaged: list[tuple[Entry, str]]) -> str:
        """Rename damaged checkpoints; what to add to their reasons if the disk refuses.

        They are passed over again the next time, so that it is nothing to end a resume for.
        """
        for entry, reason in damaged:
            bad = entry.path.with_name(f"{entry.path.name}.bad")
            manifest = self.directory / manifest_name(entry.step)
            try:
                publish_text(self._disk, bad.with_name(f"{bad.name}.reason"), f"{reason}\n")
                if entry.path.exists():
                    self._disk.replace(entry.path, bad)
                if manifest.exists():
                    self._disk.replace(manifest, manifest.with_name(f"{manifest.name}.bad"))
                self._disk.sync_directory(self.directory)
            except OSError as error:
                return f" (not set aside: {error.strerror or error})"
        return ""


def _read(entry: Entry, *, map_location: str | torch.device) -> Loaded | str:
    """Load a verified file, or say why torch or we cannot take it."""
    try:
        content = _content_of(entry, map_location=map_location, content=Content.READ)
        facts = content.pop(MANIFEST_KEY)
        manifest = entry.manifest or Manifest.from_facts(
            facts,
            file=entry.path.name,
            size_bytes=entry.path.stat().st_size,
            sha256=digest_of(entry.path),
        )
    except UnreadableError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"no usable manifest, and its own facts are none: {error}"
    remark = "" if entry.manifest else entry.problem or ""
    return Loaded(state=content, manifest=manifest, path=entry.path, remark=remark)


def _content_of(
    entry: Entry, *, map_location: str | torch.device, content: Content
) -> dict[str, Any]:
    """Return the content of a checkpoint's file. Raises UnreadableError, also if it is no checkpoint."""
    found = read_archive(entry.path, map_location=map_location, content=content)
    if not isinstance(found, dict) or not isinstance(found.get(MANIFEST_KEY), dict):
        raise UnreadableError("it was not written by ddp_runner")
    return found


def _fault(kind: FaultKind, cause: str, *, step: int) -> Fault:
    return Fault(
        kind=kind, rank=-1, step=step, cause=cause, phase="checkpoint", at_ns=time.monotonic_ns()
    )


def _storage_fault(error: OSError, path: Path, *, step: int, room: str) -> FaultError:
    """The disk refused while ``path`` was being saved or set aside; text for people."""
    where = Path(error.filename) if error.filename else path
    place = "" if where in (path, path.parent) else f" (at {where})"
    cause = f"{path}{place}: {error.strerror or error}{room}"
    return FaultError(_fault(FaultKind.STORAGE_FAILED, cause, step=step))


def _utc(form: str) -> str:
    """The wall time in UTC, for names and people."""
    return datetime.now(tz=timezone.utc).strftime(form)
