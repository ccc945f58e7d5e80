"""Messages, board, election and due actions: small pure rules."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_runner.core.settings import CheckpointSettings, LogSettings
from ddp_runner.core.step_schedule import RunLength, due_after, last_save_due, run_length
from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress, elect_source
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire import events, messages
from ddp_runner.kernel.wire import fork_specs as specs
from ddp_runner.kernel.wire.board import CELLS_PER_SLOT, SLOT_BYTES, Board, Cell
from ddp_runner.kernel.wire.fork_specs import ForkKind, SpareKind

FAULT = Fault(kind=FaultKind.RANK_RAISED, rank=1, step=3, cause="ValueError: ü", detail="trace")
AROUND = {
    "settings": {"run": {"seed": 1}, "data": {"inputs": ["a"]}},
    "device": "cuda:1", "other_devices": ("cuda:2",), "mode": "distributed", "code": "4f2a91",
    "world_size": 3, "local_world_size": 3, "threads": 2, "detect_anomaly": True, "node": 1,
    "log_folder": 1, "term": "t", "local_addr": "127.0.0.1", "store_host": "127.0.0.1",
    "store_port": 5, "preload": ("p",), "memory_slots": ("m", "n"), "local_slots": ("l",), "has_saver": True,
    "saver_trouble": "d",
}  # fmt: skip
PROGRAM = specs.Program(
    path="a.py", module="", arguments=("--x", "1"), source="/proc/1/fd/9", in_place=True
)
CALL = {"path": "a.py", "arguments": ["--x", "1"], "is_program": False, "attempt": 2}
RANK = specs.RankSpec(**AROUND, loads=True, resume="auto", injections_left={0: 2}, log_seal="s")
SPECS = {
    ForkKind.RANK: RANK,
    ForkKind.LOOP: replace(RANK, program=PROGRAM),
    ForkKind.PROGRAM: specs.ProgramSpec(**AROUND, call=CALL, log_file="l"),
    ForkKind.STORE: specs.NothingMore(),
    ForkKind.SPARE: specs.SpareSpec(**AROUND, kind=SpareKind.MODEL),
    ForkKind.STANDBY: specs.NothingMore(),
    ForkKind.DRILL: specs.DrillSpec(**AROUND, rank=1, step=3, folder="f"),
    ForkKind.SAVER: specs.SaverSpec(folder="f", memory_slots=("m",)),
    ForkKind.IMPORTS: specs.ImportsSpec(wanted="a,b"),
}
FORKS = [messages.Fork(token=3, kind=kind, spec=SPECS[kind]) for kind in ForkKind]
SAMPLES = [
    messages.Form(generation=2, rank=1, world_size=3, local_rank=1, local_world_size=3,
                  run_id="r", secret="s"),
    messages.AbortHeard(rank=1, generation=3),
    events.Cut(generation=3),
    messages.Abort(generation=4, newest_step=3),
    messages.Stacks(),
    messages.CollectivesBegun(rank=1, step=3, count=7, in_others=2),
    messages.CountCollectives(),
    messages.Leaving(rank=1, exit_code=3, at_ns=4, words="no data"),
    messages.Stop(reason=StopReason.PREEMPTED),
    messages.Checkpoint(),
    messages.ReopenLog(),
    messages.SaveAlone(),
    messages.Inject(kind="kill", number=3),
    events.Injected(rank=0, number=1, kind="kill"),
    messages.Built(rank=1, stage=2, seconds=0.25),
    messages.Ready(rank=0, committed_step=-1, run_id="", total_steps=9, steps_per_epoch=3,
                   train_samples=12, parameters=7, device="cpu", notes=("a",), block=("b", "c")),
    events.RankFormed(rank=0, generation=1, committed_step=0, source=0, group_s=0.1, transfer_s=0.2,
                    rebuild_s=0.3),
    events.Faulted(generation=1, fault=FAULT),
    messages.Metrics(rank=0, step=5, values={"loss": 1.5}),
    events.CheckpointSaved(rank=0, step=5, path="a/b", blocked_s=0.1, size_bytes=3, sha256="0"),
    messages.NotSaved(rank=0, step=5, cause="a full disk", is_its_own=True),
    messages.WriteCopy(rank=0, sealed=7, step=5, directory="c", keep_last=2, keep_every=0),
    messages.CopyWritten(
        sealed=7, step=5, manifest="{}", blocked_s=0.2, write_s=0.1, notes=("a note",), proved=(3, 4)
    ),
    messages.SaverReady(),
    messages.LoaderWorkers(rank=0, pids=(1, 2)),
    events.LogOutage(rank=0, text="a"),
    events.StopSignalAtRank(rank=0, reason=StopReason.PREEMPTED),
    messages.RestartProgress(
        rank=0, generation=2, run_id="r", clock="boot", began_ns=1, at_ns=2, spent_ns={"productive": 1}
    ),
    messages.OtherStage(rank=0, number=1, first_step=12),
    messages.Finished(rank=0, reason=StopReason.COMPLETED, step=9, report={"a": [1, "b"]}),
    events.TuningChanged(rank=0, step=3, action="a", inexact_reason="b"),
    events.RepairedInPlace(rank=0, fault=FAULT, action="a", seconds=0.5),
    events.FaultTolerated(rank=0, fault=FAULT, action="a"),
    events.Proved(rank=0, step=2, what="repeated"),
    messages.DrillAt(rank=1, step=2, diagnoses=True),
    messages.DrillPart(rank=0, step=2, part="state", problem="no"),
    messages.NotKept(what="state"),
    events.Drill(rank=0, step=2, differs="layer.weight"),
    events.DrillSkipped(rank=0, step=2, text="no"),
    events.Diagnosed(rank=0, step=2, plain="0.weight", places=("task.count",), source="state", had_state=True),
    *FORKS,
    messages.Forked(token=3, pid=77),
    events.ZygoteReady(torch="2", import_s=1.0, warning="2 threads run"),
    messages.StoreReady(port=5),
    events.SpareReady(),
]  # fmt: skip


def test_a_message_survives_the_wire():
    """What is decoded equals what was encoded."""
    for message in SAMPLES:
        assert messages.decode(messages.encode(message)) == message


def test_a_fork_without_what_it_needs_is_refused():
    """Not found out by the process that is forked."""
    body = json.loads(messages.encode(messages.Fork(token=3, kind=ForkKind.RANK, spec=RANK)))
    del body["spec"]["store_port"]
    with pytest.raises(messages.WireError, match=r"bad Fork: .*store_port"):
        messages.decode(json.dumps(body).encode())


@pytest.mark.parametrize("filling", ["x", "\N{FIRE}", "\0"])
def test_a_fault_fits_a_packet_whatever_users_code_has_raised(filling):
    """Cut to the start of its cause and the end of its traceback; the wire's limit is never met."""
    fault = Fault(kind=FaultKind.RANK_RAISED, rank=1, step=3, cause="V" + filling * 300_000,
                  detail=filling * 300_000 + "V")  # fmt: skip
    for message in (
        events.Faulted(generation=1, fault=fault),
        events.RepairedInPlace(rank=0, fault=fault, action="a", seconds=0.5),
        events.FaultTolerated(rank=0, fault=fault, action="a"),
    ):
        sent = messages.decode(messages.encode(message)).fault
        assert sent.cause == fault.cause[: len(sent.cause)]
        assert fault.detail.endswith(sent.detail)
        assert len(sent.cause) >= 1000
        assert len(sent.detail) >= 8000


