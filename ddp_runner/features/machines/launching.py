"""Decides which machine of a run this one is; resolves names and tries addresses before any process starts."""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import platform
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil

from ddp_runner import installed
from ddp_runner.config import to_record
from ddp_runner.config.fields import known_fields
from ddp_runner.config.identity import is_sealed, shared_settings
from ddp_runner.core.plain_rank import plain_rank
from ddp_runner.core.settings.declaration import OnResume
from ddp_runner.features.machines.ballot_file import BallotFile, unreadable
from ddp_runner.features.machines.letters import ENDPOINT_VARIABLE, WrongTokenError, ask
from ddp_runner.features.machines.parent.admission import Meeting
from ddp_runner.features.machines.parent.coordinating import coordinate, take_over
from ddp_runner.features.machines.parent.follower_loop import follow
from ddp_runner.features.machines.parent.other_nodes import Place
from ddp_runner.features.machines.rules.majority import is_over, others_of, why_no_vote_holds
from ddp_runner.features.machines.rules.node_options import ENGINE
from ddp_runner.features.machines.token_file import (
    TOKEN_NAME,
    given_token_in,
    make_token,
    shared_token,
)
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.rules.secrets import HIDDEN, masked_words
from ddp_runner.kernel.system.folder_owner import FolderOwner
from ddp_runner.kernel.system.interfaces import address_towards, interface_of, is_loopback
from ddp_runner.kernel.system.reach import LOOPBACK, why_unreachable
from ddp_runner.system.code_files import (
    digest_of,
    own_code,
    program_code,
    task_code,
    version_of,
)
from ddp_runner.system.run_directories import RunDirectories
from ddp_runner.system.torch_versions import torch_build
from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from ddp_runner.cli.parser import TrainArguments
    from ddp_runner.cli.several import OnEach
    from ddp_runner.core.launch_plan import LaunchPlan, NodeOptions
    from ddp_runner.features.script.rules import ScriptPlan

