"""Finds checkpoints of this launch that no rank has reported: it may have ended before. Writes nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ddp_runner.checkpoint.catalog import Catalog, read_manifest
from ddp_runner.checkpoint.manifest import Manifest, step_of
from ddp_runner.kernel.wire.events import CheckpointSaved

REPORTED_KEPT_MIN = 64  # before those are forgotten that are no longer on disk


class Published:
    """Finds new checkpoints by step and digest: the same step may be saved again after a roll-back."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._catalog = Catalog(directory)
        self._before = self._seen = self._catalog.published()
        self._reported: set[tuple[int, str]] = set()  # by their ranks
        self._found: set[tuple[int, str]] = set()  # here; a rank that lives will report it too

    @property
    def is_any_new(self) -> bool:
        """True if this launch has published one, reported or not. Reads the directory."""
        return bool(self._catalog.published() - self._before)

    def newest(self) -> tuple[int, str] | None:
        """Step and path of the newest checkpoint that there is, of whichever launch of this run."""
        with contextlib.suppress(OSError):
            for entry in self._catalog.entries():
                if entry.problem is None:
                    return entry.step, str(entry.path)
        return None

    def begin(self) -> None:
        """Record the present checkpoints as those of earlier launches, even if a manifest was just made."""
        self._seen = self._catalog.published()

    def is_news(self, saved: CheckpointSaved) -> bool:
        """Note that a rank reports its save; False where it was found before."""
        key = (saved.step, saved.sha256)
        self._reported.add(key)
        if len(self._reported) > REPORTED_KEPT_MIN:
            self._forget_deleted()
        return key not in self._found

    def find(self) -> list[Manifest]:
        """Return those that are new since the last call and that nobody has reported, oldest first."""
        published = self._catalog.published()
        if not published:  # or the disk cannot be read now: all of it would be new afterwards
            return []
        new, self._seen = published - self._seen, published
        found = []
        for name, _ in sorted(new, key=lambda one: one[1]):
            with contextlib.suppress(OSError, ValueError):  # retention works beside us
                manifest = read_manifest(self.directory / name)
                key = (manifest.step, manifest.sha256)
                if key not in self._reported and manifest.step == step_of(name):
                    self._found.add(key)
                    found.append(manifest)
        return found

    def _forget_deleted(self) -> None:
        """A run reports any number of saves; what retention has deleted is not found again."""
        steps = {step_of(name) for name, _ in self._catalog.published()}
        if steps:  # else the disk cannot be read now
            self._reported = {key for key in self._reported if key[0] in steps}
