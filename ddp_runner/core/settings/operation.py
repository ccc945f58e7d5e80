"""Settings of how a run is kept going: process group, memory, checkpoints, logs."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    DERIVED,
    NAMES,
    PER_MACHINE,
    PER_STAGE,
    REPORTED,
    WHOLE,
    Above0,
    Alias,
    AtLeast0,
    NonNegative,
    Option,
    OptionGroup,
    Positive,
    Section,
    Share,
    Switch,
    Text,
    Texts,
    at_least,
    at_most,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSettings(Section):
    """DistributedDataParallel and its process group."""

    backend: Annotated[
        Literal["auto", "gloo", "nccl", "nccl2"], REPORTED, DERIVED, Alias("ddp_backend")
    ] = "auto"
    """Communication library. auto: nccl on GPUs, gloo on the CPU. nccl2: torch's newer class for NCCL
    (ProcessGroupNCCL2, from torch 2.14), not yet tried on a GPU with this package."""
    find_unused_parameters: Annotated[
        Switch | Literal["auto"], CANNOT_MATTER, PER_STAGE, Alias("ddp_find_unused_parameters")
    ] = "auto"
    """Search for parameters that the loss does not use in a step. If it is off and a step leaves one out, that step
    is repeated with the search on. auto: on until relax_after_steps turns it off. The weights do not depend on
    it."""
    relax_after_steps: Annotated[Positive, CANNOT_MATTER, PER_STAGE] = 200
    """Consecutive steps in which every rank used every parameter before find_unused_parameters=auto stops
    searching."""
    static_graph: Annotated[Switch, CANNOT_MATTER, PER_STAGE] = False
    """Assume that every step uses the same parameters in the same way, so that DDP does not search for unused ones.
    A step that differs is repeated with that search, which then stays on."""
    gradient_dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], REPORTED, PER_STAGE] = "auto"
    """Data type in which gradients are summed over ranks. auto: the type in which they are computed. bf16 and fp16
    halve the traffic and round the gradients."""
    sync_batchnorm: Annotated[Switch, REPORTED, PER_STAGE, Alias("sync_bn", "sync_batch_norm")] = (
        False
    )
    """Compute the mean and variance of batch norm over the batches of all ranks, on the CPU too. All ranks then run
    the same number of micro-batches."""
    gradient_as_bucket_view: Annotated[
        Switch, CANNOT_MATTER, PER_STAGE, Alias("enable_gradient_as_bucket_view")
    ] = True
    """Make gradients views of DDP's communication buckets, which saves one copy of them."""
    bucket_cap_mb: Annotated[Positive, REPORTED, PER_STAGE, Alias("ddp_bucket_cap_mb")] = 25
    """Size in MB of a bucket of gradients that are summed together. A bucket holds at most about 1,000 tensors."""
    collective_timeout_s: Annotated[Above0, CANNOT_MATTER, Alias("ddp_timeout")] = 60.0
    """Time limit of one collective, in seconds. It is raised to the time that other ranks may take to load data
    and, under a supervisor, to evaluate or to save."""
    port: Annotated[
        int,
        at_least(0),
        at_most(65_535),
        WHOLE,
        CANNOT_MATTER,
        PER_MACHINE,
        Alias("master_port", "main_process_port"),
    ] = 0
    """TCP port of the store where ranks meet. 0: any free port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings(Section):
    """MemoryManager: when it looks and when it acts. Shares are of the smallest known limit."""

    memory_check_interval: Annotated[Positive, CANNOT_MATTER] = 10
    """Steps between memory checks, of which there are at most two a second."""
    cleanup_interval: Annotated[NonNegative, CANNOT_MATTER] = 500
    """Steps between garbage collections, which also empty the device's cache if memory is tight. 0: free memory
    only when it is tight."""
    max_memory_gb: Annotated[Above0 | None, CANNOT_MATTER, PER_MACHINE] = None
    """Limit of host memory, in GB, for a rank with its loader workers. A rank above it is out of memory. none: no
    extra limit."""
    regrow_micro_batch: Annotated[NonNegative, CANNOT_MATTER, PER_STAGE] = 0
    """Steps after an out-of-memory repair halved the micro-batch before twice its size is tried again. 0: it stays
    halved."""
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
    """Parts of the model that recompute their activations in backward instead of storing them; the weights are the
    same. all: each block of a list of like modules, or the modules that the model's gradient_checkpointing_enable()
    turns on. Or patterns of module names, or class names: layers.*,head or UNetBlock."""
    warn_share: Annotated[Share, CANNOT_MATTER, PER_MACHINE] = 0.80
    """Share of the tightest memory limit (machine, container, max_memory_gb, device) at which a warning is
    logged."""
    react_share: Annotated[Share, CANNOT_MATTER, PER_MACHINE] = 0.90
    """Share of the limit at which memory is freed and the loader prefetches less."""
    limit_share: Annotated[Share, CANNOT_MATTER, PER_MACHINE] = 0.98
    """Share of the limit at which the log says that the limit is reached."""
    leak_window_steps: Annotated[int, at_least(20), WHOLE, CANNOT_MATTER] = 1000
    """Steps over which memory must grow steadily to be reported as a suspected leak."""
    leak_mb_per_1000_steps: Annotated[Above0, CANNOT_MATTER] = 50.0
    """Slowest growth that is reported as a suspected leak, in MB per 1,000 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings(Section):
    """When state is saved and which files are kept."""

    save_interval: Annotated[NonNegative, CANNOT_MATTER, PER_STAGE, Alias("save_every_epochs")] = 1
    """Epochs between checkpoints. 0: no checkpoint at the end of an epoch. 0 is also the default if
    save_every_steps is a number."""
    save_every_steps: Annotated[
        Literal["auto"] | NonNegative,
        CANNOT_MATTER,
        PER_STAGE,
        Alias("save_steps", "save_interval_steps", "save_every"),
    ] = "auto"
    """Steps between checkpoints, in place of epochs. auto: checkpoints at intervals of time, in addition to those
    of epochs; the interval follows from the cost of a save and the frequency of faults. 0: no checkpoints by
    steps."""
    memory_every: Annotated[Literal["auto"] | NonNegative, CANNOT_MATTER] = "auto"
    """Steps between copies of the state in the supervisor's memory, from which the run resumes if all ranks end at
    once. Each save makes one too. auto: at intervals of time, so that copies take at most 0.5 % of the run. 0: no
    copies."""
    keep_last: Annotated[Positive, CANNOT_MATTER, Alias("save_total_limit")] = 3
    """Number of newest checkpoints to keep, in addition to the best one."""
    keep_every: Annotated[NonNegative, CANNOT_MATTER] = 0
    """Steps between checkpoints that are saved and never deleted. 0: none."""
    only_trained: Annotated[Switch, CANNOT_MATTER] = False
    """Leave weights that never change, such as those of a frozen base model, out of checkpoints. A resume then
    needs the same init_from again."""
    rescue_dir: Annotated[
        Text,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--rescue-dir",
            group=OptionGroup.FILES,
            metavar="DIR",
            says="folder for the final checkpoint if the checkpoint disk is full [log folder]",
        ),
    ] = ""
    """Folder for the final checkpoint if the checkpoint folder cannot be written. Empty: the log folder."""
    after_save: Annotated[Text | None, CANNOT_MATTER, PER_MACHINE] = None
    """Shell command that runs for each checkpoint, one at a time and in the background, such as rclone copy {path}
    remote:runs. If several checkpoints are waiting, the newest is next. A failure is a warning. none: no
    command."""
    after_save_grace_s: Annotated[AtLeast0, CANNOT_MATTER, PER_MACHINE] = 30.0
    """Time that after_save may still take once the run has ended, in seconds; then it is killed."""
    monitor: Annotated[Text, CANNOT_MATTER, PER_STAGE, Alias("metric_for_best_model")] = "auto"
    """Metric that decides which checkpoint is the best: train_loss, or one that evaluations report, such as
    validation_loss or bach/accuracy. auto: the loss of the first validation data, or train_loss if there is
    none."""
    mode: Annotated[
        Literal["min", "max"],
        CANNOT_MATTER,
        PER_STAGE,
        Alias("greater_is_better", on="max", off="min"),
    ] = "min"
    """Direction of monitor: the lowest (min) or the highest (max) value is the best. max is refused for a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings(Section):
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
    """Epochs between evaluations. 0: only at the end of the run, not at the end of each epoch. 0 is also the
    default if evaluate_every_steps is set."""
    evaluate_every_steps: Annotated[
        NonNegative,
        CANNOT_MATTER,
        PER_STAGE,
        Alias("eval_interval", "valid_interval_steps", "eval_every"),
    ] = 0
    """Steps between evaluations, in place of epochs. 0: no evaluations by steps."""
    evaluate_batches: Annotated[NonNegative, CANNOT_MATTER, PER_STAGE, Alias("eval_batches")] = 0
    """Batches of batch_size that each rank evaluates. 0: the whole validation data."""
    evaluate_at_start: Annotated[Switch, CANNOT_MATTER, PER_STAGE, Alias("eval_on_start")] = False
    """Evaluate before the first step of the run, and of each stage, too."""
    display: Annotated[Literal["auto", "live", "plain", "none"], CANNOT_MATTER, PER_MACHINE] = (
        "auto"
    )
    """Form of the console output: live (a display that refreshes in place) or plain lines. auto: live on a
    terminal, otherwise plain lines."""
    console: Annotated[
        Literal["quiet", "normal", "verbose"],
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--verbose",
            short="-v",
            group=OptionGroup.TRYING_OUT,
            constant="verbose",
            says="show drills, chosen intervals and attempts on the console",
        ),
        Option(
            "--quiet",
            short="-q",
            group=OptionGroup.TRYING_OUT,
            constant="quiet",
            says="show only warnings, errors and the last lines",
        ),
    ] = "normal"
    """Amount of console output. verbose adds passed drills, chosen intervals and attempts. quiet shows only
    warnings, errors and the last lines. The log files are the same."""
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
    """Steps, counted from 1, for which each rank writes a trace of torch's profiler and a table of operations:
    steps=10:15. ,memory adds the allocator's history of a GPU. none: no steps."""
    phase_times: Annotated[Switch, CANNOT_MATTER] = False
    """Add to the metrics the time of data, forward, backward, communication and optimizer in a step. On GPUs each
    phase is synchronized, which costs time."""
    trackers: Annotated[
        tuple[Literal["csv", "tensorboard", "wandb", "mlflow"], ...],
        NAMES,
        CANNOT_MATTER,
        PER_MACHINE,
        Alias("report_to"),
    ] = ()
    """Destinations of metrics in addition to metrics.jsonl, each written by its own process. csv writes
    metrics.csv. The others each need the extra of that name. Empty: none."""
    gpu_watch_s: Annotated[
        AtLeast0, CANNOT_MATTER, PER_MACHINE, Alias("enable_gpu_monitoring", off="0")
    ] = 5.0
    """Seconds between readings of GPUs and ranks: memory, temperature, power, clocks, CPU. 0: none."""
    page: Annotated[
        Switch,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--page",
            aliases=("--dashboard",),
            group=OptionGroup.FILES,
            says="show the run live in a browser; needs the extra page",
        ),
    ] = False
    """Serve the live page on this machine, in a separate process that ends with the run. It needs the extra page;
    without it the run trains without a page."""
    page_port: Annotated[int, at_least(1), at_most(65_535), WHOLE, CANNOT_MATTER, PER_MACHINE] = (
        8080
    )
    """TCP port of the live page. If it is taken, the next free port is used."""
    page_can_inject: Annotated[
        Switch,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--page-can-inject",
            group=OptionGroup.FILES,
            says="allow the page to end or stop ranks, to show how they are replaced",
        ),
    ] = False
    """Allow the live page to end or stop ranks and loader workers, to show how they are replaced."""