TOKEN_VARIABLE = "DDP_RUNNER_TOKEN"  # noqa: S105 - a name
TOKEN_BYTES_MIN = 16
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - where the endpoint's name is none of this machine's
_ALL_ADDRESSES_6 = "::"
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # in networks that nobody has (RFC 5737, RFC 3849)
# For a file to be seen on another machine once the coordinator, who has made it before, answers.
_SEEN_S = 60.0
_LOOK_AGAIN_S = 0.5
_DIAL_S = 1.0
_ANSWER_S = 3.0
# How long to wait for an answer from a machine that holds the folder to take the coordinator's place: once its socket takes
# connections, and before that. The machine may be lost, as a file server keeps its lock for a while.
_TAKING_OVER_S, _CLAIMING_S = 10.0, 3.0
# For the name of a machine that has just been started, such as a pod, to be known to itself.
_NAMED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The socket on which the coordinator listens on this machine, and the address that its store is bound to."""

    listening: socket.socket
    address: str


def by_engine(on_each: OnEach, arguments: TrainArguments) -> int:
    """Let the engine that the arguments name run ``on_each``; return the exit code. Raises BadInputError.

    Each machine checks the settings once more.
    """
    if arguments.instead:
        raise BadInputError(arguments.instead, "", f"is for one machine: leave out {ENGINE}")
    if plain_rank(os.environ) is not None:
        raise BadInputError(ENGINE, "", "starts the ranks itself: start it without a launcher")
    engines = {
        name: module
        for part in installed.parts("words")
        for name, module in getattr(part, "ENGINES", {}).items()
    }
    engine = dict(arguments.nodes)[ENGINE]
    if engine not in engines:
        known = f"must be {' or '.join(engines)}" if engines else "is not installed"
        expected = (
            f"{known}; under SLURM, Kubernetes and ssh each machine starts the command itself"
        )
        raise BadInputError(ENGINE, engine, expected)
    return int(import_module(engines[engine]).place(on_each, arguments))


def run_on_several(plan: LaunchPlan, *, token_file: str, script: ScriptPlan | None = None) -> int:
    """Run as the coordinator, or as its follower, and return the exit code. Raises BadInputError.

    ``script``: what ``run`` runs as it is; None for a training.
    """
    options = plan.nodes
    assert options is not None
    lead = partial(take_over, script=script)
    given = given_token(os.environ, token_file)
    os.environ.pop(TOKEN_VARIABLE, None)  # no rank is to have it
    if moving := os.environ.pop(ENDPOINT_VARIABLE, ""):
        options = replace(options, moving_fd=int(moving))
        plan = replace(plan, nodes=options)
    options = _with_local_address(options)
    plan = replace(plan, nodes=options)
    door, folder = coordinators_door(options), Path(plan.settings.run.checkpoint_dir)
    silent_s = plan.settings.recovery.node_silent_s
    if door is None:
        if plan.ranks_per_node > 1 and (why := why_unreachable(LOOPBACK)):
            raise BadInputError(LOOPBACK, "", why)  # a coordinator finds that at its store
        token = given or await_token(folder, options, say=lambda text: print(text, flush=True))
        return follow(plan, meeting(plan, token=token, silent_s=silent_s), lead=lead)
    known = given or shared_token(folder) or b""
    if known and options.moving_fd is None and leads_elsewhere(plan, known):
        door.listening.close()
        return follow(plan, meeting(plan, token=known, silent_s=silent_s), lead=lead)

    def follow_at(where: tuple[str, int], token: bytes) -> int:
        nodes = replace(options, host=where[0], port=where[1], is_host=False)
        other = replace(plan, nodes=nodes)
        return follow(other, meeting(other, token=token, silent_s=silent_s), lead=lead)

    elected = elected_elsewhere(plan, known) if known else None
    if elected is not None:
        door.listening.close()
        return follow_at(elected, known)
    try:
        found = meeting(plan, token=given or make_token(folder), silent_s=silent_s)
        code = plan.code if found.allows_different_code else digest_of(found.code)
    except BadInputError:
        door.listening.close()
        raise
    votes = BallotFile(folder)
    place = Place(
        meeting=found,
        number=options.node_rank or 0,
        listening=door.listening,
        address=door.address,
        store_host=door.address,
        votes=votes,
    )
    ended_with = coordinate(replace(plan, code=code), place, script=script)
    if votes.yields_to is not None and ended_with == ExitCode.PREEMPTED:
        return follow_at(votes.yields_to, found.token)
    return ended_with


def meeting(plan: LaunchPlan, *, token: bytes, silent_s: float) -> Meeting:
    """Return the terms that this machine must share with the others."""
    assert plan.nodes is not None
    shared = shared_settings(plan.settings)
    return Meeting(
        options=plan.nodes,
        ranks=plan.ranks_per_node,
        meaning=_meaning(plan, token),
        versions=versions_here(),
        token=token,
        silent_s=silent_s,
        code=code_here(plan),
        allows_different_code=plan.settings.run.allow_different_code,
        shared=shared,
        asked={
            key: value
            for key, value in shared.items()
            if plan.origins.get(key, "default") not in ("default", "preset")
        },
    )


def code_here(plan: LaunchPlan) -> dict[str, str]:
    """Return the code of this machine: digests of files by name, and versions of other packages that compute."""
    program = plan.opaque or plan.loop
    if program is None:
        task = task_code(plan.settings.run.task, folder=Path.cwd())
    else:
        task = program_code(program.code, folder=Path.cwd())
    packages = {"numpy": version_of("numpy"), **task.packages}
    packages.pop("torch", None)  # which versions_here() has
    return {**task.files, **own_code(), **packages}


def versions_here() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    build = torch_build()
    return {
        "Python": platform.python_version(),
        "torch": "none" if build is None else build.version,
        "ddp_runner": VERSION,
    }


def _meaning(plan: LaunchPlan, token: bytes) -> dict[str, object]:
    """Return the settings that determine the steps; folders, displays and the like may differ.

    Each machine salts its hash of a secret differently, so an HMAC with the run's token stands for it.
    """
    sections = cast("Mapping[str, Mapping[str, object]]", to_record(plan.settings))
    found: dict[str, object] = dict(plan.resume_key)
    for key in filter(lambda key: is_sealed(found[key]), plan.resume_key):
        value = plan.settings.task[key.removeprefix("task.")]
        content = json.dumps([key, value], sort_keys=True).encode()
        found[key] = f"{HIDDEN} {hmac.new(token, content, 'sha256').hexdigest()}"
    for key, spec in known_fields().items():
        if spec.on_resume is not OnResume.CANNOT_MATTER:
            found.setdefault(key, sections[spec.section][spec.name])
    assert plan.nodes is not None
    least, most = plan.nodes.least, plan.nodes.most
    found["--nnodes"] = str(most) if least == most else f"{least}:{most}"
    found["devices"] = plan.devices[0].device.partition(":")[0]
    found["devices of a rank"] = 1 + len(plan.devices[0].others)
    if (program := plan.opaque or plan.loop) is not None:
        found["run"] = shlex.join([program.name, *masked_words(program.arguments)])
        found["calls attach()"] = "no" if plan.loop is None else "yes"
    if plan.devices[0].visible_index is None:  # sums on a GPU are of no threads here
        found["run.threads_per_rank"] = plan.threads_per_rank
    return found


def given_token(environment: Mapping[str, str], token_file: str) -> bytes:
    """Return the token that all machines of the run were given; empty if there is none. Raises BadInputError."""
    name, value = TOKEN_VARIABLE, ""
    token = environment.get(TOKEN_VARIABLE, "").strip().encode()
    if token_file:
        name, value = "--token-file", token_file
        token = given_token_in(Path(token_file))
    if (token or token_file) and len(token) < TOKEN_BYTES_MIN:
        raise BadInputError(name, value, f"must have at least {TOKEN_BYTES_MIN} characters")
    return token


def await_token(folder: Path, options: NodeOptions, *, say: Callable[[str], None]) -> bytes:
    """The token that the coordinator makes in a checkpoint folder that both have.

    Waits for it as long as for the coordinator, and no longer than a file takes to be seen once that
    one answers. Raises BadInputError.
    """
    now_s = time.monotonic()
    give_up_s, has_answered, has_said = now_s + options.join_timeout_s, False, False
    while (token := shared_token(folder)) is None:
        now_s = time.monotonic()
        if now_s >= give_up_s:
            raise BadInputError(
                TOKEN_VARIABLE,
                "",
                "is needed with several machines: the same secret on all of them, such as the output"
                " of `openssl rand -hex 16`, in this variable, in a file (--token-file), or in a"
                f" checkpoint folder that all share: the coordinator has made none in {folder}",
            )
        if not has_said:
            has_said = True
            say(f"waiting for {folder / TOKEN_NAME}, which the coordinator creates")
        if not has_answered and answers(options):
            has_answered, give_up_s = True, min(give_up_s, time.monotonic() + _SEEN_S)
        time.sleep(min(_LOOK_AGAIN_S, max(0.0, give_up_s - now_s)))
    return token


def answers(options: NodeOptions) -> bool:
    """Return whether a process listens at the endpoint."""
    try:
        socket.create_connection((options.host, options.port), timeout=_DIAL_S).close()
    except OSError:
        return False
    return True


def leads_elsewhere(plan: LaunchPlan, token: bytes) -> bool:
    """Return whether a machine that has taken this one's place leads the run by now, as the checkpoint folder says.

    While another machine holds that folder, it may just be taking the place: it is waited for.
    """
    assert plan.nodes is not None
    directories, options = RunDirectories(plan.settings.run), plan.nodes
    began_s, limit_s = time.monotonic(), _CLAIMING_S
    while True:
        is_held = directories.are_checkpoints_held()
        owner = FolderOwner(Path(plan.settings.run.checkpoint_dir), "").read()
        if owner is None or owner.at is None:
            return False
        if owner.at != (options.host, options.port):
            with contextlib.suppress(OSError, WrongTokenError):
                connection = socket.create_connection(owner.at, timeout=_DIAL_S)
                limit_s = _TAKING_OVER_S
                answer = ask(connection, token=token, limit_s=_ANSWER_S)
                if answer.term == owner.term and answer.run_id == options.run_id:
                    where = "{}:{}".format(*owner.at)
                    print(f"{where} has taken this machine's place: following it", flush=True)
                    return True
        if not is_held or time.monotonic() >= began_s + limit_s:
            return False
        time.sleep(_LOOK_AGAIN_S)


def elected_elsewhere(plan: LaunchPlan, token: bytes) -> tuple[str, int] | None:
    """Return where the machine listens that a majority has elected in this one's place; None if none answers.

    It is looked for among the machines of the newest generation that this one was in. Raises BadInputError.
    """
    options = plan.nodes
    assert options is not None
    may_vote = plan.settings.recovery.elect_coordinator and options.moving_fd is None
    if not may_vote or why_no_vote_holds(least=options.least, most=options.most):
        return None
    file = BallotFile(Path(plan.settings.run.checkpoint_dir))
    try:
        record = file.read()
    except OSError as error:
        raise unreadable(file, error) from error
    for peer in [] if is_over([record]) else others_of(record):
        where = (peer.host, peer.port)
        if where == (options.host, options.port):
            continue
        with contextlib.suppress(OSError, WrongTokenError):
            connection = socket.create_connection(where, timeout=_DIAL_S)
            answer = ask(connection, token=token, limit_s=_ANSWER_S)
            if answer.run_id == options.run_id:
                print(f"{peer.host}:{peer.port} was elected: following it", flush=True)
                return where
    return None


def coordinators_door(options: NodeOptions) -> Door | None:
    """The door of the coordinator, if that is this machine; None if it is another one.

    Raises BadInputError where the endpoint names no machine, or it is this one and cannot be listened at.
    """
    if options.is_host is False or (options.is_host is None and options.node_rank not in (None, 0)):
        return None
    if options.is_host and options.node_rank:
        raise BadInputError(
            "--node-rank",
            options.node_rank,
            "must be 0 where is_host=1: the coordinator has rank 0",
        )
    is_certain = bool(options.is_host) or options.node_rank == 0
    patience_s = min(_NAMED_S, options.join_timeout_s) * is_certain
    addresses = _resolved("--rdzv-endpoint", options.host, options.port, patience_s=patience_s)
    for address in addresses:
        if is_loopback(address) and not _means_loopback(options.host):
            return _door_for_others(options, address)
        try:
            listening = _listen(address, options.port)
        except OSError as error:
            if error.errno in _NOT_HERE:
                continue
            _refuse_unless_taken(options, error)
            return None
        return Door(listening=listening, address=address)
    return _door_of_a_service(options, addresses) if is_certain else None


def _door_of_a_service(options: NodeOptions, addresses: Sequence[str]) -> Door | None:
    """Return the door if the address of the endpoint's name belongs to no machine; None if the port is taken."""
    address = options.local_addr or address_towards(options.host)
    if not address:
        raise BadInputError(
            "--rdzv-endpoint", options.host, "is no address of this machine: give --local-addr"
        )
    where = _ALL_ADDRESSES_6 if all(":" in one for one in addresses) else _ALL_ADDRESSES
    try:
        return Door(listening=_listen(where, options.port), address=address)
    except OSError as error:
        _refuse_unless_taken(options, error)
        return None


