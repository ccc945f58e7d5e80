"""Writes loops of one's own, drawn from a seed: models, optimizers, schedules, data and habits as people combine them.

Each keeps what it must, so that a run of it that is hit or resumed has to be exact.
"""

from __future__ import annotations

import textwrap

HEAD = """
import os, random, signal, time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_runner

ROWS, BATCH, STEPS = {rows}, {batch}, {steps}


def harm(run, where):
    path = f"harm_{{run.rank}}_{{run.step_number}}_{{where}}"
    if os.path.exists(path):
        text = open(path).read()
        os.rename(path, "done_" + path)
        exec(text)


class Tally:
    def __init__(self):
        self.drawn, self.count, self.best = 0.0, 0, float("inf")

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Shown:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return dict(self.value)


numbers = torch.Generator().manual_seed(5)
x = torch.randn(ROWS, 8, generator=numbers)
y = (x[:, :1] * x[:, 1:2]).tanh() + 0.1 * x[:, 2:3]
"""

MODELS = {
    "plain": "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))",
    "dropout": "nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1))",
    "batch norm": "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))",
    "normed weight": "nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 1))",
    "counts": "Counting()",
    "recurrent": "Recurrent()",
    "tied": "Tied()",
    "skips": "Skips()",
    "queue": "Queue()",
    "hooked": "hooked(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))",
}
CLASSES = {
    "counts": """
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
                self.register_buffer("mean", torch.zeros(16))
                self.calls = 0

            def forward(self, inputs):
                hidden = self.first(inputs).relu()
                if self.training:
                    self.calls += 1
                    with torch.no_grad():
                        self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
                return self.last(hidden - self.mean) * (1 + 0.01 * (self.calls % 3))
        """,
    "recurrent": """
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell, self.last = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 1)

            def forward(self, inputs):
                return self.last(self.cell(inputs.view(-1, 4, 2))[0][:, -1])
        """,
    "tied": """
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
                self.b.weight = self.a.weight
                self.last = nn.Linear(8, 1)

            def forward(self, inputs):
                return self.last(self.b(self.a(inputs).relu()).relu())
        """,
    "queue": """
        class Queue(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
                self.register_buffer("keys", torch.zeros(6, 8), persistent=False)
                self.at, self.seen = 0, []

            def forward(self, inputs):
                hidden = self.first(inputs)
                if self.training:
                    self.keys[self.at % 6] = hidden.detach().mean(0)
                    self.at += 1
                    self.seen.append(self.at * 0.1)
                    del self.seen[:-4]
                return self.last(hidden + 0.1 * self.keys.mean(0)) + 1e-3 * sum(self.seen)
        """,
    "hooked": """
        def hooked(model):
            model.count = 0

            def count(module, given):
                if module.training:
                    module.count += 1
                    return (given[0] * (1 + 0.01 * (module.count % 4)),)

            model.register_forward_pre_hook(count)
            return model
        """,
    "skips": """
        class Skips(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
                self.last = nn.Linear(8, 1)

            def forward(self, inputs):
                for block in self.blocks:
                    if not self.training or random.random() < 0.7:
                        inputs = inputs + block(inputs).relu()
                return self.last(inputs)
        """,
}
OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)",
    "torch.optim.AdamW(model.parameters(), lr=1e-2)",
    (
        "torch.optim.Adam([{'params': [p for p in model.parameters() if p.ndim > 1], 'weight_decay': 0.1},"
        " {'params': [p for p in model.parameters() if p.ndim < 2], 'lr': 2e-2}], lr=1e-2)"
    ),
    "torch.optim.RMSprop(model.parameters(), lr=5e-3, momentum=0.5)",
    "torch.optim.Adagrad(model.parameters(), lr=0.05)",
)
# Kept as ``scheduler``, and what a step does with it.
SCHEDULES = {
    "": ("", ""),
    "steps": ("torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.7)", "scheduler.step()"),
    "cosine": (
        "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)",
        "scheduler.step()",
    ),
    "one cycle": (
        "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1, cycle_momentum=False)",
        "scheduler.step()",
    ),
    "warm": (
        (
            "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),"
            " torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)], milestones=[5])"
        ),
        "scheduler.step()",
    ),
    "by hand": (
        "",
        "optimizer.param_groups[0]['lr'] = 0.01 / (1 + 0.1 * run.step_number)",
    ),
    "late": (
        "torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)",
        "",
    ),
    "plateau": (
        "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)",
        "",
    ),
}
LOADERS = {
    "ours": "run.loader(data, batch_size=BATCH)",
    "ours with workers": "run.loader(data, batch_size=BATCH, num_workers=1)",
    "own": "DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, run.world_size, run.rank), drop_last=True)",
    "seeded": "DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(run.rank), drop_last=True)",
    "list": "[(a, b) for a, b in zip(x[run.rank::run.world_size].split(BATCH), y[run.rank::run.world_size].split(BATCH))]",
}
# What happens to a batch before its block; what of the loss; what between backward and the update; what after it.
BEFORE = {
    "noise": "inputs = inputs + 0.1 * torch.randn_like(inputs)",
    "mixup": "share, order = np.random.beta(0.4, 0.4), torch.randperm(len(inputs))\n"
    "inputs, labels = share * inputs + (1 - share) * inputs[order], share * labels + (1 - share) * labels[order]",
    "flip": "inputs = -inputs if random.random() < 0.3 else inputs",
    "drawn here": "inputs = inputs + 0.05 * torch.randn(inputs.shape, generator=own)",
}
LOSSES = {
    "plain": "loss = F.mse_loss(net(inputs), labels)",
    "bf16": "with torch.autocast('cpu', dtype=torch.bfloat16):\n    loss = F.mse_loss(net(inputs).float(), labels)",
    "penalty": "loss = F.mse_loss(net(inputs), labels) + 1e-3 * sum(p.square().sum() for p in model.parameters())",
    "target": "with torch.no_grad():\n    wanted = target(inputs)\nloss = F.mse_loss(net(inputs), 0.9 * labels + 0.1 * wanted)",
    "two views": "loss = F.mse_loss(net(torch.cat([inputs, inputs + 0.1])), labels.repeat(2, 1))",
    "teacher": "with torch.no_grad():\n    wanted = teacher(inputs)\nloss = F.mse_loss(net(inputs), 0.5 * labels + 0.5 * wanted)",
}
CLIPS = (
    "",
    "nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
    "nn.utils.clip_grad_value_(model.parameters(), 0.1)",
)
AFTER = {
    "average": "ema.update_parameters(model)",
    "average by hand": "with torch.no_grad():\n    for mean, new in zip(shadow.parameters(), model.parameters()):\n"
    "        mean.lerp_(new, 0.1)",
    "tally": "tally.count += 1",
}
# What the function between steps does beside its evaluation.
BETWEEN = {
    "counts": "model.evaluations = getattr(model, 'evaluations', 0) + 1",
    "best": "if found <= tally.best:\n    best.load_state_dict(model.state_dict())",
    "target": "target.load_state_dict(model.state_dict())",
    "decays": "for group in optimizer.param_groups:\n    group['weight_decay'] = 0.01 * (1 + run.epoch)",
    "resets": "optimizer.state.clear()",
    "draws": "tally.drawn = torch.rand(1, generator=torch.Generator().manual_seed(run.step_number)).item()",
    "stops": "if run.step_number >= 15:\n    run.stop()",
}
# What is done behind the block of a step.
BEHIND = {
    "scheduler": "scheduler.step()",
    "counts": "tally.count += 1",
    "draws": "tally.drawn = torch.rand(1, generator=torch.Generator().manual_seed(run.step_number)).item()",
}
PLACES = ("drawn", "forward", "backward", "update", "behind", "every")
FORGOTTEN = ("scheduler", "ema", "shadow", "tally", "own", "mine", "target", "best")
NAMES = (
    *("run", "model", "teacher", "optimizer", "net", "loader", "more", "own", "mine", "tally"),
    *("scheduler", "ema", "shadow", "target", "best"),
)
STYLES = ("flat", "function", "trainer", "helper")


