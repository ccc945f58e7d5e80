"""Forms and leaves the process group of one generation. Never decides when."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    Backend,
    DebugLevel,
    PrefixStore,
    Store,
    get_debug_level,
    set_debug_level,
)

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.communicators import Communicators, EnteredGroup, ends_in_silence
from ddp_runner.kernel.group.signed import SignedStore, key_prefix, proof, tampered
from ddp_runner.kernel.group.tcp_store import StoreLink
from ddp_runner.kernel.group.waits import GroupOfReducer, SumsOfBuckets, Waits
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind

_INTERFACES = "GLOO_SOCKET_IFNAME"
UNUSED_TAG = 2**30  # of a message that nobody sends
PROOF_TAG = UNUSED_TAG - 1  # of the first message between two ranks
# Of generations that could not be left without an abort.
_never_freed: list[dist.ProcessGroup | Backend] = []
# Of the generation that this process has left and whose abort may not have ended; one at most.
_left: list[Communicators] = []
_uses = itertools.count()  # of a group that the program has formed
PEERS_LEAVE_S = 0.25  # from the first rank that leaves a broken generation to the last
# A group that was left, usually; one that gloo has lost track of waits for its timeout.
FREED_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One agreed membership.

    ``secret`` is known to its members alone; empty where nobody could hand one out. ``owes_drill``: as of
    :class:`~ddp_runner.kernel.wire.messages.Form`. ``is_programs``: the group is there, the program itself has formed it.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    secret: str = field(default="", repr=False)
    owes_drill: int = -1
    is_programs: bool = False


class Group:
    """The default process group of one generation, and its store for small agreements."""

    def __init__(
        self,
        membership: Membership,
        store: Store,
        *,
        device: torch.device,
        switch: AbortSwitch,
        communicators: Communicators | None = None,
        look_again: Callable[[list[str]], list[bytes] | None] = lambda _: None,
    ) -> None:
        """``look_again``: what lies under these keys, where an abort has ended the store's connection."""
        self._look_again = look_again
        self.membership = membership
        self.device = device
        self._store = store
        self._switch = switch
        self._asked: Counter[str] = Counter()
        # None where the device waits: the abort of its communicators ends that.
        self._waits = None if communicators else Waits()
        if self._waits is not None:
            switch.on_trip(self._waits.abort)
        self._communicators = communicators
        # Whether a collective that an abort cuts short ends like one that is whole.
        self.ends_in_silence = communicators is not None

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.membership.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.membership.world_size

    def exchange(self, name: str, value: str) -> list[str]:
        """Return every rank's ``value``, by rank. Blocks until all have called it with this ``name``.

        Raises torch.distributed.DistError within the group's timeout if a rank never does.
        """
        # Numbered, so that the same question asked again is not answered by the first time's values.
        self._asked[name] += 1
        key = f"{name}/{self._asked[name]}"
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        with self._switch.using_store():
            try:
                self._store.set(keys[self.rank], value)
                # At once: a question a rank to one store is n * n of them, 20 s of its CPU at 1,024 ranks.
                found = self._store.multi_get(keys)
            except RuntimeError:
                # INVARIANT answered-is-whole: a complete set of answers counts even if an abort interrupts the
                # reading: a lost peer may have read it and committed the step.
                # Broken if: the abort alone decides.
                # Guarded by: test_answers_that_a_lost_peer_has_read_are_read_after_the_abort.
                whole = self._look_again(keys) if self._switch.tripped else None
                if whole is None:
                    raise
                found = whole
            return [value.decode() for value in found]

    def note(self, name: str) -> None:
        """Let those who :meth:`await_notes` of this ``name`` know that this rank is here. Once a name."""
        with self._switch.using_store():
            self._store.set(f"{name}/noted/{self.rank}", "")

    def await_notes(self, name: str, ranks: Iterable[int]) -> None:
        """Return once each of ``ranks`` has said so. Raises as :meth:`exchange` does."""
        with self._switch.using_store():
            for rank in ranks:
                self._store.get(f"{name}/noted/{rank}")

    def of_reducer(self, sums: SumsOfBuckets) -> dist.ProcessGroup:
        """The group as DDP's reducer is to have it; ``sums``: of the gradients, where the CPU waits."""
        if self._communicators is not None:
            return EnteredGroup(_default_group(), self._communicators)
        assert self._waits is not None
        return GroupOfReducer(_default_group(), self._waits, sums)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over ranks, in place.

        Raises RuntimeError if that cannot be, and ConnectionError after an abort.
        """
        self.wait_for(self.begin_sum(tensor))

    def begin_sum(self, tensor: Tensor) -> dist.Work:
        """Begin to sum ``tensor`` over ranks, in place; :meth:`wait_for` it. Raises as that does."""
        with self._entered():
            # Not dist.all_reduce: what that checks and logs takes longer than a small sum.
            return (dist.group.WORLD or _default_group()).allreduce([tensor])

    def send(self, tensor: Tensor, to: int) -> dist.Work | None:
        """Begin to send to a rank; :meth:`wait_for_messages`. Raises as that does."""
        with self._entered():
            return dist.isend(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> dist.Work | None:
        """Begin to receive from a rank; :meth:`wait_for_messages`. Raises as that does."""
        with self._entered():
            return dist.irecv(tensor, source)

    def _entered(self) -> contextlib.AbstractContextManager[None]:
        if self._communicators is None:
            return contextlib.nullcontext()
        return self._communicators.entered()

    def broadcast(self, tensor: Tensor) -> None:
        """Make rank 0's ``tensor`` everyone's, in place. Raises as :meth:`all_reduce` does."""
        with self._entered():
            work = dist.broadcast(tensor, 0, async_op=True)
        self.wait_for(work)

    def wait_for(self, work: dist.Work) -> None:
        """Return when a collective of this group is done. Raises as :meth:`all_reduce` does."""
        if self._waits is None:
            work.wait()
        else:
            self._waits.for_collective(work)

    def wait_for_messages(self, works: Sequence[dist.Work | None]) -> None:
        """Return when messages to and from other ranks have ended. Raises as :meth:`all_reduce` does."""
        if self._waits is not None:
            self._waits.for_messages(works)
            return
        for work in works:
            if work is not None:
                work.wait()

    def finish_on_device(self) -> None:
        """Return once the device has ended the collectives that were begun. Those of the CPU have."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def confirm(self) -> None:
        """Raise ConnectionError if what the device has computed may be of collectives cut short.

        To be called once the device has finished it. An abort of communicators ends kernels, of this
        rank's peers too, and nothing else shows that they had not come to their end; no rank begins
        one before every rank refuses here (see communicators). gloo's collectives raise by themselves, and what
        is whole stays valid when an abort comes after it: a peer may have committed the step.
        """
        if self.ends_in_silence:
            _refuse_if_tripped(self._switch, "aborted before the device had finished")

    # INVARIANT left-before-begun: a rank leaves what it computes only before it begins a sum that the step needs:
    # then no rank can have committed that step.
    # Broken if: this is asked once a step's last sum is under way.
    # Guarded by: test_an_abort_ends_a_step_before_its_next_sum.
    def refuse_aborted(self) -> None:
        """Raise ConnectionError once this generation is aborted: what is computed in it is for nothing.

        Where the device waits, an abort takes two phases, and :meth:`confirm` asks.
        """
        if not self.ends_in_silence:
            _refuse_if_tripped(self._switch, "the generation was aborted")


