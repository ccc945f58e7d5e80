"""One rank with NCCL through the whole product: faults, what a step costs, half precision, compile, saves."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tests.gpu import group as by_hand
from tests.gpu.facts import Timed, device_name, rehearses
from tests.gpu.launches import EXACT, Launch, expected, finish, inject

STEPS = 60
HARMS = (
    ("raise", "forward", 0, 5),
    ("raise", "backward", 0, 13),
    ("raise", "reduce", 0, 21),
    ("raise", "commit", 0, 29),
    ("kill", "forward", 0, 37),
    ("stop", "backward", 0, 45),
)
# Of the task's own doing: a device that is lost in the only rank, and one whose kernel does not end.
SPECIAL = "assert-0-25-forward+kernel-0-25-forward"
HALF_HARMS = (("raise", "optimizer", 0, 20), ("raise", "commit", 0, 30))
NAN = ("--inject", "nan:rank=0,step=40,times=3")
WARM = 20  # steps at a section's begin that do not count
BESIDE_S, ALONE_S, SAVES_S = 45, 35, 40
HASHED_GB = 10


def measure(facts):
    """What a step costs, alone; then whatever is right or wrong, all at once; then saves and hashes."""
    folder = Path(tempfile.mkdtemp(prefix="gpu_one_rank_"))
    try:
        _measure(facts, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(facts, folder):
    facts.measure("faults_all", _faults, facts, folder)
    facts.measure("overhead", _overhead, facts, folder)
    facts.measure("save_4gb", _saves, facts.under("save_4gb"), folder)
    facts.forked("hash_10gb", hashed, limit_s=15)


def _faults(facts, folder):
    """Runs whose seconds do not count, beside one another."""
    words = ("num_workers=0", "--max-steps", STEPS)
    exact = (*EXACT, *words)
    nonblocking = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
    runs = {
        "fault_free": Launch(folder / "p", *exact, task="Normed", world=1),
        "faults": Launch(folder / "f", *exact, *inject(HARMS), task="Normed", world=1),
        "special": Launch(folder / "s", *exact, f"task.plan={SPECIAL}", task="Normed", world=1),
        "half_fault_free": Launch(
            folder / "hp", *exact, "use_amp=true", task="HalfPrecision", world=1
        ),
        "half": Launch(
            folder / "h",
            *(*exact, "use_amp=true", *inject(HALF_HARMS)),
            task="HalfPrecision",
            world=1,
        ),
        "half_rolled_back": Launch(
            folder / "hr",
            *(*words, "use_amp=true", "max_errors_per_epoch=2", *NAN),
            task="HalfPrecision",
            world=1,
        ),
        "bf16": Launch(folder / "b", *words, "use_amp=true", task="Normed", world=1),
        "compiled": Launch(
            folder / "c",
            *(*words, "--inject", "raise:rank=0,step=20"),
            task="Compiled",
            world=1,
            environment={"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        ),
        "nonblocking": Launch(
            folder / "n",
            *exact,
            *inject(HARMS[:4]),
            task="Normed",
            world=1,
            environment=nonblocking,
        ),
    }
    facts.measure("preload_s", by_hand.preload)
    finish(runs.values(), limit_s=min(BESIDE_S, facts.left_s - 3))
    fault_free, half = runs["fault_free"].digest, runs["half_fault_free"].digest
    compared = {
        "faults": (fault_free, expected(HARMS)),
        "special": (fault_free, [["device_lost", 0], ["rank_hung", 0]]),
        "half": (half, expected(HALF_HARMS)),
        "nonblocking": (fault_free, expected(HARMS[:4])),
    }
    for name, run in runs.items():
        like, culprits = compared.get(name, (None, None))
        at = facts.under(name)
        facts.measure(name, _write_facts, run, at, like, culprits)
        if name.startswith("half"):
            at.measure("noted", _notes, run)


def _write_facts(run, facts, fault_free, culprits):
    run.write_facts(facts, fault_free=fault_free, culprits=culprits)


def _notes(run):
    """What was repaired in place: skipped steps, overflows, roll-backs."""
    return [
        str(event.get("text"))[:100]
        for event in run.events()
        if event["event"] in ("fault_tolerated", "repaired_in_place")
    ][:12]


def _overhead(facts, folder):
    """Milliseconds of a step of ours and of a plain loop, at 1, 10 and 100 ms of kernels."""
    from tests.gpu import tasks

    for name, wraps in (("plain_loop", False), ("ddp_loop", True)):
        plain = facts.start(name, plain_loop, wraps, **by_hand.PRODUCT)
        if plain is not None:
            plain.finish(20)
    # Nobody saves, looks or logs in between: what is left is the step itself.
    quiet = ("num_workers=0", "save_every_steps=0", "log_interval=1000", "replica_check_steps=0")
    words = (*quiet, "--max-steps", tasks.Paced.STEPS)
    run = Launch(folder / "paced", *words, task="Paced", world=1)
    finish([run], limit_s=min(ALONE_S, facts.left_s - 3))
    facts.measure("paced", _write_facts, run, facts.under("paced"), None, None)
    facts.measure("syncs", _read, run.folder / "syncs.json")
    times = _read(run.folder / "paced.json")
    facts.note("ours_ms", sections(times))


def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def sections(times):
    """The median and mean milliseconds from step to step, by the milliseconds of kernels."""
    from tests.gpu.tasks import Paced

    found, first = {}, 0
    for seconds, count in Paced.SECTIONS:
        at = times[first + min(WARM, count // 2) : first + count]
        between = [1000 * (later - before) for before, later in itertools.pairwise(at)]
        if between:
            found[f"{1000 * seconds:g}"] = {
                "median": statistics.median(between),
                "mean": statistics.fmean(between),
            }
        first += count
    return found


def plain_loop(facts, wraps):
    """The same net, pace and optimizer as somebody writes it by hand; the loss is asked for every 10 steps.

    ``wraps``: in DDP, which looks for unused parameters as ours does.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from tests.gpu import tasks

    torch.set_num_threads(1)
    task = tasks.Normed()
    device = torch.device(device_name())
    model = task.build_model().to(device)
    if wraps:
        by_hand.join(by_hand.memory_store(), 0)
        model = DistributedDataParallel(model, find_unused_parameters=True)
    data = task.build_datasets().train
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not rehearses())
    times = []
    precision = torch.autocast(device.type, dtype=torch.bfloat16, enabled=not rehearses())
    for step in range(tasks.Paced.STEPS):
        inputs, targets = (
            each.to(device, non_blocking=True)
            for each in data[[(8 * step + number) % tasks.SAMPLES for number in range(8)]]
        )
        times.append(time.perf_counter())
        by_hand.sleep_on_device(tasks.pace_of(step + 1))
        with precision:
            loss = task.loss(model, (inputs, targets))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            loss.item()
    facts.note("ms", sections(times))


