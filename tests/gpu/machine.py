"""The machine: what a start costs, and what a process that is killed leaves behind, and for how long.

This process starts no CUDA: as the product's zygote it imports torch, and forks for each measurement.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import platform
import resource
import select
import signal
import subprocess
import time
from pathlib import Path

from tests.gpu import driver
from tests.gpu.facts import Fork, Timed, error_text

GB = 10**9
KEPT_BYTES = 60 * GB
KEPT_SHARE = 0.75  # of what is free, if that is less
GONE_WITHIN_S = 5.0
READY_WITHIN_S = 15.0
PINNED_BYTES = GB
_PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "psutil",
    "triton",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)


def measure(facts):
    """In the order of what is worth most."""
    usage = driver.Usage()
    facts.measure("import_torch_s", _import_torch)
    facts.measure("versions", versions, facts.under("versions"))
    facts.forked("libraries", library_versions, limit_s=15)
    facts.forked("start", start, usage, limit_s=20)
    facts.forked("start_of_spare_libraries", start, usage, "spare", limit_s=15)
    facts.forked("torch_init", torch_init, usage, limit_s=10)
    facts.measure("killed", killed, facts, usage)
    facts.measure("killed_beside_fork", killed, facts, usage, fork="holds")
    facts.measure("killed_beside_fork_that_closes", killed, facts, usage, fork="closes")
    fork_after = facts.under("fork_after_is_available")
    fork_after.forked(
        "plain", fork_after_is_available, limit_s=10, PYTORCH_NVML_BASED_CUDA_CHECK="0"
    )
    fork_after.forked(
        "nvml", fork_after_is_available, limit_s=10, PYTORCH_NVML_BASED_CUDA_CHECK="1"
    )
    facts.measure("killed_in_kernel", killed, facts, usage, kernel_s=20.0)
    facts.forked("start_again", start, usage, limit_s=15)
    facts.forked("start_eager_modules", start, usage, limit_s=15, CUDA_MODULE_LOADING="EAGER")
    facts.forked("board", board, limit_s=10)
    facts.forked("pinning", pinning, limit_s=15)
    facts.measure("stopped_then_killed", killed, facts, usage, is_stopped=True)


def _import_torch():
    with Timed() as spent:
        import torch  # noqa: F401
    return spent.s


def versions(facts):
    """Of what can be asked without starting CUDA."""
    import torch

    query = "name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current"
    query += ",persistence_mode,compute_cap,clocks.sm,power.draw"
    found = {
        "gpu": _said_by("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB,
        "shm": _said_by("df", "-h", "--output=size,avail", "/dev/shm").split("\n")[-1],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "devices": sorted(str(path) for path in Path("/dev").glob("nvidia*")),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "packages": {name: _version(name) for name in _PACKAGES},
        "threads_after_import": len(list(Path("/proc/self/task").iterdir())),
        "variables": {
            name: value[:80]
            for name, value in os.environ.items()
            if name.startswith(("CUDA", "NCCL", "TORCH", "PYTORCH", "NVIDIA", "OMP"))
        },
    }
    for name, value in found.items():
        facts.note(name, value)


def _said_by(*words):
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return error_text(error)
    return (said.stdout or said.stderr).strip()


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def library_versions(facts):
    """Of what is asked of the libraries, which may start things."""
    import torch

    facts.measure("nccl", torch.cuda.nccl.version)
    facts.measure("nccl_runtime", _nccl_runtime)
    facts.measure("cudnn", torch.backends.cudnn.version)
    facts.measure("devices", torch.cuda.device_count)
    facts.measure("arch_list", torch.cuda.get_arch_list)
    facts.measure("properties", lambda: str(torch.cuda.get_device_properties(0)))
    facts.measure("bf16", lambda: torch.cuda.is_bf16_supported(including_emulation=False))
    facts.measure("mem_get_info", lambda: list(torch.cuda.mem_get_info(0)))


def _nccl_runtime():
    from torch.distributed import ProcessGroupNCCL

    asked = getattr(ProcessGroupNCCL, "get_runtime_nccl_version", None)
    return None if asked is None else list(asked())


def start(facts, usage, kind=""):
    """What a replacement does, piece by piece: seconds, and MB of the device that are then taken.

    ``kind`` "spare": what a spare does ahead comes first, in the place of starting the driver.
    """
    import torch

    before_mb = usage.mb()
    facts.note("usage_by", usage.source)

    def piece(name, function):
        with Timed() as spent:
            function()
        facts.note(f"{name}_s", spent.s)
        facts.note(f"{name}_mb", usage.mb() - before_mb)

    def tried(name, function):
        try:
            piece(name, function)
        except Exception as error:  # noqa: BLE001 - the error is the fact
            facts.note(name, {"error": error_text(error)})

    if kind:
        tried("ahead", lambda: _be_spare(facts))
    else:
        tried("cuinit", _cuinit)
    tried("context", lambda: (torch.cuda.init(), torch.zeros(1, device="cuda"), _finish(torch)))
    square = {}

    def filled():
        square["a"] = torch.randn(4096, 4096, device="cuda")
        _finish(torch)

    tried("randn", filled)
    tried("matmul", lambda: (square["a"] @ square["a"], _finish(torch)))
    tried("matmul_again", lambda: (square["a"] @ square["a"], _finish(torch)))
    tried("bf16_matmul", lambda: (square["a"].bfloat16() @ square["a"].bfloat16(), _finish(torch)))
    images = torch.nn.Conv2d(3, 8, 3)
    tried("conv", lambda: (images.cuda()(torch.zeros(2, 3, 32, 32, device="cuda")), _finish(torch)))
    tried("fused_adamw", lambda: (_adamw_step(torch), _finish(torch)))
    with Timed() as spent:
        torch.cuda._sleep(10**8)
        _finish(torch)
    facts.note("cycles_per_s", 10**8 / spent.s)


def _cuinit():
    error = ctypes.CDLL("libcuda.so.1").cuInit(0)
    if error:
        raise RuntimeError(f"cuInit says {error}")


def _be_spare(facts):
    """Do what the product does in one; the GPUs that it has opened then."""
    from ddp_runner.features.spare import child as spare

    with Timed() as spent:
        driver = spare.start_libraries()
    facts.note("ahead_libraries_s", spent.s)
    facts.note("ahead_opened", driver.opened())


def torch_init(facts, usage):
    """Whether a spare could have torch start CUDA too, and hold nothing: what that costs, opens and takes."""
    import torch

    from ddp_runner.features.spare import child as spare

    before_mb = usage.mb()
    driver = spare.start_libraries()
    with Timed() as spent:
        torch.cuda.init()
    facts.note("seconds", spent.s)
    facts.note("opened", driver.opened())
    facts.note("mb", usage.mb() - before_mb)


def _finish(torch):
    torch.cuda.synchronize()


def _adamw_step(torch):
    weight = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()


def killed(facts, usage, *, fork="", kernel_s=0.0, is_stopped=False):
    """SIGKILL to a process with much of the device: seconds to end-of-file, to its reaping, to free memory.

    ``fork``: a fork of it, made when CUDA runs, lives on and ``holds`` what it inherited, or ``closes``
    ``/dev/nvidia*``. ``kernel_s``: a kernel of so long is running.
    """
    before_mb = usage.mb()
    reading, writing = os.pipe()
    holder = Fork(facts.under("killed_processes"), _hold, (reading, writing, fork, kernel_s))
    os.close(writing)
    found = {"before_mb": before_mb}
    try:
        said = _first_line(reading)
        if not said:
            return {**found, "error": "the process that is to be killed was not ready"}
        kept_gb, forked_pid = (float(word) for word in said.split())
        found |= {"kept_gb": kept_gb, "held_mb": usage.mb() - before_mb}
        if is_stopped:
            os.kill(holder.pid, signal.SIGSTOP)
        os.kill(holder.pid, signal.SIGKILL)
        found |= _await_end(holder.pid, reading, usage, before_mb)
        if forked_pid:
            if "free_s" not in found:
                found["mb_while_fork_lives"] = usage.mb() - before_mb
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(forked_pid), signal.SIGKILL)
            if "free_s" not in found:
                found["free_s_after_fork_ended"] = _seconds_to_free(usage, before_mb)
        return found
    finally:
        os.close(reading)
        holder.kill()


def _hold(facts, reading, writing, fork, kernel_s):
    """Fork: take memory, say so, and wait to be killed."""
    import torch

    os.close(reading)
    free, _ = torch.cuda.mem_get_info()
    kept = torch.empty(min(KEPT_BYTES, int(KEPT_SHARE * free)), dtype=torch.uint8, device="cuda")
    kept.fill_(1)
    torch.cuda.synchronize()
    child = 0
    if fork:
        child = os.fork()
        if child == 0:
            os.close(writing)
            if fork == "closes":
                _close_devices()
            time.sleep(GONE_WITHIN_S + 10)  # it dies with the part's group at the latest
            os._exit(0)
        time.sleep(0.2)
    if kernel_s:
        torch.cuda._sleep(int(kernel_s * 1.9e9))
        time.sleep(0.2)
    os.write(writing, f"{kept.numel() / GB} {child}\n".encode())
    time.sleep(60)


def _close_devices():
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("/dev/nvidia"):
                os.close(int(entry.name))


def _first_line(descriptor):
    by_s = time.monotonic() + READY_WITHIN_S
    said = b""
    while not said.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, by_s - time.monotonic()))[0]:
            return ""
        data = os.read(descriptor, 100)
        if not data:
            return ""
        said += data
    return said.decode()


def _await_end(pid, reading, usage, before_mb):
    begun_s = time.monotonic()
    found = {}
    while len(found) < 3 and time.monotonic() < begun_s + GONE_WITHIN_S:
        if "eof_s" not in found and select.select([reading], [], [], 0)[0]:
            found["eof_s"] = time.monotonic() - begun_s
        if "reaped_s" not in found and os.waitid(
            os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            found["reaped_s"] = time.monotonic() - begun_s
        if "free_s" not in found and _is_free(usage, before_mb):
            found["free_s"] = time.monotonic() - begun_s
        time.sleep(0.002)
    return found


def _is_free(usage, before_mb):
    return usage.mb() <= before_mb + 64


def _seconds_to_free(usage, before_mb):
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + GONE_WITHIN_S:
        if _is_free(usage, before_mb):
            return time.monotonic() - begun_s
        time.sleep(0.005)
    return None


def fork_after_is_available(facts):
    """Whether a fork can use CUDA when its parent has only asked; what the product's zygote says of it."""
    import torch

    from ddp_runner.kernel.rank import zygote

    has_started = getattr(zygote, "driver_has_started", None)
    facts.measure("driver_has_started_before", lambda: bool(has_started()))
    facts.measure("is_available", torch.cuda.is_available)
    facts.measure("is_initialized", torch.cuda.is_initialized)
    facts.measure("driver_has_started_after", lambda: bool(has_started()))
    facts.forked("in_fork", _use_in_fork, limit_s=8)


