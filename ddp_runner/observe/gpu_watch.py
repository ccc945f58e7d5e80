"""``GpuWatch``: what a program, or the process beside a run, asks of GPUs and of the machine. Changes nothing.

By nvidia-ml-py (``pynvml``) where that is installed and a driver answers; for a torch that is built for ROCm by
``amd-smi`` or ``rocm-smi``; else by torch, where this process uses it on a GPU. A call into a driver can hang after a fault of a GPU: who must not, asks
in a process of its own, as a run's supervisor does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

import psutil

from ddp_runner.core.gpu_reading import GpuReading, GpuTally, Tally, throttling
from ddp_runner.observe.gpus import AmdReader, Gpu, NoAmdToolError, visible
from ddp_runner.system.torch_versions import torch_build

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReading:
    """A reading of the GPUs, this process, and the machine.

    ``cpu_share``: cores that this process and its children that live have used since the look before,
    1.0 for one core; None at the first look. ``rss_bytes``: resident memory of this process alone.
    ``memory_used_bytes``, ``memory_total_bytes``: of the machine.
    """

    gpus: tuple[GpuReading, ...]
    rss_bytes: int
    cpu_share: float | None
    memory_used_bytes: int
    memory_total_bytes: int

    def to_record(self) -> dict[str, object]:
        """Return the reading as plain values."""
        return asdict(self)


class GpuWatch:
    """Looks at the GPUs that CUDA_VISIBLE_DEVICES shows, at this process and at its machine.

    ``read()`` is one look, ``summary()`` the means and peaks of all looks so far. ``source`` says who is
    asked of GPUs (``nvml``, ``amd-smi``, ``rocm-smi``, ``torch``, or empty for nobody), ``why_none`` why nobody, or not the driver. Not for
    several threads at once. Nothing is started or changed, and no CUDA context is made.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cpu: tuple[float, dict[int, float]] | None = None
        self._host = Tally()
        self._gpus: dict[int, GpuTally] = {}
        self._looks = 0
        self.why_none = ""
        self._reader: NvmlReader | AmdReader | None = None
        try:
            self._reader = driver_reader()
        except NoDriverError as error:
            self.why_none = str(error)

    @property
    def source(self) -> str:
        """``nvml``, ``amd-smi``, ``rocm-smi``, ``torch``, or empty where nobody knows of a GPU."""
        if self._reader is not None:
            return self._reader.source
        return "torch" if _torch_in_use() is not None else ""

    def read(self) -> MachineReading:
        """Take a reading. Takes some milliseconds a GPU, by AMD's tools up to a second; may block in the driver.

        Never raises for a GPU.
        """
        reader = self._reader
        gpus = _torch_readings() if reader is None else _with_own(reader.read())
        memory = psutil.virtual_memory()
        reading = MachineReading(
            gpus=gpus,
            rss_bytes=int(self._process.memory_info().rss),
            cpu_share=self._cpu_share(),
            memory_used_bytes=int(memory.total - memory.available),
            memory_total_bytes=int(memory.total),
        )
        self._looks += 1
        names = ("rss_bytes", "cpu_share", "memory_used_bytes")
        self._host.add({name: getattr(reading, name) for name in names})
        for gpu in gpus:
            self._gpus.setdefault(gpu.index, GpuTally()).add(gpu)
        return reading

    def summary(self) -> dict[str, object]:
        """``looks``, means and peaks of the process and the machine, and ``gpus`` by index (``"0"``).

        Each figure is ``{"mean": ..., "peak": ...}`` in the unit of its name; before the first look there
        is none.
        """
        gpus = {str(index): tally.record() for index, tally in sorted(self._gpus.items())}
        return {"looks": self._looks, **self._host.record(), "gpus": gpus}

    def close(self) -> None:
        """Let go of the driver; a look after it finds no GPUs by it."""
        if self._reader is not None:
            self._reader.close()
            self._reader, self.why_none = None, "closed"

    def _cpu_share(self) -> float | None:
        now_s, spent = time.monotonic(), self._cpu_seconds()
        before, self._cpu = self._cpu, (now_s, spent)
        if before is None or now_s <= before[0]:
            return None
        used = sum(seconds - before[1].get(pid, 0.0) for pid, seconds in spent.items())
        return max(0.0, used) / (now_s - before[0])

    def _cpu_seconds(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for one in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                times = one.cpu_times()
                found[one.pid] = times.user + times.system
        return found


class NoDriverError(Exception):
    """Raised if no driver of a GPU can be asked: why, in words for people."""


def driver_reader() -> NvmlReader | AmdReader:
    """Return the reader for this machine's NVIDIA or AMD GPUs. Raises NoDriverError."""
    try:
        return NvmlReader()
    except NoDriverError as no_nvml:
        try:
            return AmdReader(os.environ)
        except NoAmdToolError as no_tool:
            build = torch_build()
            is_rocm = build is not None and bool(build.hip)
            raise NoDriverError(str(no_tool if is_rocm else no_nvml)) from None


class NvmlReader:
    """Asks NVML of the GPUs under a mask, as CUDA_VISIBLE_DEVICES has it by the order of the bus.

    Raises NoDriverError where nvidia-ml-py is not installed or no driver answers. A handle is asked for at each
    look: a GPU may be lost and come back.
    """

    source = "nvml"

    def __init__(self, mask: str | None = None) -> None:
        """``mask``: None for that of the environment."""
        try:
            self._nvml: Any = import_module("pynvml")
        except ImportError:
            raise NoDriverError("nvidia-ml-py is not installed (the extra gpu)") from None
        self._mask = os.environ.get("CUDA_VISIBLE_DEVICES") if mask is None else mask
        try:
            self._nvml.nvmlInit()
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise NoDriverError(f"NVML: {error}") from None
        self._present = [
            Gpu(index=number, uuid=self._uuid(number), name="", memory="")
            for number in range(count)
        ]

    def read(self) -> tuple[GpuReading, ...]:
        """Read each GPU."""
        chosen = visible(self._present, self._mask).gpus
        return tuple(self._read_one(index, gpu) for index, gpu in enumerate(chosen))

    def close(self) -> None:
        """Let go of the driver."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _uuid(self, number: int) -> str:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex
        return self._ask(lambda: str(nvml.nvmlDeviceGetUUID(handle(number)))) or ""

    def _ask(self, call: Callable[[], _T]) -> _T | None:
        """Return the result of ``call``; None if this device or driver lacks it."""
        try:
            return call()
        except (self._nvml.NVMLError, AttributeError):  # an older nvidia-ml-py lacks some names
            return None

    def _read_one(self, index: int, known: Gpu) -> GpuReading:
        nvml, ask = self._nvml, self._ask
        try:
            gpu = (
                nvml.nvmlDeviceGetHandleByUUID(known.uuid)  # a part of a GPU has no number
                if known.index < 0
                else nvml.nvmlDeviceGetHandleByIndex(known.index)
            )
            uuid = str(nvml.nvmlDeviceGetUUID(gpu))
        except nvml.NVMLError as error:
            return GpuReading(index=index, uuid=known.uuid, problems=(str(error),))
        use = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
        power = ask(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))  # in milliwatts, as its limit
        limit = ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
        return GpuReading(
            index=index,
            name=ask(lambda: str(nvml.nvmlDeviceGetName(gpu))) or "",
            uuid=uuid,
            use=None if use is None else use / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_c=ask(
                lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            clock_mhz=ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            clock_max_mhz=ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            throttling=throttling(self._clock_reasons(gpu)),
            ecc_corrected=self._ecc(gpu, "CORRECTED"),
            ecc_uncorrected=self._ecc(gpu, "UNCORRECTED"),
            problems=self._problems(gpu),
        )

    def _clock_reasons(self, gpu: Any) -> int:
        # An older driver, or nvidia-ml-py, has the same bits by its former name only.
        for name in (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        ):
            reasons = self._ask(lambda name=name: int(getattr(self._nvml, name)(gpu)))  # type: ignore[misc]
            if reasons is not None:
                return reasons
        return 0

    def _ecc(self, gpu: Any, kind: str) -> int | None:
        nvml = self._nvml
        return self._ask(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}"), nvml.NVML_VOLATILE_ECC
                )
            )
        )

    def _problems(self, gpu: Any) -> tuple[str, ...]:
        rows = self._ask(lambda: self._nvml.nvmlDeviceGetRemappedRows(gpu))
        if rows is None:
            return ()
        _, _, is_pending, has_failed = rows
        found = ["memory rows wait to be remapped: reset the GPU"] if is_pending else []
        return (*found, "memory rows cannot be remapped any more") if has_failed else tuple(found)


def _torch_in_use() -> Any | None:
    """torch, where this process has a CUDA context already: asking would make one of some hundred MB."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch


def _torch_readings() -> tuple[GpuReading, ...]:
    torch = _torch_in_use()
    if torch is None:
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        if not torch.cuda.memory_reserved(index):
            continue  # another process's: mem_get_info would make a context there
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            GpuReading(
                index=index,
                name=str(torch.cuda.get_device_name(index)),
                memory_used_bytes=total - free,
                memory_total_bytes=total,
                allocated_bytes=int(torch.cuda.memory_allocated(index)),
                reserved_bytes=int(torch.cuda.memory_reserved(index)),
                memory_efficiency=_efficiency(torch, index),
            )
        )
    return tuple(found)


def _with_own(gpus: tuple[GpuReading, ...]) -> tuple[GpuReading, ...]:
    """Return the readings with the memory that this process holds on each GPU, by torch."""
    torch = _torch_in_use()
    if torch is None:
        return gpus
    known = range(torch.cuda.device_count())
    return tuple(
        replace(
            gpu,
            allocated_bytes=int(torch.cuda.memory_allocated(gpu.index)),
            reserved_bytes=int(torch.cuda.memory_reserved(gpu.index)),
            memory_efficiency=_efficiency(torch, gpu.index),
        )
        if gpu.index in known
        else gpu
        for gpu in gpus
    )


def _efficiency(torch: Any, index: int) -> float | None:
    """Peak of tensors over peak of what torch has reserved, of this process."""
    reserved = int(torch.cuda.max_memory_reserved(index))
    return min(1.0, int(torch.cuda.max_memory_allocated(index)) / reserved) if reserved else None
