"""Turns what a LightningModule and its callbacks hold into values that a run keeps. Uses no private name of Lightning."""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from ddp_runner.integrations.framework_run import named_by_kind, refuse
from ddp_runner.values.object_graph import attributes_of

_PLAIN = (type(None), bool, int, float, str, Tensor)


class Attributes:
    """The plain attributes that a module's own code has given it, and the states of its torchmetrics objects.

    Each rank's own: lists of outputs, counters. Between two steps they are as of the update. What hooks have
    changed since then is in :meth:`late`.
    """

    def __init__(self, module: Any) -> None:
        self.owner = type(module).__name__
        self.metrics = {k: v for k, v in module.named_modules() if isinstance(v, Metric)}
        self._module = module
        self._not_own = _of_base(module)
        self._held: dict[str, Any] | None = None

    def live(self) -> dict[str, Any]:
        """Return those whose values are plain, as they are now."""
        found = vars(self._module).items()
        plain = {k: v for k, v in found if k not in self._not_own and _is_plain(v)}
        return plain | {k: _state_of(v) for k, v in self.metrics.items()}

    def hold(self) -> None:
        """The update is next."""
        self._held = copy.deepcopy(self.live())

    def let_go(self) -> None:
        """A body begins."""
        self._held = None

    def put_back(self) -> None:
        """Have them as of the update, where one has begun since the last body."""
        if self._held is not None:
            self.load_state_dict(copy.deepcopy(self._held))

    def late(self) -> dict[str, Any]:
        """Return what has changed since the update."""
        held = self._held
        if held is None:
            return {}
        live = self.live().items()
        return {k: copy.deepcopy(v) for k, v in live if k not in held or not _is_same(v, held[k])}

    def put(self, late: dict[str, Any]) -> None:
        """Make those changes."""
        self._set(copy.deepcopy(late))

    def _set(self, given: dict[str, Any]) -> None:
        for name, value in given.items():
            if name in self.metrics:
                _put_state(self.metrics[name], value)
            else:
                vars(self._module)[name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return what the run keeps of this rank."""
        return self.live() if self._held is None else self._held

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Take them back; what a step that is made again has added goes."""
        for name in self.live().keys() - given.keys():
            delattr(self._module, name)
        self._set(given)
        if self._held is not None:
            self._held = copy.deepcopy(given)


class Others:
    """Finds what a module and its callbacks hold outside their states: it starts over in a replaced rank.

    The attributes of the module that are not plain, those of its parts that hold torchmetrics objects, of the
    data module, and of each callback that is the user's own and has no ``state_dict()``.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._module = module
        self._not_own = _of_base(module)
        callbacks = [one for one in trainer.callbacks if _has_no_state(one)]
        holders = [one for one in (*callbacks, trainer.datamodule) if one is not None]
        holders += [
            one
            for one in module.modules()
            if one is not module
            and not isinstance(one, Metric)
            and any(map(_is_metric, one.modules()))
        ]
        self._holders = named_by_kind(holders)
        optimizers = [one.scheduler for one in trainer.lr_scheduler_configs] + trainer.optimizers
        self._known = {id(one) for one in (*module.modules(), *optimizers, *holders)}
        self._trainer = trainer
        inheriting = named_by_kind(filter(_inherits_state, trainer.callbacks))
        self._inheriting = {k: (one, _names_of_lightning(one)) for k, one in inheriting.items()}

    def of_trainer(self) -> dict[str, Any]:
        """Return by name what the Trainer was given, such as ``gradient_clip_val``: a callback may change it."""
        found = vars(self._trainer).items()
        named = {k: v for k, v in found if not k.startswith("_") and k != "should_stop"}
        return {f"trainer.{k}": v for k, v in named.items() if _is_plain(v)}

    def values(self) -> dict[str, Any]:
        """Return them by name, as they are now."""
        name = type(self._module).__name__
        own = vars(self._module).items()
        found = {f"{name}.{k}": v for k, v in own if k not in self._not_own and not _is_plain(v)}
        for name, holder in self._holders.items():
            found |= {f"{name}.{key}": one for key, one in attributes_of(holder).items()}
        for name, (holder, theirs) in self._inheriting.items():
            held = attributes_of(holder).items()
            found |= {f"{name}.{key}": one for key, one in held if key not in theirs}
        return found

    def is_apart(self, value: Any) -> bool:
        """Return True for what is kept elsewhere: Lightning's own objects, the trained module, its optimizer, and data."""
        if id(value) in self._known or isinstance(value, (Dataset, DataLoader)):
            return True
        if isinstance(value, nn.Module):  # a copy of the module, such as an average of its weights
            return False
        kinds = [] if isinstance(value, dict) else type(value).__mro__
        return any(str(one.__module__).startswith("lightning.") for one in kinds)


class Weights(torch.nn.Module):
    """The weights and buffers of a module, without what else hangs on it: a LightningModule holds its whole Trainer.

    Without its torchmetrics objects too, whose states are each rank's own.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._modules, self._parameters = module._modules, module._parameters  # noqa: SLF001
        if any(map(_is_metric, module.modules())):
            self._modules = {
                name: Weights(one) if any(map(_is_metric, one.modules())) else one
                for name, one in module.named_children()
                if not _is_metric(one)
            }
        self._buffers = module._buffers  # noqa: SLF001
        self._non_persistent_buffers_set = module._non_persistent_buffers_set  # noqa: SLF001


def as_plain(name: str, value: Any) -> Any:
    """A copy of a state as tensors and plain values. Raises BadInputError where it is none."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: as_plain(name, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(name, one) for one in value]
    if isinstance(value, Path):
        return str(value)
    if type(value) not in _PLAIN:
        kind = type(value).__name__
        refuse((name, kind, "is in the state_dict() of a callback: only tensors and plain values"))
    return value


_MARK = "@"
_TENSOR, _PAIRS, _TUPLE = "@tensor", "@pairs", "@tuple"
_OF_USERS = ("callbacks", "late")  # parts whose values a user's code has chosen


def _as_leaf(value: dict[str, Any]) -> tuple[str, list[Tensor]]:
    """Return plain values as one text, and the tensors in them."""
    tensors: list[Tensor] = []

    def taken_out(tensor: Tensor) -> dict[str, int]:
        tensors.append(tensor)
        return {_TENSOR: len(tensors) - 1}

    own = {name: _marked(value[name]) for name in _OF_USERS if name in value}
    return json.dumps({**value, **own}, default=taken_out), tensors


def _marked(value: Any) -> Any:
    """Return the same with marks for what JSON cannot hold: tuples, and dicts whose keys are no texts, as pairs."""
    if isinstance(value, list):
        return [_marked(one) for one in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(one) for one in value]}
    if not isinstance(value, dict):
        return value
    if all(type(key) is str and not key.startswith(_MARK) for key in value):
        return {key: _marked(one) for key, one in value.items()}
    return {_PAIRS: [[_marked(key), _marked(one)] for key, one in value.items()]}


