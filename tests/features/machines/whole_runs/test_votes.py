"""What a machine does about votes by itself, over real connections: no run is started."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddp_runner.core.launch_plan import NodeOptions
from ddp_runner.features.machines import ballot_file
from ddp_runner.features.machines import letters as letters_module
from ddp_runner.features.machines.ballot_file import BallotFile
from ddp_runner.features.machines.letters import Letters
from ddp_runner.features.machines.node_link import LinkLostError, NodeLink
from ddp_runner.features.machines.parent import follower_loop
from ddp_runner.features.machines.parent.majority_keeper import DOUBTS_S, MajorityKeeper
from ddp_runner.features.machines.parent.successor import listen
from ddp_runner.features.machines.parent.voting import NotFormedError, Voting
from ddp_runner.features.machines.rules.majority import (
    Peer,
    Record,
    ended,
    is_over,
    why_no_vote_holds,
)
from ddp_runner.features.machines.rules.node_messages import Elected, EndRank, Generation
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from ddp_runner.kernel.wire import packets as wire

TOKEN = b"0123456789abcdef"
OPTIONS = NodeOptions(least=2, most=3, host="127.0.0.1", port=1)
TERM = "a"
PEERS = (Peer(machine="zero", number=0, host="127.0.0.1", port=1),)


def plan_of(folder, *, resume="auto"):
    run = SimpleNamespace(checkpoint_dir=str(folder), resume=resume)
    return SimpleNamespace(nodes=OPTIONS, settings=SimpleNamespace(run=run))


class Three:
    """Two followers and the coordinator that they have lost, each with a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.followers = [self.voting(number) for number in (1, 2)]
        for one in self.followers:
            one.open(listen("127.0.0.1"))
        self.peers = (
            Peer(machine="zero", number=0, host="127.0.0.1", port=1),
            *(
                Peer(machine=one.file.read().machine, number=number, host=host, port=port)
                for number, one in enumerate(self.followers, 1)
                for host, port in (one.at,)
            ),
        )

    def voting(self, number):
        return Voting(plan_of(self.folder / str(number)), token=TOKEN, clock=SYSTEM_CLOCK)

    def form(self, *who, ballot=1, generation=1):
        order = Generation(ballot=ballot, generation=generation, members=self.peers, before=())
        for number in who:
            self.followers[number].asked_to_form(order, TERM)

    def stand(self, number, *, seconds=4.0, obeys=False):
        """The ballot in which a machine is elected within that time; None: in none."""
        give_up_s = time.monotonic() + seconds
        one, other = self.followers[number], self.followers[1 - number]
        while time.monotonic() < give_up_s:
            one.turn(obeys=False)
            other.turn(obeys=obeys)
            if (ballot := one.stand()) is not None:
                return ballot
            time.sleep(0.01)
        return None


@pytest.fixture
def three(tmp_path):
    made = Three(tmp_path)
    yield made
    for one in made.followers:
        one.close()


def test_a_machine_is_elected_by_the_vote_of_another(three):
    """Two of three; both have written the ballot down before anything was said."""
    three.form(0, 1)
    ballot = three.stand(0)
    assert ballot is not None
    assert ballot[0] == 2
    assert [one.file.read().has_promised for one in three.followers] == [ballot, ballot]


def test_who_hears_its_coordinator_votes_for_nobody(three):
    """Nor does who lacks the newest generation's memory win."""
    three.form(0, 1)
    assert three.stand(0, seconds=1.5, obeys=True) is None
    three.form(1, generation=2)
    assert three.stand(0, seconds=1.5) is None


def test_who_was_asked_to_form_but_has_not_may_stand(three):
    """The newest generation, of a coordinator elected since, has made no step without it."""
    three.form(0, 1)
    order = Generation(ballot=2, generation=2, members=three.peers, before=())
    for one in three.followers:
        one.asked_to_form(order, "elected")
    assert three.stand(0)[0] == 3


def test_what_was_promised_outlasts_the_supervisor(three):
    """It neither votes again in that ballot nor trains for an older coordinator."""
    three.form(0, 1)
    ballot = three.stand(0)
    again = three.voting(2)
    assert again.file.read().has_promised == ballot
    assert not again.may_obey((1, TERM))
    with pytest.raises(LinkLostError, match="voted for another"):
        again.asked_to_form(
            Generation(ballot=1, generation=9, members=three.peers, before=()), TERM
        )
    again.close()


