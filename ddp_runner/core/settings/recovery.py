"""The settings of a repair: how long is waited for whom, and how often is tried again before giving up."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    NUMBER,
    PER_MACHINE,
    Above0,
    Above1,
    Alias,
    AtLeast0,
    DeviceDefault,
    NonNegative,
    Number,
    Option,
    OptionGroup,
    Positive,
    Positives,
    Section,
    Share,
    Switch,
    above,
    at_least,
    at_most,
)

STOPPED_MAX_S = 2.0  # that the system may hold a process stopped, however long others may take


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings(Section):
    """Limits how much is repaired before the run gives up."""

    max_restarts: Annotated[
        NonNegative,
        CANNOT_MATTER,
        Option(
            "--max-restarts",
            group=OptionGroup.KEEPING_GOING,
            metavar="N",
            says="number of repairs within an hour before the run gives up",
        ),
    ] = 10
    """Repairs allowed within restart_window_s. With one more the run gives up (exit code 3)."""
    restart_window_s: Annotated[Above0, CANNOT_MATTER] = 3600.0
    """Time over which repairs and the faults of a rank are counted, in seconds."""
    no_progress_generations: Annotated[Positive, CANNOT_MATTER] = 3
    """Limit for repairs without progress. The run gives up after this many consecutive repairs of the same cause,
    or this many faults of its own, with no committed step between them."""
    min_ranks: Annotated[
        NonNegative,
        CANNOT_MATTER,
        Option(
            "--min-ranks",
            group=OptionGroup.KEEPING_GOING,
            metavar="N",
            says="smallest number of ranks to continue with when a rank keeps failing; 0: all",
        ),
    ] = 0
    """Smallest number of ranks with which the run continues when others keep failing. 0: all ranks are needed."""
    slot_failures_max: Annotated[Positive, CANNOT_MATTER] = 3
    """Faults of one rank within restart_window_s after which it is given up, if min_ranks is set."""
    regrow_after: Annotated[
        AtLeast0,
        CANNOT_MATTER,
        Option(
            "--regrow-after",
            group=OptionGroup.KEEPING_GOING,
            metavar="SECONDS",
            says="time before a rank that was given up is tried again; 0: never",
        ),
        Alias("regrow_after_s"),
    ] = 0.0
    """Seconds before a rank that was given up is tried again; the time doubles after each failed return. 0:
    never."""
    backoff_first_s: Annotated[AtLeast0, CANNOT_MATTER] = 0.0
    """Wait before the first repair of a cause, in seconds. Before further repairs of the same cause the wait
    doubles, from half a second or from this value if it is larger."""
    backoff_max_s: Annotated[AtLeast0, CANNOT_MATTER] = 30.0
    """Longest wait before a repair, in seconds."""
    startup_timeout_s: Annotated[Above0, CANNOT_MATTER, PER_MACHINE] = 600.0
    """Time limit for the start of a process, in seconds: imports, model, data and resumed state. While samples are
    preloaded, the time counts from the newest sample."""
    # On GPUs a generation that was left may take 30 s to be let go, and making communicators some more.
    form_timeout_s: Annotated[Above0, CANNOT_MATTER, DeviceDefault(gpu=120.0)] = 60.0
    """Time limit for the ranks to form a process group and agree on the state, in seconds."""
    node_silent_s: Annotated[float, at_least(1), NUMBER, CANNOT_MATTER] = 3.0
    """Seconds without a message after which a machine counts as lost, with several machines."""
    node_patience_s: Annotated[AtLeast0, CANNOT_MATTER] = 30.0
    """Time to wait for a lost machine before the run continues with fewer, in seconds."""
    coordinator_wait_s: Annotated[AtLeast0, CANNOT_MATTER, PER_MACHINE] = 120.0
    """Time for which a machine looks for a lost coordinator, in seconds. After it the machine ends with exit code
    75."""
    elect_coordinator: Annotated[Switch, CANNOT_MATTER, PER_MACHINE] = False
    """Let a majority of three or more machines, each with its own checkpoint folder, choose another coordinator if theirs
    is lost. Give it to every machine. Experimental: only a majority of the machines can then train."""
    warm_spare: Annotated[Switch | Literal["process", "model"], CANNOT_MATTER, PER_MACHINE] = True
    """Keep a spare process ready to replace a lost rank. On the CPU: process has imported torch and the task; model
    has also built data and model, in a rank's memory; true means model if building takes 0.1 s or more and needs at
    most a quarter of the free memory. On GPUs the spare has loaded CUDA's libraries and holds no GPU memory."""
    hang_min_s: Annotated[Above0, CANNOT_MATTER] = 10.0
    """Shortest time without progress after which a rank may be called hung, in seconds. A rank that the system
    holds stopped is found within two seconds. A rank that loads its samples itself has data.loader_timeout_s."""
    hang_factor: Annotated[Above1, CANNOT_MATTER] = 10.0
    """Multiple of the slowest recent step after which a rank is hung, if that is longer than hang_min_s."""
    first_step_timeout_s: Annotated[Above0, CANNOT_MATTER] = 600.0
    """Time limit for each of the first three steps of a process, in seconds: compilation, caches, device start."""
    evaluation_timeout_s: Annotated[Above0, CANNOT_MATTER] = 1800.0
    """Time limit without progress in an evaluation, in seconds."""
    checkpoint_timeout_s: Annotated[Above0, CANNOT_MATTER] = 600.0
    """Time limit, in seconds, for a save that training waits for, for the last save of a run, and for a save
    without progress."""
    stop_timeout_s: Annotated[Above0, CANNOT_MATTER] = 300.0
    """Time limit to finish the step and save after a request to stop, in seconds."""
    max_errors_per_epoch: Annotated[NonNegative, CANNOT_MATTER] = 10
    """Steps of an epoch that may be skipped because a loss or gradient is not finite or explodes. With one more the
    run rolls back to its newest checkpoint at half the learning rate."""
    rollbacks_max: Annotated[NonNegative, CANNOT_MATTER] = 2
    """Roll-backs of that kind before the run fails; each halves the learning rate. Roll-backs for wrong gradients are
    counted separately, up to the same number."""
    explosion_window: Annotated[NonNegative, CANNOT_MATTER] = 100
    """Steps after the warm-up with which the loss and gradient norm of a step are compared to detect an explosion.
    0: no detection."""
    explosion_loss_factor: Annotated[Above1, CANNOT_MATTER] = 10.0
    """Multiple of the window's median loss above which a loss, if it is also far outside the window's spread, is an
    explosion."""
    explosion_grad_factor: Annotated[Above1, CANNOT_MATTER] = 100.0
    """Multiple of the window's median gradient norm above which a norm is an explosion."""
    explosion_loss_max: Annotated[Number | None, CANNOT_MATTER] = None
    """Loss above which any step, the first included, is an explosion. none: no such threshold."""
    explosion_rate_factor: Annotated[float, above(0), at_most(1), NUMBER, CANNOT_MATTER] = 1.0
    """Factor for the learning rate after each explosion, in addition to the skipped step. 1: no change."""
    explosion_recover_steps: Annotated[Positive, CANNOT_MATTER] = 1000
    """Steps over which a rate lowered that way returns to its value, in equal parts."""
    replica_check_steps: Annotated[NonNegative, CANNOT_MATTER] = 500
    """Steps between comparisons of the ranks' weights, which are also compared before each save. 0: never, not even
    before a save."""
    drill_at: Annotated[
        Positives | None,
        CANNOT_MATTER,
        Option(
            "--no-proof",
            group=OptionGroup.KEEPING_GOING,
            constant="none",
            says="run no fire drills; the summary counts the repairs that are not proved",
        ),
    ] = (2, 50, 1000)
    """Steps of fire drills, counted from the start of this launch. In a drill a process like a replacement
    recomputes the share of one rank in the background, to prove that a repair is exact. A drill also follows each
    repair. none: no drills."""
    proof_share: Annotated[Share, CANNOT_MATTER] = 0.005
    """Share of the machine's time for further drills, at random steps of the run. 0: none."""
    on_wrong_gradient: Annotated[Literal["continue", "rollback", "stop"], CANNOT_MATTER] = (
        "rollback"
    )
    """Reaction to wrong gradients: rollback (to the newest checkpoint before the rank's last passed drill, at most
    rollbacks_max times), stop (exit code 1), continue (report only)."""
    require_exact: Annotated[Switch, CANNOT_MATTER] = False
    """End the run when it stops being exact: its state is saved, and the exit code is 1."""

    @property
    def stopped_max_s(self) -> float:
        """Seconds that the system may hold a process stopped; below hang_min_s, as such a report is certain."""
        return min(self.hang_min_s, STOPPED_MAX_S)
