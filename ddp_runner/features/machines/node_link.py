"""A connection between two nodes: whole frames, each proved to come from who knows the token.

A connection begins with 40 plain bytes each way: :data:`MAGIC` and a random nonce. The end that dials
sends them first, so that nobody learns what listens there who does not know it. Every frame after
that is its length (4 bytes, big-endian), an HMAC-SHA256 (RFC 2104) and the content. The key is made
of the token and both nonces, another one for each direction, and the HMAC is of a counter and the
content. So nobody who lacks the token makes a frame, and one that was seen before fits nowhere again.
The first frame each way is empty: it proves its sender, and either end sends content only after it has
seen the other's. Nothing is encrypted, and the token itself is never sent.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket

MAGIC = b"DDPRUN02"
NONCE_BYTES = 32
FRAME_BYTES_MAX = 256 * 1024
QUEUE_BYTES_MAX = 4 * 1024 * 1024  # what is not yet sent: a peer that reads so little is lost
_HELLO_BYTES = len(MAGIC) + NONCE_BYTES
_LENGTH_BYTES, _PROOF_BYTES = 4, 32
_READ_BYTES = 256 * 1024


class LinkLostError(ConnectionError):
    """The connection is of no more use; the text says why."""


class UnprovedError(LinkLostError):
    """The other end speaks as one of ours does, and does not know the token."""


class NodeLink:
    """One end. Owns the socket, which never blocks; belongs to one thread.

    ``listens``: whether this end accepted the connection, which gives each direction a key of its own.
    """

    def __init__(self, connection: socket.socket, *, token: bytes, listens: bool) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._token = token
        self._listens = listens
        self._nonce = os.urandom(NONCE_BYTES)
        self._greeting = MAGIC + self._nonce  # empty once it is under way
        self._out = bytearray()
        self._held: list[bytes] = []  # contents to be sent once the other end has proved itself
        self._in = bytearray()
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0

    @property
    def is_proved(self) -> bool:
        """True if the other end has shown that it knows the token."""
        return self._received > 0

    @property
    def wants_to_write(self) -> bool:
        """True if data waits to be written to the socket."""
        return bool(self._out or self._speaks_first)

    @property
    def _speaks_first(self) -> bool:
        return bool(self._greeting) and not self._listens

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, content: bytes) -> None:
        """Send a frame, or as much as goes now; :meth:`flush` sends the rest.

        Raises ValueError for one that is too long, LinkLostError where the peer takes nothing more.
        """
        if len(content) > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {len(content)} bytes is too long to send")
        # INVARIANT proved-before-sent: an end that has proved nothing is sent no content. Broken if: a
        # content is sent to whoever listens or dials, before its first frame was proved.
        # Guarded by: test_who_does_not_prove_itself_is_sent_nothing.
        if not self.is_proved:
            self._held.append(content)
            self.flush()
            return
        self._send_frame(content)

    def _send_frame(self, content: bytes) -> None:
        proof = _proof(self._send_key, self._sent, content)
        self._sent += 1
        self._out += len(content).to_bytes(_LENGTH_BYTES, "big") + proof + content
        if len(self._out) > QUEUE_BYTES_MAX:
            raise LinkLostError(f"it has not read {len(self._out) >> 20} MB that were sent to it")
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. Raises LinkLostError."""
        if self._speaks_first:
            self._greet()
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkLostError(error.strerror or str(error)) from error

    def _greet(self) -> None:
        self._out += self._greeting
        self._greeting = b""

    def receive(self) -> list[bytes]:
        """The frames that have come, in order. Raises LinkLostError where no more can come.

        What came whole before the end of the connection is given first, and the end at the next call.
        """
        closed = ""
        try:
            while True:
                part = self._socket.recv(_READ_BYTES)
                if not part:
                    closed = "it has closed the connection"
                    break
                self._in += part
                if len(self._in) > QUEUE_BYTES_MAX:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            closed = error.strerror or str(error)
        frames = self._frames()
        if closed and not frames:
            raise LinkLostError(closed)
        return frames

    def say_no_more(self) -> None:
        """Let the other end read all that was sent, and then the end of it."""
        with contextlib.suppress(OSError, LinkLostError):
            self.flush()
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up. What has come and was not read would be answered by a reset, which may overtake what was sent."""
        self._socket.close()

    def _frames(self) -> list[bytes]:
        if not self._send_key and not self._take_greeting():
            return []
        frames = []
        while len(self._in) >= _LENGTH_BYTES:
            size = int.from_bytes(self._in[:_LENGTH_BYTES], "big")
            if size > (FRAME_BYTES_MAX if self.is_proved else 0):
                raise LinkLostError("what it sent is no frame of this version")
            begin = _LENGTH_BYTES + _PROOF_BYTES
            if len(self._in) < begin + size:
                break
            content = bytes(self._in[begin : begin + size])
            proof = bytes(self._in[_LENGTH_BYTES:begin])
            # INVARIANT proved-frames: nothing of a frame is looked at before it is proved. Broken if:
            # a frame of another token, of another connection, or one that was seen before, is given out.
            # Guarded by: test_a_frame_that_is_not_proved_ends_the_connection.
            if not hmac.compare_digest(proof, _proof(self._receive_key, self._received, content)):
                raise UnprovedError("what it sent is not proved by this token")
            self._received += 1
            del self._in[: begin + size]
            if self._received > 1:
                frames.append(content)
                continue
            held, self._held = self._held, []
            for waiting in held:
                self._send_frame(waiting)
        return frames

    def _take_greeting(self) -> bool:
        if not MAGIC.startswith(bytes(self._in[: len(MAGIC)])):
            raise LinkLostError("what answers there is no node of this version")
        if len(self._in) < _HELLO_BYTES:
            return False
        other = bytes(self._in[len(MAGIC) : _HELLO_BYTES])
        del self._in[:_HELLO_BYTES]
        nonces = (other, self._nonce) if self._listens else (self._nonce, other)
        to_listener, from_listener = (
            hmac.digest(self._token, direction + b"".join(nonces), "sha256")
            for direction in (b"to the listener", b"from the listener")
        )
        mine_first = (from_listener, to_listener) if self._listens else (to_listener, from_listener)
        self._send_key, self._receive_key = mine_first
        if self._greeting:
            self._greet()
        self._send_frame(b"")
        return True


def _proof(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + content, "sha256")
