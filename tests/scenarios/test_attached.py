"""``attach``: loops as people have them, under harm: the same weights, and the others keep their process."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch

from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.training.components.tensor_hash import tensor_hash
from tests import ready
from tests.scenarios.conftest import NO_SPARE, PATIENT, filled_once
from tests.scenarios.harness import ROOT, Run, poll
from tests.test_documented import blocks_of

LOOPS = Path(__file__).with_name("loops")
CLASSIFIER = LOOPS / "classifier.py"
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
STOP = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
RAISE = "raise RuntimeError('a cosmic ray')"
EXIT = "import os; os._exit(7)"
HOOKS_TEST = "test_the_documents_loop_of_another_framework_is_repaired_in_place"


def run_loop(folder, *words, world=2, options=(), loop=CLASSIFIER, **how):
    """``run`` in ``folder``, with its logs and checkpoints below; see Run for what ``command`` is.

    Without a word about it, a rank that a busy machine does not run for some seconds is no hang.
    """
    if "--compile" in words:
        # What a backend of one's own needs, once instead of in each rank and each replacement.
        needed = (
            "torch._inductor.codecache,torch._inductor.sizevars,torch._dynamo.backends.inductor"
        )
        options = (*options, "--preload", needed)
    return Run(
        folder,
        *("-l", Path(folder) / "logs", "-c", Path(folder) / "checkpoints"),
        *("save_every_steps=9", *PATIENT, *options, loop, *words),
        world=world,
        task=None,
        verb="run",
        **how,
    )


def final(folder):
    """A hash of each tensor, and every plain value, of what the program has saved behind its loop."""
    return _hashed(torch.load(Path(folder) / "final.pt", weights_only=False))


def _hashed(value):
    if isinstance(value, torch.Tensor):
        return tensor_hash(value)
    if isinstance(value, dict):
        return {key: _hashed(one) for key, one in value.items()}
    return [_hashed(one) for one in value] if isinstance(value, list) else value


def plant(folder, **places):
    """``plant(folder, r1_s5_forward=KILL)``: at that place, once."""
    for place, text in places.items():
        rank, step, where = place.split("_")
        path = Path(folder) / f"harm_{rank[1:]}_{step[1:]}_{where}"
        path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def fault_free(tmp_path_factory, worker_id):
    """What the program saves when nothing happens to it, by its words and the world."""

    def of(*words, world=2):
        def make(folder):
            with run_loop(folder, *words, world=world, options=(NO_SPARE,)) as run:
                assert run.wait() == 0, run.console

        return final(filled_once(tmp_path_factory, worker_id, make, ("attached", words, world)))

    return of


def assert_as_if_nothing_happened(run, folder, expected, *, repaired):
    assert run.wait() == 0, run.console
    assert final(folder) == expected
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert len(summary["faults"]) == repaired, [one["cause"] for one in summary["faults"]]
    assert all(one["steps_lost"] == 0 for one in summary["faults"]), run.console


def test_ranks_are_lost_at_every_moment_of_a_step(tmp_path, fault_free):
    """Killed, raised, exited, stopped; rank 0 too. BatchNorm, dropout, scheduler and average are as without."""
    plant(
        tmp_path,
        r1_s2_forward=KILL,
        r0_s5_backward=KILL,
        r1_s8_update=RAISE,
        r0_s11_forward=RAISE,
        r1_s14_between=EXIT,
        r1_s12_every=RAISE,
        r0_s18_every=KILL,
        r1_s21_backward=STOP,
    )
    with run_loop(tmp_path, options=("recovery.hang_min_s=3",)) as run:
        assert_as_if_nothing_happened(run, tmp_path, fault_free(), repaired=8)


def test_survivors_keep_their_process_and_their_locals(tmp_path, fault_free):
    """With three ranks; rank 0 counts its evaluations in a plain list, and has all of them at the end."""
    plant(tmp_path, r1_s4_forward=KILL, r2_s9_backward=KILL, r1_s15_update=KILL)
    with run_loop(tmp_path, world=3) as run:
        assert_as_if_nothing_happened(run, tmp_path, fault_free(world=3), repaired=3)
    assert "evaluated 4" in run.console
    formed = [one["pid"] for one in run.events("rank_formed") if one["rank"] == 0]
    assert len(formed) == 4
    assert len(set(formed)) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--accumulate", "2", "--fp16"),
        ("--swallow",),
        ("--mixup", "--behind", "--find-unused"),
    ],
    ids=["accumulated and scaled", "swallowing", "mixed before the block, updated behind it"],
)
def test_habits_of_loops_make_no_difference(tmp_path, fault_free, words):
    """Each with a rank killed, and one that raises, in the midst of it."""
    plant(tmp_path, r1_s7_backward=KILL, r0_s13_forward=RAISE, r0_s16_update=KILL)
    raises = 0 if "--swallow" in words else 1  # what it raises itself, it swallows
    if not raises:
        plant(tmp_path, r0_s13_forward="pass")
    with run_loop(tmp_path, *words) as run:
        assert_as_if_nothing_happened(run, tmp_path, fault_free(*words), repaired=2 + raises)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "last"),
    [(("--fp16",), "update"), (("--two",), "amid"), (("--two", "--fp16"), "amid")],
    ids=["scaled", "two optimizers", "two, scaled"],
)
def test_six_kills_of_a_loop_are_all_proved(tmp_path, fault_free, words, last):
    """Each with an average of the weights. What is scaled overflows in steps 4 and 12: in the second one, rank 0 is killed."""
    places = {"r1_s5_backward": KILL, "r0_s7_forward": KILL, f"r1_s9_{last}": KILL}
    places |= {"r0_s12_backward": KILL, f"r0_s15_{last}": KILL, "r1_s18_update": KILL}
    plant(tmp_path, **places)
    with run_loop(tmp_path, *words, options=("recovery.drill_at=2",)) as run:
        assert_as_if_nothing_happened(run, tmp_path, fault_free(*words), repaired=6)
    assert run.summary()["exact_proof"]["repairs_proved"] == "6 of 6", run.console


def test_a_framework_whose_hooks_bound_the_steps_is_repaired_in_place(tmp_path):
    """Killed on either rank, and raised in the body: to the weights of the framework's own DDP, bit for bit."""
    own = tmp_path / "own"
    words = ("-l", own / "logs", LOOPS / "foreign_trainer.py")
    with Run(own, *words, task=None, verb="run") as run:
        assert run.wait() == 0, run.console
    harmed = tmp_path / "harmed"
    harmed.mkdir()
    plant(harmed, r1_s3_forward=KILL, r0_s6_update=KILL, r0_s10_forward=RAISE, r1_s14_between=EXIT)
    with run_loop(harmed, loop=LOOPS / "hooked.py") as run:
        assert_as_if_nothing_happened(run, harmed, final(own), repaired=4)
    assert "the trainer has failed: a cosmic ray" in run.console


