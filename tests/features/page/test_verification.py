"""Checkpoints that the page reads whole: only when asked, and what came of it stays with the file as it was."""

from __future__ import annotations

import os
import threading

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.features.page.verification import Verifications
from tests.checkpoint.states import save
from tests.processes import poll


def verdicts(verified, folder):
    return {entry.step: verified.of(entry) for entry in Catalog(folder).entries()}


def test_content_is_read_when_it_is_asked_for(tmp_path):
    """One byte that has turned is found, and a file that changes is not what was read."""
    for step in (1, 2):
        save(tmp_path, step)
    damaged = Catalog(tmp_path).entries()[0].path
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    verified = Verifications()
    assert set(verdicts(verified, tmp_path).values()) == {""}
    assert verified.begin(tmp_path)
    open_ones = {"", "is being read"}
    poll(lambda: not open_ones & set(verdicts(verified, tmp_path).values()), what="both")
    assert verdicts(verified, tmp_path) == {
        1: "yes",
        2: "its SHA-256 is not the one in its manifest",
    }
    os.utime(damaged, (1, 1))
    assert verdicts(verified, tmp_path)[2] == ""


def test_one_file_is_read_at_a_time(tmp_path):
    """However often it is asked for; a folder that is gone is none of its trouble."""
    verified = Verifications()
    with verified._is_busy:
        assert not verified.begin(tmp_path)
    assert verified.begin(tmp_path / "gone")
    poll(lambda: verified.begin(tmp_path), what="its turn")
    poll(lambda: threading.active_count() == 1 or not verified._is_busy.locked(), what="its end")
