"""--init-from takes weights in the forms in which people have them."""

from __future__ import annotations

import pytest
import torch

from ddp_runner.checkpoint.weights import load_weights
from ddp_runner.core.faults import BadInputError

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


def _write(path, kind):
    if kind == "text":
        path.write_text("not weights")
    elif kind == "no tensors":
        torch.save({"epoch": 3}, path)
    elif kind == "code":
        torch.save({"w": pytest.Item}, path)


@pytest.mark.parametrize("kind", ["missing", "text", "no tensors", "code"])
def test_what_holds_no_weights_is_bad_input(tmp_path, kind):
    """One line that names the option and the file; code in a file is never run."""
    _write(tmp_path / "w.pt", kind)
    with pytest.raises(BadInputError) as caught:
        load_weights(tmp_path / "w.pt")
    assert caught.value.option == "--init-from"
    assert "w.pt" in str(caught.value)
    assert "\n" not in str(caught.value)
