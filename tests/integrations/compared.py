"""What the tests of integrations share: harm for a script, plain torchrun of it, and what both have at their end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys

import torch

from ddp_runner.config import from_flat
from ddp_runner.training.local_runtime import local_runtime
from ddp_runner.training.own_loop.attached_run import AttachedRun
from tests import ready

KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise RuntimeError('a cosmic ray')"
WAIT = "import time; open('it_waits', 'w').close(); time.sleep(3)"


def plant(folder, **places):
    """Harm for a rank at a step in a part of it, as in ``r0_s4_save=KILL``."""
    for place, text in places.items():
        rank, step, where = place.split("_")
        (folder / f"harm_{rank[1:]}_{step[1:]}_{where}").write_text(text)


@contextlib.contextmanager
def attached_alone(folder, monkeypatch, *integrations):
    """A run of one rank without a supervisor, which integrations are to take for one that repairs."""
    monkeypatch.chdir(folder)
    settings = from_flat(
        {
            "log_dir": str(folder / "logs"),
            "checkpoint_dir": str(folder / "kept"),
            "display": "none",
            "device": "cpu",
            "logging_steps": 1,
        }
    )
    run = AttachedRun(settings, local_runtime(settings, 0, 1), arguments="", on_end=lambda _: None)
    for integration in integrations:
        monkeypatch.setattr(integration, "RUN", run)
    yield run
    run._leave()


@functools.cache
def with_imported(framework):
    """Return the launcher of forks that have imported it, which takes longer than a short run; it ends with this process."""
    launcher = ready.Launcher(imports=(framework,))
    atexit.register(launcher.close)
    return launcher


def run_by_torchrun(folder, script, *words, framework, ranks=2):
    """What ranks of the framework itself do."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    forks = ready.environment(programs=True, launcher=with_imported(framework))
    subprocess.run(
        [*command, "--nproc-per-node", str(ranks), script, *words],
        cwd=folder,
        env={**os.environ, **forks, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=280,
    )


def assert_as_saved_by(folder, plain, ranks=2):
    """Each rank has saved the same, by its bits: weights, state of the optimizer, counts."""
    for name in (f"final_{rank}.pt" for rank in range(ranks)):
        found, expected = (
            dict(flat(torch.load(at / name, weights_only=False))) for at in (folder, plain)
        )
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == []


def in_fp16(accelerator):
    """Have an Accelerator scale losses on the CPU too, where it ignores fp16; the first scales overflow."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)


def flat(value, path=""):
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flat(one, f"{path}.{key}")
    else:
        yield path, value.tolist() if isinstance(value, torch.Tensor) else value
