"""Batches that are sent to the device ahead of their step: the run is the same one."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from ddp_runner import DDPTrainer
from ddp_runner.data.workers.pool import WorkerPool
from ddp_runner.kernel.wire.events import RepairedInPlace, TuningChanged
from ddp_runner.training import task_steps
from ddp_runner.training.loading.batch_copy import to_device
from tests.processes import run_ranks

from .test_session import STEPS, RecordingRuntime, messages_of, settings


class Sender:
    """Takes the next step while the host would wait for the device; the copy is one in memory."""

    def __init__(self, device, loader):
        self.taken, self.arrived, self._loader = [], 0, loader

    def send(self, step):
        self._loader.take_ahead(step, self._copy)

    def arrive(self, batches):
        self.arrived += len(batches)

    def _copy(self, batch):
        self.taken.append(batch)
        return [tensor.clone() for tensor in batch]


def _train(me, config, is_ahead):
    """The weights' digest, what was reported, and how many batches were taken ahead."""
    senders = []

    def made(device, loader):
        senders.append(Sender(device, loader))
        return senders[-1]

    if is_ahead:
        task_steps.copy_ahead, WorkerPool.arrived = made, 99
    runtime = RecordingRuntime(config)
    report = replace(DDPTrainer(config=config, runtime=runtime).train(), model=None)
    return report, runtime.reported, sum(len(sender.taken) for sender in senders)


@dataclass
class Pair:
    picture: torch.Tensor
    label: int


def test_what_batches_are_made_of_goes_to_the_device():
    """Mappings and dataclasses part by part; an object with a ``to`` of its own is asked, but not ahead."""
    one, meta = torch.ones(2, 3), torch.device("meta")
    packed = pack_padded_sequence(one.unsqueeze(2), torch.tensor([3, 2]), batch_first=True)
    moved = to_device({"a": UserDict(b=one), "pair": Pair(one, 3), "packed": packed}, meta)
    assert {tensor.device.type for tensor in (moved["a"]["b"], moved["pair"].picture)} == {"meta"}
    assert moved["pair"].label == 3
    assert (moved["packed"].data.device.type, moved["packed"].batch_sizes.device.type) == (
        "meta",
        "cpu",
    )
    assert to_device([packed, one], meta, asks_objects=False)[0] is packed


@pytest.mark.parametrize(
    ("changes", "actions"),
    [
        ({}, []),
        ({"task.nan_at": "3"}, []),  # whose gradient it was is found by that step's batch, again
        ({"task.nan_at": "8+9", "max_errors_per_epoch": 1}, ["going back to an older state"]),
        ({"ddp.find_unused_parameters": "auto", "relax_after_steps": 3}, ["find_unused_parameters=False"]),
    ],
    ids=["plain", "skipped", "rolled back", "wrapped again"],
)  # fmt: skip
def test_a_run_whose_batches_are_sent_ahead_ends_with_the_same_weights(tmp_path, changes, actions):
    """Also where a step is skipped and looked into, and where the run goes back."""
    runs = {}
    for is_ahead in (False, True):
        config = settings(tmp_path / str(is_ahead), num_workers=1, **changes)
        runs[is_ahead] = run_ranks(_train, 1, config, is_ahead)[0]
    (plain, reported_plain, none), (ahead, reported_ahead, taken) = runs[False], runs[True]
    assert none == 0
    assert taken >= STEPS - 1
    assert ahead.weights_sha256 == plain.weights_sha256
    for kind in (TuningChanged, RepairedInPlace):
        assert len(messages_of(reported_ahead, kind)) == len(messages_of(reported_plain, kind))
    seen = [one.action.split(" after")[0] for one in messages_of(reported_ahead, TuningChanged)]
    assert seen == actions


@pytest.mark.gpu
def test_a_batch_that_is_copied_ahead_arrives_whole():
    """On a stream of its own, behind a computation that is under way."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from ddp_runner.data.loader import MicroBatch
    from ddp_runner.training.loading.batch_copy import CopyAhead

    class OneStep:
        def take_ahead(self, step, change):
            self.batch = MicroBatch(indices=(0,), batch=change(batch))

    device = torch.device("cuda", 0)
    loader = OneStep()
    copies = CopyAhead(device, loader)
    busy = torch.randn(4096, 4096, device=device)
    for count in range(20):
        batch = {"x": torch.full((1 << 20,), float(count)).pin_memory(), "name": "one"}
        for _ in range(5):
            busy = busy @ busy / 64
        copies.send(count)
        copies.arrive([loader.batch])
        assert loader.batch.batch["x"].device.type == "cuda"
        assert loader.batch.batch["x"].unique().tolist() == [float(count)]