def test_the_documents_loop_of_another_framework_is_repaired_in_place(tmp_path):
    """As it is written there, with rank 1 killed."""
    mark = f"run by tests/scenarios/test_attached.py::{HOOKS_TEST}"
    (block,) = [one for one in blocks_of(ROOT / "docs" / "integrations.md") if one.mark == mark]
    found = []
    for name, harm in (("calm", ()), ("harm", ("--inject", "kill:rank=1,step=9"))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "hooks.py").write_text(block.text, encoding="utf-8")
        with run_loop(folder, loop=folder / "hooks.py", options=harm) as run:
            assert run.wait() == 0, run.console
        assert run.summary()["exact"], run.summary()["inexact_reasons"]
        assert len(run.summary()["faults"]) == len(harm) // 2
        found.append(run.digest)
    assert found[0] == found[1]
    (tmp_path / "early").mkdir()
    worse = block.text.replace("loss > self.best", "True")
    assert worse != block.text
    (tmp_path / "early" / "hooks.py").write_text(worse, encoding="utf-8")
    with run_loop(tmp_path / "early", loop=tmp_path / "early" / "hooks.py") as run:
        assert run.wait() == 0, run.console
    assert run.summary()["steps"] == 9  # an epoch, and the step by which the ranks agree on the end


COUNTER = """
import torch
from torch.nn.functional import mse_loss
import ddp_runner
run = ddp_runner.attach()
x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
global_step = shown = 0
for xb, yb in run.steps(run.loader(data, batch_size=4), max_steps=16):
    with run.step():
        loss = mse_loss(net(xb), yb) * min(1.0, (1 + global_step) / 10)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    shown += loss.item()
    print("so far", shown)
    global_step += 1
"""


DRAWN = """draw = __import__("random").Random(1).random
def rarely_turned(batch): return -batch if draw() < 0.1 else batch
steps = {"turn": rarely_turned}
"""


def test_a_generator_behind_its_method_makes_a_repaired_run_inexact(tmp_path):
    """Its draws matter at step 8 only, so that no drill before it and no first step shows them."""
    own = tmp_path / "draws.py"
    rare = COUNTER.replace("global_step = shown = 0\n", f"global_step = shown = 0\n{DRAWN}")
    rare = rare.replace("min(1.0, (1 + global_step) / 10)", "1.0").replace(
        "net(xb)", 'net(steps["turn"](xb))'
    )
    own.write_text(rare, encoding="utf-8")
    with run_loop(tmp_path, loop=own, options=("--inject", "kill:rank=1,step=6")) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is False, summary
    assert any("`draw` (draws.py:" in one for one in summary["inexact_reasons"]), summary


