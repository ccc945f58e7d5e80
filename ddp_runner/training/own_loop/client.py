"""A loop of the user's own as the engine's client: is built of what the loop has kept, compares, agrees and ends.

Its steps in one generation are ``steps.py``'s.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ddp_runner import config
from ddp_runner.checkpoint.codec import stored_bytes
from ddp_runner.config.identity import TOTAL_STEPS
from ddp_runner.core.monitor import AUTO, TRAIN_LOSS, Monitor, highest_refused
from ddp_runner.core.run_stages import is_first_generation
from ddp_runner.core.settings import JsonValue, Settings
from ddp_runner.core.step_schedule import RunLength
from ddp_runner.data.order import SampleOrder
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind, rank_list
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.agreeing import agree_on_weights
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.step.session import Makers
from ddp_runner.kernel.wire.events import TuningChanged
from ddp_runner.training.beside_steps import beside_loop
from ddp_runner.training.components.tuning import free_memory
from ddp_runner.training.exactness.first_step import report_inexact
from ddp_runner.training.figures.train_report import TrainReport, finished_message, report_of
from ddp_runner.training.loading.loaders import make_loader
from ddp_runner.training.local_state.local_state import LocalState
from ddp_runner.training.own_loop.batches import (
    GivenBatches,
    KeptLoader,
    OwnBatches,
    SafeBatches,
    batch_size_of,
    digest_in_memory,
)
from ddp_runner.training.own_loop.declared import KEEP_LOCAL, OwnLoop
from ddp_runner.training.own_loop.kept import KeptState
from ddp_runner.training.own_loop.parts import FILE, Batches, LoopParts, LoopWorkload
from ddp_runner.training.own_loop.repeat_check import RepeatCheck
from ddp_runner.training.own_loop.steps import LoopSteps
from ddp_runner.training.prepare import Kept
from ddp_runner.training.rank_client import RankClient, change_tuning, exchange_tuning
from ddp_runner.training.starting.resume import TakenUp
from ddp_runner.training.task import Datasets
from ddp_runner.training.workload import backend_of, versions

_NAMED_MAX = 8  # in one line
ARGUMENTS = "the arguments of the program"


class LoopSetup:
    """Implements :class:`~ddp_runner.training.prepare.Setup` for a loop: builds its state from what it has kept."""

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        loop: OwnLoop,
        given: GivenBatches,
        *,
        arguments: str,
        on_wait: Callable[[], None],
    ) -> None:
        """Build the order, the state and the workload. ``arguments``: of the program, as text.

        Raises BadInputError for what cannot be trained.
        """
        _refuse_evaluations(settings)
        self._runtime = runtime
        self._given = given
        self._on_wait = on_wait
        info, batches = runtime.rank_info, given.batches
        device = torch.device(info.device)
        if isinstance(batches, KeptLoader):
            size, share = len(batches.dataset), batches.batch_size * batches.accumulate
            settings, is_shuffled = batches.settings_in(settings), batches.shuffle
        else:  # in batches, where nobody knows how large they are
            share = batch_size_of(batches) * given.accumulate
            size, is_shuffled = given.length.steps_per_epoch * info.world_size * share, True
        order = SampleOrder(
            seed=settings.run.seed,
            dataset_size=size,
            global_batch_size=share * info.world_size,
            shuffle=is_shuffled,
        )
        self.settings = settings
        local = LocalState(loop.local, option=KEEP_LOCAL)
        local.belongs_to(info)
        self.state = KeptState(
            loop.kept,
            local=local,
            settings=settings,
            device=device,
            dataset_size=size,
            find_unused_parameters=loop.ddp.find_unused_parameters is True,
        )
        _refuse_unsavable(self.state)
        self.workload = LoopWorkload(
            order=order,
            length=given.length,
            global_batch=order.global_batch_size,
            device=device,
            backend=backend_of(settings, device),
            resume_key={"run.seed": settings.run.seed, "ranks": info.world_size},
            recipe=_recipe(runtime, given.length, arguments=arguments, order=order),
            settings_digest=config.digest(settings),
            monitor=Monitor(by_evaluations=False),
            parameters=sum(one.numel() for one in self.state.model.parameters()),
        )
        self.workload.note_files(loop.program)
        self._data_digest = digest_in_memory(batches)

    def take_in(self, start: TakenUp) -> None:
        """Warn about settings that this program gives in vain, because the checkpoint has others."""
        if start.loaded is None or start.progress.is_from_memory:
            return
        if not (found := self.state.overridden()):
            return
        more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
        line = (
            f"settings from the checkpoint are used: {', '.join(found[:_NAMED_MAX])}{more}; to change"
            " one, set it in the loop"
        )
        step, rank = self.state.committed_step, self._runtime.rank_info.rank
        self._runtime.logger.warning(line, step=step)
        self._runtime.report(
            TuningChanged(rank=rank, step=step, action=line, inexact_reason="", fault_free=True)
        )

    def open_loader(self) -> Batches:
        """Open a Loader over the dataset of ``run.loader()``, or go through the loop's own batches."""
        settings, runtime, batches = self.settings, self._runtime, self._given.batches
        if isinstance(batches, KeptLoader):
            datasets = Datasets(train=batches.dataset, collate=batches.collate_fn)
            loader = make_loader(
                settings, self.workload, datasets, self.state, runtime, on_wait=self._on_wait
            )
            self._loader: Batches = SafeBatches(loader)
            return self._loader
        self._loader = OwnBatches(
            self._given,
            seed=settings.run.seed,
            rank=runtime.rank_info.rank,
            say=runtime.logger.info,
            warn=runtime.logger.warning,
            alive=self._on_wait,
            begins=lambda: runtime.slot.stamp(Phase.DATA_BEGIN, time.monotonic_ns()),
        )
        return self._loader

    def seen_data(self) -> Mapping[str, JsonValue]:
        """Return nothing: a loop's data is compared by its digest, which the state has."""
        return {}

    def parts(self, kept: Kept) -> LoopParts:
        """Return all that the rank trains with."""
        return LoopParts(
            data_digest=self._data_digest,
            settings=self.settings,
            workload=self.workload,
            state=self.state,
            loader=self._loader,
            memory=kept.memory,
            store=kept.store,
            runtime=self._runtime,
            progress=kept.progress,
            saving=kept.saving,
            device=kept.device,
        )