def _of_leaf(text: str, tensors: list[Tensor]) -> dict[str, Any]:
    def given_back(found: dict[str, Any]) -> Any:
        if _PAIRS in found:
            return dict(found[_PAIRS])
        if _TUPLE in found:
            return tuple(found[_TUPLE])
        return tensors[found[_TENSOR]] if _TENSOR in found else found

    read: dict[str, Any] = json.loads(text, object_hook=given_back)
    return read


def as_text(value: Any) -> str:
    """Plain values as text, tensors with all of their numbers."""
    if isinstance(value, dict):
        return str({key: as_text(one) for key, one in sorted(value.items())})
    if isinstance(value, (list, tuple)):
        return str([as_text(one) for one in value])
    return str(value.tolist()) if isinstance(value, Tensor) else repr(value)


def _is_metric(module: torch.nn.Module) -> bool:
    """Return True for a torchmetrics object without weights."""
    return isinstance(module, Metric) and not any(True for _ in module.parameters())


def _state_of(metric: Metric) -> dict[str, Any]:
    """Return what a torchmetrics object has gathered since its reset; its tensors are replaced or written."""
    return {"updates": metric._update_count, **copy.deepcopy(metric.metric_state)}  # noqa: SLF001


def _put_state(metric: Metric, state: dict[str, Any]) -> None:
    """Give it back, without what was computed of it."""
    for name, value in state.items():
        if name != "updates":
            setattr(metric, name, copy.deepcopy(value))
    metric._update_count, metric._computed = state["updates"], None  # noqa: SLF001
    metric._cache, metric._is_synced = None, False  # noqa: SLF001


