"""Everything that a step changes, as one value that can be saved, sent and restored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.checkpoint.entry_names import bare_names, bare_state, load_bare_state, read_as
from ddp_runner.checkpoint.left_out import START, start_record
from ddp_runner.checkpoint.snapshot import storage_key
from ddp_runner.core.monitor import ALONE, Best, Monitor
from ddp_runner.data.order import FIRST_ORDER_VERSION, ORDER_VERSION, known_order_version
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.shards import ShardPositions
from ddp_runner.data.stream import StreamPosition
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.training.components.buffers import Buffers
from ddp_runner.training.components.ema import Ema
from ddp_runner.training.components.improvement_watch import ImprovementWatch
from ddp_runner.training.components.layout import lay_out_moments
from ddp_runner.training.components.loss_monitor import LossMonitor
from ddp_runner.training.components.loss_spikes import LossSpikes
from ddp_runner.training.components.optimizer import take_in, update_only
from ddp_runner.training.components.optimizer_state import load_optimizer_state
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.components.several_optimizers import entries_of
from ddp_runner.training.components.start_weights import (
    frozen_entries,
    record_of,
    unchanged,
    without,
)
from ddp_runner.training.components.tuning import Tuning
from ddp_runner.training.exactness.side_state import SideState
from ddp_runner.training.local_state.local_state import LOCAL, LocalState


@dataclass(slots=True)
class Progress:
    """A rank's facts about its run beyond the trained state; kept from generation to generation."""

    loss: float = math.nan
    checkpoint: str = ""
    checkpoint_step: int = -1
    is_from_memory: bool = False  # this process began with a copy of this launch's own
    changed_task: str = ""  # its file, where the checkpoint that was loaded is of another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a step updates."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    ema: Ema | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watches:
    """What follows the losses and figures of the steps, and judges by them."""

    monitor: LossMonitor
    loss_spikes: LossSpikes
    improvement: ImprovementWatch = field(default_factory=ImprovementWatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataState:
    """What is known of the data: samples that are bad, and where a ``stream`` stands, if it is one."""

    quarantine: Quarantine
    validation_quarantines: Mapping[str, Quarantine] = field(default_factory=dict)  # by its name
    stream: StreamPosition | ShardPositions | None = None


class TrainState:
    """Owns model, optimizer, scaler, EMA, loss monitor and counters of one rank.

    ``committed_step`` counts the optimizer steps applied; :data:`EMPTY_STEP` means that this process
    has not loaded anything and must receive its state before it trains.
    ``buffers`` are those of the last commit once dropped: what forward made of a bad batch is forgotten.
    """

    def __init__(
        self,
        trained: Trained,
        *,
        watches: Watches,
        data: DataState,
        tuning: Tuning,
        side: SideState | None = None,
        local: LocalState | None = None,
        only_trained: bool = False,
    ) -> None:
        """``only_trained``: files have no weights that stay as the run has begun with them."""
        self.model = model = trained.model
        self.optimizer = trained.optimizer
        self.precision = trained.precision
        self.ema = trained.ema
        self.monitor = watches.monitor
        self.loss_spikes = watches.loss_spikes
        self.improvement = watches.improvement
        self.tuning = tuning
        self.quarantine = data.quarantine
        self.validation_quarantines = dict(data.validation_quarantines)
        self.stream = data.stream
        # INVARIANT kept-order: a run goes on in the order of samples that it began with, on all ranks.
        # Broken if: samples are loaded in another version than that of the state that is trained.
        # Guarded by: test_a_run_that_began_with_the_first_order_keeps_it.
        self.order_version = ORDER_VERSION
        self.committed_step = EMPTY_STEP
        self.first_step = 0  # of the stage: what random numbers, schedules and epochs count from
        self.is_in_doubt = False  # a comparison has just found that it differs from others'
        self.begun_step = EMPTY_STEP  # where this launch, or its newest reading of a file, began
        self.trained_since = EMPTY_STEP  # where this process began to train
        self.samples = 0
        # Of all steps: the weight of the loss, else by tokens_per_sample.
        self.tokens: float | None = None
        self.all_used_steps = 0  # in a row, in which every rank used every parameter
        self.boundary_done_step = 0  # up to which due evaluations and saves have been made
        self.changes: tuple[str, ...] = ()  # of how its steps were computed, over all launches
        # Each returns once its copy no longer reads the steady tensors.
        self.readers: list[Callable[[], None]] = []
        self.buffers = Buffers(model)
        self.side = side or SideState(model)
        self.local = local or LocalState()  # the per-rank state
        self.is_rehearsed = False  # what a step changes has been looked at, by this launch
        # For moments that are to come, by their places.
        self.room: dict[int, dict[str, Tensor]] = {}
        self.lost: list[str] = []  # of the model's own, what could not be put back
        self.carried: list[str] = []  # what steps use and no other process has, in words
        self.carried_of_data, self._carried_lost = list[str](), set[str]()  # the latter: reported
        self._has_formed = self.began_again = False  # the latter: this process, or a step of it
        self.only_trained = only_trained
        self.figures: dict[str, float] = {}  # of the newest evaluation, by name
        self.best = self.best_before = Best()  # the latter: without what has found the best
        self.judged_step = EMPTY_STEP  # of the newest evaluation that had the monitored figure
        self.begun_with: tuple[str, ...] = ()  # lines: what this process loaded of --init-from
        self.start: dict[str, Any] = {}  # of the frozen weights that the run began with, by hash
        self._start_in_file: dict[str, Any] = {}  # of the newest, where some were written since
        self._made_with = self._flags()
        self._parameters = list(model.parameters())
        self._modules = list(model.modules())

    def before_change(self) -> None:
        """Return once nobody reads the steady tensors in the background; whoever changes them calls it first."""
        for released in self.readers:
            released()

    def change_begins(self) -> None:
        """Note which buffers the step has made; the update comes next."""
        self.buffers.notice()

    def change_ends(self, step: int, *, applied: bool, all_used: bool) -> None:
        """Keep what ``step`` has made besides its update; of one that is not ``applied`` buffers are put back."""
        if applied:
            self.buffers.keep()
        else:
            self.buffers.drop()
        self.all_used_steps = self.all_used_steps + 1 if all_used else 0
        self._keep_side(step)
        self.local.committed(step)

    def _keep_side(self, step: int) -> None:
        """Keep what ``step`` has changed beside the model."""
        self.side.keep(step)

    @property
    def is_calm(self) -> bool:
        """True if no skipped step is among the newest ones."""
        return self.monitor.is_calm

    @property
    def is_at_goal(self) -> bool:
        """True if the loss has reached its target."""
        return self.monitor.target_reached

    @property
    def is_spent(self) -> bool:
        """True if the monitored figure has not improved for too long."""
        return self.improvement.is_over

    @property
    def own_step(self) -> int:
        """Steps committed in this stage; all, without stages."""
        return self.committed_step - self.first_step

    def weights(self) -> dict[str, Any]:
        """The model's state under its bare names; references, not copies."""
        return bare_state(self.model)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, tied ones once, under their bare names."""
        bare = bare_names(self.model)
        for name, parameter in self.model.named_parameters():
            yield bare(name), parameter

    def capture(self) -> dict[str, Any]:
        """References, not copies: valid until the next optimizer step."""
        self.train_unfrozen()  # it may be freed between a forward that unfroze and that step's next one
        state: dict[str, Any] = {
            "model": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_names": self._optimizer_names(),
            "scaler": self.precision.state_dict(),
            "monitor": self.monitor.state_dict(),
            "explosions": self.loss_spikes.state_dict(),
            "tuning": self.tuning.to_record(),
            "quarantine": self.quarantine.to_record(),
            "order": self.order_version,
            "counters": {
                "committed_step": self.committed_step,
                "begun_step": self.begun_step,
                "samples": self.samples,
                "attended_step": self.boundary_done_step,
                "all_used_steps": self.all_used_steps,
                **({} if self.tokens is None else {"tokens": self.tokens}),
            },
        }
        if self.changes:
            state["changes"] = list(self.changes)
        learnt = {
            "followed": self.buffers.followed_names(),
            "relaid": self.buffers.relaid_names(),
            "carried": list(self.carried),
            "carried_of_data": list(self.carried_of_data),
            "improvement": self.improvement.state_dict(),
            "figures": dict(self.figures),
            "best": asdict(self.best) if self.best.step else {},
            "judged": max(0, self.judged_step),
            "best_before": asdict(self.best_before) if self.best_before.step else {},
        }
        state.update({key: value for key, value in learnt.items() if value})
        if self.start:
            state[START] = self.start
        if self.is_rehearsed:
            state["rehearsed"] = True
        if side := self.side.to_record():
            state["side"] = side
        flags = {n: flag for n, flag in self._flags().items() if flag != self._made_with[n]}
        if flags:
            state["requires_grad"] = flags
        of_data = {name: one.to_record() for name, one in self.validation_quarantines.items()}
        if ALONE in of_data:
            state["validation_quarantine"] = of_data.pop(ALONE)
        if of_data:
            state["validation_quarantines"] = of_data
        if self.stream is not None:
            state["stream"] = self.stream.to_record(self.committed_step)
        if self.ema is not None:
            state["ema"] = self.ema.state_dict()
        return state | self.local.to_hand_on(self.committed_step)

    def capture_of_all(self) -> dict[str, Any]:
        """Return the capture with the per-rank state of all ranks that this one knows."""
        return self.capture() | self.local.of_ranks(self.committed_step)

    def note_start(self, *, init_from: str, later: Container[str]) -> None:
        """The weights are now those that the run begins with; ``later``: what is frozen only at first."""
        weights = self.weights()
        frozen = frozen_entries(self.model, weights, but=later)
        self.start = record_of(frozen, init_from=init_from)

    def capture_for_file(self) -> dict[str, Any]:
        """Capture without the weights that files leave out; reads these, to see that they are unchanged."""
        captured = self.capture_of_all()
        if not self.only_trained or not self.start:
            return captured
        names = unchanged(captured)
        if len(names) < len(self.start["hashes"]):
            if self._start_in_file.get("hashes", {}).keys() != set(names):
                weights = {name: captured["model"][name] for name in names}
                self._start_in_file = record_of(weights, init_from=self.start["init_from"])
            captured[START] = self._start_in_file
        return without(captured, names)

    def steady_tensors(self) -> list[Tensor]:
        """Return the tensors of a captured state that only a commit or a restore changes, never forward or backward.

        A tensor that shares its memory with what forward may write is not among them.
        """
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        for parameter in self.optimizer.state:
            for entry in entries_of(self.optimizer, parameter):
                tensors += [value for value in entry.values() if isinstance(value, Tensor)]
        if self.ema is not None:
            tensors += self.ema.averages()
        written = self.written_storages()
        if not written:
            return tensors
        return [tensor for tensor in tensors if storage_key(tensor) not in written]

    def written_storages(self) -> set[int]:
        """The keys of the memory that forward or loss may write."""
        changing = (*self.buffers.live(), *self.buffers.followed(), *self.side.tensors())
        return {storage_key(one) for one in changing}

    def replicated(self) -> dict[str, Tensor]:
        """Return the tensors that must be equal on every rank after a commit, by name; references, in one order."""
        weights, learnt = self.replicated_parts()
        return {**weights, **learnt}

    def replicated_parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same in two: the model's own, and what is known beside, which only commits and restores change."""
        values = self.weights().items()
        weights = {name: value for name, value in values if isinstance(value, Tensor)}
        learnt = {
            f"{_numbered(name, place)} ({key})": value
            for name, parameter in self.named_parameters()
            for place, entry in enumerate(entries_of(self.optimizer, parameter))
            for key, value in entry.items()
            if isinstance(value, Tensor)
        }
        if self.ema is not None:
            averages = self.ema.averages()
            learnt.update({f"average {number}": value for number, value in enumerate(averages)})
        return weights, learnt

    # INVARIANT written-over-when-empty: a state that comes is written into this rank's memory only while what
    # is there counts for nothing: should its source die on the way, this rank may be who has the newest step.
    # Broken if: a rank that stands at a step receives into its own tensors.
    # Guarded by: test_a_rank_that_stands_at_a_step_is_not_written_over.
    def to_write_over(self) -> dict[str, Any] | None:
        """The tensors that may be overwritten by a state that comes, placed as captured; None while they count."""
        if self.committed_step != EMPTY_STEP:
            return None
        self.before_change()
        return {
            "model": self.weights(),
            "optimizer": {"state": self.optimizer.state_dict()["state"] or self.room},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a captured state of the same run.

        Raises KeyError, RuntimeError or ValueError if it is none.

        Until it is whole this rank stands empty, so that no half of it is ever elected or sent.
        """
        self.before_change()
        self.committed_step = EMPTY_STEP
        self.order_version = known_order_version(int(state.get("order", FIRST_ORDER_VERSION)))
        weights = read_as(state["model"], self.weights())
        self.prepare_for(state, weights)
        load_bare_state(self.model, weights)
        load_optimizer_state(self.optimizer, self.optimizer_state_of(state))
        lay_out_moments(self.optimizer)
        self.room = {}
        self.precision.load_state_dict(state["scaler"])
        self.monitor.load_state_dict(state["monitor"])
        if "explosions" in state:
            self.loss_spikes.load_state_dict(state["explosions"])
        self.improvement.load_state_dict(state.get("improvement", {}))
        if self.ema is not None and "ema" in state:
            self.ema.load_state_dict(state["ema"])
        self.tuning = Tuning.from_record(state.get("tuning", {}), otherwise=self.tuning)
        self.quarantine.merge(state.get("quarantine", {}))
        bad = {ALONE: state.get("validation_quarantine", {})}
        bad |= state.get("validation_quarantines", {})
        for name, quarantine in self.validation_quarantines.items():
            quarantine.merge(bad.get(name, {}))
        if self.stream is not None:
            self.stream.restore(state.get("stream", {}))
        self.begun_step = int(state["counters"].get("begun_step", self.begun_step))
        self.samples = int(state["counters"]["samples"])
        tokens = state["counters"].get("tokens")
        self.tokens = None if tokens is None else float(tokens)
        self.changes = tuple(state.get("changes", ()))
        self.figures = {str(name): float(one) for name, one in state.get("figures", {}).items()}
        self.best = Best(**state.get("best", {}))
        self.judged_step = int(state.get("judged", EMPTY_STEP))
        self.best_before = Best(**state.get("best_before", {}))
        self.boundary_done_step = int(state["counters"]["attended_step"])
        self.all_used_steps = int(state["counters"].get("all_used_steps", 0))
        self.buffers.follow(state.get("followed", ()))
        committed_step = int(state["counters"]["committed_step"])
        self.side.restore(state.get("side", {}), is_begin=committed_step == self.first_step)
        self.buffers.keep()  # after it: buffers that are not saved come from there, and a skipped step puts them back
        self.start = self.start or dict(start_record(state))
        self.is_rehearsed = bool(state.get("rehearsed", False))
        self.note_carried([*map(str, state.get("carried", ()))])
        self.note_carried([*map(str, state.get("carried_of_data", ()))], of_data=True)
        self.local.go_to(
            committed_step, state.get(LOCAL), is_begin=committed_step == self.first_step
        )
        self.committed_step = int(state["counters"]["committed_step"])
        self.side.keep(self.committed_step)
        self.is_in_doubt = False

    def prepare_for(self, state: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        """Give buffers the shapes, and parameters the flags, that they have in a captured state."""
        tensors = {name: one for name, one in weights.items() if isinstance(one, Tensor)}
        self.buffers.make_room(tensors, state.get("relaid", ()))
        self.take_flags(state)

    def take_flags(self, state: Mapping[str, Any]) -> None:
        """Have the parameters require a gradient that do in a captured state, and no others."""
        flags = state.get("requires_grad", {})
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(bool(flags.get(name, self._made_with[name])))
        names = state.get("optimizer_names")
        self.update_captured(names if isinstance(names, list) else [])

    # INVARIANT updated-as-captured: after a state was taken over, the optimizer has those parameters that it
    # had when that was captured: also where the state is of before others were unfrozen.
    # Broken if: only those are taken in that require a gradient, and none is ever taken out.
    # Guarded by: test_a_state_of_before_an_unfreezing_can_be_gone_back_to.
    def update_captured(self, names: list[str]) -> None:
        """Have the optimizer update what it was made for, what requires a gradient, and ``names``."""
        own = dict(self.named_parameters())
        named = read_as(dict.fromkeys(map(str, names)), own)
        wanted = [
            one
            for name, one in own.items()
            if one.requires_grad or self._made_with[name] or name in named
        ]
        update_only(self.optimizer, self.model, wanted)

    def train_unfrozen(self) -> None:
        """Have the optimizer update what requires a gradient by now and did not when it was made."""
        take_in(self.optimizer, self.model)

    def own_rate(self, *, factors: tuple[float, ...]) -> float | None:
        """The learning rate of the step in hand where the program decides it; None: the settings do.

        ``factors``: what it is multiplied by, as something has lowered it.
        """
        del factors
        return None

    def apply_own_rate(self) -> bool:
        """Set what :meth:`own_rate` has given, of all groups; False where the settings decide."""
        return False

    def begin_training(self) -> None:
        """Have every module in training mode, where one is not; a model may have thousands."""
        if False in [module.training for module in self._modules]:
            self.model.train()

    def flags(self) -> list[bool]:
        """Return which parameters require a gradient, in the model's order; asked for in every forward."""
        return [parameter.requires_grad for parameter in self._parameters]

    def put_flags(self, flags: list[bool]) -> None:
        """Have the parameters require a gradient as :meth:`flags` has said."""
        for parameter, flag in zip(self._parameters, flags, strict=True):
            parameter.requires_grad_(flag)

    def _flags(self) -> dict[str, bool]:
        return {name: one.requires_grad for name, one in self.named_parameters()}

    # INVARIANT moments-by-name: what the optimizer knows of a parameter goes to the parameter of that name.
    # Broken if: it is taken over by position, and a model's parts come in another order (of a set, say).
    # Guarded by: test_moments_go_to_the_parameters_of_their_names.
    def optimizer_state_of(self, captured: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state in ``captured``, for the parameters and with the options that are here.

        Raises ValueError if it is of other parameters. Of earlier versions, without names, it is taken
        by position.
        """
        saved, names = captured["optimizer"], captured.get("optimizer_names")
        groups = saved["param_groups"]
        own = self.optimizer.state_dict()["param_groups"]
        if len(groups) != len(own):
            raise ValueError(f"{len(groups)} groups of parameters, the model has {len(own)}")
        own = [_with_rate_of(*pair) for pair in zip(own, groups, strict=True)]
        if names is None:
            places = [{"params": group["params"]} for group in groups]
            pairs = zip(own, places, strict=True)
            return {**saved, "param_groups": [{**options, **place} for options, place in pairs]}
        expected = self._optimizer_names()
        found = read_as({name: index for index, name in enumerate(names)}, expected)
        if len(names) != len(expected) or found.keys() != set(expected):
            odd = sorted(set(expected) ^ found.keys())
            raise ValueError(f"the optimizer's state is of other parameters: {', '.join(odd[:3])}")
        entries = {
            place: saved["state"][found[name]]
            for place, name in enumerate(expected)
            if found[name] in saved["state"]
        }
        return {**saved, "state": entries, "param_groups": own}

    def _optimizer_names(self) -> list[str]:
        """The bare name of each parameter that the optimizer updates, in its order.

        One that several optimizers have gets a number from the second time on: each has its own moments.
        """
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        seen: Counter[str] = Counter()
        found = []
        for place, one in enumerate(self.trainable()):
            name = names.get(id(one), f"#{place}")
            found.append(_numbered(name, seen[name]))
            seen[name] += 1
        return found

    def hold_frozen(self, *, room_bytes: float) -> None:
        """Keep what forward may begin to write, where there is room; if it is much, for the first step."""
        is_wanted = self.own_step == 0 or self.buffers.holds_for_good
        if is_wanted and self.buffers.frozen_bytes() <= room_bytes:
            self.buffers.hold_frozen()

    def drop_unfinished_step(self) -> None:
        """Forget what an unfinished step changed: gradients, and what forward and loss have written."""
        self._drop_gradients()
        self.lost += self.buffers.drop()
        self.side.drop()
        self.local.put_back()

    def _drop_gradients(self) -> None:
        """Forget the gradients of an unfinished step: none is left from the one before."""
        self.optimizer.zero_grad(set_to_none=True)

    def drop_evaluation(self) -> None:
        """Forget what an evaluation has changed, after :meth:`SideState.look`: steps make the state."""
        self.buffers.drop()
        self.side.drop()
        self.local.put_back()
        self._take_not_put_back()  # a tensor that it is the first to change stays so, on all ranks alike

    def monitored(self, monitor: Monitor) -> float | None:
        """The figure that is judged by, as it is now, if there is one."""
        return monitor.value(self.figures, train_loss=self.monitor.smoothed)

    def judged(self, monitor: Monitor) -> float | None:
        """The same, of a state that is judged: what a checkpoint of now is known by."""
        is_judged = self.judged_step == self.committed_step or not monitor.by_evaluations
        return self.monitored(monitor) if is_judged else None

    def judge(self, value: float, *, monitor: Monitor) -> None:
        """Judge the present state by its evaluation: it may be the best; judged again, it replaces itself."""
        # INVARIANT best-of-the-course: which state is the best follows from the steps and evaluations of the run, not
        # from what else was saved: a state is judged at its own evaluation, and never by that of another.
        # Broken if: a file between two evaluations is judged by the older one's figure.
        # Guarded by: test_only_what_was_evaluated_is_judged.
        step = self.judged_step = self.committed_step
        before = self.best_before if self.best.step == step else self.best
        self.best, self.best_before = before.after(value, step=step, monitor=monitor), before

    def forget_evaluation(self) -> None:
        """Be as without the evaluation of the state as it is, in what later steps follow from."""
        self.improvement.forget(step=self.committed_step)
        if self.best.step == self.committed_step:
            self.best = self.best_before
        self.judged_step = EMPTY_STEP

    # INVARIANT carried-is-lost: a run whose steps use what is not kept is not exact once a step was begun again,
    # or a process has begun later than the first step.
    # Broken if: it is found after a generation has formed, and nothing checks again.
    # Guarded by: test_a_counter_that_is_not_kept_makes_a_repaired_run_inexact.
    def take_lost(self) -> list[str]:
        """Return what could not be restored of a given-up step, or of another process, since the last call."""
        self.began_again |= self._has_formed or self.own_step > 0
        self._has_formed = True
        return self._take_not_put_back() + self.take_carried()

    def take_carried(self) -> list[str]:
        """Return what is carried from step to step, is lost by now, and was not returned before."""
        if not self.began_again:
            return []
        found = [one for one in self.carried if one not in self._carried_lost]
        self._carried_lost.update(found)
        return found

    def take_carried_of_data(self) -> list[str]:
        """Return what a new process that loads data lacks, and was not returned before."""
        found = [one for one in self.carried_of_data if one not in self._carried_lost]
        self._carried_lost.update(found)
        return found

    def note_carried(self, names: Sequence[str], *, of_data: bool = False) -> None:
        """Take note that these change from step to step, and are not kept. ``of_data``: loader workers have it, too."""
        self.carried += [one for one in dict.fromkeys(names) if one not in self.carried]
        if of_data:
            self.carried_of_data = list(dict.fromkeys([*self.carried_of_data, *names]))

    def _take_not_put_back(self) -> list[str]:
        found, self.lost = [f"model.{name}" for name in self.lost], []
        return found + self.side.take_lost()

    def trainable(self) -> list[Tensor]:
        """The parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _with_rate_of(options: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` of a group with the rate of the newest step, which a file of no later step has too."""
    if "lr" not in options or "lr" not in saved:
        return dict(options)
    own, rate = options["lr"], float(saved["lr"])
    return {**options, "lr": torch.full_like(own, rate) if isinstance(own, Tensor) else rate}


def _numbered(name: str, place: int) -> str:
    """The name of a parameter in the optimizer of this place, among those that have it."""
    return f"{name} #{place + 1}" if place else name
