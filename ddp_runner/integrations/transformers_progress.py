"""The counts of a Trainer next to model, optimizer and schedule, as a run keeps them and a replaced rank gets them."""

from __future__ import annotations

import copy
import inspect
import json
import linecache
import re
import sys
import time
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_callback import ExportableState

from ddp_runner.integrations.framework_run import named_by_kind, refuse
from ddp_runner.kernel.values.nested import PLAIN, tensors_in
from ddp_runner.values.object_graph import attributes_of

_OF_PROCESS = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
# Of this launch's arguments, which may be others: a run that is made longer has another last step.
_OF_LAUNCH = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps")
_PLAIN = (type(None), bool, int, float, str, Tensor)
_DURATIONS = ("_runtime", "_per_second", "_time")  # in log entries: each rank has measured its own
LOSS, FLOS, _SECONDS, _PRESENT = range(4)  # what each rank has counted by itself


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks that are there, and return it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def begin_sum_over_ranks(tensor: Tensor) -> Any:
    """Begin to sum it; return what to wait for, or None of one rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return dist.all_reduce(tensor, async_op=True)
    return None


class Progress:
    """Keeps what Trainer counts next to model, optimizer and scheduler, as ``run.keep()`` expects it.

    What changes between steps only is held as of the last boundary, so that a step which is made again does not
    change it. ``counted``: of each rank by its number, as all ranks know it since the last sum.
    """

    def __init__(
        self,
        trainer: Any,
        world_size: int,
        rank: int,
        device: torch.device,
        *,
        classes: tuple[type[Any], ...],
    ) -> None:
        """``classes``: Trainer's own ones. Attributes that they name are not a subclass's."""
        self._trainer = trainer
        self._rank = rank
        self.counted = torch.zeros(world_size, 4, dtype=torch.float64, device=device)
        self._between = "{}"
        self._history: list[str] = []  # each entry as text: an entry is written once
        self._histories = "[]"  # all of them, written again only where one has come
        self.first = (
            trainer.state.global_step
        )  # the step of Trainer's checkpoint that the run has begun with
        self.classes = classes
        self.not_own = frozenset(name for one in classes for name in _names_of(one))
        # A callback may change the arguments too, such as `args.max_grad_norm`.
        callbacks = filter(_is_users, trainer.callback_handler.callbacks)
        self.holders = {**named_by_kind(callbacks), "args": trainer.args}
        self._weights = {one.untyped_storage().data_ptr() for one in trainer.model.parameters()}
        # Of the plain attributes, those that steps change: another rank's are not all for this one.
        self._at_first = copy.deepcopy(self._plain())
        self._changed: set[str] = set()
        self._received: dict[str, Any] = {}  # by this process with its first state
        self._entered: dict[
            str, Any
        ] = {}  # of the first step of this process, after on_train_begin
        self._entered_at = -1
        self._summed: tuple[Tensor, Any] | None = None  # a sum that has begun
        self.is_new = True  # this process has no state yet
        self.saved: list[int] = []  # the steps of which Trainer has saved a checkpoint
        self._began_s = (
            time.monotonic()
        )  # less what the processes of this rank before this one have taken

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""
        state = self._trainer.state
        return {
            "step": state.global_step,
            "epoch": float(state.epoch or 0.0),
            "counted": self.counted,
            "between": self._between,
            "history": self._histories,
            "first": self.first,
            "own": {k: v for k, v in self._plain().items() if k in self._changed},
        }

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Take a state back: of this process where a step is made again, or of another rank."""
        trainer = self._trainer
        trainer.state.global_step = int(given["step"])
        trainer.state.epoch = float(given["epoch"])
        if given["counted"] is not self.counted:
            self.counted.copy_(given["counted"])
        self._between, self._histories = given["between"], given["history"]
        self.first = int(given["first"])
        own = given["own"]
        if int(given["step"]) == self._entered_at:
            own = {**own, **copy.deepcopy(self._entered)}
        self._changed = {*own}
        if self.is_new:
            self._received = copy.deepcopy(own)
        else:
            for name in self._newly_changed():  # by a step that is made again
                self._put_back(name)
        for name, value in own.items():
            self._put(name, value)
        self.put_counted()

    def train_begins(self) -> None:
        """The callbacks' ``on_train_begin`` has set attributes. Numbers are no change: a clock is each rank's own."""
        found = self._newly_changed().items()
        self._at_first |= copy.deepcopy(
            {k: v for k, v in found if not any(True for _ in tensors_in(v, PLAIN))}
        )

    def enter(self) -> None:
        """The loop is entered, after ``on_epoch_begin``. In a replaced rank both have set attributes once more."""
        for name, value in self._received.items():
            self._put(name, value)
        self.look()
        own = {k: v for k, v in self._plain().items() if k in self._changed}
        self._entered, self._received = copy.deepcopy(own), {}
        self._entered_at = self._trainer.state.global_step

    def look(self) -> None:
        """A step comes next: take note of the plain attributes that have changed, alike on all ranks."""
        self._changed |= self._newly_changed().keys()

    def _plain(self) -> dict[str, Any]:
        """The plain attributes that a subclass of Trainer has added, those of the arguments, and of callbacks without ``state()``."""
        found = {k: v for k, v in vars(self._trainer).items() if k not in self.not_own}
        for holder, one in self.holders.items():
            found |= {f"{holder}.{name}": value for name, value in vars(one).items()}
        return {
            k: found[k] for k in sorted(found) if is_plain(found[k]) and self._is_apart(found[k])
        }

    def _is_apart(self, value: Any) -> bool:
        """False for a view of the model's weights, which have a state of their own."""
        tensors = tensors_in(value, PLAIN)
        return all(one.untyped_storage().data_ptr() not in self._weights for one in tensors)

    def _newly_changed(self) -> dict[str, Any]:
        first = self._at_first
        others = {k: v for k, v in self._plain().items() if k not in self._changed}
        return {k: v for k, v in others.items() if k not in first or not _is_same(v, first[k])}

    def _put(self, name: str, value: Any) -> None:
        owner, attribute = self._owner(name)
        if owner is not None:
            setattr(owner, attribute, value)

    def _put_back(self, name: str) -> None:
        if name in self._at_first:
            self._put(name, copy.deepcopy(self._at_first[name]))
        else:
            delattr(*self._owner(name))

    def _owner(self, name: str) -> tuple[Any, str]:
        """Return an attribute's object and name; None for one of a callback that the script had before."""
        holder, _, attribute = name.rpartition(".")
        return self.holders.get(holder) if holder else self._trainer, attribute

    def put_counted(self) -> None:
        """Have this rank's own counts be those that are known of it."""
        trainer, own = self._trainer, self.counted[self._rank]
        if hasattr(trainer, "_tr_loss"):
            trainer._tr_loss.fill_(own[LOSS])  # noqa: SLF001 - in all of this file: Trainer's loop is its own
        trainer.current_flos = float(own[FLOS])
        self._began_s = time.monotonic() - float(own[_SECONDS])

    @property
    def seconds(self) -> float:
        """Return how long this rank has trained, in all of its processes."""
        return time.monotonic() - self._began_s

    def begin_sum(self) -> None:
        """Begin to learn, within a step, what each rank has counted."""
        trainer = self._trainer
        mine = torch.zeros_like(self.counted)
        mine[self._rank, LOSS] = trainer._tr_loss  # noqa: SLF001 - as above
        mine[self._rank, FLOS] = trainer.current_flos
        mine[self._rank, _SECONDS] = self.seconds
        mine[self._rank, _PRESENT] = 1.0
        self._summed = mine, begin_sum_over_ranks(mine)

    def sum_up(self) -> None:
        """Learn what each rank has counted, once all have given theirs."""
        if self._summed is None:
            self.begin_sum()
        assert self._summed is not None, "it has begun"
        (summed, work), self._summed = self._summed, None
        if work is not None:
            work.wait()
        self.counted.copy_(summed)

    def losses(self) -> Tensor:
        """Return the sum of losses of each rank that is there, as gathering them would."""
        present = self.counted[:, _PRESENT] > 0
        return self.counted[present, LOSS].float()

    def forget(self, what: int) -> None:
        """Begin to count again."""
        self.counted[:, what] = 0.0

    def take_between(self) -> None:
        """Hold what Trainer has changed up to this boundary, alike on all ranks."""
        trainer = self._trainer
        state = {k: v for k, v in vars(trainer.state).items() if k not in _OF_PROCESS}
        entries = state.pop("log_history")
        if len(entries) < len(self._history):
            self._history.clear()
        if len(entries) != len(self._history) or not entries:
            self._history += [
                _as_json(without_durations(one)) for one in entries[len(self._history) :]
            ]
            self._histories = f"[{', '.join(self._history)}]"
        found = {
            "state": state,
            "total": trainer._total_loss_scalar,  # noqa: SLF001 - as above
            "logged": trainer._globalstep_last_logged,  # noqa: SLF001 - as above
            "initial": trainer._initial_global_step,  # noqa: SLF001 - as above
            # At its last step it stops by itself: the run may be made longer.
            "stops": trainer.control.should_training_stop
            and trainer.state.global_step < trainer.state.max_steps,
            "callbacks": self._states(),
            "saved": self.saved,
        }
        self._between = _as_json(found)

    def _states(self) -> list[Any]:
        found = [one.state() for one in self._callbacks()]
        for callback, state in zip(self._callbacks(), found, strict=True):
            if any(one.numel() != 1 for one in tensors_in(state, PLAIN)):
                expected = "gives a tensor, which Trainer cannot save: without state() plain attributes are kept"
                refuse((f"{type(callback).__name__}.state()", "", expected))
        return found

    def put_between(self) -> None:
        """Have Trainer stand where the held boundary stands; its callbacks as its own resume has them."""
        trainer, found = self._trainer, json.loads(self._between)
        if not found:
            return
        history = json.loads(self._histories)
        self._history = [_as_json(one) for one in history]
        state = {k: v for k, v in found["state"].items() if k not in _OF_LAUNCH}
        vars(trainer.state).update(state, log_history=history)
        trainer.control.should_training_stop = found["stops"]
        callbacks = trainer.callback_handler.callbacks
        for callback, state in zip(self._callbacks(), found["callbacks"], strict=False):
            callbacks[callbacks.index(callback)] = type(callback).from_state(state)
        self.saved = found["saved"]
        trainer._total_loss_scalar = found["total"]  # noqa: SLF001 - as above
        trainer._globalstep_last_logged = found["logged"]  # noqa: SLF001 - as above
        trainer._initial_global_step = found["initial"]  # noqa: SLF001 - as above

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState)]


