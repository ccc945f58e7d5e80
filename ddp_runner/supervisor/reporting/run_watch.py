"""Measures the resources of a run's ranks and GPUs from time to time: means and peaks. Waits for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ddp_runner.core.batch_sizes import global_batch, proposed_shares
from ddp_runner.core.gpu_reading import EpochTally, GpuReading, GpuTally, Tally, Watched
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.system.proc_state import cpu_ticks
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.observe.view import GpuView
from ddp_runner.supervisor.around import reader_of_gpus
from ddp_runner.supervisor.reporting.program import Say

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WARM_STEPS, _MEASURED_STEPS = (
    5,
    20,
)  # of each rank: those that compile and allocate, those that count
_FRESH_INTERVALS = 3  # an older reading is none of the step that is logged


class GpuReader(Protocol):
    """Has the newest reading of this machine's GPUs, ``count`` so far, the newest of ``read_at_s``."""

    gpus: tuple[GpuReading, ...]
    read_at_s: float | None
    count: int

    def look(self) -> None:
        """Take in what has been read."""

    def took(self, ended: Ended) -> bool:
        """Return True if a reaped child was its process."""

    def end(self) -> None:
        """The run has ended: wait for nothing."""

    def close(self) -> None:
        """Let go of what leads to its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readings:
    """The readings of a machine's GPUs: their number so far, and the newest one, of ``at_s``."""

    count: int
    at_s: float
    gpus: tuple[GpuReading, ...]


_NONE = _Readings(count=0, at_s=float("-inf"), gpus=())


