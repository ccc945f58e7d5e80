"""Holds the kept objects of a user's own loop as one state that is saved, sent, compared and restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_runner.checkpoint.entry_names import bare_names
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.values.nested import PLAIN, leaves_in
from ddp_runner.training.components.layout import laid_out_as
from ddp_runner.training.components.loss_monitor import LossMonitor
from ddp_runner.training.components.loss_spikes import LossSpikes
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.components.several_optimizers import SeveralOptimizers
from ddp_runner.training.components.tuning import Tuning
from ddp_runner.training.exactness.kept_kinds import NotPlainError
from ddp_runner.training.exactness.side_state import SideState
from ddp_runner.training.exactness.values import kept_of, state_for
from ddp_runner.training.local_state.local_state import LocalState
from ddp_runner.training.own_loop.left_gradients import LeftGradients
from ddp_runner.training.state import DataState, Trained, TrainState, Watches
from ddp_runner.training.workload import empty_quarantine
from ddp_runner.values.object_graph import attributes_of, own_classes

_NUMBERS = (bool, int, float)
# An adapter that reads another object's state is no such object: nothing shows that it reads all of it.
_OF_WRAPPER = (
    "keep the optimizer that it wraps; let its own weights and counts be in an object with state_dict() and"
    " load_state_dict() that it holds, and keep that, too"
)


class KeptObjects:
    """The arguments of ``run.keep(NAME=object, ...)``, sorted by kind."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.others: dict[str, Any] = {}  # schedulers, scalers, averages, objects of the loop's own

    def add(self, name: str, value: Any) -> None:
        """Keep ``value`` as ``name``. Raises BadInputError for what has no state that could be kept."""
        if name in self:
            raise BadInputError(f"keep({name}=...)", "", "is kept already")
        if isinstance(value, nn.Module):
            self.modules[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            if not value.state_dict().keys() >= {"state", "param_groups"}:
                expected = (
                    f"is a {type(value).__name__} whose state_dict() is not that of an optimizer (state, param_groups):"
                    f" {_OF_WRAPPER}"
                )
                raise BadInputError(f"keep({name}=...)", "", expected)
            if isinstance(value, torch.optim.LBFGS):
                expected = "is an LBFGS, which asks for the loss several times a step: that is not in this version"
                raise BadInputError(f"keep({name}=...)", "", expected)
            self.optimizers[name] = value
        elif hasattr(value, "param_groups") and callable(getattr(value, "step", None)):
            kind = type(value).__name__
            expected = f"is of type {kind}, which is not a torch.optim.Optimizer: {_OF_WRAPPER}"
            raise BadInputError(f"keep({name}=...)", "", expected)
        else:
            _refuse_without_state(name, value)
            self.others[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def names(self) -> list[str]:
        """Return the names of everything that is kept."""
        return [*self.modules, *self.optimizers, *self.others]

    def values(self) -> list[Any]:
        """Return all kept objects."""
        return [*self.modules.values(), *self.optimizers.values(), *self.others.values()]

    def ids(self) -> set[int]:
        """Return the ids of all kept objects, and of the parts of modules and optimizers."""
        modules = [one for module in self.modules.values() for one in module.modules()]
        tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
        lists = [optimizer.param_groups for optimizer in self.optimizers.values()]
        groups: list[Any] = [*lists, *(group for one in lists for group in one)]
        return {id(one) for one in (*self.values(), *modules, *tensors, *groups)}

    def constructed_with(self) -> dict[str, str]:
        """Return the settings of optimizers and schedulers as they are now, by name and as text."""
        found: dict[str, str] = {}
        for name, optimizer in self.optimizers.items():
            groups = optimizer.param_groups
            for number, group in enumerate(groups):
                place = f"{name} (group {number})" if len(groups) > 1 else name
                # A scheduler has moved the rate already, and knows the one that was given.
                own = {**group, "lr": group.get("initial_lr", group.get("lr"))}
                found |= {f"{place} {key}": text for key, text in _plain(own)}
        for name, one in self.others.items():
            if isinstance(one, LRScheduler):
                found |= {f"{name} {key}": text for key, text in _plain(one.state_dict())}
        return found

    def check(self) -> None:
        """Check the kept objects before the first step. Raises BadInputError for what cannot be trained."""
        if not self.modules:
            raise BadInputError("keep()", "", "keeps no model: run.keep(model=model, ...)")
        if not self.optimizers:
            raise BadInputError(
                "keep()", "", "keeps no optimizer: run.keep(optimizer=optimizer, ...)"
            )
        known = {id(one) for module in self.modules.values() for one in module.parameters()}
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                if any(id(one) not in known for one in group["params"]):
                    raise BadInputError(
                        f"keep({name}=...)",
                        "",
                        "updates a parameter of a module that is not kept; keep that too",
                    )

    def not_in_states(self) -> dict[str, Any]:
        """Return the numbers, by name, that objects of the program's own classes have and their ``state_dict()`` lacks.

        Objects whose state has numbers are left out: their other numbers may follow from these.
        """
        found: dict[str, Any] = {}
        for name, one in self.others.items():
            if not own_classes(one):
                continue
            leaves = [*leaves_in(one.state_dict(), PLAIN)]
            if not any(type(leaf) in _NUMBERS for leaf in leaves):
                held = attributes_of(one).items()
                found |= {f"{name}.{key}": value for key, value in held if type(value) in _NUMBERS}
        return found


def _refuse_without_state(name: str, value: Any) -> None:
    """Raise BadInputError where ``value`` has no state to keep, or does not take its own state back."""
    kind = type(value).__name__
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(value, method, None)):
            expected = f"is of type {kind}, which has no {method}(); give it one, or leave it out"
            raise BadInputError(f"keep({name}=...)", "", expected)
    try:
        state = value.state_dict()
        before = kept_of(state)
        before.plain()
        value.load_state_dict(state_for(state, before))
        is_alike = before.is_in(value.state_dict())
    except NotPlainError as error:
        expected = f"has a state that holds {error}; only tensors and plain values can be kept"
        raise BadInputError(f"keep({name}=...)", "", expected) from error
    except Exception as error:
        expected = f"does not take back what its state_dict() gave: {error}"
        raise BadInputError(f"keep({name}=...)", "", expected) from error
    if not is_alike:
        expected = "has another state_dict() after it has loaded its own"
        raise BadInputError(f"keep({name}=...)", "", expected)


_OF_NO_SETTING = ("params", "param_names", "initial_lr", "base_lrs", "last_epoch")
_PLAIN = (bool, int, float, str, type(None))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each plain setting as text; of a scheduler also those of the schedulers in it."""
    for key, value in values.items():
        if key == "_schedulers":
            for number, one in enumerate(value):
                yield from ((f"{number}.{name}", text) for name, text in _plain(one))
        if key in _OF_NO_SETTING or (key.startswith("_") and key != "_milestones"):
            continue
        if isinstance(value, Counter):
            shown: Any = sorted(value.elements())
        else:
            shown = value.tolist() if isinstance(value, Tensor) else value
        parts = shown if isinstance(shown, (list, tuple)) else [shown]
        if all(isinstance(one, _PLAIN) for one in parts):
            yield key.removeprefix("_"), str(shown)


class _Root:
    """Has the kept objects as attributes, which is where their values are found."""


class KeptState(TrainState):
    """The state of a loop of the user's own. Model and optimizer are all that are kept, in order.

    The options of optimizers' groups (learning rates, say) are part of it: a scheduler writes them.
    """

    def __init__(
        self,
        kept: KeptObjects,
        *,
        settings: Settings,
        device: torch.device,
        dataset_size: int,
        local: LocalState | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self._kept = kept
        self._given = self._first_given = kept.constructed_with()  # the latter: in the first launch
        model = nn.ModuleDict(kept.modules)
        optimizers = list(kept.optimizers.values())
        optimizer = optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)
        root = _Root()
        vars(root).update(kept.others)
        side = SideState(model, root, root_name="kept")
        side.follow([f"kept.{name}" for name in kept.others])
        self._options: list[dict[str, Any]] = []
        self.has_updated = True  # the newest block
        self.functions_called_at = EMPTY_STEP  # those that are called between steps
        # Gives back what they have changed; False where some of it cannot be given back.
        self._before_functions: Callable[[], bool] | None = None
        self._side_step = EMPTY_STEP  # whose boundary the kept objects were kept at
        self.calls = 0  # of functions between steps that all ranks have called together
        self._versions: dict[str, int] = {}  # of parameters and buffers, at the newest commit
        self._kept_flags: list[bool] = []  # requires_grad of all parameters, as of the state
        self._kept_modes: list[bool] = []  # of all modules: True in train mode
        self.data_of: list[str] = []  # by rank: digests of the data that each has made
        super().__init__(
            Trained(
                model=model,
                optimizer=cast("torch.optim.Optimizer", optimizer),
                precision=Precision("fp32", device=device),
            ),
            watches=Watches(
                monitor=LossMonitor(
                    target_loss=None, max_errors_per_epoch=settings.recovery.max_errors_per_epoch
                ),
                loss_spikes=LossSpikes.watched_as(settings, total_steps=0),
            ),
            data=DataState(quarantine=empty_quarantine(settings, dataset_size)),
            side=side,
            local=local,
            only_trained=settings.checkpoint.only_trained,
            tuning=Tuning(
                micro_batch_size=settings.data.batch_size,
                evaluation_batch_size=settings.data.batch_size,
                find_unused_parameters=find_unused_parameters,
            ),
        )
        named = dict(self.named_parameters())
        self.gradients = LeftGradients([*named], [*named.values()])
        self.keep_between()

    def keep_between(self) -> None:
        """Keep what the loop has changed between two steps, since the commit, as part of the state."""
        now = self.buffers.versions()
        if now != self._versions:
            # A parameter that the loop itself writes, as that of an average, is put back from now on.
            written = [name for name, look in now.items() if self._versions.get(name, look) != look]
            known = {*self.buffers.followed_names()}
            self.buffers.follow([n for n in written if n not in known and not n.startswith("#")])
            self.buffers.keep()
        self._take_as_it_is()
        self.local.settle()

    def _take_as_it_is(self) -> None:
        """Take the present values as the state, whichever code has written them; buffers are kept already."""
        self._versions = self.buffers.versions()
        self.side.keep(self.committed_step)
        self._side_step = self.committed_step
        self._kept_flags, self._kept_modes = self.flags(), self._modes()
        self._options = [_options_of(group) for group in self.optimizer.param_groups]
        self.gradients.keep()

    def _keep_side(self, step: int) -> None:
        """Leave it to the next boundary, where the loop may have changed more; see :meth:`drop_rehearsed`."""

    def committed(self) -> None:
        """Note after each commit that the loop's changes up to here hold."""
        self._before_functions = None
        self._versions = self.buffers.versions()
        self._kept_flags, self._kept_modes = self.flags(), self._modes()
        self._options = [_options_of(group) for group in self.optimizer.param_groups]
        self.gradients.committed()

    def _drop_gradients(self) -> None:
        self.gradients.put_back()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; moments keep the type that they were captured in."""
        names = state.get("kept", self._kept.names())
        if list(names) != self._kept.names():
            own = ", ".join(self._kept.names())
            raise ValueError(f"it keeps {', '.join(map(str, names))}, and this loop {own}")
        super().restore(state)
        self.lost.clear()
        self.has_updated = bool(state.get("updated", True))
        self.calls = int(state.get("calls", 0))
        self.data_of = [*map(str, state.get("data_of", ()))]
        self._first_given = {**state.get("given", self._given)}
        if "changed_late" in state:
            self.local.learn([state["changed_late"]], says=True)
        if "in_eval" in state:
            in_eval = set(state["in_eval"])
            for name, module in self._named_modules():
                module.training = name not in in_eval
        _retype(self.optimizer, self.optimizer_state_of(state)["state"])
        if self.committed_step > 0:
            # Else torch warns of a scheduler that steps before the optimizer has done so in this process.
            for optimizer in self._kept.optimizers.values():
                vars(optimizer)["_opt_called"] = True
        self._forget_unscaled()
        self.gradients.restore(state.get("gradients", {}))
        self._take_as_it_is()

    def optimizer_state_of(self, captured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state of ``captured``, with the options that were captured."""
        found = super().optimizer_state_of(captured)
        groups = zip(captured["optimizer"]["param_groups"], found["param_groups"], strict=True)
        return {
            **found,
            "param_groups": [{**saved, "params": own["params"]} for saved, own in groups],
        }

    def capture(self) -> dict[str, Any]:
        """Capture the state, with the names of what is kept."""
        own = {
            "kept": self._kept.names(),
            "updated": self.has_updated,
            "given": dict(self._first_given),
            "in_eval": [name for name, one in self._named_modules() if not one.training],
        }
        if left := self.gradients.to_record():
            own["gradients"] = left
        if self.calls:
            own["calls"] = self.calls
        if any(self.data_of):
            own["data_of"] = list(self.data_of)
        if any(known := self.local.known()):
            own["changed_late"] = known
        return {**super().capture(), **own}

    def overridden(self) -> list[str]:
        """Return the settings from the state that this program gives otherwise than the run's first program did.

        A change that a scheduler or the loop itself has made is no difference.
        """
        first, now = self._first_given, self._kept.constructed_with()
        return [
            f"{name}={now[name]} (the program gives {given})"
            for name, given in self._given.items()
            if first.get(name, given) != given and now.get(name, given) != given
        ]

    def train_unfrozen(self) -> None:
        """Which parameters are updated is the loop's own matter."""

    def update_captured(self, names: list[str]) -> None:
        """Do nothing, like :meth:`train_unfrozen`."""

    def drop_unfinished_step(self) -> None:
        """Drop the unfinished step, and restore the groups' options and what functions have changed.

        Functions that were called at this boundary are called again. If their changes could not be
        undone, this process has no state any more.
        """
        before, self._before_functions = self._before_functions, None
        if before is not None and self.functions_called_at == self.committed_step:
            self.local.forget_between()
            is_whole = before()
            self.buffers.keep()
            self._take_as_it_is()
            self.functions_called_at = EMPTY_STEP
            self.boundary_done_step = min(self.boundary_done_step, self.committed_step - 1)
            if not is_whole:
                self.committed_step = EMPTY_STEP
        self.drop_rehearsed()

    def drop_rehearsed(self) -> None:
        """Forget what a body has changed that was for nothing. What functions have changed before it stays."""
        if self._side_step != self.committed_step:  # broken off at the end of its commit
            self.side.keep(self.committed_step)
            self._side_step = self.committed_step
        super().drop_unfinished_step()
        if self.lost:
            # A tensor that the loop writes before the update, for the first time: another rank has it as
            # it was. From now on it is put back.
            self.committed_step = EMPTY_STEP
        self._forget_unscaled()
        self.put_flags(self._kept_flags)
        self._put_modes(self._kept_modes)
        self._put_back(self._options)

    def begin_functions(self, *, room_bytes: float) -> None:
        """Functions of the loop are called next: copy what they may change, parameters if there is room.

        Where there is none, torch's count of changes says whether they have changed one.
        """
        self.functions_called_at = self.committed_step
        options = [_options_of(group) for group in self.optimizer.param_groups]
        buffers = [(one, one.clone()) for one in self.buffers.live()]
        has_room = self.buffers.hold_all_bytes() + self.side.hold_bytes() <= room_bytes
        undo_side = self.side.way_back(has_room=has_room)
        held = self.buffers.hold_all() if has_room else {}
        looks, flags, modes = self._parameter_versions(), self.flags(), self._modes()
        gradients = self.gradients.noted()

        def put_back() -> bool:
            is_whole = has_room or self._parameter_versions() == looks
            self.buffers.put_back_all(held)
            for live, was in buffers:
                live.copy_(was)
            is_whole = undo_side() and is_whole
            self.gradients.go_back(gradients)
            self.put_flags(flags)
            self._put_modes(modes)
            self._put_back(options)
            return is_whole

        self._before_functions = put_back

    def end_functions(self) -> None:
        """Take the changes of functions as part of the state, not as what the loop writes at each step."""
        self.buffers.keep()
        self._take_as_it_is()
        self.local.changed_between()

    def _parameter_versions(self) -> dict[str, int]:
        return {n: look for n, look in self.buffers.versions().items() if not n.startswith("#")}

    def _modes(self) -> list[bool]:
        return [one.training for one in self._modules]

    def _put_modes(self, modes: list[bool]) -> None:
        for module, trains in zip(self._modules, modes, strict=True):
            module.training = trains

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        bare_of = bare_names(self.model)
        return ((bare_of(name), module) for name, module in self.model.named_modules())

    def _put_back(self, options: list[dict[str, Any]]) -> None:
        for group, kept in zip(self.optimizer.param_groups, options, strict=False):
            for key, value in kept.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _forget_unscaled(self) -> None:
        """A loss scaler that has unscaled in a step given up must do so again.

        A fused optimizer that has not stepped keeps the scaler's numbers, and the next step would multiply by them.
        """
        for one in self._kept.others.values():
            if isinstance(one, torch.amp.GradScaler) and one.is_enabled():
                one._per_optimizer_states.clear()  # noqa: SLF001 - as update() does
        for optimizer in self._kept.optimizers.values():
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _retype(optimizer: torch.optim.Optimizer, saved: Mapping[int, Any]) -> None:
    """Give moments the type back that torch's load_state_dict has cast to that of their parameters."""
    places = [
        (part, parameter)
        for part in getattr(optimizer, "parts", [optimizer])
        for group in part.param_groups
        for parameter in group["params"]
    ]
    for number, entry in saved.items():
        part, parameter = places[number]
        own = part.state[parameter]
        for key, value in entry.items():
            now = own.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                own[key] = laid_out_as(value.to(now.device, copy=True), parameter)
