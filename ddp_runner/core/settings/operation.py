"""Settings of how a run is kept going: process group, memory, checkpoints, logs."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic.dataclasses import dataclass

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    DERIVED,
    NAMES,
    PER_MACHINE,
    PER_STAGE,
    REPORTED,
    SECTION,
    WHOLE,
    Above0,
    Alias,
    AtLeast0,
    NonNegative,
    Option,
    OptionGroup,
    Positive,
    Share,
    Switch,
    Text,
    Texts,
)


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
    console: Annotated[
        Literal["quiet", "normal", "verbose"],
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--verbose",
            short="-v",
            group=OptionGroup.TRYING_OUT,
            constant="verbose",
            says="show more on the console: drills, intervals, what is tried",
        ),
        Option(
            "--quiet",
            short="-q",
            group=OptionGroup.TRYING_OUT,
            constant="quiet",
            says="show only warnings, errors and the last lines",
        ),
    ] = "normal"
    """How much the console shows. verbose: also passed drills, chosen intervals and what is tried. quiet: only warnings,
    errors and the lines at the end. The log files are the same."""
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