def test_a_record_that_cannot_be_read_is_not_replaced(three):
    """The machine takes no part, and is no new one; what a supervisor has read once, it knows."""
    three.form(0, 1)
    path = three.followers[0].file.path
    kept = path.read_bytes()
    path.unlink()
    path.mkdir()
    again = three.voting(1)
    assert again.record is None
    order = Generation(ballot=9, generation=9, members=three.peers, before=())
    with pytest.raises(LinkLostError, match="cannot be kept"):
        again.asked_to_form(order, TERM)
    with pytest.raises(BadInputError, match="votes of this machine cannot be read"):
        keeper_in(path.parent)
    assert three.followers[0].record.generation == 1
    path.rmdir()
    path.write_bytes(kept[:-3])
    assert three.voting(1).record is None
    path.write_bytes(kept)
    assert again.record.machine == three.peers[1].machine
    again.close()


def test_a_machine_that_cannot_keep_votes_takes_no_part(three, monkeypatch):
    """It says so by its next greeting, trains without a vote, and votes again once its disk has room."""
    three.form(0, 1)
    one, full = three.followers[0], OSError(errno.ENOSPC, "No space left on device")

    def refused(path, content):
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(ballot_file, "replace_file_synced", refused)
        with pytest.raises(NotFormedError, match="takes no part"):
            three.form(0, generation=2)
        assert one.record is None
        one.asked_to_form(Generation(ballot=1, generation=3, members=(), before=()), TERM)
        assert not one.holds
    assert one.record.generation == 1
    three.form(0, generation=4)
    assert one.holds


def test_a_folder_that_nobody_may_write_in_is_known_at_once(three, monkeypatch):
    """No generation is refused for it."""
    monkeypatch.setattr(ballot_file.os, "access", lambda path, mode: False)
    assert three.voting(1).record is None


def test_a_follower_hears_who_was_elected(three):
    """Also of an older ballot than its own promise: the coordinator takes a newer number for it."""
    one = three.followers[0]
    three.form(0, ballot=3)
    letters = Letters(TOKEN, {})
    letters.send([three.peers[1]], Elected(ballot=2, term="b", host="10.0.0.1", port=29400))
    give_up_s = time.monotonic() + 5.0
    while time.monotonic() < give_up_s and one.leader_at is None:
        list(letters.turn())
        one.turn(obeys=False)
        time.sleep(0.01)
    assert one.leader_at == ("10.0.0.1", 29400)
    letters.close()


@pytest.fixture
def letters():
    made = Letters(TOKEN, {})
    yield made
    made.close()


def heard(letters, one, *, seconds=5.0):
    """Where the coordinator is that it hears of within that time."""
    give_up_s = time.monotonic() + seconds
    while time.monotonic() < give_up_s and one.leader_at is None:
        list(letters.turn())
        one.turn(obeys=False)
        time.sleep(0.01)
    return one.leader_at


ELECTED = Elected(ballot=2, term="b", host="node9", port=29400)


def test_a_name_is_looked_up_at_each_dial(three, letters, monkeypatch):
    """It may have no address for a while, and a server of names that is silent holds nobody up."""
    is_known, real = threading.Event(), socket.getaddrinfo

    def look_up(host, port, **how):
        if host != "node1":
            return real(host, port, **how)
        if how["flags"] == 0:
            is_known.wait()
            return real("127.0.0.1", port, type=socket.SOCK_STREAM)
        raise socket.gaierror

    monkeypatch.setattr(letters_module.socket, "getaddrinfo", look_up)
    first, second = three.followers
    named = replace(three.peers[1], host="node1")
    for _ in range(3):
        letters.send([named, three.peers[2]], ELECTED)
    assert heard(letters, second) == ("node9", 29400)
    assert first.leader_at is None
    assert len(letters._asked) == 1
    is_known.set()
    assert heard(letters, first) == ("node9", 29400)
    first.leader_at = None
    letters.send([replace(named, host="nowhere.invalid")], ELECTED)
    assert heard(letters, first, seconds=0.3) is None


def test_an_address_of_version_six_is_dialled(three, letters):
    """Where the machine has any."""
    one = three.voting(1)
    try:
        one.open(listen("::1"))
    except OSError:
        pytest.skip("this machine has no address of version six")
    host, port = one.at
    letters.send([Peer(machine="one", number=1, host=host, port=port)], ELECTED)
    assert heard(letters, one) == ("node9", 29400)
    one.close()


