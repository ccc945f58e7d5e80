"""NCCL in a world of one: what forming and aborting cost, and what else comes out of an abort."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from datetime import timedelta

from tests.gpu import driver
from tests.gpu import group as by_hand
from tests.gpu.facts import Timed, error_text, rehearses, spread

CYCLES = 12  # an abort takes a second: proxy threads look every half of one
OTHER_CYCLES = 6
STRIKES = 200
MISSING_S = 6.0  # for what ends a communicator that waits for a rank that never comes
HEARTBEAT_S = 5


def measure(facts):
    """In the order of what is worth most; what takes long by itself runs beside."""
    facts.measure("preload_s", by_hand.preload)
    usage = driver.Usage()
    known = dict(by_hand.PRODUCT)
    facts.forked("product", product_generations, limit_s=20, **known)
    facts.forked("cycle_eager", cycle, usage, CYCLES, limit_s=20, **known)
    behind = facts.under("behind_kernels")
    for seconds, limit_s in ((0.1, 8), (1.0, 10), (5.0, 16)):
        behind.forked(f"{seconds:g}s", behind_kernel, seconds, limit_s=limit_s, **known)
    forming = facts.under("forming_without_peer")
    nonblocking = {
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "4",
    }
    dumped = facts.under("exception_dump")
    watched = {
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": f"{HEARTBEAT_S}",
        "TORCH_NCCL_COORD_CHECK_MILSEC": "500",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
    }
    beside = [
        forming.start("product", product_without_peer, **known),
        forming.start("lazy", without_peer, False, **known),
        forming.start("lazy_nonblocking", without_peer, False, **known, **nonblocking),
        forming.start("eager_nonblocking", without_peer, True, **known, **nonblocking),
        dumped.start("by_default", with_dump_asked_for, **{**known, **watched}),
        dumped.start(
            "monitoring_off",
            with_dump_asked_for,
            **{**known, **watched, "TORCH_NCCL_ENABLE_MONITORING": "0"},
        ),
        dumped.start("as_the_product", with_dump_asked_for, **known),
    ]
    for fork in beside:
        if fork is not None:
            fork.finish(18)
    facts.forked("while_enqueuing", while_enqueuing, False, limit_s=14, **known)
    facts.forked("while_enqueuing_locked", while_enqueuing, True, limit_s=12, **known)
    facts.forked("cycle_lazy", cycle, usage, OTHER_CYCLES, False, limit_s=10, **known)
    facts.forked(
        "cycle_nonblocking", cycle, usage, OTHER_CYCLES, limit_s=10, **known, **nonblocking
    )
    facts.forked("cycle_destroyed", cycle, usage, OTHER_CYCLES, True, True, limit_s=10, **known)


def cycle(facts, usage, count, is_eager=True, is_destroyed=False):
    """Form, sum, abort, leave, again and again: seconds of each, and what is held on to."""
    import torch

    device = by_hand.device()
    torch.zeros(1, device=device)
    store = by_hand.memory_store()
    before_mb = usage.mb()
    facts.note("before", by_hand.held())
    spent = {name: [] for name in ("form", "first_sum", "second_sum", "abort", "leave")}
    for number in range(count):
        for name, act in (
            ("form", lambda number=number: by_hand.join(store, number, is_eager=is_eager)),
            ("first_sum", by_hand.summed),
            ("second_sum", by_hand.summed),
            ("abort", (lambda: None) if is_destroyed else by_hand.abort),
            ("leave", torch.distributed.destroy_process_group if is_destroyed else by_hand.leave),
        ):
            with Timed() as timed:
                act()
            spent[name].append(timed.s)
        if number in (0, 9, count // 2, count - 1):
            held = by_hand.held() | {"device_mb": usage.mb() - before_mb}
            facts.note(f"after_{number + 1}", held)
            for name, values in spent.items():
                facts.note(f"{name}_s", spread(values))
    facts.note("formed", count)


def behind_kernel(facts, seconds):
    """An abort while the main thread waits in ``.tolist()`` for a kernel: who waits, and what comes out."""
    import torch
    import torch.distributed as dist

    store = by_hand.memory_store()
    by_hand.join(store, 0)
    by_hand.summed()
    tensor = torch.full((1024,), 3.0, device=by_hand.device())
    by_hand.sleep_on_device(seconds)
    work = dist.all_reduce(tensor, async_op=True)
    abort = by_hand.Beside(by_hand.abort, after_s=0.05)
    with Timed() as waited:
        facts.measure("wait", lambda: str(work.wait()))
        facts.measure("tolist", lambda: tensor.tolist()[:2])
    facts.note("main_waited_s", waited.s)
    reported = abort.reported(seconds + 4)
    facts.note("abort", reported)
    facts.note("abort_s", reported.get("s"))
    facts.note("sum_after_abort", by_hand.Beside(by_hand.summed).reported(2.0))
    facts.note("leave", by_hand.Beside(by_hand.leave).reported(2.0))
    with Timed() as again:
        by_hand.join(store, 1)
        facts.note("sum_of_next_generation", by_hand.summed())
    facts.note("next_generation_s", again.s)


def while_enqueuing(facts, is_locked):
    """An abort while the main thread enqueues collectives; ``is_locked``: never in the middle of one."""
    import torch
    import torch.distributed as dist

    store, raised, aborted = by_hand.memory_store(), Counter(), Counter()
    inside = threading.Lock()
    draw = random.Random(7)
    tensor = torch.ones(2**16, device=by_hand.device())
    by_s = time.monotonic() + (8 if is_locked else 11)
    for number in range(STRIKES):
        if time.monotonic() > by_s:
            break
        by_hand.join(store, number)
        by_hand.summed()

        is_over = []
        abort = by_hand.Beside(
            _strike, inside if is_locked else None, is_over, after_s=draw.uniform(0.0, 0.003)
        )
        try:
            for _ in range(400):
                with inside if is_locked else contextlib.nullcontext():
                    if is_locked and is_over:
                        break
                    work = dist.all_reduce(tensor, async_op=True)
                work.wait()
            float(tensor[0])
            raised["nothing"] += 1
        except Exception as error:  # noqa: BLE001 - the error is the fact
            raised[error_text(error)[:120]] += 1
        aborted[str(abort.reported(10.0).get("raised", "well"))[:120]] += 1
        by_hand.leave()
        if number % 10 == 0:
            facts.note("strikes", number + 1)
    facts.note("strikes", sum(raised.values()))
    facts.note("main_thread_raised", dict(raised.most_common(6)))
    facts.note("abort", dict(aborted.most_common(6)))


def _strike(inside, is_over):
    with inside or contextlib.nullcontext():
        is_over.append(True)
        by_hand.abort()


def without_peer(facts, is_eager):
    """A world of two whose other rank never comes: what an abort does to the communicator being made."""
    store = by_hand.memory_store()

    def form():
        by_hand.join(store, 0, world_size=2, is_eager=is_eager, timeout_s=20.0)
        facts.note("joined", True)
        return by_hand.summed()

    forming = by_hand.Beside(form)
    time.sleep(2.0)
    facts.measure("aborted", lambda: by_hand.Beside(by_hand.abort).reported(MISSING_S))
    facts.note("forming", forming.reported(MISSING_S))


def product_without_peer(facts):
    """The same through the product's own group, whose switch is tripped and cut while it forms."""
    from ddp_runner.kernel.group.abort import AbortSwitch

    switch = AbortSwitch()

    def form():
        with _joined(0, switch=switch, world_size=2, port=_own_store()) as group:
            return group.rank

    forming = by_hand.Beside(form)
    time.sleep(2.0)
    with Timed() as tripped:
        switch.trip()
        switch.cut()
    facts.note("trip_and_cut_s", tripped.s)
    facts.note("forming", forming.reported(MISSING_S))


