"""Which variables of a loop of one's own are named, because they change from step to step and are not kept."""

from __future__ import annotations

import ast
import collections
import contextlib
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddp_runner.training.components.optimizer_state import hidden_state
from ddp_runner.training.exactness.held_values import HeldValues
from ddp_runner.training.own_loop.attached_run import _is_kept
from ddp_runner.training.own_loop.loop_source import late_names
from ddp_runner.training.own_loop.loop_variables import LoopVariables

STEPS = 5
BEGIN = """\
import collections, itertools, random, time, types
import numpy as np, torch
from torch import nn
w = torch.ones(2, requires_grad=True)
net, _ = lambda x: x * w, lambda: w  # of two in a line the source is not read
loader = [torch.full((2,), float(n)) for n in range(9)]
"""


class Loop:
    """Stands for a run: gives batches, and looks at whoever takes them."""

    def __init__(self):
        self.kept = []
        self.variables = self.looking()
        self.found = []
        self.step_number = 0

    def looking(self):
        return LoopVariables(
            is_kept=lambda value: any(value is one for one in (self, *self.kept)),
            modules=[one for one in self.kept if isinstance(one, torch.nn.Module)],
            epochs=lambda: {(self.step_number - n) // STEPS for n in (0, 1)},
        )

    def keep(self, **objects):
        self.kept += objects.values()
        self.variables = self.looking()

    def steps(self, batches):
        for batch in batches[:STEPS]:
            if self.step_number and self.variables.is_due():
                self.found += self.variables.look(sys._getframe(1))
            yield batch
            self.step_number += 1

    def step(self):
        return contextlib.nullcontext()

    def stop(self):
        pass

    def note(self, **values):
        pass


def run_of(folder, source):
    """The run of a program, once it has ended."""
    path = folder / "program.py"
    path.write_text(BEGIN + textwrap.dedent(source), encoding="utf-8")
    run = Loop()
    exec(compile(path.read_text(), str(path), "exec"), {"run": run, "__name__": "program"})
    return run


def names_found(folder, source):
    """The names that are said of a program, without the marks around them."""
    found = run_of(folder, source).found
    return [one.partition("`")[2].partition("`")[0] for one in found]


HEAD = "for batch in run.steps(loader):\n    with run.step():\n        "
CARRIED = {
    "a counter": (
        "global_step",
        "global_step = 0\n" + HEAD + "(net(batch) * global_step / 9).sum().backward()\n"
        "    global_step += 1",
    ),
    "a temperature": (
        "temperature",
        "temperature = 5.0\n" + HEAD + "loss = net(batch / temperature).sum()\n"
        "        loss.backward()\n        temperature = max(0.5, temperature * 0.9)",
    ),
    "a deque of features": (
        "features",
        "features = collections.deque([torch.zeros(2)], maxlen=4)\n"
        + HEAD
        + "out = net(batch)\n        loss = (out - torch.stack(list(features)).mean(0)).square().sum()\n"
        "        loss.backward()\n        features.append(out.detach())",
    ),
    "a list that is written by index": (
        "bank",
        "bank = [0.0] * 4\n" + HEAD + "loss = net(batch + sum(bank)).sum(); loss.backward()\n"
        "        bank[int(batch[0]) % 4] = loss.item()",
    ),
    "a dict": (
        "state",
        "state = {'seen': 0}\n" + HEAD + "state['seen'] += 1\n"
        "        (net(batch) * state['seen']).sum().backward()",
    ),
    "an average that is trained towards": (
        "center",
        "center = torch.zeros(2)\n" + HEAD + "out = net(batch)\n"
        "        (out - center).square().sum().backward()\n"
        "        center = 0.9 * center + 0.1 * out.detach()",
    ),
    "a tensor that is written in place": (
        "center",
        "center = torch.zeros(2)\n" + HEAD + "out = net(batch)\n"
        "        (out - center).square().sum().backward()\n"
        "        center.lerp_(out.detach(), 0.1)",
    ),
    "a generator of numpy's": (
        "rng",
        "rng = np.random.default_rng(0)\n" + HEAD + "net(batch * rng.normal()).sum().backward()",
    ),
    "a generator of Python's": (
        "rng",
        "rng = random.Random(0)\n" + HEAD + "net(batch * rng.random()).sum().backward()",
    ),
    "a generator of torch's": (
        "rng",
        "rng = torch.Generator()\n"
        + HEAD
        + "net(batch + torch.randn(2, generator=rng)).sum().backward()",
    ),
    "a generator that some steps seed": (
        "rng",
        "rng = torch.Generator()\n"
        + HEAD
        + "if run.step_number > 3: rng.manual_seed(run.step_number)\n"
        "        net(batch + torch.randn(2, generator=rng)).sum().backward()",
    ),
    "a prefetched batch": (
        "ahead",
        "more = iter(loader)\nahead = next(more)\n" + HEAD + "now, ahead = ahead, next(more)\n"
        "        net(now).sum().backward()",
    ),
    "the counter of enumerate": (
        "i",
        (
            "for i, batch in enumerate(run.steps(loader)):\n    with run.step():\n"
            "        (net(batch) * (i + 1)).sum().backward()"
        ),
    ),
    "what comes beside the batch": (
        "other",
        (
            "for batch, other in zip(run.steps(loader), loader):\n    with run.step():\n"
            "        (net(batch) * other).sum().backward()"
        ),
    ),
    "an attribute of a trainer": (
        "self.count",
        (
            "class Trainer:\n    count = 0\n    def fit(self):\n        for batch in run.steps(loader):\n"
            "            with run.step():\n                self.work(batch)\n"
            "    def work(self, batch):\n        (net(batch) * self.weight()).sum().backward()\n"
            "        self.count += 1\n    def weight(self):\n        return 1 / (1 + self.count)\n"
            "trainer = Trainer()\ntrainer.count = 0\ntrainer.fit()"
        ),
    ),
    "a global of a helper": (
        "seen",
        "seen = 0\ndef weight():\n    global seen\n    seen += 1\n    return seen\n"
        + HEAD
        + "(net(batch) * weight()).sum().backward()",
    ),
    "a variable of a closure": (
        "count",
        "def made():\n    count = 0\n    def weight():\n        nonlocal count\n        count += 1\n"
        "        return count\n    return weight\nweight = made()\n"
        + HEAD
        + "(net(batch) * weight()).sum().backward()",
    ),
    "an object of the program's own": (
        "anneal.at",
        "class Anneal:\n    def __init__(self): self.at = 0\n    def step(self): self.at += 1\n"
        "    def value(self): return 1 / (1 + self.at)\nanneal = Anneal()\n"
        + HEAD
        + "(net(batch) * anneal.value()).sum().backward()\n        anneal.step()",
    ),
    "what the step before has computed": (
        "before",
        "before = torch.zeros(2)\n" + HEAD + "out = net(batch)\n"
        "        (out - before).square().sum().backward()\n        before = out.detach()",
    ),
    "an option that is changed": (
        "args.beta",
        "args = types.SimpleNamespace(beta=1.0)\n"
        + HEAD
        + "(net(batch) * args.beta).sum().backward()\n"
        "        args.beta *= 0.9",
    ),
    "a module that is not kept": (
        "teacher",
        "teacher = nn.Linear(2, 2)\n"
        + HEAD
        + "(net(batch) - teacher(batch).detach()).sum().backward()\n"
        "        with torch.no_grad(): teacher.weight.lerp_(torch.ones(2, 2), 0.1)",
    ),
    "a scheduler that is not kept": (
        "schedule",
        "sgd = torch.optim.SGD([w], 0.1)\nrun.keep(sgd=sgd)\n"
        "schedule = torch.optim.lr_scheduler.StepLR(sgd, 1)\n"
        + HEAD
        + "net(batch).sum().backward()\n        sgd.step()\n        schedule.step()",
    ),
    "a counter of itertools": (
        "counter",
        "counter = itertools.count()\n" + HEAD + "(net(batch) * next(counter)).sum().backward()",
    ),
    "a patience that stops the run": (
        "bad",
        "bad = 0\n" + HEAD + "loss = net(batch).sum(); loss.backward()\n        bad += 1\n"
        "        if bad > 3: run.stop()",
    ),
    "an array that is a ring": (
        "ring",
        "ring = np.zeros(4)\n" + HEAD + "net(batch + float(ring.sum())).sum().backward()\n"
        "        ring[run.step_number % 4] = float(batch[0]) + 1",
    ),
    "a list that limits gradients": (
        "norms",
        "norms = [1.0]\n" + HEAD + "net(batch).sum().backward()\n"
        "        norm = nn.utils.clip_grad_norm_([w], min(norms)); norms.append(float(norm) + 1)",
    ),
    "a curriculum that is used up": (
        "lengths",
        "lengths = [5, 4, 3, 2, 1, 0, 0]\n"
        + HEAD
        + "(net(batch) * lengths.pop()).sum().backward()",
    ),
}
# Each of these changes from step to step too, and none is said.
HARMLESS = {
    "a generator that each step seeds": "rng = torch.Generator()\n"
    + HEAD
    + "rng.manual_seed(run.step_number); net(batch + torch.randn(2, generator=rng)).sum().backward()",
    "a generator of Python's that each step seeds": "rng = random.Random(0)\n"
    + HEAD
    + "rng.seed(run.step_number); net(batch * rng.random()).sum().backward()",
    "loss and outputs": HEAD
    + "out = net(batch)\n        loss = out.sum()\n        loss.backward()",
    "a timer": "t0 = time.time()\n" + HEAD + "net(batch).sum().backward()\n"
    "        print(time.time() - t0)\n        t0 = time.time()",
    "a running average that is printed": "average = 0.0\n"
    + HEAD
    + "loss = net(batch).sum(); loss.backward()\n"
    "        average = 0.9 * average + 0.1 * loss.item()\n"
    "        if run.step_number % 2 == 0: print(f'loss {average:.3f}')",
    "a list of losses": "losses = []\n" + HEAD + "loss = net(batch).sum(); loss.backward()\n"
    "        losses.append(loss.item())\n        print(sum(losses) / len(losses))",
    "a progress bar": "class Bar:\n    def __init__(self): self.n = 0\n    def update(self, n): self.n += n\n"
    "    def set_postfix(self, **how): print(self.n, how)\nbar = Bar()\n"
    + HEAD
    + "loss = net(batch).sum(); loss.backward()\n        bar.update(1); bar.set_postfix(loss=loss.item())",
    "an average that a bar is given by a name of the loop's": "class Bar:\n"
    "    def set_postfix(self, **how): self.shown = how\nbar, mean = Bar(), 0.0\n"
    + HEAD
    + "loss = net(batch).sum(); loss.backward()\n        mean = 0.9 * mean + loss.item()\n"
    "        bar.set_postfix(loss=mean)",
    "enumerate for a print": "for i, batch in enumerate(run.steps(loader)):\n    with run.step():\n"
    "        net(batch).sum().backward()\n        if i % 2 == 0: print(i)",
    "a meter": "class Meter:\n    def __init__(self): self.total = self.count = 0\n"
    "    def update(self, value, n=1): self.total += value * n; self.count += n\n"
    "    @property\n    def avg(self): return self.total / self.count\nmeter = Meter()\n"
    + HEAD
    + "loss = net(batch).sum(); loss.backward()\n        meter.update(loss.item())\n"
    "        print(meter.avg)",
    "constants and data": "scale, table = 0.5, np.ones((1000, 300))\ncriterion = nn.MSELoss()\n"
    + HEAD
    + "criterion(net(batch) * scale, torch.tensor(table[0, :2]).float()).backward()",
    "a counter for a writer": "class Writer:\n    def add_scalar(self, *what): pass\nwriter = Writer()\nn = 0\n"
    + HEAD
    + "loss = net(batch).sum(); loss.backward()\n        writer.add_scalar('loss', loss.item(), n)\n"
    "        n += 1",
    "the best so far, for a file": "best = -1.0\n"
    + HEAD
    + "loss = net(batch).sum(); loss.backward()\n"
    "        if loss.item() > best:\n            best = loss.item()\n            torch.save(best, '/dev/null')",
    "what is assigned before it is read": HEAD
    + "total = 0.0\n        for part in batch.split(1):\n"
    "            total = total + net(part).sum()\n        total.backward()",
    "what is kept": "class Kept:\n    def __init__(self): self.n = 0\nkept = Kept()\nrun.keep(kept=kept)\n"
    + HEAD
    + "(net(batch) * kept.n).sum().backward()\n        kept.n += 1",
    "an evaluation now and then": "def evaluate():\n    right = 0\n    for one in loader:\n"
    "        right += net(one).sum().item() > 0\n    return right / len(loader)\nhistory = []\n"
    + HEAD
    + "net(batch).sum().backward()\n        if run.step_number % 2 == 0:\n"
    "            history.append(evaluate())\n            print('accuracy', history[-1])",
    "what the run logs": "ema = 0.0\n" + HEAD + "loss = net(batch).sum(); loss.backward()\n"
    "        ema = 0.5 * ema + loss.item()\n        run.note(loss=loss, ema=ema)",
    "what Python's library writes": "import io, json, logging, statistics\nfile, total = io.StringIO(), 0.0\n"
    + HEAD
    + "loss = net(batch).sum(); loss.backward()\n        total += loss.item()\n"
    "        file.write(json.dumps({'total': total}))\n        logging.info('total %s', total)\n"
    "        file.write(str(statistics.mean([total, 1.0])))",
    "a helper that computes the loss": "def step(batch):\n    out = net(batch)\n    loss = out.sum()\n"
    "    loss.backward()\n    return loss\n"
    + HEAD
    + "loss = step(batch)\n        print(loss.item())",
}


OPTIMIZER = (
    "opt, model = torch.optim.SGD([w], lr=0.1), nn.Linear(2, 2)\nrun.keep(opt=opt, model=model)\n"
)
for way, written in {
    "in a loop over its groups": "for group in opt.param_groups: group['lr'] = 0.9**n",
    "in a numbered loop": "for i, group in enumerate(opt.param_groups): group['lr'] = 0.9**n + i",
    "by its place": "opt.param_groups[0]['lr'] = 0.9**n",
    "under another name": "groups = opt.param_groups; groups[0]['lr'] = 0.9**n",
    "by the result of a function": "k = power(n); opt.param_groups[0].update(lr=k)",
    "as an attribute": "opt.power = 0.9**n",
    "or a gradient": "for part in model.parameters(): part.grad = torch.ones_like(part) * n",
    "or a parameter in its place": "with torch.no_grad():\n            for part in model.parameters(): part -= n",
}.items():
    CARRIED[f"a counter that sets a rate {way}"] = (
        "n",
        f"""{OPTIMIZER}n = 0\ndef power(of): return 0.9**of\n{HEAD}net(batch).sum().backward()
        n += 1
        {written}
        opt.step()""",
    )
CARRIED["what an object keeps that is called"] = (
    "clip.norms",
    f"""class Clip:
        def __init__(self): self.norms = [1.0]
        def __call__(self, w):
            self.norms.append(float(nn.utils.clip_grad_norm_([w], np.percentile(self.norms, 50))))
clip = Clip()
{HEAD}net(batch).sum().backward(); clip(w)""",
)
CARRIED["what a loss of one's own keeps"] = (
    "criterion.mean",
    f"""class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
        def forward(self, found):
            self.mean.lerp_(found.detach(), 0.1)
            return (found - self.mean).square().sum()
criterion = Criterion()
{HEAD}criterion(net(batch)).backward()""",
)
TWO = (
    "first, second = torch.optim.SGD([w], lr=0.1), torch.optim.SGD([w], lr=0.2)\n"
    "run.keep(first=first, second=second)\noptimizer = first\n"
)
CARRIED["a loss function that is replaced"] = (
    "criterion",
    f"""def mean(found): return found.mean()
criterion = torch.sum
{HEAD}criterion(net(batch)).backward()
        if run.step_number == 2: criterion = mean""",
)
CARRIED["a method that is replaced in a trainer"] = (
    "self.criterion",
    """class Trainer:
        def mean(self, found): return found.mean()
        def total(self, found): return found.sum()
        def fit(self):
            self.criterion = self.total
            for batch in run.steps(loader):
                with run.step(): self.criterion(net(batch)).backward()
                if run.step_number == 2: self.criterion = self.mean
Trainer().fit()""",
)
CARRIED["an optimizer that is exchanged for another kept one"] = (
    "optimizer",
    f"""{TWO}{HEAD}net(batch).sum().backward(); optimizer.step()
        if run.step_number == 2: optimizer = second""",
)
HARMLESS[
    "functions and optimizers that are chosen in each step"
] = f"""{TWO}def mean(found): return found.mean()
{HEAD}criterion = mean if run.step_number % 2 else torch.sum
        if run.step_number % 2: optimizer = first
        else: optimizer = second
        def work(): criterion(net(batch)).backward()
        work(); optimizer.step()"""
HARMLESS["methods that stay as they are"] = """class Trainer:
    def __init__(self): self.criterion, self.shown = self.mean, []
    def mean(self, found): return found.mean()
    def fit(self):
        for batch in run.steps(loader):
            with run.step():
                self.criterion(net(batch)).backward()
                self.criterion = self.mean
            self.show(batch)
    def show(self, batch): self.shown.append(len(batch))
Trainer().fit()"""
HARMLESS["a counter beside a rate that is shown"] = (
    f"{OPTIMIZER}n = 0\n{HEAD}net(batch).sum().backward()\n        opt.step()\n        n += 1\n"
    "        row = {'lr': opt.param_groups[0]['lr']}\n        row['n'] = n\n        print(row)"
)


KEPT = """\
import copy
model = nn.Linear(2, 3)
run.keep(model=model)
class Average:
    def __init__(self): self.shadow = {name: one.clone() for name, one in model.state_dict().items()}
    def update(self):
        for name, one in model.state_dict().items(): self.shadow[name].mul_(0.9).add_(one + 1)
average, best, weights, state = Average(), -1.0, None, None
"""
BEST = (
    KEPT
    + HEAD
    + "loss = net(batch).sum(); loss.backward()\n        if loss.item() > best:\n            best = loss.item(); "
)
# Each affects no step, but is what the program is run for.
RESULTS = {
    "an average that the program saves": (
        "average.shadow",
        f"{KEPT}{HEAD}average.update()\ntorch.save(average.shadow, '/dev/null')",
    ),
    "an average that the loop saves": (
        "average.shadow",
        f"{KEPT}{HEAD}average.update()\n        if run.step_number == 3: torch.save(average.shadow, '/dev/null')",
    ),
    "the best weights": (
        "weights",
        f"{BEST}weights = copy.deepcopy(model.state_dict())\nmodel.load_state_dict(weights)",
    ),
    "the best model": ("weights", f"{BEST}weights = copy.deepcopy(model)\nprint(weights)"),
    "a sum of weights in arrays": (
        "weights",
        f"{KEPT}weights = [np.zeros((3, 2)), np.zeros(3)]\n{HEAD}weights = [one + 1 for one in weights]\nprint(weights)",
    ),
}
NO_RESULTS = {
    "a state that is saved at once": f"{BEST}state = copy.deepcopy(model.state_dict()); torch.save(state, '/dev/null')",
    "a state that is made again at the end": f"{BEST}state = model.state_dict()\nstate = model.state_dict()\nprint(state)",
    "losses that are shown at the end": f"{KEPT}losses = []\n{HEAD}losses.append(net(batch).detach())\nprint(losses)",
    "weights that are only compared": f"{KEPT}before = model.weight.clone(), model.bias.clone()\n{HEAD}"
    "print(before[0].sum())\n        before = model.weight + 1, model.bias + 1",
    "what stays as it is": f"{KEPT}first = copy.deepcopy(model)\n{HEAD}print(first)\nprint(first)",
    "what a kept object holds": f"{KEPT}run.keep(average=average)\n{HEAD}average.update()\nprint(average.shadow)",
}


@pytest.mark.parametrize("kind", RESULTS)
def test_weights_that_are_used_behind_the_loop_are_named(tmp_path, kind, capsys):
    """A replaced rank would end with another average, or with other best weights, than the run without faults."""
    name, source = RESULTS[kind]
    assert names_found(tmp_path, source) == [name]


@pytest.mark.parametrize("kind", NO_RESULTS)
def test_weights_that_are_no_result_are_not_named(tmp_path, kind, capsys):
    """Control: those of the moment, those that are only shown in the loop, and kept ones."""
    assert names_found(tmp_path, NO_RESULTS[kind]) == []


@pytest.mark.parametrize("kind", CARRIED)
def test_a_variable_that_carries_over_steps_is_named(tmp_path, kind, capsys):
    """By its own name only, whatever it is and wherever it is changed."""
    name, source = CARRIED[kind]
    found = names_found(tmp_path, source)
    assert name in found
    assert set(found) <= {name, "more", "bar"}, found


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_trains_nothing_by_itself_is_not_named(tmp_path, kind, capsys):
    """Control: batches, losses, timers, and what is only shown."""
    assert names_found(tmp_path, HARMLESS[kind]) == []


OTHER_FILE = """\
calls, history, table = 0, [], {'seen': 0.0}
def scale():
    global calls
    calls += 1
    return 0.9**calls
def inner(x):
    table['seen'] += 1
    return x * table['seen']
def weigh(x):
    return inner(x) + 1
def logged(loss):
    history.append(loss.item())
    return loss
def constant():
    return len('two') * 0.5
"""


HOOKED = """\
import functools
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)
    def forward(self, x): return self.last(self.first(x))
net = Net()
run.keep(net=net)
feats = {}
def hook(module, inputs, output): feats["h"] = output
def named(name):
    def hook(module, inputs, output): feats[name] = output.detach()
    return hook
def sometimes(module, inputs, output):
    if inputs[0].sum() % 4 == 0: feats["h"] = output.detach()
def early(module, inputs, output):
    if inputs[0].sum() % 4: return
    feats["h"] = output.detach()
def given(name, module, inputs, output): feats[name] = output
def average(module, inputs, output): feats["h"] = 0.9 * feats["h"] + output.detach()
class Extractor:
    count = 0
    def counted(self, module, inputs, output):
        self.count += 1
        feats["h"] = output * self.count
    def hook(self, module, inputs, output): self.hidden = output
extractor = Extractor()
"""
_AFTER = HEAD + "loss = net(batch).sum() + feats['h'].sum(); loss.backward()"
HOOKS = {
    "a dict": ([], "net.first.register_forward_hook(hook)\n" + _AFTER),
    "a function made by name": ([], "net.first.register_forward_hook(named('h'))\n" + _AFTER),
    "a partial": ([], "net.last.register_forward_hook(functools.partial(given, 'h'))\n" + _AFTER),
    "an attribute": (
        [],
        (
            f"net.first.register_forward_hook(extractor.hook)\n{HEAD}"
            "loss = net(batch).sum() + extractor.hidden.sum(); loss.backward()"
        ),
    ),
    "a lambda": (
        [],
        "net.first.register_forward_hook(lambda *given: feats.update(h=given[2]))\n" + _AFTER,
    ),
    "a lambda by key": (
        [],
        (
            "for name, one in net.named_children():\n"
            "    one.register_forward_hook(lambda m, i, o, n=name: feats.__setitem__(n, o))\n"
            f"{HEAD}(net(batch).sum() + feats['first'].sum()).backward()"
        ),
    ),
    "all of a dict": (
        [],
        (
            "for name, one in net.named_children(): one.register_forward_hook(named(name))\n"
            f"{HEAD}(net(batch).sum() + sum(one.sum() for one in feats.values())).backward()"
        ),
    ),
    "a list that is cleared": (
        [],
        (
            "seen = []\nnet.first.register_forward_hook(lambda *given: seen.append(given[2]))\n"
            f"{HEAD}seen.clear(); (net(batch).sum() + seen[0].sum()).backward()"
        ),
    ),
    "all of a dict that the loop writes too": (
        ["feats"],
        (
            f"net.first.register_forward_hook(named('h'))\n{HEAD}"
            "(net(batch).sum() + sum(one.sum() for one in feats.values())).backward()\n"
            "        feats['old'] = batch"
        ),
    ),
    "a list that is cleared behind": (
        ["seen"],
        (
            "seen = [torch.zeros(1)]\nnet.first.register_forward_hook(lambda *given: seen.append(given[2].detach()))\n"
            f"{HEAD}(net(batch).sum() + seen[-1].sum()).backward()\n        if len(seen) > 3: seen.clear()"
        ),
    ),
    "read before the module is called": (
        ["feats"],
        (
            f"feats['h'] = torch.zeros(3)\nnet.first.register_forward_hook(hook)\n{HEAD}"
            "old = feats['h'].detach(); (net(batch).sum() + old.sum()).backward()"
        ),
    ),
    "another place": (
        ["feats"],
        (
            f"net.first.register_forward_hook(hook)\nfeats['n'] = 0\n{HEAD}"
            "loss = net(batch).sum() * feats['n']; loss.backward(); feats['n'] += 1"
        ),
    ),
    "an average": (
        ["feats"],
        "feats['h'] = torch.zeros(3)\nnet.first.register_forward_hook(average)\n" + _AFTER,
    ),
    "scaled by a count of the hook's own": (
        ["feats"],
        "net.first.register_forward_hook(extractor.counted)\n" + _AFTER,
    ),
    "written in some steps": (
        ["feats"],
        "feats['h'] = torch.zeros(3)\nnet.first.register_forward_hook(sometimes)\n" + _AFTER,
    ),
    "written behind a return": (
        ["feats"],
        "feats['h'] = torch.zeros(3)\nnet.first.register_forward_hook(early)\n" + _AFTER,
    ),
    "of a part that is not called": (
        ["feats"],
        (
            f"feats['h'] = torch.zeros(3)\nnet.last.register_forward_hook(hook)\n{HEAD}"
            "loss = net.first(batch).sum() + feats['h'].sum(); loss.backward()\n    net(batch)"
        ),
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_what_forward_hooks_write_is_carried_only_where_it_may_be_old(tmp_path, kind):
    """As features of a layer for a second loss: those of the same step, once the module was called."""
    names, program = HOOKS[kind]
    assert names_found(tmp_path, HOOKED + program) == names


@pytest.mark.parametrize(
    ("used", "named"),
    [
        ("(net(batch) * other_file.scale()).sum().backward()", "other_file.calls"),
        ("net(other_file.weigh(batch)).sum().backward()", "other_file.table"),
        (
            "opt.param_groups[0]['lr'] = other_file.scale(); net(batch).sum().backward()",
            "other_file.calls",
        ),
        ("for group in opt.param_groups: group['lr'] = scale()", "other_file.calls"),
        ("other_file.logged(net(batch).sum()).backward()", ""),
        ("(net(batch) * other_file.constant()).sum().backward()", ""),
        ("net(batch).sum().backward(); print(other_file.scale())", ""),
    ],
)
def test_state_of_another_file_is_named_where_it_trains(tmp_path, monkeypatch, used, named):
    """By its module, and with the place in that file; not what it only notes."""
    (tmp_path / "other_file.py").write_text(OTHER_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_file", raising=False)
    source = f"import other_file\nfrom other_file import scale\n{OPTIMIZER}{HEAD}{used}"
    run = run_of(tmp_path, source)
    assert [one.partition("`")[2].partition("`")[0] for one in run.found] == [named] * bool(named)
    assert all("(other_file.py:" in one for one in run.found)


class CountingSGD(torch.optim.SGD):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.count, self.noise = 0, {"scale": 1.0}


class ClassCountingSGD(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        type(self).count += 1
        return super().step(closure)


class DescribedSGD(CountingSGD):
    def state_dict(self):
        return {**super().state_dict(), "count": self.count}


@pytest.mark.parametrize("make", [CountingSGD, DescribedSGD, torch.optim.SGD, torch.optim.LBFGS])
def test_what_an_optimizer_holds_besides_is_looked_at(make):
    """Not what torch, a scheduler and a scaler set; nor where the class describes its state itself."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make([weight], lr=0.1)
    before = dict(hidden_state({"opt": optimizer}))
    assert sorted(before) == (["opt.count", "opt.noise"] if make is CountingSGD else [])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight.grad = torch.ones(2)
    optimizer.step(weight.sum)
    scheduler.step()
    assert hidden_state({"opt": optimizer}).keys() == before.keys()
    optimizer.mine = 1
    assert ("opt.mine" in hidden_state({"opt": optimizer})) is (make is not DescribedSGD)


def test_what_an_optimizer_counts_in_its_class_is_looked_at():
    """Where the class is the user's; control: of torch's classes nothing."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ClassCountingSGD([weight], lr=0.1)
    assert hidden_state({"opt": optimizer}) == {"opt: ClassCountingSGD.count": 0}
    optimizer.step()
    assert hidden_state({"opt": optimizer}) == {"opt: ClassCountingSGD.count": 1}


@pytest.mark.parametrize("kind", ["a counter", "a deque of features", "a generator of numpy's"])
def test_a_loop_in_a_function_is_read_too(tmp_path, kind):
    """And a look leaves no batch alive."""
    name, source = CARRIED[kind]
    body = "def main():\n" + textwrap.indent(source, "    ") + "\nmain()"
    assert names_found(tmp_path, body) == [name]


def test_the_line_is_that_of_the_change(tmp_path):
    """In the program's own file."""
    path = tmp_path / "program.py"
    path.write_text(BEGIN + CARRIED["a counter"][1], encoding="utf-8")
    run = Loop()
    exec(compile(path.read_text(), str(path), "exec"), {"run": run})
    line = path.read_text().splitlines().index("    global_step += 1") + 1
    assert run.found == [f"`global_step` (program.py:{line})"]


def test_a_look_keeps_no_batch_alive():
    """Where frames give a copy of their variables, that would hold the batch until the loop ends."""
    variables = LoopVariables(is_kept=lambda _: False)

    def loop():
        batch = torch.ones(1)
        variables.look(sys._getframe())
        count = sys.getrefcount(batch)
        del batch
        return count

    assert loop() == 2


class _Wrapper(torch.optim.Optimizer):
    """As accelerate wraps one: its own counts are no state of training."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer):
        self.optimizer = optimizer


class _Lookahead(torch.optim.Optimizer):
    """It has slow weights of its own, which a replaced rank lacks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_wrapper_of_a_kept_optimizer_is_no_variable():
    """A scheduler is one, though it has the optimizer as an attribute too."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert _is_kept({id(optimizer)}, _Wrapper(optimizer))
    assert not _is_kept(set(), _Wrapper(optimizer))
    assert not _is_kept({id(optimizer)}, schedule)
    assert not _is_kept({id(optimizer)}, _Lookahead(optimizer))


SLOW = """\
class Held:
    def __init__(self, holder=None):
        self.slow, self.holder = w.detach().clone(), holder or self
    def state_dict(self): return {"slow": self.holder.slow}
    def load_state_dict(self, state): self.holder.slow.copy_(state["slow"])
class Around:
    def __init__(self): self.held, self.slow = Held(), w.detach().clone()
    def step(self):
        slow = self.SLOW
        with torch.no_grad(): slow.add_(w, alpha=0.5); w.copy_(slow)
look = Around()
run.keep(KEPT)
""" + (HEAD + "net(batch).sum().backward()\n        look.step()")


@pytest.mark.parametrize(
    ("slow", "kept", "names"),
    [
        ("held.slow", "w=w, slow=look.held", []),
        ("slow", "w=w, slow=Held(look)", ["look.slow"]),  # it may lack a part
    ],
)
def test_a_wrapper_s_weights_are_kept_in_an_object_that_it_holds(tmp_path, slow, kept, names):
    """As the refusal of a lookahead says it."""
    assert names_found(tmp_path, SLOW.replace("SLOW", slow).replace("KEPT", kept)) == names


# --- objects of a loop that nobody has written ---


def _put(owner, value):
    owner.x = value


HELD = {
    "an array that is written in place": (np.zeros(2), lambda one: one.x.__setitem__(0, 1.0)),
    "an array that is replaced": (np.zeros(2), lambda one: _put(one, one.x + 1)),
    "a deque": (collections.deque(), lambda one: one.x.append(1)),
    "a counter deep in objects": (
        SimpleNamespace(inner=[SimpleNamespace(count=0)]),
        lambda one: setattr(one.x.inner[0], "count", 1),
    ),
    "a weight of a module": (
        SimpleNamespace(average=torch.nn.Linear(1, 1)),
        lambda one: one.x.average.weight.detach().zero_(),
    ),
    "an iterator": (iter(range(9)), lambda one: next(one.x)),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_held_value_that_changes_is_named_once(kind):
    value, change = HELD[kind]
    owner = SimpleNamespace(x=value, y=np.ones(2), z=SimpleNamespace(rows=[1, "a"]))
    held = HeldValues(lambda: vars(owner), is_apart=lambda _: False)
    assert held.look() == held.look() == []
    change(owner)
    assert held.look() == ["`x`"]
    change(owner)
    assert held.look() == []


def test_what_is_apart_is_not_looked_into():
    apart = SimpleNamespace(count=0)
    owner = {"x": apart, "y": SimpleNamespace(back=apart)}
    held = HeldValues(lambda: owner, is_apart=lambda value: value is apart)
    held.look()
    apart.count = 1
    assert held.look() == []


def test_a_loop_over_a_generator_of_the_program_is_read(tmp_path):
    """Many move their batches to a device in one."""
    source = (
        "def moved():\n    for batch in run.steps(loader):\n        yield batch\n"
        "n = 0\nfor batch in moved():\n    n += 1\n    (net(batch) * n).sum().backward()"
    )
    assert names_found(tmp_path, source) == ["n"]
    calm = source.replace("n += 1", "n = run.step_number")
    (tmp_path / "calm").mkdir()
    assert names_found(tmp_path / "calm", calm) == []


IN_EPOCHS = (
    "seen = 0\nfor epoch in range(3):\n    for batch in run.steps(loader):\n        with run.step():\n"
    "            (net(batch) * 0.5**{name}).sum().backward()\n    seen += 1"
)


@pytest.mark.parametrize(("name", "found"), [("epoch", []), ("seen", ["seen"])])
def test_the_number_of_an_epoch_that_a_loop_gives_is_known(tmp_path, name, found):
    """As accelerator.epochs() gives it in a new process too; control: a count of the program's own, which begins at 0."""
    assert names_found(tmp_path, IN_EPOCHS.format(name=name)) == found


def test_a_long_list_of_numbers_is_looked_at_whole(tmp_path):
    source = (
        "rates = [1.0] * 20_000\n"
        + HEAD
        + "rates[7] *= 0.5\n        (net(batch) * rates[7]).sum().backward()"
    )
    assert names_found(tmp_path, source) == ["rates"]


def variables_behind(tmp_path, function):
    """The names that are said of a program with a function that is called between steps."""
    run = Loop()
    functions = []
    run.variables = LoopVariables(is_kept=lambda value: value is run, functions=lambda: functions)
    path = tmp_path / "program.py"
    head = BEGIN + textwrap.dedent(function)
    path.write_text(
        head + "\nfunctions.append(every)\n" + HEAD + "net(batch).sum().backward()\n    every()\n"
    )
    own = {"run": run, "functions": functions, "__name__": "program"}
    exec(compile(path.read_text(), str(path), "exec"), own)
    return [one.partition("`")[2].partition("`")[0] for one in run.found]


def test_functions_between_steps_are_read_like_the_loop(tmp_path):
    stopping = (
        "bad = 0\ndef every():\n    global bad\n    bad += 1\n    if bad > 99:\n        run.stop()"
    )
    assert variables_behind(tmp_path, stopping) == ["bad"]
    (tmp_path / "shown").mkdir()
    shown = "bad = 0\ndef every():\n    global bad\n    bad += 1\n    print(bad)"
    assert variables_behind(tmp_path / "shown", shown) == []


@pytest.mark.parametrize(
    ("body", "late"),
    [
        ("loss = net(x)\n loss.backward(); o.step()", set()),
        ("loss = net(x); loss.backward(); o.step(); y = loss.item()", {"y"}),
        ("loss = train(x)", {"loss"}),
        ("loss = self.one(x)", {"loss"}),
        ("self.y = train(x)", {"self.y"}),
        ("loss, y = unknown(x)", {"loss", "y"}),
        ("loss = 0\n train(x)", set()),
        ("for part in x:\n  y = net(part)\n o.step()", set()),
        ("if x:\n  y = train(x)\n else:\n  y = 0", {"y"}),
        ("scaler.step(o)\n lr = o.lr", set()),
    ],
)
def test_names_that_a_block_sets_behind_its_update(body, late):
    """Directly, by a function or a method of the file, or by somebody else's; ``lr`` is not read behind the block."""
    head = "def train(x):\n return update(x)\ndef update(x):\n o.step()\n"
    head += "class C:\n def one(self, x):\n  self.o.step()\n"
    source = f"{head}for x in run.steps(data):\n with run.step():\n  {body.replace(chr(10), chr(10) + ' ')}\n"
    tree = ast.parse(source + " print(loss, y, self.y)\n")
    assert late_names(tree, tree.body[-1]) == late


@pytest.mark.parametrize("block", ["run.step()", "accelerator.accumulate(model)", "no_grad()"])
def test_names_are_late_in_blocks_that_are_a_step(block):
    """Control: those of another block, whose body is never for nothing."""
    tree = ast.parse(f"for x in batches:\n with {block}:\n  y = train(x)\n print(y)\n")
    assert late_names(tree, tree.body[0]) == (set() if block == "no_grad()" else {"y"})