def address_leading_out() -> str:
    """An address of this machine for others: that of the default way, else any; empty where all is loopback."""
    for anywhere in _ELSEWHERE:
        address = address_towards(anywhere)
        if address and not is_loopback(address):
            return address
    families = (socket.AF_INET, socket.AF_INET6)
    there = [one for addresses in psutil.net_if_addrs().values() for one in addresses]
    return next(
        (
            one.address
            for family in families
            for one in there
            if one.family == family and not ipaddress.ip_address(one.address).is_link_local
            if not is_loopback(one.address)
        ),
        "",
    )


def _door_for_others(options: NodeOptions, loopback: str) -> Door | None:
    """Return the door if this machine's name is a loopback address to itself, as in Debian's /etc/hosts."""
    address = options.local_addr or address_leading_out() or loopback
    where = address
    if not options.local_addr and address != loopback:
        where = _ALL_ADDRESSES_6 if ":" in loopback else _ALL_ADDRESSES
    try:
        listening = _listen(where, options.port)
    except OSError as error:
        _refuse_unless_taken(options, error)
        return None
    if where != address:
        print(
            f"{options.host} is {loopback} here, which others do not reach: listening on all"
            f" addresses, and {address} is for the others (--local-addr gives another)",
            flush=True,
        )
    return Door(listening=listening, address=address)


