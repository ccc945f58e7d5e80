"""Which GPU a rank takes and when, without one."""

from __future__ import annotations

import time

import pytest
import torch

from ddp_runner.training.local_runtime import visible_gpu
from ddp_runner.training.workload import await_free

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [(0, 8, "cuda:0"), (7, 8, "cuda:7"), (3, 1, "cuda:0"), (5, 4, "cuda:1"), (2, 0, "cuda:2")],
)
def test_a_rank_takes_its_own_number_of_those_it_can_see(local_rank, visible, expected):
    """One that is shown a single GPU takes that one, whatever its own number is."""
    assert visible_gpu(local_rank, visible) == expected


def test_a_replacement_waits_until_its_gpu_is_as_free_as_it_was():
    """The driver takes a while to take a dead process's context down."""
    free = iter([10, 500, 985, 1000])
    assert await_free(CPU, 1000, look=lambda _: next(free)) == 985


def test_a_replacement_does_not_wait_for_ever():
    """Somebody else may have taken that memory; then it is tried with what there is."""
    assert await_free(CPU, 1000, look=lambda _: 10, timeout_s=0.05) == 10


def test_a_replacement_does_not_wait_for_what_somebody_else_has_taken():
    """Another process on the same GPU: its memory does not come back, and nothing more gets free."""
    free = iter([10, 400, *[500] * 1000])
    begun_s = time.monotonic()
    assert await_free(CPU, 1000, look=lambda _: next(free), still_s=0.3) == 500
    assert await_free(CPU, 1000, look=lambda _: 10, first_s=0.3) == 10, "none of it at all"
    assert time.monotonic() - begun_s < 5, "not the whole time-out"


def test_nobody_waits_where_it_is_not_known_what_was_free():
    """Control: the first process of a rank, and every rank on the CPU."""
    assert await_free(CPU, 0) == 0