def written(chance, *, is_careless=False):
    """Return the text of a loop, what it is made of, and how many steps it makes."""
    model = chance.choice([*MODELS])
    parts = {
        "model": model,
        "optimizer": chance.choice(OPTIMIZERS),
        "schedule": chance.choice([*SCHEDULES]),
        "loader": chance.choice([*LOADERS]),
        "before": chance.sample([*BEFORE], chance.choice((0, 0, 1, 2))),
        "loss": chance.choice([*LOSSES]),
        "clip": chance.choice(CLIPS),
        "after": sorted(chance.sample([*AFTER], chance.choice((0, 1, 2, 3)))),
        "halves": chance.random() < 0.25,
        "every": chance.choice(("", "epochs=1", "steps=5")),
        "style": chance.choice(STYLES),
        "by steps": chance.random() < 0.5,
        "notes": chance.random() < 0.5,
        "sums": chance.random() < 0.4,
        "between": sorted(chance.sample([*BETWEEN], chance.choice((0, 0, 1, 2)))),
        "behind": chance.choice(("", "", "counts", "draws")),
        "forgets": sorted(chance.sample(FORGOTTEN, chance.choice((0, 1, 2))))
        if is_careless
        else [],
        "zero": chance.choice(("", "set_to_none=False")),
        "zeroes first": chance.random() < 0.3,
    }
    if parts["schedule"] == "plateau" or parts["between"]:
        parts["every"] = parts["every"] or "epochs=1"
    if parts["loss"] == "target" and "target" not in parts["between"]:
        parts["between"].append("target")
        parts["every"] = parts["every"] or "steps=5"
    batch, rows = chance.choice((4, 6, 8)), chance.choice((48, 60, 72))
    per_epoch = rows // 2 // batch
    if parts["loader"] == "seeded":
        per_epoch = rows // batch
    elif "ours" in parts["loader"]:
        per_epoch = -(-rows // (2 * batch))
    epochs = -(-18 // per_epoch)
    steps = chance.choice((17, 20)) if parts["by steps"] else epochs * per_epoch
    head = HEAD.format(rows=rows, batch=batch, steps=steps)
    return "\n".join([head, textwrap.dedent(CLASSES.get(model, "")), _body(parts, epochs)]), parts


def _body(parts, epochs):
    built, step, style = _built(parts), _step(parts), parts["style"]
    block = {"helper": "train_one(inputs, labels)", "trainer": "self.train_one(inputs, labels)"}
    length = "max_steps=STEPS" if parts["by steps"] else f"epochs={epochs}"
    lines = [
        "time.sleep(0.02)",
        "harm(run, 'drawn')",
        *(BEFORE[one] for one in parts["before"]),
        f"with run.step():\n{_in(block.get(style, step))}",
        _behind(parts),
        "harm(run, 'behind')",
    ]
    loop = f"for inputs, labels in run.steps(loader, {length}):\n{_in(_lines(lines))}"
    saved = (
        "{'model': model.state_dict(), **{name: one.state_dict() for name, one in more.items()}}"
    )
    rest = f"{loop}\nif run.is_first:\n    torch.save({saved}, 'final.pt')\n"
    if style == "trainer":
        return _trainer(built, step, rest)
    if style == "function":
        return f"def main():\n{_in(_lines([built, rest]))}\n\n\nif __name__ == '__main__':\n    main()\n"
    helper = f"def train_one(inputs, labels):\n{_in(_lines([step, 'return loss.detach()']))}"
    return _lines([built, helper if style == "helper" else "", rest])


def _trainer(built, step, rest):
    """Return a class that has the parts as attributes, and the step as a method."""
    given = [name for name in NAMES if f"\n{name} =" in f"\n{built}"]
    kept = _lines(f"self.{name} = {name}" for name in given)
    taken = _lines(f"{name} = self.{name}" for name in given)
    methods = [
        f"def __init__(self):\n{_in(_lines([built, kept]))}",
        f"def train_one(self, inputs, labels):\n{_in(_lines([taken, step]))}",
        f"def fit(self):\n{_in(_lines([taken, rest]))}",
    ]
    return "class Trainer:\n" + _in("\n\n".join(methods)) + "\n\n\nTrainer().fit()\n"


def _built(parts):
    """Everything before the loop."""
    scheduler, _ = SCHEDULES[parts["schedule"]]
    lines = [
        "run = ddp_runner.attach()",
        "torch.manual_seed(11)",
        f"model = {MODELS[parts['model']]}",
        f"optimizer = {parts['optimizer']}",
        "more = {}",
    ]
    if parts["loss"] == "teacher":
        lines.append("teacher = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).eval()")
    if scheduler:
        lines.append(f"scheduler = {scheduler}\nmore['scheduler'] = scheduler")
    if "average" in parts["after"]:
        lines.append(
            "ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))\nmore['ema'] = ema"
        )
    if "average by hand" in parts["after"]:
        shadow = f"shadow = {MODELS[parts['model']]}\nshadow.load_state_dict(model.state_dict())"
        lines.append(f"{shadow}\nshadow.requires_grad_(False)\nmore['shadow'] = shadow")
    for name in [one for one in ("best", "target") if one in parts["between"]]:
        twin = f"{name} = {MODELS[parts['model']]}\n{name}.requires_grad_(False)"
        lines.append(f"{twin}\nmore['{name}'] = {name}")
    if "target" in parts["between"] and parts["loss"] != "teacher":
        lines.append("target.load_state_dict(model.state_dict())")
    lines += ["tally = Tally()\nmore['tally'] = tally", "net = run.ddp(model)"]
    forgets = parts["forgets"]
    lines.append(
        f"run.keep(model=model, optimizer=optimizer, **{{n: o for n, o in more.items() if n not in {forgets} and n != 'mine'}})"
    )
    if "drawn here" in parts["before"]:
        lines.append("own = torch.Generator().manual_seed(100 + run.rank)")
        lines.append("" if "own" in forgets else "run.keep_local(own=own)")
    if parts["sums"]:
        lines.append("mine = {'loss': 0.0}\nmore['mine'] = Shown(mine)")
        lines.append("" if "mine" in forgets else "run.keep_local(mine=mine)")
    lines += ["data = TensorDataset(x, y)", f"loader = {LOADERS[parts['loader']]}"]
    if parts["every"]:
        lines.append(_evaluation(parts))
    return _lines(lines)


def _evaluation(parts):
    body = [
        "harm(run, 'every')",
        "model.eval()",
        "with torch.no_grad():\n    found = F.mse_loss(model(x), y).item()",
        "model.train()",
        "tally.best = min(tally.best, found)",
    ]
    body[-1:-1] = [BETWEEN[one] for one in parts["between"]]
    if parts["schedule"] == "plateau":
        body.append("scheduler.step(found)")
    return f"@run.every({parts['every']})\ndef evaluate():\n{_in(_lines(body))}\n"


def _behind(parts):
    late = "scheduler.step()" if parts["schedule"] == "late" else ""
    return _lines([late, BEHIND.get(parts["behind"], "")])


def _step(parts):
    """The block of a step, as lines."""
    loss = LOSSES[parts["loss"]]
    if parts["halves"]:
        half = loss.replace("inputs", "inputs[half]").replace("labels", "labels[half]")
        first = _lines(["half = slice(0, len(inputs) // 2)", half, "(loss / 2).backward()"])
        work = [
            f"with net.no_sync():\n{_in(first)}",
            "half = slice(len(inputs) // 2, None)",
            half,
            "harm(run, 'forward')",
            "(loss / 2).backward()",
        ]
    else:
        work = [loss, "harm(run, 'forward')", "loss.backward()"]
    if parts["notes"]:
        work.insert(-1, "run.note(loss=loss)")
    zero = f"optimizer.zero_grad({parts['zero']})"
    return _lines(
        [
            zero if parts["zeroes first"] else "",
            *work,
            "harm(run, 'backward')",
            "mine['loss'] += loss.item()" if parts["sums"] else "",
            parts["clip"],
            "optimizer.step()",
            "harm(run, 'update')",
            "" if parts["zeroes first"] else zero,
            SCHEDULES[parts["schedule"]][1],
            *(AFTER[one] for one in parts["after"]),
        ]
    )


def _lines(parts):
    return "\n".join(one for one in parts if one)


def _in(text):
    return textwrap.indent(text, "    ")
