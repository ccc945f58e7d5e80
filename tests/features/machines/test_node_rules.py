"""What a run on several machines was asked for, and what it does about those that are missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.core.launch_plan import NodeOptions
from ddp_runner.features.machines.node_link import FRAME_BYTES_MAX
from ddp_runner.features.machines.rules.node_messages import (
    FROM_COORDINATOR,
    FROM_FOLLOWER,
    Beat,
    FromRank,
    Hello,
    Look,
    Parked,
    RankLook,
    Said,
    shortened_stack,
)
from ddp_runner.features.machines.rules.node_options import node_options
from ddp_runner.features.machines.rules.nodes import (
    NodesFacts,
    NodesPlan,
    ReturnFacts,
    keeps_memory,
    what_about_missing,
)
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.packets import WireError

TWO = {"--nnodes": "2", "--rdzv-endpoint": "node0"}
POD = {
    "PET_NNODES": "2:4",
    "PET_NODE_RANK": "1",
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_ID": "job",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_CONF": "is_host=1, join_timeout=5,last_call_timeout=0.5",
    "PET_LOCAL_ADDR": "10.0.0.7",
}


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (TWO, {}, {"least": 2, "most": 2, "host": "node0", "port": 29400}),
        (
            {**TWO, "--rdzv-endpoint": "[fe80::1]:7", "--node-rank": "0", "--rdzv-id": "a"},
            {},
            {"least": 2, "most": 2, "host": "fe80::1", "port": 7, "node_rank": 0, "run_id": "a"},
        ),
        (
            {**TWO, "--rdzv-endpoint": "fe80::1"},
            {},
            {"least": 2, "most": 2, "host": "fe80::1", "port": 29400},
        ),
        (
            {},
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
            {"least": 2, "most": 2, "host": "node0", "port": 29500, "node_rank": 1},
        ),
        (
            {},
            {"PET_NNODES": "2", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "1", "MASTER_ADDR": "x"},
            {"least": 2, "most": 2, "host": "m", "port": 1},
        ),
        (
            {},
            POD,
            {
                "least": 2,
                "most": 4,
                "host": "job-worker-0",
                "port": 23456,
                "node_rank": 1,
                "run_id": "job",
                "is_host": True,
                "join_timeout_s": 5.0,
                "last_call_s": 0.5,
                "local_addr": "10.0.0.7",
            },
        ),
        ({"--nnodes": "3"}, {**POD, "PET_NODE_RANK": "2"}, {"least": 3, "most": 3, "node_rank": 2}),
    ],
    ids=["options", "brackets", "no brackets", "variables", "operator", "elastic", "both"],
)
def test_what_is_asked_for(options, environment, expected):
    """An option counts before a variable, and torchrun's variables before the plain ones."""
    found = node_options(options, environment)
    assert isinstance(found, NodeOptions)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({}, {}),
        ({"--nnodes": "1"}, {}),
        ({"--nnodes": "1:1"}, {"MASTER_ADDR": "node0"}),
        ({"--nnodes": "1", "--node-rank": "0", "--rdzv-endpoint": "localhost:0"}, {}),
        ({"--node-rank": "0"}, {"PET_NNODES": "1", "MASTER_ADDR": "node0"}),
        ({}, {"PET_RDZV_ENDPOINT": "node0", "NODE_RANK": "1"}),
        ({}, {"PET_NNODES": "1", "PET_RDZV_BACKEND": "static"}),
        ({}, {"MASTER_ADDR": "node0", "RANK": "0"}),
    ],
)
def test_one_machine_is_asked_for(options, environment):
    """Then there is nobody to meet, whatever else is set."""
    assert node_options(options, environment) is None


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"--nnodes": "x"}, "--nnodes=x: must be a number of machines, such as 2, or a range"),
        ({"--nnodes": "0"}, "--nnodes=0: must be a number of machines"),
        ({"--nnodes": "3:2"}, "--nnodes=3:2: must not begin above its end"),
        ({"--nnodes": "2"}, "--rdzv-endpoint: is needed with several machines"),
        ({**TWO, "--rdzv-endpoint": ":29400"}, "--rdzv-endpoint=:29400: must be HOST or HOST:PORT"),
        ({**TWO, "--rdzv-endpoint": "node0:x"}, "--rdzv-endpoint=node0:x: must have a port"),
        (
            {**TWO, "--rdzv-endpoint": "node0:70000"},
            "--rdzv-endpoint=node0:70000: must have a port",
        ),
        ({"--rdzv-endpoint": "node0"}, "--rdzv-endpoint=node0: is for several machines: give --nn"),
        ({"--node-rank": "0"}, "--node-rank=0: is for several machines: give --nnodes as well"),
        ({"--nnodes": "1", "--node-rank": "1"}, "--node-rank=1: must be the number of this mach"),
        ({**TWO, "--node-rank": "2"}, "--node-rank=2: must be the number of this machine, 0 to 1"),
        ({**TWO, "--rdzv-backend": "etcd"}, "--rdzv-backend=etcd: must be c10d or static"),
        ({**TWO, "--rdzv-conf": "timeout=3"}, "--rdzv-conf=timeout=3: is not known here"),
        (
            {**TWO, "--rdzv-conf": "join_timeout=-1"},
            "--rdzv-conf=join_timeout=-1: must be a number",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options, line):
    """With the option, or the variable, by its name."""
    with pytest.raises(BadInputError) as raised:
        node_options(options, {})
    assert str(raised.value).startswith(line), raised.value


