"""AMD's GPUs by stubs of amd-smi, rocm-smi and torch on the path, which answer as the real ones do; no AMD GPU has run this."""

from __future__ import annotations

import json
import os
import sys

import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli.hardware.devices import find_collectives, find_gpus
from ddp_runner.cli.hardware.machine_checks import Probed, Verdict
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.core.launch_plan import group_backend
from ddp_runner.features.doctor import doctor
from ddp_runner.features.doctor.doctor import (
    amd_checks,
    check_access,
    check_driver,
    check_variables,
)
from ddp_runner.features.doctor.gpu_checks import check_collectives
from ddp_runner.observe.gpus import (
    Gpu,
    find_amd_gpus,
    parse_amd_smi,
    parse_rocm_smi,
    visible_amd,
)
from ddp_runner.system.torch_versions import TorchBuild, torch_build

WITH_ROCM = TorchBuild(version="2.9.0+rocm6.4", cuda="", hip="6.4.43484")
# As of amd-smi 26.2, of two GPUs that it does not list in the order of the kernel's nodes.
LISTED = [
    {
        "gpu": 0,
        "bdf": "0000:83:00.0",
        "uuid": "deff740f-0000-1000-8082-87300da37c72",
        "kfd_id": 8042,
        "node_id": 3,
        "partition_id": 0,
    },
    {
        "gpu": 1,
        "bdf": "0000:03:00.0",
        "uuid": "76ff73a1-0000-1000-80a0-8c022586fed6",
        "kfd_id": 42905,
        "node_id": 1,
        "partition_id": 0,
    },
]
STATIC = [
    {
        "gpu": 0,
        "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "0xDE8287300DA37C72"},
        "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
    },
    {
        "gpu": 1,
        "asic": {"market_name": "AMD Radeon Pro V620", "asic_serial": "N/A"},
        "vram": {"type": "GDDR6", "size": {"value": "N/A", "unit": "MB"}},
    },
]
FIRST = Gpu(index=0, uuid="GPU-76a08c022586fed6", name="AMD Radeon Pro V620", memory="")
SECOND = Gpu(index=1, uuid="GPU-de8287300da37c72", name="AMD Instinct MI300X", memory="196592 MiB")
CARDS = {
    "card0": {
        "Unique ID": "0x2150e7d042a1124",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "11665408",
        "Card Series": "AMD INSTINCT MI250 (MCM) OAM AC MBA",
        "Node ID": "5",
    },
    "card1": {
        "Unique ID": "N/A",
        "VRAM Total Memory (B)": "68702699520",
        "Card series": "AMD INSTINCT MI250 (MCM) OAM AC MBA",
        "Node ID": "4",
    },
    "system": {"Driver version": "6.10.5"},
}
LOW_POWER = (
    "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status"
)


@pytest.fixture
def tools(tmp_path):
    """``tools(name, script)`` makes a command; the environment in which only such are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    environment = {"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"}

    def install(name, script):
        command = folder / name
        command.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        command.chmod(0o755)
        return environment

    install.environment = environment
    return install


def amd_smi(tools, listed=LISTED, static=STATIC):
    answers = f"list) echo '{json.dumps(listed)}';; static) echo '{json.dumps(static)}';;"
    return tools("amd-smi", f'case "$1" in {answers} *) exit 2;; esac')


@pytest.fixture
def torch_of_rocm(tmp_path, monkeypatch):
    """A torch on the path, for a child as well: ``torch_of_rocm(count)`` sees so many GPUs."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(
        "__version__ = '2.9.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4.43484'\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def install(code):
        (package / "__init__.py").write_text(code, encoding="utf-8")
        return str(package.parent)

    return install


SEES_TWO = """
class cuda:
    def device_count():
        return 2
    def get_device_properties(index):
        class Found:
            name = f"AMD Instinct MI{index}"
            total_memory = 64 * 1024**3
        return Found
"""


def test_amd_smi_is_read_in_the_order_of_the_kernels_nodes(tools):
    """That in which HIP counts; names, memory, and the identifiers of ROCR_VISIBLE_DEVICES."""
    assert find_amd_gpus(amd_smi(tools)).gpus == (FIRST, SECOND)


def test_newer_answers_of_amd_smi_are_read_too(tools):
    """Since ROCm 6.4 they are in an object; memory as text is of older ones."""
    static = {"gpu_data": [{**STATIC[0], "vram": {"size": "196592 MB"}}]}
    found = find_amd_gpus(amd_smi(tools, {"gpu_data": LISTED[:1]}, static)).gpus
    assert found == (Gpu(index=0, uuid=SECOND.uuid, name=SECOND.name, memory="196592 MiB"),)


