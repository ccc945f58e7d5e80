"""Builds, loads and feeds a replacement in the drill's process, and compares its results. Changes nothing in the run.

``notes.py`` writes, in a rank, the files that this module reads.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import Loader, MicroBatch
from ddp_runner.features.proof.rules import BATCH_FILE, SHARE_FILE, SIDE_FILE, STATE_FOLDER
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.system.run_files import read_small
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.training.exactness.apart import stand_apart
from ddp_runner.training.exactness.own_share import OwnShare, first_difference
from ddp_runner.training.loading.loaders import make_loader
from ddp_runner.training.loading.preloaded_data import with_preloaded_data
from ddp_runner.training.local_runtime import Aside
from ddp_runner.training.starting.compiling import Compiler
from ddp_runner.training.starting.fork_safety import make_forks_safe
from ddp_runner.training.starting.resume import load_start
from ddp_runner.training.step import StepRules, own_share
from ddp_runner.training.workload import backend_of, build_workload

PLACES_TRIED = 8  # names of state, each given alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Holds the result of comparing a replacement with the rank.

    ``differs``: the first difference, or an empty text. ``repeats``: the replacement got the same bits twice.
    ``diagnoses``: the rank has handed over its state and batch; the other fields are then those of
    :class:`events.Diagnosed`.
    """

    differs: str
    repeats: bool = True
    diagnoses: bool = False
    with_state: str = ""
    with_data: str = ""
    itself: str = ""
    places: tuple[str, ...] = ()


def compare(
    settings: Settings, rank_info: RankInfo, *, folder: Path, logger: DDPLogger
) -> Compared:
    """Compute the share of ``rank_info`` once more, from the state in ``folder``, and compare it.

    If there is a difference, compute the share again to find its source. Raises whatever building, loading or
    computing raises: there is no result then.
    """
    noted: dict[str, Any] = json.loads(read_small(folder / SHARE_FILE))
    with contextlib.ExitStack() as ending:
        other = Replacement(
            settings, rank_info, noted=noted, folder=folder, logger=logger, ending=ending
        )
        first = other.share()
        differs = other.unlike_noted(first)
        if "again" not in noted:
            return Compared(differs=differs, repeats=not differs or other.share() == first)
        return _diagnosed(other, differs, folder=folder, again=OwnShare.from_record(noted["again"]))


def _diagnosed(other: Replacement, differs: str, *, folder: Path, again: OwnShare) -> Compared:
    """Compute the share with the rank's own state outside the model, then with its batch as well."""
    with_state, with_data, places = differs, differs, list[str]()
    side, batches = _handed(folder / SIDE_FILE), _handed(folder / BATCH_FILE)
    if differs and isinstance(side, dict):
        places = other.unlike_here(side)
        with_state = with_data = other.unlike_noted(other.share(side=side, names=places))
        if not with_state:
            places = _decisive(other, side, places) or places
    if with_state and isinstance(batches, list):
        known = side if isinstance(side, dict) else None
        with_data = other.unlike_noted(other.share(side=known, names=places, batches=batches))
    return Compared(
        differs=differs,
        diagnoses=True,
        with_state=with_state,
        with_data=with_data,
        itself=other.unlike_noted(again),
        places=tuple(places),
    )


def _decisive(other: Replacement, side: dict[str, Any], places: Sequence[str]) -> list[str]:
    """Return the one of ``places`` that alone causes the difference; an empty list if it takes several."""
    if len(places) == 1:
        return []
    return next(
        (
            [o]
            for o in places[:PLACES_TRIED]
            if not other.unlike_noted(other.share(side=side, names=[o]))
        ),
        [],
    )


def _handed(path: Path) -> Any:
    """Return what the rank has written there; None if there is nothing, or if reading it needs the user's types."""
    with contextlib.suppress(Exception):
        return torch.load(path, weights_only=True)
    return None