def _of_base(module: Any) -> frozenset[str]:
    base = next(one for one in type(module).__mro__ if one.__module__.startswith("lightning."))
    return frozenset(vars(base()))


def _has_no_state(callback: Any) -> bool:
    kind = type(callback)
    is_own = not kind.__module__.startswith("lightning.") and not isinstance(callback, ProgressBar)
    return is_own and kind.state_dict is Callback.state_dict


def _inherits_state(callback: Any) -> bool:
    """Return True for a user's own kind of one of Lightning's callbacks, such as EarlyStopping, with that one's state."""
    kind = type(callback)
    of_lightning = [one for one in kind.__mro__ if one.__module__.startswith("lightning.")]
    states = [vars(one)["state_dict"] for one in of_lightning if "state_dict" in vars(one)]
    return of_lightning[0] is not kind and kind.state_dict in states and not _has_no_state(callback)


def _names_of_lightning(callback: Any) -> frozenset[str]:
    """The names that the methods of Lightning's own classes of a callback use."""
    kinds = [one for one in type(callback).__mro__ if one.__module__.startswith("lightning.")]
    found = [getattr(one, "__code__", None) for kind in kinds for one in vars(kind).values()]
    return frozenset(name for code in found if code is not None for name in code.co_names)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    return type(value) in _PLAIN


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    return bool(one == other)


class Progress:
    """Keeps Lightning's progress next to model, optimizer and schedulers, as ``run.keep()`` expects it.

    ``counted``: what each rank has logged, ``epoch``: in the last whole epoch.
    """

    def __init__(self, world_size: int, cells: int, device: torch.device) -> None:
        self.between = {}
        self.counted = torch.zeros(world_size, cells, dtype=torch.float64, device=device)
        self.epoch = torch.zeros_like(self.counted)

    @property
    def between(self) -> dict[str, Any]:
        """Where Lightning stands at the last boundary of steps, alike on all ranks."""
        return self._between

    @between.setter
    def between(self, value: dict[str, Any]) -> None:
        self._between = value
        self._text, self._tensors = _as_leaf(value)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values: a run looks at each of them in every step, so one text has the most."""
        own = {"counted": self.counted, "epoch": self.epoch}
        return {"between": self._text, "tensors": self._tensors, **own}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Take a state of this process or of another rank."""
        self._text, self._tensors = given["between"], list(given["tensors"])
        self._between = _of_leaf(self._text, self._tensors)
        for name, own in (("counted", self.counted), ("epoch", self.epoch)):
            if given[name] is not own:
                own.copy_(given[name])


def remove_begun(begun: Path, experiment: Any) -> None:
    """Remove the folder of a version that a logger of this process has only begun. ``experiment``: what has written there."""
    if hasattr(experiment, "close"):
        experiment.close()
    own_events = f"events.out.tfevents.*.{os.getpid()}.*"  # of TensorBoard
    files = list(begun.glob("*"))
    if begun.is_dir() and all(one.match("hparams.yaml") or one.match(own_events) for one in files):
        shutil.rmtree(begun)


def go_on_with_rows(logger: Any) -> None:
    """Have a CSVLogger go on with the file of the process before it, which it would delete."""
    file = Path(logger.log_dir) / "metrics.csv"
    rows = file.read_bytes() if file.exists() else b""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Experiment logs directory")
        experiment = logger.experiment
    if rows:
        file.write_bytes(rows)
        experiment.metrics_keys = rows.splitlines()[0].decode().split(",")