class RunWatch:
    """Owned by a supervisor's loop, which calls :meth:`look` at each tick; ``node``: the number of this machine.

    With ``log.gpu_watch_s=0`` it looks at nothing and has nothing to say.
    """

    def __init__(
        self, plan: LaunchPlan, *, node: int, reader: GpuReader | None, clock: Clock
    ) -> None:
        self._plan = plan
        self._here = node
        self.reader = reader
        self._clock = clock
        self.interval_s = plan.settings.log.gpu_watch_s
        self._is_on = self.interval_s > 0
        self._has_ended = False
        self._looked_at_s = float("-inf")
        self._tallied: dict[int, int] = {}  # of each node's readings, so many
        self._spent: dict[int, int] = {}  # ticks of each process at the newest look
        self._cpu_share: dict[int, float] = {}
        self._ranks: dict[int, Tally] = {}
        self._gpus: dict[tuple[int, int], GpuTally] = {}
        self._epochs = EpochTally()
        self._paces: list[tuple[int, int]] | None = None  # each rank's own steps and ns so far
        self._measures_shares = plan.settings.data.shares == "auto" and plan.world_size > 1
        self._others: dict[int, _Readings] = {}  # by node

    @classmethod
    def of(cls, plan: LaunchPlan, *, node: int, clock: Clock, say: Say) -> RunWatch:
        """Return a watch; if ranks of this machine compute on GPUs, with a process that asks the driver."""
        interval_s = plan.settings.log.gpu_watch_s
        on_gpu = any(place.visible_index is not None for place in plan.devices)
        reader = reader_of_gpus(interval_s, clock=clock, say=say) if interval_s and on_gpu else None
        return cls(plan, node=node, reader=reader, clock=clock)

    def look(self, handles: Sequence[RankHandle]) -> bool:
        """Look at the ranks of this machine and their GPUs, where that is due; whether it was."""
        if not self._is_on or self._has_ended:
            return False
        if self.reader is not None:
            self.reader.look()
        now_s = self._clock.monotonic()
        since_s = now_s - self._looked_at_s
        if since_s < self.interval_s:
            return False
        self._looked_at_s = now_s
        spent: dict[int, int] = {}
        for handle in handles:
            if self._node_of(handle.rank) == self._here and handle.pid is not None:
                self._measure(handle, since_s, spent)
            self._tally(handle)
        self._spent = spent
        self._tally_gpus(handles)
        return True

    def shares(self, handles: Sequence[RankHandle]) -> events.SharesProposed | None:
        """Return a proposal for the ranks' shares from their first steps, once, if it is asked for; else None."""
        if not self._measures_shares:
            return None
        cells = [(one.slot.get(Cell.OWN_STEPS), one.slot.get(Cell.OWN_NS)) for one in handles]
        if self._paces is None:
            if len(cells) == self._plan.world_size and min(cells)[0] >= _WARM_STEPS:
                self._paces = cells
            return None
        if len(cells) != len(self._paces):  # a rank was given up: its part is another one's
            self._measures_shares = False
            return None
        done = [now[0] - before[0] for now, before in zip(cells, self._paces, strict=True)]
        if min(done) < _MEASURED_STEPS:
            return None
        self._measures_shares = False
        spent = [now[1] - before[1] for now, before in zip(cells, self._paces, strict=True)]
        own_s = tuple(ns / 1e9 / steps for ns, steps in zip(spent, done, strict=True))
        total = global_batch(self._plan.settings.data, world_size=self._plan.world_size)
        return events.SharesProposed(
            shares=proposed_shares(own_s, total=total),
            own_step_s=tuple(round(one, 6) for one in own_s),
            devices=tuple(place.name for place in self._plan.devices),
        )

    def hear(self, node: int, message: Watched) -> None:
        """Take the readings of another machine."""
        self._cpu_share.update(
            {int(rank): float(share) for rank, share in message.cpu_share.items()}
        )
        if message.gpus_age_s is not None:
            self._others[node] = _Readings(
                count=message.gpus_count,
                at_s=self._clock.monotonic() - message.gpus_age_s,
                gpus=tuple(GpuReading.from_record(record) for record in message.gpus),
            )

    def watched(self) -> Watched:
        """Return this machine's readings for the machine that decides."""
        mine = self._readings(self._here)
        age_s = self._clock.monotonic() - mine.at_s
        return Watched(
            cpu_share={str(rank): share for rank, share in self._cpu_share.items()},
            gpus=[gpu.to_record() for gpu in mine.gpus],
            gpus_count=mine.count,
            gpus_age_s=age_s if mine.count else None,
        )

    def cpu_share(self, rank: int) -> float | None:
        """Cores that a rank and its loader workers have used between the two newest looks; None: unknown."""
        return self._cpu_share.get(rank)

    def figures(self, rank: int) -> dict[str, float]:
        """Return the figures of a rank's logged step that the rank does not know: CPU, and its GPU by the driver."""
        share = self._cpu_share.get(rank)
        found = {} if share is None else {"cpu_share": round(share, 3)}
        index, node = self._plan.devices[rank].visible_index, self._node_of(rank)
        readings = self._readings(node)
        if self._clock.monotonic() - readings.at_s < _FRESH_INTERVALS * self.interval_s:
            for gpu in readings.gpus:
                if gpu.index == index:
                    found.update(gpu.figures())
        return found

    def gpus(self, handles: Sequence[RankHandle]) -> tuple[GpuView, ...]:
        """Each GPU that ranks compute on: as its driver sees it where that is known, else as its ranks do."""
        if not self._is_on:
            return ()
        now_s, found = self._clock.monotonic(), []
        metrics_of = {handle.rank: handle.metrics for handle in handles}
        for (node, index), ranks in self._ranks_of_gpus().items():
            # A rank says what is on its first device.
            on_it = [one for one in ranks if self._plan.devices[one].visible_index == index]
            metrics = [metrics_of.get(rank, {}) for rank in on_it]
            known = self._readings(node)
            reading = next((one for one in known.gpus if one.index == index), None)
            age_s = None if reading is None else round(max(0.0, now_s - known.at_s), 1)
            if reading is None:
                reading = _as_ranks_see(index, self._plan.devices[ranks[0]].name, metrics)
            found.append(
                GpuView(
                    node=node, ranks=tuple(ranks), age_s=age_s, reading=reading.with_torch(metrics)
                )
            )
        return tuple(found)

    def summary(self, handles: Sequence[RankHandle]) -> tuple[dict[str, object], dict[str, object]]:
        """Return the use of GPUs (``0``, or ``NODE:0`` with several machines) and of ranks for summary.json.

        For a run that was shorter than an interval, these are the last reports of its ranks.
        """
        if not self._is_on:
            return {}, {}
        for handle in handles:
            if handle.rank not in self._ranks:
                self._tally(handle)
        if not self._gpus:
            self._tally_gpus(handles)
        gpus: dict[str, object] = {
            self._name_of(node, index): tally.record()
            for (node, index), tally in sorted(self._gpus.items())
        }
        return gpus, {str(rank): tally.record() for rank, tally in sorted(self._ranks.items())}

    def epochs(self) -> tuple[dict[str, object], ...]:
        """Return the use of GPUs in each logged epoch for summary.json; call it after :meth:`summary`."""
        return self._epochs.record()

    def took(self, ended: Ended) -> bool:
        """Return True if a child that was reaped was the GPUs' reader."""
        return self.reader is not None and self.reader.took(ended)

    def close(self) -> None:
        """Let go of the reader, whose process has been ended."""
        if self.reader is not None:
            self.reader.close()

    def end(self) -> None:
        """The run has ended: nothing is looked at any more."""
        self._has_ended = True
        if self.reader is not None:
            self.reader.end()

    def _node_of(self, rank: int) -> int:
        return rank // self._plan.ranks_per_node

    def _name_of(self, node: int, index: int) -> str:
        return str(index) if self._plan.nodes is None else f"{node}:{index}"

    def _readings(self, node: int) -> _Readings:
        if node != self._here:
            return self._others.get(node, _NONE)
        reader = self.reader
        if reader is None or reader.read_at_s is None:
            return _NONE
        return _Readings(count=reader.count, at_s=reader.read_at_s, gpus=reader.gpus)

    def _ranks_of_gpus(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for rank, place in enumerate(self._plan.devices):
            if place.visible_index is not None:
                others = [int(name.rpartition(":")[2]) for name in place.others]
                for index in (place.visible_index, *others):
                    found.setdefault((self._node_of(rank), index), []).append(rank)
        return found

    def _measure(self, handle: RankHandle, since_s: float, spent: dict[int, int]) -> None:
        assert handle.pid is not None
        used = 0
        is_known = handle.pid in self._spent
        for pid in (handle.pid, *handle.loader_pids):
            ticks = cpu_ticks(pid)
            if ticks is not None:
                spent[pid] = ticks
                used += ticks - self._spent.get(pid, ticks)
        if is_known:
            self._cpu_share[handle.rank] = max(0, used) / _TICKS_PER_S / since_s
        else:
            self._cpu_share.pop(handle.rank, None)

    def _tally(self, handle: RankHandle) -> None:
        rss_bytes = handle.rss_bytes or handle.metrics.get("rss_bytes")
        if rss_bytes:
            self._ranks.setdefault(handle.rank, Tally()).add(
                {
                    "rss_bytes": rss_bytes,
                    "loader_bytes": handle.metrics.get("loader_bytes"),
                    "cpu_share": self._cpu_share.get(handle.rank),
                }
            )

    def _tally_gpus(self, handles: Sequence[RankHandle]) -> None:
        """Each reading once; where no driver is asked, what the ranks have reported."""
        counts = {node: self._readings(node).count for node in (self._here, *self._others)}
        epoch = max((one.metrics["epoch"] for one in handles if "epoch" in one.metrics), default=-1)
        for view in self.gpus(handles):
            is_new = counts.get(view.node, 0) > self._tallied.get(view.node, 0)
            if (is_new or view.age_s is None) and _says_anything(view.reading):
                key = (view.node, view.reading.index)
                self._gpus.setdefault(key, GpuTally()).add(view.reading)
                if epoch >= 0:  # else no step was logged yet
                    self._epochs.add(int(epoch), self._name_of(*key), view.reading)
        self._tallied = counts


def _as_ranks_see(index: int, name: str, metrics: Sequence[Mapping[str, float]]) -> GpuReading:
    used = [one["device_used_bytes"] for one in metrics if "device_used_bytes" in one]
    total = [one["device_total_bytes"] for one in metrics if "device_total_bytes" in one]
    return replace(
        GpuReading(index=index, name=name),
        memory_used_bytes=int(max(used)) if used else None,
        memory_total_bytes=int(max(total)) if total else None,
    )


def _says_anything(reading: GpuReading) -> bool:
    return reading.memory_used_bytes is not None or bool(reading.problems)
