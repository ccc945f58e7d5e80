"""Asks a coordinator what is there, as somebody who takes no part: a running run notices nothing."""

from __future__ import annotations

import select
import socket
import time

from ddp_runner.core.messages import WireError
from ddp_runner.core.node_messages import (
    FROM_COORDINATOR,
    Answer,
    Question,
    decode_from_node,
    encode_for_node,
)
from ddp_runner.system.node_link import LinkLostError, NodeLink, UnprovedError


class WrongTokenError(Exception):
    """It is one of ours, and has another token."""


def ask(connection: socket.socket, *, token: bytes, limit_s: float) -> Answer:
    """What the coordinator at the other end says. Blocks for at most that time, and hangs up.

    Raises WrongTokenError, or LinkLostError where it is no coordinator of this version.
    """
    link = NodeLink(connection, token=token, listens=False)
    give_up_s = time.monotonic() + limit_s
    try:
        link.send(encode_for_node(Question()))
        while (left_s := give_up_s - time.monotonic()) > 0:
            select.select([link], [link] if link.wants_to_write else [], [], left_s)
            link.flush()
            for content in link.receive():
                answer = decode_from_node(content, allowed=FROM_COORDINATOR)
                if isinstance(answer, Answer):
                    return answer
    except UnprovedError as error:
        raise WrongTokenError from error
    except WireError as error:
        raise LinkLostError(str(error)) from error
    finally:
        link.close()
    raise LinkLostError(f"it has not answered within {limit_s:g} s")
