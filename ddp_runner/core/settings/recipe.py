"""Settings that the weights follow from: model, data, optimizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    DERIVED,
    OF_RATE,
    PER_MACHINE,
    PER_STAGE,
    REFUSED,
    REPORTED,
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
    Section,
    StepsOrShare,
    Switch,
    Text,
    at_least,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(Section):
    """The built-in Transformer language models; ``dataset_size`` and ``vocab_size`` shape the synthetic one."""

    vocab_size: Annotated[int, at_least(2), WHOLE, REFUSED, PER_STAGE, ReadBy("synthetic")] = 1024
    """Number of tokens of the synthetic task's language. The task bytes always has 256."""
    dataset_size: Annotated[Positive, REFUSED, PER_STAGE, ReadBy("synthetic")] = 10_000
    """Number of training samples of the synthetic task."""
    seq_len: Annotated[
        int,
        at_least(2),
        WHOLE,
        REFUSED,
        PER_STAGE,
        ReadBy("bytes", "synthetic"),
        Alias("context_size", "context_length", "block_size"),
    ] = 128
    """Tokens in a sample. For the task bytes a token is a byte of text."""
    hidden_size: Annotated[Positive, REFUSED, PER_STAGE, ReadBy("bytes", "synthetic")] = 512
    """Width of the model; a multiple of num_heads."""
    num_layers: Annotated[Positive, REFUSED, PER_STAGE, ReadBy("bytes", "synthetic")] = 6
    """Number of Transformer layers."""
    num_heads: Annotated[Positive, REFUSED, PER_STAGE, ReadBy("bytes", "synthetic")] = 8
    """Number of attention heads in each layer."""
    dropout: Annotated[Below1, REFUSED, PER_STAGE, ReadBy("bytes", "synthetic")] = 0.1
    """Probability that an activation is dropped in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings(Section):
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
            says="text file or folder to learn [Python's standard library]",
        ),
        Alias("data", "data_path", "data_dir", "train_file"),
    ] = ""
    """Text file, or folder of text files, that the task bytes learns. Empty: the sources of Python's standard
    library."""
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
    """Samples of each rank in one batch, before gradients are accumulated or summed over ranks. The global batch is
    batch_size times accumulation times the number of ranks, or batch_size times accumulation_total."""
    accumulation: Annotated[
        Positive,
        REFUSED,
        DERIVED,
        PER_STAGE,
        Alias("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum"),
    ] = 1
    """Batches of each rank in a step. A step then has batch_size times accumulation samples of each rank."""
    accumulation_total: Annotated[NonNegative, REFUSED, DERIVED, PER_STAGE] = 0
    """Batches of all ranks together in a step; a multiple of the number of ranks, unless shares divide them. A step
    then has batch_size times accumulation_total samples. 0: accumulation applies."""
    global_batch_size: Annotated[NonNegative, REFUSED, DERIVED, PER_STAGE] = 0
    """Samples of a step over all ranks, whatever their number. They are divided over the ranks, in batches of at
    most batch_size. 0: the size follows from batch_size, accumulation and the number of ranks."""
    micro_batch_size: Annotated[NonNegative, REPORTED, DERIVED, PER_STAGE] = 0
    """Samples in one forward pass, for a batch that does not fit into memory at once; gradients are accumulated. 0:
    the whole batch_size at once."""
    shares: Annotated[Positives | Literal["auto"], REPORTED, DERIVED, PER_STAGE] = ()
    """One number for each rank, such as 3,3,2 for devices of unequal speed: the samples of a step are divided in
    that proportion, and each sample counts the same. Empty: equal shares. auto: the first launch measures the ranks
    and proposes shares, which the next fresh start of the same name uses; a resume keeps its shares."""
    evaluation_batch_size: Annotated[
        NonNegative,
        CANNOT_MATTER,
        PER_STAGE,
        Alias("per_device_eval_batch_size", "eval_batch_size", "test_batch_size", "val_batch_size"),
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
    """Data loading processes of each rank. auto: 2, or the rank's share of the cores if that is less. 0: the rank
    loads its data itself."""
    workers_total: Annotated[NonNegative | None, CANNOT_MATTER, PER_MACHINE, PER_STAGE] = None
    """Data loading processes of all ranks of a machine together; the first ranks get the remainder. none:
    num_workers for each rank."""
    preload: Annotated[Switch, CANNOT_MATTER, Alias("preload_data_to_ram")] = False
    """Read every sample once, at the start, into memory that all ranks share; validation data too. For map-style
    data whose samples draw no random numbers."""
    prefetch_factor: Annotated[
        Positive, CANNOT_MATTER, PER_MACHINE, PER_STAGE, Alias("dataloader_prefetch_factor")
    ] = 2
    """Micro-batches that each loader worker prepares ahead."""
    pin_memory: Annotated[
        Switch, CANNOT_MATTER, PER_MACHINE, PER_STAGE, Alias("dataloader_pin_memory")
    ] = True
    """Copy batches to the GPU from pinned host memory. It has no effect on the CPU."""
    loader_timeout_s: Annotated[Above0, CANNOT_MATTER, PER_STAGE] = 60.0
    """Time limit for one batch, in seconds; after it the loader workers are replaced."""
    stream_end: Annotated[Literal["wrap", "drop"], REPORTED, PER_STAGE] = "wrap"
    """Rule for ranks whose shards of a stream end before those of others. wrap: such a rank reads its shards again
    from the start. drop: the epoch ends for all ranks at the same step; the data must give the lengths of its
    shards."""
    on_bad_sample: Annotated[Literal["stop", "substitute"], CANNOT_MATTER, PER_STAGE] = "stop"
    """Reaction to a sample that cannot be loaded. stop: name it and end the run. substitute: always train on
    another sample in its place, and record it in quarantine.jsonl."""
    max_bad_samples: Annotated[Positive, CANNOT_MATTER, PER_STAGE] = 10
    """Number of samples that may be substituted in a run, over all ranks. One more ends the run."""
    compare_samples: Annotated[Literal["stop", "tell", "off"], CANNOT_MATTER, PER_STAGE] = "stop"
    """Reaction to training data that differs between ranks, or between a resumed run and its checkpoint. stop: save
    and end the run. tell: report it and continue, not exact. off: no comparison."""
    validation_fraction: Annotated[Between0And1, REFUSED, DERIVED, PER_STAGE, ReadBy("bytes")] = (
        0.05
    )
    """Share of the text that the task bytes keeps for validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings(Section):
    """Optimizer, schedule and precision."""

    optimizer: Annotated[
        Literal["adamw", "adam", "sgd", "adafactor", "muon"], REFUSED, PER_STAGE
    ] = "adamw"
    """Name of an optimizer of torch. muon: Muon for matrices other than embeddings, with its rate scaled so that a
    rate for AdamW fits, and AdamW for the other parameters; from torch 2.9."""
    learning_rate: Annotated[Above0, REPORTED, OF_RATE, PER_STAGE, Alias("lr")] = 1e-4
    """Peak learning rate, reached at the end of the warm-up."""
    weight_decay: Annotated[AtLeast0, REPORTED, PER_STAGE, Alias("wd")] = 0.01
    """Weight decay of matrices. Biases and norms have none."""
    beta1: Annotated[Below1, REPORTED, PER_STAGE, Alias("adam_beta1")] = 0.9
    """Decay of AdamW's and Adam's running mean of the gradients."""
    beta2: Annotated[Below1, REPORTED, PER_STAGE, Alias("adam_beta2")] = 0.999
    """Decay of AdamW's and Adam's running mean of the squared gradients."""
    momentum: Annotated[Literal["auto"] | Below1, REPORTED, PER_STAGE] = "auto"
    """Momentum of SGD and Muon. auto: 0.9 for sgd, torch's default for muon."""
    epsilon: Annotated[Literal["auto"] | Above0, REPORTED, PER_STAGE] = "auto"
    """Term that keeps the optimizer from dividing by zero; sgd has none. auto: torch's default."""
    train_layers: Annotated[Text, REFUSED, PER_STAGE] = "full"
    """Layers that are trained: full (as the task builds the model), or groups of the task's layer_groups() and
    patterns of module names, separated by commas. The other layers are frozen and left out of DDP and the
    optimizer."""
    unfreeze: Annotated[Text, REPORTED, PER_STAGE] = ""
    """Layers that are trained from a given step, or from a given share of the run: encoder@1000,backbone.*@0.5."""
    schedule: Annotated[
        Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt", "range_test"],
        REPORTED,
        OF_RATE,
        PER_STAGE,
        Alias("lr_scheduler", "lr_scheduler_type", "scheduler"),
        Alias("decay_lr", off="constant"),
    ] = "cosine"
    """Learning rate after the warm-up. cosine, linear: down to min_learning_rate at the last step. wsd: constant,
    then linearly down in the last decay_steps. inverse_sqrt: falls with the square root of the steps, to
    min_learning_rate at the lowest. range_test: up from min_learning_rate by equal factors in the last decay_steps,
    as --find-lr does."""
    schedule_steps: Annotated[
        NonNegative, REPORTED, OF_RATE, PER_STAGE, Alias("lr_decay_iters")
    ] = 0
    """Step at which the schedule ends; it may be before or after the end of the run. 0: the end of the run."""
    warmup_steps: Annotated[
        Literal["auto"] | StepsOrShare, REPORTED, OF_RATE, PER_STAGE, Alias("warmup_iters")
    ] = "auto"
    """Steps over which the learning rate grows linearly, or their share of the schedule; at most half of it. auto:
    100, or a tenth of a schedule that is shorter than 1,000 steps."""
    decay_steps: Annotated[StepsOrShare, REPORTED, OF_RATE, PER_STAGE] = 0.1
    """Steps at the end of the schedule in which wsd lowers the rate, or their share of the schedule; at most the
    steps that the warm-up leaves."""
    min_learning_rate: Annotated[AtLeast0, REPORTED, OF_RATE, PER_STAGE, Alias("min_lr")] = 0.0
    """Learning rate at the end of the schedule; at most learning_rate."""
    plateau_patience: Annotated[NonNegative, REPORTED, PER_STAGE] = 0
    """Consecutive evaluations without an improvement of checkpoint.monitor after which the learning rate is
    multiplied by plateau_factor. 0: never."""
    plateau_min_delta: Annotated[AtLeast0, REPORTED, PER_STAGE] = 0.0
    """Difference to the best value that an improvement must exceed."""
    plateau_factor: Annotated[Between0And1, REPORTED, PER_STAGE] = 0.5
    """Factor for the learning rate on a plateau; it applies for the rest of the run."""
    plateau_cooldown: Annotated[NonNegative, REPORTED, PER_STAGE] = 0
    """Evaluations after such a reduction that are not counted."""
    max_grad_norm: Annotated[
        Above0 | None,
        REPORTED,
        PER_STAGE,
        Alias("clip_grad", "grad_clip", "gradient_clip_val", "max_norm", "clip_grad_norm"),
    ] = 1.0
    """Norm to which gradients are clipped. none: no clipping of the norm."""
    max_grad_value: Annotated[Above0 | None, REPORTED, PER_STAGE] = None
    """Largest absolute value of a gradient's element, to which it is clipped after the norm. none: no clipping of
    values."""
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
    """Arithmetic of forward and backward: fp32, or mixed with bf16, or with fp16 and a loss scale. auto: bf16 if
    the device computes it fast, otherwise fp16 on a GPU and fp32 on the CPU."""
    amp_init_scale: Annotated[Above0, CANNOT_MATTER, PER_STAGE] = 65536.0
    """Initial loss scale of fp16."""
    amp_growth_interval: Annotated[Positive, REPORTED, PER_STAGE] = 2000
    """Steps without an overflow after which fp16 doubles its loss scale."""
    ema_decay: Annotated[Between0And1 | None, REPORTED, PER_STAGE] = None
    """Decay of a moving average (EMA) of the weights, which evaluations then use. none: no average."""
    ema_every: Annotated[Positive, REPORTED, PER_STAGE] = 1
    """Steps between updates of the average."""
    ema_start_step: Annotated[NonNegative, REPORTED, PER_STAGE] = 0
    """Step whose weights are the first average; before it there is none."""
    ema_device: Annotated[Literal["same", "cpu"], REPORTED, PER_STAGE] = "same"
    """Place of the average. same: with the weights. cpu: in host memory."""
