"""Which GPUs are visible, and which rank computes where."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli.hardware.devices import find_gpus, parse_query, plan_devices
from ddp_runner.cli.hardware.machine import core_count, cpu_quota
from ddp_runner.cli.hardware.machine_checks import Probed
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import place_notes, plan_launch, preset_name, threads_per_rank
from ddp_runner.config import resolve
from ddp_runner.core.launch_plan import group_backend
from ddp_runner.features.doctor import doctor
from ddp_runner.kernel.recovery.communicator_cut import SILENT_LEAVE_TIMEOUT_S
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.observe.gpus import VisibleGpus, visible
from ddp_runner.system.torch_versions import TorchBuild, torch_build

LISTED = """0, GPU-aaaa1111, NVIDIA H200, 143771 MiB
1, GPU-aaaa2222, NVIDIA H200, 143771 MiB
2, GPU-bbbb3333, Tesla, with a comma, 16384 MiB
"""
WITH_CUDA = TorchBuild(version="2.9.0+cu128", cuda="12.8")
GPUS = parse_query(LISTED)


def planned(*pairs: tuple[str, str], found: VisibleGpus, cores: int = 4):
    return plan_devices(resolve(command_line=pairs).settings, found=found, cores=cores)


def test_every_line_of_the_query_is_a_gpu():
    """Index, identifier, name and memory are read, also where a name holds a comma."""
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.memory) for gpu in GPUS] == [
        (0, "GPU-aaaa1111", "NVIDIA H200", "143771 MiB"),
        (1, "GPU-aaaa2222", "NVIDIA H200", "143771 MiB"),
        (2, "GPU-bbbb3333", "Tesla, with a comma", "16384 MiB"),
    ]
    assert parse_query("No devices were found\n") == ()


@pytest.mark.parametrize(
    ("mask", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("GPU-bbbb,0", [2, 0]),
        ("GPU-aaaa", []),
        ("0,7,1", [0]),
        ("0,0,1", [0]),
        ("-1", []),
        ("", []),
        ("MIG-xy,0", [-1, 0]),  # a part of a GPU has no number
    ],
)
def test_the_mask_is_read_as_cuda_reads_it(mask, indices):
    """Order counts, identifiers may be cut short if unique, and a bad entry ends the list."""
    seen = visible(GPUS, mask)
    assert [gpu.index for gpu in seen.gpus] == indices
    assert bool(seen.why_none) == (not indices)


@pytest.fixture
def fake_query(tmp_path, monkeypatch):
    """A real nvidia-smi command on PATH that prints what the test wants."""

    def install(script: str) -> None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.fixture
def torch_version(tmp_path, monkeypatch):
    """A torch on the path of which only ``version.py`` may be read."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('torch was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return (package / "version.py").write_text


def test_gpus_are_found_by_the_command_and_the_mask(fake_query):
    """What nvidia-smi lists, seen through CUDA_VISIBLE_DEVICES."""
    fake_query(f"printf '%s' '{LISTED}'")
    assert len(find_gpus({}, WITH_CUDA).gpus) == 3
    assert [gpu.index for gpu in find_gpus({"CUDA_VISIBLE_DEVICES": "2"}, WITH_CUDA).gpus] == [2]


def test_a_failing_query_is_surprising_and_says_why(fake_query):
    """A broken driver must not turn into a silent run on the CPU."""
    fake_query("echo 'NVIDIA-SMI has failed'; exit 9")
    found = find_gpus({}, WITH_CUDA)
    assert (found.gpus, found.is_surprising) == ((), True)
    assert "NVIDIA-SMI has failed" in found.why_none
    places = planned(found=found)
    assert place_notes(places, found=found, cores=4) == (
        "training on the CPU: nvidia-smi failed: NVIDIA-SMI has failed",
    )


def test_a_torch_without_cuda_sees_no_gpu(fake_query):
    """The control: the installed torch decides, and it is not surprising."""
    fake_query(f"printf '%s' '{LISTED}'")
    found = find_gpus({}, TorchBuild(version="2.9.0+cpu", cuda=""))
    assert (found.gpus, found.is_surprising) == ((), False)


def test_a_torch_for_other_gpus_is_refused_not_run_on_cpu(torch_version):
    """Its GPUs cannot be used: one line that says so, and what to do; with --cpu it trains."""
    torch_version(
        "__version__ = '2.9.0+other'\ncuda: Optional[str] = None\nxpu: Optional[str] = '20250101'\n"
    )
    with pytest.raises(BadInputError) as caught:
        plan_launch(parse_train([]), words=[])
    reported = str(caught.value)
    assert reported.startswith("run.device=auto: torch 2.9.0+other is built for ")
    assert reported.endswith("AMD's GPUs (ROCm) can be used; --cpu trains on the CPU")
    with pytest.raises(BadInputError, match=r"no GPU can be used: torch 2\.9\.0.other is built"):
        plan_launch(parse_train(["-g", "0"]), words=[])
    assert plan_launch(parse_train(["--cpu"]), words=[]).devices[0].device == "cpu"
    checks = {
        check.name: check
        for check in (doctor.check_torch(), doctor.check_gpus(find_gpus({}, torch_build())))
    }
    assert checks["GPUs"].verdict is doctor.Verdict.FAIL
    assert "--cpu" in checks["GPUs"].cure
    assert "without CUDA" not in checks["torch"].found