def _use_in_fork(facts):
    import torch

    with Timed() as spent:
        facts.note("sum", float(torch.ones(3, device="cuda").sum()))
    facts.note("seconds", spent.s)


def board(facts):
    """A cell of the progress board that the device writes: whether the host waits, and what it reads meanwhile."""
    import torch

    from ddp_runner.kernel.group.device import device_progress
    from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell

    descriptor = os.memfd_create("board")
    os.ftruncate(descriptor, SLOT_BYTES)
    slot = Board(memoryview(mmap.mmap(descriptor, 0)), 1).slot(0)
    said = []
    with Timed() as pinned:
        progress = device_progress(slot, torch.device("cuda", 0), warn=said.append)
    facts.note("pin_s", pinned.s)
    facts.note("said", said)
    progress.begin(1)
    _finish(torch)
    facts.note("begun", slot.get(Cell.DEVICE_SUMS))
    torch.cuda._sleep(10**9)
    with Timed() as reported:
        progress.come_to_sum()
    facts.note("reported_s", reported.s)
    facts.note("behind_kernel", slot.get(Cell.DEVICE_SUMS))
    _finish(torch)
    facts.note("after_kernel", slot.get(Cell.DEVICE_SUMS))
    with Timed() as often:
        for _ in range(1000):
            progress.come_to_sum()
    facts.note("each_us", often.s * 1e3)
    _finish(torch)
    facts.measure("refused_twice", _pin_again, slot)
    with Timed() as unpinned:
        progress.close()
    facts.note("unpin_s", unpinned.s)


