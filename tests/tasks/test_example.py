"""The task that the README shows works as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from ddp_runner.core.settings import RunSettings, Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.starting.task_import import load_task

pytestmark = pytest.mark.usefixtures("clean_imports")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_task.py"


def load(**arguments):
    return load_task(Settings(run=RunSettings(task=str(EXAMPLE)), task=arguments))


def test_example_learns_its_rings():
    """Two hundred steps distinguish held-out points."""
    task = load()
    data = task.build_datasets()
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch, _ in zip(DataLoader(data.train, batch_size=64), range(200), strict=False):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    points, ring = data.validation.tensors
    right = (model.eval()(points).argmax(1) == ring).float().mean()
    assert right > 0.95


def test_example_takes_its_arguments():
    """``task.rings`` reaches the constructor, and a misspelt one is refused."""
    task = load(rings=4)
    assert task.build_model()(torch.zeros(2, 2)).shape == (2, 4)
    with pytest.raises(BadInputError, match="did you mean rings"):
        load(ring=4)
