"""The wheel: what is installed trains outside the checkout, and speaks of its own command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.scenarios.harness import Run

ROOT = Path(__file__).resolve().parents[1]
TASK = """\
import torch
from torch.utils.data import TensorDataset

import ddp_runner


class Mine:
    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def build_datasets(self) -> ddp_runner.Datasets:
        x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
        return ddp_runner.Datasets(train=TensorDataset(x, x.sum(1, keepdim=True)), validation=None)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


print("the package is in", ddp_runner.__path__[0], flush=True)
"""
# The installed command, with one line of words after the other, in one process; what each prints.
IN_A_ROW = """
import contextlib, io, json, runpy, sys
command, printed = sys.argv[1], []
for words in json.loads(sys.argv[2]):
    sys.argv, said = [command, *words], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        with contextlib.suppress(SystemExit):
            runpy.run_path(command, run_name="__main__")
    printed.append(said.getvalue())
print(json.dumps(printed))
"""


# One test process has all of these tests, and builds it once.
pytestmark = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built from a copy: building leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("build")
    copy = folder / "copy"
    copy.mkdir()
    for name in (
        "pyproject.toml",
        "requirements.txt",
        "README.md",
        "LICENSE",
        "launch_training.sh",
    ):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ddp_runner", copy / "ddp_runner", ignore=ignored)
    words = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder))
    subprocess.run(
        [sys.executable, "-m", "pip", *words, str(copy)],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The folder of programs of a new environment that has the wheel, and this one's packages."""
    folder = tmp_path_factory.mktemp("environment") / "new"
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    seen = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in sorted(seen)))
    words = ("install", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *words],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    return folder / "bin"


def answer(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    """Every module is in it, its types are announced, and no test, benchmark or checkpoint is."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "ddp_runner").rglob("*.py")}
    assert {*ours, "ddp_runner/py.typed"} <= names
    rest = {name.split("/")[0] for name in names - ours}
    assert {name for name in rest if not name.endswith(".dist-info")} == {"ddp_runner"}


@pytest.mark.whole_run
def test_what_is_installed_trains_and_speaks_of_its_own_command(installed, tmp_path):
    """No line sends anybody to a script or a checkout that is not there."""
    command = installed / "ddp-runner"
    (tmp_path / "mine.py").write_text(TASK)
    pages = [
        ["--help"],
        *([name, "--help"] for name in ("report", "checkpoints", "doctor", "demo", "check")),
    ]
    asked = [*pages, ["--help-settings"], ["trian"], ["report"]]
    answers = answer(installed / "python", "-c", IN_A_ROW, command, json.dumps(asked), cwd=tmp_path)
    assert answers.returncode == 0, answers.stderr
    refused = answer(command, "--task", "none.py", cwd=tmp_path)
    asked.append(["--task", "none.py"])
    all_said = [*json.loads(answers.stdout), refused.stdout + refused.stderr]
    for words, said in zip(asked, all_said, strict=True):
        assert said
        assert "Traceback" not in said, said
        assert "launch_training" not in said, said
        assert "checkout" not in said, said
        assert (f"Usage:  {command} " in said) == (words in pages), said  # as it was typed
    checks = [
        json.loads(line)
        for line in answer(command, "doctor", "--quick", "--json", cwd=tmp_path).stdout.splitlines()
    ]
    found = {check["name"]: check for check in checks}
    assert found["packages"]["verdict"] == "ok", found["packages"]
    assert found["packages"]["found"] != "all 0 requirements are met"
    assert "launch_training" not in json.dumps(checks)
    with Run(
        tmp_path / "run",
        *("-b", "4", "--max-steps", "6", "num_workers=1", "optim.warmup_steps=2"),
        command=(str(command), "train"),
        task=str(tmp_path / "mine.py"),
        environment={"PYTHONPATH": ""},
    ) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["steps"] == 6
    assert f"the package is in {installed.parent}/lib" in run.console
