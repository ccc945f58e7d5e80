"""Checks that settings fit together, and that the paths they name can be used. Creates nothing."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner import installed
from ddp_runner.config.compose import raise_problems
from ddp_runner.config.fields import BUILT_IN_TASKS
from ddp_runner.config.run_names import at_home
from ddp_runner.core.batch_sizes import SHARES, cut, global_batch, shares_of
from ddp_runner.core.hub import EXPECTED, is_of_hub, lacks_hub, repository_of
from ddp_runner.core.launch_plan import NCCL_BACKENDS, names_a_gpu_twice
from ddp_runner.core.modes import OPTION as MODE
from ddp_runner.core.modes import mode_problems
from ddp_runner.core.monitor import AUTO, TRAIN_LOSS, highest_refused
from ddp_runner.core.profile import OPTION as PROFILE
from ddp_runner.core.profile import parse_profile, refuse_beyond_end
from ddp_runner.core.settings.whole_run import CHECKPOINTS, LOGS
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddp_runner.core.settings import DataSettings, Settings

_RESUME_WORDS = ("auto", "last", "best", "none")


def check_relations(settings: Settings) -> tuple[str, ...]:
    """Check everything that no single value shows; returns notes for people.

    Looks at the disk and changes nothing on it. Raises BadInputError or, for several problems,
    SettingsError.
    """
    raise_problems(
        [
            *_feature_problems(settings),
            *_model_problems(settings),
            *_optimizer_problems(settings),
            *_improvement_problems(settings),
            *_monitor_problems(settings),
            *_memory_problems(settings),
            *_compile_problems(settings),
            *device_problems(settings),
            *mode_problems(settings),
            *_profile_problems(settings),
            *_output_problems(settings),
            *_input_problems(settings),
        ]
    )
    return _notes(settings)


def _feature_problems(settings: Settings) -> Iterator[BadInputError]:
    """Yield an error for each setting that was asked for, and whose feature is not installed; defaults do without."""
    recovery, spare = settings.recovery, settings.recovery.warm_spare
    drills = recovery.drill_at if recovery.drill_at != type(recovery)().drill_at else None
    display = settings.log.display
    asked: tuple[tuple[str, str, object], ...] = (
        ("recovery.warm_spare", "spare", spare if isinstance(spare, str) else None),
        ("recovery.drill_at", "proof", drills and ",".join(map(str, drills))),
        ("data.preload", "preload", "true" if settings.data.preload else None),
        ("run.inject", "faults", ",".join(settings.run.inject)),
        ("log.trackers", "trackers", ",".join(settings.log.trackers)),
        ("log.display", "display", display if display == "live" else None),
        ("log.page", "page", "true" if settings.log.page else None),
        ("checkpoint.after_save", "after_save", settings.checkpoint.after_save),
    )
    there = installed.names("__init__")
    for key, feature, value in asked:
        if value and feature not in there:
            yield BadInputError(key, str(value), f"the feature {feature} is not installed")


def refuse_without_supervisor(settings: Settings, *, world_size: int) -> None:
    """Raise BadInputError for what needs one: processes beside the ranks, memory that is none of theirs."""
    if settings.checkpoint.after_save is not None:
        expected = "needs a supervisor, which runs it: start with ddp_runner train, or leave it out"
        raise BadInputError("checkpoint.after_save", settings.checkpoint.after_save, expected)
    if settings.log.trackers:
        expected = "needs a supervisor, which starts their processes: start with ddp_runner train"
        raise BadInputError("log.trackers", ",".join(settings.log.trackers), expected)
    if settings.run.inject:
        expected = "needs a supervisor, which counts the faults: start with ddp_runner train"
        raise BadInputError("run.inject", ",".join(settings.run.inject), expected)
    if settings.log.page:
        expected = "needs a supervisor: start `ddp_runner page` separately, and leave it out"
        raise BadInputError("log.page", "true", expected)
    if settings.data.shares == "auto":
        expected = "needs a supervisor, which measures the ranks: give a number for each rank"
        raise BadInputError(SHARES, "auto", expected)
    if settings.data.preload and world_size > 1:
        expected = (
            "needs a supervisor, whose memory the ranks share: start with ddp_runner train -n"
            f" {world_size}, without another launcher, or leave it out"
        )
        raise BadInputError("data.preload", "true", expected)


def refuse_for_loops(settings: Settings) -> None:
    """Raise BadInputError for what a loop of one's own has no part of: its data is its own."""
    data, wrong = settings.data, []
    if settings.stages:
        wrong.append(("stages", ""))
    if data.preload:
        wrong.append(("data.preload", "true"))
    if data.shares:
        wrong.append((SHARES, "auto" if data.shares == "auto" else ",".join(map(str, data.shares))))
    if settings.run.mode in ("single", "data_parallel"):
        wrong.append((MODE, settings.run.mode))
    if settings.log.profile:
        wrong.append((PROFILE, settings.log.profile))
    expected = "is for a task: the loop of a program has its own data, so leave it out"
    raise_problems([BadInputError(key, value, expected) for key, value in wrong])


