"""What a rank runs before it ends, and what it leaves to the kernel."""

from __future__ import annotations

import atexit
import weakref

import pytest
import torch
from torch.torch_version import TorchVersion

from ddp_runner.kernel.rank.exit_functions import run_exit_functions
from tests.processes import run_ranks


class _Owner:
    """Something of a user's that has an end of its own."""


def _library():
    import torch

    library = torch.library.Library("test_exit_functions", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x.clone(), "CPU")
    return library


def _is_there():
    import torch

    try:
        return torch.ops.test_exit_functions.same(torch.ones(2)).tolist() == [1.0, 1.0]
    except AttributeError:
        return False


def _end(member):
    ran = []
    atexit.register(ran.append, "atexit")
    owner, library = _Owner(), _library()
    weakref.finalize(owner, ran.append, "finalize")
    run_exit_functions()
    return ran, _is_there(), library.ns


def _end_as_usual(member):
    library = _library()
    atexit._run_exitfuncs()
    return _is_there(), library.ns


def test_user_code_is_called_and_torch_takes_no_operator_back():
    """Both ways of the standard library to leave something for the end; an operator still works after it."""
    ((ran, is_there, _),) = run_ranks(_end, 1)
    assert sorted(ran) == ["atexit", "finalize"]
    assert is_there


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 7), reason="torch 2.6 takes none back")
def test_at_a_usual_end_torch_takes_operators_back():
    """Control: without care the operator would be gone, and all of torch's own with it."""
    ((is_there, _),) = run_ranks(_end_as_usual, 1)
    assert not is_there
