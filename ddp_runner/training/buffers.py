"""What forward may write: listed as it is now, kept at a commit, taken back. Never sends it.

That is a model's buffers, and parameters without a gradient that the task updates itself, as
those of a target network (BYOL, MoCo).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ddp_runner.checkpoint.naming import bare_name, read_as
from ddp_runner.training.fingerprint import tensor_hash

HELD_SHARE_MAX = 2  # of the trained parameters' bytes; AdamW keeps as much of them


class Buffers:
    """A model's buffers by owner and name, since a module may assign a new tensor at any time.

    Of those outside the model's state, the tensors there were at the start: what a module assigns
    to such a one, as a cache that grows with its input, may have another shape on each rank.
    """

    def __init__(self, model: nn.Module) -> None:
        owners = persistent_buffers(model)
        self._owners = list(owners.values())
        self._late = {name: at for name, at in owners.items() if getattr(*at) is None}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        persistent = {id(tensor) for tensor in self._persistent()}
        self._others = [buffer for buffer in model.buffers() if id(buffer) not in persistent]
        self._values: list[Tensor] = []
        self._frozen = {
            bare_name(model, name): parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        }
        self._followed: dict[str, nn.Parameter] = {}
        self._followed_values: list[Tensor] = []
        trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self.holds_for_good = self.frozen_bytes() <= HELD_SHARE_MAX * trained_bytes
        self._has_looked = False
        self._frozen_looks: dict[str, object] = {}
        self._held: dict[str, Tensor] = {}  # of those that are frozen, in host memory
        self.keep()

    def live(self) -> list[Tensor]:
        """The tensors that the modules use now, in one order; without the empty ones."""
        found = [*self._persistent(), *self._others]
        return [buffer.detach() for buffer in found if buffer is not None and buffer.numel()]

    def followed(self) -> list[Tensor]:
        """Parameters without a gradient that were seen to change all the same."""
        return [parameter.detach() for parameter in self._followed.values()]

    def followed_names(self) -> list[str]:
        """Their names, for whoever takes the state over."""
        return list(self._followed)

    def follow(self, names: Iterable[str]) -> None:
        """Those that another process has seen to change; :meth:`keep` comes next."""
        for name in read_as(dict.fromkeys(names), self._frozen):
            if name in self._frozen:
                self._followed[name] = self._frozen.pop(name)
                self._held.pop(name, None)

    def frozen_bytes(self) -> int:
        """What :meth:`hold_frozen` takes."""
        return sum(one.nbytes for one in self._frozen.values())

    def hold_frozen(self) -> None:
        """Keep every frozen parameter: the step in which forward begins to write it may be given up.

        Until the first commit has shown which of them it writes; for good where they are few beside
        those that are trained, as a target network that begins to follow later.
        """
        if not self._held and (self.holds_for_good or not self._has_looked):
            self._held = {n: p.detach().to("cpu", copy=True) for n, p in self._frozen.items()}

    def make_room(self, model_state: Mapping[str, Tensor]) -> None:
        """For what comes next: fill buffers registered as None where ``model_state`` has them.

        Empty them where it has none. A state that is loaded must have the names that the model has.
        """
        for name, (owner, key) in self._late.items():
            saved, live = model_state.get(name), getattr(owner, key)
            if saved is None:
                setattr(owner, key, None)
            elif live is None or live.shape != saved.shape:
                setattr(owner, key, torch.empty_like(saved, device=self._device))

    def notice(self) -> None:
        """Follow the frozen parameters that the step just done has written.

        Torch's count of changes does not see what is written through ``.data``: the first step of
        a process is judged by the content.
        """
        if not self._frozen:
            return
        written = self._written()
        self._has_looked = True
        if self._held:
            self._followed_values += [self._held[n].to(self._frozen[n].device) for n in written]
        self.follow(written)
        if not self.holds_for_good:
            self._held = {}
        self._frozen_looks = self._look_at_frozen()

    def keep(self) -> None:
        """Remember tensors and values as they are now."""
        for name in self._written() if self._held else ():
            self._held[name].copy_(self._frozen[name].detach())
        self._frozen_looks = self._look_at_frozen()
        followed = self.followed()
        if len(self._followed_values) != len(followed):
            self._followed_values = [tensor.clone() for tensor in followed]
        elif followed:
            torch._foreach_copy_(self._followed_values, followed)
        self._assigned, self._tensors = self._persistent(), self.live()
        if _layouts(self._values) != _layouts(self._tensors):
            self._values = [tensor.clone() for tensor in self._tensors]
        elif self._values:
            torch._foreach_copy_(self._values, self._tensors)

    def drop(self) -> None:
        """Give the modules the tensors and values back that were kept."""
        for (owner, name), kept in zip(self._owners, self._assigned, strict=True):
            if getattr(owner, name) is not kept:
                setattr(owner, name, kept)
        if self._values:
            torch._foreach_copy_(self._tensors, self._values)
        for name in self._written() if self._held else ():
            self._frozen[name].detach().copy_(self._held[name])
        if self._followed_values:  # newly followed ones may have none yet
            count = len(self._followed_values)
            torch._foreach_copy_(self.followed()[:count], self._followed_values)
        self._frozen_looks = self._look_at_frozen()  # an evaluation may swap weights in and out

    def _written(self) -> list[str]:
        """The frozen ones that are not what they were when they were looked at last."""
        looks = self._look_at_frozen()
        return [name for name, look in looks.items() if look != self._frozen_looks[name]]

    def _look_at_frozen(self) -> dict[str, object]:
        if self._has_looked:
            return {n: (p.data_ptr(), p._version) for n, p in self._frozen.items()}  # noqa: SLF001 - as autograd
        return {name: tensor_hash(one) for name, one in self._frozen.items()}

    def _persistent(self) -> list[Tensor | None]:
        return [getattr(owner, name) for owner, name in self._owners]


def persistent_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where the buffers of the model's state live: bare name -> (module, attribute).

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


def _layouts(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
