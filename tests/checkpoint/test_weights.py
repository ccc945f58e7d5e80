"""--init-from takes weights in the forms in which people have them."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from ddp_runner.checkpoint.weights import load_weights
from ddp_runner.kernel.rules.errors import BadInputError

from .states import save, state_of

WEIGHTS = {"a.weight": torch.ones(2), "b": torch.zeros(3)}


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        {"model": WEIGHTS, "epoch": 3},
        {"state_dict": WEIGHTS},
        {"model_state_dict": WEIGHTS},
    ],
)
def test_weights_are_found_where_people_keep_them(tmp_path, content):
    """A plain state dict, or one in a dict under a usual name."""
    torch.save(content, tmp_path / "w.pt")
    loaded = load_weights(tmp_path / "w.pt")
    assert list(loaded) == list(WEIGHTS)
    assert all(torch.equal(loaded[key], WEIGHTS[key]) for key in WEIGHTS)


def test_a_checkpoint_of_ours_gives_its_model(tmp_path):
    """A checkpoint may start another run."""
    loaded = load_weights(save(tmp_path, 10).path)
    assert torch.equal(loaded["weight"], state_of(10)["model"]["weight"])


@pytest.mark.parametrize("name", ["last", "best", "", "step_00000020.json", "a copy of last"])
def test_a_pointer_and_a_folder_lead_to_a_checkpoint(tmp_path, name):
    """As people name them; a folder means its newest one that is whole."""
    folder = tmp_path / "checkpoints"
    for step in (10, 20):
        save(folder, step, monitored=float(-step))
    save(folder, 30, monitored=1.0)
    (folder / "a copy of last").write_text("step_00000020.pt\n")
    expected = {"last": 30, "": 20}.get(name, 20)
    if not name:
        (folder / "step_00000030.pt").write_bytes(b"damaged")
    assert torch.equal(load_weights(folder / name)["weight"], state_of(expected)["model"]["weight"])


def averaged_state(*, begun=True):
    """A checkpoint's content, of a model with tied weights, a half-precision one, a buffer, and an average."""
    tied = torch.full((2, 3), 1.0)
    model = {
        "in.weight": tied,
        "out.weight": tied,
        "half": torch.full((3,), 1.0, dtype=torch.float16),
        "mean": torch.full((4,), 1.0),
        "table": torch.arange(3),
    }
    parameters = {"in.weight": torch.full((2, 3), 5.0), "half": torch.full((3,), 6.5)}
    buffers = {"mean": torch.full((4,), 7.0)}
    kept = {"decay": 0.9, "updates": 3, "parameters": parameters, "buffers": buffers}
    empty = {**kept, "parameters": {}, "buffers": {}}
    return {"model": model, "ema": kept if begun else empty}


def test_the_average_of_a_checkpoint_takes_the_place_of_its_weights(tmp_path):
    """In the types of the weights, under all names of tied ones; what is not averaged stays."""
    torch.save(averaged_state(), tmp_path / "w.pt")
    loaded = load_weights(tmp_path / "w.pt", average=True)
    assert list(loaded) == ["in.weight", "out.weight", "half", "mean", "table"]
    values = {name: (value.dtype, value.unique().tolist()) for name, value in loaded.items()}
    assert values == {
        "in.weight": (torch.float32, [5.0]),
        "out.weight": (torch.float32, [5.0]),
        "half": (torch.float16, [6.5]),
        "mean": (torch.float32, [7.0]),
        "table": (torch.int64, [0, 1, 2]),
    }
    plain = load_weights(tmp_path / "w.pt")
    assert plain["half"].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (averaged_state(begun=False), "holds an average (EMA) that has not begun"),
        (WEIGHTS, "holds no average (EMA): it is of a run without ema_decay"),
        ({"model": WEIGHTS}, "holds no average (EMA): it is of a run without ema_decay"),
        ([1], "holds no average (EMA): it is of a run without ema_decay"),
    ],
)
def test_a_file_without_an_average_has_none_to_give(tmp_path, content, reason):
    """One line with the option; its weights alone can be taken."""
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(BadInputError) as caught:
        load_weights(tmp_path / "w.pt", average=True)
    assert caught.value.option == "--init-from"
    assert reason in str(caught.value)