def _refuse_unless_taken(options: NodeOptions, error: OSError) -> None:
    """The coordinator may be another process here, and what is none says so when greeted.

    Raises BadInputError where this one is to be it.
    """
    certain_by = "is_host=1" if options.is_host else "--node-rank 0" * (options.node_rank == 0)
    is_taken = error.errno == errno.EADDRINUSE
    if is_taken and not certain_by:
        return
    why = error.strerror
    if is_taken:
        why = (
            "another process of this machine has the port, perhaps the coordinator of a run; end it,"
            f" give another port, or leave out {certain_by} to join its run"
        )
    expected = f"cannot be listened on: {why}"
    raise BadInputError("--rdzv-endpoint", f"{options.host}:{options.port}", expected) from error


def _means_loopback(host: str) -> bool:
    """Return whether a host name means this machine alone."""
    try:
        return is_loopback(host)
    except ValueError:
        name = host.rstrip(".").lower()
        return name.startswith(("localhost.", "ip6-lo")) or name.endswith("localhost")


def _with_local_address(options: NodeOptions) -> NodeOptions:
    """Return the options with a numeric address of this machine in place of its name. Raises BadInputError."""
    name = options.local_addr
    if not name:
        return options
    # Only its own name may be unknown to a machine for a while, as that of a new pod.
    is_own = _first_label(name) == _first_label(socket.gethostname())
    patience_s = min(_NAMED_S, options.join_timeout_s) * is_own
    address = local_address(name, options.host, options.port, patience_s=patience_s)
    return replace(options, local_addr=address, local_name="" if name == address else name)


