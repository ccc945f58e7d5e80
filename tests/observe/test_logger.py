"""The text log: its format, its readers, its behaviour on failing disks."""

import io
import logging
import os
import subprocess
import sys
import warnings
from datetime import datetime, timezone

import pytest

from ddp_runner.observe.logger import (
    DDPLogger,
    LogLine,
    format_record,
    install_root_handler,
    parse_line,
    split_records,
)

AT = datetime(2026, 11, 20, 19, 47, 20, 123_456, tzinfo=timezone.utc)


@pytest.mark.parametrize("rank", [None, 0, 12])
@pytest.mark.parametrize("step", [None, 60])
@pytest.mark.parametrize("message", ["loss 2.5", "", "a | b step 3", "ünïcode"])
def test_a_record_reads_back_as_it_was_written(rank, step, message):
    """Parsing a formatted record gives its level, rank, step and message."""
    line = format_record("INFO", message, rank=rank, step=step, at=AT)
    parsed = parse_line(line.removesuffix("\n"))
    assert parsed == LogLine(level="INFO", rank=rank, step=step, message=message)


def test_the_format_is_the_documented_one():
    """The line format is a contract: people grep it."""
    line = format_record("INFO", "hello\nworld\r\n", rank=1, step=60, at=AT)
    assert line == "2026-11-20 19:47:20.123 INFO    rank 1 step 60 | hello\n  world\n"


@pytest.mark.parametrize("text", ["", "loss 2.5", "  world", "2026-11-20 19:47:20.123 INFO hello"])
def test_other_text_is_no_record(text):
    """Raw output and continuation lines do not parse."""
    assert parse_line(text) is None


def test_a_record_glued_to_a_torn_line_is_cut_off():
    """Two records on one line, the first torn by a kill, are read as two; one record stays whole."""
    record = format_record("INFO", "x", rank=1, step=None, at=AT).rstrip()
    assert split_records("torn" + record) == ["torn", record]
    assert split_records(record) == [record]
    assert split_records("no record") == ["no record"]


def test_records_go_to_the_file_with_the_default_step(tmp_path):
    """A record carries its own step, else the logger's; debug records need ``debug``."""
    path = tmp_path / "rank_1.log"
    with DDPLogger(rank=1, path=path) as log:
        log.debug("hidden")
        log.info("a")
        log.step = 7
        log.warning("b")
        log.error("c", step=9)
    with DDPLogger(rank=1, path=path, debug=True) as log:
        log.debug("d")
    lines = [parse_line(line) for line in path.read_text().splitlines()]
    reported = [(line.level, line.step, line.message) for line in lines]
    expected = [("INFO", None, "a"), ("WARNING", 7, "b"), ("ERROR", 9, "c"), ("DEBUG", None, "d")]
    assert reported == expected


def test_records_of_many_processes_never_interleave(tmp_path):
    """Each record is one write: lines of four processes on one file stay whole."""
    path = tmp_path / "rank_0.log"
    script = (
        "import sys; from pathlib import Path; from ddp_runner.observe.logger import DDPLogger\n"
        "log = DDPLogger(rank=int(sys.argv[2]), path=Path(sys.argv[1]))\n"
        "for n in range(300): log.info(f'{n} ' + 'x' * 500)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), str(rank)]) for rank in range(4)
    ]
    assert [writer.wait(timeout=200) for writer in writers] == [0] * 4
    # Who opens the file while another's record is half in it takes that for a torn line, and ends it.
    lines = [parse_line(line) for line in path.read_text().splitlines() if line]
    assert len(lines) == 1200
    for rank in range(4):
        mine = [line.message for line in lines if line is not None and line.rank == rank]
        assert mine == [f"{n} " + "x" * 500 for n in range(300)]


def test_without_a_path_records_go_to_descriptor_two(tmp_path):
    """Records, Python's own stderr and writes from C share the file behind descriptor 2."""
    script = (
        "import ctypes, sys; from ddp_runner.observe.logger import DDPLogger\n"
        "DDPLogger(rank=3).info('one'); print('two', file=sys.stderr)\n"
        "ctypes.CDLL(None).write(2, b'three\\n', 6)\n"
    )
    path = tmp_path / "rank_3.log"
    with path.open("wb") as file:
        subprocess.run([sys.executable, "-c", script], stderr=file, check=True, timeout=200)
    first, *rest = path.read_text().splitlines()
    assert parse_line(first).message == "one"
    assert rest == ["two", "three"]


def test_a_stream_without_descriptor_works():
    """Notebooks replace the streams by objects that have no descriptor."""
    stream = io.StringIO()
    DDPLogger(rank=None, stream=stream).info("hello")
    assert parse_line(stream.getvalue().rstrip()).message == "hello"


def test_a_full_disk_costs_records_not_the_training(tmp_path, monkeypatch):
    """A record that does not fit is counted, and nothing is raised; the outage and its end are said once."""
    for name in ("open_to_append", "open_to_append_anywhere"):
        full = f"ddp_runner.observe.logger.{name}"
        monkeypatch.setattr(full, lambda path: os.open("/dev/full", os.O_WRONLY))
    path, said = tmp_path / "rank_0.log", []
    with DDPLogger(rank=0, path=path) as log:
        log.report_outages(path, said.append)
        log.info("a")
        log.info("b")
        assert log.records_lost == 2
        monkeypatch.undo()
        log.info("c")
    assert said == [
        f"{path} cannot be written (No space left on device); training continues without it",
        f"{path} is written again; 2 writes were lost",
    ]
    assert parse_line(path.read_text().rstrip()).message == "c"


def test_a_record_never_continues_a_torn_line(tmp_path):
    """Opening a log whose last line was torn by a kill begins a new line."""
    path = tmp_path / "rank_0.log"
    path.write_bytes(b"torn")
    with DDPLogger(rank=0, path=path) as log:
        log.info("whole")
    torn, whole = path.read_text().splitlines()
    assert torn == "torn"
    assert parse_line(whole).message == "whole"


def test_an_unknown_level_is_an_error():
    """``log`` takes the known levels, in any case, and nothing else."""
    stream = io.StringIO()
    log = DDPLogger(rank=0, stream=stream)
    log.log("warning", "x")
    assert parse_line(stream.getvalue().rstrip()).level == "WARNING"
    with pytest.raises(ValueError, match="DEBUG, STEP, DETAIL, INFO, WARNING, ERROR"):
        log.log("fatal", "x")


def test_logging_and_warnings_are_routed_and_given_back():
    """While installed, library output becomes records; afterwards everything is as before."""
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    undo = install_root_handler(DDPLogger(rank=0, stream=stream))
    try:
        logging.getLogger("lib").warning("number %d", 5)
        logging.getLogger("lib").info("not asked for")
        logging.getLogger("lib").warning("number %d", "five")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn_explicit("old", DeprecationWarning, "file.py", 12)
        logging.getLogger("lib").error("failed", exc_info=KeyError("k"))
    finally:
        undo()
    lines = stream.getvalue().splitlines()
    records = [parse_line(line) for line in lines if not line.startswith("  ")]
    assert records[0].message == "lib: number 5"
    assert "do not fit" in records[1].message
    assert records[2].message == "DeprecationWarning: old (file.py:12)"
    assert (records[3].level, records[3].message) == ("ERROR", "lib: failed")
    assert lines[-1] == "  KeyError: 'k'"
    assert logging.getLogger().handlers == before
