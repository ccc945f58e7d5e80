"""What the process of a diagnosis concludes from what it was handed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from ddp_runner import config
from ddp_runner.features.proof import child as drill
from ddp_runner.features.proof.comparison import _diagnosed, _handed
from ddp_runner.features.proof.rules import Cause, cause_of
from ddp_runner.kernel.system.control_channel import Channel
from ddp_runner.kernel.wire.events import Diagnosed
from ddp_runner.kernel.wire.fork_specs import DrillSpec, ForkKind
from ddp_runner.kernel.wire.messages import Fork
from tests.features.proof.test_suspects import WEIGHT, case
from tests.processes import run_ranks


def other(**changes):
    """A process whose share always differs from the rank's, whatever it is given."""
    made = {
        "missing": [],
        "handed_side": lambda _: {"task.count": ("1", 1)},
        "handed_batches": lambda _: ["batch"],
        "unlike_here": lambda _: ["task.count"],
        "unlike_noted": lambda share: "" if share == "rank" else WEIGHT,
        "share": lambda **_: "replacement",
    }
    return SimpleNamespace(**{**made, **changes})


def found_by(process):
    """What the supervisor receives."""
    return _diagnosed(process, Diagnosed(rank=1, step=50, plain=WEIGHT), folder=None, again="rank")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, Cause.LASTING),
        ({"handed_side": lambda _: None}, Cause.UNKNOWN),
        ({"handed_batches": lambda _: None}, Cause.UNKNOWN),
        ({"missing": ["task.stream"]}, Cause.UNKNOWN),
        ({"share": lambda **_: object()}, Cause.UNKNOWN),
        ({"share": lambda names=(), **_: "rank" if names else "other"}, Cause.STATE),
        ({"share": lambda batches=None, **_: "rank" if batches else "other"}, Cause.DATA),
    ],
)
def test_what_could_not_be_handed_over_shows_nothing(changes, cause):
    """No state or no batch, a part of the state, or a process that does not repeat its own bits."""
    assert cause_of(case(), found_by(other(**changes))) is cause


@pytest.mark.parametrize("content", [None, b"no archive"])
def test_a_file_that_cannot_be_read_is_named_in_the_log(tmp_path, capfd, content):
    """The log of drills says which file, and why."""
    path = tmp_path / "batch.pt"
    if content is not None:
        path.write_bytes(content)
    assert _handed(path) is None
    assert "continuing without batch.pt: " in capfd.readouterr().err


def _drill(me, folder):
    """Run a drill whose files are in ``folder``, in this process; return what it reports."""
    ours, theirs = Channel.pair()
    spec = DrillSpec(
        settings=config.to_record(config.from_flat({})),
        device="cpu", world_size=1, local_world_size=1, threads=1, store_host="", store_port=0,
        rank=0, step=3, folder=str(folder),
    )  # fmt: skip
    output = os.open(os.devnull, os.O_WRONLY)
    drill.main(Fork(token=1, kind=ForkKind.DRILL, spec=spec), [theirs.detach(), output])
    return ours.receive()[0].text


def test_a_drill_whose_files_were_removed_says_so(tmp_path):
    """No error of the operating system's: the run has gone back, or has ended. Control: a file that lacks alone."""
    (said,) = run_ranks(_drill, 1, tmp_path / "gone")
    assert said.startswith("its files were removed meanwhile")
    (said,) = run_ranks(_drill, 1, tmp_path)
    assert said.startswith("FileNotFoundError: ")