def _model_problems(settings: Settings) -> list[BadInputError]:
    model = settings.model
    if settings.run.task not in BUILT_IN_TASKS or model.hidden_size % model.num_heads == 0:
        return []
    return [
        BadInputError(
            "model.hidden_size",
            model.hidden_size,
            f"must be a multiple of model.num_heads={model.num_heads}",
        )
    ]


def _optimizer_problems(settings: Settings) -> list[BadInputError]:
    problems = []
    data, optim = settings.data, settings.optim
    if data.micro_batch_size > data.batch_size:
        problems.append(
            BadInputError(
                "data.micro_batch_size",
                data.micro_batch_size,
                f"must be data.batch_size={data.batch_size} or less",
            )
        )
    if data.workers_total is not None and data.num_workers != "auto":
        expected = f"and data.num_workers={data.num_workers} (for each rank): leave out one of them"
        problems.append(BadInputError("data.workers_total", data.workers_total, expected))
    problems += _accumulation_problems(data)
    ranks = settings.run.nproc_per_node
    if isinstance(ranks, int) and 0 < data.global_batch_size < ranks:
        expected = f"must be run.nproc_per_node={ranks} or more: a sample for each rank"
        problems.append(BadInputError("data.global_batch_size", data.global_batch_size, expected))
    if optim.unfreeze and settings.ddp.static_graph:
        expected = "must be false with optim.unfreeze: other parameters are trained later on"
        problems.append(BadInputError("ddp.static_graph", "true", expected))
    if optim.min_learning_rate > optim.learning_rate:
        problems.append(
            BadInputError(
                "optim.min_learning_rate",
                optim.min_learning_rate,
                f"must be optim.learning_rate={optim.learning_rate:g} or less",
            )
        )
    if optim.schedule in ("wsd", "range_test") and not optim.decay_steps:
        expected = f"must be above 0 with schedule={optim.schedule}; constant has no decay"
        problems.append(BadInputError("optim.decay_steps", optim.decay_steps, expected))
    if optim.schedule == "range_test" and not optim.min_learning_rate:
        expected = "must be above 0 with schedule=range_test, which begins there"
        problems.append(BadInputError("optim.min_learning_rate", optim.min_learning_rate, expected))
    return [*problems, *_optimizer_lacks(settings), *_average_problems(settings)]


def _accumulation_problems(data: DataSettings) -> list[BadInputError]:
    """Return an error if the size of a step is given twice."""
    per_rank, total = data.accumulation, data.accumulation_total
    if total and per_rank > 1:
        expected = f"is of each rank, and data.accumulation_total={total} of all together: leave out one of them"
        return [BadInputError("data.accumulation", per_rank, expected)]
    if not data.global_batch_size or not (total or per_rank > 1):
        return []
    expected = "and data.global_batch_size say the same: leave out one of them"
    key, value = (
        ("data.accumulation", per_rank) if per_rank > 1 else ("data.accumulation_total", total)
    )
    return [BadInputError(key, value, expected)]


def _improvement_problems(settings: Settings) -> list[BadInputError]:
    """Return an error for each setting of plateau or early stopping that cannot take effect."""
    optim, run, log = settings.optim, settings.run, settings.log
    evaluates = bool(log.evaluate_interval or log.evaluate_every_steps)
    problems = []
    parts: tuple[tuple[str, int, tuple[tuple[str, float, float], ...]], ...] = (
        (
            "optim.plateau_patience",
            optim.plateau_patience,
            (
                ("optim.plateau_min_delta", optim.plateau_min_delta, 0.0),
                ("optim.plateau_factor", optim.plateau_factor, 0.5),
                ("optim.plateau_cooldown", optim.plateau_cooldown, 0),
            ),
        ),
        (
            "run.early_stopping_patience",
            run.early_stopping_patience,
            (("run.early_stopping_min_delta", run.early_stopping_min_delta, 0.0),),
        ),
    )
    for key, patience, beside in parts:
        if patience and not evaluates:
            expected = "needs evaluations: give evaluate_every_steps or evaluate_interval"
            problems.append(BadInputError(key, patience, expected))
        if not patience:
            expected = f"is for {key}: give that too, or leave it out"
            problems += [BadInputError(k, v, expected) for k, v, usual in beside if v != usual]
    return problems


