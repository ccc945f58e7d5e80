"""Names and hashes the start weights that a checkpoint leaves out. Reads no tensor.

A state may record the weights that no step changes, as they were when the run began. If it has all
weights, this means nothing; if some are missing, a reader needs the same start weights again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

START = "start"  # the key in a state


def start_record(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``sha256`` over all these weights, ``hashes`` of each by name, ``init_from`` for people.

    Empty where a state says nothing of them, or nothing that we would have written.
    """
    found = state.get(START)
    if not isinstance(found, Mapping) or not isinstance(found.get("hashes"), Mapping):
        return {}
    return found if isinstance(found.get("sha256"), str) else {}


def left_out(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the weights that a state lacks and that its run has begun with."""
    weights = state.get("model")
    if not isinstance(weights, Mapping):
        return ()
    return tuple(name for name in start_record(state).get("hashes", {}) if name not in weights)


def start_sha256(state: Mapping[str, Any]) -> str:
    """The SHA-256 of what ``state`` leaves out; empty where it is whole."""
    return str(start_record(state)["sha256"]) if left_out(state) else ""
