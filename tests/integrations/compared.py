"""What the tests of integrations share: harm for a script, plain torchrun of it, and what both have at their end."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from tests.scenarios.harness import ROOT

KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise RuntimeError('a cosmic ray')"
WAIT = "import time; open('it_waits', 'w').close(); time.sleep(3)"


def plant(folder, **places):
    """Harm for a rank at a step in a part of it, as in ``r0_s4_save=KILL``."""
    for place, text in places.items():
        rank, step, where = place.split("_")
        (folder / f"harm_{rank[1:]}_{step[1:]}_{where}").write_text(text)


def run_by_torchrun(folder, script, *words):
    """What two ranks of the framework itself do."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*command, "--nproc-per-node", "2", script, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=280,
    )


def assert_as_saved_by(folder, plain):
    """Each rank has saved the same, by its bits: weights, state of the optimizer, counts."""
    for name in ("final_0.pt", "final_1.pt"):
        found, expected = (
            dict(_flat(torch.load(at / name, weights_only=False))) for at in (folder, plain)
        )
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == []


def _flat(value, path=""):
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(one, f"{path}.{key}")
    else:
        yield path, value.tolist() if isinstance(value, torch.Tensor) else value