def test_every_message_type_has_a_sample():
    """A new message must join the round-trip test."""
    assert {type(sample) for sample in SAMPLES} == set(messages.KINDS.values())


@pytest.mark.parametrize(
    "packet",
    [b"", b"{", b"[]", b'{"v": 1}', b'{"v": 2, "type": "Abort", "generation": 1}',
     b'{"v": 1, "type": "Nope"}', b'{"v": 1, "type": "Abort"}',
     b'{"v": 1, "type": "Stop", "reason": "maybe"}'],
)  # fmt: skip
def test_what_is_no_message_is_refused(packet):
    """An unknown type, version or value is an error, never a guess."""
    with pytest.raises(messages.WireError):
        messages.decode(packet)


def test_a_field_of_a_newer_sender_is_dropped():
    """Old and new may talk while a run is being upgraded around them."""
    body = json.loads(messages.encode(messages.Abort(generation=4)))
    body["why"] = "because"
    assert messages.decode(json.dumps(body).encode()) == messages.Abort(generation=4)


def test_a_message_that_no_packet_holds_is_refused_by_its_sender():
    """It would otherwise be cut on the way."""
    huge = messages.Metrics(rank=0, step=1, values={"x" * messages.PACKET_BYTES_MAX: 1.0})
    with pytest.raises(messages.WireError, match="too long"):
        messages.encode(huge)


def test_slots_of_a_board_do_not_touch_each_other():
    """A stamp of one rank is invisible in its neighbours' slots."""
    memory = bytearray(3 * SLOT_BYTES)
    board = Board(memoryview(memory), 3)
    board.slot(1).stamp(Phase.REDUCE, 123)
    board.slot(1).set(Cell.DIRTY, 1)
    board.slot(1).set_loss(2.5)
    assert not any(memory[:SLOT_BYTES])
    assert not any(memory[2 * SLOT_BYTES :])
    reading = board.slot(1).read()
    assert (reading.phase, reading.phase_since_ns, reading.dirty, reading.loss) == (
        Phase.REDUCE, 123, True, 2.5,
    )  # fmt: skip