def _refuse_evaluations(settings: Settings) -> None:
    """Refuse settings about evaluations: a loop evaluates by itself, and nothing here knows the results."""
    wanted = settings.checkpoint.monitor
    if wanted not in (AUTO, TRAIN_LOSS):
        expected = (
            "a loop of one's own has no evaluation that is known here: take train_loss or auto"
        )
        raise BadInputError("checkpoint.monitor", wanted, expected)
    if settings.checkpoint.mode == "max":
        raise highest_refused(TRAIN_LOSS)
    for key, is_on in (
        ("run.load_best_at_end", settings.run.load_best_at_end),
        ("log.evaluate_at_start", settings.log.evaluate_at_start),
    ):
        if is_on:
            raise BadInputError(key, "true", "is for a task: leave it out of a loop of one's own")


def _refuse_unsavable(state: KeptState) -> None:
    try:
        stored_bytes(state.capture())
    except TypeError as error:  # said now, not at the first save
        raise BadInputError(
            "run.keep()", "", f"what is kept cannot be saved: its {error}"
        ) from error


def _recipe(
    runtime: Runtime, length: RunLength, *, arguments: str, order: SampleOrder
) -> dict[str, JsonValue]:
    """Return the values of which a change gives the same run other weights."""
    info = runtime.rank_info
    return {
        TOTAL_STEPS: length.total_steps,
        "device": torch.device(info.device).type,
        "threads per rank": torch.get_num_threads() if info.device == "cpu" else 0,
        "torch": versions()["torch"],
        ARGUMENTS: arguments,
        "samples in a step": order.global_batch_size,
        "order of the samples": "shuffled" if order.shuffle else "the dataset's",
    }


_PLACE = "the place in the loop"


