"""Loops in which a count that trains is kept where only a close reading of the program finds it."""

from __future__ import annotations

BLOCK = "for batch in run.steps(loader):\n    with run.step():\n        "
TRAIN = BLOCK + "(net(batch) * {}).sum().backward()"
COUNTING = "class Own:\n    def __init__(self): self.n = 0\n    def {}:\n        self.n += 1\n        return self.n\n"


def _program(setup: str, weight: str) -> str:
    return setup + TRAIN.format(weight)


# By kind: the name that is said, and the program.
CARRIED = {
    "the default of a parameter": (
        "weight.seen",
        _program(
            "def weight(seen=[]):\n    seen.append(1)\n    return len(seen)\n",
            "weight()",
        ),
    ),
    "the default of a parameter that is given by its name only": (
        "weight.cache",
        _program(
            "def weight(*, cache={'n': 0}):\n    cache['n'] += 1\n    return cache['n']\n",
            "weight()",
        ),
    ),
    "an object in a default": (
        "weight.own.n",
        _program(
            "class Own: n = 0\ndef weight(own=Own()):\n    own.n += 1\n    return own.n\n",
            "weight()",
        ),
    ),
    "a property that counts": (
        "own.n",
        _program(
            COUNTING.format("_of(self)") + "    weight = property(_of)\nown = Own()\n", "own.weight"
        ),
    ),
    "a meter's average, as a property": (
        "meter.total",
        "class Meter:\n    def __init__(self): self.total = self.n = 0\n"
        "    def update(self, value): self.total += value; self.n += 1\n"
        "    @property\n    def avg(self): return self.total / max(1, self.n)\nmeter = Meter()\n"
        + BLOCK
        + "(net(batch) * meter.avg).sum().backward()\n        meter.update(1 + run.step_number)",
    ),
    "a class, by its own method": (
        "Own.n",
        _program(
            "class Own:\n    n = 0\n    @classmethod\n    def weight(cls):\n        cls.n += 1\n        return cls.n\n",
            "Own.weight()",
        ),
    ),
    "a class, by an object's method of the class": (
        "own.n",
        _program(
            "class Own:\n    n = 0\n    @classmethod\n    def weight(cls):\n        cls.n += 1\n        return cls.n\nown = Own()\n",
            "own.weight()",
        ),
    ),
    "a class, by a static method": (
        "Own.log",
        _program(
            "class Own:\n    log = []\n    @staticmethod\n    def weight():\n        Own.log.append(1)\n        return len(Own.log)\n",
            "Own.weight()",
        ),
    ),
    "a method under a name of its own": (
        "weight.__self__.n",
        _program(COUNTING.format("count(self)") + "weight = Own().count\n", "weight()"),
    ),
    "what super() calls": (
        "own.n",
        _program(
            COUNTING.format("weight(self)")
            + "class Inner(Own):\n    def weight(self): return super().weight()\nown = Inner()\n",
            "own.weight()",
        ),
    ),
    "objects in a list": (
        "parts.0.n",
        COUNTING.format("on_step(self)")
        + "parts = [Own(), Own()]\n"
        + BLOCK
        + "scale = 0\n        for one in parts: scale += one.on_step()\n"
        "        (net(batch) * scale).sum().backward()",
    ),
    "what a with statement gives": (
        "own.n",
        COUNTING.format("__enter__(self)")
        + "    def __exit__(self, *how): pass\nown = Own()\n"
        + BLOCK
        + "with own as n: (net(batch) * n).sum().backward()",
    ),
    "an object that is asked for a place": (
        "own.n",
        _program(COUNTING.format("__getitem__(self, at)") + "own = Own()\n", "own[0]"),
    ),
    "an object that is asked for its length": (
        "own.n",
        _program(COUNTING.format("__len__(self)") + "own = Own()\n", "len(own)"),
    ),
    "a global by globals()": (
        "seen",
        _program(
            "seen = 0\ndef weight():\n    globals()['seen'] += 1\n    return seen\n", "weight()"
        ),
    ),
    "an attribute of a function, by getattr()": (
        "weight.n",
        _program(
            "def weight():\n    weight.n = getattr(weight, 'n', 0) + 1\n    return weight.n\n",
            "weight()",
        ),
    ),
    "a list that a cached function fills": (
        "seen",
        _program(
            "import functools\nseen = []\n@functools.lru_cache\ndef weight(n):\n"
            "    seen.append(n)\n    return len(seen)\n",
            "weight(run.step_number)",
        ),
    ),
    "a global of a function under no_grad()": (
        "seen",
        _program(
            "seen = 0\n@torch.no_grad()\ndef weight():\n    global seen\n    seen += 1\n    return seen\n",
            "weight()",
        ),
    ),
    "a function that map() calls": (
        "state",
        _program(
            "state = {'n': 0}\ndef weight(_):\n    state['n'] += 1\n    return state['n']\n",
            "sum(map(weight, [0]))",
        ),
    ),
}
LOGGER = """class Log:
    count = 0
    def __init__(self): self.n, self.history = 0, []
    @classmethod
    def tick(cls): cls.count += 1; print(cls.count)
    @property
    def mean(self): return sum(self.history) / max(1, self.n)
    def on_step(self, loss):
        self.n += 1; self.history.append(loss); self.tick()
        if self.n % 2 == 0: print(self.mean)
"""
HARMLESS = {
    "callbacks that only log": LOGGER
    + "parts = [Log(), Log()]\n"
    + BLOCK
    + "loss = net(batch).sum(); loss.backward()\n    for one in parts: one.on_step(loss.item())",
    "a timer that is a context": "class Timer:\n    def __init__(self): self.total = 0.0\n"
    "    def __enter__(self): self.t = time.time(); return self\n"
    "    def __exit__(self, *how): self.total += time.time() - self.t\ntimer = Timer()\n"
    + BLOCK
    + "with timer as shown: net(batch).sum().backward()\n        print(timer.total)",
    "defaults that stay as they are": "def loss_of(out, by=nn.MSELoss(), weights=[1.0, 2.0]):\n"
    "    return by(out, torch.zeros(2)) * weights[0]\n" + BLOCK + "loss_of(net(batch)).backward()",
    "a device and a count as properties": "class Trainer:\n    def __init__(self): self.n = 0\n"
    "    @property\n    def device(self): return torch.device('cpu')\n"
    "    @property\n    def done(self): return self.n\n"
    "    def step(self, batch):\n        net(batch.to(self.device)).sum().backward(); self.n += 1\n"
    "class Shown(Trainer):\n    def step(self, batch): super().step(batch); print(self.done)\n"
    "trainer = Shown()\n" + BLOCK + "trainer.step(batch)",
    "figures of a function under no_grad()": LOGGER
    + "log = Log()\n@torch.no_grad()\ndef accuracy(out): return out.mean().item()\n"
    + BLOCK
    + "out = net(batch); out.sum().backward()\n        log.on_step(accuracy(out)); print(log.mean)",
    "a decorator that counts calls": "import functools\ncalls = {'n': 0}\ndef timed(function):\n"
    "    @functools.wraps(function)\n    def inner(*given):\n        calls['n'] += 1\n"
    "        return function(*given)\n    return inner\n@timed\ndef forward(batch): return net(batch).sum()\n"
    + BLOCK
    + "forward(batch).backward(); print(calls['n'])",
}
