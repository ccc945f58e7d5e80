"""Builds, loads and feeds a replacement in the drill's process, and compares its results. Changes nothing of the run.

``notes.py`` writes, in a rank, what is read here.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import Loader
from ddp_runner.features.proof.rules import SHARE_FILE, STATE_FOLDER
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


def compare(settings: Settings, rank_info: RankInfo, *, folder: Path, logger: DDPLogger) -> str:
    """Compute the share of ``rank_info`` once more, from the state in ``folder``, and compare it.

    Returns where it parts first from what the rank has noted, in words; empty where it does not. Raises
    whatever building, loading or computing raises: then nothing is known.
    """
    noted: dict[str, Any] = json.loads(read_small(folder / SHARE_FILE))
    with contextlib.ExitStack() as ending:
        other = Replacement(
            settings, rank_info, noted=noted, folder=folder, logger=logger, ending=ending
        )
        return other.first_difference()


class Replacement:
    """A replacement of a rank that computes its share of one step, as often as it is asked to.

    ``noted``: what the rank has noted of that share. ``ending``: ends what it loads samples with.
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

    def first_difference(self) -> str:
        """Compute the share, and return where it parts first from the noted one, in words; empty where it does not."""
        share = self._share()
        if self._group.asked:
            raise RuntimeError(f"the task asks the other ranks for something ({self._group.asked})")
        names = [name for name, _ in self._state.named_parameters()]
        return first_difference(OwnShare.from_record(self._noted["share"]), share, names=names)

    def _load(self) -> None:
        loaded = load_start(self._settings, self._workload, self._state, self._store)
        if loaded is None:
            raise FileNotFoundError(f"there is no state in {self._store.directory.parent}")
        # Its samples are those of before: what was found bad in that very step is known by now.
        self._state.quarantine.merge(self._noted["quarantine"])

    def _share(self) -> OwnShare:
        settings, workload = self._settings, self._workload
        return own_share(
            self._state,
            workload.task.loss,
            self._loader.take(self._step),
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
