"""Weights in the forms of others: safetensors, and folders of shards with an index."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from ddp_runner.checkpoint import hub
from ddp_runner.checkpoint.safetensors_file import (
    NotSafetensorsError,
    read_safetensors,
    write_safetensors,
)
from ddp_runner.checkpoint.weights import load_weights
from ddp_runner.core.hub import Repository, repository_of
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import open_given

TENSORS = {
    "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
}


def write(path, tensors=TENSORS):
    with path.open("wb") as file:
        write_safetensors(file.write, tensors)
    return path


def same(found, expected=TENSORS):
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name], one)


def indexed(folder, shards, *, index, write_shard):
    folder.mkdir()
    for shard, names in shards.items():
        write_shard(folder / shard, {name: TENSORS[name] for name in names})
    places = {name: shard for shard, names in shards.items() for name in names}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_safetensors_come_back_bit_for_bit(tmp_path):
    """Of each type, scalars and empty ones too; also where tensors share memory or are views."""
    same(read_safetensors(open_given(write(tmp_path / "w.safetensors"))))
    base = torch.randn(4, 4)
    views = {"a": base, "b": base, "t": base.t(), "part": base[1:, 2]}
    same(read_safetensors(open_given(write(tmp_path / "v.safetensors", views))), views)
    same(load_weights(tmp_path / "w.safetensors"))


@pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="safetensors is not installed"
)
def test_the_library_reads_our_files_and_we_read_its(tmp_path):
    """In both directions, to the same bits."""
    from safetensors.torch import load_file, save_file

    same(load_file(write(tmp_path / "ours.safetensors")))
    save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    same(load_weights(tmp_path / "theirs.safetensors"))


def header(entries, data=b""):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DAMAGED = {
    "empty": (b"", "is cut off"),
    "a length only": ((1 << 40).to_bytes(8, "little") + b"{", "is cut off"),
    "no JSON": ((2).to_bytes(8, "little") + b"{{", "is not JSON"),
    "a list": (header([]), "is not a JSON object"),
    "cut off": (header({"w": ENTRY}, b"\0\0\0"), "outside of its place"),
    "longer": (header({"w": ENTRY}, b"\0" * 8), "longer than its header says"),
    "overlapping": (header({"w": ENTRY, "v": ENTRY}, b"\0" * 8), "outside of its place"),
    "other size": (header({"w": {**ENTRY, "shape": [2]}}, b"\0" * 4), "another size"),
    "huge": (header({"w": {**ENTRY, "shape": [2**61, 2**61]}}, b"\0" * 4), "another size"),
    "negative": (header({"w": {**ENTRY, "data_offsets": [-4, 0]}}, b"\0" * 4), "the header's"),
    "unknown type": (header({"w": {**ENTRY, "dtype": "F6"}}, b"\0" * 4), "type 'F6'"),
    "no entry": (header({"w": 3}), "the header's entry 'w'"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_safetensors_are_refused_in_one_line(tmp_path, kind):
    """Before anything is made of what a header claims."""
    content, reason = DAMAGED[kind]
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(NotSafetensorsError, match=reason):
        read_safetensors(open_given(path))
    with pytest.raises(BadInputError) as caught:
        load_weights(path)
    assert str(caught.value).startswith(f"--init-from={path}: w.safetensors ")
    assert str(caught.value).isprintable()


SHARDS = {"a.safetensors": ["w", "half", "none"], "b.safetensors": ["count", "mask"]}
PICKLED = {"a.bin": ["w", "half", "none"], "b.bin": ["count", "mask"]}


@pytest.mark.parametrize("kind", ["safetensors", "pytorch_model"])
def test_a_folder_of_shards_is_read_by_its_index(tmp_path, kind):
    """The folder, and the index itself; links are followed, as the hub's cache has them."""
    if kind == "safetensors":
        name = "model.safetensors.index.json"
        folder = indexed(tmp_path / "real", SHARDS, index=name, write_shard=write)
    else:
        name = "pytorch_model.bin.index.json"
        folder = indexed(
            tmp_path / "real", PICKLED, index=name, write_shard=lambda to, one: torch.save(one, to)
        )
    same(load_weights(folder))
    same(load_weights(folder / name))
    linked = tmp_path / "linked"
    linked.mkdir()
    for one in folder.iterdir():
        (linked / one.name).symlink_to(one)
    same(load_weights(linked))


