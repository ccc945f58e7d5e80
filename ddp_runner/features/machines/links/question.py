"""Asks a coordinator what is there, as somebody who takes no part: a running run notices nothing."""

from __future__ import annotations

import select
import socket
import time

from ddp_runner.features.machines.rules.node_messages import FROM_COORDINATOR, Answer, Question
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.packets import WireError
from ddp_runner.features.machines.links.node_link import LinkLostError, NodeLink, UnprovedError


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