def test_what_amd_smi_does_not_say_is_left_out():
    """A GPU without a name is one all the same; what is no list of GPUs is none."""
    (found,) = parse_amd_smi([{"gpu": 0}], None)
    assert found == Gpu(index=0, uuid="", name="AMD GPU", memory="")
    for odd in (None, [], {}, [1, "two"], {"gpu_data": "none"}, [{"gpu": "N/A"}]):
        assert parse_amd_smi(odd, STATIC) == ()


def test_rocm_smi_is_read_where_there_is_no_amd_smi(tools):
    """Behind its warnings, in the order of the nodes; what is no card is left out."""
    environment = tools("rocm-smi", f"echo '{LOW_POWER}'\necho\necho '{json.dumps(CARDS)}'")
    name = "AMD INSTINCT MI250 (MCM) OAM AC MBA"
    assert find_amd_gpus(environment).gpus == (
        Gpu(index=0, uuid="", name=name, memory="65520 MiB"),
        Gpu(index=1, uuid="GPU-02150e7d042a1124", name=name, memory="65520 MiB"),
    )
    without_nodes = {f"card{n}": {"Card Series": f"GPU {n}"} for n in (10, 2)}
    assert [gpu.name for gpu in parse_rocm_smi(without_nodes)] == ["GPU 2", "GPU 10"]
    assert parse_rocm_smi([]) == ()


@pytest.mark.parametrize("script", ["exit 1", "echo 'ERROR: not JSON'", "echo '[]'"])
def test_rocm_smi_is_asked_where_amd_smi_is_of_no_use(tools, script):
    """One that fails, says something else or sees nothing."""
    tools("rocm-smi", f"echo '{json.dumps(CARDS)}'")
    assert len(find_amd_gpus(tools("amd-smi", script)).gpus) == 2


def test_without_either_torch_is_asked_in_a_child(tools, torch_of_rocm):
    """It knows the variables itself, so they are not applied once more."""
    path = torch_of_rocm(SEES_TWO)
    environment = {**tools.environment, "PYTHONPATH": path, "HIP_VISIBLE_DEVICES": "6,7"}
    found = find_amd_gpus(environment)
    assert [(gpu.name, gpu.memory) for gpu in found.gpus] == [
        ("AMD Instinct MI0", "65536 MiB"),
        ("AMD Instinct MI1", "65536 MiB"),
    ]


