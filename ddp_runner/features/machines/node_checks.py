"""The checks of ``doctor`` for a run on several machines: the endpoint, the token, the network and the folders.

Starts nothing, listens nowhere, and takes no part in a run that it asks.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.cli.hardware.machine_checks import Check, failure, ok, warning
from ddp_runner.features.machines.folder_probe import is_shared
from ddp_runner.features.machines.launching import (
    TOKEN_VARIABLE,
    given_token,
    local_address,
    versions_here,
)
from ddp_runner.features.machines.letters import WrongTokenError, ask
from ddp_runner.features.machines.node_link import LinkLostError
from ddp_runner.features.machines.rules.node_messages import Answer
from ddp_runner.features.machines.rules.node_options import endpoint_of
from ddp_runner.features.machines.token_file import shared_token
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.interfaces import address_towards, interface_of

_ENDPOINT, _TOKEN_FILE, _LOCAL_ADDR = "--rdzv-endpoint", "--token-file", "--local-addr"
_LIMIT_S = 5.0  # for a connection, and for the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of ``doctor`` for such a run; empty folders mean the coordinator's."""

    host: str
    port: int
    local_addr: str
    token_file: str
    checkpoint_dir: str
    log_dir: str

    @property
    def endpoint(self) -> str:
        """The endpoint for people."""
        return f"{self.host}:{self.port}"


def checks_asked(values: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[Check]:
    """Return the checks that options of ``doctor`` ask for. Raises BadInputError."""
    for name in (_TOKEN_FILE, _LOCAL_ADDR):
        if name in values and _ENDPOINT not in values:
            expected = f"is for {_ENDPOINT}, which is not given"
            raise BadInputError(name, values[name], expected)
    host, port = endpoint_of(values[_ENDPOINT])
    asked = Asked(
        host=host,
        port=port,
        local_addr=values.get(_LOCAL_ADDR, ""),
        token_file=values.get(_TOKEN_FILE, ""),
        checkpoint_dir=values.get("--checkpoint-dir", ""),
        log_dir=values.get("--log-dir", ""),
    )
    return node_checks(asked, environment)


def node_checks(asked: Asked, environment: Mapping[str, str]) -> Iterator[Check]:
    """Every check, one after the other as far as there is an answer. Raises BadInputError at once."""
    return _checks(asked, _token(asked, environment))


def _checks(asked: Asked, token: bytes) -> Iterator[Check]:
    yield check_interface(asked)
    connection, found = check_endpoint(asked)
    yield found
    if connection is None:
        yield _check_token_alone(token)
        return
    with connection:
        if not token:
            yield _check_token_alone(token)
            return
        try:
            answer = ask(connection, token=token, limit_s=_LIMIT_S)
        except WrongTokenError:
            yield failure("token", "is not the coordinator's", "give all machines the same token")
            return
        except LinkLostError as error:
            yield failure("coordinator", f"none of ours: {error}", "give the run another port")
            return
    yield ok("token", "is the coordinator's")
    yield from _checks_of(asked, answer)


def check_interface(asked: Asked) -> Check:
    """Check which address of this machine leads to the endpoint, and on which interface it is."""
    address, cure = asked.local_addr, "check name and network, or give --local-addr"
    if address:
        try:
            address = local_address(address, asked.host, asked.port, patience_s=0.0)
        except BadInputError as error:
            return failure("interface", f"{address} {error.expected}", cure)
    address = address or address_towards(asked.host)
    interface = interface_of(address)
    if not interface:
        return failure("interface", f"no address of this machine leads to {asked.host}", cure)
    found = f"{address} on {interface}"
    if address.startswith("127.") or address == "::1":
        cure = "take an endpoint and an address that other machines reach"
        found += ", which no other machine reaches"
        return warning("interface", found, cure)
    return ok("interface", found)


def check_endpoint(asked: Asked) -> tuple[socket.socket | None, Check]:
    """Check whether a process listens at the endpoint; return the connection too if so."""
    try:
        connection = socket.create_connection((asked.host, asked.port), timeout=_LIMIT_S)
    except socket.gaierror as error:
        found = f"{asked.host} is no name that this machine can resolve: {error.strerror}"
        return None, failure("endpoint", found, "give a name or an address that all machines know")
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:  # the way is open
            found = f"nobody listens at {asked.endpoint} yet"
            cure = "start the coordinator there, or ask again while it runs"
            return None, warning("endpoint", found, cure)
        found = f"{asked.endpoint} cannot be reached: {error.strerror or error}"
        return None, failure("endpoint", found, "open this port on the way there")
    return connection, ok("endpoint", f"{asked.endpoint} answers")


def _token(asked: Asked, environment: Mapping[str, str]) -> bytes:
    """Return the token as training would find it; empty if there is none. Raises BadInputError for an unusable one."""
    token = given_token(environment, asked.token_file)
    if not token and asked.checkpoint_dir:
        token = shared_token(Path(asked.checkpoint_dir)) or b""
    return token


def _check_token_alone(token: bytes) -> Check:
    if token:
        return ok("token", "is there; nobody to compare it with")
    cure = f"set {TOKEN_VARIABLE}, or give --token-file, or the run's shared --checkpoint-dir"
    return warning("token", "none was given", cure)


def _checks_of(asked: Asked, answer: Answer) -> Iterator[Check]:
    """Yield the checks that follow from the coordinator's answer."""
    found = f"run {answer.run_id}, {answer.there} of {answer.most} machines are there"
    yield ok("run", found)
    mine = versions_here()
    other = {
        name: f"{name} is {mine.get(name, 'none')} here and {there} there"
        for name, there in answer.versions.items()
        if mine.get(name, "none") != there
    }
    if other:
        yield failure("versions", "; ".join(other.values()), "install the same on all machines")
    for name, folder in (
        ("checkpoints", asked.checkpoint_dir or answer.checkpoint_dir),
        ("logs", asked.log_dir or answer.log_dir),
    ):
        yield check_shared(name, Path(folder), answer.term)


def check_shared(name: str, folder: Path, term: str) -> Check:
    """Check whether a folder here is the coordinator's."""
    if is_shared(folder, term):
        return ok(f"{name} there", f"{folder} is shared with the coordinator")
    option = f"--{name.removesuffix('s')}-dir"
    return warning(
        f"{name} there",
        f"{folder} is this machine's own, not the coordinator's",
        f"give all machines one folder with {option}, or let each have its own",
    )
