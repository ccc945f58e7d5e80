"""A trial repair, before any run: ranks form, sum, are aborted, form again and sum again.

The started process forks a rank for each device, acts as their supervisor in small, and
reports the result to its parent by a pipe. It ends all processes that it has started, whatever becomes of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.group import Group, Membership, joined
from ddp_runner.kernel.group.tcp_store import StoreLink, serve_store
from ddp_runner.kernel.system import parent_death

IMPORTED = "imported"  # what the parent hears first: from here on the limit counts
FORMING, SUM, ABORT = "forming", "all-reduce", "abort"
AGAIN, SUM_AGAIN = "second forming", "second all-reduce"
_NUMBERS = 2**20  # that each rank adds
_HELD_S = 0.1  # that ranks wait in a collective nobody ends, before they are aborted
_CAUSES_S = 0.5  # from the first failure to what has caused it
_REAP_S = 5.0  # for the kernel to end a killed process
_LINE_BYTES = 4096
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where NCCL has files of its own


class ProbeFailedError(Exception):
    """Ranks of this machine cannot do together what training needs; the text says what and who."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One that was forked. ``line`` is the way to it; ``at`` the part that it has begun."""

    number: int
    pid: int
    line: socket.socket
    at: str = "its start"
    failed: tuple[int, str] | None = None  # when, and how
    has_heard: bool = False
    is_done: bool = False
    is_reaped: bool = False