def test_a_torch_that_fails_is_surprising_and_says_why(tools, torch_of_rocm):
    """Whoever installed it means its GPUs: the CPU is not taken without a word."""
    path = torch_of_rocm("raise ImportError('libamdhip64.so.6: cannot open shared object file')")
    found = find_amd_gpus({**tools.environment, "PYTHONPATH": path})
    assert (found.gpus, found.is_surprising) == ((), True)
    assert "libamdhip64.so.6" in found.why_none


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({}, [FIRST.name, SECOND.name]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [SECOND.name, FIRST.name]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, [SECOND.name]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-de8287300da37c72"}, [SECOND.name]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}, [SECOND.name]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [SECOND.name]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [FIRST.name]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_the_variables_are_applied_one_after_the_other(variables, left):
    """ROCR's first; HIP's, or CUDA's in its place, counts among those that are left."""
    seen = visible_amd((FIRST, SECOND), variables)
    assert [gpu.name for gpu in seen.gpus] == left
    assert bool(seen.why_none) == (not left)
    if not left:
        assert "HIP_VISIBLE_DEVICES" in seen.why_none


def test_a_torch_for_rocm_is_a_gpu_build(tools, torch_of_rocm, monkeypatch):
    """Its GPUs are the run's devices, which torch calls cuda; ranks meet by RCCL where it works."""
    torch_of_rocm("raise AssertionError('torch was imported')")
    assert torch_build() == WITH_ROCM
    monkeypatch.setattr("os.environ", {**os.environ, **amd_smi(tools)})
    assert find_gpus(dict(os.environ), torch_build()).gpus == (FIRST, SECOND)
    tried = []
    monkeypatch.setattr(
        "ddp_runner.cli.hardware.machine_checks.probe",
        lambda **given: tried.append(given["backend"]) or Probed(failure="", nccl="2.22.3"),
    )
    plan = plan_launch(parse_train(()), words=())
    assert [place.device for place in plan.devices] == ["cuda:0", "cuda:1"]
    assert plan.mode == "distributed: 2 GPUs, RCCL 2.22.3 was tried and works"
    assert group_backend(plan.settings, is_on_gpu=True) == "cpu:gloo,cuda:nccl"
    assert plan.notes[0] == "rank 0 -> GPU 0 (AMD Radeon Pro V620)"
    plan_launch(parse_train(("-g", "1")), words=())
    plan_launch(parse_train(("ddp.backend=gloo",)), words=())
    assert tried == ["cpu:gloo,cuda:nccl"]


@pytest.mark.parametrize(
    ("works", "backend", "words"),
    [
        (("gloo",), "gloo", "RCCL was tried and does not work, gloo does"),
        ((), "", "neither RCCL nor gloo works"),
    ],
)
def test_without_rccl_it_is_gloo_and_without_that_nothing(
    torch_of_rocm, monkeypatch, works, backend, words
):
    """A package of NVIDIA's NCCL that lies there too says nothing of RCCL."""
    torch_of_rocm("")
    monkeypatch.setattr("ddp_runner.cli.hardware.devices.installed_nccl", lambda: "2.28.9")
    monkeypatch.setattr(
        "ddp_runner.cli.hardware.machine_checks.probe",
        lambda **given: Probed(failure="" if given["backend"] in works else "it hangs"),
    )
    found = find_collectives(["cuda:0", "cuda:1"], {})
    assert found.backend == backend
    assert words in found.found


def test_doctor_shows_driver_access_library_and_variables(
    tools, torch_of_rocm, monkeypatch, capsys
):
    """In the words of ROCm, and the collectives as those of RCCL."""
    torch_of_rocm("raise AssertionError('torch was imported')")
    changed = {**os.environ, **amd_smi(tools), "HSA_OVERRIDE_GFX_VERSION": "10.3.0"}
    monkeypatch.setattr("os.environ", changed)
    probed = Probed(failure="", seconds=1.0, nccl="2.22.3")
    monkeypatch.setattr(doctor, "probe", lambda **_: probed)
    main(["doctor"])
    said = capsys.readouterr().out
    assert "ROCm 6.4.43484" in said
    assert "0: AMD Radeon Pro V620, 1: AMD Instinct MI300X 196592 MiB" in said
    assert "ok    RCCL            2.22.3" in said
    assert "HSA_OVERRIDE_GFX_VERSION=10.3.0" in said
    assert "RCCL 2.22.3, 2 ranks on cuda:0, cuda:1: all-reduce" in said
    assert "NCCL " not in said.replace("RCCL ", "")


def test_the_driver_and_its_device_are_looked_at(tmp_path):
    """Neither there, there without access, and right."""
    assert (check_driver(tmp_path).verdict, check_access(tmp_path).verdict) == (
        Verdict.FAIL,
        Verdict.FAIL,
    )
    assert "--device=/dev/kfd" in check_access(tmp_path).cure
    module = tmp_path / "sys" / "module" / "amdgpu"
    module.mkdir(parents=True)
    assert check_driver(tmp_path).found == "amdgpu, the kernel's own"
    (module / "version").write_text("6.10.5\n")
    assert check_driver(tmp_path).found == "amdgpu, 6.10.5"
    (tmp_path / "dev").mkdir()
    device = tmp_path / "dev" / "kfd"
    device.touch()
    assert check_access(tmp_path).verdict is Verdict.OK
    if os.geteuid() != 0:  # who may open everything
        device.chmod(0)
        assert "render and video" in check_access(tmp_path).cure


def test_two_variables_that_say_different_things_are_a_warning():
    """HIP reads one of them, and people look at the other."""
    alike = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}
    assert check_variables(alike).verdict is Verdict.OK
    assert check_variables({}).found == "none of ROCm's is set"
    odd = check_variables({**alike, "CUDA_VISIBLE_DEVICES": "1"})
    assert odd.verdict is Verdict.WARN
    assert "set one of them" in odd.cure
    names = [check.name for check in amd_checks({}, rccl="", takes_rccl=False)]
    assert names == ["driver", "access", "variables"]


def test_rccl_has_its_name_in_what_was_tried():
    """The control: NVIDIA's keeps its own."""
    probed = Probed(failure="", seconds=1.0, nccl="2.22.3")
    places = ["cuda:0", "cuda:1"]
    both = [
        check_collectives("cpu:gloo,cuda:nccl", places, probed, library=library).found
        for library in ("RCCL", "NCCL")
    ]
    assert both[0].startswith("RCCL 2.22.3")
    assert both[1].startswith("NCCL 2.22.3")
