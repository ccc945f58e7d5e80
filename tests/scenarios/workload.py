"""A small paced task for whole-run tests: its state has buffers, dropout and per-sample noise.

What should go wrong, and when, comes from a file that a test writes before the run or while it
trains, or from a sample whose turn always comes at the same step of an epoch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from ddp_runner.training.saves.saving import Saving
from ddp_runner.training.task import Datasets

# In the folder where the run was started.
TROUBLE_NAME = "trouble"
# Training goes on once it is gone. With ``CALL`` in it, no process waits before its loss is asked for so
# often: a run that is held so from the start gets to that step and no further, however slow a test is.
HOLD_NAME = "hold"
# While it is there no step takes longer than it must: the test has nothing more to do to the run.
HURRY_NAME = "hurry"
SLOW_DISK_NAME = "slow_disk"  # with slow_disk.py as task no checkpoint is written before it is gone
_calls = Counter()  # how often this process has come to each place


class NoisySamples(torch.utils.data.Dataset):
    """Draws from python's and torch's generators per sample, so that seeding shows in the weights."""

    def __init__(self, size, place):
        self._size = size
        self._place = place

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        make_trouble(self._place)
        clean, target = _clean_sample(index)
        noise = torch.randn(8).mul_(0.05).add_(0.01 * random.random())
        return noise.add_(clean), target, index


@functools.cache
def _clean_sample(index):
    """What of a sample is always the same: sixty microseconds that runs of many samples need once."""
    clean = torch.randn(8, generator=torch.Generator().manual_seed(index))
    return clean, clean[:2].sum().unsqueeze(0)


def make_trouble(place):
    """Do, once, what the trouble file asks of ``place``: ``PLACE RANK ACTION``; the file is gone then.

    With ``CALL`` behind that, not before a process has come there so often: such a file may lie there
    from the start, and what happens does not depend on how soon the test writes it.
    """
    if is_beside():
        return
    _calls[place] += 1
    if not os.path.exists(TROUBLE_NAME):  # noqa: PTH110 - asked for each sample of each step
        return
    try:
        wanted, rank, action, *call = Path(TROUBLE_NAME).read_text(encoding="utf-8").split()
        if wanted != place or rank not in ("any", os.environ.get("RANK")):
            return
        if call and _calls[place] < int(call[0]):
            return
        Path(TROUBLE_NAME).unlink()
    except (OSError, ValueError):  # no trouble, or another rank has taken it
        return
    _make(action)


def keep_pace(pace_s):
    """Have a step take so long at least, for as long as a test may do something to the run."""
    if not os.path.exists(HURRY_NAME):  # noqa: PTH110 - as above
        time.sleep(pace_s)


def _is_held(call):
    if not os.path.exists(HOLD_NAME):  # noqa: PTH110 - as above
        return False
    try:
        first = Path(HOLD_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return not first or call >= int(first)


def _make(action):  # noqa: C901 - a row an action
    if action == "abort":
        os.abort()
    if action == "segfault":
        ctypes.string_at(0)
    if action == "device":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    if action == "raise":
        raise RuntimeError("trouble was asked for")
    if action == "leave":
        sys.exit(0)
    if action == "preempt":
        os.kill(os.getpid(), signal.SIGTERM)  # of one rank: the whole run stops
    if action.startswith("exit"):
        os._exit(int(action.removeprefix("exit")))
    if action.startswith("sleep"):
        time.sleep(float(action.removeprefix("sleep")))
    if action.startswith("barrier"):  # which nobody else is in
        several = action == "barriers"  # as many as hold every thread of gloo
        for number in range(4 if several else 2):
            torch.distributed.barrier(async_op=several or number == 0)
    if action.startswith("gil"):
        # PyDLL keeps the interpreter's lock for the length of the call.
        ctypes.PyDLL(None).usleep(int(float(action.removeprefix("gil")) * 1e6))


_hidden = {}  # of each Calls: what stands in a module is nobody's state


class Calls:
    """Counts calls by what is no state: neither put back with a step nor sent to a replacement.

    What computes a step once more beside the run, as the repeat check does, does not count.
    """

    __slots__ = ()

    def __new__(cls):
        made = super().__new__(cls)
        _hidden[id(made)] = {"count": 0, "limited": False, "save": None}
        return made

    def __getattr__(self, name):
        return _hidden[id(self)][name]

    def __setattr__(self, name, value):
        _hidden[id(self)][name] = value

    def more(self, by):
        self.count += 0 if is_beside() else by


def is_beside():
    """Whether a step is being computed beside the run, as it is for the repeat check and for a drill."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "own_share":
        frame = frame.f_back
    return frame is not None


