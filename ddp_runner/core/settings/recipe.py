"""Settings that the weights follow from: model, data, optimizer."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic.dataclasses import dataclass

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    DERIVED,
    OF_RATE,
    PER_MACHINE,
    PER_STAGE,
    REFUSED,
    REPORTED,
    SECTION,
    WHOLE,
    Above0,
    Alias,
    AtLeast0,
    Below1,
    Between0And1,
    DeviceDefault,
    NonNegative,
    Option,
    OptionGroup,
    Positive,
    Positives,
    ReadBy,
    StepsOrShare,
    Switch,
    Text,
)


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class ModelSettings:
    """The built-in Transformer language models; ``dataset_size`` and ``vocab_size`` shape the synthetic one."""

    vocab_size: Annotated[int, Ge(2), WHOLE, REFUSED, PER_STAGE, ReadBy("synthetic")] = 1024
    """Tokens of the synthetic task's language. The task bytes always has 256."""
    dataset_size: Annotated[Positive, REFUSED, PER_STAGE, ReadBy("synthetic")] = 10_000
    """Training samples of the synthetic task."""
    seq_len: Annotated[
        int,
        Ge(2),
        WHOLE,
        REFUSED,
        PER_STAGE,
        ReadBy("bytes", "synthetic"),
        Alias("context_size", "context_length", "block_size"),
    ] = 128
    """Tokens in a sample: bytes of text, for the task bytes."""
    hidden_size: Annotated[Positive, REFUSED, PER_STAGE, ReadBy("bytes", "synthetic")] = 512
    """Width of the model; a multiple of num_heads."""
    num_layers: Annotated[Positive, REFUSED, PER_STAGE, ReadBy("bytes", "synthetic")] = 6
    """The number of Transformer layers."""
    num_heads: Annotated[Positive, REFUSED, PER_STAGE, ReadBy("bytes", "synthetic")] = 8
    """The number of attention heads in each layer."""
    dropout: Annotated[Below1, REFUSED, PER_STAGE, ReadBy("bytes", "synthetic")] = 0.1
    """Probability that an activation is dropped while training."""


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class DataSettings:
    """The data, and how it is fed to the model."""

    path: Annotated[
        Text,
        REFUSED,
        DERIVED,
        PER_STAGE,
        ReadBy("bytes"),
        Option(
            "--data",
            group=OptionGroup.WHAT,
            metavar="PATH",
            says="file or folder of text to learn; otherwise Python's own standard library",
        ),
        Alias("data", "data_path", "data_dir", "train_file"),
    ] = ""
    """File or folder of text that the task bytes learns. Empty: the sources of Python's standard library."""
    batch_size: Annotated[
        Positive,
        REFUSED,
        DERIVED,
        PER_STAGE,
        Option(
            "--batch-size",
            short="-b",
            group=OptionGroup.HOW_LONG,
            metavar="N",
            says="samples per rank and step",
        ),
        Alias("per_device_train_batch_size", "train_batch_size"),
    ] = 32
    """Samples of each rank before gradients are summed over ranks, or accumulated. The global batch is
    this times accumulation times the number of ranks, or times accumulation_total."""
    accumulation: Annotated[
        Positive,
        REFUSED,
        DERIVED,
        PER_STAGE,
        Alias("gradient_accumulation_steps", "accumulate_grad_batches"),
    ] = 1
    """Batches of each rank in a step: a step has batch_size times so many samples of each rank."""
    accumulation_total: Annotated[NonNegative, REFUSED, DERIVED, PER_STAGE] = 0
    """Batches of all ranks together in a step, as pipelines count that divide them by the number of ranks: a
    multiple of it, unless shares part them. A step has batch_size times so many samples. 0: accumulation."""
    global_batch_size: Annotated[NonNegative, REFUSED, DERIVED, PER_STAGE] = 0
    """Samples of a step over all ranks, however many ranks there are: each has its part of them,
    in batches of at most batch_size. 0: as batch_size, accumulation and ranks have it."""
    micro_batch_size: Annotated[NonNegative, REPORTED, DERIVED, PER_STAGE] = 0
    """Samples in one forward pass, of a batch that is too large for one; gradients are accumulated.
    0: the whole batch_size at once."""
    shares: Annotated[Positives | Literal["auto"], REPORTED, DERIVED, PER_STAGE] = ()
    """A number for each rank, such as 3,3,2 for devices of unequal speed: a step's samples are shared out in
    that proportion, and each counts the same. Empty: equal shares. auto: the first launch measures the ranks and
    proposes shares, which the next fresh start of the same name takes; a resume keeps those it began with."""
    evaluation_batch_size: Annotated[
        NonNegative,
        CANNOT_MATTER,
        PER_STAGE,
        Alias("per_device_eval_batch_size", "eval_batch_size", "test_batch_size"),
    ] = 0
    """Samples that a rank evaluates at once. 0: batch_size."""
    # With as many ranks as cores, as on the CPU, a worker only takes their time: 2% of it.
    num_workers: Annotated[
        Literal["auto"] | NonNegative,
        CANNOT_MATTER,
        PER_MACHINE,
        PER_STAGE,
        DeviceDefault(cpu=0),
        Alias("workers", "data_workers", "dataloader_num_workers"),
    ] = "auto"
    """Processes that load data, for each rank. auto: 2, or the rank's share of the cores if that is
    less. 0: the rank loads its own data."""
    workers_total: Annotated[NonNegative | None, CANNOT_MATTER, PER_MACHINE, PER_STAGE] = None
    """Processes that load data, for all ranks of a machine together: shared out over them, the first ranks have
    the remainder. none: num_workers for each rank."""
    preload: Annotated[Switch, CANNOT_MATTER, Alias("preload_data_to_ram")] = False
    """Read every sample once, at the start, into memory that all ranks share: for map-style data whose
    samples draw no random numbers. Validation data too."""
    prefetch_factor: Annotated[
        Positive, CANNOT_MATTER, PER_MACHINE, PER_STAGE, Alias("dataloader_prefetch_factor")
    ] = 2
    """Micro-batches that each loader worker prepares ahead."""
    pin_memory: Annotated[
        Switch, CANNOT_MATTER, PER_MACHINE, PER_STAGE, Alias("dataloader_pin_memory")
    ] = True
    """Copy batches to the GPU from pinned host memory. It has no effect on the CPU."""
    loader_timeout_s: Annotated[Above0, CANNOT_MATTER, PER_STAGE] = 60.0
    """Longest wait for one batch, in seconds; then the loader's workers are replaced."""
    stream_end: Annotated[Literal["wrap", "drop"], REPORTED, PER_STAGE] = "wrap"
    """Where shards of a stream end early. wrap: who has read all of its own begins again. drop: the epoch ends
    for all ranks at one step; the data must say how long its shards are (lengths)."""
    on_bad_sample: Annotated[Literal["stop", "substitute"], CANNOT_MATTER, PER_STAGE] = "stop"
    """What to do with a sample that cannot be loaded. stop: name it and end the run. substitute:
    train on another one in its place for good, and note it in quarantine.jsonl."""
    max_bad_samples: Annotated[Positive, CANNOT_MATTER, PER_STAGE] = 10
    """Samples that may be substituted in a run, over all ranks; one more ends it."""
    compare_samples: Annotated[Literal["stop", "tell", "off"], CANNOT_MATTER, PER_STAGE] = "stop"
    """What to do where ranks, or a resumed run and its checkpoint, have different training data.
    stop: end the run, saved. tell: go on, not exact. off: do not compare."""
    validation_fraction: Annotated[Between0And1, REFUSED, DERIVED, PER_STAGE, ReadBy("bytes")] = (
        0.05
    )
    """Share of the text that the task bytes keeps for validation."""


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class OptimSettings:
    """Optimizer, schedule and precision."""

    optimizer: Annotated[
        Literal["adamw", "adam", "sgd", "adafactor", "muon"], REFUSED, PER_STAGE
    ] = "adamw"
    """The optimizer of torch that has this name. muon: Muon for the matrices that are no embeddings, with its
    rate adjusted so that AdamW's suits it, and AdamW for the rest; from torch 2.9 on."""
    learning_rate: Annotated[Above0, REPORTED, OF_RATE, PER_STAGE, Alias("lr")] = 1e-4
    """The highest learning rate, which is reached at the end of the warm-up."""
    weight_decay: Annotated[AtLeast0, REPORTED, PER_STAGE, Alias("wd")] = 0.01
    """Weight decay of matrices; biases and norms have none."""
    beta1: Annotated[Below1, REPORTED, PER_STAGE, Alias("adam_beta1")] = 0.9
    """Decay of AdamW's and Adam's mean of the gradients."""
    beta2: Annotated[Below1, REPORTED, PER_STAGE, Alias("adam_beta2")] = 0.999
    """Decay of AdamW's and Adam's mean of the squared gradients."""
    momentum: Annotated[Literal["auto"] | Below1, REPORTED, PER_STAGE] = "auto"
    """Momentum of SGD and Muon. auto: 0.9 for sgd, torch's own for muon."""
    epsilon: Annotated[Literal["auto"] | Above0, REPORTED, PER_STAGE] = "auto"
    """What keeps the optimizer from dividing by zero; sgd has none. auto: torch's own."""
    train_layers: Annotated[Text, REFUSED, PER_STAGE] = "full"
    """Which layers are trained: full (as the task has made them), or groups of the task's layer_groups()
    and patterns of module names, with commas. The others are frozen, outside of DDP and optimizer."""
    unfreeze: Annotated[Text, REPORTED, PER_STAGE] = ""
    """Layers that are trained from a step on, or from a share of the run: encoder@1000,backbone.*@0.5."""
    schedule: Annotated[
        Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt", "range_test"],
        REPORTED,
        OF_RATE,
        PER_STAGE,
        Alias("lr_scheduler", "lr_scheduler_type"),
        Alias("decay_lr", off="constant"),
    ] = "cosine"
    """The course of the learning rate after the warm-up. cosine, linear: down to min_learning_rate at the
    last step. wsd: constant, and linear in the last decay_steps. inverse_sqrt: with the square root
    of the steps, no lower than min_learning_rate. range_test: up from min_learning_rate by equal
    factors in the last decay_steps, as --find-lr does."""
    schedule_steps: Annotated[
        NonNegative, REPORTED, OF_RATE, PER_STAGE, Alias("lr_decay_iters")
    ] = 0
    """Steps at which the schedule ends, before the end of the run or beyond. 0: with the run."""
    warmup_steps: Annotated[
        Literal["auto"] | StepsOrShare, REPORTED, OF_RATE, PER_STAGE, Alias("warmup_iters")
    ] = "auto"
    """Steps in which the learning rate grows linearly, or their share of the schedule; at most half of it.
    auto: 100, or a tenth of a schedule that is shorter than 1,000."""
    decay_steps: Annotated[StepsOrShare, REPORTED, OF_RATE, PER_STAGE] = 0.1
    """Steps, or their share of the schedule, in which wsd goes down at its end; at most what the warm-up
    leaves."""
    min_learning_rate: Annotated[AtLeast0, REPORTED, OF_RATE, PER_STAGE, Alias("min_lr")] = 0.0
    """The learning rate at the end of the schedule; learning_rate or less."""
    plateau_patience: Annotated[NonNegative, REPORTED, PER_STAGE] = 0
    """After so many evaluations in a row without an improvement of checkpoint.monitor the learning rate is
    multiplied by plateau_factor. 0: it is not."""
    plateau_min_delta: Annotated[AtLeast0, REPORTED, PER_STAGE] = 0.0
    """How much better than the best a figure must be to count as an improvement."""
    plateau_factor: Annotated[Between0And1, REPORTED, PER_STAGE] = 0.5
    """What the learning rate is multiplied by on a plateau, for the rest of the run."""
    plateau_cooldown: Annotated[NonNegative, REPORTED, PER_STAGE] = 0
    """Evaluations after that which do not count."""
    max_grad_norm: Annotated[
        Above0 | None,
        REPORTED,
        PER_STAGE,
        Alias("clip_grad", "grad_clip", "gradient_clip_val", "max_norm"),
    ] = 1.0
    """The norm that gradients are clipped to. none: it is not clipped."""
    max_grad_value: Annotated[Above0 | None, REPORTED, PER_STAGE] = None
    """The largest value of a gradient's element, either sign, to which it is clipped after the norm.
    none: values are not clipped."""
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        REPORTED,
        DERIVED,
        PER_STAGE,
        DeviceDefault(cpu="fp32"),
        Alias(
            "amp",
            "use_amp",
            "optim.use_amp",
            "use_mixed_precision",
            "enable_mixed_precision",
            on="auto",
            off="fp32",
        ),
        Alias("mixed_precision", "dtype"),
        Alias("fp16", on="fp16"),
        Alias("bf16", on="bf16"),
    ] = "auto"
    """The arithmetic of forward and backward: fp32, or mixed with bf16, or with fp16 and a loss scale. auto:
    bf16 where the device is fast with it, else fp16 on a GPU and fp32 on the CPU."""
    amp_init_scale: Annotated[Above0, CANNOT_MATTER, PER_STAGE] = 65536.0
    """The loss scale that fp16 begins with."""
    amp_growth_interval: Annotated[Positive, REPORTED, PER_STAGE] = 2000
    """Steps without an overflow after which fp16 doubles its loss scale."""
    ema_decay: Annotated[Between0And1 | None, REPORTED, PER_STAGE] = None
    """Decay of a moving average of the weights, which evaluation then uses. none: no average."""
    ema_every: Annotated[Positive, REPORTED, PER_STAGE] = 1
    """Steps between updates of the average."""
    ema_start_step: Annotated[NonNegative, REPORTED, PER_STAGE] = 0
    """The step whose weights are the first average; before it there is none."""
    ema_device: Annotated[Literal["same", "cpu"], REPORTED, PER_STAGE] = "same"
    """Where the average is kept. same: with the weights. cpu: in host memory."""