def _own_store():
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    _kept.append(store)
    return store.port


_kept = []  # stores that are served by this process


def _joined(generation, *, switch, world_size=1, port=0):
    from ddp_runner.kernel.group.group import Membership, joined
    from ddp_runner.kernel.group.tcp_store import StoreLink

    return joined(
        Membership(
            generation=generation,
            rank=0,
            world_size=world_size,
            local_rank=0,
            local_world_size=world_size,
        ),
        link=StoreLink("127.0.0.1", port, timeout_s=20.0),
        backend=by_hand.backend() if rehearses() else "cpu:gloo,cuda:nccl",
        device=by_hand.device(),
        timeout_s=30.0,
        switch=switch,
    )


def product_generations(facts):
    """The product's own group: summed, aborted in two phases behind a kernel, formed again, many times."""
    import torch

    from ddp_runner.kernel.group import device as product_device
    from ddp_runner.kernel.group.abort import AbortSwitch

    spent = {name: [] for name in ("form", "sum", "leave", "prove")}
    ends = Counter()
    for generation in range(1, CYCLES + 1):
        switch = AbortSwitch()
        before_s = time.perf_counter()
        left_s = None
        try:
            with _joined(generation, switch=switch) as group:
                spent["form"].append(time.perf_counter() - before_s)
                tensor = torch.ones(1024, device=group.device)
                with Timed() as timed:
                    group.all_reduce(tensor)
                    float(tensor[0])
                spent["sum"].append(timed.s)
                group.confirm()
                by_hand.sleep_on_device(0.2)
                group.all_reduce(tensor)
                act = by_hand.Beside(lambda switch=switch: (switch.trip(), switch.cut()))
                float(tensor[0])
                act.reported(10.0)
                left_s = time.perf_counter()
                group.confirm()
                ends["committed"] += 1
        except Exception as error:  # noqa: BLE001 - the error is the fact
            ends[error_text(error)[:120]] += 1
        if left_s is not None:
            spent["leave"].append(time.perf_counter() - left_s)
        with Timed() as timed:
            product_device.prove_device(by_hand.device(), rank=0, step=generation)
        spent["prove"].append(timed.s)
        facts.note("ends", dict(ends))
        if generation in (1, 5, CYCLES):
            facts.note(f"held_after_{generation}", by_hand.held())
            for name, values in spent.items():
                facts.note(f"{name}_s", spread(values))
    facts.measure("fault_free", _fault_free_end)


def _fault_free_end():
    from ddp_runner.kernel.group.abort import AbortSwitch

    with Timed() as spent, _joined(99, switch=AbortSwitch()) as group:
        import torch

        group.all_reduce(torch.ones(8, device=group.device))
    return spent.s


def with_dump_asked_for(facts):
    """A peer's watchdog has asked for a dump in the store: how long this process lives."""
    store = by_hand.memory_store() if rehearses() else None
    if store is None:
        _own_store()
        store = _kept[-1]
    by_hand.join(store, 0)
    by_hand.summed()
    store.set("exception_dump", b"\0" * 8)
    begun_s = time.monotonic()
    for second in range(1, 15):
        time.sleep(1.0)
        facts.note("lived_s", time.monotonic() - begun_s)
        if second == 12:
            facts.measure("sum", by_hand.summed)
        if rehearses():
            break
