"""Layers over ranks need equally many micro-batches of all: with shares as without."""

from __future__ import annotations

import pytest

from ddp_runner.config import from_flat
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.loading.equal_shares import refuse_unequal_shares

SHARES = {"data.shares": "3,3,2", "ddp.sync_batchnorm": True}


def refuse(total, **settings):
    refuse_unequal_shares(from_flat({**SHARES, **settings}), total, world_size=3)


def test_shares_that_cut_into_unequally_many_batches_are_refused_with_the_cure():
    """What is named there is accepted."""
    with pytest.raises(BadInputError) as caught:
        refuse(96, **{"data.batch_size": 32})
    assert str(caught.value) == (
        "ddp.sync_batchnorm=true: needs equally many micro-batches on all ranks, and of 96 samples 3"
        " ranks run 2, 2, 1 of 32: take one for each, by batch_size=36 global_batch_size=96, or leave"
        " out data.shares"
    )
    refuse(96, **{"data.batch_size": 36, "data.global_batch_size": 96})


def test_a_run_that_gives_ranks_up_has_no_shares_with_it():
    """Whether those of the others fit depends on who is left."""
    with pytest.raises(BadInputError, match=r"recovery\.min_ranks=2: must be 0 with"):
        refuse(96, **{"data.batch_size": 36, "recovery.min_ranks": 2})
