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
    rank, world_size = int(noted["rank"]), int(noted["world_size"])
    make_forks_safe()
    # As a resume does, but for the loader, whose workers a drill can do without.
    settings = replace(
        settings,
        run=replace(settings.run, resume="auto", checkpoint_dir=str(folder / STATE_FOLDER)),
        data=replace(settings.data, num_workers=0, workers_total=None),
        checkpoint=replace(settings.checkpoint, only_trained=False),  # its file is whole
    )
    workload, state = build_workload(settings, rank_info)
    loaded = load_start(
        settings, workload, state, CheckpointStore(folder / STATE_FOLDER, keep_last=1)
    )
    if loaded is None:
        raise FileNotFoundError(f"there is no state in {folder}")
    # Its samples are those of before: what was found bad in that very step is known by now.
    state.quarantine.merge(noted["quarantine"])
    step = state.committed_step
    group = stand_apart(
        rank=rank, world_size=world_size, backend=backend_of(settings, workload.device)
    )
    runtime = Aside(rank_info, logger)
    compiler = Compiler(settings.run, state.model, slot=runtime.slot)
    compiler.turn(on=state.tuning.may_compile)
    with contextlib.ExitStack() as ending:
        workload = with_preloaded_data(settings, workload, state, runtime, ending=ending)
        loader = make_loader(
            settings, workload, workload.datasets, state, runtime, on_wait=lambda: None
        )
        ending.callback(loader.close)
        loader.use_shares(tuple(noted["shares"]))
        loader.assign(
            rank=rank, world_size=world_size, micro_batch_size=state.tuning.micro_batch_size
        )
        loader.use_order(state.order_version)
        share = own_share(
            state,
            workload.task.loss,
            loader.take(step),
            rules=StepRules(
                seed=settings.run.seed,
                rank=rank,
                global_batch=workload.global_batch,
                total_steps=workload.length.total_steps,
                first_step=workload.length.first_step,
                optim=settings.optim,
                device=workload.device,
                others=workload.other_devices,
            ),
            slot=runtime.slot,
            step=step,
        )
    if group.asked:
        raise RuntimeError(f"the task asks the other ranks for something ({group.asked})")
    names = [name for name, _ in state.named_parameters()]
    return first_difference(OwnShare.from_record(noted["share"]), share, names=names)
