"""Messages between machines outside of a run: between those without a coordinator, a question to one, and where it is."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_runner.features.machines.node_link import LinkLostError, NodeLink, UnprovedError
from ddp_runner.features.machines.rules.majority import Peer
from ddp_runner.features.machines.rules.node_messages import FROM_COORDINATOR, Answer, Question
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.packets import WireError

_Where = tuple[str, int]
_Address = tuple[socket.AddressFamily, Any]
# Shared memory with the coordinator's address, which a launcher writes when the coordinator moves: its descriptor, in the
# supervisor's environment, and its size: a name of 255, and a port.
ENDPOINT_VARIABLE = "DDP_RUNNER_ENDPOINT_FD"
_ENDPOINT_BYTES = 320
LINKS_MAX = 64  # of a door: with one more, the oldest is dropped


def _addresses(where: _Where, flags: int = 0) -> list[_Address]:
    """Return the addresses of a host and a port; none if it has none now."""
    try:
        found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError):  # UnicodeError: such as two dots in a row
        return []
    return [(family, address) for family, _, _, _, address in found]


class Letters:
    """Links of one supervisor, each for one message and its answer. Turned by its owner, which it wakes by nothing; never blocks.

    A name is looked up each time that something is sent there, by a thread: its address may be another one by then.
    """

    def __init__(self, token: bytes, kinds: Mapping[str, type[Any]]) -> None:
        self._token = token
        self._kinds = kinds
        self._selector = selectors.DefaultSelector()
        self._links: list[NodeLink] = []
        self._door: socket.socket | None = None
        self._message: object = None  # the newest that was sent
        self._waits: set[_Where] = set()  # to be sent it, once they are looked up
        self._asked: set[_Where] = set()  # that a thread looks up
        self._found: queue.SimpleQueue[tuple[_Where, list[_Address]]] = queue.SimpleQueue()

    def open(self, door: socket.socket) -> None:
        """Take in whoever dials there."""
        door.setblocking(False)
        self._door = door
        self._selector.register(door, selectors.EVENT_READ, None)

    def leave_door(self) -> None:
        """Take nobody in any more; the socket is its owner's."""
        if self._door is not None:
            self._selector.unregister(self._door)
            self._door = None

    def send(self, peers: Sequence[Peer], message: object) -> None:
        """Send ``message`` to each machine that answers; what was sent before is forgotten."""
        self.drop_all()
        self._message = message
        for where in {(peer.host, peer.port) for peer in peers if peer.host}:
            if numeric := _addresses(where, socket.AI_NUMERICHOST):
                self._dial(numeric)
                continue
            self._waits.add(where)
            if where not in self._asked:
                with contextlib.suppress(RuntimeError):  # no thread to be had now: the next time
                    threading.Thread(target=self._look_up, args=(where,), daemon=True).start()
                    self._asked.add(where)

    def _look_up(self, where: _Where) -> None:
        self._found.put((where, _addresses(where)))

    def _dial(self, addresses: Sequence[_Address]) -> None:
        for family, address in addresses:
            try:
                connection = socket.socket(family, socket.SOCK_STREAM)
            except OSError:  # such as IPv6 where the kernel has none
                continue
            connection.setblocking(False)
            try:
                connection.connect_ex(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                connection.close()
                continue
            link = NodeLink(connection, token=self._token, listens=False)
            self._add(link)
            with self._held(link):
                link.send(wire.encode(self._message))

    def turn(self) -> Iterator[tuple[NodeLink, Any]]:
        """Yield what has come, each with the link to answer on."""
        with contextlib.suppress(queue.Empty):
            while True:
                where, addresses = self._found.get_nowait()
                self._asked.discard(where)
                if where in self._waits:
                    self._waits.discard(where)
                    self._dial(addresses)
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
                continue
            link: NodeLink = key.data
            with self._held(link):
                link.flush()
                for content in link.receive():
                    yield link, wire.decode(content, self._kinds)
                self._want(link)

    def answer(self, link: NodeLink, message: object) -> None:
        """Send an answer; the other end hangs up."""
        with self._held(link):
            link.send(wire.encode(message))

    def drop_all(self) -> None:
        """Hang up everywhere."""
        self._waits.clear()
        for link in list(self._links):
            self.drop(link)

    def drop(self, link: NodeLink) -> None:
        """Hang up."""
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link)
            link.close()

    def close(self) -> None:
        """Hang up, and close what was opened here."""
        self.drop_all()
        if self._door is not None:
            door = self._door
            self.leave_door()
            door.close()
        self._selector.close()

    def _accept(self) -> None:
        assert self._door is not None
        try:
            connection, _ = self._door.accept()
        except OSError:
            return
        if len(self._links) >= LINKS_MAX:
            self.drop(self._links[0])
        link = NodeLink(connection, token=self._token, listens=True)
        self._add(link)

    def _add(self, link: NodeLink) -> None:
        self._links.append(link)
        self._selector.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _want(self, link: NodeLink) -> None:
        if link in self._links:
            mask = selectors.EVENT_READ | selectors.EVENT_WRITE * link.wants_to_write
            self._selector.modify(link, mask, link)

    @contextlib.contextmanager
    def _held(self, link: NodeLink) -> Iterator[None]:
        """Drop a link that breaks, or that says what nobody here understands."""
        try:
            yield
        except (LinkLostError, WireError):
            self.drop(link)


class WrongTokenError(Exception):
    """It is one of ours, and has another token."""


def ask(connection: socket.socket, *, token: bytes, limit_s: float) -> Answer:
    """Return the answer of the coordinator at the other end. Blocks for at most ``limit_s``, and hangs up.

    Raises WrongTokenError, or LinkLostError if the other end is not a coordinator of this version.
    """
    link = NodeLink(connection, token=token, listens=False)
    give_up_s = time.monotonic() + limit_s
    try:
        link.send(wire.encode(Question()))
        while (left_s := give_up_s - time.monotonic()) > 0:
            ready = select.poll()  # which takes descriptors above 1,023 too
            ready.register(link, select.POLLIN | select.POLLOUT * link.wants_to_write)
            ready.poll(left_s * 1000)
            link.flush()
            for content in link.receive():
                answer = wire.decode(content, FROM_COORDINATOR)
                if isinstance(answer, Answer):
                    return answer
    except UnprovedError as error:
        raise WrongTokenError from error
    except WireError as error:
        raise LinkLostError(str(error)) from error
    finally:
        link.close()
    raise LinkLostError(f"it has not answered within {limit_s:g} s")


def endpoint_bytes(host: str, port: int) -> bytes:
    """Return the bytes to write at the start of the memory; their length never varies."""
    return f"{host} {port}".encode().ljust(_ENDPOINT_BYTES)


def read_endpoint(descriptor: int | None) -> tuple[str, int] | None:
    """Return host and port; None if none were written, or there is no descriptor."""
    if descriptor is None:
        return None
    try:
        host, port = os.pread(descriptor, _ENDPOINT_BYTES, 0).decode().split()
        return host, int(port)
    except (OSError, ValueError):
        return None