def _choose_interface(host: str, backend: str) -> None:
    """Bind gloo to loopback for a world on one machine, whatever its host name resolves to.

    Raises BadInputError if the user has named a network interface that this machine lacks.
    """
    if host in ("127.0.0.1", "localhost", "::1"):
        os.environ.setdefault(_INTERFACES, "lo")
    asked = os.environ.get(_INTERFACES, "")
    there = [name for _, name in socket.if_nameindex()]
    lacking = [name for name in asked.split(",") if name and name not in there]
    if lacking and "gloo" in backend:
        expected = f"{lacking[0]} is no network interface here: {', '.join(there)}"
        raise BadInputError(_INTERFACES, asked, expected)


def _form_default_group(
    membership: Membership,
    *,
    backend: str,
    store: Store,
    device: torch.device,
    timeout_s: float,
    switch: AbortSwitch,
) -> Communicators | None:
    """Form torch's default group; a trip of ``switch`` ends the waiting.

    Returns NCCL's communicators, which are how it is waited for; None with gloo.
    """
    is_silent = ends_in_silence(backend)
    _restart_group_names()
    with (
        switch.using_store(),
        # A shut socket of NCCL's would be an abort that nobody has agreed on.
        switch.watch_new_sockets(peers=membership.world_size, keeps=not is_silent),
        _below_detail(),
        _own_excepthook(),
    ):
        dist.init_process_group(
            backend,
            store=store,
            rank=membership.rank,
            world_size=membership.world_size,
            timeout=timedelta(seconds=timeout_s),
            # Its communicator is made here, where an abort ends the waiting, and is the only one.
            device_id=device if is_silent and device.type == "cuda" else None,
        )
    return Communicators(_default_group(), switch, device) if is_silent else None


