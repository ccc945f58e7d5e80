"""The one rule for names of a model's entries: in files they are those of the bare model.

What torch wraps around a model or a part of it (torch.compile, DDP) is no part of a name, and is found
by what the modules are, never by what they are called: a class of the user's own whose only child is
called ``module`` is part of it. Changes no tensor.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

_Value = TypeVar("_Value")
_COMPILED = "_orig_mod"
_WRAPPED = "module."
# What batch norms do beside is for files of torch before 0.4.1, which lack a name.
_PLAIN_LOADS = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)  # noqa: SLF001
_LOAD_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_METHODS = ("state_dict", "_save_to_state_dict", "_load_from_state_dict")

# INVARIANT bare-names: what is written has the bare model's names, and whatever names stand in a file
# are read as those: a run resumes its own checkpoints, compiled or not, whichever of the two made them.
# Broken if: a state dict goes to a file, or comes from one, beside bare_state() and load_bare_state().
# Guarded by: test_every_form_of_a_model_loads_from_every_other.


def bare_name(model: nn.Module, name: str) -> str:
    """The name of ``model``'s entry or module ``name`` without what torch has wrapped around it."""
    kept: list[str] = []
    at: nn.Module | None = model
    for part in name.split("."):
        if at is None or part != _wrapped_child(at):
            kept.append(part)
        at = None if at is None else _child(at, part)
    return ".".join(kept)


def bare_names(model: nn.Module) -> Callable[[str], str]:
    """Return :func:`bare_name` of ``model`` as a function for many names; fast if the model has no wrapper."""
    if any(_wrapped_child(module) is not None for module in model.modules()):
        return partial(bare_name, model)
    return str


def live_name(model: nn.Module, bare: str) -> str:
    """Return the name in ``model`` of the entry that :func:`bare_name` calls ``bare``."""
    named: list[str] = []
    at: nn.Module | None = model
    for part in bare.split("."):
        while at is not None and (child := _wrapped_child(at)) is not None:
            named.append(child)
            at = _child(at, child)
        named.append(part)
        at = None if at is None else _child(at, part)
    return ".".join(named)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """The module that ``module`` has under ``name``; torch.jit's keep theirs in what is no dict."""
    children = module._modules  # noqa: SLF001 - as named_modules() does
    return children[name] if name in children else None  # noqa: SIM401


def _wrapped_child(module: nn.Module) -> str | None:
    """The name of the module that torch has wrapped into ``module``; None where it is no such wrapper."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    # Importing it takes a second; where nobody has, nothing is compiled.
    compiling = sys.modules.get("torch._dynamo.eval_frame")
    if compiling is not None and isinstance(module, compiling.OptimizedModule):
        return _COMPILED
    return None


def bare_state(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` under the bare model's names; references, not copies.

    Raises ValueError if two entries have one name then.
    """
    state, bare = model.state_dict(), bare_names(model)
    named: OrderedDict[str, Any] = OrderedDict((bare(name), value) for name, value in state.items())
    if len(named) != len(state):
        raise ValueError("two entries of the model have one name without torch's wrappers")
    if (versions := getattr(state, "_metadata", None)) is not None:
        renamed = {bare(name): value for name, value in versions.items()}
        named._metadata = renamed  # type: ignore[attr-defined] # noqa: SLF001 - as torch hangs it on
    return named


def load_bare_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """The inverse of :func:`bare_state`. Raises RuntimeError where ``state`` is of another model.

    What is the model's own memory already stays as it is.
    """
    live = _plain_entries(model)
    if live is None or not _fit(state, live):
        model.load_state_dict({live_name(model, name): value for name, value in state.items()})
        return
    with torch.no_grad():
        for name, entry in live.items():
            if not _is_same_memory(entry, state[name]):
                entry.copy_(state[name])


