"""Settings of how a run is kept going: process group, memory, checkpoints, logs, recovery."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic.dataclasses import dataclass

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    DERIVED,
    NAMES,
    NUMBER,
    PER_MACHINE,
    PER_STAGE,
    REPORTED,
    SECTION,
    WHOLE,
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
    Text,
    Texts,
)

STOPPED_MAX_S = 2.0  # that the system may hold a process stopped, however long others may take


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class DdpSettings:
    """DistributedDataParallel and its process group."""

    backend: Annotated[
        Literal["auto", "gloo", "nccl", "nccl2"], REPORTED, DERIVED, Alias("ddp_backend")
    ] = "auto"
    """The library for collectives. auto: nccl on GPUs, gloo on the CPU. nccl2: torch's newer class for NCCL
    (ProcessGroupNCCL2, from torch 2.14), which no GPU has tried with this package; nccl is the older one."""
    find_unused_parameters: Annotated[
        Switch | Literal["auto"], CANNOT_MATTER, PER_STAGE, Alias("ddp_find_unused_parameters")
    ] = "auto"
    """Look in each step for parameters that the loss does not use. Without it, the first step that leaves
    one out is done again with it. auto: until relax_after_steps says that it is not needed. No bit depends on it."""
    relax_after_steps: Annotated[Positive, CANNOT_MATTER, PER_STAGE] = 200
    """With find_unused_parameters=auto: after so many steps in a row in which every rank used every
    parameter, the search ends."""
    static_graph: Annotated[Switch, CANNOT_MATTER, PER_STAGE] = False
    """Every step uses the same parameters in the same way: DDP does not look for unused ones, and a step
    that differs is done again with that search, which then stays."""
    gradient_dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], REPORTED, PER_STAGE] = "auto"
    """The type in which gradients are summed over ranks. auto: that in which they are computed. bf16 and
    fp16 halve what is sent, and round it."""
    sync_batchnorm: Annotated[Switch, REPORTED, PER_STAGE, Alias("sync_bn", "sync_batch_norm")] = (
        False
    )
    """Batch norm takes mean and variance over the batches of all ranks, on the CPU too. All ranks then run
    equally many micro-batches."""
    gradient_as_bucket_view: Annotated[
        Switch, CANNOT_MATTER, PER_STAGE, Alias("enable_gradient_as_bucket_view")
    ] = True
    """Let gradients be views of DDP's communication buckets, which saves a copy of them."""
    bucket_cap_mb: Annotated[Positive, REPORTED, PER_STAGE, Alias("ddp_bucket_cap_mb")] = 25
    """Size of a bucket of gradients that are summed together, in MB; of about 1,000 tensors at most."""
    collective_timeout_s: Annotated[Above0, CANNOT_MATTER, Alias("ddp_timeout")] = 60.0
    """Longest wait inside a collective, in seconds. It is raised to what the peers may take to load
    data and, where a supervisor watches, to evaluate or to save."""
    port: Annotated[
        int,
        Ge(0),
        Le(65_535),
        WHOLE,
        CANNOT_MATTER,
        PER_MACHINE,
        Alias("master_port", "main_process_port"),
    ] = 0
    """TCP port of the store, where ranks meet. 0: any free one."""


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class MemorySettings:
    """MemoryManager: when it looks and when it acts. Shares are of the smallest known limit."""

    memory_check_interval: Annotated[Positive, CANNOT_MATTER] = 10
    """Steps between looks at memory, of which there are at most ten a second."""
    cleanup_interval: Annotated[NonNegative, CANNOT_MATTER] = 500
    """Steps between garbage collections, which also empty the device's cache where memory is tight.
    0: memory is freed only when it is tight."""
    max_memory_gb: Annotated[Above0 | None, CANNOT_MATTER, PER_MACHINE] = None
    """Most host memory, in GB, that a rank with its loader workers may use. More counts as out of
    memory. none: no limit of its own."""
    regrow_micro_batch: Annotated[NonNegative, CANNOT_MATTER, PER_STAGE] = 0
    """Steps after the micro-batch was halved for lack of memory until twice its size is tried
    again. 0: it stays halved."""
    activation_checkpointing: Annotated[
        Literal["off", "all"] | Texts,
        CANNOT_MATTER,
        PER_STAGE,
        Alias(
            "gradient_checkpointing",
            "use_gradient_checkpointing",
            "enable_gradient_checkpointing",
            on="all",
            off="off",
        ),
    ] = "off"
    """Parts of the model that compute their activations again in backward instead of keeping them; the
    weights are the same. all: each block of a list of like modules, or what the model's own
    gradient_checkpointing_enable turns on. Or patterns of module names, or names of their classes:
    layers.*,head or UNetBlock."""
    warn_share: Annotated[Share, CANNOT_MATTER, PER_MACHINE] = 0.80
    """Share of the tightest memory limit (machine, container, max_memory_gb, device) in use from
    which a warning is logged."""
    react_share: Annotated[Share, CANNOT_MATTER, PER_MACHINE] = 0.90
    """Share in use from which memory is freed and the loader prefetches less."""
    limit_share: Annotated[Share, CANNOT_MATTER, PER_MACHINE] = 0.98
    """Share in use from which the log says that the limit is reached."""
    leak_window_steps: Annotated[int, Ge(20), WHOLE, CANNOT_MATTER] = 1000
    """Steps over which memory must grow steadily to be reported as a suspected leak."""
    leak_mb_per_1000_steps: Annotated[Above0, CANNOT_MATTER] = 50.0
    """Slowest growth that is reported as a suspected leak, in MB per 1000 steps."""


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class CheckpointSettings:
    """When state is saved and which files are kept."""

    save_interval: Annotated[NonNegative, CANNOT_MATTER, PER_STAGE, Alias("save_every_epochs")] = 1
    """Epochs between checkpoints. 0: none at the end of an epoch, as where save_every_steps is a number."""
    save_every_steps: Annotated[
        Literal["auto"] | NonNegative,
        CANNOT_MATTER,
        PER_STAGE,
        Alias("save_steps", "save_interval_steps"),
    ] = "auto"
    """Steps between checkpoints, in place of epochs. auto: besides those of epochs by time, from what a save
    costs and how often one was needed. 0: none by steps."""
    memory_every: Annotated[Literal["auto"] | NonNegative, CANNOT_MATTER] = "auto"
    """Steps between copies of the state in the supervisor's memory, to go on from where all ranks end at
    once. Each save makes one too. auto: by time, so that copies cost at most 0.5 % of it. 0: none, ever."""
    keep_last: Annotated[Positive, CANNOT_MATTER, Alias("save_total_limit")] = 3
    """How many of the newest checkpoints are kept; the best one is kept beside them."""
    keep_every: Annotated[NonNegative, CANNOT_MATTER] = 0
    """Steps between checkpoints that are kept for good, and saved for that. 0: none is."""
    only_trained: Annotated[Switch, CANNOT_MATTER] = False
    """Leave weights out of checkpoints that stay as the run has begun with them, as frozen ones beside
    adapters do. A resume then needs that begin again: the same init_from."""
    rescue_dir: Annotated[
        Text,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--rescue-dir",
            group=OptionGroup.FILES,
            metavar="DIR",
            says="for a last save that the checkpoints' disk refuses; otherwise the logs",
        ),
    ] = ""
    """The folder for the last save of a run if the checkpoint folder refuses it. Empty: the log folder."""
    after_save: Annotated[Text | None, CANNOT_MATTER, PER_MACHINE] = None
    """A command for the shell that is run for each checkpoint, beside training and one at a time, such as
    rclone copy {path} remote:runs. If several come meanwhile, the newest is next. What fails is a warning.
    none: no command."""
    after_save_grace_s: Annotated[AtLeast0, CANNOT_MATTER, PER_MACHINE] = 30.0
    """How long after_save may go on once the run has ended, in seconds; then it is killed."""
    monitor: Annotated[Text, CANNOT_MATTER, PER_STAGE, Alias("metric_for_best_model")] = "auto"
    """The figure that decides which checkpoint is the best: train_loss, or one that evaluations give, such as
    validation_loss or bach/accuracy. auto: the loss of the first validation data, or train_loss without."""
    mode: Annotated[
        Literal["min", "max"],
        CANNOT_MATTER,
        PER_STAGE,
        Alias("greater_is_better", on="max", off="min"),
    ] = "min"
    """Which value of monitor is the best. max: the highest, as of an accuracy; refused for a loss."""


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class LogSettings:
    """Metrics, evaluations, trackers and the live page: what is written and shown, and how often."""

    log_interval: Annotated[
        Positive, CANNOT_MATTER, PER_STAGE, Alias("logging_steps", "log_every_n_steps")
    ] = 10
    """Steps between lines of metrics."""
    evaluate_interval: Annotated[
        NonNegative,
        CANNOT_MATTER,
        PER_STAGE,
        Alias("check_val_every_n_epoch", "evaluate_every_epochs"),
    ] = 1
    """Epochs between evaluations. 0: none at the end of an epoch, as with evaluate_every_steps; one at the
    end of the run."""
    evaluate_every_steps: Annotated[
        NonNegative, CANNOT_MATTER, PER_STAGE, Alias("eval_interval", "valid_interval_steps")
    ] = 0
    """Steps between evaluations, in place of epochs. 0: none by steps."""
    evaluate_batches: Annotated[NonNegative, CANNOT_MATTER, PER_STAGE, Alias("eval_batches")] = 0
    """Batches of batch_size that each rank evaluates. 0: the whole validation data."""
    evaluate_at_start: Annotated[Switch, CANNOT_MATTER, PER_STAGE, Alias("eval_on_start")] = False
    """Evaluate also before the first step of the run, and of each stage."""
    display: Annotated[Literal["auto", "live", "plain", "none"], CANNOT_MATTER, PER_MACHINE] = (
        "auto"
    )
    """What the console shows. auto: live on a terminal, otherwise plain lines."""
    profile: Annotated[
        Text | None,
        CANNOT_MATTER,
        Option(
            "--profile",
            group=OptionGroup.TRYING_OUT,
            metavar="steps=A:B[,memory]",
            default="none",
            says="write a torch trace and a table of operations of these steps, for each rank",
        ),
    ] = None
    """Steps, counted from 1, of which each rank writes a trace of torch's profiler and a table of its
    operations: steps=10:15. With ,memory also the allocator's history, of a GPU. none: no steps."""
    phase_times: Annotated[Switch, CANNOT_MATTER] = False
    """Add to the metrics how long data, forward, backward, communication and optimizer of a step take. On
    GPUs each is waited for, which costs time."""
    trackers: Annotated[
        tuple[Literal["csv", "tensorboard", "wandb"], ...],
        NAMES,
        CANNOT_MATTER,
        PER_MACHINE,
        Alias("report_to"),
    ] = ()
    """Where metrics are written beside metrics.jsonl, by processes that are no ranks. csv: metrics.csv.
    tensorboard, wandb: of these, each an extra of that name. Empty: nowhere."""
    gpu_watch_s: Annotated[
        AtLeast0, CANNOT_MATTER, PER_MACHINE, Alias("enable_gpu_monitoring", off="0")
    ] = 5.0
    """Seconds between looks at what GPUs and ranks use: memory, temperature, power, clocks, CPU. 0: none."""
    page: Annotated[
        Switch,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--page",
            group=OptionGroup.FILES,
            says="show the run in a browser, live; needs the extra page",
        ),
    ] = False
    """Serve the live page beside the run, on this machine, by a process that is no rank and ends with the
    run. Needs the extra page; without it the run goes on."""
    page_port: Annotated[int, Ge(1), Le(65_535), WHOLE, CANNOT_MATTER, PER_MACHINE] = 8080
    """TCP port of that page, or the next one that is free."""
    page_can_inject: Annotated[
        Switch,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--page-can-inject",
            group=OptionGroup.FILES,
            says="let that page end or stop ranks, to see them replaced",
        ),
    ] = False
    """Let that page end or stop ranks and loader workers, to see them replaced."""


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class RecoverySettings:
    """How much is repaired before giving up."""

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
    """How often the run may go back so, halving the learning rate each time, before it fails."""
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
    drill_at: Annotated[Positives | None, CANNOT_MATTER] = (2, 50, 1000)
    """Steps, counted from where this launch began, at which a process like a replacement computes one
    rank's share once more beside the run, to prove that a repair is exact. none: no such drill."""
    require_exact: Annotated[Switch, CANNOT_MATTER] = False
    """End a run once it is not exact: its state is saved, exit code 1."""

    @property
    def stopped_max_s(self) -> float:
        """How long the system may hold a process stopped: what it says is certain, so less than hang_min_s."""
        return min(self.hang_min_s, STOPPED_MAX_S)
