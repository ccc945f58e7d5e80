"""What ``--engine ray`` refuses in one line, with or without Ray."""

from __future__ import annotations

import sys

import pytest

from ddp_runner.__main__ import main


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("words", "environment", "line"),
    [
        ([], {}, "--engine=ray: ray is not installed for "),
        (["--dry-run"], {}, "--dry-run: is for one machine: leave out --engine"),
        (["--find-lr"], {}, "--find-lr: is for one machine: leave out --engine"),
        (["--gpus", "0"], {}, "--gpus: Ray decides which GPUs: give their number by -n"),
        (["--node-rank", "0"], {}, "--node-rank=0: is decided by --engine ray: leave it out"),
        (["lr=fast"], {}, "lr=fast: must be a number"),
        ([], {"RAY_ADDRESS": "ray://head:10001"}, "RAY_ADDRESS=ray://head:10001: must be HOST:"),
        ([], {"RAY_ADDRESS": "127.0.0.1:1"}, "RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers"),
        (
            [],
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            "--engine: starts the ranks itself: start it without a launcher",
        ),
    ],
)
def test_what_cannot_begin_with_an_engine_is_one_line(
    words, environment, line, monkeypatch, capsys
):
    """Exit 2, before any machine is asked for."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--engine", "ray", "--nnodes", "2", *words]) == 2
    assert capsys.readouterr().err.startswith(f"ddp_runner: error: {line}")


def test_how_ray_is_installed_stands_in_the_error(capsys):
    """As the extra of this package."""
    assert main(["train", "--engine", "ray"]) == 2
    assert "environment --extra ray`, or `pip install 'ray>=" in capsys.readouterr().err
