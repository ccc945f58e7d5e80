"""Which checkpoints a person may delete, and their deletion. Never imports torch; never decides when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ddp_runner.checkpoint.catalog import Catalog, Entry
from ddp_runner.checkpoint.disk import Disk, RealDisk
from ddp_runner.checkpoint.manifest import manifest_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """``removed``: to be deleted, newest first. ``sound``: how many newest ones verified and stay.

    ``spared``: older ones that stay, with the reason.
    """

    removed: tuple[Entry, ...]
    sound: int
    spared: tuple[tuple[Entry, str], ...] = ()


# INVARIANT pruned-behind-sound: nothing is deleted that is not older than as many checkpoints as are to
# be kept, each of which was just read whole. Broken if: a damaged or an unread one counts as kept.
# Guarded by: test_pruning_counts_only_what_was_read_whole.
def plan_pruning(
    entries: Sequence[Entry],
    *,
    keep: int,
    verify: Callable[[Entry], str | None],
    best_step: int | None,
    keep_every: int = 0,
    of_stages: Collection[int] = (),
    takes_all: bool = False,
) -> Pruning:
    """What to delete of ``entries``, newest first, so that the newest ``keep`` sound ones stay.

    The best one, those of a step that ``keep_every`` divides and ``of_stages`` that are over stay too, unless it
    ``takes_all``.
    """
    sound, removed, spared = 0, [], []
    for entry in entries:
        if sound < keep:
            sound += entry.manifest is not None and verify(entry) is None
        elif not takes_all and entry.step == best_step:
            spared.append((entry, "the best"))
        elif not takes_all and entry.step in of_stages:
            spared.append((entry, "of a stage that is over"))
        elif not takes_all and keep_every and entry.step % keep_every == 0:
            spared.append((entry, f"for good: keep_every={keep_every}"))
        else:
            removed.append(entry)
    return Pruning(removed=tuple(removed), sound=sound, spared=tuple(spared))


def perform_pruning(catalog: Catalog, pruning: Pruning, *, disk: Disk | None = None) -> None:
    """Delete them, the oldest first, each with its manifest before it. Raises OSError."""
    disk = RealDisk() if disk is None else disk
    for entry in reversed(pruning.removed):
        for path in (catalog.directory / manifest_name(entry.step), entry.path):
            with contextlib.suppress(FileNotFoundError):  # a run's own retention works beside us
                disk.remove(path)
    if pruning.removed:
        disk.sync_directory(catalog.directory)
