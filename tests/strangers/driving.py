"""Runs a stranger's task, alone or with one fault after the other, and judges what has become of it."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.hashed_names import NAME_SEED
from tests.scenarios.harness import NO_DRILLS, Run
from tests.strangers.table import EXACT, REFUSED, REPORTED, Stranger

STEPS = 24  # of six an epoch
STOPPED_AT = 16
WORLD = 2
LIMIT_S = 120.0
SETTINGS = (
    *("-b", 4, "--max-steps", STEPS, "save_every_steps=5", "save_interval=0", "--audit"),
    *("learning_rate=0.05", "warmup_steps=0", "schedule=constant", "log.display=plain"),
    *("recovery.hang_min_s=20", "recovery.max_restarts=20", "recovery.drill_at=2,50,1000"),
)
# By name: what is injected. A save has had the time to end before everybody is killed.
FORWARD = ("kill:rank=1,step=5,phase=forward",)
REDUCE = ("kill:rank=0,step=8,phase=reducing",)
COMMIT = ("kill:rank=1,step=10,phase=commit",)
ALL = ("slow:rank=0,step=12,phase=data,seconds=0.3", "kill:rank=all,step=13,phase=backward")
# A run that nothing happens to needs no spare, and no checkpoint but its last.
CALM = ("recovery.warm_spare=false", "save_every_steps=0")
# Somebody has the time to ask for a stop.
SLOW = (f"slow:rank=0,step={STOPPED_AT},phase=data,seconds=1",)
INJECTED = {
    "fault_free": (),
    "forward": FORWARD,
    "reduce": REDUCE,
    "commit": COMMIT,
    "all": ALL,
    "stop": SLOW,
    "everything": (*FORWARD, *REDUCE, *COMMIT, *ALL, *SLOW),
}
STOPPED = ("stop", "everything")
# A drill at step 2 ends before anybody is killed; the steps of real tasks take longer than these.
PACED = (
    "slow:rank=all,step=4,phase=data,seconds=0.5",  # its state is written
    "slow:rank=all,step=5,phase=data,seconds=2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, with all its launches."""

    exit_code: int
    is_exact: bool
    reasons: tuple[str, ...]
    digest: str | None
    steps: int
    killed: int  # ranks, as the faults of its launches say
    all_dead: int  # incidents after which nobody had the state
    console: str
    has_stepped: bool  # at least once, in its last launch


def run(
    stranger: Stranger,
    folder: Path,
    *,
    how: str = "fault_free",
    workers: int = 0,
    drills: bool = True,
    spare: bool = True,
) -> Outcome:
    """Train to the end: through what ``how`` injects, and stopped and started again where it says so."""
    calm = () if INJECTED[how] else CALM
    if not spare:
        calm = (*calm, "recovery.warm_spare=false")
    if not drills:
        calm = (*calm, NO_DRILLS)
    settings = (*SETTINGS, f"num_workers={workers}", *calm, *stranger.settings)
    paced = PACED if stranger.is_drilled else ()
    injected = [word for spec in (*paced, *INJECTED[how]) for word in ("--inject", spec)]
    first, second = stranger.hash_seeds or ("", "")
    faults = []
    with _launch(stranger, folder, (*settings, *injected), first) as launch:
        if how in STOPPED and _comes_to(launch, STOPPED_AT):
            launch.signal(signal.SIGTERM)
        code = launch.wait(LIMIT_S)
        faults += _faults(launch)
        console, has_stepped = launch.console, launch.committed() > 0
    if how in STOPPED and code == 75:
        with _launch(stranger, folder, settings, second) as launch:
            code = launch.wait(LIMIT_S)
            console, has_stepped = console + launch.console, launch.committed() > 0
    summary = _summary(launch)
    return Outcome(
        exit_code=code,
        is_exact=bool(summary.get("exact")),
        reasons=tuple(summary.get("inexact_reasons", ())),
        digest=summary.get("weights_sha256"),
        steps=summary.get("steps", 0),
        killed=sum(fault["kind"] == "rank_killed" for fault in faults),
        all_dead=sum(bool(fault["all_ranks_dead"]) for fault in faults),
        console=console,
        has_stepped=has_stepped,
    )


def _launch(stranger, folder, settings, hash_seed):
    variables = {NAME_SEED: hash_seed} if hash_seed else None
    return Run(folder, *settings, world=WORLD, task=stranger.spec, variables=variables)


def _comes_to(launch, step):
    """Whether the run gets there; one that ends before is judged by how it ended."""
    try:
        launch.wait_for_step(step)
    except AssertionError:
        if launch.process.poll() is None:
            raise
        return False
    return True


def _summary(launch):
    try:
        return launch.summary()
    except (OSError, json.JSONDecodeError):
        return {}


def _faults(launch):
    return _summary(launch).get("faults", [])


def verdict(stranger: Stranger, outcome: Outcome, *, calm: Outcome) -> str:
    """What became of a run: ``exact``, ``reported`` or ``refused``; else ``wrong``, and how.

    ``calm`` is a run of the same task without a fault.
    """
    found = _found(stranger, outcome, calm)
    if found.startswith("wrong") or found in stranger.allowed:
        return found
    return f"wrong: {found}, which is not what the table allows; {_said(outcome)}"


def _found(stranger: Stranger, outcome: Outcome, calm: Outcome) -> str:  # noqa: PLR0911 - a row a case
    if outcome.exit_code == 2:
        if outcome.has_stepped:
            return f"wrong: refused in the middle of the run; {_said(outcome)}"
        lines = outcome.console.lower()
        is_named = any(word in lines for word in stranger.words)
        return REFUSED if is_named else f"wrong: refused, but not by name; {_said(outcome)}"
    if outcome.exit_code != 0:
        return f"wrong: exit {outcome.exit_code}; {_said(outcome)}"
    if outcome.steps != STEPS:
        return f"wrong: {outcome.steps} steps"
    if outcome.is_exact:
        if outcome.digest == calm.digest:
            return EXACT
        return "wrong: exact, it says, and the weights are others"
    reasons = "; ".join(outcome.reasons)
    if any(word in reasons.lower() for word in stranger.words):
        return REPORTED
    return f"wrong: not exact, and the reason does not name it: {reasons}"


def _said(outcome: Outcome) -> str:
    lines = [line for line in outcome.console.splitlines() if line.strip()]
    marked = [line for line in lines if "error" in line.lower() or "refus" in line.lower()]
    return " | ".join((marked or lines)[-3:])[-600:]
