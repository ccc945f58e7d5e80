"""What GPUs and this process use: by NVML's interface, by its absence, and by the real machine."""

from __future__ import annotations

import sys
import time

import pytest

from ddp_runner.core.gpu_reading import GpuReading, GpuTally, Tally, throttling
from ddp_runner.observe.gpu_watch import GpuWatch
from tests.observe.nvml import FOLDER, H100, Driver


@pytest.fixture
def driver(tmp_path, monkeypatch):
    found = Driver(tmp_path)
    monkeypatch.setenv("FAKE_NVML", found.environment["FAKE_NVML"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield found
    sys.modules.pop("pynvml", None)


def test_a_gpu_is_read_in_the_units_of_the_names(driver):
    """NVML says percent and milliwatts; a reading has shares and watts."""
    (gpu,) = GpuWatch().read().gpus
    assert (gpu.index, gpu.name, gpu.uuid) == (0, "NVIDIA H100 80GB HBM3", "GPU-aaaa0001")
    assert (gpu.use, gpu.power_w, gpu.power_limit_w) == (0.93, 512.3, 700.0)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (41_000_000_000, 85_000_000_000)
    assert (gpu.temperature_c, gpu.clock_mhz, gpu.clock_max_mhz) == (61, 1755, 1980)
    assert gpu.memory_clock_mhz == 2619
    assert gpu.throttling == ("power cap", "hardware thermal slowdown")
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected, gpu.problems) == (3, 0, ())


def test_what_a_device_does_not_have_is_none(driver):
    """A consumer's GPU has no ECC, a virtual one no power; neither is a zero, nor an error."""
    driver.write({"uuid": "GPU-b", "name": "small", "used": 1, "total": 2})
    (gpu,) = GpuWatch().read().gpus
    assert (gpu.memory_used_bytes, gpu.use, gpu.power_w) == (1, None, None)
    assert (gpu.ecc_corrected, gpu.throttling, gpu.problems) == (None, (), ())


def test_a_gpu_that_is_lost_is_named_and_the_others_are_read(driver):
    """One that fell off the bus fails every call; when it is back it is read again."""
    driver.write(H100, {**H100, "uuid": "GPU-b"})
    watch = GpuWatch()
    driver.write(H100, {**H100, "uuid": "GPU-b", "lost": True})
    first, second = watch.read().gpus
    assert first.use == 0.93
    assert (second.uuid, second.use, second.problems) == ("GPU-b", None, ("GPU is lost",))
    driver.write(H100, {**H100, "uuid": "GPU-b"})
    assert watch.read().gpus[1].problems == ()


def test_memory_rows_that_cannot_be_remapped_are_a_problem(driver):
    """They need a person: a reset, or another GPU."""
    driver.write({**H100, "rows": [0, 1, 1, 0]}, {**H100, "uuid": "GPU-b", "rows": [0, 8, 0, 1]})
    pending, failed = GpuWatch().read().gpus
    assert pending.problems == ("memory rows wait to be remapped: reset the GPU",)
    assert failed.problems == ("memory rows cannot be remapped any more",)


def test_an_older_driver_has_the_same_reasons_by_their_former_name(driver, monkeypatch):
    """nvmlDeviceGetCurrentClocksThrottleReasons, until 2023."""
    watch = GpuWatch()
    nvml = sys.modules["pynvml"]
    newer = nvml.nvmlDeviceGetCurrentClocksEventReasons
    monkeypatch.delattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", newer, raising=False)
    assert watch.read().gpus[0].throttling == ("power cap", "hardware thermal slowdown")


def test_readings_are_of_the_gpus_that_the_mask_shows(driver, monkeypatch):
    """The index is CUDA's: what torch calls cuda:0 is the first of the mask."""
    driver.write(H100, {**H100, "uuid": "GPU-b", "percent": 7})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (gpu,) = GpuWatch().read().gpus
    assert (gpu.index, gpu.uuid, gpu.use) == (0, "GPU-b", 0.07)


def test_without_a_driver_the_machine_is_read_all_the_same(driver):
    """The process and its machine by psutil; why there are no GPUs is said."""
    driver.write(no_driver=True)
    watch = GpuWatch()
    assert (watch.source, watch.why_none) == ("", "NVML: Driver Not Loaded")
    reading = watch.read()
    assert reading.gpus == ()
    assert reading.rss_bytes > 10_000_000
    assert reading.memory_total_bytes > reading.memory_used_bytes > 0


def test_without_the_extra_it_says_what_is_missing(monkeypatch):
    """nvidia-ml-py is an extra: a program without it goes on."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = GpuWatch()
    assert "the extra gpu" in watch.why_none
    assert watch.read().gpus == ()


def test_torch_is_asked_only_where_it_computes_on_a_gpu(monkeypatch):
    """To ask it otherwise would take some hundred MB of each GPU for a context."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    class Cuda:
        def __init__(self, is_initialized):
            self.is_initialized = lambda: is_initialized

        device_count = staticmethod(lambda: 2)
        memory_reserved = staticmethod(lambda index: [400, 0][index])
        memory_allocated = staticmethod(lambda index: 300)
        max_memory_reserved = staticmethod(lambda index: 500)
        max_memory_allocated = staticmethod(lambda index: 400)
        mem_get_info = staticmethod(lambda index: (600, 1000))
        get_device_name = staticmethod(lambda index: "NVIDIA A100")

    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"cuda": Cuda(False)}))
    assert GpuWatch().read().gpus == ()
    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"cuda": Cuda(True)}))
    watch = GpuWatch()
    assert watch.source == "torch"
    (gpu,) = watch.read().gpus  # on the second this process has nothing: it is not touched
    assert (gpu.index, gpu.memory_used_bytes, gpu.memory_total_bytes) == (0, 400, 1000)
    assert (gpu.allocated_bytes, gpu.reserved_bytes, gpu.use) == (300, 400, None)
    assert gpu.memory_efficiency == 0.8  # of the peaks


