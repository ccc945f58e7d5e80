"""Every setting of a run: name, type, legal range, default and meaning, in one place. Reads nothing.

The defaults here are those of every task on every device; ``config`` lays what a built-in task or a device
has of its own, files, environment and command line over them, and checks how settings fit together. ``None`` means
"off", never "default". The text below each field is its meaning: ``--help-settings`` and the
documentation show it as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from ddp_runner.core.run_stages import StagePlace

_FROZEN = ConfigDict(extra="forbid", strict=False)


def _no_scratch(written: str) -> str:
    """``scratch`` is the word for no start weights, which wins over a file's."""
    return "" if written == "scratch" else written


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Duration = Annotated[float, Field(gt=0), "duration"]
# On several machines each has its own value. All other settings are the coordinator's on all of them.
STOPPED_MAX_S = 2.0  # that the system may hold a process stopped, however long others may take
PER_MACHINE = "per machine"
_Value = TypeVar("_Value")
PerMachine = Annotated[_Value, PER_MACHINE]
StartWeights = Annotated[str, AfterValidator(_no_scratch)]
StepsOrShare = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)]
JsonValue = str | int | float | bool | None | list[object] | dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class RunSettings:
    """What is run, how long, and where its files go."""

    task: str = "bytes"
    """What is trained: bytes, synthetic, FILE.py[:NAME] or module:NAME."""
    name: PerMachine[str] = "bytes"
    """The name of the run, which names its folders. Without one it is the task's name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """The seed of everything random: first weights, order of samples, augmentation, dropout."""
    epochs: Positive = 10
    """Passes over the training data. max_steps wins over it where that is not 0."""
    max_steps: NonNegative = 0
    """Optimizer steps of the whole run, resumes included. 0: as many as the epochs have."""
    max_time: Duration | None = None
    """Time of this launch, such as 23h30m, 90m or 3600 (seconds); then it saves and ends with exit code
    75. So it does before the end that SLURM has announced for its job. none: no limit."""
    target_loss: float | None = None
    """The run ends, complete, once the mean training loss of the last 20 steps is this or less."""
    early_stopping_patience: NonNegative = 0
    """The run ends, complete, after so many evaluations in a row that improve the figure of
    checkpoint.monitor by no more than early_stopping_min_delta. 0: it does not."""
    early_stopping_min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much better than the best a figure must be to count as an improvement."""
    load_best_at_end: bool = False
    """Have final.pt, and what a script is given, be of the best checkpoint, not of the last. Each new best is
    then saved where it was evaluated, which training waits for."""
    resume: str = "auto"
    """What to go on from. auto: the newest checkpoint, if there is one. last, best or the path
    of a checkpoint: that one, which must exist; later ones are moved to a backup folder. none: start
    fresh; all old checkpoints are moved to a backup folder."""
    init_from: StartWeights = ""
    """Weights to start from, on the very first start of the run only, and at each resume for what
    checkpoint.only_trained leaves out: a checkpoint (PATH:ema: its average), a state dict, safetensors, a
    folder of shards with their index, or hf://USER/NAME[@REVISION]. Empty or scratch: none."""
    init_strict: bool = True
    """All weights of the model must be in init_from, and no others. false: what fits is loaded, and the
    rest of the model is as the task has built it."""
    stage: str = ""
    """The stage to begin with, of those that a file lists as stages; a run that has come that far goes on,
    and begins it again with resume=none. Empty: the first."""
    log_dir: PerMachine[str] = "logs/bytes"
    """The folder for logs, metrics, status.json and summary.json."""
    checkpoint_dir: PerMachine[str] = "checkpoints/bytes"
    """The folder for checkpoints: the run resumes from it and saves to it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. auto: on GPUs if any is visible and usable, otherwise on the CPU."""
    gpus: PerMachine[tuple[NonNegative, ...]] = ()
    """The GPUs to use, counted as CUDA_VISIBLE_DEVICES counts them, one rank for each. Empty: every
    visible one. A GPU that is named twice is shared by two ranks over gloo, which is slow."""
    nproc_per_node: Literal["auto"] | Positive = "auto"
    """The number of ranks. auto: one per GPU, or up to 2 on the CPU."""
    mode: Literal["auto", "single", "data_parallel", "distributed"] = "auto"
    """How several devices are used. distributed: a rank for each. data_parallel: one rank shares each of
    its batches out over all. single: one rank on one device. auto: distributed where ranks can
    meet, else data_parallel, else single; the start block says why."""
    threads_per_rank: NonNegative = 0
    """Threads that one operation of torch uses in each rank. 0: OMP_NUM_THREADS where that is set, else the
    cores divided by the ranks, on GPUs at most 8."""
    allow_different_code: PerMachine[bool] = False
    """With several machines: let in one whose code is not the coordinator's. The run is then not exact."""
    audit: bool = False
    """Write the sample indices and the loss of each committed step to audit_rank_<r>.jsonl."""
    test: bool = False
    """A small run that ends in seconds, in folders of its own."""
    debug: bool = False
    """Write verbose logs and run extra checks. Slow."""
    detect_anomaly: bool = False
    """Turn on torch.autograd.set_detect_anomaly: an error in backward names the forward operation
    that it belongs to. Slow."""
    deterministic: bool = False
    """Use only GPU kernels that give the same bits each time. Without it a run on GPUs is not
    bit-exact; with it some operations are slower, and a few raise an error."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How exact torch multiplies matrices of float32. high: TF32 on GPUs that have it; medium: bf16.
    highest: as torch, or the task, has it."""
    channels_last: bool = False
    """Have the weights of convolutions in memory by channels last, which some GPUs compute faster."""
    compile: bool = False
    """Compile the model with torch.compile, in place: names in files stay. Where that fails on a rank, all
    go on without, with a warning."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """What torch.compile aims at. max-autotune times kernels and takes the fastest, and is not exact."""
    compile_fullgraph: bool = False
    """The model must compile into one graph; else that counts as a failure."""
    compile_dynamic: bool = False
    """Compile once for all sizes, which is not exact. Without it each shape has its own code."""
    inject: tuple[str, ...] = ()
    """Faults to cause on purpose, each written as KIND:KEY=VALUE,... (--help lists them)."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class ModelSettings:
    """The built-in Transformer language models; ``dataset_size`` and ``vocab_size`` shape the synthetic one."""

    vocab_size: Annotated[int, Field(ge=2)] = 1024
    """Tokens of the synthetic task's language. The task bytes always has 256."""
    dataset_size: Positive = 10_000
    """Training samples of the synthetic task."""
    seq_len: Annotated[int, Field(ge=2)] = 128
    """Tokens in a sample: bytes of text, for the task bytes."""
    hidden_size: Positive = 512
    """Width of the model; a multiple of num_heads."""
    num_layers: Positive = 6
    """The number of Transformer layers."""
    num_heads: Positive = 8
    """The number of attention heads in each layer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Probability that an activation is dropped while training."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class DataSettings:
    """What is read and how it is fed."""

    path: str = ""
    """File or folder of text that the task bytes learns. Empty: the sources of Python's standard library."""
    batch_size: Positive = 32
    """Samples of each rank before gradients are summed over ranks, or accumulated. The global batch is
    this times accumulation times the number of ranks, or times accumulation_total."""
    accumulation: Positive = 1
    """Batches of each rank in a step: a step has batch_size times so many samples of each rank."""
    accumulation_total: NonNegative = 0
    """Batches of all ranks together in a step, as pipelines count that divide them by the number of ranks: a
    multiple of it, unless shares part them. A step has batch_size times so many samples. 0: accumulation."""
    global_batch_size: NonNegative = 0
    """Samples of a step over all ranks, however many ranks there are: each has its part of them,
    in batches of at most batch_size. 0: as batch_size, accumulation and ranks have it."""
    micro_batch_size: NonNegative = 0
    """Samples in one forward pass, of a batch that is too large for one; gradients are accumulated.
    0: the whole batch_size at once."""
    shares: tuple[Positive, ...] | Literal["auto"] = ()
    """A number for each rank, such as 3,3,2 for devices of unequal speed: a step's samples are shared out in
    that proportion, and each counts the same. Empty: equal shares. auto: the first launch measures the ranks and
    proposes shares, which the next fresh start of the same name takes; a resume keeps those it began with."""
    evaluation_batch_size: NonNegative = 0
    """Samples that a rank evaluates at once. 0: batch_size."""
    num_workers: PerMachine[Literal["auto"] | NonNegative] = "auto"
    """Processes that load data, for each rank. auto: 2, or the rank's share of the cores if that is
    less. 0: the rank loads its own data."""
    workers_total: PerMachine[NonNegative | None] = None
    """Processes that load data, for all ranks of a machine together: shared out over them, the first ranks have
    the remainder. none: num_workers for each rank."""
    preload: bool = False
    """Read every sample once, at the start, into memory that all ranks share: for map-style data whose
    samples draw no random numbers. Validation data too."""
    prefetch_factor: PerMachine[Positive] = 2
    """Micro-batches that each loader worker prepares ahead."""
    pin_memory: PerMachine[bool] = True
    """Copy batches to the GPU from pinned host memory. It has no effect on the CPU."""
    loader_timeout_s: Seconds = 60.0
    """Longest wait for one batch, in seconds; then the loader's workers are replaced."""
    stream_end: Literal["wrap", "drop"] = "wrap"
    """Where shards of a stream end early. wrap: who has read all of its own begins again. drop: the epoch ends
    for all ranks at one step; the data must say how long its shards are (lengths)."""
    on_bad_sample: Literal["stop", "substitute"] = "stop"
    """What to do with a sample that cannot be loaded. stop: name it and end the run. substitute:
    train on another one in its place for good, and note it in quarantine.jsonl."""
    max_bad_samples: Positive = 10
    """Samples that may be substituted in a run, over all ranks; one more ends it."""
    compare_samples: Literal["stop", "tell", "off"] = "stop"
    """What to do where ranks, or a resumed run and its checkpoint, have different training data.
    stop: end the run, saved. tell: go on, not exact. off: do not compare."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text that the task bytes keeps for validation."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class OptimSettings:
    """Optimizer, schedule and precision."""

    optimizer: Literal["adamw", "adam", "sgd", "adafactor", "muon"] = "adamw"
    """The optimizer of torch that has this name. muon: Muon for the matrices that are no embeddings, with its
    rate adjusted so that AdamW's suits it, and AdamW for the rest; from torch 2.9 on."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """The highest learning rate, which is reached at the end of the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of matrices; biases and norms have none."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's and Adam's mean of the gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's and Adam's mean of the squared gradients."""
    momentum: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = "auto"
    """Momentum of SGD and Muon. auto: 0.9 for sgd, torch's own for muon."""
    epsilon: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """What keeps the optimizer from dividing by zero; sgd has none. auto: torch's own."""
    train_layers: str = "full"
    """Which layers are trained: full (as the task has made them), or groups of the task's layer_groups()
    and patterns of module names, with commas. The others are frozen, outside of DDP and optimizer."""
    unfreeze: str = ""
    """Layers that are trained from a step on, or from a share of the run: encoder@1000,backbone.*@0.5."""
    schedule: Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt", "range_test"] = (
        "cosine"
    )
    """The course of the learning rate after the warm-up. cosine, linear: down to min_learning_rate at the
    last step. wsd: constant, and linear in the last decay_steps. inverse_sqrt: with the square root
    of the steps, no lower than min_learning_rate. range_test: up from min_learning_rate by equal
    factors in the last decay_steps, as --find-lr does."""
    schedule_steps: NonNegative = 0
    """Steps at which the schedule ends, before the end of the run or beyond. 0: with the run."""
    warmup_steps: Literal["auto"] | StepsOrShare = "auto"
    """Steps in which the learning rate grows linearly, or their share of the schedule; at most half of it.
    auto: 100, or a tenth of a schedule that is shorter than 1,000."""
    decay_steps: StepsOrShare = 0.1
    """Steps, or their share of the schedule, in which wsd goes down at its end; at most what the warm-up
    leaves."""
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """The learning rate at the end of the schedule; learning_rate or less."""
    plateau_patience: NonNegative = 0
    """After so many evaluations in a row without an improvement of checkpoint.monitor the learning rate is
    multiplied by plateau_factor. 0: it is not."""
    plateau_min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much better than the best a figure must be to count as an improvement."""
    plateau_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What the learning rate is multiplied by on a plateau, for the rest of the run."""
    plateau_cooldown: NonNegative = 0
    """Evaluations after that which do not count."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The norm that gradients are clipped to. none: it is not clipped."""
    max_grad_value: Annotated[float, Field(gt=0)] | None = None
    """The largest value of a gradient's element, either sign, to which it is clipped after the norm.
    none: values are not clipped."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The arithmetic of forward and backward: fp32, or mixed with bf16, or with fp16 and a loss scale. auto:
    bf16 where the device is fast with it, else fp16 on a GPU and fp32 on the CPU."""
    amp_init_scale: Annotated[float, Field(gt=0)] = 65536.0
    """The loss scale that fp16 begins with."""
    amp_growth_interval: Positive = 2000
    """Steps without an overflow after which fp16 doubles its loss scale."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of the weights, which evaluation then uses. none: no average."""
    ema_every: Positive = 1
    """Steps between updates of the average."""
    ema_start_step: NonNegative = 0
    """The step whose weights are the first average; before it there is none."""
    ema_device: Literal["same", "cpu"] = "same"
    """Where the average is kept. same: with the weights. cpu: in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class DdpSettings:
    """DistributedDataParallel and its process group."""

    backend: Literal["auto", "gloo", "nccl", "nccl2"] = "auto"
    """The library for collectives. auto: nccl on GPUs, gloo on the CPU. nccl2: torch's newer class for NCCL
    (ProcessGroupNCCL2, from torch 2.14), which no GPU has tried with this package; nccl is the older one."""
    find_unused_parameters: bool | Literal["auto"] = "auto"
    """Look in each step for parameters that the loss does not use. Without it, the first step that leaves
    one out is done again with it. auto: until relax_after_steps says that it is not needed. No bit depends on it."""
    relax_after_steps: Positive = 200
    """With find_unused_parameters=auto: after so many steps in a row in which every rank used every
    parameter, the search ends."""
    static_graph: bool = False
    """Every step uses the same parameters in the same way: DDP does not look for unused ones, and a step
    that differs is done again with that search, which then stays."""
    gradient_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The type in which gradients are summed over ranks. auto: that in which they are computed. bf16 and
    fp16 halve what is sent, and round it."""
    sync_batchnorm: bool = False
    """Batch norm takes mean and variance over the batches of all ranks, on the CPU too. All ranks then run
    equally many micro-batches."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of DDP's communication buckets, which saves a copy of them."""
    bucket_cap_mb: Positive = 25
    """Size of a bucket of gradients that are summed together, in MB; of about 1,000 tensors at most."""
    collective_timeout_s: Seconds = 60.0
    """Longest wait inside a collective, in seconds. It is raised to what the peers may take to load
    data and, where a supervisor watches, to evaluate or to save."""
    port: PerMachine[Annotated[int, Field(ge=0, le=65535)]] = 0
    """TCP port of the store, where ranks meet. 0: any free one."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class MemorySettings:
    """MemoryManager: when it looks and when it acts. Shares are of the smallest known limit."""

    memory_check_interval: Positive = 10
    """Steps between looks at memory, of which there are at most ten a second."""
    cleanup_interval: NonNegative = 500
    """Steps between garbage collections, which also empty the device's cache where memory is tight.
    0: memory is freed only when it is tight."""
    max_memory_gb: PerMachine[Annotated[float, Field(gt=0)] | None] = None
    """Most host memory, in GB, that a rank with its loader workers may use. More counts as out of
    memory. none: no limit of its own."""
    regrow_micro_batch: NonNegative = 0
    """Steps after the micro-batch was halved for lack of memory until twice its size is tried
    again. 0: it stays halved."""
    activation_checkpointing: Literal["off", "all"] | tuple[str, ...] = "off"
    """Parts of the model that compute their activations again in backward instead of keeping them; the
    weights are the same. all: each block of a list of like modules, or what the model's own
    gradient_checkpointing_enable turns on. Or patterns of module names, or names of their classes:
    layers.*,head or UNetBlock."""
    warn_share: PerMachine[Fraction] = 0.80
    """Share of the tightest memory limit (machine, container, max_memory_gb, device) in use from
    which a warning is logged."""
    react_share: PerMachine[Fraction] = 0.90
    """Share in use from which memory is freed and the loader prefetches less."""
    limit_share: PerMachine[Fraction] = 0.98
    """Share in use from which the log says that the limit is reached."""
    leak_window_steps: Annotated[int, Field(ge=20)] = 1000
    """Steps over which memory must grow steadily to be reported as a suspected leak."""
    leak_mb_per_1000_steps: Annotated[float, Field(gt=0)] = 50.0
    """Slowest growth that is reported as a suspected leak, in MB per 1000 steps."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class CheckpointSettings:
    """When state is saved and which files are kept."""

    save_interval: NonNegative = 1
    """Epochs between checkpoints. 0: none at the end of an epoch, as where save_every_steps is a number."""
    save_every_steps: Literal["auto"] | NonNegative = "auto"
    """Steps between checkpoints, in place of epochs. auto: besides those of epochs by time, from what a save
    costs and how often one was needed. 0: none by steps."""
    memory_every: Literal["auto"] | NonNegative = "auto"
    """Steps between copies of the state in the supervisor's memory, to go on from where all ranks end at
    once. Each save makes one too. auto: by time, so that copies cost at most 0.5 % of it. 0: none, ever."""
    keep_last: Positive = 3
    """How many of the newest checkpoints are kept; the best one is kept beside them."""
    keep_every: NonNegative = 0
    """Steps between checkpoints that are kept for good, and saved for that. 0: none is."""
    only_trained: bool = False
    """Leave weights out of checkpoints that stay as the run has begun with them, as frozen ones beside
    adapters do. A resume then needs that begin again: the same init_from."""
    rescue_dir: PerMachine[str] = ""
    """The folder for the last save of a run if the checkpoint folder refuses it. Empty: the log folder."""
    after_save: PerMachine[str | None] = None
    """A command for the shell that is run for each checkpoint, beside training and one at a time, such as
    rclone copy {path} remote:runs. If several come meanwhile, the newest is next. What fails is a warning.
    none: no command."""
    after_save_grace_s: PerMachine[Annotated[float, Field(ge=0)]] = 30.0
    """How long after_save may go on once the run has ended, in seconds; then it is killed."""
    monitor: str = "auto"
    """The figure that decides which checkpoint is the best: train_loss, or one that evaluations give, such as
    validation_loss or bach/accuracy. auto: the loss of the first validation data, or train_loss without."""
    mode: Literal["min", "max"] = "min"
    """Which value of monitor is the best. max: the highest, as of an accuracy; refused for a loss."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class LogSettings:
    """What is written and shown, how often."""

    log_interval: Positive = 10
    """Steps between lines of metrics."""
    evaluate_interval: NonNegative = 1
    """Epochs between evaluations. 0: none at the end of an epoch, as with evaluate_every_steps; one at the
    end of the run."""
    evaluate_every_steps: NonNegative = 0
    """Steps between evaluations, in place of epochs. 0: none by steps."""
    evaluate_batches: NonNegative = 0
    """Batches of batch_size that each rank evaluates. 0: the whole validation data."""
    evaluate_at_start: bool = False
    """Evaluate also before the first step of the run, and of each stage."""
    display: PerMachine[Literal["auto", "live", "plain", "none"]] = "auto"
    """What the console shows. auto: live on a terminal, otherwise plain lines."""
    profile: str | None = None
    """Steps, counted from 1, of which each rank writes a trace of torch's profiler and a table of its
    operations: steps=10:15. With ,memory also the allocator's history, of a GPU. none: no steps."""
    phase_times: bool = False
    """Add to the metrics how long data, forward, backward, communication and optimizer of a step take. On
    GPUs each is waited for, which costs time."""
    trackers: PerMachine[tuple[Literal["csv", "tensorboard", "wandb"], ...]] = ()
    """Where metrics are written beside metrics.jsonl, by processes that are no ranks. csv: metrics.csv.
    tensorboard, wandb: of these, each an extra of that name. Empty: nowhere."""
    gpu_watch_s: PerMachine[Annotated[float, Field(ge=0)]] = 5.0
    """Seconds between looks at what GPUs and ranks use: memory, temperature, power, clocks, CPU. 0: none."""
    page: PerMachine[bool] = False
    """Serve the live page beside the run, on this machine, by a process that is no rank and ends with the
    run. Needs the extra page; without it the run goes on."""
    page_port: PerMachine[Annotated[int, Field(ge=1, le=65_535)]] = 8080
    """TCP port of that page, or the next one that is free."""
    page_can_inject: PerMachine[bool] = False
    """Let that page end or stop ranks and loader workers, to see them replaced."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class RecoverySettings:
    """How much is repaired before giving up."""

    max_restarts: NonNegative = 10
    """Repairs within restart_window_s; with one more the run gives up (exit code 3)."""
    restart_window_s: Seconds = 3600.0
    """The time over which repairs and a rank's faults are counted, in seconds."""
    no_progress_generations: Positive = 3
    """The run gives up after so many repairs in a row with the same cause, or after as many faults
    of its own, without a committed step in between."""
    min_ranks: NonNegative = 0
    """The run goes on with so few ranks when others keep failing. 0: only with all."""
    slot_failures_max: Positive = 3
    """With min_ranks: a rank that caused so many faults within restart_window_s is given up."""
    regrow_after: Annotated[float, Field(ge=0)] = 0.0
    """Seconds until a rank that was given up is tried again, twice as long after each return that
    fails. 0: never."""
    backoff_first_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait before the first repair of a cause. Before the next ones of the same cause the
    wait doubles from half a second, or from this if it is more."""
    backoff_max_s: Annotated[float, Field(ge=0)] = 30.0
    """Longest wait before a repair, in seconds."""
    startup_timeout_s: PerMachine[Seconds] = 600.0
    """Longest time for a process to start, in seconds: imports, model, data, what is resumed. While samples
    are preloaded it counts from the newest."""
    form_timeout_s: Seconds = 60.0
    """Longest time for the ranks to form a process group and agree on the state, in seconds."""
    node_silent_s: Annotated[float, Field(ge=1)] = 3.0
    """With several machines: one of which nothing is heard for so long is lost, in seconds."""
    node_patience_s: Annotated[float, Field(ge=0)] = 30.0
    """How long a machine that was lost is waited for before the run goes on with fewer, in seconds."""
    coordinator_wait_s: PerMachine[Annotated[float, Field(ge=0)]] = 120.0
    """How long a machine looks for a coordinator that was lost before it ends with exit code 75, in seconds."""
    warm_spare: PerMachine[bool | Literal["process", "model"]] = True
    """Keep a process ready that becomes the next lost rank, and, once the process that forks was lost, one for
    that. On the CPU: process has torch and the task imported; model has also built data and model, in a rank's
    memory; true is model if building took 0.1 s and that is a quarter of what is free. On GPUs: CUDA's libraries
    are loaded, and no memory of a GPU is held."""
    hang_min_s: Seconds = 10.0
    """The shortest time without progress, in seconds, after which a rank may be called hung. One that the system
    holds stopped is found within two seconds; one that loads samples itself has data.loader_timeout_s."""
    hang_factor: Annotated[float, Field(gt=1)] = 10.0
    """A rank is hung after so many times the slowest recent step, if that is more than hang_min_s."""
    first_step_timeout_s: Seconds = 600.0
    """Longest time for each of the first three steps of a process, in seconds: compilation, caches,
    device start."""
    evaluation_timeout_s: Seconds = 1800.0
    """Longest time without progress in an evaluation, in seconds."""
    checkpoint_timeout_s: Seconds = 600.0
    """Longest time for a save that training waits for, the last one of a run, or one that does nothing, in seconds."""
    stop_timeout_s: Seconds = 300.0
    """Longest time to finish the step and save once the run was asked to stop, in seconds."""
    max_errors_per_epoch: NonNegative = 10
    """Steps of an epoch that may be skipped because a loss or gradient is not finite or explodes.
    With one more the run goes back to its newest checkpoint at half the learning rate."""
    rollbacks_max: NonNegative = 2
    """How often the run may go back so, halving the learning rate each time, before it fails."""
    explosion_window: NonNegative = 100
    """Steps after the warm-up that a step's loss and gradient norm are held against to recognize an
    explosion. 0: do not look for explosions."""
    explosion_loss_factor: Annotated[float, Field(gt=1)] = 10.0
    """A loss above so many times the window's median, and far outside its spread, is an explosion."""
    explosion_grad_factor: Annotated[float, Field(gt=1)] = 100.0
    """The same for the norm of the gradient."""
    explosion_loss_max: float | None = None
    """A loss above this is an explosion at any step, the first included. none: no such threshold."""
    explosion_rate_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each explosion multiplies the learning rate by this, beside that its step is skipped. 1: it does not."""
    explosion_recover_steps: Positive = 1000
    """Steps over which such a lowered rate comes back, in equal parts."""
    replica_check_steps: NonNegative = 500
    """Steps between comparisons of the ranks' weights, which are compared before each save too. 0:
    never, also not before a save."""
    drill_at: tuple[Positive, ...] | None = (2, 50, 1000)
    """Steps, counted from where this launch began, at which a process like a replacement computes one
    rank's share once more beside the run, to prove that a repair is exact. none: no such drill."""
    require_exact: bool = False
    """End a run once it is not exact: its state is saved, exit code 1."""

    @property
    def stopped_max_s(self) -> float:
        """How long the system may hold a process stopped: what it says is certain, so less than hang_min_s."""
        return min(self.hang_min_s, STOPPED_MAX_S)


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Settings:
    """A run's settings, resolved; ``task``: arguments of a user's own; ``stage``: which of ``stages`` they are of."""

    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    optim: OptimSettings = Field(default_factory=OptimSettings)
    ddp: DdpSettings = Field(default_factory=DdpSettings)
    memory: MemorySettings = Field(default_factory=MemorySettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)
    task: Mapping[str, JsonValue] = Field(default_factory=dict)
    stages: tuple[Mapping[str, JsonValue], ...] = ()
    stage: StagePlace | None = None