def _first_label(name: str) -> str:
    return name.partition(".")[0].lower()


def local_address(name: str, host: str, port: int, *, patience_s: float) -> str:
    """Return this machine's address by its ``name``, for a run whose endpoint is ``host``. Raises BadInputError."""
    found = _resolved("--local-addr", name, port, patience_s=patience_s)
    address = next((one for one in found if interface_of(one)), "")
    if not address:
        raise BadInputError("--local-addr", name, "is no address of this machine")
    if is_loopback(address) and not _means_loopback(host):
        at = "" if name == address else f"{address} here, "
        expected = f"is {at}a loopback address: give one that the other machines reach"
        raise BadInputError("--local-addr", name, expected)
    return address


def _resolved(option: str, host: str, port: int, *, patience_s: float) -> list[str]:
    """The addresses of a name that ``option`` has, which may not be known yet, loopback last. Raises BadInputError."""
    give_up_s, has_said = time.monotonic() + patience_s, False
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return sorted(dict.fromkeys(str(one[4][0]) for one in found), key=is_loopback)
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= give_up_s or isinstance(error, UnicodeError):
                expected = f"is no name that this machine can resolve: {error}"
                raise BadInputError(option, host, expected) from error
        if not has_said:
            has_said = True
            waiting = f"{option}={host}: waiting up to {patience_s:.0f} s for this name to resolve"
            print(waiting, flush=True)
        time.sleep(_LOOK_AGAIN_S)


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == _ALL_ADDRESSES_6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((address, port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    os.set_inheritable(listening.fileno(), False)
    return listening
