"""What the batch scripts of the documentation do about exit codes, with stand-ins for SLURM's programs.

tests/slurm runs the same scripts on a real cluster.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.scenarios.harness import ROOT

EXAMPLES = ROOT / "docs" / "examples"
PROGRAMS = {
    # Runs the step once for each node, and ends with the highest code, as SLURM's own does.
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        highest=0 SLURM_NODEID=0
        export SLURM_NODEID
        for CODE in $CODES; do
            export CODE
            "$@" || { code=$?; (( code > highest )) && highest=$code; }
            SLURM_NODEID=$((SLURM_NODEID + 1))
        done
        exit $highest
    """,
    "squeue": 'if [[ $* == *%B* ]]; then echo "$STATE n1"; else echo "$STATE"; fi',
    "scontrol": 'if [[ $1 == requeue ]]; then echo "$2" >> requeued; else echo n1; echo n2; fi',
    "launch_training.sh": 'echo "$@" >> launched; exit $CODE',
}


@pytest.fixture
def submit(tmp_path):
    """Run a script as a job whose nodes end with ``codes``: its exit code, whether it was requeued, and options."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(script, codes, *, restarts=0, state="RUNNING", words=("--task", "product.py")):
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CODES": codes,
            "STATE": state,
            "SLURM_JOB_ID": "123457",
            "SLURM_ARRAY_JOB_ID": "123456",
            "SLURM_ARRAY_TASK_ID": "1",
            "SLURM_ARRAY_TASK_COUNT": "2",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        words = ["bash", EXAMPLES / script, *words]
        ended = subprocess.run(words, cwd=tmp_path, env=environment, check=False, timeout=30)
        launched = (tmp_path / "launched").read_text().splitlines()
        return ended.returncode, (tmp_path / "requeued").exists(), launched

    return run


@pytest.mark.parametrize(
    ("codes", "code", "is_requeued"),
    [
        ("0 0", 0, False),
        ("75 75", 75, True),
        ("75 137", 137, True),
        ("139 75", 139, True),
        ("0 137", 137, True),
        ("1 1", 1, False),
        ("137 1", 1, False),
        ("75 2", 2, False),
        ("3 137", 3, False),
        ("130 75", 130, False),
    ],
)
def test_a_job_is_requeued_where_no_node_ended_for_good(submit, codes, code, is_requeued):
    """The highest code of all nodes does not say so by itself."""
    assert submit("slurm.sbatch", codes)[:2] == (code, is_requeued)


@pytest.mark.parametrize(
    ("code", "is_requeued"),
    [(0, False), (75, True), (137, True), (1, False), (2, False), (3, False), (130, False)],
)
def test_a_task_of_an_array_is_requeued_by_its_own_code(submit, code, is_requeued):
    """Saved, or killed; not where the same would happen again."""
    assert submit("slurm-array.sbatch", str(code))[:2] == (code, is_requeued)


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm-array.sbatch"])
def test_requeues_are_bounded_and_end_with_a_cancelled_job(submit, script):
    """After a hundred restarts, and for a job that is not running any more."""
    assert submit(script, "137", restarts=100)[:2] == (137, False)
    state = "RUNNING" if "array" in script else "CANCELLED"  # of the coordinator's as well
    if state == "CANCELLED":
        assert submit(script, "75", state=state)[:2] == (75, False)
    assert submit(script, "75", restarts=99)[1]


def test_jobs_that_share_a_node_have_different_ports(submit):
    """By the job's number; each node knows whether it coordinates."""
    _, _, (first, second) = submit("slurm.sbatch", "0 0")
    assert "--rdzv-endpoint n1:13457" in first
    assert "is_host=1" in first
    assert "--rdzv-endpoint n1:13457" in second
    assert "is_host=0" in second
    assert "--rdzv-endpoint n1:13456" in submit("slurm-array.sbatch", "0")[2][-1]


@pytest.mark.parametrize(
    ("script", "codes"), [("slurm.sbatch", "0 0"), ("slurm-array.sbatch", "0")]
)
def test_a_script_is_run_by_the_same_jobs(submit, script, codes):
    """The command comes before the options of machines, and what is the script's own stays behind it."""
    words = ("run", "--max-restarts", "9", "train.py", "--lr", "1")
    code, _, launched = submit(script, codes, words=words)
    assert code == 0
    for line in launched:
        assert line.startswith("run --")
        assert line.endswith(" --max-restarts 9 train.py --lr 1")
        assert "--rdzv-endpoint n1:1345" in line
