"""Files as shards: every position leads to the items behind it, and what is damaged is never left out in silence."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tarfile

import pytest

from ddp_runner.data.shard_files import JsonLines, TarSamples, TextLines
from ddp_runner.kernel.rules.errors import BadInputError


def assert_goes_on_anywhere(stream, shard=0):
    """From each position the items behind it come, also where the position went through JSON."""
    random.seed(5)
    whole = list(stream.read(shard, None))
    items = [item for item, _ in whole]
    for number, (_, position) in enumerate(whole, start=1):
        again = stream.read(shard, json.loads(json.dumps(position)))
        assert [item for item, _ in again] == items[number:]
    return items


def archive(path, files, **how):
    with tarfile.open(path, "w", **how) as tar:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            if content is None:
                entry.type = tarfile.DIRTYPE
            else:
                entry.size = len(content)
            tar.addfile(entry, None if content is None else io.BytesIO(content))
    return path


FILES = (
    ("set", None),
    ("set/a.jpg", b"x" * 700),
    ("set/a.json", b"{}"),
    ("set/b.jpg", b""),
    ("set/b.seg.png", b"y" * 512),
    ("other/b.jpg", b"z"),
    ("other/" + "long" * 60 + ".txt", b"of a long name"),
    ("\u00e9t\u00e9.txt", b"last"),
)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_lines_come_from_any_position_on(tmp_path, ending):
    (tmp_path / "a.txt").write_bytes(
        ending.join(["one", "", "zwei \u00fc ", "  ", "three"]).encode()
    )
    lines = TextLines(tmp_path / "*.txt")
    assert assert_goes_on_anywhere(lines) == ["one", "zwei \u00fc ", "three"]
    assert (lines.shards, lines.lengths) == (1, [3])


def test_a_line_that_is_no_json_is_a_bad_item(tmp_path):
    """And so is one that is no UTF-8; those behind it come."""
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n{oops\n[2]\n"\xff"\nnull\n')
    items = [item for item, _ in JsonLines([tmp_path / "a.jsonl"]).read(0, None)]
    assert [item for item in items if not isinstance(item, Exception)] == [{"n": 1}, [2], None]
    assert str(items[1]).startswith("the line at byte 9: Expecting property name")
    assert str(items[3]).startswith("the line at byte 19: 'utf-8' codec can't decode")
    assert JsonLines([tmp_path / "a.jsonl"]).lengths == [5]


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path):
    """As some editors write it; a file of nothing else has no line."""
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf[1]\n[2]\n")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf\n")
    lines = JsonLines(tmp_path / "*.jsonl")
    assert assert_goes_on_anywhere(lines) == [[1], [2]]
    assert (lines.lengths, list(lines.read(1, None))) == ([2, 0], [])


def test_compressed_files_are_read_from_any_position(tmp_path):
    """Positions are those of the content."""
    content = b"".join(b"[%d]\n" % n for n in range(50))
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    lines = JsonLines(tmp_path / "*.jsonl*")
    assert assert_goes_on_anywhere(lines, 1) == [[n] for n in range(50)]
    assert list(lines.read(1, 20)) == list(lines.read(0, 20))
    assert lines.lengths == [50, 50]
    plain = archive(tmp_path / "a.tar", FILES)
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    samples = TarSamples([plain, tmp_path / "b.tar.gz"])
    assert assert_goes_on_anywhere(samples, 1) == assert_goes_on_anywhere(samples, 0)


def test_a_compressed_file_that_is_cut_short_is_an_error(tmp_path):
    content = gzip.compress(b"[1]\n" * 5000)
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(EOFError):
        list(JsonLines([tmp_path / "a.jsonl.gz"]).read(0, None))


def test_what_cannot_be_read_is_refused_at_once(tmp_path, monkeypatch):
    """In one line, with what is to be looked at, and before a worker tries it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "empty.txt").touch()
    for files, expected in (
        ("*.json", f"TextLines=*.json: matches no file (the working directory is {tmp_path})"),
        ([], f"TextLines=[]: matches no file (the working directory is {tmp_path})"),
        ("a", "TextLines=a: is a folder: give a pattern, such as a/*"),
        (["gone.txt"], "TextLines=gone.txt: cannot be read: No such file or directory"),
        (["a"], "TextLines=a: cannot be read: Is a directory"),
        ("*.txt", "TextLines=empty.txt: is empty, and so is each other file"),
    ):
        with pytest.raises(BadInputError) as raised:
            TextLines(files)
        assert str(raised.value) == expected
    (tmp_path / "a" / "b.txt").write_text("one")
    assert TextLines("**/*").names == ["a/b.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_nobody_may_read_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(BadInputError, match="cannot be read: Permission denied"):
        TextLines(tmp_path / "*.txt")


def test_sizes_are_given_where_they_can_be_compared(tmp_path):
    """A compressed file has more in it than one of its size that is not."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("three")
    assert TextLines(tmp_path / "*").sizes == [3, 5]
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"four"))
    assert TextLines(tmp_path / "*").sizes == []


def test_files_are_shards_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    lines = TextLines(tmp_path / "*.txt")
    assert [next(iter(lines.read(shard, None)))[0] for shard in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_samples_of_an_archive_come_from_any_position_on(tmp_path, form):
    """Long names have headers of their own, in front of that of the file: a position is before those."""
    path = archive(tmp_path / "a.tar", FILES, format=form, encoding="utf-8")
    samples = TarSamples([path])
    found = assert_goes_on_anywhere(samples)
    assert [sample["__key__"] for sample in found] == [
        *("set/a", "set/b", "other/b", "other/" + "long" * 60, "\u00e9t\u00e9")
    ]
    assert found[0] == {"__key__": "set/a", "jpg": b"x" * 700, "json": b"{}"}
    assert found[1] == {"__key__": "set/b", "jpg": b"", "seg.png": b"y" * 512}
    assert samples.lengths == [5]


def test_an_archive_without_its_end_is_read(tmp_path):
    """As one that somebody still writes, or that was made by putting others behind each other."""
    path = archive(tmp_path / "a.tar", FILES[:4])
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
        end = last.offset_data + last.size
    path.write_bytes(path.read_bytes()[:end])
    assert len(assert_goes_on_anywhere(TarSamples([path]))) == 2


@pytest.mark.parametrize("cut", ["in a file", "in a header"])
def test_an_archive_that_is_cut_short_is_an_error(tmp_path, cut):
    path = archive(tmp_path / "a.tar", FILES)
    with tarfile.open(path) as tar:
        member = tar.getmembers()[4]
    place = member.offset_data + 100 if cut == "in a file" else member.offset + 100
    path.write_bytes(path.read_bytes()[:place])
    with pytest.raises(tarfile.ReadError):
        list(TarSamples([path]).read(0, None))


def test_a_damaged_header_is_an_error_not_the_end(tmp_path):
    """For Python's tarfile an archive ends there, without a word."""
    path = archive(tmp_path / "a.tar", FILES)
    with tarfile.open(path) as tar:
        member = tar.getmembers()[4]
    content = bytearray(path.read_bytes())
    content[member.offset + 10] ^= 1
    path.write_bytes(content)
    with pytest.raises(tarfile.ReadError, match=f"no file begins at byte {member.offset}"):
        list(TarSamples([path]).read(0, None))


def test_nothing_is_counted_before_somebody_asks(tmp_path):
    """Counting reads all files."""

    class Counted(TextLines):
        def _count(self, name):
            raise AssertionError(name)

    (tmp_path / "a.txt").write_text("one")
    stream = Counted(tmp_path / "*.txt")
    assert [item for item, _ in stream.read(0, None)] == ["one"]