@contextlib.contextmanager
def joined(
    membership: Membership,
    *,
    link: StoreLink,
    backend: str,
    device: torch.device,
    timeout_s: float,
    switch: AbortSwitch,
) -> Iterator[Group]:
    """Be a member of the generation for the length of the block.

    Every rank of the membership must enter. Raises RuntimeError or torch.distributed.DistError when
    a peer does not come within ``timeout_s``, or at once when ``switch`` is tripped meanwhile.
    """
    if membership.is_programs:
        with _used(membership, device=device, timeout_s=link.timeout_s, switch=switch) as group:
            yield group
        return
    _choose_interface(link.host, backend)
    _end_last(membership.rank)
    is_silent = ends_in_silence(backend)
    communicators: Communicators | None = None
    try:
        keys, scoped = _of_generation(membership, _reach_store(link, membership, switch), link)
        communicators = _form_default_group(
            membership,
            backend=backend,
            # NCCL asks the store from threads of its own, which must not wait for the interpreter.
            store=PrefixStore("group", keys if is_silent else scoped),
            device=device,
            timeout_s=timeout_s,
            switch=switch,
        )
        # Its waits hear of an abort first: that cannot block.
        group = Group(
            membership,
            scoped,
            device=device,
            switch=switch,
            communicators=communicators,
            look_again=functools.partial(_look_again, link, membership),
        )
        if "gloo" in backend:
            switch.on_trip(functools.partial(_fail_operations, _gloo()))
        _refuse_if_tripped(switch, "aborted while forming")
        if membership.secret and backend == "gloo":
            _prove_peers(group)
        yield group
    except BaseException:
        # Peers may be blocked in a collective that this rank will never enter: destroying the group
        # alone would leave them there until their timeout.
        if communicators is not None:
            _leave_communicators(communicators, is_alone=membership.world_size == 1)
        _leave_broken(switch.release(), is_silent=communicators is not None)
        raise
    else:
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        switch.close()


def has_programs_group() -> bool:
    """Return True if the program has called ``init_process_group`` itself."""
    return dist.is_available() and dist.is_initialized() and not _left


@contextlib.contextmanager
def _used(
    membership: Membership, *, device: torch.device, timeout_s: float, switch: AbortSwitch
) -> Iterator[Group]:
    """Use the group that the program has formed; it stays the program's to destroy.

    Raises BadInputError where it is for another kind of device.
    """
    group, store = _default_group(), dist.distributed_c10d._get_default_store()  # noqa: SLF001 - as above
    try:
        backend = group._get_backend(device)  # noqa: SLF001 - there is no public name
    except RuntimeError:
        expected = f"has no backend for {device.type}: give one, or leave the call out"
        raise BadInputError("init_process_group", dist.get_backend(), expected) from None
    # Each trainer of a program has keys of its own: what one has agreed on is nothing to the next.
    own = store.clone() if hasattr(store, "clone") else store
    keys = PrefixStore(f"ddp_runner/{next(_uses)}", own)
    keys.set_timeout(timedelta(seconds=timeout_s))  # the group's own is half an hour
    is_silent = ends_in_silence(backend.name())
    communicators = Communicators(group, switch, device) if is_silent else None
    try:
        yield Group(membership, keys, device=device, switch=switch, communicators=communicators)
    except BaseException:
        if backend.name() == "gloo":
            # Peers may wait in a collective that this rank will not enter.
            _fail_operations(backend)
        raise
    finally:
        switch.close()


def holds_communicators() -> bool:
    """Return True if this process has left a generation whose communicators it has not aborted yet."""
    return bool(_left)


def _end_last(rank: int) -> None:
    """Leave torch's world of the last generation, once its communicators are aborted.

    Raises FaultError (DEVICE_LOST) where that does not end.
    """
    while _left:
        why = _left[-1].await_aborted()
        if why:
            raise FaultError(
                Fault(
                    kind=FaultKind.DEVICE_LOST,
                    rank=rank,
                    step=0,
                    cause=f"the device is lost: {why}",
                )
            )
        _left.pop()
        if dist.is_initialized():
            # Of communicators that are aborted already; "destroy" after a fault hangs.
            dist.distributed_c10d._abort_process_group(_default_group())  # noqa: SLF001 - there is no public name
            if dist.is_initialized():  # torch 2.6: it knows no class of communicators but NCCL's
                dist.destroy_process_group()


