"""Activation checkpointing: parts of a model compute their activations again in backward and keep none.

The parts stay where they are, under their names: only their class becomes one that recomputes. Torch's
checkpoints without reentrance bring back its own random numbers; here also come back what buffers held
and the numbers of Python and NumPy, so that the second forward is the first one, bit for bit, and leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_runner.checkpoint.entry_names import bare_name
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.other_forward import with_forward
from ddp_runner.values.generators import HostGenerators

OPTION = "memory.activation_checkpointing"
_NAMES_SHOWN = 3
# Of a buffer that is given back whether torch has counted a write or not: it counts none of batch
# statistics. Larger ones, as masks, only where it has.
_KEPT_ELEMENTS = 1 << 16
_OWN_SWITCH = "gradient_checkpointing_enable"
_OWN_ARGUMENT = "gradient_checkpointing_kwargs"

Asked = Literal["off", "all"] | tuple[str, ...]


def checkpoint_activations(model: nn.Module, asked: Asked) -> tuple[str, ...]:
    """Have the parts of ``model`` that are asked for recompute; their names.

    Raises BadInputError where there is no such part.
    """
    if asked == "off":
        return ()
    if asked == "all":
        own = _with_own_switch(model)
        if own:
            return own
        found = _blocks(model)
        if not found:
            names = ", ".join(_largest_kinds(model) or _nearest("layers.*", model))
            words = "finds no list of like blocks in the model: name its parts, such as"
            raise BadInputError(OPTION, asked, f"{words} {names or 'those of another model'}")
    else:
        found = _matching(model, [one.strip() for text in asked for one in text.split(",")])
    for part in found.values():
        kind: Any = type(part)
        part.__class__ = _recomputing(kind)
    return tuple(found)


def _with_own_switch(model: nn.Module) -> tuple[str, ...]:
    """Turn on what the outermost modules that can checkpoint by themselves have for it; their names."""
    found: dict[str, nn.Module] = {}
    for name, module in _named_modules(model).items():
        switch = getattr(module, _OWN_SWITCH, None)
        if not callable(switch) or _is_inside(name, found):
            continue
        if _OWN_ARGUMENT not in inspect.signature(switch).parameters:
            continue  # of a version whose checkpoints are reentrant
        try:
            switch(**{_OWN_ARGUMENT: {"use_reentrant": False}})
        except ValueError:  # a class that has the method and cannot do it
            continue
        found[name] = module
    return tuple(found)


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Each block of the outermost lists of like modules that have modules of their own."""
    lists: dict[str, nn.Module] = {}
    for name, module in _named_modules(model).items():
        blocks = list(module.children())
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1
        is_alike = len({type(block) for block in blocks}) == 1
        has_parts = all(next(block.children(), None) is not None for block in blocks)
        if is_list and is_alike and has_parts and not _is_inside(name, lists):
            lists[name] = module
    return {
        f"{name}.{key}".removeprefix("."): block
        for name, module in lists.items()
        for key, block in module.named_children()
    }


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules whose names match a pattern, or whose class has that name."""
    found: dict[str, nn.Module] = {}
    modules = {name: one for name, one in _named_modules(model).items() if name}
    for pattern in patterns:
        matched = {
            name: one
            for name, one in modules.items()
            if fnmatchcase(name, pattern) or type(one).__name__ == pattern
        }
        if not matched:
            names = ", ".join(_nearest(pattern, model)) or "none: it has no parts"
            raise BadInputError(
                OPTION, pattern, f"matches no module; the nearest names are {names}"
            )
        found.update(matched)
    outermost = {name: one for name, one in found.items() if not _is_inside(name, found)}
    scripted = [n for n, one in outermost.items() if isinstance(one, torch.jit.ScriptModule)]
    if scripted:
        raise BadInputError(OPTION, scripted[0], "is compiled by torch.jit: leave it out")
    return {name: one for name, one in outermost.items() if not isinstance(one, nn.ModuleList)} | {
        f"{name}.{key}": block
        for name, one in outermost.items()
        if isinstance(one, nn.ModuleList)  # which is never called itself
        for key, block in one.named_children()
    }


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {bare_name(model, name): module for name, module in model.named_modules()}


def _is_inside(name: str, others: Mapping[str, nn.Module]) -> bool:
    return any(name != one and (not one or name.startswith(f"{one}.")) for one in others)


def _nearest(pattern: str, model: nn.Module) -> list[str]:
    """Words for parts that look like ``pattern``, with what they have; of numbered names, one for all."""
    words = _by_pattern(model) | _by_class(model)
    near = difflib.get_close_matches(pattern, sorted(words), n=_NAMES_SHOWN, cutoff=0.0)
    return [_sized(word, words[word]) for word in near]


def _largest_kinds(model: nn.Module) -> list[str]:
    """The classes of parts, with what they have: first those of several, then those with more parameters."""
    kinds = _by_class(model)
    whole = _parameters([model])
    parts = {
        word: modules
        for word, modules in kinds.items()
        if len(modules) > 1 or _parameters(modules) < whole
    }
    several = [word for word in parts if len(parts[word]) > 1]
    by_size = sorted(several or parts, key=lambda word: _parameters(parts[word]), reverse=True)
    return [_sized(word, parts[word]) for word in by_size[:_NAMES_SHOWN]]


def _by_pattern(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The parts by their names, where numbers are a star."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in _named_modules(model).items():
        if name:
            found.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(module)
    return found


def _by_class(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The parts that have parts themselves, and are no mere list of such, by the names of their classes."""
    found: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        is_list = type(module) in (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        if module is not model and not is_list and next(module.children(), None) is not None:
            found.setdefault(type(module).__name__, []).append(module)
    return found


def _parameters(modules: Sequence[nn.Module]) -> int:
    """Return the number of elements of all parameters; tied ones count once."""
    found = {id(one): one.numel() for module in modules for one in module.parameters()}
    return sum(found.values())


def _sized(word: str, modules: Sequence[nn.Module]) -> str:
    count = f"{len(modules):,} module{'' if len(modules) == 1 else 's'}"
    return f"{word} ({count}, {_parameters(modules):,} parameters)"


class CompiledParts:
    """Compiles the recomputed parts one by one, since a graph around one cannot contain it."""

    def __init__(self) -> None:
        self.options: Mapping[str, Any] | None = (
            None  # of torch.compile; None: as they were written
        )
        self._calls: dict[tuple[Any, str], Callable[..., Any]] = {}

    def call_of(self, kind: Any) -> Callable[..., Any]:
        """The forward of parts of ``kind``."""
        forward: Callable[..., Any] = kind.forward
        if self.options is None:
            return forward
        key = kind, repr(sorted(self.options.items()))
        if key not in self._calls:
            self._calls[key] = torch.compile(forward, **self.options)
        return self._calls[key]


compiled_parts = CompiledParts()  # of this process


@cache
def _recomputing(kind: Any) -> Any:
    """``kind`` with a forward that recomputes."""

    # A graph that is broken at a checkpoint would go on with one that moves buffers twice.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = compiled_parts.call_of(kind)
        if not torch.is_grad_enabled():
            return call(self, *args, **kwargs)
        return checkpoint(
            partial(call, self, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=_Surroundings(self).contexts,
        )

    return with_forward(kind, forward)


class _Surroundings:
    """The state that one forward of ``module`` finds apart from its inputs, restored for the second forward.

    INVARIANT recomputed-alike: a second forward computes what the first did and changes nothing: buffers
    have the values of before the first one while it runs, and those of after it once it has run.
    Broken if: batch statistics are taken in twice, or a counter has moved on.
    Guarded by: test_checkpointed_blocks_train_to_the_same_bits.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._numbers: HostGenerators | None = None  # at the first forward
        self._before: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def contexts(
        self,
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return the contexts for the first and the second forward, as torch asks for them."""
        return self._first(), self._second()

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        # torch.utils.checkpoint gives torch's own back.
        self._numbers = HostGenerators(with_torch=False)
        held = [
            (module._buffers, key, buffer, buffer._version, buffer.detach().clone())  # noqa: SLF001
            for module in self._module.modules()
            for key, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None
        ]
        yield
        self._before = [
            (owner, key, copy)
            for owner, key, buffer, version, copy in held
            if copy.numel() <= _KEPT_ELEMENTS
            or owner.get(key) is not buffer
            or buffer._version != version  # noqa: SLF001
        ]

    @contextlib.contextmanager
    def _second(self) -> Iterator[None]:
        numbers = HostGenerators(with_torch=False)
        after = [(owner, key, owner.get(key)) for owner, key, _ in self._before]
        assert self._numbers is not None, "the first forward comes before"
        self._numbers.give_back()
        for owner, key, copy in self._before:
            owner[key] = copy.clone()
        try:
            yield
        finally:
            for owner, key, buffer in after:
                owner[key] = buffer
            numbers.give_back()