def test_no_driver_is_not_surprising(tmp_path, monkeypatch):
    """A machine without NVIDIA's tools trains on the CPU without a word."""
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_gpus({}, WITH_CUDA)
    assert (found.gpus, found.is_surprising) == ((), False)


@pytest.mark.parametrize(
    ("pairs", "cores", "devices"),
    [
        ([], 4, ["cuda:0", "cuda:1", "cuda:2"]),
        ([("gpus", "2,0")], 4, ["cuda:2", "cuda:0"]),
        ([("nproc", "2")], 4, ["cuda:0", "cuda:1"]),
        ([("nproc", "2"), ("gpus", "1"), ("backend", "gloo")], 4, ["cuda:1", "cuda:1"]),
        ([("gpus", "2,2,0")], 4, ["cuda:2", "cuda:2", "cuda:0"]),
        ([("device", "cpu")], 4, ["cpu", "cpu"]),
        ([("device", "cpu")], 1, ["cpu"]),
        ([("device", "cpu"), ("nproc", "3")], 1, ["cpu", "cpu", "cpu"]),
    ],
)
def test_each_rank_has_its_place(pairs, cores, devices):
    """One rank per GPU unless asked otherwise; on the CPU up to two."""
    places = planned(*pairs, found=VisibleGpus(gpus=GPUS), cores=cores)
    assert [place.device for place in places] == devices


def test_without_gpus_ranks_compute_on_the_cpu():
    """`auto` falls back; asking for CUDA does not."""
    none = VisibleGpus(why_none="none here")
    assert [place.device for place in planned(found=none)] == ["cpu", "cpu"]
    with pytest.raises(BadInputError, match=r"run\.device=cuda: no GPU can be used: none here"):
        planned(("device", "cuda"), found=none)
    with pytest.raises(BadInputError, match="--gpus=0: no GPU can be used: none here"):
        planned(("gpus", "0"), found=none)


def test_a_gpu_that_does_not_exist_lists_those_that_do():
    """The message names the wrong index and every right one."""
    with pytest.raises(BadInputError) as caught:
        planned(("gpus", "0,5"), found=VisibleGpus(gpus=GPUS[:2]))
    assert str(caught.value) == (
        "--gpus=0,5: no such GPU: 5; there are 0 (NVIDIA H200), 1 (NVIDIA H200)"
    )


def test_more_ranks_than_gpus_are_refused():
    """NCCL cannot share a GPU; the message says what would work."""
    with pytest.raises(BadInputError, match=r"--nproc-per-node=4: must be at most .* 3; --cpu"):
        planned(("nproc", "4"), found=VisibleGpus(gpus=GPUS))