def _plain_entries(model: nn.Module) -> dict[str, Tensor] | None:
    """The live tensors of the model's state by bare name; None where a module loads in a way of its own.

    torch goes through all names at every module: the square of the time, seconds at ten thousand tensors.
    """
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return None
    if torch.__future__.get_swap_module_params_on_conversion():
        return None
    if not all(_loads_plainly(module) for module in model.modules()):
        return None
    named, bare = model.state_dict(keep_vars=True), bare_names(model)
    entries = {bare(name): entry for name, entry in named.items()}
    return entries if len(entries) == len(named) else None


def _loads_plainly(module: nn.Module) -> bool:
    kind, own = type(module), vars(module)
    return (
        kind._load_from_state_dict in _PLAIN_LOADS  # noqa: SLF001 - what load_state_dict() calls
        and kind._save_to_state_dict is nn.Module._save_to_state_dict  # noqa: SLF001
        and kind.state_dict is nn.Module.state_dict
        and kind.set_extra_state is nn.Module.set_extra_state
        and not any(own.get(hooks) for hooks in _LOAD_HOOKS)
        and not any(name in own for name in _METHODS)
    )


def _fit(state: Mapping[str, Any], live: Mapping[str, Tensor]) -> bool:
    """Return True if each live entry gets one tensor of its shape, and nothing is left."""
    return state.keys() == live.keys() and all(
        isinstance(state[name], Tensor) and state[name].shape == entry.shape
        for name, entry in live.items()
    )


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.stride() == other.stride()
        and one.device == other.device
        and one.numel() > 0
    )


def read_as(found: Mapping[str, _Value], expected: Iterable[str]) -> dict[str, _Value]:
    """Return the file's entries under those of its names that the bare model ``expected`` has.

    Other programs' files, and older ones of this program, may have ``_orig_mod`` in their names, or ``module.``
    before all of them, or lack a ``module.`` that the model has. The reading that finds most of the
    expected names is taken, and the names as they are if none is better.
    """
    wanted = frozenset(expected)
    best = max(_readings(list(found), wanted), key=lambda names: len(wanted.intersection(names)))
    return dict(zip(best, found.values(), strict=True))


def _readings(found: list[str], wanted: frozenset[str]) -> Iterator[list[str]]:
    depth = 0
    while wanted and all(name.startswith(_WRAPPED * (depth + 1)) for name in wanted):
        depth += 1
    for names in _uncompiled(found):
        yield names
        inner = names
        while inner and all(name.startswith(_WRAPPED) for name in inner):
            inner = [name[len(_WRAPPED) :] for name in inner]
            yield inner
        yield [_WRAPPED * depth + name for name in inner]


def read_under(
    found: Mapping[str, _Value], expected: Iterable[str]
) -> tuple[dict[str, _Value], str]:
    """Read names like :func:`read_as`; for other programs' files also remove or add one prefix of all names.

    Lightning has ``model.`` before all names, and the file of a submodule lacks its prefix. Also returns what was
    done, in words; "" if the names fit as they are, or if several prefixes fit equally well.
    """
    wanted = frozenset(expected)
    read = read_as(found, wanted)
    if not found or not wanted.isdisjoint(read):
        return read, ""
    best, said, fits = list(read), "", 0
    for names in _uncompiled(list(found)):
        first = names[0]
        for prefix in (first[: at + 1] for at, sign in enumerate(first) if sign == "."):
            inner = [name[len(prefix) :] for name in names if name.startswith(prefix)]
            if len(inner) == len(names) and len(wanted.intersection(inner)) > fits:
                fits = len(wanted.intersection(inner))
                best, said = inner, f"the prefix {prefix!r} is taken off all of its names"
        ends = [name.removesuffix(first) for name in wanted if name.endswith(f".{first}")]
        before = [one for one in ends if all(one + name in wanted for name in names)]
        if not said and len(before) == 1:
            best = [before[0] + name for name in names]
            said = f"the prefix {before[0]!r} is put before all of its names"
    return dict(zip(best, found.values(), strict=True)), said


def _uncompiled(found: list[str]) -> Iterator[list[str]]:
    """The names as they stand and without what torch.compile wraps, unless two would become one."""
    yield found
    plain = [".".join(part for part in name.split(".") if part != _COMPILED) for name in found]
    if plain != found and len(set(plain)) == len(found):
        yield plain