def _leave_communicators(communicators: Communicators, *, is_alone: bool) -> None:
    """Leave them as they are: others may still wait for their end, and take for whole what an abort leaves.

    Where this rank ``is_alone`` there are none, nor anybody who would say when: they are aborted here.
    """
    _left.append(communicators)
    if is_alone:
        communicators.abort()


def _leave_broken(connections: list[socket.socket], *, is_silent: bool = False) -> None:
    """Destroy the group, if there is one; whatever waits for its last operations does so elsewhere.

    One that ``is_silent`` is left as it is: the next generation ends it.
    """
    remains: list[dist.ProcessGroup | Backend] = []
    if dist.is_initialized() and not is_silent:
        is_gloo = "gloo" in dist.get_backend()
        remains.append(_gloo() if is_gloo else _default_group())
        # Nothing replaces the error for which this is left.
        with contextlib.suppress(RuntimeError, ValueError):
            if is_gloo:
                _fail_operations(_gloo())
            dist.destroy_process_group()
    if remains and remains[0].size() == 1:
        remains.clear()  # nobody waits; a program that ends now must not meet threads of the group's
    if not remains and not connections:
        return
    leave = threading.Thread(target=_let_go, args=(remains, connections), name="leave", daemon=True)
    # INVARIANT freed-before-the-end: a program that ends right after a repair waits until the group that it has left is freed.
    # Broken if: the interpreter ends meanwhile. The thread then ends within gloo's destructor, and C++ aborts the process.
    # Guarded by: test_a_program_that_ends_while_a_group_is_freed_waits.
    atexit.register(leave.join, FREED_WITHIN_S)
    try:
        leave.start()
    except RuntimeError:
        atexit.unregister(leave.join)
        # No memory for its stack, so that what broke this generation must not be hidden by this. The
        # group is never freed here: nobody may wait for its threads.
        _never_freed.extend(remains)
        _close(connections)


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # the peer has closed it
            connection.shutdown(socket.SHUT_RD)
        connection.close()


def _let_go(remains: list[dist.ProcessGroup | Backend], connections: list[socket.socket]) -> None:
    """Thread: when the peers have had time to leave, end the group's operations and free it.

    Freeing a gloo group waits for its threads, and one that gloo has lost track of (see abort) waits
    for the collective's whole timeout.
    """
    time.sleep(PEERS_LEAVE_S)
    for connection in connections:
        with contextlib.suppress(OSError):  # the peer has closed it
            connection.shutdown(socket.SHUT_RD)
    remains.clear()
    for connection in connections:
        connection.close()
    atexit.unregister(threading.current_thread().join)


@contextlib.contextmanager
def _own_excepthook() -> Iterator[None]:
    """Keep what the program does with its errors: torch puts ``[rank0]:`` before them, once a group.

    In a notebook or a script it would stay there when the training is long over.
    """
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


@contextlib.contextmanager
def _below_detail() -> Iterator[None]:
    """Form the group without the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it.

    With the wrapper, DDP's own logger ends the process (SIGSEGV; seen: torch 2.13, CPU, gloo, also
    in a plain script). DDP itself is then built at DETAIL again, and names parameters.
    """
    level = get_debug_level()
    if level != DebugLevel.DETAIL:
        yield
        return
    set_debug_level(DebugLevel.INFO)
    try:
        yield
    finally:
        set_debug_level(level)


def _reach_store(link: StoreLink, membership: Membership, switch: AbortSwitch) -> Store:
    """The store, reached in a way that an abort can cut short."""
    if link.port == 0 and membership.world_size != 1:
        raise ValueError("a world of several ranks needs a store")
    switch.watch_store(link.addresses)  # the connection that is kept
    with switch.using_store(), switch.watch_new_sockets(peers=0):
        store = link.store(given_up=lambda: switch.tripped)
    switch.watch_store(link.addresses)
    return store