def _saves(facts, folder):
    """What saves of a large state cost training: seconds blocked, first and later ones."""
    steps = 60
    words = ["num_workers=0", "--max-steps", steps, "save_every_steps=20", "keep_last=1"]
    words += ["task.pace_s=0.2"]
    words += ["task.on_cpu=true"] if rehearses() else []
    run = Launch(folder / "large", *words, task="Large", world=1)
    finish([run], limit_s=min(SAVES_S, facts.left_s - 3))
    _write_facts(run, facts, None, None)
    saved = run.events("checkpoint_saved")
    facts.note("saved", [[one["step"], one["blocked_s"], one["size_bytes"] / 1e9] for one in saved])
    facts.note("blocked_s", [one["blocked_s"] for one in saved])
    moments = [one["mono_s"] for one in saved]
    facts.note("between_saves_s", [b - a for a, b in itertools.pairwise(moments)])
    with contextlib.suppress(OSError):
        shutil.rmtree(run.folder)


def hashed(facts):
    """Seconds for the hash of 10 GB on the device, the second time too."""
    import torch

    from ddp_runner.training.components.tensor_hash import tensor_hash

    gigabytes = 0.02 if rehearses() else HASHED_GB
    tensor = torch.full((int(gigabytes * 1e9) // 4,), 1.25, device=device_name())
    for name in ("first_s", "second_s"):
        with Timed() as spent:
            tensor_hash(tensor)
        facts.note(name, spent.s)
