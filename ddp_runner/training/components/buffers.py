"""Lists the model state that a forward may write, keeps it at a commit, and restores it. Never sends it.

That is a model's buffers, and parameters that the task writes itself, such as those of a target network
(BYOL, MoCo), or those that it clips or projects. Other attributes of modules are in ``side_state``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.checkpoint.entry_names import bare_name, read_as
from ddp_runner.training.components.tensor_hash import tensor_hash

HELD_SHARE_MAX = 2  # of the trained parameters' bytes; AdamW keeps as much of them


class Buffers:
    """A model's buffers by owner and name, since a module may assign a new tensor at any time.

    Those outside the model's state are shared among the ranks while all have them in one shape: a
    cache that grows with its input may have another one on each rank, and is each one's own then.
    """

    def __init__(self, model: nn.Module) -> None:
        owners = persistent_buffers(model)
        self._places = owners
        self._owners = list(owners.values())
        self._late = {name: at for name, at in owners.items() if getattr(*at) is None}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._unsaved = unsaved_buffers(model)
        places = [*self._owners, *self._unsaved.values()]
        self._slots = [(owner._buffers, key) for owner, key in places]  # noqa: SLF001 - without a search
        self._each_its_own: set[str] = set()  # of the unsaved: shapes differ between the ranks
        self._has_agreed = not self._unsaved
        self._values: list[Tensor] = []
        self._frozen = {
            bare_name(model, name): parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        }
        self._trained = {
            bare_name(model, name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._trained_looks: list[int] = []
        self._made_as = _layouts_of(owners)
        self._followed: dict[str, nn.Parameter] = {}
        self._followed_values: dict[str, Tensor] = {}  # of those that have been kept
        trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self.holds_for_good = self.frozen_bytes() <= HELD_SHARE_MAX * trained_bytes
        self._has_looked = False
        self._frozen_looks: dict[str, object] = {}
        self._held: dict[str, Tensor] = {}  # of those that are frozen, in host memory
        self.keep()

    def live(self) -> list[Tensor]:
        """The tensors that the modules use now, in one order; without the empty ones."""
        if not self._slots:  # as of many models; this is asked for in every step
            return []
        found = [*self._persistent(), *self._shared_unsaved()]
        there = [one.detach() for one in found if one is not None and one.numel()]
        return [one for one in there if not is_spread(one)]

    def versions(self) -> dict[str, int]:
        """Torch's counts of changes: of parameters, by name, and of the buffers as they were kept."""
        found = {name: one._version for name, one in self._parameters().items()}  # noqa: SLF001 - as autograd
        return found | {f"#{at}": one._version for at, one in enumerate(self._tensors)}  # noqa: SLF001

    def followed(self) -> list[Tensor]:
        """Parameters that were seen to change beside the optimizer."""
        return [parameter.detach() for parameter in self._followed.values()]

    def followed_names(self) -> list[str]:
        """Their names, for whoever takes the state over."""
        return list(self._followed)

    def follow(self, names: Iterable[str]) -> None:
        """Follow the entries that another process has seen to change; :meth:`keep` comes next."""
        wanted = dict.fromkeys(names)
        if not wanted:  # as at nearly every commit
            return
        for name in read_as(wanted, [*self._frozen, *self._trained]):
            for unfollowed in (self._frozen, self._trained):
                if name in unfollowed:
                    self._followed[name] = unfollowed.pop(name)
                    self._held.pop(name, None)

    def relaid_names(self) -> list[str]:
        """Saved buffers that have another shape or type than when the model was made."""
        now = _layouts_of(self._places)
        return [name for name in now if now[name] != self._made_as[name]]

    def layouts(self) -> dict[str, tuple[tuple[int, ...], str] | None]:
        """Shape and type of every buffer as it is now, by name; plain."""
        return _layouts_of({**self._places, **self._unsaved})

    def agree_on_layouts(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Take the first rank's shapes and types of saved buffers; what they hold is to come.

        ``found``: every rank's :meth:`layouts`. Of the others, those are shared that all have alike.
        """
        self._has_agreed = True
        firsts = found[0]
        self._each_its_own = {
            name for name in self._unsaved if any(one[name] != firsts[name] for one in found)
        }
        for name, (owner, key) in self._places.items():
            layout = firsts[name]
            live = getattr(owner, key)
            if layout is None:
                setattr(owner, key, None)
            elif live is None or _layout_of(live) != (tuple(layout[0]), layout[1]):
                kind = getattr(torch, layout[1])
                setattr(owner, key, torch.empty(layout[0], dtype=kind, device=self._device))

    def forget_agreement(self) -> None:
        """Compare layouts again: a new rank may have other ones of the buffers that are not saved."""
        self._has_agreed = not self._unsaved

    def is_relaid(self) -> bool:
        """Return True if a buffer's shape or type differs from the last commit, or was never compared."""
        if not self._has_agreed:
            return True
        # Asked for in every forward: one that is the same tensor still has its shape.
        now = [held[key] for held, key in self._slots]
        return any(
            one is not kept and _layout_or_none(one) != _layout_or_none(kept)
            for one, kept in zip(now, self._assigned, strict=True)
        )

    def frozen_bytes(self) -> int:
        """Return the bytes that :meth:`hold_frozen` takes."""
        return sum(one.nbytes for one in self._frozen.values())

    def hold_frozen(self) -> None:
        """Keep every frozen parameter: the step in which forward begins to write it may be given up.

        Until the first commit has shown which of them it writes; for good where they are few beside
        those that are trained, as a target network that begins to follow later.
        """
        if not self._held and (self.holds_for_good or not self._has_looked):
            self._held = {n: p.detach().to("cpu", copy=True) for n, p in self._frozen.items()}

    def make_room(self, model_state: Mapping[str, Tensor], relaid: Iterable[str] = ()) -> None:
        """Fill buffers registered as None if ``model_state`` has them, and empty them if it does not.

        A state that is loaded must have the names that the model has. ``relaid``: other entries that get
        their shape and type from there, because steps change them.
        """
        changing = dict.fromkeys(
            [*self.relaid_names(), *read_as(dict.fromkeys(relaid), self._places)]
        )
        for name in self._late:
            if model_state.get(name) is None:
                setattr(*self._late[name], None)
        for name in [*self._late, *changing]:
            saved = model_state.get(name)
            if saved is None or name not in self._places:
                continue
            owner, key = self._places[name]
            live = getattr(owner, key)
            if live is None or _layout_of(live) != _layout_of(saved):
                setattr(owner, key, torch.empty_like(saved, device=self._device))

    def notice(self) -> None:
        """Follow the parameters that forward and backward have just written; before the optimizer does.

        Torch's count of changes does not see what is written through ``.data``: the first step of
        a process is judged by the content.
        """
        self.follow(self._written_of_trained())
        if not self._frozen:
            return
        written = self._written()
        self._has_looked = True
        if self._held:
            for name in written:
                self._followed_values[name] = self._held[name].to(self._frozen[name].device)
        self.follow(written)
        if not self.holds_for_good:
            self._held = {}
        self._frozen_looks = self._look_at_frozen()

    def keep(self) -> None:
        """Remember tensors and values as they are now."""
        for name in self._written() if self._held else ():
            self._held[name].copy_(self._frozen[name].detach())
        self._frozen_looks = self._look_at_frozen()
        followed = {name: parameter.detach() for name, parameter in self._followed.items()}
        if self._followed_values.keys() != followed.keys():
            self._followed_values = {name: one.clone() for name, one in followed.items()}
        elif followed:
            values = [self._followed_values[name] for name in followed]
            torch._foreach_copy_(values, list(followed.values()))
        self._trained_looks = [one._version for one in self._trained.values()]  # noqa: SLF001
        self._assigned, self._tensors = self._all_assigned(), self.live()
        if _layouts(self._values) != _layouts(self._tensors):
            self._values = [tensor.clone() for tensor in self._tensors]
        elif self._values:
            torch._foreach_copy_(self._values, self._tensors)

    def drop(self) -> list[str]:
        """Give the modules the tensors and values back that were kept.

        Returns the names of trained parameters that were written and had not been followed so far:
        these are as they were written.
        """
        lost = self._written_of_trained()
        self.follow(lost)
        places = [*self._owners, *self._unsaved.values()]
        for (owner, name), kept in zip(places, self._assigned, strict=True):
            if getattr(owner, name) is not kept:
                setattr(owner, name, kept)
        for tensor, value in zip(self._tensors, self._values, strict=True):
            # What is as it was stays: else its count of changes would say that it was written.
            if tensor_hash(tensor) != tensor_hash(value):
                tensor.copy_(value)
        for name in self._written() if self._held else ():
            self._frozen[name].detach().copy_(self._held[name])
        if self._followed_values:  # newly followed ones may have none yet
            live = [self._followed[name].detach() for name in self._followed_values]
            torch._foreach_copy_(live, list(self._followed_values.values()))
        self._frozen_looks = self._look_at_frozen()  # an evaluation may swap weights in and out
        return lost

    def hold_all(self) -> dict[str, Tensor]:
        """A copy of all parameters, in host memory."""
        return {n: one.detach().to("cpu", copy=True) for n, one in self._parameters().items()}

    def put_back_all(self, held: Mapping[str, Tensor]) -> None:
        """Give the parameters back what :meth:`hold_all` has held of them; follows none."""
        every = self._parameters()
        for name, was in held.items():
            every[name].detach().copy_(was)

    def expect_written(self) -> None:
        """Take parameters for unchanged that were written and hold the same values again."""
        self._trained_looks = [one._version for one in self._trained.values()]  # noqa: SLF001
        self._frozen_looks = self._look_at_frozen()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {**self._frozen, **self._trained, **self._followed}

    def hold_all_bytes(self) -> int:
        """Return the bytes that :meth:`hold_all` takes."""
        every = (*self._frozen.values(), *self._trained.values(), *self._followed.values())
        return sum(one.nbytes for one in every)

    def follow_changed_since(self, held: Mapping[str, Tensor]) -> list[str]:
        """Put back every parameter that is not as it was held, and follow it from now on; their names."""
        every = self._parameters()
        changed = []
        for name, was in held.items():
            own = every[name].detach()
            if not torch.equal(own.to("cpu"), was) and tensor_hash(own) != tensor_hash(was):
                own.copy_(was)
                changed.append(name)
        self.follow(changed)
        self._trained_looks = [one._version for one in self._trained.values()]  # noqa: SLF001
        return changed

    def _written_of_trained(self) -> list[str]:
        if len(self._trained_looks) != len(self._trained):
            return []
        if [one._version for one in self._trained.values()] == self._trained_looks:  # noqa: SLF001
            return []
        looks = zip(self._trained.items(), self._trained_looks, strict=True)
        return [name for (name, one), look in looks if one._version != look]  # noqa: SLF001

    def _written(self) -> list[str]:
        """The frozen ones that are not what they were when they were looked at last."""
        looks = self._look_at_frozen()
        return [name for name, look in looks.items() if look != self._frozen_looks[name]]

    def _look_at_frozen(self) -> dict[str, object]:
        if self._has_looked:
            return {n: (p.data_ptr(), p._version) for n, p in self._frozen.items()}  # noqa: SLF001 - as autograd
        return {name: tensor_hash(one) for name, one in self._frozen.items()}

    def _all_assigned(self) -> list[Tensor | None]:
        return [held[key] for held, key in self._slots]

    def _shared_unsaved(self) -> list[Tensor | None]:
        places = self._unsaved.items()
        return [getattr(*place) for name, place in places if name not in self._each_its_own]

    def _persistent(self) -> list[Tensor | None]:
        return [getattr(owner, name) for owner, name in self._owners]


def own_memory_of_buffers(model: nn.Module) -> None:
    """Give memory of its own to each number of a buffer made by ``expand``: nobody can write into it otherwise."""
    own: dict[Tensor, Tensor] = {}  # one that has several names stays one
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if is_spread(buffer):
                setattr(module, key, own.setdefault(buffer, buffer.contiguous()))


def is_spread(tensor: Tensor) -> bool:
    """Return True if several elements share memory, as after ``expand``: such a tensor cannot be written to."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(n > 1 and not step for n, step in pairs)


def persistent_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the places of the buffers in the model's state: bare name -> (module, attribute).

    A mask that is rebuilt at construction is no part of the state; what is registered as None, to
    be filled later, is.
    """
    saved = model.state_dict(keep_vars=True).keys()
    owners: dict[str, tuple[nn.Module, str]] = {}
    seen: set[int] = set()  # one that has several names is followed by the first, as torch does
    for path, owner in model.named_modules():
        for key, buffer in owner._buffers.items():  # noqa: SLF001 - named_buffers() leaves None out
            name = f"{path}.{key}" if path else key
            if buffer is None:
                is_saved = key not in owner._non_persistent_buffers_set  # noqa: SLF001 - no other way
            else:
                is_saved = name in saved and id(buffer) not in seen
                seen.add(id(buffer))
            if is_saved:
                owners[bare_name(model, name)] = (owner, key)
    return owners


def unsaved_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the places of the buffers outside of the model's state: bare name -> (module, attribute)."""
    saved = {id(getattr(*place)) for place in persistent_buffers(model).values()}
    found: dict[str, tuple[nn.Module, str]] = {}
    for path, owner in model.named_modules():
        for key in owner._non_persistent_buffers_set:  # noqa: SLF001 - no other way
            name = f"{path}.{key}" if path else key
            if key in owner._buffers and id(owner._buffers[key]) not in saved:  # noqa: SLF001
                found[bare_name(model, name)] = (owner, key)
    return dict(sorted(found.items()))


def _layout_of(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _layout_or_none(tensor: Tensor | None) -> tuple[tuple[int, ...], str] | None:
    return None if tensor is None else _layout_of(tensor)


def _layouts_of(
    places: Mapping[str, tuple[nn.Module, str]],
) -> dict[str, tuple[tuple[int, ...], str] | None]:
    found = {name: getattr(owner, key) for name, (owner, key) in places.items()}
    return {name: _layout_or_none(one) for name, one in found.items()}


def _layouts(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