def _of_generation(
    membership: Membership, store: Store, link: StoreLink
) -> tuple[PrefixStore, Store]:
    """The store under the keys of one generation: as it is, and with signatures where there is a secret."""
    # Stale addresses of an earlier generation are what breaks restarts elsewhere.
    keys = PrefixStore(key_prefix(membership.secret, membership.generation), store)
    if not membership.secret:
        return keys, keys
    return keys, SignedStore(keys, membership.secret, timeout_s=link.timeout_s)


def _look_again(link: StoreLink, membership: Membership, keys: list[str]) -> list[bytes] | None:
    """The values of ``keys`` in a generation that is aborted; None where one is not there."""

    def look(store: Store) -> list[bytes] | None:
        _, scoped = _of_generation(membership, store, link)
        return scoped.multi_get(keys) if scoped.check(keys) else None

    return link.look_aside(look)


def _prove_peers(group: Group) -> None:
    """Have every connection of a new gloo group show that a rank of this generation is behind it.

    gloo connects to whom the store names, which is signed; but it lets anybody in who connects to its
    own port and says the number of a pair. Once a connection has shown it, the kernel keeps it theirs.
    Raises FaultError (STORE_TAMPERED), and what an abort or a lost connection raises.
    """
    me, secret = group.rank, group.membership.secret
    others = [rank for rank in range(group.world_size) if rank != me]
    shown = {rank: _as_tensor(proof(secret, of=me, to=rank)) for rank in others}
    expected = {rank: _as_tensor(proof(secret, of=rank, to=me)) for rank in others}
    seen = {rank: torch.zeros_like(expected[rank]) for rank in others}
    works = [dist.irecv(seen[rank], rank, tag=PROOF_TAG) for rank in others]
    works += [dist.isend(shown[rank], rank, tag=PROOF_TAG) for rank in others]
    group.wait_for_messages(works)
    for rank in others:
        if not torch.equal(seen[rank], expected[rank]):
            raise tampered(f"what connected as rank {rank} is not a rank of this run")


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _restart_group_names() -> None:
    """Have torch name the next group as a process that never formed one would.

    torch counts groups and puts the count into the store's keys. A group that failed while forming
    is counted and never destroyed, so this rank would look for its peers under another name.
    """
    # INVARIANT same-names: ranks of one generation agree on the store's keys whatever each of them
    # went through before. Broken if: a count survives from an earlier generation.
    # Guarded by: test_a_peer_that_stops_while_connecting_does_not_hold_the_others.
    world = getattr(dist.distributed_c10d, "_world", None)
    if world is not None and not dist.is_initialized():
        world.group_count = 0


def _refuse_if_tripped(switch: AbortSwitch, why: str) -> None:
    if switch.tripped:
        raise ConnectionError(why)


def _default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()  # noqa: SLF001 - as DDP itself does


def _gloo() -> Backend:
    """The gloo backend of the default group: what is kept of a group that is about to be left.

    Freeing it waits for its threads, which may need the interpreter to free a tensor. torch gives the
    interpreter up meanwhile; for a whole group torch 2.6 does not (distributed/c10d/init.cpp:
    intrusive_ptr_no_gil_destructor_class_).
    """
    return _default_group()._get_backend(torch.device("cpu"))  # noqa: SLF001 - there is no public name


def _fail_operations(backend: Backend) -> None:
    """Have gloo fail all that is under way in it: one operation that times out does that."""
    # INVARIANT gloo-fails-itself: closing connections is not enough to free a rank. A connection
    # whose next message is for an operation that has failed already is never read again, so that
    # nothing else that waits for it learns of its end (gloo, transport/tcp: Pair::prepareRead).
    # Broken if: an abort only shuts sockets.
    # Guarded by: test_an_operation_behind_the_message_of_a_failed_one_is_freed.
    nothing = torch.empty(1)
    for rank in range(backend.size()):
        if rank != backend.rank():
            # Raises at once for a connection that is known to be closed.
            with contextlib.suppress(RuntimeError):
                receiving = backend.recv([nothing], rank, UNUSED_TAG)  # type: ignore[attr-defined]
                receiving.wait(timedelta(milliseconds=1))


def collectives_begun() -> int:
    """Return the number of collectives, sends and receives that this rank has begun in its group.

    -1 outside of a group. May be called from any thread.
    """
    if not dist.is_initialized():
        return -1
    try:
        group = _default_group()
    except ValueError:  # the rank's own thread has just left it
        return -1
    count = getattr(group, "_get_sequence_number_for_group", None)
    return -1 if count is None else int(count())
