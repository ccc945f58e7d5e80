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
    "a lambda of one's own generator": (
        "rng",
        _program("rng = random.Random(0)\naug = lambda: rng.random()\n", "aug()"),
    ),
    "a method of a generator": ("draw", _program("draw = random.Random(0).random\n", "draw()")),
    "a method of a generator that Python defines": (
        "draw",
        _program("draw = random.Random(0).randint\n", "draw(1, 5)"),
    ),
    "an object that is passed to a function": (
        "state.n",
        _program(
            "state = types.SimpleNamespace(n=0)\ndef weight(state):\n    state.n += 1\n    return state.n\n",
            "weight(state)",
        ),
    ),
    "an object that is passed by its parameter's name": (
        "own.n",
        _program(
            COUNTING.format("count(self)") + "own = Own()\ndef weight(*, of): return of.count()\n",
            "weight(of=own)",
        ),
    ),
    "an object under another name": (
        "own.inner.n",
        COUNTING.format("count(self)")
        + "own = types.SimpleNamespace(inner=Own())\n"
        + BLOCK
        + "inner = own.inner; (net(batch) * inner.count()).sum().backward()",
    ),
    "an object in a dict": (
        "parts.a.n",
        _program(COUNTING.format("count(self)") + "parts = {'a': Own()}\n", "parts['a'].count()"),
    ),
    "an object under a key that only the run knows": (
        "parts.b.n",
        _program(
            COUNTING.format("count(self)") + "parts, key = {'a': Own(), 'b': Own()}, 'b'\n",
            "parts[key].count()",
        ),
    ),
    "a count of an object under such a key": (
        "parts.b.n",
        COUNTING.format("count(self)")
        + "parts, key = {'a': Own(), 'b': Own()}, 'b'\n"
        + BLOCK
        + "parts[key].n += 1; (net(batch) * parts['b'].n).sum().backward()",
    ),
    "functions in a list": (
        "rng",
        "rng = random.Random(0)\ndef flip(x): return x * rng.random()\ndef same(x): return x\nsteps = [same, flip]\n"
        + BLOCK
        + "for one in steps: batch = one(batch)\n        net(batch).sum().backward()",
    ),
    "objects in a dict, with their keys": (
        "parts.a.n",
        _program(
            COUNTING.format("count(self)") + "parts = {'a': Own()}\n",
            "sum(one.count() for key, one in parts.items())",
        ),
    ),
    "objects in a list, with their places": (
        "parts.1.n",
        COUNTING.format("count(self)")
        + "parts = [Own(), Own()]\n"
        + BLOCK
        + "scale = 0\n        for place, one in enumerate(parts): scale += one.count()\n"
        "        (net(batch) * scale).sum().backward()",
    ),
    "a function in a partial": (
        "rng",
        _program(
            "import functools\nrng = random.Random(0)\ndef flip(by): return by * rng.random()\n"
            "weight = functools.partial(flip, 2)\n",
            "weight()",
        ),
    ),
    "a library's module in an attribute": (
        "own.norm",
        _program(
            "own = types.SimpleNamespace(norm=nn.BatchNorm1d(1))\n",
            "own.norm(batch[:, None])[:, 0]",
        ),
    ),
    "a library's module in a dict": (
        "parts.norm",
        _program("parts = {'norm': nn.BatchNorm1d(1)}\n", "parts['norm'](batch[:, None])[:, 0]"),
    ),
    "a method of a generator in an attribute": (
        "own.draw",
        _program(
            "own = types.SimpleNamespace(draw=np.random.default_rng(0).normal)\n", "own.draw()"
        ),
    ),
    "a queue": (
        "items",
        "import queue\nitems = queue.Queue()\nitems.put(0)\n"
        + BLOCK
        + "n = items.get(); items.put(n + 1); (net(batch) * n).sum().backward()",
    ),
    "a queue that cannot be read": (
        "items",
        "import queue\nitems = queue.SimpleQueue()\nitems.put(0)\n"
        + BLOCK
        + "n = items.get(); items.put(n + 1); (net(batch) * n).sum().backward()",
    ),
    "a ChainMap": (
        "state",
        "state = collections.ChainMap({'n': 0}, {'m': 1})\n"
        + BLOCK
        + "state['n'] += 1; (net(batch) * state['n']).sum().backward()",
    ),
    "a UserDict": (
        "state",
        "state = collections.UserDict(n=0)\n"
        + BLOCK
        + "state['n'] += 1; (net(batch) * state['n']).sum().backward()",
    ),
    "a dict whose entries are attributes": (
        "state.n",
        "class State(dict):\n    __getattr__ = dict.__getitem__\n    __setattr__ = dict.__setitem__\nstate = State(n=0)\n"
        + BLOCK
        + "state.n += 1; (net(batch) * state.n).sum().backward()",
    ),
    "a context variable": (
        "count",
        "import contextvars\ncount = contextvars.ContextVar('count', default=0)\n"
        + BLOCK
        + "count.set(count.get() + 1); (net(batch) * count.get()).sum().backward()",
    ),
    "a view of memory": (
        "view",
        "view = memoryview(bytearray(4))\n"
        + BLOCK
        + "view[0] += 1; (net(batch) * view[0]).sum().backward()",
    ),
    "an average that is written through .data": (
        "mean",
        "mean = torch.zeros(2)\n"
        + BLOCK
        + "mean.data.mul_(0.9).add_(batch); (net(batch) - mean).square().sum().backward()",
    ),
    "an average of a model that is written through .data": (
        "teacher",
        "teacher = nn.Linear(2, 2)\n"
        + BLOCK
        + "(net(batch) - teacher(batch).detach()).square().sum().backward()\n"
        "        for one in teacher.parameters(): one.data.mul_(0.9)",
    ),
    "a tensor that is written as an array": (
        "mean",
        "mean = torch.zeros(2)\nshown = mean.numpy()\n"
        + BLOCK
        + "shown += 1; (net(batch) - mean).square().sum().backward()",
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
METER = """class Meter:
    def __init__(self): self.total = self.n = 0
    def update(self, value): self.total += value; self.n += 1
    @property
    def avg(self): return self.total / max(1, self.n)
"""
HARMLESS = {
    "meters in a dict": METER
    + "meters = {'loss': Meter(), 'accuracy': Meter()}\n"
    + BLOCK
    + "loss = net(batch).sum(); loss.backward(); meters['loss'].update(loss.item())\n"
    "        for key in meters: meters[key].update(1)\n"
    "        line = ' '.join(f'{key} {one.avg}' for key, one in meters.items())\n        print(line)",
    "a meter that is passed to a function, and under another name": METER
    + "meter = Meter()\ndef step(batch, meter):\n    loss = net(batch).sum(); loss.backward(); meter.update(loss.item())\n"
    + BLOCK
    + "step(batch, meter)\n        shown = meter; shown.update(1); print(shown.avg)",
    "functions and lambdas that keep nothing": "def half(x): return x / 2\ntwice = lambda x: 2 * x\n"
    "rows = []\nshow = lambda v: rows.append(v) or f'{v:.3f}'\nsteps = [half, twice]\n"
    + BLOCK
    + "for one in steps: batch = one(batch)\n        loss = net(batch).sum(); loss.backward(); print(show(loss.item()))",
    "a method of a list under a name of its own": "rows = []\nadd = rows.append\n"
    + BLOCK
    + "loss = net(batch).sum(); loss.backward(); add(loss.item())",
    "a function under a key that only the run knows, which it never calls": "counts = itertools.count()\n"
    "def late(): return next(counts)\nrates, key = {'late': late, 'now': lambda: 1}, 'now'\n"
    + BLOCK
    + "(net(batch) * rates[key]()).sum().backward()",
    "methods of the global generators": "from random import random as drawn, randint\ndraw = np.random.normal\n"
    + BLOCK
    + "scale = drawn() + random.random() + np.random.rand() + randint(1, 2) + draw()\n"
    "        (net(batch) * scale * random.choice([1, 2])).sum().backward()",
    "criteria in a dict": "criteria = {'l1': nn.L1Loss(), 'l2': nn.MSELoss()}\nwanted = torch.zeros(2)\n"
    + BLOCK
    + "sum(one(net(batch), wanted) for one in criteria.values()).backward()",
    "a queue of rows": "import queue\nrows = queue.Queue()\n"
    + BLOCK
    + "loss = net(batch).sum(); loss.backward(); rows.put(loss.item())",
    "a local that begins as an attribute": "args = types.SimpleNamespace(lr=1.0)\n"
    + BLOCK
    + "lr = args.lr; lr *= 0.5; (net(batch) * lr).sum().backward()",
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
