"""Settings of the run as a whole: what is run, how long, on which devices, and where its files go."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Literal

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    DERIVED,
    PER_MACHINE,
    PER_STAGE,
    REFUSED,
    REPORTED,
    TEXT,
    WHOLE,
    WHOLES,
    Alias,
    AtLeast0,
    Duration,
    EmptyAs,
    NonNegative,
    Number,
    Option,
    OptionGroup,
    Positive,
    Section,
    Switch,
    Text,
    Texts,
    at_least,
    below,
)

# The word for no start weights wins over a file's.
StartWeights = Annotated[str, TEXT, EmptyAs("scratch")]

LOGS = "logs"  # of all runs; each has a folder of its own below
CHECKPOINTS = "checkpoints"
LATEST = "latest"  # in LOGS: points to the newest run's folder
FOLDERS = (("run.log_dir", LOGS), ("run.checkpoint_dir", CHECKPOINTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Section):
    """The task, the length of the run, and the folders of its files."""

    task: Annotated[
        Text,
        REFUSED,
        PER_STAGE,
        Option(
            "--task",
            group=OptionGroup.WHAT,
            metavar="TASK",
            says="task to train: bytes, synthetic, FILE.py[:NAME] or module:NAME",
        ),
    ] = "bytes"
    """Task to train: bytes, synthetic, FILE.py[:NAME] or module:NAME."""
    name: Annotated[
        Text,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--name",
            group=OptionGroup.FILES,
            metavar="NAME",
            default="the task's",
            says="name of the run, which writes to logs/NAME and checkpoints/NAME",
        ),
        Alias("run_name", "experiment_name", "experiment"),
    ] = "bytes"
    """Name of the run and of its folders. The default is the name of the task."""
    seed: Annotated[
        int,
        at_least(0),
        below(2**63, "2**63"),
        WHOLE,
        REFUSED,
        PER_STAGE,
        Option("--seed", group=OptionGroup.WHAT, metavar="N", says="random seed"),
        Alias("random_seed"),
    ] = 1234
    """Random seed for initial weights, order of samples, augmentation and dropout."""
    epochs: Annotated[
        Positive,
        REPORTED,
        DERIVED,
        PER_STAGE,
        Option(
            "--epochs",
            short="-e",
            aliases=("--num-epochs",),
            group=OptionGroup.HOW_LONG,
            metavar="N",
            says="passes over the data",
        ),
        Alias("num_epochs", "max_epochs", "num_train_epochs", "n_epochs"),
    ] = 10
    """Passes over the training data. max_steps takes precedence if it is not 0."""
    max_steps: Annotated[
        NonNegative,
        REPORTED,
        DERIVED,
        PER_STAGE,
        Option(
            "--max-steps",
            group=OptionGroup.HOW_LONG,
            metavar="N",
            says="optimizer steps of the run, in place of --epochs; 0: epochs decide",
        ),
        Alias("num_steps", "max_iters", "steps"),
    ] = 0
    """Optimizer steps of the whole run, resumes included. 0: epochs decides."""
    limit_batches: Annotated[
        NonNegative,
        REFUSED,
        PER_STAGE,
        Option(
            "--limit-batches",
            group=OptionGroup.HOW_LONG,
            metavar="N",
            says="steps per epoch and batches per evaluation, for a short trial run; 0: all",
        ),
    ] = 0
    """Steps per epoch and batches per evaluation and rank, for a short trial run. An epoch uses the first samples of
    its own order. log.evaluate_batches sets a separate limit for evaluations. 0: all data."""
    max_time: Annotated[
        Duration | None,
        CANNOT_MATTER,
        Option(
            "--max-time",
            group=OptionGroup.HOW_LONG,
            metavar="23h30m",
            default="none",
            says="time limit; at the limit the run saves and exits with 75",
        ),
    ] = None
    """Time limit of this launch, such as 23h30m, 90m or 3600 (seconds). At the limit the run saves and exits with
    75. The same happens before the end that SLURM announces for the job. none: no limit."""
    target_loss: Annotated[Number | None, CANNOT_MATTER, PER_STAGE] = None
    """Mean training loss of the last 20 steps at which the run is complete. none: no such loss."""
    early_stopping_patience: Annotated[NonNegative, CANNOT_MATTER, PER_STAGE, Alias("patience")] = 0
    """Consecutive evaluations without an improvement of checkpoint.monitor after which the run is complete. 0: no
    early stopping."""
    early_stopping_min_delta: Annotated[AtLeast0, CANNOT_MATTER, PER_STAGE] = 0.0
    """Difference to the best value that an improvement must exceed."""
    load_best_at_end: Annotated[Switch, REPORTED, DERIVED, Alias("load_best_model_at_end")] = False
    """Give final.pt, final_ema.pt and the model that a script receives the weights of the best checkpoint instead
    of the last. Each new best is saved at its evaluation, and training waits for that save."""
    resume: Annotated[
        Text,
        CANNOT_MATTER,
        Option(
            "--resume",
            group=OptionGroup.KEEPING_GOING,
            metavar="WHICH",
            says="checkpoint to resume from: auto (the newest, if any), last, best, PATH, or "
            "none to start over",
        ),
        Alias("ckpt_path"),
    ] = "auto"
    """Checkpoint to resume from. auto: the newest one, if any. last, best or a path: that checkpoint, which must
    exist; later ones are moved to a backup folder. none: start fresh; all old checkpoints are moved to a backup
    folder."""
    init_from: Annotated[
        StartWeights,
        CANNOT_MATTER,
        Option(
            "--init-from",
            group=OptionGroup.WHAT,
            metavar="PATH",
            says="weights to start from, read at the first start only: PATH, hf://USER/NAME or "
            "scratch",
        ),
        Alias("pretrained_path"),
    ] = ""
    """Weights to start from: a checkpoint (PATH:ema: its average), a state dict, safetensors, a folder of shards
    with their index, or hf://USER/NAME[@REVISION]. They are read at the first start of the run, and at each resume
    for weights that checkpoint.only_trained leaves out. Empty or scratch: none."""
    init_strict: Annotated[Switch, CANNOT_MATTER, PER_STAGE] = True
    """Require that init_from has exactly the weights of the model. false: matching weights are loaded; the others
    stay as the task builds them."""
    stage: Annotated[
        Text,
        CANNOT_MATTER,
        Option(
            "--stage",
            group=OptionGroup.WHAT,
            metavar="NAME",
            says="start at this stage of the --config file",
        ),
    ] = ""
    """Stage to start at, of those that a file lists as stages. A run that has already reached it resumes;
    resume=none starts the stage again. Empty: the first."""
    log_dir: Annotated[
        Text,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--log-dir",
            short="-l",
            group=OptionGroup.FILES,
            metavar="DIR",
            default="logs/NAME",
            says="folder for logs, metrics, status.json and summary.json",
        ),
        Alias("logging_dir"),
    ] = "logs/bytes"
    """Folder for logs, metrics, status.json and summary.json."""
    checkpoint_dir: Annotated[
        Text,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--checkpoint-dir",
            short="-c",
            group=OptionGroup.FILES,
            metavar="DIR",
            default="checkpoints/NAME",
            says="folder for checkpoints",
        ),
        Alias("out_dir"),
    ] = "checkpoints/bytes"
    """Folder for checkpoints: the run resumes from it and saves to it."""
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        REPORTED,
        DERIVED,
        Option("--cpu", group=OptionGroup.WHERE, constant="cpu", says="train on the CPU"),
    ] = "auto"
    """Device to train on. auto: GPUs if any is visible and usable, otherwise the CPU."""
    gpus: Annotated[
        tuple[NonNegative, ...],
        WHOLES,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--gpus",
            short="-g",
            aliases=("--gpu-ids",),
            group=OptionGroup.WHERE,
            metavar="0,1",
            says="GPUs to use, numbered as in CUDA_VISIBLE_DEVICES [all]; 0,0 puts two ranks on "
            "one GPU, over gloo, for tests",
        ),
        Alias("gpu_ids", "device_ids"),
    ] = ()
    """GPUs to use, one rank for each, numbered as CUDA_VISIBLE_DEVICES numbers them. Empty: every visible one. A
    GPU that is named twice is shared by two ranks over gloo, which is slow."""
    nproc_per_node: Annotated[
        Literal["auto"] | Positive,
        REPORTED,
        DERIVED,
        Option(
            "--nproc-per-node",
            short="-n",
            aliases=("--nproc",),
            group=OptionGroup.WHERE,
            metavar="N",
            says="number of ranks; auto: one per GPU, or up to 2 on the CPU",
        ),
        Alias("nproc", "num_processes", "num_gpus"),
    ] = "auto"
    """Number of ranks. auto: one per GPU, or up to 2 on the CPU."""
    mode: Annotated[
        Literal["auto", "single", "data_parallel", "distributed"],
        REPORTED,
        DERIVED,
        Alias("training_mode"),
    ] = "auto"
    """Use of several devices. distributed: one rank for each. data_parallel: one rank divides each of its batches
    over all devices. single: one rank on one device. auto: distributed if ranks can meet, else data_parallel, else
    single; the start block gives the reason."""
    threads_per_rank: Annotated[NonNegative, REPORTED, DERIVED] = 0
    """Threads of one torch operation in each rank. 0: OMP_NUM_THREADS if it is set, otherwise the cores divided by
    the ranks (on GPUs at most 8)."""
    allow_different_code: Annotated[
        Switch,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--allow-different-code",
            group=OptionGroup.MACHINES,
            says="accept machines whose code differs; exact is then false",
        ),
    ] = False
    """Accept machines whose code differs from the coordinator's. The run is then not exact."""
    audit: Annotated[
        Switch,
        CANNOT_MATTER,
        Option(
            "--audit",
            group=OptionGroup.TRYING_OUT,
            says="record the samples of each step in audit_rank_<r>.jsonl",
        ),
    ] = False
    """Write the sample indices and the loss of each committed step to audit_rank_<r>.jsonl."""
    test: Annotated[
        Switch,
        CANNOT_MATTER,
        Option(
            "--test",
            group=OptionGroup.TRYING_OUT,
            says="train two small epochs in separate folders",
        ),
    ] = False
    """Train a small run that ends in seconds, in separate folders."""
    debug: Annotated[
        Switch,
        CANNOT_MATTER,
        Option(
            "--debug",
            group=OptionGroup.TRYING_OUT,
            says="write verbose logs and run extra checks; slow",
        ),
    ] = False
    """Write verbose logs and run extra checks. Slow."""
    detect_anomaly: Annotated[Switch, CANNOT_MATTER] = False
    """Turn on torch.autograd.set_detect_anomaly: an error in backward then names its forward operation. Slow."""
    deterministic: Annotated[Switch, REPORTED] = False
    """Use only GPU kernels that give the same bits each time. Without it a run on GPUs is not exact; with it some
    operations are slower, and a few raise an error."""
    matmul_precision: Annotated[
        Literal["highest", "high", "medium"],
        REPORTED,
        PER_STAGE,
        Alias("tf32", "allow_tf32", on="high", off="highest"),
    ] = "highest"
    """Precision of float32 matrix products. high: TF32 on GPUs that have it; medium: bf16. highest: the setting of
    torch, or of the task."""
    channels_last: Annotated[Switch, REPORTED, PER_STAGE] = False
    """Store the weights of convolutions in the channels-last format, which is faster on some GPUs."""
    compile: Annotated[Switch, REPORTED, PER_STAGE, Alias("torch_compile", "use_torch_compile")] = (
        False
    )
    """Compile the model in place with torch.compile; names in files stay the same. If compilation fails on one
    rank, all ranks continue without it, with a warning."""
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune"],
        REPORTED,
        PER_STAGE,
        Alias("torch_compile_mode"),
    ] = "default"
    """Mode of torch.compile. max-autotune chooses kernels by timing, and is not exact."""
    compile_fullgraph: Annotated[Switch, CANNOT_MATTER, PER_STAGE] = False
    """Require that the model compiles into one graph; otherwise compilation fails."""
    compile_dynamic: Annotated[Switch, REPORTED, PER_STAGE] = False
    """Compile once for all shapes, which is not exact. Without it each shape is compiled separately."""
    inject: Annotated[
        Texts,
        CANNOT_MATTER,
        Option(
            "--inject",
            group=OptionGroup.TRYING_OUT,
            metavar="SPEC",
            says="cause a fault, such as kill:rank=1,step=20 (see below); may be repeated",
        ),
    ] = ()
    """Faults to cause on purpose, each written as KIND:KEY=VALUE,... (--help lists them)."""

    @property
    def has_folders_of_its_name(self) -> bool:
        """True if the run's folders follow from its name, so that another name would move them."""
        if self.checkpoint_dir == self.log_dir:  # a script's, whose checkpoints are its own
            return PurePath(self.log_dir) == PurePath(LOGS, self.name)
        folders = {"run.log_dir": self.log_dir, "run.checkpoint_dir": self.checkpoint_dir}
        return all(PurePath(folders[key]) == PurePath(root, self.name) for key, root in FOLDERS)

    @property
    def latest(self) -> str:
        """The path that leads to the newest run's logs; empty for a run whose logs are elsewhere."""
        return (
            str(PurePath(LOGS, LATEST)) if PurePath(self.log_dir).parent == PurePath(LOGS) else ""
        )