class Replacement:
    """Acts as a replacement of a rank that computes its share of one step, any number of times.

    ``noted``: the rank's notes of that share. ``ending``: closes the loader and its sources.
    """

    def __init__(
        self,
        settings: Settings,
        rank_info: RankInfo,
        *,
        noted: dict[str, Any],
        folder: Path,
        logger: DDPLogger,
        ending: contextlib.ExitStack,
    ) -> None:
        self._noted = noted
        self._rank, self._world_size = int(noted["rank"]), int(noted["world_size"])
        make_forks_safe()
        # As a resume does, but for the loader, whose workers a drill can do without.
        self._settings = settings = replace(
            settings,
            run=replace(settings.run, resume="auto", checkpoint_dir=str(folder / STATE_FOLDER)),
            data=replace(settings.data, num_workers=0, workers_total=None),
            checkpoint=replace(settings.checkpoint, only_trained=False),  # its file is whole
        )
        self._workload, self._state = build_workload(settings, rank_info)
        self._store = CheckpointStore(folder / STATE_FOLDER, keep_last=1)
        self._load()
        self._is_fresh = True
        self._step = self._state.committed_step
        backend = backend_of(settings, self._workload.device)
        self._group = stand_apart(rank=self._rank, world_size=self._world_size, backend=backend)
        self._runtime = Aside(rank_info, logger)
        compiler = Compiler(settings.run, self._state.model, slot=self._runtime.slot)
        compiler.turn(on=self._state.tuning.may_compile)
        self._workload = with_preloaded_data(
            settings, self._workload, self._state, self._runtime, ending=ending
        )
        self._loader = self._made_loader()
        ending.callback(self._loader.close)

    def _made_loader(self) -> Loader:
        loader = make_loader(
            self._settings,
            self._workload,
            self._workload.datasets,
            self._state,
            self._runtime,
            on_wait=lambda: None,
        )
        loader.use_shares(tuple(self._noted["shares"]))
        loader.assign(
            rank=self._rank,
            world_size=self._world_size,
            micro_batch_size=self._state.tuning.micro_batch_size,
        )
        loader.use_order(self._state.order_version)
        return loader

    def unlike_noted(self, share: OwnShare) -> str:
        """Return the first difference of ``share`` from the noted one, in words; an empty text if there is none."""
        names = [name for name, _ in self._state.named_parameters()]
        return first_difference(OwnShare.from_record(self._noted["share"]), share, names=names)

    def unlike_here(self, side: dict[str, Any]) -> list[str]:
        """Return the names of the state outside the model that differs between the rank and a replacement."""
        self._load_again()
        return self._state.side.unlike(side)

    def share(
        self,
        *,
        side: dict[str, Any] | None = None,
        names: Iterable[str] = (),
        batches: Sequence[Any] | None = None,
    ) -> OwnShare:
        """Compute the share from the state as the rank sent it.

        ``side``, ``batches``: the rank's, to use instead of the replacement's own. ``names``: the entries of ``side`` to
        use. Raises RuntimeError if the task communicates with other ranks.
        """
        self._load_again()
        if side is not None:
            self._state.side.take_over(side, names)
        self._is_fresh = False
        micro_batches = self._loader.take_copy(self._step)
        if batches is not None:
            micro_batches = [
                MicroBatch(indices=one.indices, batch=batch)
                for one, batch in zip(micro_batches, copy.deepcopy([*batches]), strict=True)
            ]
        share = self._own_share(micro_batches)
        if self._group.asked:
            raise RuntimeError(f"the task asks the other ranks for something ({self._group.asked})")
        return share

    def _load_again(self) -> None:
        if not self._is_fresh:
            self._load()
        self._is_fresh = True

    def _load(self) -> None:
        loaded = load_start(self._settings, self._workload, self._state, self._store)
        if loaded is None:
            raise FileNotFoundError(f"there is no state in {self._store.directory.parent}")
        # Its samples are those of before: what was found bad in that very step is known by now.
        self._state.quarantine.merge(self._noted["quarantine"])

    def _own_share(self, micro_batches: list[MicroBatch]) -> OwnShare:
        settings, workload = self._settings, self._workload
        return own_share(
            self._state,
            workload.task.loss,
            micro_batches,
            rules=StepRules(
                seed=settings.run.seed,
                rank=self._rank,
                global_batch=workload.global_batch,
                total_steps=workload.length.total_steps,
                first_step=workload.length.first_step,
                optim=settings.optim,
                device=workload.device,
                others=workload.other_devices,
            ),
            slot=self._runtime.slot,
            step=self._step,
        )
