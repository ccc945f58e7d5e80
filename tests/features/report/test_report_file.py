"""``report --html`` and ``report --compare``: what they write and print, and what they refuse in one line."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace

import pytest

from ddp_runner.__main__ import main
from ddp_runner.observe.summary import write_summary
from tests.cli.test_commands import HARMLESS, HOSTILE, SUMMARY

POINTS = [{"step": step, "rank": 0, "loss": 9.0 - step} for step in range(1, 9)]


def run_in(folder, **fields):
    """The files of a run that has ended."""
    folder.mkdir(parents=True)
    write_summary(folder / "summary.json", replace(SUMMARY, **fields))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in POINTS))
    return str(folder)


@pytest.fixture
def a_plotly(tmp_path, monkeypatch):
    """A package of that name with a script in it, as the real one has."""
    script = tmp_path / "packages" / "plotly" / "package_data" / "plotly.min.js"
    script.parent.mkdir(parents=True)
    (script.parents[1] / "__init__.py").touch()
    script.write_text("const drawn = 'by plotly'")
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_a_run_becomes_one_file(tmp_path, a_plotly, capsys):
    """Of a run that has ended, and of one that goes on; a file that was there is replaced."""
    logs, file = run_in(tmp_path / "logs"), tmp_path / "out.html"
    file.write_text("old")
    assert main(["report", "-l", logs, "--html", str(file)]) == 0
    assert f"{file}: " in capsys.readouterr().out
    page = file.read_text()
    assert "const drawn = 'by plotly'" in page
    assert "What to improve first" in page
    (tmp_path / "logs" / "summary.json").unlink()
    assert main(["report", "-l", logs, "--html", str(file)]) == 2
    assert "holds no run" in capsys.readouterr().err
    status = {"run_id": "r1", "state": "running", "step": 5, "max_steps": 9, "pid": os.getpid()}
    (tmp_path / "logs" / "status.json").write_text(json.dumps(status))
    assert main(["report", "-l", logs, "--html", str(file)]) == 0
    assert "appear once the run has ended" in file.read_text()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, a_plotly, capsys):
    """And nothing is written."""
    logs = run_in(tmp_path / "logs")
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x.html", "its folder is not there"),
        (tmp_path / "file" / "x.html", "its folder is not there"),
    ):
        assert main(["report", "-l", logs, "--html", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_without_plotly_one_line_names_the_cure(tmp_path, monkeypatch, capsys):
    """Exit 2, and no file."""
    logs, file = run_in(tmp_path / "logs"), tmp_path / "out.html"
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["report", "-l", logs, "--html", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "environment --extra report" in line
    assert not file.exists()


def test_a_report_draws_what_was_logged(tmp_path, capsys):
    """The curve, the time, and what to change; without metrics the rest is there."""
    logs = run_in(tmp_path / "logs")
    assert main(["report", "-l", logs]) == 0
    text = capsys.readouterr().out
    assert "█▇▆▅▄▃▂▁  8.0000 → 1.0000, 8 points" in text
    assert re.search(r"where it went +steps +1m 21s +81%  ████", text)
    assert "improve" in text
    (tmp_path / "logs" / "metrics.jsonl").unlink()
    assert main(["report", "-l", logs]) == 0
    assert "improve" in capsys.readouterr().out


def test_a_report_shows_gpus_and_their_newest_epochs(tmp_path, capsys):
    """Means with peaks, over all GPUs for an epoch; without a GPU there is no such line."""
    assert main(["report", "-l", run_in(tmp_path / "cpu")]) == 0
    assert "GPU" not in capsys.readouterr().out
    use = {
        "use": {"mean": 0.5, "peak": 0.9},
        "power_w": {"mean": 310.0, "peak": 310.0},
        "memory_efficiency": {"mean": 0.8, "peak": 0.8},
    }
    other = {"use": {"mean": 0.7, "peak": 1.0}}
    epochs = tuple({"epoch": epoch, "gpus": {"0": use, "1": other}} for epoch in range(20))
    logs = run_in(tmp_path / "gpu", gpus={"0": use, "1": {"name": "odd"}}, gpu_epochs=epochs)
    assert main(["report", "-l", logs]) == 0
    lines = [one.strip() for one in capsys.readouterr().out.splitlines()]
    lines = [one for one in lines if one.startswith("GPU")]
    assert len(lines) == 1 + 8
    assert lines[0].split(maxsplit=2)[2] == "use 50% (peak 90%), memory efficiency 80%, power 310 W"
    assert lines[1].startswith("GPUs, epoch 13")
    assert "use 60% (peak 100%)" in lines[-1]
    assert lines[-1].startswith("GPUs, epoch 20")


def test_two_runs_stand_side_by_side(tmp_path, monkeypatch, capsys):
    """By name or by folder; what files say is shown and not obeyed."""
    monkeypatch.chdir(tmp_path)
    run_in(tmp_path / "logs" / "one")
    second = run_in(tmp_path / "other", name=HOSTILE, steps=3000)
    assert main(["report", "--compare", "one", second]) == 0
    text = capsys.readouterr().out
    assert HARMLESS.split("\\n")[0][:12] in text
    assert "+100.0%" in next(line for line in text.splitlines() if line.startswith("steps/s"))
    assert "settings: all the same" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compare"], "needs two runs"),
        (["--compare", "one"], "needs two runs"),
        (["--compare", "one", "two", "three"], "unexpected word"),
        (["--compare", "one", "--html", "x"], "takes two runs, and no --html"),
        (["--compare", "one", "no"], "no such folder"),
        (["--compare", "one", "../.."], "holds no run|has not ended"),
        (["--compare", "one", "a/b"], "is neither a log folder nor the name of a run"),
        (["--compare", "one", "live"], "has not ended"),
        (["--compare", "one", "torn"], "its summary.json cannot be read"),
        (["one"], "unexpected word"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    """Exit 2, and the line says which of the two."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    run_in(folder / "logs" / "one")
    for name, file in (("live", "status.json"), ("torn", "summary.json")):
        (folder / "logs" / name).mkdir()
        (folder / "logs" / name / file).write_text("{}")
    assert main(["report", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert any(one in line for one in said.split("|")), line
