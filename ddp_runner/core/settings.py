"""Every setting of a run: name, type, legal range and default, in one place. Reads nothing.

The defaults here are those of a GPU run; ``config.py`` lays the CPU or smoke-test preset, files,
environment and command line over them, and checks how settings fit together. ``None`` means
"off", never "default".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_FROZEN = ConfigDict(extra="forbid", strict=False)

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
JsonValue = str | int | float | bool | None | list[object] | dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class RunSettings:
    """What is run, how long, and where its files go."""

    task: str = "bytes"  # bytes | synthetic | FILE.py[:NAME] | module:NAME
    name: str = "bytes"  # of the run; the task's unless it is given, and the folders follow
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    epochs: Positive = 10
    max_steps: NonNegative = 0  # 0: by epochs; else wins over epochs
    target_loss: float | None = None  # stop when the training loss (smoothed) reaches it
    resume: str = "auto"  # auto | last | best | none | PATH
    init_from: str = ""  # weights only, on the very first start
    log_dir: str = "logs/bytes"
    checkpoint_dir: str = "checkpoints/bytes"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: tuple[NonNegative, ...] = ()  # empty: every visible one
    nproc_per_node: Literal["auto"] | Positive = "auto"
    threads_per_rank: NonNegative = (
        0  # intra-op threads; 0: cores / ranks on CPU, torch's own on GPU
    )
    audit: bool = False
    test: bool = False
    debug: bool = False
    detect_anomaly: bool = False
    deterministic: bool = False  # bit-exact on CUDA too: only kernels that repeat, slower
    inject: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class ModelSettings:
    """The built-in Transformer language models; ``dataset_size`` and ``vocab_size`` shape the synthetic one."""

    vocab_size: Annotated[int, Field(ge=2)] = 1024
    dataset_size: Positive = 10_000
    seq_len: Annotated[int, Field(ge=2)] = 128
    hidden_size: Positive = 512
    num_layers: Positive = 6
    num_heads: Positive = 8
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class DataSettings:
    """What is read and how it is fed."""

    path: str = ""  # file or folder of text; empty: the interpreter's standard library
    batch_size: Positive = 32  # samples per rank and step
    micro_batch_size: NonNegative = 0  # samples per forward; 0: batch_size
    num_workers: Literal["auto"] | NonNegative = (
        "auto"  # per rank; auto: 2, or cores / ranks where that is less; a number is kept
    )
    prefetch_factor: Positive = 2  # batches per worker
    pin_memory: bool = True  # only where there is a GPU
    loader_timeout_s: Seconds = 60.0  # longest wait for one batch
    on_bad_sample: Literal["stop", "substitute"] = "stop"  # one that cannot be loaded
    max_bad_samples: Positive = 10  # to replace in a run, over all ranks
    compare_samples: Literal["stop", "tell", "off"] = (
        "stop"  # where ranks, or a resumed run and its checkpoint, differ in their data
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class OptimSettings:
    """Optimizer, schedule and precision."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: NonNegative = 100
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    use_amp: bool = True  # bf16 where supported, else fp16 with a GradScaler
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class DdpSettings:
    """DistributedDataParallel and its process group."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    find_unused_parameters: bool | Literal["auto"] = True  # auto: relaxed once it is not needed
    relax_after_steps: Positive = 200  # auto: so many steps in a row that used every parameter
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: Positive = 25
    collective_timeout_s: Seconds = 60.0
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of the store; 0: any free one


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class MemorySettings:
    """MemoryManager: when it looks and when it acts. Shares are of the smallest known limit."""

    memory_check_interval: Positive = 10  # steps
    cleanup_interval: NonNegative = 500  # steps between periodic clean-ups; 0: never
    max_memory_gb: Annotated[float, Field(gt=0)] | None = (
        None  # hard limit per rank, loaders included
    )
    regrow_micro_batch: NonNegative = (
        0  # steps after running out of memory until twice the micro-batch is tried; 0: never
    )
    warn_share: Fraction = 0.80
    react_share: Fraction = 0.90
    limit_share: Fraction = 0.98
    leak_window_steps: Annotated[int, Field(ge=20)] = 1000
    leak_mb_per_1000_steps: Annotated[float, Field(gt=0)] = 50.0


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class CheckpointSettings:
    """When state is saved and which files are kept."""

    save_interval: NonNegative = 1  # epochs; 0: not by epoch
    save_every_steps: Literal["auto"] | NonNegative = (
        "auto"  # auto: by time, from what a save costs and how often one is needed; 0: not by steps
    )
    keep_last: Positive = 3
    rescue_dir: str = ""  # for a last save that its own disk refuses; empty: the log directory
    monitor: Literal["auto", "train_loss", "validation_loss"] = (
        "auto"  # auto: validation where there is some
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class LogSettings:
    """What is written and shown, how often."""

    log_interval: Positive = 10  # steps between metric lines
    evaluate_interval: NonNegative = 1  # epochs between evaluations; 0: at the end only
    evaluate_every_steps: NonNegative = 0
    evaluate_batches: NonNegative = 0  # of batch_size, per rank; 0: the whole validation set
    display: Literal["auto", "live", "plain", "none"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class RecoverySettings:
    """How much is repaired before giving up."""

    max_restarts: NonNegative = 10  # within restart_window_s
    restart_window_s: Seconds = 3600.0
    no_progress_generations: Positive = 3
    min_ranks: NonNegative = 0  # go on with so few; 0: only with all
    slot_failures_max: Positive = 3  # of one rank within the window, before it is given up
    regrow_after: Annotated[float, Field(ge=0)] = (
        0.0  # seconds until a given-up rank is tried; 0: never
    )
    backoff_first_s: Annotated[float, Field(ge=0)] = 0.0
    backoff_max_s: Annotated[float, Field(ge=0)] = 30.0
    startup_timeout_s: Seconds = 600.0
    form_timeout_s: Seconds = 60.0
    # On CPUs: keep a process at hand that becomes the next lost rank; once the process that forks the
    # others was lost, also one that takes its place.
    warm_spare: bool = True
    hang_min_s: Seconds = 2.0  # a phase of a step is never called hung sooner
    hang_factor: Annotated[float, Field(gt=1)] = 10.0  # times the slowest recent step
    first_step_timeout_s: Seconds = 600.0  # of a process: compilation, caches, device start
    evaluation_timeout_s: Seconds = 1800.0
    checkpoint_timeout_s: Seconds = 600.0
    stop_timeout_s: Seconds = 300.0  # to finish the step and save, once asked to stop
    max_errors_per_epoch: NonNegative = 10  # skipped steps before a roll-back
    rollbacks_max: NonNegative = 2  # each halves the learning rate; then the run fails
    explosion_window: NonNegative = (
        100  # steps after warm-up that a new one is held against; 0: never
    )
    explosion_loss_factor: Annotated[float, Field(gt=1)] = 10.0  # times their median loss
    explosion_grad_factor: Annotated[float, Field(gt=1)] = 100.0  # times their median gradient norm
    replica_check_steps: NonNegative = 500  # between comparisons of the replicas' weights; 0: never
    # Steps, counted from where this launch began, of which one rank's share is computed once more by
    # a process like a replacement, beside the run; None: off.
    drill_at: tuple[Positive, ...] | None = (2, 50, 1000)
    require_exact: bool = False  # a run that is not exact ends: its state is saved, exit 1


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Settings:
    """A whole run's settings, resolved. ``task`` holds free-form arguments of a user's own task."""

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