def _monitor_problems(settings: Settings) -> list[BadInputError]:
    """A loss that is to rise. Those of validation data are known by name where the data is."""
    monitor, mode = settings.checkpoint.monitor, settings.checkpoint.mode
    if mode == "min" or monitor not in (AUTO, TRAIN_LOSS):
        return []
    return [highest_refused(TRAIN_LOSS if monitor == TRAIN_LOSS else "loss")]


def _average_problems(settings: Settings) -> list[BadInputError]:
    """Return an error for each setting of a weight average that is not kept, or never begins."""
    optim, steps = settings.optim, settings.run.max_steps
    if optim.ema_decay is None:
        set_of_it = (
            ("optim.ema_every", optim.ema_every, 1),
            ("optim.ema_start_step", optim.ema_start_step, 0),
            ("optim.ema_device", optim.ema_device, "same"),
        )
        expected = "needs a moving average: give ema_decay, such as 0.999, or leave it out"
        return [BadInputError(key, v, expected) for key, v, usual in set_of_it if v != usual]
    if steps and optim.ema_start_step > steps:
        expected = f"must be run.max_steps={steps} or less, or the average never begins"
        return [BadInputError("optim.ema_start_step", optim.ema_start_step, expected)]
    return []


def _optimizer_lacks(settings: Settings) -> list[BadInputError]:
    """Return an error for each setting that the chosen optimizer does not have."""
    optim, problems = settings.optim, []
    if optim.momentum != "auto" and optim.optimizer not in ("sgd", "muon"):
        expected = f"is for sgd and muon: leave it out with {optim.optimizer}"
        problems.append(BadInputError("optim.momentum", optim.momentum, expected))
    if optim.epsilon != "auto" and optim.optimizer == "sgd":
        problems.append(BadInputError("optim.epsilon", optim.epsilon, "leave it out with sgd"))
    return problems


def _memory_problems(settings: Settings) -> list[BadInputError]:
    memory = settings.memory
    shares = (memory.warn_share, memory.react_share, memory.limit_share)
    if shares[0] < shares[1] < shares[2]:
        return []
    return [
        BadInputError(
            "memory.warn_share, react_share, limit_share",
            ", ".join(f"{share:g}" for share in shares),
            "must increase in this order",
        )
    ]


def _compile_problems(settings: Settings) -> list[BadInputError]:
    run = settings.run
    others = {
        "ddp.sync_batchnorm": settings.ddp.sync_batchnorm,
        "memory.activation_checkpointing": settings.memory.activation_checkpointing != "off",
    }
    return [
        BadInputError(
            "run.compile_fullgraph",
            "true",
            f"cannot be with {name}, whose layers are not part of a graph: leave one of them out",
        )
        for name, is_on in others.items()
        if is_on and run.compile and run.compile_fullgraph
    ]


def device_problems(settings: Settings) -> list[BadInputError]:
    """Return the contradictions between devices, number of ranks and backend."""
    run = settings.run
    shown = ",".join(str(index) for index in run.gpus)
    problems = []
    if run.gpus and run.device == "cpu":
        problems.append(BadInputError("--gpus", shown, "contradicts --cpu; give one of them"))
    if names_a_gpu_twice(run.gpus) and settings.ddp.backend in NCCL_BACKENDS:
        expected = "must name each GPU once: NCCL refuses two ranks on one; ddp.backend=gloo can"
        problems.append(BadInputError("--gpus", shown, expected))
    may_share = settings.ddp.backend == "gloo"
    if run.gpus and isinstance(run.nproc_per_node, int):
        too_many = run.nproc_per_node > len(run.gpus) and not may_share
        if too_many or run.nproc_per_node < len(run.gpus):
            problems.append(
                BadInputError(
                    "--nproc-per-node",
                    run.nproc_per_node,
                    f"must be {len(run.gpus)}, as --gpus={shown} names {len(run.gpus)}; "
                    "one of the two is enough",
                )
            )
    return problems


