"""The options of ``train`` as a table, from which both the parser and the help are made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. ``key`` is the setting it assigns, "" where it is not a setting.

    ``metavar`` is "" for a switch, which assigns ``constant``. ``default`` is how the help shows the
    setting's, where that depends on other settings.
    """

    long: str
    short: str = ""
    key: str = ""
    metavar: str = ""
    constant: str = "true"
    default: str = ""
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Options that the help shows under one heading."""

    title: str
    options: tuple[Option, ...]


GROUPS = (
    Group(
        title="What to train",
        options=(
            Option(
                long="--task",
                key="run.task",
                metavar="TASK",
                says="bytes, synthetic, FILE.py[:NAME] or module:NAME",
            ),
            Option(
                long="--data",
                key="data.path",
                metavar="PATH",
                says="file or folder of text to learn; otherwise Python's own standard library",
            ),
            Option(
                long="--init-from",
                key="run.init_from",
                metavar="PATH",
                says="start from these weights (hf://USER/NAME, scratch), on the very first start only",
            ),
            Option(
                long="--stage",
                key="run.stage",
                metavar="NAME",
                says="begin with this one of the stages that the file of --config lists",
            ),
            Option(long="--seed", key="run.seed", metavar="N", says="of everything random"),
        ),
    ),
    Group(
        title="How long and how much",
        options=(
            Option(
                long="--epochs",
                short="-e",
                key="run.epochs",
                metavar="N",
                says="passes over the data",
            ),
            Option(
                long="--max-steps",
                key="run.max_steps",
                metavar="N",
                says="optimizer steps of the run; wins over --epochs; 0: by epochs",
            ),
            Option(
                long="--max-time",
                key="run.max_time",
                metavar="23h30m",
                default="none",
                says="of this launch: then it saves and ends with exit code 75",
            ),
            Option(
                long="--batch-size",
                short="-b",
                key="data.batch_size",
                metavar="N",
                says="samples per rank and step",
            ),
        ),
    ),
    Group(
        title="Where it computes",
        options=(
            Option(
                long="--gpus",
                short="-g",
                key="run.gpus",
                metavar="0,1",
                says="GPUs to use, as CUDA_VISIBLE_DEVICES counts them; otherwise all. 0,0: two ranks on one, over gloo, for trying out",
            ),
            Option(long="--cpu", key="run.device", constant="cpu", says="train on the CPU"),
            Option(
                long="--nproc-per-node",
                short="-n",
                key="run.nproc_per_node",
                metavar="N",
                says="ranks; auto: one per GPU, or up to 2 on the CPU",
            ),
        ),
    ),
    Group(
        title="Several machines: the same command on each",
        options=(
            Option(
                long="--nnodes",
                metavar="N|MIN:MAX",
                default="1",
                says="machines; with a range it goes on with fewer",
            ),
            Option(
                long="--rdzv-endpoint",
                metavar="HOST[:PORT]",
                says="of one of them, where they meet; port 29400",
            ),
            Option(long="--rdzv-id", metavar="ID", default="none", says="of the run"),
            Option(
                long="--node-rank",
                metavar="R",
                default="by the order of joining",
                says="the number of this machine; that of the endpoint is 0",
            ),
            Option(
                long="--rdzv-backend", metavar="c10d", says="c10d or static, which mean the same"
            ),
            Option(
                long="--rdzv-conf",
                metavar="K=V,...",
                says="join_timeout=600, last_call_timeout=30, is_host=1",
            ),
            Option(
                long="--allow-different-code",
                key="run.allow_different_code",
                says="let machines in that run other code; exact is then false",
            ),
            Option(
                long="--local-addr",
                metavar="ADDR",
                says="the address of this machine; otherwise the one that leads to the endpoint",
            ),
            Option(
                long="--token-file",
                metavar="FILE",
                says="with the secret that all machines know; otherwise DDP_RUNNER_TOKEN, or a file that "
                "the coordinator makes in a checkpoint folder that they share",
            ),
            Option(
                long="--engine",
                metavar="ray",
                says="have Ray's cluster place and restart the machines; only --nnodes is given then",
            ),
        ),
    ),
    Group(
        title="Files",
        options=(
            Option(
                long="--name",
                key="run.name",
                metavar="NAME",
                default="the task's",
                says="of this run: it writes to logs/NAME and checkpoints/NAME",
            ),
            Option(
                long="--log-dir",
                short="-l",
                key="run.log_dir",
                metavar="DIR",
                default="logs/NAME",
                says="logs, metrics, status.json, summary.json",
            ),
            Option(
                long="--checkpoint-dir",
                short="-c",
                key="run.checkpoint_dir",
                metavar="DIR",
                default="checkpoints/NAME",
                says="checkpoints, to resume from and to keep",
            ),
            Option(
                long="--rescue-dir",
                key="checkpoint.rescue_dir",
                metavar="DIR",
                says="for a last save that the checkpoints' disk refuses; otherwise the logs",
            ),
            Option(
                long="--page",
                key="log.page",
                says="show the run in a browser, live; needs the extra page",
            ),
            Option(
                long="--page-can-inject",
                key="log.page_can_inject",
                says="let that page end or stop ranks, to see them replaced",
            ),
            Option(
                long="--preset",
                metavar="NAME",
                says="settings of presets/NAME.yaml, which lie under those of --config",
            ),
            Option(
                long="--config",
                metavar="FILE",
                says="YAML file of settings; may be repeated, the later wins",
            ),
        ),
    ),
    Group(
        title="Keeping going",
        options=(
            Option(
                long="--resume",
                key="run.resume",
                metavar="WHICH",
                says="auto: the newest, if any; last, best, PATH; none: set old ones aside",
            ),
            Option(
                long="--max-restarts",
                key="recovery.max_restarts",
                metavar="N",
                says="repairs within an hour before giving up",
            ),
            Option(
                long="--min-ranks",
                key="recovery.min_ranks",
                metavar="N",
                says="go on with so few when a rank keeps failing; 0: only with all",
            ),
            Option(
                long="--regrow-after",
                key="recovery.regrow_after",
                metavar="SECONDS",
                says="try a rank that was given up again after so long; 0: never",
            ),
        ),
    ),
    Group(
        title="Trying out",
        options=(
            Option(long="--test", key="run.test", says="two small epochs in folders of their own"),
            Option(
                long="--dry-run",
                says="build, compute one micro-batch, show modules and memory; write nothing",
            ),
            Option(
                long="--find-batch-size",
                metavar="[SHARE]",
                says="try sizes by a few steps each, and show the largest batch that takes "
                "no more than SHARE of the memory [0.8]",
            ),
            Option(
                long="--find-lr",
                metavar="[LOW:HIGH[:STEPS]]",
                says="train a copy at rates that grow, show the curve and a suggestion "
                "[1e-7:10:100]",
            ),
            Option(
                long="--profile",
                key="log.profile",
                metavar="steps=A:B[,memory]",
                default="none",
                says="write a torch trace and a table of operations of these steps, for each rank",
            ),
            Option(long="--debug", key="run.debug", says="verbose logs and checks; slow"),
            Option(
                long="--audit",
                key="run.audit",
                says="record what each step trained on: audit_rank_<r>.jsonl",
            ),
            Option(
                long="--inject",
                key="run.inject",
                metavar="SPEC",
                says="cause a fault, such as kill:rank=1,step=20 (below); may be repeated",
            ),
        ),
    ),
    Group(
        title="Help",
        options=(
            Option(long="--help", short="-h", says="this text"),
            Option(long="--help-settings", says="every setting: meaning, default, legal values"),
            Option(long="--version", says="the version"),
        ),
    ),
)
OPTIONS = {option.long: option for group in GROUPS for option in group.options}
LONG_OF_SHORT = {option.short: option.long for option in OPTIONS.values() if option.short}
LONG_OF_ALIAS = {
    "--nproc": "--nproc-per-node",
    "--gpu-ids": "--gpus",
    "--num-epochs": "--epochs",
    **dict.fromkeys(("--num-machines", "--num-nodes"), "--nnodes"),
    "--machine-rank": "--node-rank",
    "--test-model": "--dry-run",
    "--config-name": "--config",
}
