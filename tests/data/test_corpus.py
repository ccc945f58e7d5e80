"""Text corpora: what is found, how it splits, and what bytes a window holds."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from ddp_runner.data.text.corpus import (
    fingerprint,
    scan_standard_library,
    scan_text_files,
    split_by_file,
    standard_library_root,
)
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.tasks.bytes_lm import ByteWindows
from tests.processes import open_files_in


@pytest.fixture
def folder(tmp_path):
    """A folder with text, a binary file, an empty one, a dead link, a linked folder and a pipe."""
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b" / "two.txt").write_bytes(b"2" * 70)
    (root / "a.txt").write_bytes(b"1" * 30)
    (root / "z.md").write_bytes(b"3" * 200)
    (root / "empty.txt").touch()
    (root / "image.bin").write_bytes(b"PNG\0data")
    (root / ".git" / "config").write_text("not text of the user")
    (root / "dead").symlink_to(root / "nowhere")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "o.txt").write_text("outside")
    (root / "linked").symlink_to(tmp_path / "outside")
    os.mkfifo(root / "pipe")
    return root


def test_scan_finds_text_sorted_and_counts_what_it_skips(folder):
    """Text files come in a fixed order; binary and unreadable ones are counted, links not followed."""
    scanned = scan_text_files(folder)
    assert [str(f.relative_to(folder)) for f in scanned.files] == ["a.txt", "z.md", "b/two.txt"]
    assert scanned.sizes == (30, 200, 70)
    assert scanned.skipped_binary == 1
    assert len(scanned.skipped_unreadable) == 1
    assert "dead: No such file" in scanned.skipped_unreadable[0]


def test_suffixes_choose_among_the_files(folder):
    """With suffixes, other files are not even opened."""
    assert len(scan_text_files(folder, suffixes=(".md",)).files) == 1


def test_single_file_is_a_corpus(folder):
    """``--data FILE`` works as ``--data FOLDER`` does."""
    assert scan_text_files(folder / "z.md").total_bytes == 200


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", "existing file or folder"), ("image.bin", "1 binary"), ("pipe", "found none")],
)
def test_no_text_is_bad_input_that_names_the_path(folder, name, message):
    """What cannot be a corpus is the user's to fix, reported by option and path."""
    with pytest.raises(BadInputError, match=message) as caught:
        scan_text_files(folder / name)
    assert caught.value.option == "--data"
    assert str(caught.value.value).endswith(name)


def test_nul_after_the_first_8_kib_is_text(tmp_path):
    """Control: only the beginning of a file decides whether it is binary."""
    (tmp_path / "late").write_bytes(b"x" * 8192 + b"\0")
    assert scan_text_files(tmp_path).skipped_binary == 0


def test_standard_library_has_sources_and_no_tests():
    """The default corpus is the interpreter's own library, without packages and tests."""
    scanned = scan_standard_library()
    parts = {part for f in scanned.files for part in f.relative_to(standard_library_root()).parts}
    assert scanned.total_bytes > 5_000_000
    assert not parts & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert scanned == scan_standard_library()


def test_scanning_needs_no_torch():
    """The supervisor may scan, and never imports torch."""
    code = "import sys, ddp_runner.data.text.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _spans(part):
    return list(zip(part.files, part.starts, part.sizes, strict=True))


def test_split_is_by_file_and_deterministic(tmp_path):
    """Whole files go one way or the other, near the fraction asked for, again the same."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_bytes(b"x" * (50 + number))
    scanned = scan_text_files(tmp_path)
    train, validation = split_by_file(scanned, validation_fraction=0.2, seed=7)
    assert sorted(_spans(train) + _spans(validation)) == sorted(_spans(scanned))
    assert 0.1 <= validation.total_bytes / scanned.total_bytes <= 0.2
    assert split_by_file(scanned, validation_fraction=0.2, seed=7) == (train, validation)
    assert split_by_file(scanned, validation_fraction=0.2, seed=8) != (train, validation)


def test_single_file_is_split_by_position(tmp_path):
    """The end of a lone file validates, its beginning trains, and no byte is in both."""
    (tmp_path / "t").write_bytes(b"a" * 90 + b"b" * 10)
    train, validation = split_by_file(scan_text_files(tmp_path), validation_fraction=0.1, seed=0)
    assert _spans(train) == [(tmp_path / "t", 0, 90)]
    assert bytes(ByteWindows(validation, seq_len=9)[0].tolist()) == b"b" * 10


def test_few_large_files_still_give_the_validation_its_part(tmp_path):
    """Where no file is small enough, or only a tiny one, the largest file's end makes it up."""
    (tmp_path / "large").write_bytes(b"x" * 10_000)
    (tmp_path / "tiny").write_bytes(b"y" * 10)
    train, validation = split_by_file(scan_text_files(tmp_path), validation_fraction=0.1, seed=0)
    assert validation.total_bytes == 1001
    assert train.total_bytes == 9009


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_split_leaves_neither_side_empty(tmp_path, fraction):
    """Two bytes are enough for a split."""
    (tmp_path / "t").write_bytes(b"ab")
    parts = split_by_file(scan_text_files(tmp_path), validation_fraction=fraction, seed=0)
    assert [part.total_bytes for part in parts] == [1, 1]


