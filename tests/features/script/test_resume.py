"""Which checkpoint a script is given to resume from: folders and files as libraries leave them."""

from __future__ import annotations

import json
import os
import zipfile

import pytest

from ddp_runner.features.script.own_checkpoint import what_is_lacking, words_to_resume
from ddp_runner.features.script.rules import ResumeWith


def archive(path, *, cut=0):
    """As torch.save writes one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 500)
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])


def tensors(path, *, cut=0):
    """As safetensors writes one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    path.write_bytes(content[: len(content) - cut])


def transformers(folder, *, state="{}"):
    tensors(folder / "model.safetensors")
    archive(folder / "optimizer.pt")
    archive(folder / "training_args.bin")
    (folder / "trainer_state.json").write_text(state)


def accelerate(folder, *, is_whole=True):
    tensors(folder / "model.safetensors")
    archive(folder / "optimizer.bin")
    if is_whole:
        archive(folder / "random_states_0.pkl")


def aged(path, at_s):
    for one in (path, *path.rglob("*")):
        os.utime(one, (at_s, at_s))


def resumed(pattern):
    return words_to_resume([ResumeWith(pattern=str(pattern), words=("--resume={}", "x"))])


def test_the_newest_whole_match_is_named(tmp_path):
    """By when it was written, then by the number in its name; what a kill has cut short is passed over, and said."""
    for step in (500, 1000, 1500):
        transformers(tmp_path / f"checkpoint-{step}")
        aged(tmp_path / f"checkpoint-{step}", 1e9)
    pattern = tmp_path / "checkpoint-*"
    assert resumed(pattern) == ([f"--resume={tmp_path}/checkpoint-1500", "x"], [])
    (tmp_path / "checkpoint-1500" / "trainer_state.json").unlink()
    aged(tmp_path / "checkpoint-500", 2e9)
    transformers(tmp_path / "checkpoint-2000", state='{"global')
    aged(tmp_path / "checkpoint-2000", 3e9)
    words, notes = resumed(pattern)
    assert words == [f"--resume={tmp_path}/checkpoint-500", "x"]
    assert notes == [
        f"--resume-with: {tmp_path}/checkpoint-2000 is passed over: trainer_state.json: half a file"
    ]


def test_of_nothing_whole_no_word_is_added(tmp_path):
    """Nor where nothing matches; control: words without {} follow any match."""
    archive(tmp_path / "epoch=3-step=400.ckpt", cut=30)
    assert resumed(tmp_path / "*.ckpt")[0] == []
    assert resumed(tmp_path / "*.pt") == ([], [])
    plain = ResumeWith(pattern=str(tmp_path / "*.ckpt"), words=("--resume", "last"))
    assert words_to_resume([plain]) == (["--resume", "last"], [])


@pytest.mark.parametrize(
    ("make", "lack"),
    [
        (accelerate, ""),
        (lambda folder: accelerate(folder, is_whole=False), "random_states_0.pkl is missing"),
        (lambda folder: tensors(folder / "a.safetensors"), ""),
        (lambda folder: tensors(folder / "a.safetensors", cut=1), "a.safetensors: half a file"),
        (lambda folder: tensors(folder / "a.safetensors", cut=60), "a.safetensors: half a file"),
        (lambda folder: archive(folder / "deep" / "x.pt", cut=1), "x.pt: half a file"),
        (lambda folder: folder.mkdir(), "it is empty"),
        (lambda folder: (transformers(folder), archive(folder / "optimizer.bin")), ""),
        (lambda folder: (transformers(folder), (folder / "x.pth").touch()), "x.pth: it is empty"),
        (lambda folder: (transformers(folder), (folder / "note.txt").touch()), ""),
    ],
    ids=[
        "whole",
        "no states",
        "tensors",
        "cut",
        "cut header",
        "cut archive",
        "empty",
        "both",
        "no bytes",
        "a note",
    ],
)
def test_what_a_folder_lacks_is_said(tmp_path, make, lack):
    """By what its library writes last, and by files that say how long they are."""
    make(tmp_path / "step_3")
    assert what_is_lacking(tmp_path / "step_3") == lack
