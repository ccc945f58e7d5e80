"""Whose process has ended, as values. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_runner.supervisor.processes.children import Ended
from ddp_runner.supervisor.processes.helper_process import (
    Drill,
    Helper,
    Saver,
    Spare,
    Standby,
    StoreHost,
)
from ddp_runner.supervisor.processes.rank_process import WhatItWrote


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteEnded:
    """The zygote is gone; ``output`` is what it said last."""

    ended: Ended
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEnded:
    """The store host is gone; ``output`` is what it said last."""

    ended: Ended
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """The process of rank ``rank`` is gone; ``wrote`` is what it had to say."""

    ended: Ended
    rank: int
    wrote: WhatItWrote


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareEnded:
    """The process that waited to become a rank is gone; nobody misses it."""

    ended: Ended
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyEnded:
    """The zygote that stood by is gone."""

    ended: Ended
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillEnded:
    """The process of a drill is gone; ``output`` is what it said last, if it has no log."""

    ended: Ended
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverEnded:
    """The process that writes checkpoints is gone; ``output`` is what it said last."""

    ended: Ended
    output: str


HelperEnded = StoreEnded | SpareEnded | StandbyEnded | DrillEnded | SaverEnded
HelperDeparture = ZygoteEnded | HelperEnded
Departure = RankEnded | HelperDeparture
HELPER_ENDED: dict[type[Helper], type[HelperEnded]] = {
    StoreHost: StoreEnded,
    Spare: SpareEnded,
    Standby: StandbyEnded,
    Drill: DrillEnded,
    Saver: SaverEnded,
}
