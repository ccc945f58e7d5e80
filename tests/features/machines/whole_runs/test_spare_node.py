"""More machines than a run can use: those wait, and one takes the place of one that is lost."""

from __future__ import annotations

import signal

import psutil

from ddp_runner.features.machines.parent.admission import LossCount, place_for
from ddp_runner.features.machines.parent.remote_node import SPARE, RemoteNode
from ddp_runner.features.machines.rules.node_messages import Hello, Parked
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from tests.scenarios.harness import ended, poll

SLOWER = "task.pace_s=0.3"  # a machine is started again before the run is over


def _hello(supervisor, *, host="a", number=None, parked=None):
    return Hello(
        host=host,
        supervisor=supervisor,
        node_rank=number,
        ranks=1,
        run_id="none",
        meaning={},
        versions={},
        parked=parked,
    )


class _Link:
    def send(self, content):
        """To nobody."""


def _nodes(*there):
    """Nodes 1 to 3, of which some are there."""
    nodes = [RemoteNode(n, ranks=(n,), slots={}, clock=SYSTEM_CLOCK) for n in (1, 2, 3)]
    for number, hello in there:
        nodes[number - 1].joined(_Link(), hello)
    return nodes


def test_a_machine_that_comes_again_gets_its_number():
    """Known by its process, by what it has kept, or by its host; a number on its command line counts first."""
    nodes = _nodes((1, _hello("x")), (2, _hello("y", host="b")))
    nodes[1].link = None
    assert place_for(_hello("y", host="c"), nodes).number == 2
    assert (
        place_for(
            _hello("z", parked=Parked(node=3, term="t", generation=1, run_id="r")), nodes
        ).number
        == 3
    )
    assert place_for(_hello("z", host="b"), nodes).number == 2
    assert place_for(_hello("z", host="d"), nodes).number == 3
    assert place_for(_hello("y", number=3), nodes).number == 3
    assert place_for(_hello("y", number=1), nodes) is None


def test_where_no_place_is_free_a_machine_waits():
    """Nobody is sent away for it."""
    nodes = _nodes(*((number, _hello(str(number))) for number in (1, 2, 3)))
    assert place_for(_hello("z"), nodes) is None


def test_a_machine_that_is_lost_all_the_time_is_used_last():
    """Three times within five minutes; five minutes later it is as good as another."""
    spares = [RemoteNode(SPARE, ranks=(), slots={}, clock=SYSTEM_CLOCK) for _ in range(2)]
    for spare, host in zip(spares, ("bad", "good"), strict=True):
        spare.joined(_Link(), _hello(host, host=host))
    losses = LossCount()
    for now_s in (0.0, 100.0):
        losses.lost("bad", now_s)
    assert losses.best(spares, 200.0) is spares[0]
    losses.lost("bad", 200.0)
    assert losses.best(spares, 499.0) is spares[1]
    assert losses.best(spares[:1], 300.0) is spares[0]
    assert losses.best(spares, 500.0) is spares[0]
    losses.lost("bad", 500.0)
    assert (losses.total("bad"), losses.left_out_until_s("bad")) == (4, 0.0)


def test_a_spare_machine_takes_the_place_of_one_that_is_lost(nodes, one_machine):
    """The lost one then waits in its turn; one that is asked to stop while it waits leaves alone."""
    nodes.ranks = 1
    first = nodes.start(0, SLOWER)
    poll(lambda: "importing" in first.console, what="the coordinator, whose port it is")
    second = nodes.start(1, SLOWER, gives_number=False)
    poll(lambda: "this is node 1" in second.console, what="two nodes")
    spare = nodes.start(2, SLOWER, gives_number=False)
    poll(lambda: "this machine waits" in spare.console, what="a spare")
    first.wait_for_step(8)
    stays = first.rank_pid(0)
    second.signal(signal.SIGKILL)
    second.assert_gone()
    poll(lambda: "this is node 1" in spare.console, what="the spare in its place")
    second = nodes.start(1, SLOWER, gives_number=False)
    poll(lambda: "this machine waits" in second.console, what="the other one as a spare")
    assert first.rank_pid(0) == stays
    second.signal(signal.SIGTERM)
    assert second.wait() == 75, second.console
    assert ended(first, spare) == (0, 0), first.console + spare.console
    faults = [(one["kind"], one["steps_lost"]) for one in first.summary()["faults"]]
    assert faults == [("node_lost", 0)]
    assert (first.summary()["exact"], first.digest) == (True, one_machine(2))


def test_a_number_that_a_silent_machine_holds_is_waited_for(nodes, one_machine):
    """Its machine says nothing for three seconds. Back again it frees its ranks, and waits as a spare."""
    nodes.ranks = 1
    first, second = nodes.start(0, SLOWER), nodes.start(1, SLOWER)
    first.wait_for_step(8)
    second.signal(signal.SIGSTOP)
    other = nodes.start(2, SLOWER, "--node-rank", 1, gives_number=False)
    poll(
        lambda: "not ready: --node-rank=1: node 1 is there already" in other.console,
        what="a refusal for now",
    )
    poll(lambda: "this is node 1" in other.console, what="the number")
    lost = second.rank_pid(1)
    second.signal(signal.SIGCONT)
    said = "this machine waits: another machine is node 1, until that is lost"
    poll(lambda: said in second.console, what="why it waits")
    poll(lambda: not psutil.pid_exists(lost), what="the end of its rank")
    codes = ended(first, second, other)
    assert codes == (0, 0, 0), first.console + second.console + other.console
    assert (first.summary()["exact"], first.digest) == (True, one_machine(2))