def test_a_stranger_with_another_token_votes_for_nobody(three):
    """What it says is not read."""
    three.form(0, 1)
    letters = Letters(b"another token, 16", {})
    letters.send([three.peers[1]], Elected(ballot=9, term="b", host="10.0.0.1", port=1))
    for _ in range(50):
        list(letters.turn())
        three.followers[0].turn(obeys=False)
        time.sleep(0.01)
    assert three.followers[0].leader_at is None
    letters.close()


class There:
    """A machine that has come, with its record."""

    def __init__(self, number, record, *, shares=False):
        self.number, self.shares_checkpoints, self.orders = number, shares, []
        self.is_to_note_end = self.has_noted_end = False
        self.hello = SimpleNamespace(record=record, at_host="127.0.0.1", at_port=number)

    def order(self, message):
        self.orders.append(message)


def keeper_in(folder, *, resume="auto", term=TERM, votes=None):
    plan = plan_of(folder, resume=resume)
    where = {"at": ("127.0.0.1", 1), "number": 0, "votes": votes}
    return MajorityKeeper(plan, term=term, token=TOKEN, clock=SYSTEM_CLOCK, **where)


def test_a_coordinator_forms_only_with_a_majority_of_the_generation_before(tmp_path):
    """A machine with another name, such as one whose folder was removed, does not count."""
    keeper = keeper_in(tmp_path)
    there = [There(number, Record(machine=f"m{number}")) for number in (1, 2)]
    assert keeper.decides(there)
    assert keeper.missing(there) == []
    keeper.forms(1, there)
    keeper.trains()
    assert [type(one.orders[0]) for one in there] == [Generation, Generation]
    assert keeper.missing(there[:1]) == []
    assert keeper.missing([There(1, Record(machine="new"))]) == [1, 2]
    own = BallotFile(tmp_path).read()
    assert (len(own.members), own.before, own.term) == (3, (), TERM)
    keeper.close()


def test_a_machine_without_a_record_is_no_member(tmp_path):
    """It trains with the others, and does not count among them."""
    keeper = keeper_in(tmp_path)
    there = [There(number, Record(machine=f"m{number}")) for number in (1, 2)]
    keeper.forms(1, there)
    there[1].hello.record = None
    assert keeper.decides(there)
    assert keeper.missing(there) == []
    keeper.forms(2, there)
    assert len(there[0].orders[-1].members) == 2
    assert there[1].orders[-1].members == ()
    keeper.forms_without(there)
    assert [one.orders[-1].members for one in there] == [(), ()]
    keeper.close()


def test_a_shared_folder_needs_no_majority(tmp_path):
    """Its lock decides; two machines with one record are one."""
    keeper = keeper_in(tmp_path)
    shares = There(1, Record(machine="m1"), shares=True)
    assert not keeper.decides([shares, There(2, Record(machine="m2"))])
    same = [There(number, Record(machine="m1")) for number in (1, 2)]
    assert not keeper.decides(same)
    own = [There(number, Record(machine=f"m{number}")) for number in (1, 2)]
    keeper.forms(1, own)
    assert keeper.decides([])
    assert not keeper.decides([shares])  # it was moved since
    copied = [There(number, BallotFile(tmp_path).read()) for number in (1, 2)]
    assert not keeper.decides(copied)
    keeper.close()


def test_a_coordinator_yields_to_a_newer_one(tmp_path):
    """One that has formed nothing yields to any that was elected."""
    keeper = keeper_in(tmp_path)
    older = Elected(ballot=0, term="z", host="h", port=1)
    assert keeper.yields_to(older)
    assert keeper.gives_way()
    assert BallotFile(tmp_path).yields_to is None  # it is of this process alone
    keeper.was_elected(5)
    assert not keeper.yields_to(older)
    assert not keeper.gives_way()
    assert keeper.yields_to(Elected(ballot=6, term="b", host="h", port=1))
    keeper.close()


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(2, 2, "two machines"), (1, 3, "1:3"), (2, 4, "2:4"), (2, 3, ""), (3, 3, "")],
)
def test_why_no_majority_decides_is_said_in_words(least, most, expected):
    """A group that trains must always share a machine with any other one."""
    why = why_no_vote_holds(least=least, most=most)
    assert expected in why
    assert bool(why) == bool(expected)


