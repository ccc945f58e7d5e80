"""The control channel: whole messages, descriptors that arrive, and ends that are noticed."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from ddp_runner.kernel.system.control_channel import DESCRIPTORS_MAX, Channel, ChannelClosedError
from ddp_runner.kernel.wire.fork_specs import ForkKind, ImportsSpec
from ddp_runner.kernel.wire.messages import (
    PACKET_BYTES_MAX,
    Abort,
    Checkpoint,
    Fork,
    Forked,
    Metrics,
)
from ddp_runner.kernel.wire.packets import WireError
from tests.processes import run_ranks


@pytest.fixture
def ends():
    mine, theirs = Channel.pair()
    other = Channel(theirs)
    yield mine, other
    mine.close()
    other.close()


def test_messages_arrive_whole_and_in_order(ends):
    """Sizes do not matter: one send is one receive."""
    mine, other = ends
    sent = [
        Abort(generation=3),
        Metrics(rank=1, step=2, values={f"figure_{n}": n / 7 for n in range(500)}),
        Checkpoint(),
    ]
    for message in sent:
        mine.send(message)
    assert [other.receive() for _ in sent] == [(message, []) for message in sent]


def test_both_directions_are_independent(ends):
    """Each end sends and receives."""
    mine, other = ends
    mine.send(Abort(generation=1))
    other.send(Forked(token=1, pid=2))
    assert mine.receive()[0] == Forked(token=1, pid=2)
    assert other.receive()[0] == Abort(generation=1)


def test_descriptors_come_with_their_message(ends):
    """They are new numbers for the same open files, and the receiver's to close."""
    mine, other = ends
    pipes = [os.pipe() for _ in range(DESCRIPTORS_MAX // 2)]
    sent = [descriptor for pipe in pipes for descriptor in pipe]
    mine.send(Fork(token=1, kind=ForkKind.IMPORTS, spec=ImportsSpec(wanted="a")), descriptors=sent)
    message, received = other.receive()
    assert message == Fork(token=1, kind=ForkKind.IMPORTS, spec=ImportsSpec(wanted="a"))
    assert len(received) == DESCRIPTORS_MAX
    assert not set(received) & set(sent)
    for number, (_, writer) in enumerate(pipes):
        os.write(writer, b"%d" % number)
        assert os.read(received[2 * number], 10) == b"%d" % number
    for descriptor in (*sent, *received):
        os.close(descriptor)


@pytest.mark.parametrize("waits", [True, False])
def test_what_was_sent_is_received_though_its_sender_left_packets_unread(ends, waits):
    """A rank that reports its fault and ends has not read that the generation is aborted."""
    mine, other = ends
    mine.set_blocking(blocking=waits)
    other.send(Forked(token=1, pid=2))
    other.send(Forked(token=3, pid=4))
    mine.send(Abort(generation=9))
    other.close()
    assert mine.receive()[0] == Forked(token=1, pid=2)
    assert mine.receive()[0] == Forked(token=3, pid=4)
    with pytest.raises(ChannelClosedError):
        mine.receive()


def test_a_closed_peer_is_noticed_by_receive_and_send(ends):
    """What it had sent before is still received."""
    mine, other = ends
    other.send(Abort(generation=9))
    other.close()
    assert mine.receive()[0] == Abort(generation=9)
    with pytest.raises(ChannelClosedError):
        mine.receive()
    with pytest.raises(ChannelClosedError):
        mine.send(Checkpoint())


def test_a_receive_that_waits_ends_with_its_peer(ends):
    """End-of-file wakes it, at once."""
    mine, other = ends
    outcome = []

    def receive():
        try:
            mine.receive()
        except ChannelClosedError:
            outcome.append("closed")

    thread = threading.Thread(target=receive)
    thread.start()
    other.close()
    thread.join(60)
    assert outcome == ["closed"]


@pytest.mark.parametrize(
    "packet",
    [
        b"garbage",
        b"{}",
        b"[1, 2]",
        b'{"v": 1, "type": "NoSuchMessage"}',
        b'{"v": 99, "type": "Checkpoint"}',
        b'{"v": 1, "type": "Abort"}',
        b"\xff\xfe\x00",
    ],
)
def test_a_packet_that_is_no_message_is_an_error_of_its_own(packet):
    """It is neither taken for a message nor for the end; the next one is received as usual."""
    mine, theirs = Channel.pair()
    with theirs:
        theirs.send(packet)
        with pytest.raises(WireError):
            mine.receive()
        theirs.send(b'{"v": 1, "type": "Checkpoint"}')
        assert mine.receive()[0] == Checkpoint()
    mine.close()


def test_descriptors_of_garbage_are_not_leaked():
    """Nobody will ever hear of them."""
    mine, theirs = Channel.pair()
    reader, writer = os.pipe()
    with theirs:
        socket.send_fds(theirs, [b"garbage"], [writer])
        os.close(writer)
        with pytest.raises(WireError):
            mine.receive()
        os.set_blocking(reader, False)
        assert os.read(reader, 1) == b"", "the write end is still open somewhere"
    os.close(reader)
    mine.close()


def test_a_message_too_long_for_a_packet_is_never_sent(ends):
    """The channel stays usable."""
    mine, other = ends
    with pytest.raises(WireError, match="too long"):
        mine.send(
            Fork(token=1, kind=ForkKind.IMPORTS, spec=ImportsSpec(wanted="y" * PACKET_BYTES_MAX))
        )
    mine.send(Checkpoint())
    assert other.receive()[0] == Checkpoint()


def test_the_longest_message_arrives(ends):
    """A packet just below the limit fits the socket's buffers."""
    mine, other = ends
    message = Fork(
        token=1, kind=ForkKind.IMPORTS, spec=ImportsSpec(wanted="y" * (PACKET_BYTES_MAX - 200))
    )
    mine.send(message)
    assert other.receive()[0] == message


def test_a_non_blocking_end_says_that_nothing_has_come(ends):
    """The supervisor's loop never waits for one rank."""
    mine, other = ends
    mine.set_blocking(blocking=False)
    with pytest.raises(BlockingIOError):
        mine.receive()
    other.send(Checkpoint())
    assert mine.receive()[0] == Checkpoint()


def test_several_threads_may_send(ends):
    """Messages are never mixed."""
    mine, other = ends
    senders = [
        threading.Thread(target=lambda n=n: [mine.send(Forked(token=n, pid=m)) for m in range(50)])
        for n in range(4)
    ]
    for sender in senders:
        sender.start()
    received = [other.receive()[0] for _ in range(200)]
    for sender in senders:
        sender.join()
    for number in range(4):
        assert [m.pid for m in received if m.token == number] == list(range(50))


def _peer_process(me):
    mine, theirs = Channel.pair()
    child = os.fork()
    if child == 0:
        mine.close()
        channel = Channel.from_descriptor(theirs.detach())
        channel.send(Forked(token=1, pid=os.getpid()))
        channel.receive()
        os._exit(3)
    theirs.close()
    forked, _ = mine.receive()
    os.kill(child, 9)
    with pytest.raises(ChannelClosedError):
        mine.receive()
    os.waitpid(child, 0)
    return forked.pid == child


def test_a_killed_process_closes_its_end():
    """SIGKILL leaves no time to say goodbye; the kernel does."""
    assert run_ranks(_peer_process, 1) == [True]
