"""What AMD's GPUs use, by stubs of amd-smi and rocm-smi on the path, which answer as the real ones do."""

from __future__ import annotations

import json
import os
import sys

import pytest

from ddp_runner.core.gpu_reading import GpuReading
from ddp_runner.features.gpu_watch.parent import GpuReader
from ddp_runner.observe.gpu_watch import GpuWatch
from ddp_runner.observe.gpus import parse_amd_use, parse_rocm_use
from ddp_runner.system.clock import SYSTEM_CLOCK
from tests.cli.test_amd_gpus import LISTED, LOW_POWER, STATIC
from tests.processes import poll


def value(number, unit):
    return {"value": number, "unit": unit}


# As of amd-smi 26.2: the MI300X (gpu 0), which is the second in the order of HIP, and a card with little to say.
METRIC = [
    {
        "gpu": 0,
        "usage": {
            "gfx_activity": value(93, "%"),
            "umc_activity": value(7, "%"),
            "mm_activity": "N/A",
        },
        "power": {"socket_power": value(712, "W"), "throttle_status": "UNTHROTTLED"},
        "clock": {
            "gfx_0": {
                "clk": value(2100, "MHz"),
                "min_clk": value(132, "MHz"),
                "max_clk": value(2105, "MHz"),
            },
            "mem_0": {"clk": value(1300, "MHz")},
        },
        "temperature": {"edge": "N/A", "hotspot": value(64, "C"), "mem": value(51, "C")},
        "mem_usage": {"total_vram": value(196592, "MB"), "used_vram": value(1024, "MB")},
    },
    {"gpu": 1, "usage": "N/A", "power": {"socket_power": "N/A"}, "mem_usage": "N/A"},
]
# As of rocm-smi 4.0 with ROCm 6.4.
CARDS = {
    "card0": {
        "Unique ID": "0x2150e7d042a1124",
        "Temperature (Sensor edge) (C)": "44.0",
        "Temperature (Sensor junction) (C)": "50.0",
        "sclk clock speed:": "(1700Mhz)",
        "Current Socket Graphics Package Power (W)": "240.5",
        "GPU use (%)": "37",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "11665408",
        "Card Series": "AMD INSTINCT MI250",
    },
    "system": {"Driver version": "6.10.5"},
}


@pytest.fixture
def rocm(tmp_path, monkeypatch):
    """A torch for ROCm; ``rocm(name, script)`` puts a command on the path. No NVML, no variable."""
    package, folder = tmp_path / "site" / "torch", tmp_path / "bin"
    package.mkdir(parents=True)
    folder.mkdir()
    (package / "version.py").write_text("__version__ = '2.9.0+rocm6.4'\nhip: str = '6.4.43484'\n")
    (package / "__init__.py").write_text("raise ImportError('a reader must not import torch')\n")
    (tmp_path / "site" / "pynvml.py").write_text("raise ImportError('no NVML here')\n")
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path.strip(os.pathsep))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.syspath_prepend(package.parent)
    for name in ("torch", "pynvml"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("ROCR", "HIP", "CUDA"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)

    def install(name, script):
        command = folder / name
        command.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        command.chmod(0o755)

    return install


def amd_smi(rocm, metric=METRIC):
    answers = "".join(
        f"{word}) echo '{json.dumps(answer)}';;"
        for word, answer in (("list", LISTED), ("static", STATIC), ("metric", metric))
    )
    rocm("amd-smi", f'case "$1" in {answers} *) exit 2;; esac')


@pytest.mark.parametrize("metric", [METRIC, {"gpu_data": METRIC}], ids=["list", "gpu_data"])
def test_amd_smi_says_use_heat_and_power_in_the_order_of_hip(rocm, metric):
    """In the units of the names; what a GPU does not have is None, as of a GPU of NVIDIA's."""
    amd_smi(rocm, metric)
    watch = GpuWatch()
    assert (watch.source, watch.why_none) == ("amd-smi", "")
    first, second = watch.read().gpus
    assert (first.index, first.name, first.use, first.power_w) == (
        0,
        "AMD Radeon Pro V620",
        None,
        None,
    )
    assert first.problems == ()
    assert (second.index, second.name) == (1, "AMD Instinct MI300X")
    assert (second.use, second.power_w, second.temperature_c) == (0.93, 712.0, 64.0)
    assert (second.memory_used_bytes, second.memory_total_bytes) == (1024**3, 196592 * 1024**2)
    assert (second.clock_mhz, second.clock_max_mhz, second.memory_clock_mhz) == (2100, 2105, 1300)
    assert watch.summary()["gpus"]["1"]["use"] == {"mean": 0.93, "peak": 0.93}


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["AMD Instinct MI300X"]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}, ["AMD Instinct MI300X"]),
        ({"ROCR_VISIBLE_DEVICES": "1,0"}, ["AMD Instinct MI300X", "AMD Radeon Pro V620"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_amd_gpus_are_counted_as_torch_counts_them(rocm, monkeypatch, variables, names):
    """A reading of index 0 is of cuda:0, whichever variables choose it."""
    amd_smi(rocm)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    gpus = GpuWatch().read().gpus
    assert [gpu.name for gpu in gpus] == names
    assert [gpu.index for gpu in gpus] == list(range(len(names)))
    assert [gpu.use for gpu in gpus] == [0.93 if "MI300X" in name else None for name in names]


def test_rocm_smi_is_asked_where_there_is_no_amd_smi(rocm):
    """Behind its warnings; its keys differ between versions."""
    rocm("rocm-smi", f"echo '{LOW_POWER}'; echo '{json.dumps(CARDS)}'")
    watch = GpuWatch()
    (gpu,) = watch.read().gpus
    assert (watch.source, gpu.name, gpu.uuid) == (
        "rocm-smi",
        "AMD INSTINCT MI250",
        "GPU-02150e7d042a1124",
    )
    assert (gpu.use, gpu.temperature_c, gpu.power_w, gpu.clock_mhz) == (0.37, 50.0, 240.5, 1700)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (11665408, 68702699520)


def test_a_tool_that_stops_answering_is_a_problem_of_the_gpu(rocm):
    """Nothing is made up, and nothing raises."""
    amd_smi(rocm)
    watch = GpuWatch()
    rocm("amd-smi", "echo no driver >&2; exit 1")
    first, second = watch.read().gpus
    assert (first.use, first.problems) == (None, ("amd-smi says nothing of it",))
    assert second.name == "AMD Instinct MI300X"


def test_without_a_gpu_of_amd_the_reason_names_its_tools(rocm):
    """Not NVIDIA's, which this torch does not use."""
    assert GpuWatch().why_none == "neither amd-smi nor rocm-smi shows a GPU"


@pytest.mark.parametrize(
    "garbage", [None, [], {}, "x", [1], [{"gpu": 0, "usage": 3}], {"card0": 1}]
)
def test_odd_answers_give_no_figures(garbage):
    """A tool of another version may say anything."""
    for reading in (*parse_amd_use(LISTED, garbage).values(), *parse_rocm_use(garbage).values()):
        assert reading == GpuReading(index=reading.index)


def test_the_reader_of_a_run_reads_amd_gpus_too(rocm):
    """Its process imports no torch; it ends with the run."""
    amd_smi(rocm)
    reader = GpuReader(0.05, clock=SYSTEM_CLOCK, say=print)

    def has_read():
        reader.look()
        return reader.gpus

    poll(has_read, what="the reader", timeout_s=20.0)
    assert [gpu.use for gpu in reader.gpus] == [None, 0.93]
    reader.end()
    os.waitpid(reader.pid, 0)
    reader.close()