@pytest.mark.parametrize(
    "words", [(), ("--inject", "kill:rank=1,step=1", "--inject", "kill:rank=0,step=9")]
)
def test_a_counter_that_is_not_kept_makes_a_repaired_run_inexact(tmp_path, words):
    """It is named once, and without a fault the run is exact; so is a resumed one not."""
    own = tmp_path / "counts.py"
    own.write_text(COUNTER, encoding="utf-8")
    with run_loop(tmp_path, loop=own, options=words) as run:
        assert run.wait() == 0, run.console
    assert run.console.count("`global_step` (counts.py:21) changes each step and is not kept") >= 1
    assert "`shown`" not in run.console
    summary = run.summary()
    assert summary["exact"] is not bool(words), summary
    assert len(summary["inexact_reasons"]) == (1 if words else 0), summary
    assert all("`global_step` (counts.py:21)" in one for one in summary["inexact_reasons"])
    if words:
        return
    own.write_text(COUNTER.replace("max_steps=16", "max_steps=20"), encoding="utf-8")
    with run_loop(tmp_path, loop=own) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"] is False


REMEMBERING = """
import random
import torch
from torch.nn.functional import mse_loss
import ddp_runner
run = ddp_runner.attach()
x = torch.randn(48, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
class InPlace(torch.utils.data.Sampler):
    def __init__(self):
        self.order = list(range(48))
    def __len__(self):
        return 48
    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler={sampler})
phase = 1.0
for xb, yb in run.steps(loader, max_steps=14):
    if {changes} and run.step_number == 9:
        phase = 0.3
    with run.step():
        (phase * mse_loss(net(xb), yb)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("sampler", "changes", "named"),
    [("InPlace()", False, "`sampler.order`"), ("range(48)", True, "`phase` (remembers.py:25)")],
    ids=["an order that is shuffled in place", "a variable that changes once"],
)
def test_what_a_replaced_rank_of_two_cannot_have_is_named(tmp_path, sampler, changes, named):
    """Drills of that rank lack it, too: all agree, on other weights than those of a run without faults."""
    own = tmp_path / "remembers.py"
    own.write_text(REMEMBERING.format(sampler=sampler, changes=changes), encoding="utf-8")
    with run_loop(tmp_path, loop=own, options=("--inject", "kill:rank=1,step=11")) as run:
        assert run.wait() == 0, run.console
    (reason,) = run.summary()["inexact_reasons"]
    assert reason == f"{named}, which steps change, could not be kept over a repair"


UNSEEN = """
import torch
from torch.nn.functional import mse_loss
import ddp_runner
class Rate:
    n = 0
    def __call__(self):
        self.n += 1
        return 0.01 * 0.9**self.n
rate = Rate()
run = ddp_runner.attach()
x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
for xb, yb in run.steps(run.loader(data, batch_size=4), max_steps=16):
    with run.step():
        mse_loss(net(xb), yb).backward()
        optimizer.param_groups[0]["lr"] = {rate}
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("rate", "reasons"),
    [
        ("[rate][0]()", ["state that sets lr of the optimizer's group 0, which steps change"]),
        ("0.01 * 0.9**run.step_number", []),
    ],
    ids=["a rate with a memory", "a rate of the step"],
)
def test_state_that_only_the_update_uses_makes_a_repaired_run_inexact(tmp_path, rate, reasons):
    """All ranks are lost, so the replicas agree. No reading of the loop sees which object is called."""
    own = tmp_path / "unseen.py"
    own.write_text(UNSEEN.replace("{rate}", rate), encoding="utf-8")
    options = ("save_every_steps=6", "--inject", "kill:rank=all,step=9")
    with run_loop(tmp_path, loop=own, options=options) as run:
        assert run.wait() == 0, run.console
    found = [one.partition(", could not be kept")[0] for one in run.summary()["inexact_reasons"]]
    assert found == reasons, run.console
    assert run.console.count("lr of the optimizer's group 0 differed") == len(reasons)


UNSEEDED = """
import numpy as np
import torch
import ddp_runner
{before}
run = ddp_runner.attach()
{behind}
data = torch.utils.data.TensorDataset(torch.tensor(made, dtype=torch.float32))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
for (batch,) in run.steps(run.loader(data, batch_size=4), max_steps=12):
    with run.step():
        net(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("is_before", [True, False], ids=["before attach", "behind it"])
def test_data_that_a_replaced_rank_makes_otherwise_is_inexact(tmp_path, is_before):
    """From random numbers that nobody has seeded, where attach() has not yet done so."""
    made = "made = np.random.default_rng().normal(size=(256, 8))"
    seeded = "made = np.random.normal(size=(256, 8))"
    own = tmp_path / "made.py"
    places = {"before": made, "behind": ""} if is_before else {"before": "", "behind": seeded}
    own.write_text(UNSEEDED.format(**places), encoding="utf-8")
    with run_loop(tmp_path, loop=own, options=("--inject", "kill:rank=1,step=5")) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is not is_before, summary["inexact_reasons"]
    assert all("rank 1 made other data than before" in one for one in summary["inexact_reasons"])


HIDDEN = """
import os
import torch
import ddp_runner
class Hasty(torch.optim.SGD):
    def step(self, closure=None):
        calls = 1 + int(os.environ.get("HASTY_CALLS", 0))  # in no state_dict(), nor where a look finds it
        os.environ["HASTY_CALLS"] = str(calls)
        for group in self.param_groups:
            group["lr"] = RATE
        super().step()
