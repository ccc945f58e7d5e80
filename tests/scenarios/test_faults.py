"""Faults of every kind, one after the other in one run: each is repaired in place, at no cost.

Delivered by ``--inject`` at an exact phase of an exact step, to real processes by real signals.
"""

from __future__ import annotations

import linecache
import re
import signal
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import pytest

from tests.scenarios.conftest import NO_SPARE, PATIENT, STEPS
from tests.scenarios.harness import Run, assert_every_sample_once, poll

SPACING_STEPS = 8  # a new process is watched closely from its fourth step on
SAVE_EVERY = 10
HANG_MIN_S = 1.0  # of which a healthy rank of a busy machine may miss more than half
CATCH_UP_S = 0.25  # for the ranks that are behind; no deadline is so short
QUICK = (
    *("-b", 8, "num_workers=0", "task.pace_s=0.01", "log.display=plain", "evaluate_interval=0"),
    *(f"save_every_steps={SAVE_EVERY}", "save_interval=0", "recovery.max_restarts=1000"),
    *(f"recovery.hang_min_s={HANG_MIN_S}", "recovery.hang_factor=4"),
)
# For runs that nobody disturbs: no rank dies in them, and the weights are the same.
CHEAP = ("task.pace_s=0", "recovery.warm_spare=false")
# What else a repair has to bring along; bf16 where the processor has it.
AVERAGED = ("ema_decay=0.9", "use_amp=true")
LOADED = ("num_workers=1",)
# The line of the injection in which each kind hangs.
STRIKES = {
    "stop": ("os.kill(os.getpid(), signal.SIGSTOP)",),
    "gil": (".pause()",),
    "spin": ("while True", "pass"),
    "hang": ("time.sleep(FOREVER_S)",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One or more injections, ``@`` standing for their step, and the incidents they must make.

    ``incidents``: kind and possible culprits of each; ``replaced``: ranks that get a new process.
    """

    specs: tuple[str, ...]
    incidents: tuple[tuple[str, frozenset[int]], ...]
    replaced: frozenset[int]
    falls_back: bool = False


def single(kind, spec, rank):
    ranks = frozenset({rank})
    return Blow(specs=(f"{spec},rank={rank}",), incidents=((kind, ranks),), replaced=ranks)


def caught_up(spec, rank):
    """A fault inside the step, once every rank has had the time to come so far.

    One that has still to end the step before is freed from that, and what is to happen to it in this
    step happens when it is done again. Of two ranks, the newest state would be lost with this one.
    """
    slow = f"slow:step=@,phase=forward,rank={rank},seconds={CATCH_UP_S}"
    return slow, f"{spec},rank={rank}"


def single_caught_up(kind, spec, rank):
    ranks = frozenset({rank})
    return Blow(specs=caught_up(spec, rank), incidents=((kind, ranks),), replaced=ranks)


def kill_in_step(rank):
    """SIGKILL inside the step."""
    return caught_up("kill:step=@,phase=backward", rank)


def together(ranks, *, falls_back=False):
    """SIGKILL at the same place of the same step: all within a few milliseconds.

    At the end of the wait itself: who comes to a later phase has left the step by then.
    """
    ranks = frozenset(ranks)
    return Blow(
        specs=tuple(
            spec for rank in sorted(ranks) for spec in caught_up("kill:step=@,phase=forward", rank)
        ),
        incidents=(("rank_killed", ranks),),
        replaced=ranks,
        falls_back=falls_back,
    )


def then(first, phase, second, *, falls_back=False):
    """SIGKILL ``first`` in a step and ``second`` at ``phase`` of the repair that follows."""
    return Blow(
        specs=(*kill_in_step(first), f"kill:step=@,phase={phase},rank={second}"),
        incidents=(("rank_killed", frozenset({first})), ("rank_killed", frozenset({second}))),
        replaced=frozenset({first, second}),
        falls_back=falls_back,
    )


# Rank 0 cannot hand its buffers on to rank 1, and waits; another one has got them, and commits.
SPLITS = Blow(
    specs=(
        "slow:step=@,phase=reduced,rank=1,seconds=0.6",
        "kill:step=@,phase=reduced,rank=1",
    ),
    incidents=(("rank_killed", frozenset({1})),),
    replaced=frozenset({1}),
)


def blows(world):
    """What is done to a world of this size: to one of two, whatever two ranks do otherwise than more do."""
    last = world - 1
    every = range(world)
    if world == 2:
        return (
            *(
                single_caught_up("rank_killed", f"kill:step=@,phase={phase}", rank)
                for rank, phase in enumerate(("reducing", "reduced"))
            ),
            single("rank_killed", "kill:step=@,phase=commit", last),
            single("rank_hung", "stop:step=@,phase=forward", 1),
            # A survivor, while it forms: it is the last that holds the state.
            then(1, "forming", 0, falls_back=True),
            together(every, falls_back=True),
        )
    return (
        # Before, in, and after the last all-reduce of a step.
        *(
            single_caught_up("rank_killed", f"kill:step=@,phase={phase}", rank)
            for rank, phase in zip(every, cycle(("reducing", "reduce", "reduced")))
        ),
        SPLITS,
        single_caught_up("rank_exited", "exit:step=@,phase=backward", 1),
        single("rank_hung", "stop:step=@,phase=forward", 1),
        single("rank_hung", "gil:step=@,phase=optimizer", 0),
        single("rank_hung", "spin:step=@,phase=data", last),
        single("rank_hung", "hang:step=@,phase=backward", 0),
        together((0, last)),
        together(range(1, world)),
        then(1, "startup", 1),  # the joiner, while it starts
        then(1, "forming", 0),  # a survivor, while it forms
        together(every, falls_back=True),
    )


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_kind_of_fault_is_repaired_without_a_lost_step(tmp_path, world):
    """Weights of a fault-free run; survivors keep their process; no step lost while a rank lives."""
    plan = [(12 + SPACING_STEPS * number, blow) for number, blow in enumerate(blows(world))]
    steps = plan[-1][0] + SPACING_STEPS
    asked = []
    for step, blow in plan:
        for spec in blow.specs:
            asked += ["--inject", spec.replace("@", str(step))]
    settings = (*QUICK, *(AVERAGED if world == 3 else ()), "--max-steps", steps)
    with Run(tmp_path / "fault_free", *settings, *CHEAP, world=world) as run:
        assert run.wait() == 0, run.console
        digest = run.digest
    # The loader workers of a rank end with it: two ranks have them, three read for themselves.
    loaded = LOADED if world == 2 else ()
    with Run(tmp_path / "faults", *settings, *loaded, "--audit", *asked, world=world) as run:
        assert run.wait(180.0) == 0, run.console
    assert run.digest == digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, steps)
    assert_every_sample_once(run, world, samples=192)
    check_incidents(summary["faults"], plan)
    check_processes(run, plan, world)
    check_seconds(summary["faults"])
    check_stacks(run, plan)
    check_split(run, plan)


def check_incidents(faults, plan):
    """One record per incident, in order, with the right culprit, repaired; only a fall-back loses."""
    expected = [
        (step, one, blow.falls_back and one is blow.incidents[-1])
        for step, blow in plan
        for one in blow.incidents
    ]
    seen = [(fault["kind"], fault["rank"], fault["step"]) for fault in faults]
    assert len(faults) == len(expected), "\n".join(map(str, seen))
    for fault, (step, (kind, ranks), falls_back) in zip(faults, expected, strict=True):
        where = f"{fault}, where rank {set(ranks)} was to be {kind} at step {step}"
        assert (fault["kind"], fault["step"]) == (kind, step), where
        assert fault["rank"] in ranks, where
        assert fault["recovered_s"] is not None, where
        # A save goes on beside training: the newest one may not be there yet.
        possible = (step % SAVE_EVERY, step % SAVE_EVERY + SAVE_EVERY) if falls_back else (0,)
        assert fault["steps_lost"] in possible, where


def check_seconds(faults):
    """Each part of a repair was measured, and together they are no longer than the whole."""
    parts = ("abort", "fork", "group", "transfer", "rebuild")
    for fault in faults:
        seconds = fault["seconds"]
        assert sorted(seconds) == sorted(("detect", *parts, "total")), fault
        assert min(seconds.values()) >= 0.0, fault
        repaired_s = fault["recovered_s"] - fault["detected_s"]
        assert seconds["total"] == pytest.approx(repaired_s, abs=0.002), fault
        ranks_s = max(seconds[name] for name in ("group", "transfer", "rebuild"))  # the slowest's
        assert seconds["abort"] + seconds["fork"] + ranks_s <= seconds["total"] + 0.001, fault
        assert seconds["group"] > 0.0, fault
        assert seconds["rebuild"] > 0.0, fault
        if fault["kind"] == "rank_hung":
            assert seconds["detect"] >= HANG_MIN_S, fault
    killed = [fault["seconds"]["detect"] for fault in faults if fault["kind"] == "rank_killed"]
    assert median(killed) < HANG_MIN_S, "nobody waits for a deadline where a process has ended"


def check_stacks(run, plan):
    """Each rank that hung has said in its log where, whatever it hung in, before it was killed."""
    for _, blow in plan:
        for (kind, (rank, *_)), spec in zip(blow.incidents, blow.specs, strict=False):
            if kind == "rank_hung":
                assert spec.partition(":")[0] in hung_in(run, rank), f"{spec}, not in its log"


def hung_in(run, rank):
    """The kinds of injection in which a rank stood when its stacks were written."""
    log = (run.logs / f"rank_{rank}.log").read_text(encoding="utf-8")
    stood = re.findall(r'File "(.*)", line (\d+) in _inject$', log, re.MULTILINE)
    lines = {linecache.getline(path, int(number)).strip() for path, number in stood}
    return {
        kind for kind, marks in STRIKES.items() if any(m in one for m in marks for one in lines)
    }


def check_split(run, plan):
    """The survivors were a step apart when they were freed: the newest gave the others its state."""
    for step in [step for step, blow in plan if blow is SPLITS]:
        assert step % SAVE_EVERY, "the step after a save waits for everybody's verdict on it"
        reported = run.events("fault")
        (killed,) = [one for one in reported if (one["kind"], one["step"]) == ("rank_killed", step)]
        freed = {
            one["rank"]: one["step"]
            for one in reported
            if one["generation"] == killed["generation"] and one["rank"] != killed["rank"]
        }
        assert freed[0] == step
        assert set(freed.values()) == {step, step + 1}, freed
        newest = min(rank for rank, at_step in freed.items() if at_step == step + 1)
        formed = run.events("rank_formed")
        then = [one for one in formed if one["generation"] == killed["generation"] + 1]
        assert {(one["source"], one["committed_step"]) for one in then} == {(newest, step + 1)}


def check_processes(run, plan, world):
    """A rank has a new process exactly as often as it was replaced.

    One that raised goes on where its peers, on a busy machine, are still a step behind.
    """
    kept = kept_ranks(run)
    pids = {rank: [] for rank in range(world)}
    for record in run.events("rank_formed"):
        mine = pids[record["rank"]]
        if not mine or mine[-1] != record["pid"]:
            mine.append(record["pid"])
    for rank, seen in pids.items():
        replaced = sum(rank in blow.replaced for _, blow in plan) - kept.count(rank)
        reported = [(fault["rank"], fault["kind"], fault["text"]) for fault in run.events("fault")]
        assert len(seen) == 1 + replaced, f"rank {rank} had processes {seen}: {reported}"


def kept_ranks(run):
    return [record["kept"] for record in run.events("plan") if record["kept"] is not None]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_an_exception_on_all_ranks_at_once_loses_no_step(fault_free, tmp_path, world):
    """One of them is kept as the source: nothing goes back to a checkpoint, and none was made."""
    steps = ("--max-steps", STEPS, "save_every_steps=0")
    # Nobody raises while a peer is still busy with the step before.
    raises = ("--inject", f"slow:rank=all,step=9,phase=forward,seconds={CATCH_UP_S}")
    raises += ("--inject", "raise:rank=all,step=9,phase=backward")
    for number in range(
        4
    ):  # on busy cores a rank may come so late that it is aborted before it raises
        with Run(tmp_path / f"{number}", *QUICK, *PATIENT, *steps, *raises, world=world) as run:
            assert run.wait() == 0, run.console
        assert run.digest == fault_free(world).digest
        faults = run.summary()["faults"]
        assert {fault["kind"] for fault in faults} == {"rank_raised"}
        assert sum(fault["steps_lost"] for fault in faults) == 0
        if len(run.events("plan")) == 1:
            break
    else:
        pytest.fail("the ranks never raised at once")
    kept = {record["rank"]: record["pid"] for record in run.events("rank_formed")}
    first = {record["rank"]: record["pid"] for record in reversed(run.events("rank_formed"))}
    assert sum(kept[rank] == first[rank] for rank in kept) == 1, "one process is kept"


def test_the_source_of_the_state_dies_while_it_sends(tmp_path):
    """Another survivor sends in its place: the replacement waits for nobody who is dead."""
    large = ("task.width=200000", "--max-steps", 9, "save_every_steps=0", *PATIENT)  # 30 MB
    # A spare that builds ahead has the memory that is watched here.
    large += ("recovery.warm_spare=process",)
    with Run(tmp_path / "fault_free", *QUICK, *large, *CHEAP, world=3) as run:
        assert run.wait() == 0, run.console
        digest = run.digest
    kill = ("--inject", "slow:rank=2,step=6,seconds=0.25")
    kill += ("--inject", "kill:rank=2,step=6,phase=backward")
    with Run(tmp_path / "faults", *QUICK, *large, *kill, "task.pace_s=0.05", world=3) as run:
        source = run.wait_for_event("rank_formed", rank=0, generation=1)["pid"]
        first = run.wait_for_event("rank_formed", rank=2, generation=1)["pid"]
        # Known before they form: looking for it takes as long as the state does.
        run.wait_for_event("plan")
        receiver = poll(lambda: successor_of(run, first, rank=2), what="the replacement")
        run.wait_for_event("forming", generation=2)
        before = resident_bytes(receiver)

        def arrives():  # or has arrived, where this process has not run meanwhile
            formed = [one["generation"] for one in run.events("rank_formed")]
            return resident_bytes(receiver) > before + 8_000_000 or 2 in formed

        poll(arrives, what="the state's arrival", every_s=0.001)
        run.signal(signal.SIGKILL, source)
        assert run.wait() == 0, run.console
    assert run.digest == digest
    faults = run.summary()["faults"]
    assert [(fault["rank"], fault["steps_lost"]) for fault in faults] == [(2, 0), (0, 0)]
    replaced = [record["replaced"] for record in run.events("plan")]
    assert replaced in ([[2], [0]], [[2], [0, 2]]), replaced


def successor_of(run, pid, *, rank):
    """The rank's new process; None while there is none."""
    named = [one.pid for one in run.processes() if one.name == f"ddp:rank{rank}"]
    return next((one for one in named if one != pid), None)


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:  # noqa: PTH123 - read often
        return int(file.read().split()[1]) * 4096


def test_slow_is_not_hung(tmp_path):
    """A rank many times slower, a long first step or evaluation, a pause of all: nothing is repaired."""
    settings = (
        *("--max-steps", 80, "num_workers=0", NO_SPARE),
        *("evaluate_every_steps=50", "task.validation_s=1.5"),
        *("--inject", "slow:rank=1,step=0,seconds=2"),
        # Slow beside peers that have a busy machine's own step of a tenth of a second, too.
        *("--inject", "slow:rank=1,step=4,times=40,seconds=0.1"),
        # Beyond the deadline, which is the shortest one by then: as if the machine had stood still.
        *(w for rank in (0, 1) for w in ("--inject", f"slow:rank={rank},step=76,seconds=1.6")),
    )
    with Run(tmp_path, *QUICK, *settings) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["faults"] == []
    assert list(summary["stragglers"]) == ["1"]
    assert sorted(summary["own_step_s"]) == ["0", "1"]
    assert max(summary["own_step_s"], key=summary["own_step_s"].get) == "1"


@pytest.mark.parametrize(
    ("find_unused", "limit", "seconds"),
    [(True, "collective_timeout_s=1", 2.5), (False, "form_timeout_s=2", 4)],
    ids=["in a step", "while forming"],
)
def test_who_compiles_alone_is_waited_for(tmp_path, find_unused, limit, seconds):
    """One rank's first forward outlasts what a collective or forming may take: nobody gives up."""
    settings = (
        *(
            "--max-steps",
            8,
            f"ddp.find_unused_parameters={find_unused}",
            "num_workers=0",
            limit,
            NO_SPARE,
        ),
        *("--inject", f"slow:rank=1,step=0,seconds={seconds}"),
    )
    with Run(tmp_path, *QUICK, *settings) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["faults"] == []


@pytest.mark.slow
def test_an_evaluation_of_twenty_seconds_is_not_a_hang(tmp_path):
    """With the default deadlines, which are ten times shorter than that for a step."""
    settings = ("-b", 8, "--max-steps", 20, "evaluate_interval=0", "task.validation_s=10")
    with Run(tmp_path, *settings, world=2) as run:
        assert run.wait(90.0) == 0, run.console
    summary = run.summary()
    assert summary["faults"] == []
    assert summary["time_s"]["evaluation"] > 19.0
