"""Lists the options of ``run`` before the script: its own ones, those of ``train``, and torchrun's others."""

from __future__ import annotations

from ddp_runner.cli.parser import OF_NODES
from ddp_runner.cli.several import several_machines
from ddp_runner.core.settings.declaration import Option

# As torchrun has it: stdout, stderr, both or none of all ranks, or of some.
WHICH_STREAMS = r"[0-3]|\d+:[0-3](,\d+:[0-3])*"
# Options of ``train`` that mean the same here.
SHARED = (
    *("--nproc-per-node", "--gpus", "--cpu", "--name", "--log-dir"),
    *("--config", "--max-restarts", "--debug"),
    *("--resume", "--checkpoint-dir", "--inject"),
    *(*OF_NODES, "--allow-different-code"),
)
# Of these, what needs a loop that calls ddp_runner.attach(): a script has its own checkpoints.
OF_ATTACHED = ("--resume", "--checkpoint-dir", "--inject")
# Where they mean a little less.
SAYS_OF_SHARED = {
    "--name": "name of the run, which writes to logs/NAME [the script's name]",
    "--log-dir": "folder for the files of the run and a log for each attempt and rank [logs/NAME]",
    "--max-restarts": "number of restarts of all ranks within an hour [none]",
    "--resume": "for an attached loop: checkpoint to resume from: auto, last, best, none or a "
    "file [auto]",
    "--checkpoint-dir": "for an attached loop: folder for checkpoints [checkpoints/NAME]",
    "--inject": "for an attached loop: cause a fault, to see it repaired",
    "--rdzv-id": "name of the run, and TORCHELASTIC_RUN_ID in each rank",
    "--token-file": "file with the secret shared by all machines [DDP_RUNNER_TOKEN, or a file that "
    "the coordinator creates in a shared log folder]",
}
OWN_OPTIONS = (
    Option("--module", short="-m", metavar="MODULE", says="run a module, as python -m does"),
    Option(
        "--no-python",
        says="run any program, such as bash worker.sh; its steps and hangs are not detected",
    ),
    Option(
        "--grace-period",
        metavar="SECONDS",
        says="time between SIGTERM and SIGKILL when the run is asked to stop [30]",
    ),
    Option(
        "--hang-timeout",
        metavar="SECONDS",
        says="time without a step, collective, output line or ddp_runner.heartbeat() of any "
        "rank that counts as a hang [no limit]",
    ),
    Option(
        "--preload",
        metavar="A,B",
        says="modules to import once, before the ranks are forked, such as transformers",
    ),
    Option(
        "--in-place",
        says="repair transformers' Trainer in place, in a script that imports it by its name",
    ),
    *several_machines().of_run,
    Option(
        "--master-port",
        key="ddp.port",
        metavar="PORT",
        says="TCP port of the store [any free port]",
    ),
    Option(
        "--resume-with",
        metavar="GLOB:WORDS",
        says="arguments to add at each start if such a file exists: 'out/ckpt.pt:--resume "
        "out/ckpt.pt'; {} is the newest complete match; may be repeated",
    ),
    Option(
        "--from-scratch",
        says="allow a restart from the beginning although an earlier attempt has saved",
    ),
    Option(
        "--plain-saves", says="leave torch.save unchanged; otherwise it replaces files atomically"
    ),
    Option(
        "--tee",
        short="-t",
        metavar="WHICH",
        says="print the output of these ranks, prefixed with [default<rank>]: 3 for all, "
        "0:3,1:3 for ranks 0 and 1; stdout and stderr share one log",
    ),
    Option(
        "--local-ranks-filter",
        metavar="0,1",
        says="show only these ranks on the console [0]",
    ),
    Option(
        "--mixed-precision",
        metavar="NAME",
        says="precision for a script with accelerate: no, fp16, bf16 or fp8 [from "
        "accelerate config]",
    ),
    Option(
        "--monitor-interval",
        metavar="SECONDS",
        says="accepted and ignored: the end of a rank is noticed at once",
    ),
    Option("--standalone", says="accepted and ignored for a run on one machine"),
    Option("--role", metavar="NAME", says="value of ROLE_NAME in each rank [default]"),
)
# As accelerate and others call them.
ALSO_CALLED = {
    **dict.fromkeys(("--num-processes", "--nproc", "--num-gpus"), "--nproc-per-node"),
    **dict.fromkeys(("--gpu-ids", "--device-ids"), "--gpus"),
    "--main-process-port": "--master-port",
    "--num-machines": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--test-model": "--dry-run",
    "--config-name": "--config",
}
# What is for a script only: what an attached loop has instead.
OF_SCRIPTS = {
    "--resume-with": "resumes from its own checkpoints: see --resume",
    "--from-scratch": "resumes from its own checkpoints: --resume none starts fresh",
    "--plain-saves": "is saved by run, and its own torch.save is left as it is",
    "--hang-timeout": "is always watched: see recovery.hang_min_s and recovery.hang_factor",
    "--grace-period": "saves before it ends: recovery.stop_timeout_s is the time for that",
    "--tee": "has a log file for each rank below --log-dir",
    "--local-ranks-filter": "has a log file for each rank below --log-dir",
}
# Of ``train``, for what it builds itself.
OF_TASKS = {
    "--find-batch-size": "is for tasks: a program with its own loop decides its batches",
    "--find-lr": "is for tasks: a program with its own loop decides its learning rate",
    "--dry-run": "is for tasks: a program with its own loop builds its model itself",
}
# What means nothing of a program that is no Python of ours to run.
PYTHON_ONLY = (
    *("--module", "--hang-timeout", "--preload", "--from-scratch", "--plain-saves"),
    *("--mixed-precision", "--in-place"),
)
_HAS_LOGS = "each rank writes all its output to a file below --log-dir"
# Of torchrun, with no meaning here, or none that could be kept. Values that say what is so in any case are taken.
REFUSED = {
    "--start-method": "must be spawn, fork or forkserver",
    "--redirects": "must be 0 to 3, or rank:0 to 3 for some, as in 0:3,1:3",
    "--run-path": "is not needed: a Python file runs in a fork of this command's own Python",
    "--shutdown-timeout": "is called --grace-period here",
    "--signals-to-handle": "cannot be chosen: SIGINT, SIGTERM, SIGHUP and SIGUSR1 stop the run",
    "--logs-specs": f"is not supported: {_HAS_LOGS}",
    "--event-log-handler": "is not supported: events.jsonl lists the events",
    "--duplicate-stdout-filters": f"is not supported: {_HAS_LOGS}",
    "--duplicate-stderr-filters": f"is not supported: {_HAS_LOGS}",
    "--numa-binding": "is not supported: each rank may use every core that run may use; numactl before run binds all",
    "--virtual-local-rank": "is not supported: each rank sees all GPUs, and uses the one with the index LOCAL_RANK",
}
REFUSED_SWITCHES = ("--run-path", "--virtual-local-rank")
# Values with which they say what is so in any case, as regular expressions.
ACCEPTED_VALUES = {
    "--start-method": "spawn|fork|forkserver",
    "--redirects": WHICH_STREAMS,
}
# Where the command line has none of these, the environment's PET_<name> is read, as torchrun does.
OF_ENVIRONMENT = (
    *("--nproc-per-node", "--max-restarts", "--log-dir", "--tee", "--local-ranks-filter"),
    *("--master-port", "--role"),
)
EXAMPLES = (
    ("train.py --lr 1e-3", "two ranks on the CPU, or one per GPU"),
    ("-n 4 train.py", "as torchrun --nproc-per-node 4 train.py"),
    ("--max-restarts 3 train.py", "restart from the script's own checkpoint"),
    (
        "--resume-with 'out/checkpoint-*:--resume {}' train.py",
        "the same command resumes, now and after a failure",
    ),
    ("--hang-timeout 600 --tee 3 train.py", "hangs are faults, and all ranks are shown"),
    ("-m package.train --epochs 3", "a module, as python -m"),
    ("--no-python bash worker.sh", "a program other than Python"),
    ("--nnodes 2 --rdzv-endpoint node0 train.py", "on each of two machines"),
    ("--engine ray --nnodes 2:4 train.py", "on machines of a Ray cluster"),
)