class Others:
    """Finds what steps may change and no state has: in a replaced rank it starts over.

    The attributes that are not plain, of the user's Trainer and of the user's callbacks without ``state()``.
    What the classes of an installed package hold is theirs.
    """

    def __init__(self, trainer: Any, progress: Progress) -> None:
        self._trainer = trainer
        kinds = [one for one in type(trainer).__mro__ if one not in progress.classes]
        named = (_names_of(one) for one in kinds if _is_installed(one))
        self._not_own = progress.not_own.union(*named)
        callbacks = trainer.callback_handler.callbacks
        self._holders = progress.holders
        kept = (trainer, trainer.optimizer, trainer.lr_scheduler, *trainer.model.modules())
        self._known = {id(one) for one in (*kept, *callbacks)}

    def values(self) -> dict[str, Any]:
        """Return them by name, as they are now."""
        name, own = type(self._trainer).__name__, vars(self._trainer)
        names = own.keys() - self._not_own
        found = {f"{name}.{key}": own[key] for key in sorted(names) if not is_plain(own[key])}
        for name, holder in self._holders.items():
            held, plain = attributes_of(holder), {k for k, v in vars(holder).items() if is_plain(v)}
            found |= {f"{name}.{key}": held[key] for key in held.keys() - plain}
        return found | self._beside_states()

    def _beside_states(self) -> dict[str, Any]:
        """Return what the user's callbacks with ``state()`` hold and that leaves out, as where it is inherited."""
        found: dict[str, Any] = {}
        callbacks = self._trainer.callback_handler.callbacks
        exporting = [one for one in callbacks if isinstance(one, ExportableState)]
        own = [one for one in exporting if not _is_installed(type(one))]
        for name, one in named_by_kind(own).items():
            given = {key for part in one.state().values() if isinstance(part, dict) for key in part}
            found |= {f"{name}.{k}": v for k, v in attributes_of(one).items() if k not in given}
        return found

    def is_apart(self, value: Any) -> bool:
        """Return True for what is kept elsewhere: objects of the libraries, the trained model, its optimizer, and data."""
        if id(value) in self._known or isinstance(value, (Dataset, DataLoader)):
            return True
        if isinstance(value, nn.Module):  # a copy of the model, such as an average of its weights
            return False
        kinds = [] if isinstance(value, dict) else type(value).__mro__
        return any(one.__module__.startswith(("transformers.", "accelerate.")) for one in kinds)


