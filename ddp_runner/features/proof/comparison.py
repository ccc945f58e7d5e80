"""Builds, loads and feeds a replacement in the drill's process, and compares its results. Changes nothing in the run.

``notes.py`` writes, in a rank, the files that this module reads.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import Loader, MicroBatch
from ddp_runner.features.proof.rules import (
    AFTER,
    BATCH_FILE,
    HANDED,
    LEFT_OUT,
    LOCAL_FILE,
    MISSING,
    SHARE_FILE,
    SIDE_FILE,
    STATE_FOLDER,
    SUMS_FILE,
)
from ddp_runner.kernel.replica.loss import Loss
from ddp_runner.kernel.replica.loss_module import LossModule
from ddp_runner.kernel.replica.replica import Relaid, Replica
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.system.run_files import read_small
from ddp_runner.kernel.wire.events import Diagnosed, Drill
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.training.exactness.apart import stand_apart
from ddp_runner.training.exactness.own_share import OwnShare, first_difference
from ddp_runner.training.exactness.own_update import Sums, first_unlike, hashes_after
from ddp_runner.training.loading.loaders import make_loader
from ddp_runner.training.loading.preloaded_data import with_preloaded_data
from ddp_runner.training.local_runtime import Aside
from ddp_runner.training.local_state.by_value import taken_over
from ddp_runner.training.local_state.local_state import unpacked
from ddp_runner.training.starting.compiling import Compiler
from ddp_runner.training.starting.fork_safety import make_forks_safe
from ddp_runner.training.starting.resume import load_start
from ddp_runner.training.state import TrainState
from ddp_runner.training.step import Stepper, StepRules, own_share
from ddp_runner.training.workload import backend_of, build_workload

PLACES_TRIED = 8  # names of state, each given alone
PLACES_TOLD = 5


def compare(
    settings: Settings, rank_info: RankInfo, *, step: int, folder: Path, logger: DDPLogger
) -> Drill | Diagnosed:
    """Compute the share of ``rank_info`` at ``step`` once more, from the state in ``folder``, and compare it.

    If the rank has handed over its state and batch, compute the share again with them to find the source of a
    difference. Raises whatever building, loading or computing raises: there is no result then.
    """
    rank = rank_info.rank
    noted: dict[str, Any] = json.loads(read_small(folder / SHARE_FILE))
    with contextlib.ExitStack() as ending:
        other = Replacement(
            settings, rank_info, noted=noted, folder=folder, logger=logger, ending=ending
        )
        first = other.share()
        differs = other.unlike_noted(first)
        if "again" not in noted:
            if differs:
                repeats = other.share() == first
                return Drill(rank=rank, step=step, differs=differs, repeats=repeats)
            after = other.after_update(folder)
            differs = "" if after is None else first_unlike(noted[AFTER], after)
            return Drill(rank=rank, step=step, differs=differs, updated=after is not None)
        again = OwnShare.from_record(noted["again"])
        plain = Diagnosed(rank=rank, step=step, plain=differs)
        return _diagnosed(other, plain, folder=folder, again=again)


# INVARIANT tried-first: what a difference is not is said only of what was tried.
# Broken if: state or data that could not be handed over counts as tried.
# Guarded by: test_what_could_not_be_handed_over_shows_nothing.
def _diagnosed(other: Replacement, plain: Diagnosed, *, folder: Path, again: OwnShare) -> Diagnosed:
    """Add to ``plain`` the results with the rank's own state outside the model, then with its batch as well."""
    differs = plain.plain
    with_state, with_data, places = differs, differs, list[str]()
    side = other.handed_side(folder)
    batches = other.handed_batches(folder) if differs else None
    agrees = False
    if differs and side is not None:
        places = other.unlike_here(side)
        with_state = with_data = other.unlike_noted(other.share(side=side, names=places))
    had_state = side is not None and not other.missing
    if side is not None and not with_state:
        places = _decisive(other, side, places) or places
    if with_state and batches is not None:
        last = other.share(side=side, names=places, batches=batches)
        with_data = other.unlike_noted(last)
        agrees = not with_data or last == other.share(side=side, names=places, batches=batches)
    return replace(
        plain,
        with_state=with_state,
        with_data=with_data,
        itself=other.unlike_noted(again),
        had_state=had_state,
        had_data=batches is not None,
        agrees=agrees,
        places=tuple(places[:PLACES_TOLD]),
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


def with_state(settings: Settings, folder: Path) -> Settings:
    """Return ``settings`` that resume from the state in ``folder``, without workers of our loader."""
    return replace(
        settings,
        run=replace(settings.run, resume="auto", checkpoint_dir=str(folder / STATE_FOLDER)),
        data=replace(settings.data, num_workers=0, workers_total=None),
        checkpoint=replace(settings.checkpoint, only_trained=False),  # its file is whole
    )


def handed_local(noted: dict[str, Any], folder: Path) -> Tensor | None:
    """Return what the rank has handed over of its own; None where the state has it. Raises what reading it raises."""
    if LOCAL_FILE not in noted.get(HANDED, ()):
        return None
    found: Tensor = torch.load(folder / LOCAL_FILE, weights_only=True)
    return found


def handed_sums(noted: dict[str, Any], folder: Path) -> Sums | None:
    """Return the sums that the rank has handed over; None if there are none, or they cannot be read."""
    found = _handed(folder / SUMS_FILE) if SUMS_FILE in noted.get(HANDED, ()) else None
    return None if found is None else Sums.from_record(found)


def _handed(path: Path) -> Any:
    """Return the content of a file of the rank; None if it is missing or cannot be read, which the log says."""
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch raises what it likes for a file that it cannot take
        _log_left_out(path.name, f"{type(error).__name__}: {error}")
        return None


def _log_left_out(name: str, why: str) -> None:
    """Write into the log of drills, which is this process's output, what a drill or a diagnosis must do without."""
    print(f"continuing without {name}: {why}", file=sys.stderr, flush=True)


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
        for name, why in noted.get(LEFT_OUT, {}).items():
            _log_left_out(name, why)
        self.missing = list(noted.get(MISSING, ()))  # of what steps change outside the model
        self._rank, self._world_size = int(noted["rank"]), int(noted["world_size"])
        make_forks_safe()
        self._settings = settings = with_state(settings, folder)
        self._workload, self._state = build_workload(settings, rank_info)
        if (own := handed_local(noted, folder)) is not None:
            self._state.local.begin_with(own)
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

    def handed_side(self, folder: Path) -> dict[str, Any] | None:
        """Return what the rank had outside the model; None where it has not handed that over."""
        side = _handed(folder / SIDE_FILE) if SIDE_FILE in self._noted.get(HANDED, ()) else None
        return side if isinstance(side, dict) else None

    def handed_batches(self, folder: Path) -> list[Any] | None:
        """Return the rank's own batches; None where it has not handed them over, or not so that they can be built."""
        found = _handed(folder / BATCH_FILE) if BATCH_FILE in self._noted.get(HANDED, ()) else None
        if not isinstance(found, Tensor):
            return None
        own = [one.batch for one in self._loader.take_copy(self._step)]
        try:
            batches = taken_over(unpacked(found), like=own)
        except Exception as error:  # noqa: BLE001 - types of the user's raise what they like
            _log_left_out(BATCH_FILE, f"{type(error).__name__}: {error}")
            return None
        return batches if isinstance(batches, list) and len(batches) == len(own) else None

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
            self.missing += self._state.side.take_over(side, names)
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

    def after_update(self, folder: Path) -> dict[str, str] | None:
        """Repeat the update that follows the share that was just computed; return hashes of its result.

        Returns None if the update cannot be made without the other ranks.
        """
        sums = handed_sums(self._noted, folder)
        if sums is None:
            return None
        try:
            rules = self._rules()
            replica = HandedReplica(self._state, self._workload.loss, sums, rules=rules)
            stepper = Stepper(self._state, replica, rules=rules, slot=self._runtime.slot)
            sums.give_gradients(self._state)
            stepper.change(self._state.loss_spikes.limits())
        except Exception as error:  # noqa: BLE001 - the share counts, whatever an optimizer raises here
            _log_left_out("the update", f"{type(error).__name__}: {error}")
            return None
        return hashes_after(self._state)

    def _own_share(self, micro_batches: list[MicroBatch]) -> OwnShare:
        return own_share(
            self._state,
            self._workload.loss,
            micro_batches,
            rules=self._rules(),
            slot=self._runtime.slot,
            step=self._step,
        )

    def _rules(self) -> StepRules:
        settings, workload = self._settings, self._workload
        return StepRules(
            seed=settings.run.seed,
            rank=self._rank,
            global_batch=workload.global_batch,
            total_steps=workload.length.total_steps,
            first_step=workload.length.first_step,
            optim=settings.optim,
            device=workload.device,
            others=workload.other_devices,
            turn_to=partial(workload.loss.turn_to, is_training=True),
        )


class HandedReplica(Replica):
    """A replica without a process group, whose gradients are the handed-over sums over ranks."""

    has_graph = True  # the rank's own has had one

    def __init__(self, state: TrainState, loss: Loss, sums: Sums, *, rules: StepRules) -> None:
        """``sums``: of the step of ``state`` whose share was just computed here."""
        form = state.tuning.loss_form
        device, rank = rules.device, rules.rank
        self._module: Any = LossModule(state.model, loss, device=device, rank=rank, form=form)
        self._module.unit = rules.unit
        self._signal: Any = self._module.signal
        self._signal.grad = None if sums.signals is None else sums.signals.to(device)
        self.agreed_form = self._form = form
        self._sums = sums
        self.group: Any = SimpleNamespace(confirm=lambda: None, device=device, rank=rank)
        self._closed = True

    def check_reduced(self) -> None:
        """Do nothing: the rank's own sums were whole."""

    def note_reduced(self) -> None:
        """Do nothing: nobody watches."""

    def share_layouts(self, buffers: Relaid, *, step: int) -> None:
        """Refuse: a step with other buffers is not handed over."""
        raise RuntimeError(f"buffers have other shapes than before ({step}, {buffers})")

    def share_buffers(self, buffers: list[Tensor]) -> None:
        """Take rank 0's buffers."""
        self._sums.give_buffers(buffers)

    def waited_ns(self) -> int:
        """Return 0: nobody was waited for."""
        return 0
