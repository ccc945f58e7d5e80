"""Frees a rank that is blocked in a collective, from another thread; never forms a group itself.

gloo has no abort (for NCCL's, see communicators). What works (measured, torch 2.13: a blocked all-reduce raises within 2 ms and the
process can form the next group): shut down duplicates of the group's connected sockets, and have gloo
fail its own operations (group). How the sockets are shut matters: gloo sets a write aside that meets a reset,
and its operation then waits for the whole timeout (gloo, transport/tcp: Pair::write).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator

from ddp_runner.kernel.group.sockets import (
    Address,
    address_of_peer,
    duplicate_if_connected,
    listening_since,
    open_sockets,
)

FORMING_RETRY_S = 0.02


class AbortSwitch:
    """Trips once: every socket watched so far, or later, is shut down, and hooks are called.

    ``trip`` may be called from any thread; everything else belongs to the thread that forms.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._store_sockets: list[socket.socket] = []
        self._store_in_use = False
        self._hooks: list[Callable[[], None]] = []
        self._cut_hooks: list[Callable[[], None]] = []
        self._is_cut = False
        self._forming: frozenset[int] | None = None  # inodes from before the block being watched
        self._peers = 0
        self._tripped = False
        self._tripped_before_release: bool | None = None
        self._closed = False

    @property
    def tripped(self) -> bool:
        """True if this generation was aborted."""
        return self._tripped

    @property
    def aborted(self) -> bool:
        """True if an abort made this rank leave the generation, or will.

        An abort that arrives while the rank already leaves because of its own error does not count: that
        error caused it, as the peers have seen this rank hang up.
        """
        if self._tripped_before_release is None:
            return self._tripped
        return self._tripped_before_release

    @property
    def is_left(self) -> bool:
        """True once this rank leaves the generation, or has left it."""
        return self._closed or self._tripped_before_release is not None

    @contextlib.contextmanager
    def watch_new_sockets(self, *, peers: int, keeps: bool = True) -> Iterator[None]:
        """Take over duplicates of the sockets that the block opens.

        Tripped meanwhile, the block is freed as well: from connections that it has, and from
        waiting for any of ``peers`` to connect. Without ``keeps`` that is all: they are let go at
        the block's end.
        """
        # INVARIANT duplicates-now: sockets are duplicated when the group has just been formed.
        # Broken if: trip() looks descriptors up later, when gloo may have closed one and its number
        # belongs to somebody else.
        # Guarded by: test_a_blocked_all_reduce_is_freed_and_the_next_group_forms.
        before = frozenset(open_sockets().values())
        with self._lock:
            self._forming, self._peers = before, peers
        try:
            yield
        finally:
            with self._lock:
                self._forming = None
                self._adopt_since(before)
                if self._tripped:
                    self._shut_down_all()
                elif not keeps:
                    self._let_go_of_peers()

    def watch_store(self, addresses: Collection[Address]) -> None:
        """Take over duplicates of the connections to the store, which listens on ``addresses``.

        One that :meth:`watch_new_sockets` saw being made is no peer's: it outlives the generation.
        By address *and* port: on another machine a peer may listen on the very port of the store.
        """
        with self._lock:
            for connection in [c for c in self._sockets if address_of_peer(c) in addresses]:
                self._sockets.remove(connection)
                connection.close()
            for descriptor in open_sockets():
                with contextlib.suppress(OSError):
                    duplicate = duplicate_if_connected(descriptor)
                    if duplicate is None:
                        continue
                    if address_of_peer(duplicate) in addresses:
                        self._store_sockets.append(duplicate)
                    else:
                        duplicate.close()

    @contextlib.contextmanager
    def using_store(self) -> Iterator[None]:
        """The block may wait in the store; only then does ``trip`` shut that connection.

        Left alone otherwise, it serves the next generation. Raises ConnectionError when tripped.
        """
        with self._lock:
            if self._tripped:
                raise ConnectionError("the generation was aborted")
            self._store_in_use = True
        try:
            yield
        finally:
            with self._lock:
                self._store_in_use = False

    def on_trip(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called by ``trip``, or at once if it has tripped; it must not block."""
        with self._lock:
            self._hooks.append(hook)
            if not self._tripped:
                return
        hook()

    def on_cut(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called by ``cut``, or at once if that was; also when the generation is left."""
        with self._lock:
            self._cut_hooks.append(hook)
            if not self._is_cut:
                return
        hook()

    def cut(self) -> None:
        """End what ends in silence: every rank of the generation has heard of the abort. Idempotent."""
        with self._lock:
            hooks = [] if self._is_cut else list(self._cut_hooks)
            self._is_cut = True
        for hook in hooks:
            hook()

    def trip(self) -> None:
        """Free the rank, whatever raises when it is cut short. Idempotent."""
        with self._lock:
            if self._tripped or self._closed:
                return
            self._tripped = True
            forming = self._forming is not None
            # gloo must see the end of each connection before a write of it fails.
            self._shut_down_all(socket.SHUT_RDWR if forming else socket.SHUT_RD)
            hooks = list(self._hooks)
        if forming:
            threading.Thread(target=self._free_forming, name="abort", daemon=True).start()
        for hook in hooks:
            hook()

    def release(self) -> list[socket.socket]:
        """Hang up on the peers, because this rank leaves by itself: that is no abort.

        They see end-of-file after all that was sent; when this rank was told to leave, so are they.
        Returns the connections, to be closed once the peers have left too: one that is closed, or
        shut both ways, answers what still comes in with a reset, and that fails the peers' writes.
        """
        with self._lock:
            self._tripped_before_release = self._tripped
            if not self._tripped:
                self._shut_down_all(socket.SHUT_WR)
            left, self._sockets = self._sockets, []
        return left

    def close(self) -> None:
        """Let go of the duplicates; while they are open, peers would never see end-of-file."""
        with self._lock:
            self._closed = True
            self._let_go_of_peers()
            for connection in self._store_sockets:
                connection.close()
            self._store_sockets.clear()
            self._hooks.clear()

    def _let_go_of_peers(self) -> None:
        for connection in self._sockets:
            connection.close()
        self._sockets.clear()

    def _free_forming(self) -> None:
        """Thread: free the block that forms, again and again, since it may be about to wait again."""
        while True:
            with self._lock:
                before = self._forming
                if before is None:
                    return
                self._adopt_since(before)
                self._shut_down_all()
                listening = listening_since(before)
            for address in listening:
                _knock(address, peers=self._peers)
            time.sleep(FORMING_RETRY_S)

    def _adopt_since(self, before: frozenset[int]) -> None:
        for descriptor, inode in open_sockets().items():
            if inode in before:
                continue
            with contextlib.suppress(OSError):  # closed since it was listed
                duplicate = duplicate_if_connected(descriptor)
                if duplicate is not None:
                    self._sockets.append(duplicate)

    def _shut_down_all(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the peers' connections, and the store's if this rank may be waiting there."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):  # the peer was faster
                connection.shutdown(how)
        for connection in self._store_sockets if self._store_in_use else []:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _knock(address: tuple[int, tuple[str, int]], *, peers: int) -> None:
    """Stand in for the peers that gloo still waits for, and hang up.

    A gloo pair that was created first waits on a listening socket that all pairs share. A peer
    announces itself there by 8 bytes, the number of the pair; gloo hands the connection over, sees
    it closed, and raises. A number that nobody waits for stays with the listener and dies with it.
    """
    family, name = address
    for number in range(2 * peers):
        with contextlib.suppress(OSError), socket.socket(family) as visitor:
            visitor.settimeout(0.2)
            visitor.connect(name)
            visitor.sendall(number.to_bytes(8, "little"))