def test_a_coordinator_doubts_before_it_takes_back_who_has_voted_for_another(tmp_path):
    """Whoever was elected has the time to say so; after that it was nobody."""
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=100.0)
    keeper = MajorityKeeper(
        plan_of(tmp_path), term=TERM, token=TOKEN, clock=clock, at=("127.0.0.1", 1), number=0
    )
    voter = SimpleNamespace(record=Record(machine="m1", promised=7, promised_term="b"))
    assert keeper.ballot_for(voter) == 8  # nothing has formed: there is nothing to doubt
    keeper.was_elected(3)
    first = There(2, Record(machine="m2"))
    keeper.forms(1, [first, There(3, Record(machine="m3"))])
    assert keeper.ballot_for(voter) is None
    assert keeper.ballot_for(voter, [first]) == 8  # nobody else has a majority
    keeper.was_elected(3)
    assert keeper.ballot_for(voter) is None
    clock.now_s += DOUBTS_S
    assert keeper.ballot_for(voter) == 8
    keeper.close()


def test_only_the_newest_memory_that_is_known_is_kept(tmp_path):
    """A machine that the others have gone on without comes with an older one; a member's is the newest."""
    keeper = keeper_in(tmp_path)
    old, new = (
        Record(machine=f"m{number}", ballot=1, term=TERM, generation=number) for number in (1, 2)
    )
    assert keeper.has_newest(old, [])
    assert not keeper.has_newest(old, [There(2, new)])
    assert keeper.has_newest(new, [There(1, old)])
    members = tuple(Peer(machine=f"m{n}", number=n, host="", port=1) for n in (1, 2))
    assert keeper.has_newest(old, [There(2, replace(new, members=members))])
    keeper.close()


@pytest.fixture
def loop(three):
    """The loop of the first follower, which has met nobody."""
    signals, other = socket.socketpair()
    with selectors.DefaultSelector() as selector:
        meeting = SimpleNamespace(
            options=replace(OPTIONS, host="node0", port=three.followers[1].at[1])
        )
        made = follower_loop._FollowerLoop(
            plan_of(three.folder / "1"),
            meeting,
            signals=signals,
            selector=selector,
            display=None,
            clock=SYSTEM_CLOCK,
        )
        made.voting, made.succession = three.voting(1), SimpleNamespace(has_claimed=False)
        made._address = "127.0.0.1"
        yield made
        made.voting.close()
    signals.close()
    other.close()


def test_the_endpoints_port_is_left_to_who_coordinates_there(loop):
    """Such as another run, whose endpoint is at this machine."""
    host, port = loop._hears_votes_at()
    assert (host, port) == loop.voting.at
    assert port not in (0, loop._meeting.options.port)
    loop.voting.close_door()
    loop._meeting.options = replace(OPTIONS, host="node0", port=port)
    assert loop._hears_votes_at()[1] != port


def test_nothing_behind_a_generation_that_is_refused_is_heard(loop):
    """The order to form it would reach a rank."""
    ours, theirs = socket.socketpair()
    there = NodeLink(theirs, token=TOKEN, listens=True)
    loop._link = NodeLink(ours, token=TOKEN, listens=False)
    for _ in range(3):
        loop._link.flush()
        there.flush()
        loop._link.receive()
        there.receive()
    loop._selector.register(loop._link, selectors.EVENT_READ, (loop._link, None))
    heard = []
    loop._follower = SimpleNamespace(cut_off=lambda: None, on_node_message=heard.append)
    loop._node = SimpleNamespace(term=TERM, ranks=(1,))
    loop.voting.asked_to_form(Generation(ballot=9, generation=1, members=PEERS, before=()), TERM)
    asked = loop.voting.asked_to_form

    def refuse(order, term):
        there.send(wire.encode(EndRank(rank=1)))  # as the next order comes meanwhile
        there.flush()
        asked(order, term)

    loop.voting.asked_to_form = refuse
    there.send(wire.encode(Generation(ballot=8, generation=2, members=PEERS, before=())))
    there.flush()
    assert "has voted for another" in loop._obey()
    assert heard == []
    there.close()


def test_a_new_run_is_not_ended_by_a_record_of_one_before(tmp_path):
    """A machine that comes late takes the greater number; one of this run's says that another coordinator was elected."""
    keeper = keeper_in(tmp_path, resume="none")
    first, late = There(1, Record(machine="m1")), Record(machine="m2", promised=7, ballot=7)
    keeper.forms(1, [first])
    keeper.trains()
    late = replace(late, members=PEERS, promised_term="old", term="old", run="old")
    assert not keeper.is_behind(late)
    assert keeper.ballot_for(SimpleNamespace(record=late)) == 8
    assert keeper.missing([first, There(2, late)]) == []
    assert keeper.is_behind(replace(late, machine="m1", promised=9, ballot=9, run=TERM))
    keeper.close()


