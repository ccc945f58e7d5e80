"""Settings of the run as a whole: what is run, how long, on which devices, and where its files go."""

from pathlib import PurePath
from typing import Annotated, Literal

from annotated_types import Ge, Lt
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from ddp_runner.core.settings.declaration import (
    CANNOT_MATTER,
    DERIVED,
    PER_MACHINE,
    PER_STAGE,
    REFUSED,
    REPORTED,
    SECTION,
    TEXT,
    WHOLE,
    WHOLES,
    Alias,
    AtLeast0,
    Duration,
    NonNegative,
    Number,
    Option,
    OptionGroup,
    Positive,
    Switch,
    Text,
    Texts,
)


def _no_scratch(written: str) -> str:
    """``scratch`` is the word for no start weights, which wins over a file's."""
    return "" if written == "scratch" else written


StartWeights = Annotated[str, TEXT, AfterValidator(_no_scratch)]


LOGS = "logs"  # of all runs; each has a folder of its own below
CHECKPOINTS = "checkpoints"
LATEST = "latest"  # in LOGS: points to the newest run's folder
FOLDERS = (("run.log_dir", LOGS), ("run.checkpoint_dir", CHECKPOINTS))


@dataclass(frozen=True, slots=True, kw_only=True, config=SECTION)
class RunSettings:
    """The task, the length of the run, and the folders of its files."""

    task: Annotated[
        Text,
        REFUSED,
        PER_STAGE,
        Option(
            "--task",
            group=OptionGroup.WHAT,
            metavar="TASK",
            says="bytes, synthetic, FILE.py[:NAME] or module:NAME",
        ),
    ] = "bytes"
    """What is trained: bytes, synthetic, FILE.py[:NAME] or module:NAME."""
    name: Annotated[
        Text,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--name",
            group=OptionGroup.FILES,
            metavar="NAME",
            default="the task's",
            says="of this run: it writes to logs/NAME and checkpoints/NAME",
        ),
        Alias("run_name", "experiment_name"),
    ] = "bytes"
    """The name of the run, which names its folders. Without one it is the task's name."""
    seed: Annotated[
        int,
        Ge(0),
        Lt(2**63),
        WHOLE,
        REFUSED,
        PER_STAGE,
        Option("--seed", group=OptionGroup.WHAT, metavar="N", says="of everything random"),
    ] = 1234
    """The seed of everything random: first weights, order of samples, augmentation, dropout."""
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
    """Passes over the training data. max_steps wins over it where that is not 0."""
    max_steps: Annotated[
        NonNegative,
        REPORTED,
        DERIVED,
        PER_STAGE,
        Option(
            "--max-steps",
            group=OptionGroup.HOW_LONG,
            metavar="N",
            says="optimizer steps of the run; wins over --epochs; 0: by epochs",
        ),
        Alias("num_steps", "max_iters", "steps"),
    ] = 0
    """Optimizer steps of the whole run, resumes included. 0: as many as the epochs have."""
    max_time: Annotated[
        Duration | None,
        CANNOT_MATTER,
        Option(
            "--max-time",
            group=OptionGroup.HOW_LONG,
            metavar="23h30m",
            default="none",
            says="of this launch: then it saves and ends with exit code 75",
        ),
    ] = None
    """Time of this launch, such as 23h30m, 90m or 3600 (seconds); then it saves and ends with exit code
    75. So it does before the end that SLURM has announced for its job. none: no limit."""
    target_loss: Annotated[Number | None, CANNOT_MATTER, PER_STAGE] = None
    """The run ends, complete, once the mean training loss of the last 20 steps is this or less."""
    early_stopping_patience: Annotated[NonNegative, CANNOT_MATTER, PER_STAGE] = 0
    """The run ends, complete, after so many evaluations in a row that improve the figure of
    checkpoint.monitor by no more than early_stopping_min_delta. 0: it does not."""
    early_stopping_min_delta: Annotated[AtLeast0, CANNOT_MATTER, PER_STAGE] = 0.0
    """How much better than the best a figure must be to count as an improvement."""
    load_best_at_end: Annotated[Switch, REPORTED, DERIVED, Alias("load_best_model_at_end")] = False
    """Have final.pt, and what a script is given, be of the best checkpoint, not of the last. Each new best is
    then saved where it was evaluated, which training waits for."""
    resume: Annotated[
        Text,
        CANNOT_MATTER,
        Option(
            "--resume",
            group=OptionGroup.KEEPING_GOING,
            metavar="WHICH",
            says="auto: the newest, if any; last, best, PATH; none: set old ones aside",
        ),
        Alias("ckpt_path"),
    ] = "auto"
    """What to go on from. auto: the newest checkpoint, if there is one. last, best or the path
    of a checkpoint: that one, which must exist; later ones are moved to a backup folder. none: start
    fresh; all old checkpoints are moved to a backup folder."""
    init_from: Annotated[
        StartWeights,
        CANNOT_MATTER,
        Option(
            "--init-from",
            group=OptionGroup.WHAT,
            metavar="PATH",
            says="start from these weights (hf://USER/NAME, scratch), on the very first start only",
        ),
        Alias("pretrained_path"),
    ] = ""
    """Weights to start from, on the very first start of the run only, and at each resume for what
    checkpoint.only_trained leaves out: a checkpoint (PATH:ema: its average), a state dict, safetensors, a
    folder of shards with their index, or hf://USER/NAME[@REVISION]. Empty or scratch: none."""
    init_strict: Annotated[Switch, CANNOT_MATTER, PER_STAGE] = True
    """All weights of the model must be in init_from, and no others. false: what fits is loaded, and the
    rest of the model is as the task has built it."""
    stage: Annotated[
        Text,
        CANNOT_MATTER,
        Option(
            "--stage",
            group=OptionGroup.WHAT,
            metavar="NAME",
            says="begin with this one of the stages that the file of --config lists",
        ),
    ] = ""
    """The stage to begin with, of those that a file lists as stages; a run that has come that far goes on,
    and begins it again with resume=none. Empty: the first."""
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
            says="logs, metrics, status.json, summary.json",
        ),
        Alias("logging_dir"),
    ] = "logs/bytes"
    """The folder for logs, metrics, status.json and summary.json."""
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
            says="checkpoints, to resume from and to keep",
        ),
        Alias("out_dir"),
    ] = "checkpoints/bytes"
    """The folder for checkpoints: the run resumes from it and saves to it."""
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        REPORTED,
        DERIVED,
        Option("--cpu", group=OptionGroup.WHERE, constant="cpu", says="train on the CPU"),
    ] = "auto"
    """Where to compute. auto: on GPUs if any is visible and usable, otherwise on the CPU."""
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
            says="GPUs to use, as CUDA_VISIBLE_DEVICES counts them; otherwise all. 0,0: two ranks on one, over gloo, for trying out",
        ),
        Alias("gpu_ids", "device_ids"),
    ] = ()
    """The GPUs to use, counted as CUDA_VISIBLE_DEVICES counts them, one rank for each. Empty: every
    visible one. A GPU that is named twice is shared by two ranks over gloo, which is slow."""
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
            says="ranks; auto: one per GPU, or up to 2 on the CPU",
        ),
        Alias("nproc", "num_processes", "num_gpus"),
    ] = "auto"
    """The number of ranks. auto: one per GPU, or up to 2 on the CPU."""
    mode: Annotated[
        Literal["auto", "single", "data_parallel", "distributed"],
        REPORTED,
        DERIVED,
        Alias("training_mode"),
    ] = "auto"
    """How several devices are used. distributed: a rank for each. data_parallel: one rank shares each of
    its batches out over all. single: one rank on one device. auto: distributed where ranks can
    meet, else data_parallel, else single; the start block says why."""
    threads_per_rank: Annotated[NonNegative, REPORTED, DERIVED] = 0
    """Threads that one operation of torch uses in each rank. 0: OMP_NUM_THREADS where that is set, else the
    cores divided by the ranks, on GPUs at most 8."""
    allow_different_code: Annotated[
        Switch,
        CANNOT_MATTER,
        PER_MACHINE,
        Option(
            "--allow-different-code",
            group=OptionGroup.MACHINES,
            says="let machines in that run other code; exact is then false",
        ),
    ] = False
    """With several machines: let in one whose code is not the coordinator's. The run is then not exact."""
    audit: Annotated[
        Switch,
        CANNOT_MATTER,
        Option(
            "--audit",
            group=OptionGroup.TRYING_OUT,
            says="record what each step trained on: audit_rank_<r>.jsonl",
        ),
    ] = False
    """Write the sample indices and the loss of each committed step to audit_rank_<r>.jsonl."""
    test: Annotated[
        Switch,
        CANNOT_MATTER,
        Option(
            "--test", group=OptionGroup.TRYING_OUT, says="two small epochs in folders of their own"
        ),
    ] = False
    """A small run that ends in seconds, in folders of its own."""
    debug: Annotated[
        Switch,
        CANNOT_MATTER,
        Option("--debug", group=OptionGroup.TRYING_OUT, says="verbose logs and checks; slow"),
    ] = False
    """Write verbose logs and run extra checks. Slow."""
    detect_anomaly: Annotated[Switch, CANNOT_MATTER] = False
    """Turn on torch.autograd.set_detect_anomaly: an error in backward names the forward operation
    that it belongs to. Slow."""
    deterministic: Annotated[Switch, REPORTED] = False
    """Use only GPU kernels that give the same bits each time. Without it a run on GPUs is not
    bit-exact; with it some operations are slower, and a few raise an error."""
    matmul_precision: Annotated[
        Literal["highest", "high", "medium"],
        REPORTED,
        PER_STAGE,
        Alias("tf32", "allow_tf32", on="high", off="highest"),
    ] = "highest"
    """How exact torch multiplies matrices of float32. high: TF32 on GPUs that have it; medium: bf16.
    highest: as torch, or the task, has it."""
    channels_last: Annotated[Switch, REPORTED, PER_STAGE] = False
    """Have the weights of convolutions in memory by channels last, which some GPUs compute faster."""
    compile: Annotated[Switch, REPORTED, PER_STAGE, Alias("torch_compile", "use_torch_compile")] = (
        False
    )
    """Compile the model with torch.compile, in place: names in files stay. Where that fails on a rank, all
    go on without, with a warning."""
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune"],
        REPORTED,
        PER_STAGE,
        Alias("torch_compile_mode"),
    ] = "default"
    """What torch.compile aims at. max-autotune times kernels and takes the fastest, and is not exact."""
    compile_fullgraph: Annotated[Switch, CANNOT_MATTER, PER_STAGE] = False
    """The model must compile into one graph; else that counts as a failure."""
    compile_dynamic: Annotated[Switch, REPORTED, PER_STAGE] = False
    """Compile once for all sizes, which is not exact. Without it each shape has its own code."""
    inject: Annotated[
        Texts,
        CANNOT_MATTER,
        Option(
            "--inject",
            group=OptionGroup.TRYING_OUT,
            metavar="SPEC",
            says="cause a fault, such as kill:rank=1,step=20 (below); may be repeated",
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
