"""What is shown of an exception that a user's code raised: their frames, the last of them last, and its place."""

from __future__ import annotations

import torch

from ddp_runner.config import from_flat
from ddp_runner.core.settings import OptimSettings
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.step.failure import fault_of
from ddp_runner.kernel.system.user_errors import traceback_text, user_place
from ddp_runner.training.components.optimizer import build_optimizer


class Model(torch.nn.Module):
    """Its forward calls what is wrong."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self):
        return self.wrong()

    def named_parameters(self, *args, **kwargs):
        raise LookupError("no parameters here")


def caught(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is read
        return error
    raise AssertionError("nothing was raised")


def test_the_users_frame_is_last_where_a_library_raised():
    """Frames of torch between the user's own stay, what it called within does not."""
    error = caught(Model(lambda: torch.ones(2, 3) @ torch.ones(2, 3).T @ torch.ones(7)))
    lines = traceback_text(error).splitlines()
    frames = [line for line in lines if line.startswith("  File ")]
    assert "in <lambda>" in frames[-1]
    assert any("torch/nn/modules" in line for line in frames)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("RuntimeError: ")
    fault = fault_of(error, rank=0, step=3, phase="forward", aborted=False)
    assert fault.kind is FaultKind.RANK_RAISED
    assert fault.cause.endswith(f"({user_place(error)})")
    assert user_place(error).startswith("test_user_errors.py:")


def test_our_frames_are_left_out_between_the_users():
    """The optimizer is built by us, and asks the user's model."""
    error = caught(
        lambda: build_optimizer(Model(None), OptimSettings(), device=torch.device("cpu"))
    )
    text = traceback_text(error)
    assert "in named_parameters" in text
    assert "ddp_runner/training" not in text


class BadSamples(torch.utils.data.Dataset):
    """Raises at each sample."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise LookupError(f"no file for sample {index}\nlook again")


def test_the_cause_names_the_error_of_another_process():
    """A DataLoader's worker sends its traceback as text, behind a line that says little."""
    loader = torch.utils.data.DataLoader(BadSamples(), num_workers=1)
    error = caught(lambda: next(iter(loader)))
    fault = fault_of(error, rank=0, step=3, phase="data", aborted=False)
    assert fault.cause.startswith(
        "LookupError: no file for sample 0 (Caught LookupError in DataLoader worker process 0) (test_"
    )


def test_an_error_of_ours_keeps_every_frame():
    """Control: what we raise is shown whole, and is no place of the user's."""
    error = caught(lambda: from_flat({"no_such_setting": 1}))
    assert user_place(error) == ""
    text = traceback_text(error)
    assert "in <lambda>" in text
    assert "ddp_runner/config" in text


def test_the_cause_of_an_error_is_cut_as_well():
    """An exception that came from another one."""

    def wraps():
        try:
            Model(lambda: 1 / 0)()
        except ZeroDivisionError as error:
            raise ValueError("wrapped") from error

    text = traceback_text(caught(wraps))
    assert text.index("ZeroDivisionError: ") < text.index("ValueError: wrapped")
    assert "direct cause" in text