@pytest.mark.parametrize(
    ("there", "has_trained", "missing_s", "enough_s", "plan"),
    [
        (4, True, 99.0, 99.0, NodesPlan.WAIT),
        (2, False, 500.0, 5.0, NodesPlan.WAIT),
        (2, False, 500.0, 30.0, NodesPlan.GO_ON),
        (1, False, 599.0, 0.0, NodesPlan.WAIT),
        (1, False, 600.0, 0.0, NodesPlan.GIVE_UP),
        (3, True, 19.0, 900.0, NodesPlan.WAIT),
        (3, True, 20.0, 900.0, NodesPlan.GO_ON),
        (1, True, 100.0, 0.0, NodesPlan.WAIT),
        (1, True, 620.0, 0.0, NodesPlan.GIVE_UP),
    ],
)
def test_what_is_done_about_missing_nodes(there, has_trained, missing_s, enough_s, plan):
    """Of 2:4, with a patience of 20 s and a last call of 30 s."""
    facts = NodesFacts(
        there=there,
        least=2,
        most=4,
        has_trained=has_trained,
        missing_s=missing_s,
        enough_s=enough_s,
    )
    limits = {"patience_s": 20.0, "last_call_s": 30.0, "join_timeout_s": 600.0}
    assert what_about_missing(facts, **limits) is plan


def test_messages_between_nodes_come_back_as_they_were():
    """And only those that a side takes."""
    rank = RankLook(
        cells=[1, -(2**62)],
        pid=7,
        stopped_s=0.5,
        is_killed=False,
        resident_bytes=9,
        written_bytes=8,
    )
    look = Look(
        number=3, now_ns=5, can_fork=True, has_spare=True, round_trip_s=0.01, ranks={"2": rank}
    )
    assert wire.decode(wire.encode(look), FROM_FOLLOWER) == look
    beat = Beat(number=3, generation=2, committed_step=9, is_fault_free=True)
    assert wire.decode(wire.encode(beat), FROM_COORDINATOR) == beat
    for content in (b"", b"[]", b"{}", b'{"type": "Fork"}', b'{"type": "Beat"}', b"\xff"):
        with pytest.raises(WireError):
            wire.decode(content, FROM_COORDINATOR)
    with pytest.raises(WireError, match="not a message for this side"):
        wire.decode(wire.encode(beat), FROM_FOLLOWER)


@pytest.mark.parametrize("packet", [b"", b'{"v": 1}', b"\n\xff\n"])
def test_a_packet_of_a_rank_travels_in_a_frame_as_it_is(packet):
    """Whatever its bytes are: behind the frame's own fields."""
    said = FromRank(rank=3, process=2, packet=packet)
    frame = wire.encode(said)
    assert frame.endswith(b"\n" + packet)
    assert wire.name_of(frame) == "FromRank"
    assert wire.decode(frame, FROM_FOLLOWER) == said
    with pytest.raises(WireError, match="behind it"):
        wire.decode(wire.encode(Said(text="a", level="INFO")) + b"\n.", FROM_FOLLOWER)


CUT_OFF = ReturnFacts(
    term="a",
    is_same_node=True,
    is_same_run=True,
    are_members=True,
    ours="a",
    generation=3,
    formed_in=3,
    may_resume=False,
    before=None,
    number=1,
)
AGAIN = replace(CUT_OFF, ours="b", formed_in=0, may_resume=True)


@pytest.mark.parametrize(
    ("facts", "is_kept"),
    [
        (CUT_OFF, True),
        (replace(CUT_OFF, is_same_node=False), False),
        (replace(CUT_OFF, are_members=False), False),
        # Others have formed since, in its place; or have only tried to.
        (replace(CUT_OFF, formed_in=4), False),
        (replace(CUT_OFF, formed_in=2), True),
        # Of a coordinator that was before this one.
        (AGAIN, True),
        (replace(AGAIN, is_same_run=False), False),
        (replace(AGAIN, is_same_run=False, before=("a", ())), True),
        (replace(AGAIN, before=("a", ())), True),
        (replace(AGAIN, before=("a", (2,))), True),
        (replace(AGAIN, before=("a", (1, 2))), False),
        (replace(AGAIN, before=("c", ())), False),
        (replace(AGAIN, may_resume=False), False),
        (replace(AGAIN, are_members=False), False),
    ],
)
def test_a_memory_is_kept_only_where_nobody_went_on_without_it(facts, is_kept):
    """By the coordinator that lost it, or by the one after that."""
    assert keeps_memory(facts) is is_kept


@pytest.mark.parametrize("ranks", [1, 2, 64])
@pytest.mark.parametrize("letter", ["a", "\n", "\u00e9", "\U0001f600"], ids=ascii)
def test_the_stacks_of_many_ranks_fit_into_a_frame(ranks, letter):
    """Each keeps its begin, and all of it where there is room."""
    stack = shortened_stack(letter * 8_000, ranks=ranks)
    look = RankLook(
        cells=[2**62] * 40,
        pid=2**22,
        stopped_s=1e9 / 3,
        is_killed=False,
        resident_bytes=2**40,
        written_bytes=2**40,
        stack=stack,
    )
    ranks_looks = {str(1000 + rank): look for rank in range(ranks)}
    whole = Look(
        number=1, now_ns=2**62, can_fork=True, has_spare=True, round_trip_s=0.01, ranks=ranks_looks
    )
    assert len(wire.encode(whole)) < FRAME_BYTES_MAX
    assert set(stack) == {letter}
    assert len(stack) == 8_000 or ranks == 64 or (ranks, letter) == (2, "\U0001f600")


def test_what_is_parked_travels_in_a_hello():
    """As it was said."""
    hello = Hello(
        host="b",
        supervisor="c",
        node_rank=1,
        ranks=2,
        run_id="none",
        meaning={},
        versions={},
        parked=Parked(node=1, term="a", generation=3, run_id="r"),
    )
    assert wire.decode(wire.encode(hello), FROM_FOLLOWER) == hello