def _pin_again(slot):
    """What pinned memory is refused with, and whether the next kernels hear of it."""
    import torch

    from ddp_runner.kernel.group.device import device_progress

    said = []
    device_progress(slot, torch.device("cuda", 0), warn=said.append)
    return [*said, float(torch.ones(3, device="cuda").sum())]


def pinning(facts):
    """Of 1 GB: pinning, again, and copies to and from the device."""
    import torch

    device = torch.zeros(PINNED_BYTES // 4, device="cuda")
    torch.cuda.synchronize()
    with Timed() as first:
        pinned = torch.empty(PINNED_BYTES // 4, pin_memory=True)
    facts.note("first_s", first.s)
    with Timed() as second:
        another = torch.empty(PINNED_BYTES // 4, pin_memory=True)
    facts.note("second_s", second.s)
    del another
    with Timed() as third:
        torch.empty(PINNED_BYTES // 4, pin_memory=True)
    facts.note("from_cache_s", third.s)
    with Timed() as plain:
        ordinary = torch.zeros(PINNED_BYTES // 4)
    facts.note("ordinary_s", plain.s)
    for name, host in (("pinned", pinned), ("ordinary", ordinary)):
        for _ in range(2):
            with Timed() as down:
                host.copy_(device)
                torch.cuda.synchronize()
            with Timed() as up:
                device.copy_(host)
                torch.cuda.synchronize()
        facts.note(f"{name}_to_host_gb_s", PINNED_BYTES / GB / down.s)
        facts.note(f"{name}_to_device_gb_s", PINNED_BYTES / GB / up.s)
