"""The settings of a repair: how long is waited for whom, and how often is tried again before giving up."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic.dataclasses import dataclass

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    NUMBER,
    PER_MACHINE,
    SECTION,
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
    Share,
    Switch,
)

STOPPED_MAX_S = 2.0  # that the system may hold a process stopped, however long others may take


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class RecoverySettings:
    """Limits how much is repaired before the run gives up."""

    max_restarts: Annotated[
        NonNegative,
        CANNOT_MATTER,
        Option(
            "--max-restarts",
            group=OptionGroup.KEEPING_GOING,
            metavar="N",
            says="repairs within an hour before giving up",
        ),
    ] = 10
    """Repairs within restart_window_s; with one more the run gives up (exit code 3)."""
    restart_window_s: Annotated[Above0, CANNOT_MATTER] = 3600.0
    """The time over which repairs and a rank's faults are counted, in seconds."""
    no_progress_generations: Annotated[Positive, CANNOT_MATTER] = 3
    """The run gives up after so many repairs in a row with the same cause, or after as many faults
    of its own, without a committed step in between."""
    min_ranks: Annotated[
        NonNegative,
        CANNOT_MATTER,
        Option(
            "--min-ranks",
            group=OptionGroup.KEEPING_GOING,
            metavar="N",
            says="go on with so few when a rank keeps failing; 0: only with all",
        ),
    ] = 0
    """The run goes on with so few ranks when others keep failing. 0: only with all."""
    slot_failures_max: Annotated[Positive, CANNOT_MATTER] = 3
    """With min_ranks: a rank that caused so many faults within restart_window_s is given up."""
    regrow_after: Annotated[
        AtLeast0,
        CANNOT_MATTER,
        Option(
            "--regrow-after",
            group=OptionGroup.KEEPING_GOING,
            metavar="SECONDS",
            says="try a rank that was given up again after so long; 0: never",
        ),
        Alias("regrow_after_s"),
    ] = 0.0
    """Seconds until a rank that was given up is tried again, twice as long after each return that
    fails. 0: never."""
    backoff_first_s: Annotated[AtLeast0, CANNOT_MATTER] = 0.0
    """Seconds to wait before the first repair of a cause. Before the next ones of the same cause the
    wait doubles from half a second, or from this if it is more."""
    backoff_max_s: Annotated[AtLeast0, CANNOT_MATTER] = 30.0
    """Longest wait before a repair, in seconds."""
    startup_timeout_s: Annotated[Above0, CANNOT_MATTER, PER_MACHINE] = 600.0
    """Longest time for a process to start, in seconds: imports, model, data, what is resumed. While samples
    are preloaded it counts from the newest."""
    # On GPUs a generation that was left may take 30 s to be let go, and making communicators some more.
    form_timeout_s: Annotated[Above0, CANNOT_MATTER, DeviceDefault(gpu=120.0)] = 60.0
    """Longest time for the ranks to form a process group and agree on the state, in seconds."""
    node_silent_s: Annotated[float, Ge(1), NUMBER, CANNOT_MATTER] = 3.0
    """With several machines: one of which nothing is heard for so long is lost, in seconds."""
    node_patience_s: Annotated[AtLeast0, CANNOT_MATTER] = 30.0
    """How long a machine that was lost is waited for before the run goes on with fewer, in seconds."""
    coordinator_wait_s: Annotated[AtLeast0, CANNOT_MATTER, PER_MACHINE] = 120.0
    """How long a machine looks for a coordinator that was lost before it ends with exit code 75, in seconds."""
    warm_spare: Annotated[Switch | Literal["process", "model"], CANNOT_MATTER, PER_MACHINE] = True
    """Keep a process ready that becomes the next lost rank, and, once the process that forks was lost, one for
    that. On the CPU: process has torch and the task imported; model has also built data and model, in a rank's
    memory; true is model if building took 0.1 s and that is a quarter of what is free. On GPUs: CUDA's libraries
    are loaded, and no memory of a GPU is held."""
    hang_min_s: Annotated[Above0, CANNOT_MATTER] = 10.0
    """The shortest time without progress, in seconds, after which a rank may be called hung. One that the system
    holds stopped is found within two seconds; one that loads samples itself has data.loader_timeout_s."""
    hang_factor: Annotated[Above1, CANNOT_MATTER] = 10.0
    """A rank is hung after so many times the slowest recent step, if that is more than hang_min_s."""
    first_step_timeout_s: Annotated[Above0, CANNOT_MATTER] = 600.0
    """Longest time for each of the first three steps of a process, in seconds: compilation, caches,
    device start."""
    evaluation_timeout_s: Annotated[Above0, CANNOT_MATTER] = 1800.0
    """Longest time without progress in an evaluation, in seconds."""
    checkpoint_timeout_s: Annotated[Above0, CANNOT_MATTER] = 600.0
    """Longest time for a save that training waits for, the last one of a run, or one that does nothing, in seconds."""
    stop_timeout_s: Annotated[Above0, CANNOT_MATTER] = 300.0
    """Longest time to finish the step and save once the run was asked to stop, in seconds."""
    max_errors_per_epoch: Annotated[NonNegative, CANNOT_MATTER] = 10
    """Steps of an epoch that may be skipped because a loss or gradient is not finite or explodes.
    With one more the run goes back to its newest checkpoint at half the learning rate."""
    rollbacks_max: Annotated[NonNegative, CANNOT_MATTER] = 2
    """How often the run may go back so, halving the learning rate each time, before it fails. Roll-backs for wrong
    gradients are counted apart, up to the same number."""
    explosion_window: Annotated[NonNegative, CANNOT_MATTER] = 100
    """Steps after the warm-up that a step's loss and gradient norm are held against to recognize an
    explosion. 0: do not look for explosions."""
    explosion_loss_factor: Annotated[Above1, CANNOT_MATTER] = 10.0
    """A loss above so many times the window's median, and far outside its spread, is an explosion."""
    explosion_grad_factor: Annotated[Above1, CANNOT_MATTER] = 100.0
    """The same for the norm of the gradient."""
    explosion_loss_max: Annotated[Number | None, CANNOT_MATTER] = None
    """A loss above this is an explosion at any step, the first included. none: no such threshold."""
    explosion_rate_factor: Annotated[float, Gt(0), Le(1), NUMBER, CANNOT_MATTER] = 1.0
    """Each explosion multiplies the learning rate by this, beside that its step is skipped. 1: it does not."""
    explosion_recover_steps: Annotated[Positive, CANNOT_MATTER] = 1000
    """Steps over which such a lowered rate comes back, in equal parts."""
    replica_check_steps: Annotated[NonNegative, CANNOT_MATTER] = 500
    """Steps between comparisons of the ranks' weights, which are compared before each save too. 0:
    never, also not before a save."""
    drill_at: Annotated[
        Positives | None,
        CANNOT_MATTER,
        Option(
            "--no-proof",
            group=OptionGroup.KEEPING_GOING,
            constant="none",
            says="no fire drills; the run ends without them and counts the unproved repairs",
        ),
    ] = (2, 50, 1000)
    """Steps of a fire drill, counted from where this launch began: in the background, a process like a
    replacement recomputes one rank's share, to prove that a repair is exact. A drill also follows each repair.
    none: no drills."""
    proof_share: Annotated[Share, CANNOT_MATTER] = 0.005
    """Share of the machine's time for further drills, at random steps throughout the run. 0: no drills at random
    steps."""
    on_wrong_gradient: Annotated[Literal["continue", "rollback", "stop"], CANNOT_MATTER] = (
        "rollback"
    )
    """Reaction to wrong gradients: rollback (to the newest checkpoint before the rank's last passed drill, at most
    rollbacks_max times), stop (exit code 1), continue (report only)."""
    require_exact: Annotated[Switch, CANNOT_MATTER] = False
    """End a run once it is not exact: its state is saved, exit code 1."""

    @property
    def stopped_max_s(self) -> float:
        """Seconds that the system may hold a process stopped; below hang_min_s, as such a report is certain."""
        return min(self.hang_min_s, STOPPED_MAX_S)