def main(words: Sequence[str]) -> int:
    """``words``: the pipe's number, the parent's pid, and the backend, devices and limit as JSON."""
    parent_death.set_process_name("ddp:probe")
    parent_death.die_with_parent(int(words[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what follows "finally" is done
    spec = json.loads(words[2])
    with os.fdopen(int(words[0]), "w", encoding="utf-8") as pipe:
        print(IMPORTED, file=pipe, flush=True)
        answer: dict[str, Any] = {"failure": "", "seconds": 0.0, "nccl": _nccl_version()}
        try:
            answer["seconds"] = _rehearse(
                str(spec["backend"]), list(spec["devices"]), limit_s=float(spec["limit_s"])
            )
        except (ProbeFailedError, OSError, RuntimeError) as error:
            answer["failure"] = str(error).split("\n", 1)[0]
        print(json.dumps(answer), file=pipe, flush=True)
    return 0


def _nccl_version() -> str:
    """Return the version of the NCCL that torch has loaded; "" if there is none. Touches no device."""
    try:
        found: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError, OSError):  # a build without NCCL
        return ""
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _rehearse(backend: str, devices: list[str], *, limit_s: float) -> float:
    """Do it; the seconds that it took. Raises ProbeFailedError and OSError."""
    began_s = time.monotonic()
    listening = socket.create_server(("127.0.0.1", 0))
    port, secret = listening.getsockname()[1], secrets.token_hex(16)
    ranks: list[_Rank] = []
    try:
        for number, device in enumerate(devices):
            ranks.append(
                _forked(
                    listening,
                    RankOfProbe(
                        membership=Membership(
                            generation=1,
                            rank=number,
                            world_size=len(devices),
                            local_rank=number,
                            local_world_size=len(devices),
                            secret=secret,
                        ),
                        backend=backend,
                        device=torch.device(device),
                        port=port,
                        limit_s=limit_s,
                    ),
                )
            )
        # Threads of its own begin here: nothing is forked any more.
        store = serve_store(
            "127.0.0.1", port, listening_descriptor=listening.detach(), timeout_s=limit_s
        )
        _lead(ranks, began_s + limit_s, limit_s=limit_s)
        del store
        return time.monotonic() - began_s
    finally:
        listening.close()
        _end(ranks)


def _lead(ranks: list[_Rank], deadline_s: float, *, limit_s: float) -> None:
    """Abort the ranks when they wait, in two phases as a supervisor does, and see them to their end."""
    has_aborted = has_cut = False
    while not all(rank.is_done for rank in ranks):
        _hear(ranks, deadline_s, limit_s=limit_s)
        if not has_aborted and all(rank.at == ABORT for rank in ranks):
            time.sleep(_HELD_S)
            has_aborted = True
            _say(ranks, "abort")
        if not has_cut and all(rank.has_heard for rank in ranks):
            has_cut = True
            _say(ranks, "cut")


def _hear(ranks: list[_Rank], deadline_s: float, *, limit_s: float) -> None:
    """Take in what ranks say next. Raises ProbeFailedError for one that fails, ends or is late."""
    by_line = {rank.line: rank for rank in ranks if not rank.is_done}
    left_s = deadline_s - time.monotonic()
    ready = select.select(list(by_line), [], [], max(0.0, left_s))[0]
    if not ready:
        late = ", ".join(f"rank {rank.number} in {rank.at}" for rank in by_line.values())
        raise ProbeFailedError(f"no end within {limit_s:g} s: {late}")
    for line in ready:
        _take(by_line[line])
    if any(rank.failed for rank in ranks):
        raise ProbeFailedError(_first_cause(list(by_line.values())))


def _take(rank: _Rank) -> None:
    """One line of a rank's; at its end, how it has ended."""
    try:
        packet = rank.line.recv(_LINE_BYTES).decode(errors="replace")
    except ConnectionError:
        packet = ""
    verb, _, rest = packet.partition(" ")
    if verb == "at":
        rank.at = rest
    elif verb == "heard":
        rank.has_heard = True
    elif verb == "done":
        rank.is_done = True
    elif verb == "failed" and not rank.failed:
        at_ns, _, cause = rest.partition(" ")
        rank.failed = (int(at_ns), f"rank {rank.number} in {rank.at}: {cause}")
    elif not verb:
        ended = _how_it_ended(rank)
        if ended:
            rank.failed = (0, ended)


def _first_cause(ranks: list[_Rank]) -> str:
    """Return the cause of the failure: a process that has ended, or else the first failure that a rank reported."""
    by_s = time.monotonic() + _CAUSES_S
    while time.monotonic() < by_s:
        for rank in ranks:
            while not rank.is_reaped and select.select([rank.line], [], [], 0)[0]:
                _take(rank)
                if rank.failed:
                    break
            ended = _how_it_ended(rank, wait_s=0.0)
            if ended:
                return ended
        time.sleep(0.01)
    return min(rank.failed for rank in ranks if rank.failed)[1]


def _how_it_ended(rank: _Rank, *, wait_s: float = _REAP_S) -> str:
    """Describe the end of a rank that has not reported a failure; "" while it lives."""
    code = _reaped(rank, wait_s)
    if code is None:
        return ""
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"rank {rank.number} was ended by {name} in {rank.at}"
    return "" if code == _SAID_SO else f"rank {rank.number} ended with {code} in {rank.at}"


def _reaped(rank: _Rank, wait_s: float) -> int | None:
    """The exit code of a rank that ends within ``wait_s``, negative for a signal; given once."""
    by_s = time.monotonic() + wait_s
    while not rank.is_reaped:
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid:
            rank.is_reaped = True
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= by_s:
            return None
        time.sleep(0.002)
    return None


def _say(ranks: list[_Rank], text: str) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):  # it has ended, which is seen by its line
            rank.line.send(text.encode())


def _end(ranks: list[_Rank]) -> None:
    """End all processes, and what those that are killed have left in shared memory."""
    for rank in ranks:
        if rank.is_done:
            _reaped(rank, _REAP_S)  # it is on its way out
    left = [rank for rank in ranks if not rank.is_reaped]
    segments = [name for rank in left for name in _segments(rank.pid)]
    for rank in left:
        os.kill(rank.pid, signal.SIGKILL)  # not reaped: the number is nobody else's
    stayed = []
    for rank in left:
        _reaped(rank, _REAP_S)
        if not rank.is_reaped:
            stayed.append(str(rank.pid))
    for name in segments:
        with contextlib.suppress(OSError):  # unlinked once all had it, as it mostly is
            Path(name).unlink()
    for rank in ranks:
        rank.line.close()
    if stayed:
        raise ProbeFailedError(f"process {', '.join(stayed)} does not end: a driver holds it")


def _segments(pid: int) -> set[str]:
    """NCCL's files in shared memory that a process has mapped; it unlinks them when all have."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if _SHARED_MEMORY in line}
    return {path for path in paths if path.startswith(f"{_SHARED_MEMORY}nccl-")}


def _forked(listening: socket.socket, probed: RankOfProbe) -> _Rank:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        parent_death.die_with_parent(parent_pid)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        listening.close()
        mine.close()
        probed.run(theirs)
    theirs.close()
    return _Rank(number=probed.membership.rank, pid=pid, line=mine)


_SAID_SO = 3  # the exit code of a rank that has said how it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOfProbe:
    """The work of one rank of the probe, in a separate process."""

    membership: Membership
    backend: str
    device: torch.device
    port: int
    limit_s: float

    def run(self, line: socket.socket) -> NoReturn:
        """Do it all, report each part to the lead, and end the process."""
        code = _SAID_SO
        try:
            self._do_all(line)
            line.send(b"done")
            code = 0
        except BaseException as error:  # noqa: BLE001 - top of a process: reported to the lead
            _report(line, error)
        finally:
            os._exit(code)

    def _do_all(self, line: socket.socket) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        link = StoreLink("127.0.0.1", self.port, timeout_s=self.limit_s)
        switch, is_aborted = AbortSwitch(), threading.Event()
        switch.on_trip(is_aborted.set)
        threading.Thread(target=_listen, args=(line, switch), daemon=True).start()
        _at(line, FORMING)
        try:
            with self._joined(1, link, switch) as group:
                _at(line, SUM)
                with _reported_first(line):
                    self.add_up(group)
                _at(line, ABORT)
                self._wait_in_vain(group, is_aborted)
        except (RuntimeError, ConnectionError):
            if not switch.tripped:
                raise
        _at(line, AGAIN)
        with self._joined(2, link, AbortSwitch()) as group:
            _at(line, SUM_AGAIN)
            with _reported_first(line):
                self.add_up(group)

    def _joined(
        self, generation: int, link: StoreLink, switch: AbortSwitch
    ) -> contextlib.AbstractContextManager[Group]:
        me = self.membership
        return joined(
            Membership(
                generation=generation,
                rank=me.rank,
                world_size=me.world_size,
                local_rank=me.local_rank,
                local_world_size=me.local_world_size,
                secret=me.secret,
            ),
            link=link,
            backend=self.backend,
            device=self.device,
            timeout_s=self.limit_s,
            switch=switch,
        )

    def add_up(self, group: Group) -> None:
        """Sum over all ranks. Raises ProbeFailedError for a wrong sum."""
        numbers = torch.full((_NUMBERS,), group.rank + 1.0, device=self.device)
        group.all_reduce(numbers)
        low, high = (float(part) for part in torch.aminmax(numbers))
        expected = group.world_size * (group.world_size + 1) / 2
        if (low, high) != (expected, expected):
            raise ProbeFailedError(f"the sum is {low:g} to {high:g} and not {expected:g}")

    def _wait_in_vain(self, group: Group, is_aborted: threading.Event) -> NoReturn:
        """Enter a collective that the last rank does not; an abort ends that, or nothing."""
        if group.rank < group.world_size - 1:
            numbers = torch.ones(_NUMBERS, device=self.device)
            group.all_reduce(numbers)
            numbers[0].item()  # where a device's collective is waited for
        is_aborted.wait(self.limit_s)
        raise ConnectionError("the generation was aborted")


@contextlib.contextmanager
def _reported_first(line: socket.socket) -> Iterator[None]:
    """Report how the block fails before the peers can see that this rank leaves."""
    try:
        yield
    except Exception as error:
        _report(line, error)
        raise


def _report(line: socket.socket, error: BaseException) -> None:
    text = " ".join(str(error).split())[: _LINE_BYTES // 2]
    with contextlib.suppress(OSError):  # the lead has ended, and so does this process
        line.send(f"failed {time.monotonic_ns()} {type(error).__name__}: {text}".encode())


def _at(line: socket.socket, part: str) -> None:
    line.send(f"at {part}".encode())


def _listen(line: socket.socket, switch: AbortSwitch) -> None:
    """Thread: act on what the lead says, as a rank's own listener does."""
    with contextlib.suppress(OSError):
        while word := line.recv(_LINE_BYTES):
            if word == b"abort":
                switch.trip()
                line.send(b"heard")
            elif word == b"cut":
                switch.cut()
