"""What a run begins with, by its command line: pointers lead somewhere, what is none is one line."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.scenarios.conftest import NO_SPARE, PATIENT
from tests.scenarios.harness import Run

SHORT = ("-b", 8, "--max-steps", 6, "num_workers=0", "save_every_steps=3", "log.display=plain")


@pytest.fixture(scope="module")
def earlier(made_once):
    return made_once(*SHORT, *PATIENT)


def test_a_run_begins_with_the_weights_that_a_folder_leads_to(earlier, tmp_path):
    """As with the file itself: a folder means its newest checkpoint, which its pointer names."""
    folder = earlier.checkpoints
    file = folder / (folder / "last").read_text().strip()
    digests = []
    for number, path in enumerate((file, folder)):
        with Run(tmp_path / str(number), *SHORT, "--init-from", path, *PATIENT, NO_SPARE) as run:
            assert run.wait() == 0, run.console
        digests.append(run.digest)
    assert len(set(digests)) == 1
    assert earlier.digest not in digests


def with_model(path, source, model):
    content = torch.load(source, weights_only=True)
    torch.save({**content, "model": model(content["model"])}, path)


def poisoned(model):
    name = next(name for name, value in model.items() if value.is_floating_point())
    return {**model, name: torch.full_like(model[name], torch.nan)}


class RunsCode:
    def __reduce__(self):
        return (open, ("made_by_code", "w"))


# Seen while settings are read, and once there is a model; all others: tests/checkpoint/test_weights.py.
INIT = {
    "code": (
        lambda path, source: torch.save({"w": RunsCode()}, path),
        "holds objects that could run code; refused (io.open)",
    ),
    "nan": (lambda p, s: with_model(p, s, poisoned), "holds a value that is not finite (NaN or"),
}


@pytest.mark.parametrize("kind", INIT)
def test_weights_that_are_none_are_one_line(earlier, tmp_path, kind):
    """Exit 2 before a folder is made; nothing is run that a file holds."""
    make, reason = INIT[kind]
    path = tmp_path / "w.pt"
    make(path, earlier.checkpoints / "step_00000006.pt")
    with Run(tmp_path, *SHORT, "--init-from", path) as run:
        assert run.wait() == 2, run.console
    # What takes long says what it is at, before.
    lines = run.console.splitlines()
    (line,) = [line for line in lines if not line.startswith(("importing ", "building "))]
    assert line.startswith(f"ddp_runner: error: --init-from={path}: ")
    assert reason in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["console.txt", "tmp", "w.pt"]


@pytest.fixture
def folder(earlier, tmp_path):
    """One with the checkpoints of the earlier run."""
    shutil.copytree(earlier.checkpoints, tmp_path / "checkpoints")
    return tmp_path


def test_a_checkpoint_whose_model_is_none_is_one_line(folder):
    """Exit 2, and it stays where it is: it may be of a version that is yet to come."""
    newest = folder / "checkpoints" / "step_00000006.pt"
    with_model(newest, newest, lambda model: 5)
    newest.with_suffix(".json").unlink()  # it is whole by its archive
    with Run(folder, *SHORT, "--max-steps", 9, *PATIENT) as again:
        assert again.wait() == 2, again.console
    assert f"error: --resume={newest}: holds no model" in again.console
    assert newest.exists()


def test_a_folder_in_which_no_checkpoint_can_be_loaded_is_one_line(folder):
    """Exit 1 and the way on; the run does not begin from nothing, and nothing of ours is shown."""
    for path in (folder / "checkpoints").glob("*.pt"):
        path.write_bytes(b"torn")
    with Run(folder, *SHORT, "--max-steps", 9, *PATIENT) as again:
        assert again.wait() == 1, again.console
    errors = [line for line in again.console.splitlines() if "ERROR" in line or "error" in line]
    (line,) = errors
    assert "can be loaded; --resume none sets them aside and starts fresh" in line
    assert "Traceback" not in again.console
