"""A control channel: whole messages, with file descriptors, over a local socket pair."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ddp_runner.kernel.wire.messages import PACKET_BYTES_MAX, Message, decode, encode
from ddp_runner.kernel.wire.packets import WireError

DESCRIPTORS_MAX = 8


class ChannelClosedError(ConnectionError):
    """The other side has closed its end, or has ended."""


class Channel:
    """One end of a pair. A packet is a message; nothing is ever half received.

    ``send`` may be called from several threads; ``receive`` belongs to one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel, and the raw socket of the other end, to be passed to another process."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(mine), theirs

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """Take over an inherited end."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def set_blocking(self, *, blocking: bool) -> None:
        """Choose whether ``send`` and ``receive`` may wait. A non-blocking one raises BlockingIOError."""
        self._socket.setblocking(blocking)

    def send(self, message: Message, *, descriptors: Sequence[int] = ()) -> None:
        """Send one message. Raises :class:`ChannelClosedError` when nobody can receive it."""
        self.send_packet(encode(message), descriptors=descriptors)

    def send_packet(self, packet: bytes, *, descriptors: Sequence[int] = ()) -> None:
        """Send an encoded message like :meth:`send`."""
        try:
            if descriptors:
                socket.send_fds(self._socket, [packet], list(descriptors))
            else:
                self._socket.send(packet)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> tuple[Message, list[int]]:
        """The next message and its descriptors, which are the caller's to close.

        Raises :class:`ChannelClosedError` at end-of-file, WireError for a packet that is no message.
        """
        packet, descriptors = self.receive_packet()
        try:
            return decode(packet), descriptors
        except WireError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def receive_packet(self) -> tuple[bytes, list[int]]:
        """Receive a message undecoded. Raises :class:`ChannelClosedError` at end-of-file."""
        try:
            packet, descriptors = self._next_packet()
        except ConnectionResetError:
            # INVARIANT last-words: what a process sent before it ended is received. Linux reports first,
            # once, that it ended with packets unread. Broken if: that is taken for the end of its packets.
            # Guarded by: test_what_was_sent_is_received_though_its_sender_left_packets_unread.
            packet, descriptors = self._next_packet()
        if not packet:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelClosedError("the other end is closed")
        return packet, descriptors

    def _next_packet(self) -> tuple[bytes, list[int]]:
        packet, descriptors, _, _ = socket.recv_fds(self._socket, PACKET_BYTES_MAX, DESCRIPTORS_MAX)
        return packet, list(descriptors)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
