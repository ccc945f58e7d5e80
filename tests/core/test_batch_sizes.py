"""How a step's samples are cut in proportion to shares, and which shares are refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_runner.core.batch_sizes import cut, proposed_shares, refuse_wrong_shares
from ddp_runner.core.settings import DataSettings
from ddp_runner.data.order import share_span
from ddp_runner.kernel.rules.errors import BadInputError

shares = st.lists(st.integers(1, 1000), min_size=1, max_size=9)


@given(total=st.integers(0, 5000), numbers=shares)
def test_a_cut_has_every_sample_and_is_within_one_of_the_proportion(total, numbers):
    """Whatever the shares; nobody has one more or less than its part."""
    counts = cut(total, numbers)
    assert sum(counts) == total
    for count, number in zip(counts, numbers, strict=True):
        assert abs(count - Fraction(total * number, sum(numbers))) < 1


@given(total=st.integers(0, 500), ranks=st.integers(1, 9), number=st.integers(1, 7))
def test_equal_shares_cut_as_no_shares_do(total, ranks, number):
    """So that 1,1 is what a run without the setting computes."""
    equal = [share_span(total, rank=rank, world_size=ranks)[1] for rank in range(ranks)]
    assert list(cut(total, [number] * ranks)) == equal


def test_what_cannot_be_parted_goes_to_the_largest_remainder():
    """Of equal ones to the first."""
    assert cut(96, (3, 3, 2)) == (36, 36, 24)
    assert cut(24, (3, 2)) == (14, 10)
    assert cut(10, (3, 3, 2)) == (4, 4, 2)
    assert cut(2, (1, 1, 1)) == (1, 1, 0)


@pytest.mark.parametrize(
    ("numbers", "ranks", "words"),
    [
        ((3, 3), 3, "data.shares=3,3: must be a number for each of the 3 ranks, and is 2"),
        ((3, 3), 1, "data.shares=3,3: must be a number for the only rank, and is 2"),
        (
            (99, 1),
            2,
            (
                "data.shares=99,1: leaves rank 1 without one of the 16 samples of a step: take a larger"
                " batch, or a larger share for it"
            ),
        ),
    ],
)
def test_shares_that_do_not_fit_the_ranks_are_refused(numbers, ranks, words):
    """One line, with the cure."""
    with pytest.raises(BadInputError) as caught:
        refuse_wrong_shares(DataSettings(batch_size=8, shares=numbers), world_size=ranks)
    assert str(caught.value) == words


def test_shares_that_fit_are_accepted():
    """None of them fits any number of ranks."""
    refuse_wrong_shares(DataSettings(batch_size=8, shares=(3, 1)), world_size=2)
    refuse_wrong_shares(DataSettings(batch_size=8), world_size=5)


@pytest.mark.parametrize(
    ("own_s", "shares"),
    [
        ((0.03, 0.09), (3, 1)),
        ((0.09, 0.03), (1, 3)),
        ((0.02, 0.02, 0.03), (3, 3, 2)),
        ((0.03, 0.033), ()),  # within what one run measures otherwise than the next
        ((0.03, 0.03, 0.03), ()),
        ((0.0, 0.03), ()),  # nothing was measured
        ((0.001, 0.1), (8, 1)),  # as far as small numbers go
    ],
)
def test_shares_are_proposed_where_ranks_differ(own_s, shares):
    """Small numbers, by which all need about equally long for a step."""
    assert proposed_shares(own_s, total=96) == shares


def test_no_proposal_leaves_a_rank_without_a_sample():
    """Of four samples a rank that is eight times as slow still has one."""
    assert cut(4, proposed_shares((0.01, 0.08), total=4)) == (3, 1)
    assert proposed_shares((0.01, 0.08), total=2) == ()


@given(own_s=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6), total=st.integers(12, 4096))
def test_a_proposal_makes_no_step_slower(own_s, total):
    """The slowest rank of a step is at most as slow as with equal shares."""
    shares = proposed_shares(own_s, total=total)
    if shares:
        counts, equal = cut(total, shares), cut(total, (1,) * len(own_s))
        slowest = max(s * count for s, count in zip(own_s, counts, strict=True))
        assert slowest < max(s * count for s, count in zip(own_s, equal, strict=True))
        assert 0 not in counts
