"""The page's table of checkpoints: what it says of each."""

from __future__ import annotations

import pytest

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.features.page.verification import COLUMNS, Verifications, checkpoint_rows
from tests.checkpoint.states import facts_of, state_of


@pytest.mark.parametrize(
    ("monitor", "value", "shown"),
    [
        ("all/accuracy", 0.75, "all/accuracy 0.7500"),
        ("validation_loss", 1.5, "validation_loss 1.5000"),
        ("", 1.5, "loss 1.5000"),
        ("all/accuracy", None, "-"),
    ],
)
def test_the_figure_that_counts_stands_there_by_its_name(tmp_path, monitor, value, shown):
    """An accuracy is no loss; files of older versions name none, and had one."""
    facts = facts_of(3, monitored=value, monitor=monitor)
    CheckpointStore(tmp_path, keep_last=2).save(state_of(3), facts)
    (row,) = checkpoint_rows(tmp_path, Verifications())
    assert tuple(row) == COLUMNS
    assert (row["step"], row["monitored"]) == ("3", shown)
    assert "loss" not in COLUMNS
