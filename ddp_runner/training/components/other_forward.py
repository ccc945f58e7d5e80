"""Gives a class of modules another forward, so that an object changes what it does and not what it is."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

_REBUILD = copyreg._reconstructor  # type: ignore[attr-defined] # noqa: SLF001 - as protocol 1 does


def with_forward(kind: Any, forward: Callable[..., Any]) -> Any:
    """``kind`` with ``forward``, for ``module.__class__``: no name in the model changes.

    To copies, pickles and who prints it the object is of ``kind``.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        made = kind.__reduce_ex__(self, protocol)
        if isinstance(made, str) or getattr(made[0], "__name__", "") != "__newobj__":
            return made
        # Pickle takes that one for an object's very class only.
        return (_REBUILD, (kind, object, None), *made[2:])

    attributes = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), attributes)