run = ddp_runner.attach()
x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = Hasty(model.parameters(), lr=0.01)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
for xb, yb in run.steps(run.loader(data, batch_size=4), max_steps=24):
    with run.step():
        (net(xb) - yb).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("rate", "options"),
    [
        ("0.1 if calls < 3 else 0.01", ("recovery.replica_check_steps=2",)),
        ("0.1 / calls", ("recovery.replica_check_steps=2",)),
        # The only rank that still has the counter is lost before a save or a copy compares them.
        ("0.1 if calls > 10 else 0.01", ("--inject", "kill:rank=0,step=17")),
    ],
)
def test_replicas_that_differ_after_a_replacement_are_no_flipped_bit(tmp_path, rate, options):
    """A counter outside of the state has them differ, once or always: the run goes back, then all processes begin again."""
    (own := tmp_path / "hidden.py").write_text(HIDDEN.replace("RATE", rate), encoding="utf-8")
    options = ("--inject", "kill:rank=1,step=14", *options)
    with run_loop(tmp_path, loop=own, options=options) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is False
    reasons = summary["inexact_reasons"]
    assert all("ranks had been replaced: a state that is not kept" in one for one in reasons)


SLOW_TO_BEGIN = """
import time
import torch
import ddp_runner
run = ddp_runner.attach()
class Shuffled:
    passes = 0
    def __iter__(self):
        self.passes += 1
        if self.passes == 2:  # as a stream that fills its buffer, or workers that are spawned
            time.sleep(3)
        return iter([torch.ones(4, 8)] * 8)
    def __len__(self):
        return 8
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
for batch in run.steps(Shuffled(), epochs=2):
    with run.step():
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_an_epoch_may_begin_as_slowly_as_a_start(tmp_path):
    """No rank is called hung in the seconds before it."""
    own = tmp_path / "slow.py"
    own.write_text(SLOW_TO_BEGIN, encoding="utf-8")
    with run_loop(tmp_path, loop=own, options=("recovery.hang_min_s=0.5",)) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["faults"] == []


ODD_BUFFERS = """
import torch
import ddp_runner
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = torch.nn.SyncBatchNorm(8), torch.nn.Linear(8, 1)
        self.register_buffer("places", torch.arange(8).expand((1, -1)), persistent=False)
        self.register_buffer("spread", torch.arange(8).expand((4, -1)), persistent=False)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mean", None)
    def forward(self, x):
        mean = x.mean(0).detach()
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        if len(self.seen) < 9:
            self.seen = torch.cat([self.seen, self.mean.sum()[None]])
        x = self.norm(x - self.mean) + 0.01 * self.places * self.spread[0]
        return self.last(x) + self.seen.sum()
run = ddp_runner.attach()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
for xb, yb in run.steps(run.loader(data, batch_size=4), max_steps=24):
    with run.step():
        (net(xb) - yb).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if run.is_first:
    torch.save({"model": dict(model.state_dict())}, "final.pt")
"""


def test_buffers_of_every_kind_and_synced_norms_are_trained(tmp_path):
    """Expanded, growing, None at first, not saved; batch norm over ranks on the CPU."""
    found = []
    for name, harm in (("calm", ()), ("harm", ("kill:rank=1,step=4", "kill:rank=0,step=15"))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "odd.py").write_text(ODD_BUFFERS, encoding="utf-8")
        options = [word for one in harm for word in ("--inject", one)]
        with run_loop(folder, loop=folder / "odd.py", options=options) as run:
            assert run.wait() == 0, run.console
        assert run.summary()["exact"], run.summary()["inexact_reasons"]
        assert len(run.summary()["faults"]) == len(harm)
        found.append(final(folder))
    assert found[0] == found[1]


LEFT_GRADIENTS = """
import torch
from torch import nn
import ddp_runner

run = ddp_runner.attach()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 8)  # of no optimizer, and its gradient is never dropped
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])  # by turns, as in a GAN
        self.rare = nn.Linear(4, 1)

    def forward(self, x, step):
        found = self.heads[step % 2](self.base(x).tanh())
        return found + self.rare(x) if step % 6 == 0 else found