class PacedTask:
    """``pace_s`` seconds a step at least, in the time of the test; ``validation_s`` seconds a validation batch.

    ``raise_at_sample`` and ``odd_at_sample`` name a training sample that ruins its step; the latter
    by a collective that the other ranks are not in. ``slow_at_sample`` makes
    its step take ``slow_s`` longer. ``awaits_saves``: however slow the disk is, a save ends within two
    steps.
    """

    def __init__(
        self,
        *,
        pace_s=0.02,
        samples=192,
        validation_samples=24,
        validation_s=0.0,
        width=32,
        raise_at_sample=-1,
        odd_at_sample=-1,
        slow_at_sample=-1,
        slow_s=0.0,
        awaits_saves=False,
    ):
        self._pace_s = pace_s
        self._samples = samples
        self._validation_samples = validation_samples
        self._validation_s = validation_s
        self._width = width
        self._raise_at_sample = raise_at_sample
        self._odd_at_sample = odd_at_sample
        self._slow_at_sample = slow_at_sample
        self._slow_s = slow_s
        self._awaits_saves = awaits_saves
        self._unseen = Calls()

    def build_model(self):
        make_trouble("build")
        return nn.Sequential(
            nn.Linear(8, self._width),
            nn.BatchNorm1d(self._width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(self._width, 1),
        )

    def build_datasets(self):
        return Datasets(
            train=NoisySamples(self._samples, "data"),
            validation=NoisySamples(self._validation_samples, "validation"),
            fingerprint=f"noisy {self._samples}",
        )

    def loss(self, model, batch):
        inputs, targets, indices = batch
        if not model.training:
            make_trouble("evaluation")
            time.sleep(self._validation_s)
            return nn.functional.mse_loss(model(inputs), targets)
        keep_pace(self._pace_s)
        if self._awaits_saves:
            self._await_save()
        while not is_beside() and _is_held(_calls["loss"] + 1):
            time.sleep(0.01)
        make_trouble("loss")
        if self._slow_at_sample in indices:
            time.sleep(self._slow_s)
        if self._raise_at_sample in indices:
            raise RuntimeError("this step never works")
        if self._odd_at_sample in indices:
            torch.distributed.all_reduce(torch.ones(100_000))
        return nn.functional.mse_loss(model(inputs), targets)

    def _await_save(self):
        """Wait for a save that was under way in the step before, at whose end it had its verdict."""
        if self._unseen.save is not None:
            self._unseen.save.join()
        under_way = (each for each in threading.enumerate() if each.name == "checkpoint-save")
        self._unseen.save = next(under_way, None)


class Hashed(nn.Sequential):
    """A model in which something may go wrong while its weights are looked at."""

    def state_dict(self, *args, **options):
        make_trouble("state_dict")
        return super().state_dict(*args, **options)


class HashedTask(PacedTask):
    """Its model is asked for its weights when the replicas are compared."""

    def build_model(self):
        return Hashed(*super().build_model())


class FailsInModel(PacedTask):
    """Raises while the model is built."""

    def build_model(self):
        raise RuntimeError("no model today")


class DiesInModel(PacedTask):
    """Takes its process along at every start."""

    def build_model(self):
        os._exit(9)


class DiesAtExit(PacedTask):
    """Its processes are killed while they exit, when they have said that they are done."""

    def build_model(self):
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
        return super().build_model()


class DiesBeforeItReports(PacedTask):
    """Its rank 0 is killed once, when its first checkpoint is on disk and nobody knows of it."""

    def build_model(self):
        report = Saving._report

        def killed_first(saving, saved, **options):
            with contextlib.suppress(FileExistsError):
                Path("killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            report(saving, saved, **options)

        Saving._report = killed_first
        return super().build_model()