def test_what_is_done_between_two_steps_counts_for_its_step_only():
    """A process that takes over starts from nothing, and a committed step ends the count of the one before."""
    board = Board(memoryview(bytearray(2 * SLOT_BYTES)), 2)
    slot = board.slot(1)
    for _ in range(3):
        slot.count_done(7)
    assert [slot.done_between(step) for step in (6, 7, 8)] == [0, 3, 0]
    slot.count_done(8)
    assert [slot.done_between(step) for step in (7, 8)] == [0, 1]
    slot.begin_between(8)
    assert slot.done_between(8) == 0
    assert board.slot(0).done_between(0) == 0


def test_a_board_refuses_what_it_has_no_room_for():
    """Too little memory and slots that do not exist are errors."""
    with pytest.raises(ValueError, match="needs"):
        Board(memoryview(bytearray(SLOT_BYTES)), 2)
    with pytest.raises(IndexError):
        Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(1)


def test_cells_fit_and_never_share_a_place():
    """The board's wire format; two names of one number would be one cell, and iterating hides it."""
    assert len(set(Cell.__members__.values())) == len(Cell.__members__)
    assert max(Cell) < CELLS_PER_SLOT


@given(st.lists(st.integers(EMPTY_STEP, 5), min_size=1, max_size=8))
def test_the_newest_replica_is_elected(steps):
    """The source is the newest; exactly those behind it receive; with nobody filled, it raises."""
    replicas = [ReplicaProgress(rank=r, committed_step=s) for r, s in enumerate(steps)]
    if max(steps) == EMPTY_STEP:
        with pytest.raises(ValueError, match="no rank"):
            elect_source(replicas)
        return
    election = elect_source(replicas)
    assert steps[election.source] == max(steps) == election.committed_step
    assert election.receivers == tuple(r for r, s in enumerate(steps) if s < max(steps))


def test_duties_follow_epochs_and_steps():
    """Epoch ends and step intervals both count; what is due after the last step belongs to the end."""
    length = run_length(steps_per_epoch=4, epochs=3, max_steps=0)
    assert (length.total_steps, length.epochs) == (12, 3)
    log = LogSettings(log_interval=3, evaluate_interval=1)
    checkpoint = CheckpointSettings(save_interval=2, save_every_steps=5)
    due = {step: due_after(step, length, log=log, checkpoint=checkpoint) for step in range(13)}
    assert [step for step, duty in due.items() if duty.evaluate] == [4, 8]
    assert [step for step, duty in due.items() if duty.save] == [5, 8, 10]
    assert [step for step, duty in due.items() if duty.log] == [1, 3, 6, 9, 12]
    assert not any(duty.compare for duty in due.values())


def test_replicas_are_compared_at_their_interval_and_before_each_save():
    """What is saved is what all have; an interval of 0 is never."""
    length = run_length(steps_per_epoch=4, epochs=3, max_steps=0)
    checkpoint = CheckpointSettings(save_interval=0, save_every_steps=5)
    for interval, expected in ((3, [3, 5, 6, 9, 10, 12]), (0, [])):
        due = {
            step: due_after(
                step, length, log=LogSettings(), checkpoint=checkpoint, replica_check_steps=interval
            )
            for step in range(13)
        }
        assert [step for step, duty in due.items() if duty.compare] == expected


def test_max_steps_wins_over_epochs():
    """Contract: --max-steps counts optimizer steps of the run."""
    length = run_length(steps_per_epoch=4, epochs=100, max_steps=10)
    assert (length.total_steps, length.epochs, length.epoch_of(9)) == (10, 3, 2)
    with pytest.raises(ValueError, match="epoch"):
        run_length(steps_per_epoch=0, epochs=1, max_steps=0)


def test_messages_are_frozen():
    """A value that was sent cannot be changed by its sender."""
    for kind in messages.KINDS.values():
        assert kind.__dataclass_params__.frozen
        assert all(f.kw_only for f in fields(kind))


@pytest.mark.parametrize(
    ("interval", "every", "step", "due"),
    [
        (1, 0, 25, 20),
        (2, 0, 25, 20),
        (2, 0, 19, 0),
        (0, 7, 25, 21),
        (1, 7, 25, 21),
        (0, 0, 25, 0),
        (2, "auto", 25, 20),
    ],
)
def test_the_newest_save_that_was_due_is_known(interval, every, step, due):
    """By epochs of 10 steps, by steps, or by both; a save that nobody has is owed."""
    settings = CheckpointSettings(save_interval=interval, save_every_steps=every)
    length = RunLength(steps_per_epoch=10, total_steps=100)
    assert last_save_due(step, length, settings) == due
