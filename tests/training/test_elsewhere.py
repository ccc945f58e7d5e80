"""Per-rank state on another machine: sent at each step, and given to the process that replaces a rank there."""

from __future__ import annotations

import os
import queue
import threading
from types import SimpleNamespace

import pytest

from ddp_runner.training.local_state import elsewhere, gathering
from ddp_runner.training.local_state.elsewhere import Seat, partner_of
from ddp_runner.training.local_state.local_state import LOCAL
from tests.training.test_local_state import Env, local_of, step

SLOT = SimpleNamespace(get=lambda _: 0, stamp=lambda *_: None)
PATIENCE_S = 60


class Wires:
    """The ranks of a group as threads. A message is given once its receiver takes it, as a large one is."""

    def __init__(self, monkeypatch):
        self._pairs, self._lock, self._said = {}, threading.Lock(), {}
        for module in (elsewhere, gathering):
            monkeypatch.setattr(module, "send_state", self._send)
            monkeypatch.setattr(module, "receive_state", self._receive)

    def _pair(self, source, to):
        with self._lock:
            return self._pairs.setdefault((source, to), (queue.Queue(), queue.Queue()))

    def _send(self, group, state, *, to):
        for one in to:
            message, taken = self._pair(group.rank, one)
            message.put(state)
            taken.get(timeout=PATIENCE_S)

    def _receive(self, group, *, source):
        message, taken = self._pair(source, group.rank)
        state = message.get(timeout=PATIENCE_S)
        taken.put(None)
        return state

    def together(self, calls):
        """Have each rank make its call, at the same time; each of them gets its group."""
        meeting, said, errors = threading.Barrier(len(calls)), [None] * len(calls), []

        def run(number, call):
            def exchange(_, value):
                said[number] = value
                meeting.wait(PATIENCE_S)
                return list(said)

            try:
                call(SimpleNamespace(rank=number, world_size=len(calls), exchange=exchange))
            except Exception as error:  # noqa: BLE001 - the test fails by it
                errors.append(error)
                meeting.abort()

        threads = [threading.Thread(target=run, args=one) for one in enumerate(calls)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert errors == []


class Machines:
    """Machines with so many ranks, each with memory of its own."""

    def __init__(self, ranks, here, monkeypatch):
        self._here, self._wires = here, Wires(monkeypatch)
        self._memory = [os.memfd_create("machine") for _ in range(ranks // here)]
        self.envs = [Env(seed) for seed in range(ranks)]
        self.locals = [self._made(rank) for rank in range(ranks)]

    def _made(self, rank):
        path = f"/proc/self/fd/{self._memory[rank // self._here]}"
        ranks = len(self.envs)
        return local_of({"env": self.envs[rank]}, path, rank=rank, ranks=ranks, here=self._here)

    def form(self, at):
        places = range(len(self.locals))
        self._wires.together(
            [
                lambda group, one=one: one.agree(group, SLOT, places=places, step=at)
                for one in self.locals
            ]
        )

    def step(self, number):
        self._wires.together(
            [
                lambda _, one=one, env=env: step(one, number, env.play)
                for one, env in zip(self.locals, self.envs, strict=True)
            ]
        )

    def gather(self, at):
        self._wires.together(
            [
                lambda group, one=one: gathering.gather_local(one, group, step=at)
                for one in self.locals
            ]
        )

    def lose(self, machine, at):
        """The machine with its memory; others take the same numbers, with nothing of it."""
        os.close(self._memory[machine])
        self._memory[machine] = os.memfd_create("machine")
        for rank in range(machine * self._here, (machine + 1) * self._here):
            self.envs[rank] = Env(90 + rank)
            self.locals[rank] = self._made(rank)
            self.locals[rank].go_to(at, None, is_begin=False)

    def seen(self):
        return [(env.games, env.at.tolist()) for env in self.envs]

    def lost(self):
        return [line for one in self.locals for line in one.take_lost()]

    def close(self):
        for one in self._memory:
            os.close(one)


@pytest.fixture
def machines(monkeypatch):
    made = []

    def make(ranks, here):
        made.append(Machines(ranks, here, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(("ranks", "here"), [(2, 1), (4, 2), (3, 1), (5, 1)])
def test_a_rank_gets_its_state_from_another_machine(machines, ranks, here):
    """One machine after the other is lost with its memory, also twice in a row."""
    run = machines(ranks, here)
    run.form(0)
    number = 0
    for machine in (*range(ranks // here), 0, 0):
        for _ in range(2):
            number += 1
            run.step(number)
        before = run.seen()
        run.lose(machine, at=number)
        assert run.seen() != before
        run.form(number)
        assert (run.seen(), run.lost()) == (before, [])


def test_the_machine_is_lost_right_after_the_other_one_came_back(machines):
    """No step was made in between: what the new process was given is on the other machine again."""
    run = machines(2, 1)
    run.form(0)
    run.step(1)
    run.step(2)
    before = run.seen()
    for machine in (1, 0, 1):
        run.lose(machine, at=2)
        run.form(2)
        assert (run.seen(), run.lost()) == (before, [])


def test_two_machines_lost_at_once_are_named(machines):
    """The second one kept the state of the first one: that rank goes on with the content of its process."""
    run = machines(3, 1)
    run.form(0)
    run.step(1)
    run.step(2)
    before = run.seen()
    run.lose(0, at=2)
    run.lose(1, at=2)
    run.form(2)
    (line,) = run.lost()
    assert line == (
        "env of rank 0 keeps the content of this process: nothing was kept for rank 0 at step 2"
    )
    assert run.seen()[1:] == before[1:]


def test_what_is_too_large_stays_on_its_machine_and_is_named(machines, monkeypatch):
    """Both in the line on its cost, and when it is lost."""
    monkeypatch.setattr("ddp_runner.training.local_state.local_state.LARGE_BYTES", 8)
    run = machines(2, 1)
    run.form(0)
    lines = []
    for number in range(1, 9):
        run.step(number)
        lines += filter(None, (one.cost_line() for one in run.locals))
    assert lines == []  # it is small, and costs nothing
    run.lose(1, at=8)
    run.form(8)
    (line,) = run.lost()
    assert "nothing was kept for rank 1 at step 8" in line


def test_a_late_change_that_the_other_machine_lacks_is_named(machines):
    """What is sent is as of the update."""
    run = machines(2, 1)
    run.form(0)
    run.step(1)
    run.step(2)
    run.lose(1, at=2)
    run.form(2)
    assert run.lost() == []
    run._wires.together(
        [
            lambda _, one=one, env=env: step(one, 3, env.play, late=env.play)
            for one, env in zip(run.locals, run.envs, strict=True)
        ]
    )
    assert {line.partition(":")[0] for line in run.lost()} == {"env of rank 1"}


@pytest.mark.parametrize(("ranks", "here"), [(2, 1), (4, 2), (3, 1)])
def test_files_and_copies_of_two_machines_are_whole(machines, ranks, here):
    """Rank 0 writes files; the first rank of the second machine has a copy for when the first one is lost."""
    run = machines(ranks, here)
    run.form(0)
    run.step(1)
    run.gather(1)
    for saver in (0, here):
        record = run.locals[saver].of_ranks(1)[LOCAL]
        assert sorted(record) == [str(rank) for rank in range(ranks)]
        for rank, env in enumerate(run.envs):
            taken = local_of({"env": Env()}, None, rank=rank, ranks=ranks)
            taken.go_to(1, record, is_begin=False)
            assert taken.inner()[0].at.tolist() == env.at.tolist()


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([0, 0], [None, None]),
        ([-1, -1], [None, None]),
        ([0, 1], [1, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 0, 0, 4], [3, 3, 3, 0]),
        ([0, 2, 5], [1, 2, 0]),
    ],
)
def test_partners_are_on_the_next_machine(machines, expected):
    seats = [Seat(rank, machine) for rank, machine in enumerate(machines)]
    assert [partner_of(seats, number) for number in range(len(seats))] == expected
