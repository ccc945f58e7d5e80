"""Which size is tried next, what a try says, and that the words to paste ask for what they say."""

import pytest

from ddp_runner.cli.parser import parse_train
from ddp_runner.config import check_relations, resolve
from ddp_runner.core.batch_sizes import global_batch
from ddp_runner.core.settings import DataSettings
from ddp_runner.features.tuning.batch_search import (
    SIZE_MAX,
    Outcome,
    Tried,
    largest,
    next_size,
    outcome,
    usable,
    uses,
)
from ddp_runner.kernel.rules.exits import ExitCode


def search(*, most, first, share=0):
    """The sizes that are tried where those up to ``most`` fit."""
    tried = []
    while (size := next_size(tried, first=first, share=share)) is not None:
        assert size not in [one.size for one in tried], "no size is tried twice"
        tried.append(Tried(size=size, fits=size <= most))
        assert len(tried) < 45
    return tried


def test_the_largest_size_is_found_to_an_eighth():
    """From wherever the search begins; the next one above it, an eighth larger, does not fit."""
    for first in [1, 7, 32, 1000]:
        for most in [1, 2, 3, 31, 32, 63, 100, 777, 5000, 123_456]:
            tried = search(most=most, first=first)
            found = largest(tried)
            assert found <= most < found + max(1, found // 8) + 1
            failing = min(one.size for one in tried if not one.fits)
            assert failing - found <= max(1, found // 8)
            assert len(tried) <= 25


def test_sizes_are_doubled_first_and_then_halfway():
    """In steps of a power of two, so that they stay round."""
    sizes = [one.size for one in search(most=100, first=16)]
    assert sizes == [16, 32, 64, 128, 96, 112, 104]
    sizes = [one.size for one in search(most=5, first=32)]
    assert sizes == [32, 16, 8, 4, 6, 5]


def test_a_search_ends_where_nothing_fits_and_where_all_does():
    """At single samples, and at a size that nobody means."""
    assert [one.size for one in search(most=0, first=8)] == [8, 4, 2, 1]
    assert largest(search(most=0, first=8)) == 0
    assert largest(search(most=10**9, first=8)) == SIZE_MAX


def test_with_a_given_step_sizes_cut_it_into_like_parts():
    """No size is larger than the share of a rank, nor leaves a small rest where a smaller size would not."""
    for share in [1, 12, 97, 100, 4096]:
        for most in [1, 5, 30, 100, 10_000]:
            tried = search(most=most, first=32, share=share)
            for one in tried:
                assert one.size <= share
                parts = -(-share // one.size)
                assert one.size == -(-share // parts)
            found = largest(tried)
            better = [usable(size, share=share) for size in range(found + 1, min(most, share) + 1)]
            assert not better or found >= max(better) * 0.85


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, Outcome.FITS),
        ({"used_share": 0.8}, Outcome.FITS),
        ({"used_share": 0.81}, Outcome.TOO_LARGE),
        ({"faults": ["out_of_memory"]}, Outcome.TOO_LARGE),
        ({"faults": ["out_of_memory"], "exit_code": ExitCode.FAILED}, Outcome.TOO_LARGE),
        ({"was_ended": True, "exit_code": ExitCode.INTERRUPTED}, Outcome.TOO_LARGE),
        ({"faults": ["rank_killed"]}, Outcome.FITS),  # repaired, as always
        ({"faults": ["rank_killed"], "exit_code": ExitCode.GAVE_UP}, Outcome.TOO_LARGE),
        ({"faults": ["rank_raised"], "exit_code": ExitCode.FAILED}, Outcome.BROKEN),
        ({"exit_code": ExitCode.BAD_USAGE}, Outcome.REFUSED),
    ],
)
def test_what_a_try_says_of_its_size(facts, expected):
    """A run that ran out of memory and repaired that does not fit; what fails for another reason ends it."""
    usual = {
        "exit_code": ExitCode.DONE,
        "faults": (),
        "was_ended": False,
        "used_share": 0.5,
        "share": 0.8,
    }
    assert outcome(**{**usual, **facts}) is expected


@pytest.mark.parametrize(
    ("found", "asked", "steps"),
    [
        (128, {"batch_size": 32}, [512]),
        (32, {"batch_size": 32}, [128]),
        (24, {"batch_size": 64}, [96, 256]),
        (100, {"batch_size": 32, "accumulation": 6}, [2400, 768]),
        (500, {"batch_size": 32, "accumulation": 6}, [12_000, 768]),
        (5, {"batch_size": 32, "accumulation": 2}, [40, 256]),
        (50, {"batch_size": 32, "global_batch_size": 400}, [400]),
        (100, {"batch_size": 32, "accumulation_total": 24}, [2400, 768]),
        (5, {"batch_size": 32, "accumulation_total": 8}, [40, 256]),
    ],
)
def test_the_words_to_use_make_steps_of_the_size_they_say(found, asked, steps):
    """They are settings that go together, and no batch is larger than what fits."""
    offered = uses(found, DataSettings(**asked), world_size=4)
    assert [use.step_samples for use in offered] == steps
    for use in offered:
        words = (*use.words.split(), "--nproc-per-node", "4", "num_workers=0")
        settings = resolve(command_line=parse_train(words).assignments).settings
        check_relations(settings)
        assert global_batch(settings.data, world_size=4) == use.step_samples
        assert (settings.data.micro_batch_size or settings.data.batch_size) <= found
