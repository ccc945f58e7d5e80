"""``run`` with the options of accelerate's launcher, and what ``accelerate config`` has stored."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ready

SCRIPT = """
import os
try:
    import accelerate
except ImportError:
    pass
names = ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
print("seen", *(os.environ.get(name, "-") for name in names), flush=True)
"""


def seen(words, folder, *, script=SCRIPT, stored="", **environment):
    """Exit code and output of ``run`` with ``words`` before the script."""
    (folder / "train.py").write_text(script)
    if stored:
        file = folder / "hf" / "accelerate" / "default_config.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(stored)
    ended = subprocess.run(
        [sys.executable, "-m", "ddp_runner", "run", *words, "train.py"],
        cwd=folder,
        env={**os.environ, **ready.environment(), "HF_HOME": str(folder / "hf"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_options_of_accelerate_reach_the_ranks(tmp_path):
    """By the names that its launcher has, with underscores."""
    words = ["--num_processes", "2", "--cpu", "--mixed_precision=bf16", "--num_machines", "1"]
    code, shown = seen(words, tmp_path, stored="mixed_precision: fp16\n")
    assert code == 0, shown
    assert "seen 2 bf16 true" in shown


def test_a_script_with_accelerate_gets_what_is_stored(tmp_path):
    """And a line says so; what is in the environment already stays."""
    stored = "mixed_precision: bf16\nuse_cpu: true\ndistributed_type: FSDP\n"
    code, shown = seen(["--nproc", "1"], tmp_path, stored=stored)
    assert code == 0, shown
    assert "seen 1 bf16 true" in shown
    assert "default_config.yaml: mixed_precision=bf16, use_cpu=true is taken" in shown
    assert "distributed_type=FSDP is not taken" in shown


@pytest.mark.parametrize("stored", ["mixed_precision: no\nuse_cpu: false\n", "- [", ""])
def test_where_nothing_is_stored_nothing_is_set(stored, tmp_path):
    """Also by a file that nobody can read."""
    code, shown = seen(["--nproc", "1"], tmp_path, stored=stored)
    assert code == 0, shown
    assert "seen 1 - -" in shown
    assert ("cannot be read" in shown) == (stored == "- [")


@pytest.mark.parametrize(
    ("words", "script", "answer"),
    [
        (["--mixed_precision", "bf16"], "print()", "which this script does not import"),
        (["--mixed_precision", "int4"], SCRIPT, "must be no, fp16, bf16, fp8"),
        (["--num_machines", "2"], SCRIPT, "--rdzv-endpoint: is needed with several machines"),
        (
            ["--num_machines=2", "--num_processes=4", "--main_process_ip=a"],
            SCRIPT,
            "--num-processes=4: counts the ranks of all machines",
        ),
    ],
)
def test_what_nobody_reads_is_refused(words, script, answer, tmp_path):
    """In one line, before anything starts."""
    code, shown = seen(words, tmp_path, script=script)
    assert code == 2
    assert answer in shown
