"""What a process prints while the disk has no room."""

from __future__ import annotations

import os

from ddp_runner.rank.runtime import lossy_text


def test_printing_to_a_full_disk_raises_nothing():
    """Lines are dropped; /dev/full answers as a full disk does."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = lossy_text(descriptor)
    for number in range(1000):
        print("line", number, file=stream)
    stream.flush()
    os.close(descriptor)


def test_printing_to_a_disk_with_room_loses_nothing(tmp_path):
    """Control: every line arrives, whatever its characters, as soon as it ends."""
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    stream = lossy_text(descriptor)
    for number in range(1000):
        print("line", number, "ä\udce4", file=stream)
    expected = "".join(f"line {number} ä\\udce4\n" for number in range(1000))
    assert (tmp_path / "out").read_text(encoding="utf-8") == expected
    assert stream.fileno() == descriptor
    os.close(descriptor)