def _profile_problems(settings: Settings) -> list[BadInputError]:
    text, run = settings.log.profile, settings.run
    if text is None:
        return []
    try:
        asked = parse_profile(text)
        # Else the data says how long the run is, or its stages together.
        if run.max_steps and not settings.stages:
            refuse_beyond_end(asked, text=text, total_steps=run.max_steps)
    except BadInputError as problem:
        return [problem]
    return []


def _output_problems(settings: Settings) -> list[BadInputError]:
    wrong = []
    if settings.log.page_can_inject and not settings.log.page:
        expected = "needs the live page: give --page too, or leave it out"
        wrong.append(BadInputError("log.page_can_inject", "true", expected))
    folders = [
        ("--log-dir", settings.run.log_dir),
        ("--checkpoint-dir", settings.run.checkpoint_dir),
    ]
    if settings.checkpoint.rescue_dir:
        folders.append(("--rescue-dir", settings.checkpoint.rescue_dir))
    found = [(option, value, unwritable_reason(Path(value))) for option, value in folders]
    wrong += [BadInputError(option, value, reason) for option, value, reason in found if reason]
    return wrong


def unwritable_reason(folder: Path) -> str:
    """Why ``folder`` cannot be made or written; empty if it can. Creates nothing."""
    if not str(folder).strip() or str(folder) == ".":
        return "must be the path of a separate folder"
    asked = existing = Path(os.path.abspath(at_home(folder)))  # noqa: PTH100 - keeps links
    reason = ""
    try:
        while not os.path.lexists(existing):
            existing = existing.parent
        if not existing.is_dir():
            what = "a link to nothing" if existing.is_symlink() else "a file"
            return f"must be a folder, but {existing} is {what}"
        names, longest = asked.relative_to(existing).parts, os.pathconf(existing, "PC_NAME_MAX")
        # Root passes every permission check, also on a file system that is mounted read-only.
        if os.statvfs(existing).f_flag & os.ST_RDONLY:
            reason = f"must be writable, but {existing} is on a read-only file system"
        elif existing.stat().st_dev in _devices_of_kernel():
            reason = f"must be writable, but {existing} is on a virtual file system of the kernel"
        elif not os.access(existing, os.W_OK | os.X_OK):
            reason = f"must be writable, but {existing} is not"
        elif any(len(os.fsencode(name)) > longest for name in names):
            reason = f"must have names of at most {longest} bytes"
    except OSError as error:
        reason = f"must be a folder that can be written: {error.strerror}"
    return reason


def _devices_of_kernel() -> list[int]:
    return [os.stat(place).st_dev for place in ("/proc", "/sys") if os.path.ismount(place)]  # noqa: PTH116 - strings


def _input_problems(settings: Settings) -> list[BadInputError]:
    run = settings.run
    problems = []
    if settings.data.path:
        problems.extend(_unreadable("--data", settings.data.path, Path(settings.data.path)))
    problems.extend(_init_problems(settings))
    command = settings.checkpoint.after_save
    if command is not None and "{path}" not in command:
        expected = "must have {path} where the checkpoint's path goes"
        problems.append(BadInputError("checkpoint.after_save", command, expected))
    if run.resume not in _RESUME_WORDS:
        expected = "must be auto, last, best, none or the path of a checkpoint; no such file"
        if not run.resume:
            problems.append(BadInputError("--resume", run.resume, expected))
        problems.extend(_unreadable("--resume", run.resume, Path(run.resume), missing=expected))
    problems.extend(_task_problems(run.task))
    return problems


def _init_problems(settings: Settings) -> list[BadInputError]:
    """A run that goes on from a checkpoint has its weights, and asks for no others."""
    run, written = settings.run, settings.run.init_from
    if not written:
        return []
    if is_of_hub(written):
        if repository_of(written) is None:
            return [BadInputError("--init-from", written, EXPECTED)]
        if importlib.util.find_spec("huggingface_hub") is None:
            return [BadInputError("--init-from", written, lacks_hub(python=sys.executable))]
        return []
    goes_on = run.resume in ("auto", "last", "best") and any(
        Path(run.checkpoint_dir).expanduser().glob("step_*.pt")
    )
    if goes_on and not settings.checkpoint.only_trained:
        return []
    missing = "no such file or folder"
    if written.startswith(("scratch_", "scratch-")):
        stage = written[len("scratch_") :]
        missing += f"; here that is init_from=scratch, with stage={stage} where a file lists stages"
    return _unreadable("--init-from", written, init_from_path(written)[0], missing=missing)