def test_links_of_the_users_own_are_followed(tmp_path):
    """To a file, a pointer and a folder."""
    save(tmp_path / "checkpoints", 10)
    torch.save(WEIGHTS, tmp_path / "w.pt")
    for number, target in enumerate(("checkpoints/last", "checkpoints", "w.pt")):
        link = tmp_path / f"link {number}"
        link.symlink_to(tmp_path / target)
        assert load_weights(link)


class RunsCode:
    """Unpickled, it would make a file."""

    def __reduce__(self):
        return (open, (MADE_BY_CODE, "w"))


MADE_BY_CODE = "made_by_code"
CODE = "holds objects that could run code; refused"
NONE = "is not a file of tensors"


def _zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "x")


def _damage(path):
    saved = save(path.parent / "run", 10).path
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= 1
    saved.write_bytes(content)
    path.symlink_to(saved)


WRONG = {
    "missing": (lambda path: None, "does not exist"),
    "text": (lambda path: path.write_text("not weights"), NONE),
    "a checkpoint's name": (lambda path: path.write_text("step_00000008.pt\n"), "names step_"),
    "a script": (lambda path: path.write_text("import os\nos.getcwd()\n"), NONE),
    "random": (lambda path: path.write_bytes(bytes(range(256)) * 99), NONE),
    "empty": (lambda path: path.touch(), "is empty"),
    "cut short": (lambda path: path.write_bytes(_saved(WEIGHTS)[:-500]), "is damaged"),
    "another archive": (_zip, "not a file of tensors"),
    "no tensors": (lambda path: torch.save({"epoch": 3}, path), "holds no state dict"),
    "a number": (lambda path: torch.save(5, path), "holds no state dict"),
    "a list": (lambda path: torch.save([torch.ones(1)], path), "holds no state dict"),
    "model: 5": (lambda path: torch.save({"model": 5}, path), "holds no state dict"),
    "a class": (lambda path: torch.save({"w": pytest.Item}, path), f"{CODE} (_pytest.nodes.Item)"),
    "a module": (lambda path: torch.save(torch.nn.Linear(1, 1), path), CODE),
    "code": (lambda path: torch.save({"w": RunsCode()}, path), f"{CODE} (io.open)"),
    "code, old": (
        lambda path: torch.save({"w": RunsCode()}, path, _use_new_zipfile_serialization=False),
        CODE,
    ),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps({"w": RunsCode()})), CODE),
    "an old pickle": (lambda path: path.write_bytes(pickle.dumps(RunsCode(), 0)), CODE),
    "a plain pickle": (lambda path: path.write_bytes(pickle.dumps({"w": 1})), NONE),
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "an empty folder": (Path.mkdir, "is a folder without checkpoints"),
    "a loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "a flipped bit": (_damage, "its SHA-256 is not the one in its manifest"),
}


def _saved(content):
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize("kind", WRONG)
def test_what_holds_no_weights_is_bad_input(tmp_path, monkeypatch, kind):
    """One line that names the option and the file, and never how to run what it holds."""
    monkeypatch.chdir(tmp_path)
    make, reason = WRONG[kind]
    path = tmp_path / "w.pt"
    make(path)
    with pytest.raises(BadInputError) as caught:
        load_weights(path)
    reported = str(caught.value)
    assert caught.value.option == "--init-from"
    assert reported.startswith(f"--init-from={path}: ")
    assert reason in reported
    assert reported.isprintable()
    assert "weights_only" not in reported
    assert not Path(MADE_BY_CODE).exists()


@pytest.mark.parametrize("name", ["last", "best"])
@pytest.mark.parametrize("content", ["step_00000099.pt\n", "step_0000", ""])
def test_a_pointer_that_leads_nowhere_is_bad_input(tmp_path, name, content):
    """It is distinguished from a file of weights by its name, and says what it holds."""
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError, match=f"pointer '{name}' (names|is torn)"):
        load_weights(tmp_path / name)


def test_weights_may_be_called_as_a_pointer_is(tmp_path):
    """Control: what is no pointer by its content is read as what it is."""
    torch.save({"w": torch.ones(2000)}, tmp_path / "best")
    assert list(load_weights(tmp_path / "best")) == ["w"]


def test_a_folder_whose_checkpoints_are_all_damaged_says_why(tmp_path):
    """Each with its reason; an intact one would be taken."""
    for step in (10, 20):
        save(tmp_path, step).path.write_bytes(b"damaged")
    with pytest.raises(BadInputError, match=r"20\.pt 7 bytes, .*; step_00000010\.pt 7 bytes"):
        load_weights(tmp_path)
