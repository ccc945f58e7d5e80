"""The link between two nodes: whole frames, and none that is not proved."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from ddp_runner.features.machines.node_link import (
    FRAME_BYTES_MAX,
    MAGIC,
    NONCE_BYTES,
    QUEUE_BYTES_MAX,
    LinkLostError,
    NodeLink,
    UnprovedError,
)

TOKEN = b"0123456789abcdef"


def pair(token=TOKEN, other_token=TOKEN):
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return (
        NodeLink(accepted, token=token, listens=True),
        NodeLink(dialled, token=other_token, listens=False),
    )


@pytest.fixture
def links():
    made = pair()
    yield made
    for link in made:
        link.close()


def received(link, count, other=None):
    """``count`` frames, with both ends at work."""
    frames, until_s = [], time.monotonic() + 5.0
    while len(frames) < count:
        assert time.monotonic() < until_s, f"{len(frames)} of {count} frames"
        for one in filter(None, (link, other)):
            one.flush()
        if other is not None:
            assert other.receive() == []
        frames += link.receive()
    return frames


def proved(listener, dialler):
    """Have both ends know each other."""
    until_s = time.monotonic() + 5.0
    while not (listener.is_proved and dialler.is_proved):
        assert time.monotonic() < until_s
        for link in (listener, dialler):
            link.flush()
            assert link.receive() == []


def test_frames_arrive_whole_and_in_order_both_ways(links):
    """Of any length, the first ones sent before the ends know each other."""
    listener, dialler = links
    sent = [b"", b"hello", bytes(range(256)) * 1024]
    for content in sent:
        dialler.send(content)
    assert received(listener, len(sent), dialler) == sent
    listener.send(b"welcome")
    assert received(dialler, 1) == [b"welcome"]
    with pytest.raises(ValueError, match="too long"):
        listener.send(bytes(FRAME_BYTES_MAX + 1))


def test_a_frame_that_is_not_proved_ends_the_connection():
    """A byte that was changed, one that was seen before, one of the other direction."""
    for harm in (_changed, _again, _reflected):
        listener, dialler = pair()
        with contextlib.closing(listener), contextlib.closing(dialler):
            dialler.send(b"hello")
            received(listener, 1, dialler)
            harm(listener, dialler)
            with pytest.raises(UnprovedError):
                received(listener, 1)


@pytest.mark.parametrize("listens", [False, True])
def test_who_does_not_prove_itself_is_sent_nothing(listens):
    """Neither end sends content to one with another token, or with an answer of another connection."""
    secret = b"settings and hosts"
    for token, of_another in ((b"fedcba9876543210", False), (TOKEN, True)):
        ours, theirs = socket.socketpair()
        near, far = socket.socketpair()
        with (
            contextlib.closing(NodeLink(ours, token=TOKEN, listens=listens)) as link,
            contextlib.closing(NodeLink(near, token=token, listens=not listens)) as stranger,
            theirs,
            far,
        ):
            link.send(secret)
            with pytest.raises(UnprovedError):
                _relay(link, theirs, stranger, far, secret=secret, of_another=of_another)
            assert not link.is_proved


def _relay(link, theirs, stranger, far, *, secret, of_another):
    """Have ``link`` hear what ``stranger`` answers; ``of_another``: to one that has greeted it otherwise."""
    sent = b""
    for one in (theirs, far):
        one.setblocking(False)
    for _ in range(4):
        stranger.flush()
        with contextlib.suppress(BlockingIOError):
            theirs.sendall(far.recv(1 << 16))
        link.flush()
        try:
            assert link.receive() == []
        finally:
            with contextlib.suppress(BlockingIOError):
                part = theirs.recv(1 << 16)
                if of_another and not sent:
                    part = MAGIC + bytes(NONCE_BYTES) + part[len(MAGIC) + NONCE_BYTES :]
                sent += part
                far.sendall(part)
            assert secret not in sent
        with contextlib.suppress(LinkLostError):
            stranger.receive()


def test_who_listens_says_nothing_before_it_is_greeted():
    """A scanner learns not even that it is this program, and what it sends takes no memory."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(NodeLink(ours, token=TOKEN, listens=True)) as link, theirs:
        link.send(b"settings and hosts")
        theirs.setblocking(False)
        for part in (MAGIC[:-1], MAGIC[-1:], bytes(NONCE_BYTES - 1)):
            theirs.sendall(part)
            assert link.receive() == []
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
        theirs.sendall(
            bytes(1) + (1).to_bytes(4, "big")
        )  # and the length of a frame that is not empty
        with pytest.raises(LinkLostError, match="no frame"):
            link.receive()


def _changed(listener, dialler):
    del listener
    dialler.send(b"first")  # encoded, and sent: the same once more, with another byte
    dialler._socket.send(_frame(dialler, b"other")[:-1] + b"X")


def _frame(link, content):
    """What ``link`` would send next, not sent."""
    kept = link._socket
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link._socket = ours
    link.send(content)
    link._socket = kept
    with ours, theirs:
        return theirs.recv(1 << 16)


def _again(listener, dialler):
    frame = _frame(dialler, b"once")
    dialler._socket.send(frame)
    assert received(listener, 1) == [b"once"]
    dialler._socket.send(frame)


def _reflected(listener, dialler):
    dialler._socket.send(_frame(listener, b"of the listener's own"))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC[:3] + b"x" * 60,
        b"DDPRUN01" + b"x" * 60,
        MAGIC + bytes(NONCE_BYTES) + b"\xff" * 40,
    ],
)
def test_what_is_no_node_is_known_by_its_first_bytes(sent):
    """A browser, a scanner, another version, and a frame of a size that nobody sends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    link = NodeLink(accepted, token=TOKEN, listens=True)
    stranger.sendall(sent)
    with pytest.raises(LinkLostError, match=r"no node|no frame"):
        received(link, 1)
    stranger.close()
    link.close()


def test_a_peer_that_reads_nothing_is_lost_and_blocks_nobody(links):
    """What waits for it has a limit."""
    listener, dialler = links
    dialler.send(b"hello")
    received(listener, 1, dialler)
    with pytest.raises(LinkLostError, match="has not read"):
        _send_for_ever(listener)


def _send_for_ever(link):
    for _ in range(200 * QUEUE_BYTES_MAX // FRAME_BYTES_MAX):
        link.send(bytes(FRAME_BYTES_MAX))


def test_what_was_sent_before_the_end_is_read_before_the_end(links):
    """Then the end is known, and a half frame counts for nothing."""
    listener, dialler = links
    dialler.send(b"hello")
    received(listener, 1, dialler)
    listener.send(b"last")
    half = _frame(listener, b"never whole")[:-3]
    listener._socket.send(half)
    listener.say_no_more()
    assert received(dialler, 1) == [b"last"]
    with pytest.raises(LinkLostError, match="closed"):
        received(dialler, 1)