def test_an_heir_is_not_ended_by_a_record_of_another_run(three, monkeypatch):
    """It has the votes that its machine has read as a follower, so that a disk that fails then ends nothing."""
    keeper = keeper_in(three.folder / "0")
    there = [There(number, one.record) for number, one in enumerate(three.followers, 1)]
    keeper.forms(1, there)
    keeper.close()
    one = three.followers[0]
    one.asked_to_form(there[0].orders[-1], TERM)
    monkeypatch.setattr(ballot_file, "read_small", lambda path: 1 / 0)
    heir = keeper_in(three.folder / "1", term="heir", votes=one.file)
    heir.was_elected(2)
    late = Record(machine="late", promised=7, ballot=7, members=PEERS, run="old")
    assert not heir.is_behind(late)
    assert heir.ballot_for(SimpleNamespace(record=late)) == 8
    assert heir.missing([There(2, there[1].hello.record), There(3, late)]) == []
    heir.forms(2, [There(2, there[1].hello.record), new := There(3, late)])
    assert new.orders[-1].run == TERM
    heir.trains()
    assert heir.is_behind(replace(late, promised=9, ballot=9, run=TERM))
    heir.close()


def test_a_run_that_has_ended_holds_no_later_one_up(three):
    """Each machine that knows of the end knows who else does; those that do not must be no majority."""
    keeper = keeper_in(three.folder / "0")
    there = [There(number, one.record) for number, one in enumerate(three.followers, 1)]
    keeper.forms(1, there)
    keeper.trains()
    for one, node in zip(three.followers, there, strict=True):
        one.asked_to_form(node.orders[-1], TERM)
    keeper.ends(there[:1])
    assert keeper.missing([]) == [1, 2]  # they may have elected another one
    over = there[0].orders[-1]
    assert not three.followers[0].notes_end(replace(over, generation=2), TERM)
    assert three.followers[0].notes_end(over, TERM)
    assert not three.followers[0].holds
    there[0].has_noted_end = True
    keeper.ends(there[:1])
    assert keeper.missing([]) == []
    keeper.close()
    for number, expected in ((1, []), (2, [0, 1])):  # the second machine was away
        later = keeper_in(three.folder / str(number), term="later")
        assert later.missing([]) == expected
        later.close()
    later = keeper_in(three.folder / "1", term="later")
    new = There(2, Record(machine="new"))
    later.forms(2, [new])
    assert (new.orders[-1].before, new.orders[-1].run) == ((), TERM)
    assert later.missing([new]) == []
    later.close()


def test_a_run_whose_end_nobody_else_has_noted_is_looked_for(three):
    """A restarted coordinator asks the machines that it knew, unless it knows that they have nothing."""
    keeper = keeper_in(three.folder / "0")
    there = [There(number, one.record) for number, one in enumerate(three.followers, 1)]
    keeper.forms(1, there)
    keeper.trains()
    keeper.ends(there)
    assert not is_over([BallotFile(three.folder / "0").read()])
    there[1].has_noted_end = True
    keeper.ends(there)
    assert is_over([BallotFile(three.folder / "0").read()])
    keeper.close()


def test_a_restarted_follower_asks_the_machines_that_it_knew(three, loop):
    """In turn, beside the endpoint; after a run that has ended none of them has anything."""
    three.form(0, 1)
    endpoint = loop._where()
    loop.voting = three.voting(1)
    found = [loop._places() for _ in range(4)]
    assert {one for places in found for one in places} == {
        endpoint,
        *((one.host, one.port) for one in three.peers if one.number != 1),
    }
    assert all(endpoint in places and len(places) == 2 for places in found)
    record = loop.voting.file.read()
    loop.voting.file.write(ended(record, {one.machine for one in three.peers}))
    assert loop._places() == [endpoint]


def test_one_silent_address_is_dialled_at_a_time(loop, monkeypatch):
    """Others wait for an answer meanwhile; a leader that is silent is dialled again once it says where it is."""
    dialled = []

    def dial(place, timeout):
        dialled.append(place)
        raise TimeoutError

    monkeypatch.setattr(follower_loop.socket, "create_connection", dial)
    loop.voting.leader_at = ("10.0.0.1", 1)
    assert loop._dial() is None
    assert dialled == [("10.0.0.1", 1)]
    assert loop.voting.leader_at is None
    monkeypatch.setattr(loop, "_places", lambda: ["a", "b", "c"][loop._dialled % 3 :])
    loop._dial()
    loop._dial()
    assert dialled[1:] == ["b", "c"]