def test_a_folder_with_one_file_of_weights_is_that_file(tmp_path):
    """Safetensors before pickled ones; of several nobody can say which."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert list(load_weights(tmp_path)) == ["w"]
    write(tmp_path / "model.safetensors")
    same(load_weights(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "x.safetensors")
    write(tmp_path / "y.safetensors")
    with pytest.raises(BadInputError, match=r"several \(x\.safetensors, y\.safetensors\)"):
        load_weights(tmp_path)
    with pytest.raises(BadInputError, match="holds no average"):
        load_weights(tmp_path / "x.safetensors", average=True)


WRONG_INDEX = {
    "no JSON": ("{", "is not JSON"),
    "no map": ("{}", "has no weight_map"),
    "a path": ('{"weight_map": {"w": "../a.safetensors"}}', "is no file beside it"),
    "lost shard": ('{"weight_map": {"w": "z.safetensors"}}', "lacks z.safetensors"),
    "lost weight": ('{"weight_map": {"q": "a.safetensors"}}', "a.safetensors lacks q"),
}


@pytest.mark.parametrize("kind", WRONG_INDEX)
def test_an_index_that_does_not_hold_is_refused(tmp_path, kind):
    """In one line; nothing outside of its folder is ever opened."""
    text, reason = WRONG_INDEX[kind]
    write(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadInputError, match=reason):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("written", "repository"),
    [
        ("hf://me/model", Repository(name="me/model")),
        ("hf://me/a.b-c_1@v1.0", Repository(name="me/a.b-c_1", revision="v1.0")),
        ("hf://me/m@refs/pr/1", Repository(name="me/m", revision="refs/pr/1")),
        ("hf://me", None),
        ("hf://../model", None),
        ("hf://me/m/x", None),
        ("hf://me/m ", None),
        ("me/model", None),
    ],
)
def test_a_repository_of_the_hub_is_user_and_name(written, repository):
    """Anything else is none."""
    assert repository_of(written) == repository


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """A huggingface_hub whose repository is a folder here; it notes what it was asked for."""
    module = types.ModuleType("huggingface_hub")
    module.asked = []

    def snapshot_download(name, *, revision, allow_patterns, ignore_patterns):
        module.asked.append((name, revision, allow_patterns[0]))
        if isinstance(module.folder, Exception):
            raise module.folder
        return str(module.folder)

    module.snapshot_download = snapshot_download
    module.folder = tmp_path
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    hub.fetched.cache_clear()
    yield module
    hub.fetched.cache_clear()


def test_weights_of_the_hub_are_fetched_once_in_a_process(stub, tmp_path):
    """A begin that is made again, of a roll-back, is of the same files."""
    write(tmp_path / "model.safetensors")
    assert hub.fetched("hf://me/model@v1") == hub.fetched("hf://me/model@v1") == tmp_path
    assert stub.asked == [("me/model", "v1", "*.safetensors")]


def test_pickled_weights_of_the_hub_are_the_second_choice(stub, tmp_path):
    """Asked for where it has no safetensors; without both it is refused."""
    with pytest.raises(BadInputError, match=r"has no safetensors and no pytorch_model\.bin"):
        hub.fetched("hf://me/model")
    torch.save({"w": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert hub.fetched("hf://me/model") == tmp_path
    assert [pattern for *_, pattern in stub.asked[:2]] == ["*.safetensors", "pytorch_model*.bin"]


def test_what_the_hub_refuses_is_one_line(stub):
    """Whatever it raises; and where it is not installed, the command that installs it."""
    stub.folder = RuntimeError("401 Client Error.\nRepository Not Found")
    with pytest.raises(BadInputError) as caught:
        hub.fetched("hf://me/model")
    assert str(caught.value) == "--init-from=hf://me/model: cannot be fetched: 401 Client Error."


def test_without_the_hubs_library_its_install_command_is_named(monkeypatch):
    """In one line."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    hub.fetched.cache_clear()
    with pytest.raises(BadInputError, match=r"-m pip install 'huggingface_hub>=0\.23,<3'"):
        hub.fetched("hf://me/model")


@pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed"
)
def test_the_hubs_cache_is_enough_without_a_network(monkeypatch, tmp_path):
    """As it lies there: links from a snapshot to blobs."""
    import huggingface_hub.constants

    commit = "0" * 40
    repository = tmp_path / "models--me--model"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    write(repository / "blobs" / "1")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/1"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.fetched.cache_clear()
    same(load_weights(hub.fetched("hf://me/model")))
    hub.fetched.cache_clear()
