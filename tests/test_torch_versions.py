"""What differs between versions of torch: which class NCCL's backend is, and what people read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli import planning
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.core.launch_plan import DevicePlan
from ddp_runner.core.settings import Settings
from ddp_runner.features.doctor import doctor
from ddp_runner.system.environment import kept_against_advice, training_environment
from ddp_runner.system.torch_versions import (
    DIFFERENCES,
    TESTED,
    USE_NCCL2,
    TorchBuild,
    untested,
)

PACKAGE = Path(__file__).parents[1] / "ddp_runner"
CLASSES = "from torch._C._distributed_c10d import ProcessGroupNCCL2\n"
WHICH_CLASS = """
import torch.distributed as dist
register = getattr(dist.distributed_c10d, "_register_builtin_nccl_backend", None)
if register is not None:
    register()
    print(dist.Backend._plugins["NCCL"].creator_fn.__name__)
"""


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """A torch on the path whose files may be read and which cannot be imported."""

    def install(version, *, classes=""):
        package = tmp_path / "torch"
        (package / "distributed").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('torch was imported')")
        (package / "version.py").write_text(f"__version__ = '{version}'\ncuda = '13.2'\n")
        (package / "distributed" / "distributed_c10d.py").write_text(classes)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv(USE_NCCL2, raising=False)
    return install


@pytest.mark.parametrize(
    ("classes", "chosen", "named"),
    [
        ("", None, "ProcessGroupNCCL"),
        (CLASSES, None, "ProcessGroupNCCL"),
        (CLASSES, "1", "ProcessGroupNCCL2"),
        ("", "1", "ProcessGroupNCCL"),
    ],
)
def test_doctor_names_the_class_that_nccl_is(fake_torch, monkeypatch, classes, chosen, named):
    """It is the older class unless the user's own variable chooses the newer one."""
    fake_torch("2.15.0+cu132", classes=classes)
    if chosen:
        monkeypatch.setenv(USE_NCCL2, chosen)
    found = doctor.check_torch().found
    assert found.startswith("2.15.0+cu132, CUDA 13.2")
    assert found.endswith(f"backend nccl is {named}")


def test_nccl2_is_refused_where_torch_lacks_it(fake_torch, capsys):
    """One line with the version that has it, and exit code 2."""
    fake_torch("2.13.0+cu130")
    assert main(["ddp.backend=nccl2", "--cpu"]) == 2
    assert "ddp.backend=nccl2: " in capsys.readouterr().err


def test_a_newer_torch_than_the_tested_ones_is_used_and_said(fake_torch):
    """A run begins with a line that names the newest version that was tested."""
    fake_torch("2.99.0+cpu", classes=CLASSES)
    notes = plan_launch(parse_train(["--cpu"]), words=[]).notes
    assert f"torch 2.99.0+cpu is newer than {TESTED[-1]}, the newest that" in " ".join(notes)


@pytest.mark.parametrize("version", [*TESTED, "2.15.3+cu132", "2.14.0a0"])
def test_nothing_is_said_of_a_tested_torch(version):
    """The control, with a patch release and a nightly build."""
    assert untested(version) == ""


@pytest.mark.parametrize(
    ("version", "is_named"), [("2.28.4", True), ("2.28.9", False), ("", False)]
)
def test_a_run_on_gpus_names_an_nccl_that_aborts_badly(monkeypatch, version, is_named):
    """With the command that brings a better one. Control: nothing is said of the others, or on the CPU."""
    monkeypatch.setattr(planning, "torch_build", lambda: TorchBuild(version="2.13.0", cuda="13.0"))
    monkeypatch.setattr(planning, "installed_nccl", lambda: version)
    gpu, cpu = (
        (DevicePlan(device=device, name="", visible_index=index),)
        for device, index in (("cuda:0", 0), ("cpu", None))
    )
    said = planning.nccl_notes(Settings(), gpu)
    assert [("known to abort badly" in line and "pip install" in line) for line in said] == (
        [True] if is_named else []
    )
    assert planning.nccl_notes(Settings(), cpu) == ()


def test_ranks_get_the_class_whose_source_was_read():
    """The variable stands in every rank's environment; a user's own is kept, and a line says what it means."""
    assert training_environment({}, threads=1)[USE_NCCL2] == "0"
    own = {USE_NCCL2: "1"}
    assert training_environment(own, threads=1)[USE_NCCL2] == "1"
    assert "TORCH_DIST_USE_NCCL2=1" in kept_against_advice(own, is_deterministic=False)[0]


def test_the_installed_torch_makes_that_class():
    """Asked of torch itself: what it would construct for ``nccl`` in a rank."""
    environment = training_environment(dict(os.environ), threads=1)
    done = subprocess.run(
        [sys.executable, "-c", WHICH_CLASS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() in ("", "_create_nccl_process_group")


def test_every_difference_names_a_file_that_exists():
    """The table does not outlive the code that it is about."""
    for difference in DIFFERENCES:
        for place in difference.place.split(", "):
            assert (PACKAGE / place).is_file(), place
