"""Counts that train are named wherever the program keeps them, and those that are only shown are not."""

from __future__ import annotations

import pytest

from tests.training import odd_writers
from tests.training.test_loop_variables import names_found


@pytest.mark.parametrize("kind", odd_writers.CARRIED)
def test_a_count_that_trains_is_named_where_it_is_kept(tmp_path, kind):
    name, source = odd_writers.CARRIED[kind]
    assert name in names_found(tmp_path, source)


@pytest.mark.parametrize("kind", odd_writers.HARMLESS)
def test_what_is_only_shown_is_not_named_anywhere(tmp_path, kind):
    assert names_found(tmp_path, odd_writers.HARMLESS[kind]) == []