def test_cores_in_use_are_measured_between_two_looks():
    """A loop on one core for a while is near one core, and never more than it took."""
    watch = GpuWatch()
    assert watch.read().cpu_share is None
    until_s, count = time.process_time() + 0.2, 0
    while time.process_time() < until_s:
        count += 1
    share = watch.read().cpu_share
    assert share is not None
    assert 0.02 < share < 4.0
    summary = watch.summary()
    assert summary["looks"] == 2
    assert summary["rss_bytes"]["peak"] >= summary["rss_bytes"]["mean"] > 10_000_000


def test_the_summary_has_means_and_peaks(driver):
    """Of all looks; of throttling the share of looks in which it was."""
    watch = GpuWatch()
    watch.read()
    driver.write({**H100, "percent": 7, "celsius": 71, "reasons": 0, "ecc": [4, 1]})
    watch.read()
    gpu = watch.summary()["gpus"]["0"]
    assert gpu["use"] == {"mean": 0.5, "peak": 0.93}
    assert gpu["temperature_c"] == {"mean": 66.0, "peak": 71}
    assert gpu["throttled"] == {"power cap": 0.5, "hardware thermal slowdown": 0.5}
    assert (gpu["ecc_corrected"], gpu["ecc_uncorrected"], gpu["looks"]) == (4, 1, 2)


def test_a_reading_survives_its_record():
    """It crosses a pipe, and a network, as plain values; what cannot be one is refused."""
    reading = GpuReading(index=1, use=0.5, throttling=("power cap",), problems=("GPU is lost",))
    record = {**reading.to_record(), "throttling": ["power cap"], "of_a_newer_version": 1}
    assert GpuReading.from_record(record) == reading
    for wrong in ({"index": "1"}, {"use": 0.5}, {"index": 1, "use": True}, {"index": 1, "name": 3}):
        with pytest.raises(ValueError, match="GPU"):
            GpuReading.from_record(wrong)


def test_means_leave_out_what_is_not_known():
    """None and what is not finite are no zeros."""
    tally = Tally()
    tally.add({"use": 0.5, "power_w": None})
    tally.add({"use": float("nan"), "power_w": 100.0})
    assert tally.record() == {
        "use": {"mean": 0.5, "peak": 0.5},
        "power_w": {"mean": 100.0, "peak": 100.0},
    }
    assert GpuTally().record() == {}


def test_a_gpu_that_waits_is_not_throttled():
    """NVML also has a bit for being idle, and one for clocks that somebody has set."""
    assert throttling(0x1 | 0x2 | 0x100) == ()
    assert throttling(0x8 | 0x80) == ("hardware slowdown", "power brake")


@pytest.mark.gpu
def test_a_real_gpu_is_read():
    """By the real driver: NVML where nvidia-ml-py is installed."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py (the extra gpu) is not installed")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    watch = GpuWatch()
    assert watch.source == "nvml", watch.why_none
    block = torch.zeros(64 * 1024 * 1024, dtype=torch.uint8, device="cuda:0")
    gpu = watch.read().gpus[0]
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.allocated_bytes >= block.numel()
    assert gpu.memory_used_bytes >= gpu.reserved_bytes
    assert 0 <= gpu.use <= 1
    assert 10 < gpu.temperature_c < 110
    assert 0 < gpu.memory_efficiency <= 1
    assert gpu.uuid.startswith(("GPU-", "MIG-"))