net = Net()
trained = ([*net.heads[0].parameters(), *net.rare.parameters()], net.heads[1].parameters())
one, other = (torch.optim.SGD(some, lr=0.05, momentum=0.9) for some in trained)
wrapped = run.ddp(net, find_unused_parameters=True)
run.keep(net=net, one=one, other=other)
x = torch.randn(256, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
for inputs, targets in run.steps(run.loader(data, batch_size=8), max_steps=16):
    with run.step():
        step = run.step_number
        optimizer = (one, other)[step % 2]
        optimizer.zero_grad(set_to_none=False)
        (wrapped(inputs, step) - targets).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
if run.is_first:
    torch.save({"net": net.state_dict()}, "final.pt")
"""


def test_a_repeated_body_adds_to_the_gradients_that_were_left(tmp_path):
    """Zeros on which momentum acts, a GAN's other network, and layers of no optimizer, which a clipped norm includes."""
    found = []
    lost_together = ("kill:rank=0,step=13", "kill:rank=1,step=13")
    for name, harm in (
        ("calm", ()),
        ("harm", ("kill:rank=1,step=4", "kill:rank=0,step=9", *lost_together)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "left.py").write_text(LEFT_GRADIENTS, encoding="utf-8")
        options = [word for one in harm for word in ("--inject", one)]
        with run_loop(folder, loop=folder / "left.py", options=options) as run:
            assert run.wait() == 0, run.console
        assert run.summary()["exact"], run.summary()["inexact_reasons"]
        found.append(final(folder))
    assert found[0] == found[1]


@pytest.mark.parametrize(("where", "steps"), [("before", (9,)), ("within", (7, 10))])
def test_parameters_are_unfrozen_anywhere_before_the_net_is_called(
    tmp_path, fault_free, where, steps
):
    """As where a loop does so between two steps: no step goes by without their sums over ranks."""
    for at in steps:
        plant(tmp_path, **{f"r1_s{at}_backward": KILL, f"r0_s{at + 1}_forward": RAISE})
    with run_loop(tmp_path, "--unfreeze", where) as run:
        expected = fault_free("--unfreeze", "behind")
        assert_as_if_nothing_happened(run, tmp_path, expected, repaired=2 * len(steps))


FROZEN_ALONE = """
import torch
from torch import nn
import ddp_runner

run = ddp_runner.attach()
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
wrapped = run.ddp(net)
run.keep(net=net, optimizer=optimizer)
x = torch.randn(256, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
for batches in run.steps(run.loader(data, batch_size=4, accumulate=3), max_steps=12):
    with run.step():
        with wrapped.no_sync():
            net[0].requires_grad_(run.step_number % 4 > 1)
            for inputs, targets in batches[:-1]:
                (wrapped(inputs) - targets).square().mean().backward()
        inputs, targets = batches[-1]
        (wrapped(inputs) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if run.is_first:
    torch.save({"net": net.state_dict()}, "final.pt")
"""


def test_layers_frozen_under_no_sync_are_summed_once_a_step(tmp_path):
    """The module is wrapped again there. A sum more changes the last bits of three ranks, and a repeated body has none."""
    found = []
    for name, harm in (("calm", ()), ("harm", ("kill:rank=1,step=4", "kill:rank=0,step=6"))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "frozen.py").write_text(FROZEN_ALONE, encoding="utf-8")
        options = [word for one in harm for word in ("--inject", one)]
        with run_loop(folder, loop=folder / "frozen.py", world=3, options=options) as run:
            assert run.wait() == 0, run.console
        assert run.summary()["exact"], run.summary()["inexact_reasons"]
        assert len(run.summary()["faults"]) == len(harm)
        found.append(final(folder))
    assert found[0] == found[1]


KILL_ONCE_ASKED = """
import time
while not os.path.exists("go"):
    run.alive()
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


def test_a_worker_lost_during_a_repair_costs_no_step(tmp_path, fault_free):
    """Rank 0 waits and alone has the newest state: it notices that its DataLoader lacks a worker with its next batch."""
    plant(tmp_path, r1_s7_forward=KILL_ONCE_ASKED)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        run_loop(tmp_path, "--own-loader", "--workers", "2", variables={"TMPDIR": short}) as run,
    ):
        run.wait_for_event("world_formed")
        zygote = run.named("ddp:zygote").pid
        run.signal(signal.SIGSTOP, zygote)
        (tmp_path / "go").touch()
        run.wait_for_event("plan")
        worker, *_ = psutil.Process(run.rank_pid(0)).children()
        worker.kill()
        poll(lambda: worker.status() == psutil.STATUS_ZOMBIE, what="the end of the worker")
        run.signal(signal.SIGCONT, zygote)
        assert_as_if_nothing_happened(run, tmp_path, fault_free("--own-loader"), repaired=2)


def test_a_replaced_rank_draws_the_same_from_a_dataloader(tmp_path, fault_free):
    """With workers that are kept from epoch to epoch, as without. torch's sockets need a short path, and are left by kills."""
    words = ("--own-loader", "--steps", "54")
    plant(tmp_path, r1_s7_backward=KILL, r0_s30_forward=RAISE, r0_s51_update=KILL)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        run_loop(tmp_path, *words, "--workers", "2", variables={"TMPDIR": short}) as run,
    ):
        assert_as_if_nothing_happened(run, tmp_path, fault_free(*words), repaired=3)


def test_what_breaks_in_a_dataloader_is_repaired(tmp_path, fault_free):
    """It is the loop's own, and loads in the rank: raised there, or killed."""
    words = ("--own-loader", "--steps", "54")
    plant(tmp_path, r1_s7_drawn=RAISE, r0_s30_drawn=KILL, r1_s50_drawn=EXIT)
    with run_loop(tmp_path, *words) as run:
        assert_as_if_nothing_happened(run, tmp_path, fault_free(*words), repaired=3)


def test_a_compiled_loop_is_repaired_and_survivors_compile_nothing_again(tmp_path, fault_free):
    """Where a rank is replaced, and where a step is begun again: a process compiles each graph once."""
    plant(tmp_path, r1_s7_backward=KILL, r1_s13_forward=RAISE, r0_s20_update=KILL)
    with run_loop(tmp_path, "--compile") as run:
        assert_as_if_nothing_happened(run, tmp_path, fault_free(), repaired=3)
        first = next(one["pid"] for one in run.events("rank_formed") if one["rank"] == 0)
    compiled = re.findall(r"compiled by (\d+) at (\d+)", run.console)
    of_rank_0 = [int(step) for pid, step in compiled if int(pid) == first]
    assert of_rank_0, run.console
    assert len(of_rank_0) == len(set(of_rank_0)), "one graph with gradients, one without"
    assert max(of_rank_0) <= 6, of_rank_0


@pytest.mark.soak
def test_two_hundred_random_faults_leave_no_trace(tmp_path, fault_free):
    """``ATTACHED_FAULTS=N`` plants so many, of any kind, rank and moment; rank 0 is hit as often as the others."""
    faults, apart = int(os.environ.get("ATTACHED_FAULTS", "200")), 3
    random_ = random.Random(int(os.environ.get("ATTACHED_SEED", "1")))
    words = ("--steps", str(apart * faults + 6))
    for number in range(faults):
        place = f"r{random_.randrange(3)}_s{apart * number + 3}_"
        place += random_.choice(("forward", "backward", "update", "between"))
        plant(tmp_path, **{place: random_.choice((KILL, KILL, KILL, EXIT, RAISE))})
    expected = fault_free(*words, world=3)
    budget = ("recovery.max_restarts=1000", "recovery.no_progress_generations=5")
    with run_loop(tmp_path, *words, world=3, options=budget) as run:
        assert run.wait(3000.0) == 0, run.console
        assert final(tmp_path) == expected
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    found = len(summary["faults"]) + summary["faults_left_out"]
    assert found >= 0.9 * faults, "two at one moment may be one incident"
    # A rank that dies right behind its commit may be the only one that has that step, where the last collective
    # of the others fails with its connections. Nobody who lives has committed it, and it is done again.
    lost = [fault["steps_lost"] for fault in summary["faults"] if fault["steps_lost"]]
    assert set(lost) <= {1}
    assert len(lost) <= faults // 20


def test_a_loop_and_a_task_train_the_same_weights(tmp_path):
    """One training, written both ways, each with a rank killed: as the task does without faults."""
    file = LOOPS / "two_faces.py"
    words = ("max_steps=24", "batch_size=4", "learning_rate=1e-2", "beta2=0.999", "use_amp=false")
    words += ("schedule=constant", "warmup_steps=0", "max_grad_norm=none")
    words += ("find_unused_parameters=true",)
    weights = []
    for name, harm in (("calm", ()), ("task", ("--inject", "kill:rank=1,step=9"))):
        with Run(tmp_path / name, *words, *PATIENT, *harm, task=f"{file}:Faces") as run:
            assert run.wait() == 0, run.console
            assert len(run.summary()["faults"]) == len(harm) // 2
        weights.append(trained(tmp_path / name))
    with run_loop(tmp_path / "loop", loop=file, options=("--inject", "kill:rank=1,step=9")) as run:
        assert run.wait() == 0, run.console
        assert [one["steps_lost"] for one in run.summary()["faults"]] == [0]
    looped = {n.removeprefix("model."): w for n, w in trained(tmp_path / "loop").items()}
    assert weights[0] == weights[1] == looped


def trained(folder):
    """A hash of each weight in the last checkpoint below ``folder``."""
    saved = torch.load(folder / "checkpoints" / "step_00000024.pt", weights_only=True)["model"]
    return _hashed(dict(saved))


def test_a_stopped_run_is_resumed(tmp_path, fault_free):
    """By the same command, with the codes of train; the program behind the loop runs once only."""
    stop = "import os, signal; os.kill(os.getppid(), signal.{})"
    plant(tmp_path, r0_s10_between=stop.format("SIGTERM"), r1_s15_forward=stop.format("SIGINT"))
    for code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
        with run_loop(tmp_path) as run:
            assert run.wait() == code, run.console
        assert not (tmp_path / "final.pt").exists()
    with run_loop(tmp_path) as run:
        assert run.wait() == 0, run.console
        assert final(tmp_path) == fault_free()


COOLS = """
import torch
from torch.nn.functional import cross_entropy
import ddp_runner

run = ddp_runner.attach()
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.argmax(1))
model = torch.nn.Linear(4, 4)
model.temperature = 1.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)

class Noise(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return index + torch.rand(()).item()

judged = torch.utils.data.DataLoader(
    Noise(), shuffle=True, num_workers=1, persistent_workers=True,
    generator=torch.Generator().manual_seed(1), collate_fn=sum,
)

@run.every(steps=5)
def cool():
    model.temperature *= 0.5 + sum(place * one for place, one in enumerate(judged)) / 100

for inputs, labels in run.steps(run.loader(data, batch_size=4), max_steps=14):
    with run.step():
        cross_entropy(net(inputs) / model.temperature, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
if run.is_first:
    torch.save(model.state_dict(), "final.pt")
"""


HALF_LABELLED = """\
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import ddp_runner

run = ddp_runner.attach()
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
own = torch.Generator().manual_seed(run.rank)
rest = DataLoader(torch.randn(40, 8), batch_size=4, shuffle=True, generator=own)
loader = DataLoader(data, 4, sampler=DistributedSampler(data, run.world_size, run.rank))
for inputs, labels in run.steps(loader, epochs=2):
    with run.step():
        more = net(torch.cat([inputs, next(iter(rest))]))
        loss = torch.nn.functional.cross_entropy(more[:4], labels) + more[4:].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if run.is_first:
    torch.save(dict(model.state_dict()), "final.pt")
"""


def test_a_loader_that_a_body_begins_in_each_step_draws_alike(tmp_path):
    """With a generator of its own: in a drill, and in a process that replaces one."""
    own = tmp_path / "half.py"
    own.write_text(HALF_LABELLED, encoding="utf-8")
    (tmp_path / "without").mkdir()
    with run_loop(tmp_path / "without", loop=own, options=("recovery.drill_at=2",)) as run:
        assert run.wait() == 0, run.console
        assert run.summary()["exact"], run.summary()["inexact_reasons"]
    with run_loop(tmp_path, loop=own, options=("--inject", "kill:rank=1,step=9")) as run:
        expected = final(tmp_path / "without")
        assert_as_if_nothing_happened(run, tmp_path, expected, repaired=1)


def test_a_number_that_a_function_between_steps_changes_is_changed_once(tmp_path):
    """An attribute of a kept module, where a rank is lost in the step right after the function.

    What it draws, also in loader workers that stay, is drawn again in a new process.
    """
    own = tmp_path / "cools.py"
    own.write_text(COOLS, encoding="utf-8")
    (tmp_path / "without").mkdir()
    with run_loop(tmp_path / "without", loop=own) as run:
        assert run.wait() == 0, run.console
    harm = ("--inject", "kill:rank=1,step=5", "--inject", "kill:rank=0,step=10,phase=reduce")
    with run_loop(tmp_path, loop=own, options=harm) as run:
        assert_as_if_nothing_happened(run, tmp_path, final(tmp_path / "without"), repaired=2)


RESTS = """
import os
import signal
import torch
from torch.nn.functional import cross_entropy
import ddp_runner

run = ddp_runner.attach()
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.argmax(1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)

@run.every(steps=5)
def evaluate():
    model.eval()
    cross_entropy(model(x), x.argmax(1)).item()

alike = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
for inputs, labels in run.steps(alike, max_steps=14):
    with run.step():
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    if run.is_first and os.path.exists(f"stop_{run.step_number}"):
        os.remove(f"stop_{run.step_number}")
        os.kill(os.getppid(), signal.SIGTERM)
if run.is_first:
    torch.save(model.state_dict(), "final.pt")
"""


def test_a_loop_that_stays_in_eval_mode_stays_so(tmp_path):
    """After its first evaluation, in a rank that is replaced and after a resume too.

    Each rank gives the same warning of its data before the first step: it is shown once.
    """
    own = tmp_path / "rests.py"
    own.write_text(RESTS, encoding="utf-8")
    (tmp_path / "without").mkdir()
    with run_loop(tmp_path / "without", loop=own) as run:
        assert run.wait() == 0, run.console
        assert run.console.count("the DataLoader gives every rank all samples") == 1
    (tmp_path / "stop_6").touch()
    with run_loop(tmp_path, loop=own) as run:
        assert run.wait() == ExitCode.PREEMPTED, run.console
    with run_loop(tmp_path, loop=own, options=("--inject", "kill:rank=1,step=9")) as run:
        assert_as_if_nothing_happened(run, tmp_path, final(tmp_path / "without"), repaired=1)


def test_the_program_may_be_edited_while_it_runs(tmp_path, fault_free):
    """A replaced rank runs what the file held at launch, and its checkpoints name that."""
    own = tmp_path / "own.py"
    text = CLASSIFIER.read_text()
    own.write_text(text, encoding="utf-8")
    edit = f"open({str(own)!r}, 'w').write('raise SystemExit(9)')"
    plant(tmp_path, r1_s5_between=edit, r0_s7_forward=KILL)
    with run_loop(tmp_path, loop=own) as run:
        assert_as_if_nothing_happened(run, tmp_path, fault_free(), repaired=1)
    manifest = json.loads((tmp_path / "checkpoints" / "step_00000024.json").read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert manifest["recipe"]["the file own.py"] == f"sha256:{digest}"


def test_a_program_edited_between_two_launches_is_not_exact(tmp_path):
    """Nobody knows what the edited lines compute; also those of a module that a step imports late."""
    own, late = tmp_path / "own.py", tmp_path / "late.py"
    own.write_text(CLASSIFIER.read_text(), encoding="utf-8")
    late.write_text("a = 1\n", encoding="utf-8")
    stop = "import os, signal; os.kill(os.getppid(), signal.SIGTERM)"
    plant(tmp_path, r0_s3_between="import late", r0_s10_between=stop)
    with run_loop(tmp_path, loop=own) as run:
        assert run.wait() == ExitCode.PREEMPTED, run.console
        step = run.summary()["steps"]
    own.write_text(CLASSIFIER.read_text().replace("lr=", "lr=0.5 * "), encoding="utf-8")
    late.write_text("a = 2\n", encoding="utf-8")
    with run_loop(tmp_path, loop=own) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"] is False
    assert run.summary()["inexact_reasons"] == [
        f"the file {name} was edited at step {step}" for name in ("own.py", "late.py")
    ]


def test_a_module_beside_it_that_has_changed_ends_the_run(tmp_path):
    """Two programs must not train one model; the file is named."""
    own = tmp_path / "own.py"
    own.write_text("import layers\n" + CLASSIFIER.read_text(), encoding="utf-8")
    (tmp_path / "layers.py").write_text("WIDTH = 24\n", encoding="utf-8")
    edit = f"open({str(tmp_path / 'layers.py')!r}, 'w').write('WIDTH = 25')"
    plant(tmp_path, r0_s5_between=edit, r1_s7_forward=KILL)
    with run_loop(tmp_path, loop=own) as run:
        assert run.wait() == 2, run.console
    assert "layers.py has changed on disk since the run began" in run.console
    assert run.console.count("ddp_runner: error:") == 1


def test_what_fails_behind_the_loop_fails_the_run(tmp_path):
    """Though training has ended and is saved."""
    own = tmp_path / "own.py"
    own.write_text(
        CLASSIFIER.read_text() + "\nraise ValueError('no room for it')\n", encoding="utf-8"
    )
    with run_loop(tmp_path, loop=own) as run:
        assert run.wait() == 1, run.console
    assert "training had ended, and the program failed behind it" in run.console
    assert run.summary()["steps"] == 24


SPAWNS = """
import multiprocessing
import torch
import ddp_runner
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    print("child", child.exitcode)
run = ddp_runner.attach()
data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
model = torch.nn.Linear(1, 1)
run.ddp(model)
run.keep(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="spawn")
run.steps(loader, max_steps=1)
"""


def test_a_program_that_is_spawned_again_is_one_line(tmp_path):
    """In the process that is spawned, and in the one whose loader would spawn workers."""
    own = tmp_path / "spawns.py"
    own.write_text(SPAWNS, encoding="utf-8")
    environment = {**os.environ, **ready.environment(programs=True)}
    words = [sys.executable, str(own)]
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    first, *_, last = ended.stderr.strip().splitlines()
    assert "spawns.py:10: a process that multiprocessing has spawned calls attach()" in first
    assert "child 2" in ended.stdout
    assert "error: spawns.py:16: workers that are started by spawn import the program" in last
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)


def test_a_loop_with_another_count_of_ranks_is_refused(tmp_path):
    """In one line, with the words for the old one."""
    with run_loop(tmp_path, "--steps", "4") as run:
        assert run.wait() == 0, run.console
    with run_loop(tmp_path, "--steps", "4", world=1) as run:
        assert run.wait() == 2, run.console
    assert "with other settings (ranks: 2 -> 1)" in run.console
    assert "or the old settings: -n 2" in run.console
    assert run.console.count("ddp_runner: error:") == 1
    assert run.console.count("with other settings") == 1
    assert "Traceback" not in run.console


def test_it_runs_under_plain_python(tmp_path):
    """One rank, without a supervisor; what it raises is the user's own error, and it is resumed."""
    plant(tmp_path, r0_s15_forward=RAISE)
    environment = {**os.environ, **ready.environment(programs=True), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(CLASSIFIER)]
    first = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert first.returncode == 1, first.stderr
    assert first.stderr.strip().splitlines()[-1] == "RuntimeError: a cosmic ray"
    second = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "final.pt").exists()