class LoopClient(RankClient):
    """Implements :class:`~ddp_runner.kernel.step.engine.Client` for a loop, from the rank's start to its end."""

    _parts: LoopParts

    def __init__(self, parts: LoopParts, run_id: str, loop: OwnLoop) -> None:
        super().__init__(parts, run_id)
        self._loop = loop
        self._beside = beside_loop(parts, loop)
        self._repeats = RepeatCheck(parts, rehearses=lambda: loop.rehearses is not False)
        self.steps: LoopSteps | None = None  # of the newest generation
        self.reason: StopReason | None = None  # why training has ended, once it has
        self.report: TrainReport | None = None  # of that

    def compare(self, group: Group) -> None:
        """Compare program, kept objects and length. Raises BadInputError where ranks have other ones."""
        state, length = self._parts.state, self._parts.workload.length
        shapes = [(name, list(one.shape), str(one.dtype)) for name, one in state.named_parameters()]
        mine = {
            **{f"{FILE}{name}": digest for name, digest in self._loop.program.items()},
            "what is kept": [*self._loop.kept.names()],
            "the shapes of parameters": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
            "the length of the run": [length.steps_per_epoch, length.total_steps],
            _PLACE: [state.committed_step, state.calls, self._loop.is_between],
        }
        found = self._of_each(group, "loop", mine)
        self._compare_places({rank: one.pop(_PLACE) for rank, one in found.items()})
        for what in dict.fromkeys(key for one in found.values() for key in one):
            # A file that not all of them have imported is the program's own choice.
            values = {rank: one[what] for rank, one in found.items() if what in one}
            first, *others = values
            odd = next((rank for rank in others if values[rank] != values[first]), None)
            if odd is None:
                continue
            if what.startswith(FILE):
                if self._parts.settings.run.allow_different_code:
                    continue
                is_first = is_first_generation(group.membership.generation, None)
                how = f"is not the same for ranks {first} and {odd}"
                how = how if is_first else "has changed on disk since the run began"
                expected = f"{what.removeprefix(FILE)} {how}: two"
                raise BadInputError(
                    "run.steps", "", f"{expected} programs must not train one model"
                )
            shown = f": {values[first]} and {values[odd]}" if "length" in what else ""
            raise BadInputError("run.steps", "", f"ranks {first} and {odd} differ in {what}{shown}")

    # INVARIANT called-together: a rank trains only if the newest function between two steps has returned on it,
    # or on no rank. Broken if: a rank calls it again while others, on which it has returned, form for a step.
    # Guarded by: test_a_rank_whose_function_was_cut_short_is_replaced_where_others_returned.
    def _compare_places(self, places: Mapping[int, tuple[int, int, bool]]) -> None:
        """End this process if it cannot stand where the others do. ``places``: committed step, calls, whether in one.

        Raises BadInputError where the others are in a call of ``run.together()`` which a new rank has not joined.
        """
        state = self._parts.state
        own = (state.committed_step, state.calls)
        newest = max((step, calls) for step, calls, _ in places.values())
        if own[0] == newest[0] and own < newest:
            why = "run.together() was interrupted here but has returned on other ranks"
        elif (
            own < newest
            and not self._loop.is_between
            and any(
                is_between for step, calls, is_between in places.values() if (step, calls) == newest
            )
        ):
            if not self._loop.calls_together:
                expected = (
                    "other ranks are in it: every rank calls run.join() before its first batch"
                )
                raise BadInputError("run.together", "", expected)
            why = "other ranks are in run.together() after a step that this rank lacks"
        else:
            return
        self._runtime.logger.warning(f"{why}: replacing this rank")
        raise SystemExit(1)

    def agree(self, group: Group, *, is_first: bool) -> None:
        """Agree on whether DDP looks for unused parameters."""
        super().agree(group, is_first=is_first)
        state, learnt = self._parts.state, self._learnt(is_first=is_first)
        state.tuning = exchange_tuning(group, state.tuning, changed=learnt)
        self._changed = None
        self._compare_data(group)

    def _compare_data(self, group: Group) -> None:
        """Compare what each rank has as data with what that rank had before, in this launch or the last one."""
        state = self._parts.state
        found = self._of_each(group, "data", self._parts.data_digest)
        known = {rank: one for rank, one in enumerate(state.data_of) if one}  # who was ever there
        ranks = range(self._runtime.rank_info.world_size)
        state.data_of = [found.get(rank, known.get(rank, "")) for rank in ranks]
        other = [rank for rank, now in found.items() if known.get(rank, now) != now]
        if group.rank != 0:
            return
        if odd := self._unlike_here(found):
            report_inexact(
                self._parts,
                f"{rank_list(odd)} made other data than rank {min(found)}: run.loader() shares one dataset out, which"
                " must be the same on all machines",
            )
        if other and state.committed_step > 0:
            report_inexact(
                self._parts,
                f"{rank_list(other)} made other data than before: make it behind attach(), which seeds all random"
                " numbers, or seed what makes it",
            )

    def _unlike_here(self, found: Mapping[int, str]) -> list[int]:
        """Return the ranks that are to load samples of one dataset, and have another one than the first of them."""
        info = self._runtime.rank_info
        is_shared_out = isinstance(self._parts.loader, SafeBatches)
        if info.world_size == info.local_world_size or not is_shared_out:
            return []
        return [rank for rank, now in found.items() if now != found[min(found)]]

    def _of_each(self, group: Group, name: str, mine: Any) -> dict[int, Any]:
        """Return what each rank of the generation says, by its number in the run."""
        own = json.dumps([self._runtime.rank_info.rank, mine])
        with waiting_for_peers(self._runtime.slot):
            return dict(json.loads(one) for one in group.exchange(name, own))

    def enter(self, group: Group) -> Makers:
        """Wrap the module for the steps of a generation."""
        guard = self._guard(group)
        self.steps = steps = LoopSteps(
            self._parts,
            self._loop,
            group=group,
            guard=guard,
            beside=self._beside,
            repeats=self._repeats,
        )
        return Makers(maker=steps, guard=guard, side=self._side(group))

    def repaired(self, fault: Fault) -> Fault:
        """Have DDP look for unused parameters; a lack of memory is not this process's to repair."""
        self.steps = None
        free_memory()
        if fault.kind is FaultKind.OUT_OF_MEMORY:
            return replace(fault, may_retry=False)
        self._changed = change_tuning(self._parts.state, self._runtime, fault, samples=1)
        return fault if self._changed is not None else replace(fault, may_retry=False)

    def conclude(self, group: Group, reason: StopReason) -> None:
        """Make the report. Raises FaultError where the replicas ended with different weights."""
        report = report_of(self._parts, reason)
        agree_on_weights(group, self._parts.state, self._runtime, report.weights_sha256)
        if reason is StopReason.COMPLETED:
            for one in self._beside:
                one.conclude(group)
        self._runtime.slot.stamp(Phase.FINISHED, time.monotonic_ns())
        self._runtime.report(finished_message(report, self._runtime.rank_info.rank))
        self.reason, self.report = reason, report
