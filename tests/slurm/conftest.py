"""A cluster for each test that asks for one, and jobs on it from the scripts that the documentation shows."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.features.machines.whole_runs.conftest import SETTINGS, free_port
from tests.processes import poll
from tests.scenarios.conftest import made_once
from tests.scenarios.harness import NO_DRILLS, ROOT, WORKLOAD, Outputs
from tests.slurm.cluster import Cluster, missing_programs

__all__ = ["made_once"]

EXAMPLES = ROOT / "docs" / "examples"
RANKS = 2


def pytest_collection_modifyitems(items):
    """All of this folder."""
    folder = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.whole_run)


@pytest.fixture
def cluster():
    missing = missing_programs()
    if missing:
        pytest.skip(
            f"SLURM is not installed here: no {', '.join(missing)} (docs/several-machines.md)"
        )
    # Sockets lie in it, whose paths may have a hundred characters only.
    folder = tempfile.mkdtemp(prefix="slurm-")
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Job(Outputs):
    """A run that SLURM starts, in folders that all its nodes share."""

    def __init__(self, cluster, folder, script, *words, nnodes, options=()):
        super().__init__(folder)
        self.cluster = cluster
        self.folder.mkdir()
        environment = {
            "DDP_RUNNER_PYTHON": sys.executable,
            "NNODES": nnodes,
            "JOIN_TIMEOUT_S": "10",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        }
        submitted = ("sbatch", "--parsable", f"--chdir={ROOT}", f"--output={folder}/console_%a.txt")
        train = ("--cpu", "-n", RANKS, NO_DRILLS, "--task", f"{WORKLOAD}:PacedTask", *SETTINGS)
        train += ("-l", self.logs, "-c", self.checkpoints, *words)
        if words[0] == "run":
            train = ("run", "--cpu", "-n", RANKS, "-l", self.logs, *words[1:])
        self.number = cluster.run(
            *(*submitted, *options, EXAMPLES / script, *train), environment=environment
        )

    @property
    def console(self):
        """What all nodes have printed so far."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("console_*.txt")))

    def committed(self):
        """The newest step that rank 0 has committed, in whichever launch."""
        path = self.logs / "audit_rank_0.jsonl"
        lines = self.audit_lines(0) if path.exists() and path.read_text().endswith("\n") else []
        return lines[-1]["step"] if lines else 0

    def wait_for_step(self, step):
        poll(lambda: self.committed() >= step, every_s=0.1, what=f"step {step}: {self.console}")

    def wait_for_line(self, text):
        poll(lambda: text in self.console, every_s=0.1, what=f"{text!r} in {self.console}")


@pytest.fixture
def job(cluster, tmp_path):
    """``job(script, *words, nnodes=...)`` submits it."""
    return lambda *words, folder="job", **how: Job(cluster, tmp_path / folder, *words, **how)
