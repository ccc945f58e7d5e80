"""Memory of another process: every byte of it, and only of the process that is meant."""

from __future__ import annotations

import os

import pytest
import torch

from ddp_runner.kernel.group import peer_memory
from ddp_runner.kernel.group.peer_memory import Part, Shown, can_read, read, showing
from ddp_runner.kernel.rules.classify import classify_error
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.system import threads


def test_more_parts_than_one_call_takes_are_read():
    """Each to its place, also where a part is longer than a call reads, or empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "READ_BYTES_MAX", 1000)
        sizes = [3000, *[number % 7 for number in range(2 * peer_memory.PARTS_MAX)]]
        sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        targets = [torch.zeros_like(one) for one in sources]
        with showing(sources) as shown:
            assert can_read(shown)
            pairs = zip(sources, targets, strict=True)
            read(shown, [Part(s.data_ptr(), t.data_ptr(), s.numel()) for s, t in pairs])
    assert all(map(torch.equal, sources, targets))


def test_where_no_thread_can_be_started_one_reads_all(monkeypatch):
    """As where a container may have no more."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(peer_memory, "READ_BYTES_MAX", 1000)
    monkeypatch.setattr(threads.ThreadPoolExecutor, "_adjust_thread_count", refuse)
    source = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    with showing([source]) as shown:
        read(shown, [Part(source.data_ptr(), target.data_ptr(), source.numel())])
    assert torch.equal(source, target)


def test_another_process_of_that_number_is_not_read():
    """The number is the same in another container; the word is not."""
    with showing([torch.ones(3)]) as shown:
        assert can_read(shown)
        assert not can_read(shown._replace(word=b"another process."))
        assert not can_read(shown._replace(word_at=8))


@pytest.mark.parametrize("read_bytes", [8, 1], ids=["one call", "several threads"])
def test_a_process_that_is_gone_is_not_read(monkeypatch, read_bytes):
    """Neither its word nor anything else."""
    monkeypatch.setattr(peer_memory, "READ_BYTES_MAX", read_bytes)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    shown = Shown(pid=pid, word_at=8, word=bytes(16), addresses=b"")
    assert not can_read(shown)
    with pytest.raises(RuntimeError, match=f"memory of process {pid} cannot be read") as raised:
        read(shown, [Part(source=8, target=torch.zeros(8).data_ptr(), size=8)])
    found = classify_error(type_name=raised.typename, text=str(raised.value), aborted=False)
    assert found is FaultKind.COLLECTIVE_FAILED, "who reads is no culprit"


def test_where_the_kernel_refuses_nothing_is_read(monkeypatch):
    """As in a sandbox: it says so, and the state is sent."""
    monkeypatch.setattr(peer_memory, "_LIBC", type("Libc", (), {"prctl": lambda *_: -1})())
    with showing([torch.ones(3)]) as shown:
        assert not can_read(shown)


def test_what_does_not_lie_in_order_is_not_shown():
    """Nobody could read it as it is."""
    with showing([torch.ones(4, 4).t()]) as shown:
        assert shown is None