def init_from_path(written: str) -> tuple[Path, bool]:
    """The path that ``run.init_from`` names, and whether it is the average (``PATH:ema``) that it asks for."""
    path, colon, what = written.rpartition(":")
    if colon and path and what == "ema" and not Path(written).expanduser().exists():
        return Path(path), True
    return Path(written), False


def _unreadable(
    option: str, value: str, path: Path, *, missing: str = "no such file or folder"
) -> list[BadInputError]:
    path = path.expanduser()
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        return [BadInputError(option, value, missing)]
    except OSError as error:
        return [BadInputError(option, value, f"cannot be read: {error.strerror}")]
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return [BadInputError(option, value, "is neither a file nor a folder")]
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        return [BadInputError(option, value, "cannot be read: permission denied")]
    return []


def _task_problems(task: str) -> list[BadInputError]:
    if task in BUILT_IN_TASKS:
        return []
    file, _, _ = task.partition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            return [BadInputError("--task", task, f"no such file {file}")]
        said = _syntax_error(Path(file))
        return [BadInputError("--task", task, said)] if said else []
    if ":" in task:
        return []
    return [
        BadInputError("--task", task, "must be bytes, synthetic, FILE.py[:NAME] or module:NAME")
    ]


def _syntax_error(file: Path) -> str:
    """Return why ``file`` does not compile, or "". Importing it reports the same, but seconds later, after torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import shows them
        try:
            compile(file.read_bytes(), file, "exec", dont_inherit=True)
        except SyntaxError as error:
            place = f" (line {error.lineno})" if error.lineno else ""
            return f"importing it raised {type(error).__name__}: {error.msg}{place}"
        except (OSError, ValueError):  # the import explains these
            return ""
    return ""


def _notes(settings: Settings) -> tuple[str, ...]:
    notes = []
    optim, name, whole = settings.optim, "run.max_steps", "run"
    steps, warmup = settings.run.max_steps, optim.warmup_steps
    if optim.schedule_steps:
        steps, name, whole = optim.schedule_steps, "optim.schedule_steps", "schedule"
    if warmup != "auto" and steps and warmup >= steps:
        notes.append(
            f"optim.warmup_steps={warmup} is not below {name}={steps}: "
            f"the warm-up is cut to half of the {whole}, {steps // 2} steps"
        )
    checkpoint, log = settings.checkpoint, settings.log
    for each, by_steps, by_epochs in (
        ("checkpoint.save", checkpoint.save_every_steps, checkpoint.save_interval),
        ("log.evaluate", log.evaluate_every_steps, log.evaluate_interval),
    ):
        if by_steps != "auto" and by_steps and by_epochs:
            both = f"{each}_every_steps={by_steps} and {each}_interval={by_epochs}"
            notes.append(f"{both} are both in force: {each}_interval=0 leaves the steps alone")
    if warmup != "auto" and 0.5 < warmup < 1:
        notes.append(f"optim.warmup_steps={warmup}: the warm-up is cut to half of the schedule")
    notes += _share_notes(settings.data)
    folder = Path(settings.run.checkpoint_dir)
    # Before runs had names they saved to the folder above.
    is_first = folder.parent == Path(CHECKPOINTS) and not folder.exists()
    if is_first and any(folder.parent.glob("step_*.pt")):
        notes.append(
            f"the checkpoints in {CHECKPOINTS} itself belong to a run without a name; "
            f"-c {CHECKPOINTS} -l {LOGS} resumes it"
        )
    return tuple(notes)


def _share_notes(data: DataSettings) -> list[str]:
    """Return a note if one rank's larger share is split into more micro-batches than the others'."""
    is_cut = data.global_batch_size or data.micro_batch_size or data.accumulation_total
    shares = shares_of(data)
    if not shares or is_cut or data.accumulation > 1:
        return []
    total = global_batch(data, world_size=len(shares))
    most = max(cut(total, shares))
    if most <= data.batch_size:
        return []
    parts = (
        f"data.shares: {most} samples of a rank are computed in parts of at most {data.batch_size}"
    )
    return [f"{parts}; batch_size={most} global_batch_size={total} computes them at once"]
