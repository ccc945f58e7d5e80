"""The result of one check of ``doctor``. The checks themselves are in the modules next to this one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """``WARN`` trains, but worse or not everywhere; ``FAIL`` does not train."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. ``cure`` is what to do, empty when the verdict is OK."""

    name: str
    verdict: Verdict
    found: str
    cure: str = ""


def graded(name: str, value: float, *, least: float, shown: str, cure: str) -> Check:
    """OK from ``least`` on, a warning below."""
    if value >= least:
        return Check(name=name, verdict=Verdict.OK, found=shown)
    return Check(name=name, verdict=Verdict.WARN, found=shown, cure=cure)