@pytest.mark.parametrize(
    ("pairs", "cores", "error"),
    [
        ([("nproc", "65")], 2, "--nproc-per-node=65: must be at most 64 on the CPU"),
        ([("nproc", "100")], 96, "--nproc-per-node=100: must be at most 96 on the CPU"),
        ([("backend", "nccl")], 2, "ddp.backend=nccl: needs GPUs"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(pairs, cores, error):
    """So many ranks that the machine would choke on them; a backend of GPUs. What it can is not."""
    with pytest.raises(BadInputError) as caught:
        planned(("device", "cpu"), *pairs, found=VisibleGpus(gpus=GPUS), cores=cores)
    assert error in str(caught.value)
    allowed = [(option, {"65": "64", "100": "96", "nccl": "gloo"}[raw]) for option, raw in pairs]
    assert planned(("device", "cpu"), *allowed, found=VisibleGpus(gpus=GPUS), cores=cores)


def test_the_mapping_of_ranks_to_gpus_is_reported():
    """`rank 0 -> GPU 2 (name)`, counted as CUDA_VISIBLE_DEVICES counts."""
    found = VisibleGpus(gpus=GPUS)
    places = planned(("gpus", "2,0"), found=found)
    assert place_notes(places, found=found, cores=4) == (
        "rank 0 -> GPU 2 (Tesla, with a comma)",
        "rank 1 -> GPU 0 (NVIDIA H200)",
    )
    on_cpu = planned(("device", "cpu"), found=found)
    assert place_notes(on_cpu, found=found, cores=4) == ()
    assert "2 ranks share 1 cores" in place_notes(on_cpu, found=found, cores=1)[0]


def _launch(monkeypatch, *words):
    monkeypatch.setattr("ddp_runner.cli.planning.find_gpus", lambda *_: VisibleGpus(gpus=GPUS))
    monkeypatch.setattr("ddp_runner.cli.hardware.devices.installed_nccl", lambda: "2.28.9")
    return plan_launch(parse_train(words), words=words)


@pytest.mark.parametrize("word", ["true", "false", "process", "model"])
def test_a_spare_for_the_cpu_is_ordinary_on_gpus_and_says_so(monkeypatch, word):
    """One line where the word asks for more; on the CPU none, nor where it says only whether."""
    setting = f"recovery.warm_spare={word}"
    reported = [f"{setting} is for the CPU; on GPUs it means true"]
    plan = _launch(monkeypatch, "-g", "0", setting)
    on_gpus = [note for note in plan.notes if "spare" in note]
    assert on_gpus == (reported if word in ("process", "model") else [])
    plan = _launch(monkeypatch, "--cpu", setting)
    assert not any("spare" in note for note in plan.notes)
    assert plan.settings.recovery.warm_spare == {"true": True, "false": False}.get(word, word)


def test_ranks_that_share_a_gpu_meet_over_gloo_and_it_is_reported(monkeypatch):
    """`-g 0,0` is for trying out on one GPU; ranks with a GPU each have NCCL, and no such line."""
    reported = "GPU 0 is shared by 2 ranks over gloo: slow, for tests only"
    shared = _launch(monkeypatch, "-g", "0,0")
    assert shared.notes[:3] == (
        "rank 0 -> GPU 0 (NVIDIA H200)",
        "rank 1 -> GPU 0 (NVIDIA H200)",
        reported,
    )
    assert group_backend(shared.settings, is_on_gpu=True) == "gloo"
    asked = _launch(monkeypatch, "-g", "0", "-n", "2", "ddp.backend=gloo")
    assert reported in asked.notes
    apart = _launch(monkeypatch, "-g", "0,1")
    assert not any("shared" in note for note in apart.notes)
    assert group_backend(apart.settings, is_on_gpu=True) == "cpu:gloo,cuda:nccl"


def test_ranks_and_their_devices_follow_the_mode(monkeypatch):
    """One rank on the first GPU, one over all of them, or one for each; the plan says which, and why."""
    single = _launch(monkeypatch, "run.mode=single")
    assert [place.device for place in single.devices] == ["cuda:0"]
    assert (single.world_size, single.mode) == (1, "single: as asked, one rank on a GPU")
    over_all = _launch(monkeypatch, "run.mode=data_parallel", "-b", "8")
    assert over_all.world_size == 1
    assert over_all.devices[0].others == ("cuda:1", "cuda:2")
    assert over_all.notes[0] == "rank 0 -> GPU 0 (NVIDIA H200) and cuda:1, cuda:2"
    assert group_backend(over_all.settings, is_on_gpu=True) == "cpu:gloo,cuda:nccl"
    each = _launch(monkeypatch, "-b", "8")
    assert (each.world_size, each.mode) == (3, "distributed: 3 GPUs, NCCL 2.28.9")
    assert each.resume_key == over_all.resume_key
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    on_cpu = _launch(monkeypatch, "run.mode=data_parallel", "--cpu", "-n", "2")
    assert (on_cpu.world_size, on_cpu.devices[0].others) == (1, ("cpu",))
    assert on_cpu.threads_per_rank == core_count()


@pytest.mark.parametrize(
    ("works", "mode", "backend", "ranks"),
    [
        (("nccl", "gloo"), "distributed: 3 GPUs, NCCL 2.21.5 was tried", "cpu:gloo,cuda:nccl", 3),
        (("gloo",), "distributed: 3 GPUs, NCCL was tried and does not", "gloo", 3),
        ((), "data_parallel: 3 GPUs, and neither NCCL nor gloo works", "gloo", 1),
    ],
)
def test_a_library_that_is_not_known_is_tried_first(monkeypatch, works, mode, backend, ranks):
    """NCCL, then gloo, then one rank over all GPUs: whatever the ranks have found to work."""
    tried = []

    def probe(*, backend, devices, environment):
        tried.append(backend)
        is_fine = backend.rpartition(":")[2] in works
        return Probed(failure="" if is_fine else "it hangs", nccl="2.21.5" if is_fine else "")

    monkeypatch.setattr("ddp_runner.cli.hardware.machine_checks.probe", probe)
    monkeypatch.setattr("ddp_runner.cli.planning.find_gpus", lambda *_: VisibleGpus(gpus=GPUS))
    monkeypatch.setattr("ddp_runner.cli.hardware.devices.installed_nccl", lambda: "")
    plan = plan_launch(parse_train(()), words=())
    assert plan.mode.startswith(mode)
    assert group_backend(plan.settings, is_on_gpu=True) == backend
    assert plan.world_size == ranks
    assert tried == (["cpu:gloo,cuda:nccl"] if "nccl" in works else ["cpu:gloo,cuda:nccl", "gloo"])
    plan_launch(parse_train(("run.mode=distributed",)), words=())
    plan_launch(parse_train(("-g", "1")), words=())
    assert len(tried) <= 2, "nothing is tried where nothing depends on it"


def test_single_with_several_gpus_is_one_line_with_the_cure(monkeypatch, capsys):
    """Exit code 2, nothing touched."""
    assert main(["run.mode=single", "--gpus", "0,1,2,3", "--task", "bytes"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "give one, or run.mode=distributed" in said


def test_nccl_is_never_given_two_ranks_on_one_gpu(monkeypatch, capsys):
    """Asked for by name it is refused, in one line, also where there is no GPU."""
    expected = "--gpus=0,0: must name each GPU once: NCCL refuses two ranks on one"
    with pytest.raises(BadInputError, match=expected):
        _launch(monkeypatch, "-g", "0,0", "ddp.backend=nccl")
    assert main(["-g", "0,0", "ddp.backend=nccl"]) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert said.err.count("\n") == 1


def test_on_gpus_a_generation_has_longer_to_form(monkeypatch):
    """And as long as on the CPU before a rank is called hung; the user's deadline wins."""
    found = {words: _launch(monkeypatch, *words).settings.recovery for words in (
        ("-g", "0"), ("-g", "0", "--test"), ("--cpu",), ("-g", "0", "recovery.hang_min_s=3"),
    )}  # fmt: skip
    assert [recovery.hang_min_s for recovery in found.values()] == [10.0, 10.0, 10.0, 3.0]
    on_gpu = found["-g", "0"]
    # Who forms waits for the generation that it has left, and then makes communicators.
    assert on_gpu.form_timeout_s >= 2 * SILENT_LEAVE_TIMEOUT_S


def test_devices_choose_preset_and_threads(monkeypatch):
    """The CPU preset for the CPU; cores are shared out, at most 8 to a GPU's rank."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = VisibleGpus(gpus=GPUS)
    settings = resolve().settings
    on_gpu, on_cpu = planned(found=found), planned(("device", "cpu"), found=found)
    assert preset_name(on_gpu, is_test=False) == "gpu"
    assert preset_name(on_cpu, is_test=True) == "cpu_test"
    names = [preset_name(devices, is_test=False, is_task=False) for devices in (on_cpu, on_gpu)]
    assert names == ["cpu_program", "gpu"]
    assert threads_per_rank(settings, devices=on_gpu, cores=96) == 8
    assert threads_per_rank(settings, devices=on_cpu, cores=96) == 48
    assert threads_per_rank(settings, devices=on_cpu, cores=1) == 1
    fixed = resolve(command_line=[("threads_per_rank", "3")]).settings
    assert threads_per_rank(fixed, devices=on_gpu, cores=96) == 3


@pytest.mark.parametrize(
    ("own", "threads"), [("1", 1), ("5,2", 5), ("0", 48), ("many", 48), ("", 48)]
)
def test_omp_num_threads_of_the_user_counts(own, threads):
    """As for any program with torch; a setting counts more, what is no number nothing."""
    devices = planned(("device", "cpu"), found=VisibleGpus(gpus=GPUS))
    made = {"OMP_NUM_THREADS": own}
    settings = resolve().settings
    assert threads_per_rank(settings, devices=devices, cores=96, environment=made) == threads
    fixed = resolve(command_line=[("threads_per_rank", "3")]).settings
    assert threads_per_rank(fixed, devices=devices, cores=96, environment=made) == 3


def test_the_torch_build_is_read_without_importing_torch(torch_version):
    """version.py says the version and the CUDA it was built with."""
    torch_version("__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n")
    assert torch_build() == WITH_CUDA
    torch_version("__version__ = '2.6.0+cpu'\ncuda = None\n")
    assert torch_build() == TorchBuild(version="2.6.0+cpu", cuda="")


def test_a_containers_quota_limits_the_cores(tmp_path):
    """cgroup v2 and v1 quotas are read; no quota is no limit."""
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    older = tmp_path / "v1"
    (older / "cpu").mkdir(parents=True)
    (older / "cpu" / "cpu.cfs_quota_us").write_text("200000\n")
    (older / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(older) == 2.0
    assert 1 <= core_count() <= (os.cpu_count() or 1)


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a machine with a GPU")
def test_the_machines_gpus_are_found():
    """On a machine with a GPU, the real nvidia-smi is understood."""
    assert find_gpus({}, WITH_CUDA).gpus
