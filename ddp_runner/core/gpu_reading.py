"""Values for one reading of a GPU or of a rank's process, and for sums over many readings. Reads nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

# NVML's nvmlClocksEventReasons that slow a GPU down, bit by bit (nvml.h). Being idle is none.
_REASONS = (
    (0x004, "power cap"),
    (0x008, "hardware slowdown"),
    (0x010, "sync boost"),
    (0x020, "software thermal slowdown"),
    (0x040, "hardware thermal slowdown"),
    (0x080, "power brake"),
    (0x200, "board limit"),
    (0x400, "reliability"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One look at a GPU. None: the device or its driver does not say.

    ``index`` counts as CUDA does under CUDA_VISIBLE_DEVICES: the reading is of ``cuda:<index>``. ``use`` is the
    share of time in which a kernel ran, 0 to 1. ``memory_used_bytes`` is taken by all processes;
    ``allocated_bytes`` and ``reserved_bytes`` by tensors of torch's and by its cache, of the ranks that
    compute there, ``memory_efficiency`` the peak of the former over that of the latter. Clocks in MHz. ECC errors count since the driver was loaded. ``problems``: what
    needs a person, such as a GPU that is lost or rows that cannot be remapped.
    """

    index: int
    name: str = ""
    uuid: str = ""
    use: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    memory_efficiency: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttling: tuple[str, ...] = ()
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    problems: tuple[str, ...] = ()

    def to_record(self) -> dict[str, object]:
        """Return the reading as a dict of plain values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> GpuReading:
        """The other way. Raises ValueError for what no reading can be."""
        names = {one.name for one in fields(cls)}
        known = {name: value for name, value in record.items() if name in names}
        for name, value in known.items():
            wants = _wanted(name)
            if (value is not None and not isinstance(value, wants)) or isinstance(value, bool):
                raise ValueError(f"{name} of a GPU cannot be {value!r}")
            if isinstance(value, list):
                known[name] = tuple(str(one) for one in value)
        if "index" not in known:
            raise ValueError("a reading of a GPU says of which")
        return cls(**known)  # type: ignore[arg-type]

    def with_torch(self, ranks: Iterable[Mapping[str, float]]) -> GpuReading:
        """Return the reading with what the ranks on this GPU report about torch's memory there."""
        found = list(ranks)
        return replace(
            self,
            allocated_bytes=_sum(found, "device_allocated_bytes"),
            reserved_bytes=_sum(found, "device_reserved_bytes"),
            memory_efficiency=_mean(found, "memory_efficiency"),
        )

    def figures(self) -> dict[str, float]:
        """Return the GPU figures that a rank's logged step contains."""
        values = {
            "gpu_use": self.use,
            "gpu_memory_used_bytes": self.memory_used_bytes,
            "gpu_temperature_c": self.temperature_c,
            "gpu_power_w": self.power_w,
            "gpu_clock_mhz": self.clock_mhz,
        }
        return {name: float(value) for name, value in values.items() if value is not None}


def throttling(mask: int) -> tuple[str, ...]:
    """The reasons for which a GPU runs slower than it could, from NVML's bits."""
    return tuple(text for bit, text in _REASONS if mask & bit)


def _wanted(name: str) -> tuple[type, ...]:
    if name in {"name", "uuid"}:
        return (str,)
    return (list, tuple) if name in {"throttling", "problems"} else (int, float)


def _sum(ranks: list[Mapping[str, float]], name: str) -> int | None:
    values = [rank[name] for rank in ranks if name in rank]
    return int(sum(values)) if values else None


def _mean(ranks: list[Mapping[str, float]], name: str) -> float | None:
    values = [rank[name] for rank in ranks if name in rank]
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What the ranks and GPUs of a machine use; a follower sends it each ``log.gpu_watch_s``.

    ``cpu_share``: cores, by rank. ``gpus``: records of a GpuReading, the newest of ``gpus_count`` looks,
    ``gpus_age_s`` old; None: there was no look.
    """

    cpu_share: dict[str, float]
    gpus: list[dict[str, Any]]
    gpus_count: int
    gpus_age_s: float | None


@dataclass(slots=True)
class Tally:
    """Mean and peak of figures over many looks. Holds three numbers for each."""

    _seen: dict[str, list[float]]

    def __init__(self) -> None:
        self._seen = {}

    def add(self, figures: Mapping[str, float | None]) -> None:
        """Add one reading; values that are None or not finite are left out."""
        for name, value in figures.items():
            if value is None or not math.isfinite(value):
                continue
            count, total, peak = self._seen.get(name, (0.0, 0.0, -math.inf))
            self._seen[name] = [count + 1, total + value, max(peak, value)]

    def record(self) -> dict[str, dict[str, float]]:
        """``{"use": {"mean": 0.93, "peak": 1.0}, ...}``."""
        return {
            name: {"mean": round(total / count, 6), "peak": peak}
            for name, (count, total, peak) in self._seen.items()
        }


_TALLIED = (
    *("use", "memory_used_bytes", "allocated_bytes", "reserved_bytes", "temperature_c"),
    *("power_w", "clock_mhz", "memory_clock_mhz", "memory_efficiency"),
)
_BY_EPOCH = ("use", "memory_used_bytes", "memory_efficiency", "temperature_c", "power_w")


class GpuTally:
    """One GPU over many looks: what summary.json has of it."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._reasons: Counter[str] = Counter()
        self._problems: dict[str, None] = {}
        self._newest: GpuReading | None = None
        self._looks = 0

    def add(self, reading: GpuReading) -> None:
        """One look."""
        self._looks += 1
        self._newest = reading
        self._reasons.update(reading.throttling)
        self._problems.update(dict.fromkeys(reading.problems))
        self._tally.add({name: getattr(reading, name) for name in _TALLIED})

    def record(self) -> dict[str, object]:
        """Means and peaks; ``throttled``: the share of looks for each reason; ECC errors by the newest look."""
        newest = self._newest
        if newest is None:
            return {}
        return {
            "name": newest.name,
            "uuid": newest.uuid,
            "memory_total_bytes": newest.memory_total_bytes,
            "looks": self._looks,
            **self._tally.record(),
            "throttled": {
                reason: round(count / self._looks, 4) for reason, count in self._reasons.items()
            },
            "ecc_corrected": newest.ecc_corrected,
            "ecc_uncorrected": newest.ecc_uncorrected,
            "problems": list(self._problems),
        }


class EpochTally:
    """Sums up GPU use by epoch under the names in summary.json; a long run keeps its newest epochs only."""

    EPOCHS_MAX = 200

    def __init__(self) -> None:
        self._epochs: dict[int, dict[str, Tally]] = {}

    def add(self, epoch: int, gpu: str, reading: GpuReading) -> None:
        """One look at a GPU, in an epoch."""
        tallies = self._epochs.setdefault(epoch, {})
        tallies.setdefault(gpu, Tally()).add({name: getattr(reading, name) for name in _BY_EPOCH})
        if len(self._epochs) > self.EPOCHS_MAX:
            del self._epochs[min(self._epochs)]

    def record(self) -> tuple[dict[str, object], ...]:
        """``{"epoch": 0, "gpus": {"0": {"use": {"mean": 0.93, "peak": 1.0}, ...}}}``, the oldest first."""
        return tuple(
            {"epoch": epoch, "gpus": {gpu: one.record() for gpu, one in sorted(tallies.items())}}
            for epoch, tallies in sorted(self._epochs.items())
        )
