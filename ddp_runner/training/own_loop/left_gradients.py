"""Keeps the gradients that a block of a loop leaves for the next one; drops those of a body that was for nothing.

It is apart from ``kept`` because it has its own record of what each backward adds to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

_LOOKS_AT_FIRST = 16  # bodies; until then any gradient may be one that a later body adds to
_Looks = list[int | None]


class LeftGradients:
    """The gradients of ``parameters`` between two blocks: equal on all ranks, as DDP has averaged them.

    There are some after ``zero_grad(set_to_none=False)``, of parameters that no optimizer has, and of a GAN's other
    network. A body that begins with ``zero_grad()`` has them too, but adds to none: of these only the presence counts.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self._names = list(names)
        self._parameters = list(parameters)
        self._looks: _Looks = [None] * len(self._parameters)  # torch's counts of changes
        self._added_to: set[int] = set()  # places of those that a body has added to
        self._values: dict[int, Tensor] = {}  # of these, those that are not zero: never written
        self._is_before_backward = True  # of the body that comes, or is under way
        self._is_old = False  # a step was committed since they were looked at
        self._bodies = 0

    def keep(self) -> None:
        """Take the present gradients as those that are left, if they are not those already."""
        self._is_old, looks = False, self._look()
        if looks == self._looks and self._is_before_backward:
            return
        self._looks, self._is_before_backward = looks, True
        self._values = self._copied([place for place in self._added_to if looks[place] is not None])

    def has_more(self) -> bool:
        """Return True if a parameter has a gradient that had none when they were left."""
        pairs = zip(self._parameters, self._looks, strict=True)
        return any(look is None and parameter.grad is not None for parameter, look in pairs)

    def committed(self) -> None:
        """Note that the present gradients are left, unless the loop drops them before its next block."""
        self._is_old = True

    def backward_begins(self) -> None:
        """See which of them the first backward of a body adds to, in the first bodies and now and then."""
        if not self._is_before_backward:
            return
        self._is_before_backward = False
        self._bodies += 1
        # What a body has not dropped by now, it adds to. Gradients in one bucket of DDP share torch's count of changes.
        if self._bodies <= _LOOKS_AT_FIRST or self._bodies.bit_count() == 1:
            there = [at for at, one in enumerate(self._parameters) if one.grad is not None]
            left = [at for at in there if at not in self._added_to and self._looks[at] is not None]
            found = self._copied(left)
            self._values |= found
            self._added_to.update(found)

    # INVARIANT gradients-are-left: a body that is begun again, or begun by another process, has the gradients that it adds to.
    # Broken if: they are dropped with those of the body that was given up: momentum then acts on fewer parameters, say.
    # Guarded by: test_a_repeated_body_adds_to_the_gradients_that_were_left.
    def put_back(self) -> None:
        """Have the gradients that were left, and no others."""
        self._keep_committed()
        still = {*self._unchanged()} if self._is_before_backward else set[int]()
        for place, parameter in enumerate(self._parameters):
            if self._looks[place] is None:
                parameter.grad = None
            elif place in self._values:
                parameter.grad = self._values[place].clone()
            elif place not in still:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        self._note()

    def noted(self) -> tuple[_Looks, dict[int, Tensor]]:
        """Return what is left now, for :meth:`go_back`."""
        self._keep_committed()
        return self._looks, self._values

    def go_back(self, noted: tuple[_Looks, dict[int, Tensor]]) -> None:
        """Have the gradients that were left when :meth:`noted` was called."""
        self._is_old = False
        self._looks, self._values = noted
        self.put_back()

    def to_record(self) -> dict[str, Tensor | None]:
        """Return the gradients that are left, by name; None for one that is zero, or that bodies reset. References."""
        self._keep_committed()
        values = dict(self._values)
        if self._is_before_backward and self._bodies < _LOOKS_AT_FIRST:
            values |= {at: self._gradient(at) for at in self._unchanged() if at not in values}
        places = (at for at, look in enumerate(self._looks) if look is not None)
        return {self._names[at]: values.get(at) for at in places}

    def restore(self, record: Mapping[str, Tensor | None]) -> None:
        """Take over a record of another process, or of before."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            value = record.get(name)
            if value is not None:
                parameter.grad = value.to(parameter.device, copy=True)
            else:
                is_left = name in record
                parameter.grad = (
                    torch.zeros_like(parameter, requires_grad=False) if is_left else None
                )
        there = [at for at, name in enumerate(self._names) if record.get(name) is not None]
        self._values = self._copied(there)
        self._added_to.update(there)
        self._note()

    def _keep_committed(self) -> None:
        if self._is_old:
            self.keep()

    def _look(self) -> _Looks:
        gradients = [one.grad for one in self._parameters]
        return [None if one is None else one._version for one in gradients]  # noqa: SLF001

    def _note(self) -> None:
        self._looks, self._is_before_backward, self._is_old = self._look(), True, False

    def _unchanged(self) -> Iterator[int]:
        """Yield the places of gradients that nobody has written since they were left."""
        for place, (parameter, look) in enumerate(zip(self._parameters, self._looks, strict=True)):
            gradient = parameter.grad
            if look is not None and gradient is not None and gradient._version == look:  # noqa: SLF001
                yield place

    def _gradient(self, place: int) -> Tensor:
        gradient = self._parameters[place].grad
        assert gradient is not None, "it was looked at"
        return gradient.detach()

    def _copied(self, places: Sequence[int]) -> dict[int, Tensor]:
        """Return copies of those that are not zero, by place."""
        found = {place: self._gradient(place) for place in places}
        if not found:
            return {}
        dense = [place for place, one in found.items() if one.layout is torch.strided]
        # Read at once: a device is waited for each time.
        device = self._parameters[0].device
        signs = [found[place].any().to(device) for place in dense]
        is_any = torch.stack(signs).tolist() if signs else []
        zero = {place for place, is_one in zip(dense, is_any, strict=True) if not is_one}
        return {place: one.clone() for place, one in found.items() if place not in zero}