def test_one_byte_cannot_be_split(tmp_path):
    """There is nothing to validate on."""
    (tmp_path / "t").write_bytes(b"a")
    with pytest.raises(BadInputError, match="only 1 bytes"):
        split_by_file(scan_text_files(tmp_path), validation_fraction=0.5, seed=0)


def test_windows_are_the_concatenation_cut(tmp_path):
    """The windows are the files' bytes end to end, across file borders, without the remainder."""
    content = bytes(range(250))
    for name, part in (("a", content[:3]), ("b", content[3:100]), ("c", content[100:])):
        (tmp_path / name).write_bytes(part)
    windows = ByteWindows(_text(tmp_path, content), seq_len=15)
    assert len(windows) == 15
    assert b"".join(bytes(windows[i].tolist()) for i in range(15)) == content[:240]
    assert [w.tolist() for w in windows.__getitems__([4, 0])] == [
        windows[4].tolist(),
        windows[0].tolist(),
    ]
    with pytest.raises(IndexError):
        windows[15]


def _text(tmp_path, content):
    # The first byte is NUL, so that the scan would call "a" binary: list the spans by hand.
    scanned = scan_text_files(tmp_path)
    files = tuple(tmp_path / name for name in "abc")
    return type(scanned)(root=tmp_path, files=files, starts=(0, 0, 0), sizes=(3, 97, 150))


def test_windows_open_few_maps_and_travel_without_them(tmp_path, monkeypatch):
    """Maps are bounded, and a pickled dataset carries none."""
    monkeypatch.setattr("ddp_runner.tasks.bytes_lm._OPEN_MAPS_MAX", 2)
    for number in range(6):
        (tmp_path / str(number)).write_bytes(b"abcdefghij")
    windows = ByteWindows(scan_text_files(tmp_path), seq_len=9)
    assert {bytes(windows[i].tolist()) for i in (0, 3, 5, 0, 1, 2, 4)} == {b"abcdefghij"}
    assert len(open_files_in(tmp_path)) == 2
    assert pickle.loads(pickle.dumps(windows))[3].tolist() == windows[3].tolist()


def test_too_little_text_says_how_much_there_is_and_is_needed(tmp_path):
    """The message holds both figures."""
    (tmp_path / "t").write_bytes(b"x" * 12)
    with pytest.raises(BadInputError, match=r"at least 129 bytes .* has 12"):
        ByteWindows(scan_text_files(tmp_path), seq_len=128)


def test_file_cut_short_since_the_scan_is_an_error_not_a_crash(tmp_path):
    """A map over a shorter file would end the worker by SIGBUS."""
    (tmp_path / "t").write_bytes(b"x" * 100)
    windows = ByteWindows(scan_text_files(tmp_path), seq_len=9)
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(BadInputError, match="had 100 bytes, now 0"):
        windows[0]


def test_fingerprint_follows_names_and_sizes_not_the_place(tmp_path):
    """The same files elsewhere are the same data; a changed size is not."""
    prints = []
    for place, extra in (("here", ""), ("there", ""), ("changed", "!")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "t.txt").write_text("text" + extra)
        scanned = scan_text_files(tmp_path / place)
        prints.append(fingerprint(scanned.files, scanned.sizes, scanned.root))
    assert prints[0] == prints[1] != prints[2]
    assert len(prints[0]) == 64