def _is_users(callback: Any) -> bool:
    return not isinstance(callback, ExportableState) and not _is_installed(type(callback))


def _is_installed(kind: type[Any]) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _names_of(kind: type[Any]) -> frozenset[str]:
    """The names that the methods of a class use of ``self``; in the class itself, without those above.

    From the lines that its methods stand on: to find the end of a class, ``inspect`` reads its file word by word.
    """
    file = inspect.getsourcefile(kind) or ""
    found = [_code_of(one) for one in vars(kind).values()]
    codes = [one for one in found if one is not None and one.co_filename == file]
    if not codes:
        return frozenset()
    last = max(map(_last_line, codes))
    lines = linecache.getlines(file)[min(one.co_firstlineno for one in codes) - 1 : last]
    return frozenset(re.findall(r"\bself\.(\w+)", "".join(lines)))


def _code_of(member: Any) -> CodeType | None:
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


def _last_line(code: CodeType) -> int:
    inner = [_last_line(one) for one in code.co_consts if isinstance(one, CodeType)]
    return max([line or 0 for _, _, line in code.co_lines()] + inner)


def is_plain(value: Any) -> bool:
    """Return True for numbers, texts, tensors, and lists, tuples and dicts of them."""
    if type(value) in (list, tuple):
        return all(is_plain(one) for one in value)
    if type(value) is dict:
        return all(type(key) is str and is_plain(one) for key, one in value.items())
    return type(value) in _PLAIN


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    return bool(one == other)


def without_durations(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the log without times, which differ from rank to rank."""
    return {name: value for name, value in entry.items() if not name.endswith(_DURATIONS)}


def _as_json(value: Any) -> str:
    return json.dumps(value, default=float)
