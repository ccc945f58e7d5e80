"""Describes a run in a few labelled lines before training. Pure; draws nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.observe import format as fmt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddp_runner.core.settings import OptimSettings, RunSettings, Settings

_LABEL_COLUMNS = 14
_PRECISION = {
    "bf16": "bf16 where it is safe, fp32 elsewhere",
    "fp16": "fp16 where it is safe, fp32 elsewhere, with loss scaling",
}
_MODE_COSTS = {
    "reduce-overhead": "CUDA graphs hold extra GPU memory for each shape, and a replaced rank records them again",
    "max-autotune": "compiling takes longer, and a replaced rank is not exact: it times kernels again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """The facts that a rank knows before training. None: this kind of run has no such fact, or it is unknown.

    ``threads``: of a rank on the CPU. ``trained``: the updated ones among its ``parameters``. ``samples``,
    ``global_batch`` (of a step, computed ``micro_batch_size`` at a time) and ``loader_workers`` are
    of data that the run loads itself. ``shares``: each rank's samples of a step, if they are unequal.
    ``checkpoint_bytes``: about one file; ``room_bytes``: the room for all of them; ``left_out``: the number of
    parameters that a file leaves out. ``is_task``: precision, optimizer and ``schedule`` (in words) are those of the
    settings; else a program's own. ``optimizer``: a program's own, in words, which has its own schedule.
    ``begun_with``: what was loaded of ``--init-from``, in lines. ``code``: a digest of what all ``machines`` run.
    ``mode``: how several devices are used and why; ``devices``: their number for each rank.
    """

    ranks: int
    device: str
    backend: str
    threads: int
    precision: str
    parameters: int
    trained: int
    total_steps: int
    steps_per_epoch: int
    committed_step: int
    shares: tuple[int, ...]
    samples: int | None
    global_batch: int | None
    micro_batch_size: int | None
    loader_workers: int | None
    checkpoint_bytes: int | None
    room_bytes: int | None
    is_task: bool
    schedule: str
    left_out: int = 0
    machines: int = 1
    code: str = ""
    begun_with: tuple[str, ...] = ()
    mode: str = ""
    devices: int = 1
    first_step: int = 0  # of the stage
    optimizer: str = ""


def start_block(settings: Settings, facts: StartFacts) -> tuple[str, ...]:
    """Return the lines, one for each statement; a display breaks those that are wider than its terminal."""
    rows = [("ranks", [_place(facts)])]
    if facts.mode:
        rows.append(("mode", [facts.mode]))
    if facts.is_task:
        rows.append(("precision", [_precision(settings, facts)]))
    rows.append(("model", [_parameters(facts)]))
    if facts.begun_with:
        rows.append(("start weights", list(facts.begun_with)))
    rows += [*_data(settings, facts), *_batch(settings, facts)]
    rows.append(("length", list(_length(settings, facts))))
    if facts.is_task:
        rows += _training(settings, facts)
    rows += _checkpoints(settings, facts)
    return tuple(_block(rows))


def _place(facts: StartFacts) -> str:
    words = f"{facts.ranks} on {facts.device}, {facts.backend.rpartition(':')[2]}"
    if facts.machines > 1:
        code = f"same code {facts.code}, " if facts.code else ""
        words = words.replace(" on ", f" on {facts.machines} machines, {code}", 1)
    if facts.threads:
        each = "" if facts.ranks == 1 else " each"
        words += f", {facts.threads} thread{'' if facts.threads == 1 else 's'}{each}"
    return words


def _precision(settings: Settings, facts: StartFacts) -> str:
    asked = f"precision={settings.optim.precision}"
    return f"{_PRECISION.get(facts.precision, facts.precision)} ({asked})"


def _parameters(facts: StartFacts) -> str:
    parameters, trained = facts.parameters, facts.trained
    if trained == parameters:
        return f"{fmt.count(parameters)} parameters, all trained"
    frozen = fmt.count(parameters - trained)
    return f"{fmt.count(parameters)} parameters: {fmt.count(trained)} trained, {frozen} frozen"


def _data(settings: Settings, facts: StartFacts) -> Iterator[tuple[str, list[str]]]:
    if facts.samples is None:
        return
    workers, total = facts.loader_workers, settings.data.workers_total
    loaded = ""
    if workers is not None:
        count, over = workers, "per rank"
        if total is not None and workers:
            ranks = facts.ranks // facts.machines
            on = "" if facts.machines == 1 else " of each machine"
            count, over = total, f"over {ranks} rank{'' if ranks == 1 else 's'}{on}"
        each = f"{count} loader worker{'' if count == 1 else 's'} {over}"
        loaded = f", {each}" if workers else ", loaded by the ranks themselves"
    yield "data", [f"{fmt.count(facts.samples)} samples{loaded}"]


def _batch(settings: Settings, facts: StartFacts) -> Iterator[tuple[str, list[str]]]:
    if facts.global_batch is not None:
        yield (
            "global batch",
            [_samples_of_step(facts, facts.global_batch), *_accumulated(settings, facts)],
        )


def _accumulated(settings: Settings, facts: StartFacts) -> Iterator[str]:
    """Yield a line on the other reading of accumulation, in samples: for each rank, or over all of them."""
    data, devices = settings.data, facts.ranks * facts.devices
    total = data.accumulation_total
    count = total or data.accumulation
    if devices == 1 or count == 1:
        return
    each, over = data.batch_size * count * devices, data.batch_size * count
    readings = (
        ("accumulation", "for each rank", each),
        ("accumulation_total", "over all ranks", over),
    )
    (key, means, size), (other, meant, samples) = readings[::-1] if total else readings
    yield (
        f"{key}={count} counts {means}: {fmt.count(size)} samples; {meant}"
        f" ({other}={count}) it would be {fmt.count(samples)}"
    )


def _samples_of_step(facts: StartFacts, whole: int) -> str:
    part = facts.micro_batch_size
    if facts.shares:
        words = f"{fmt.count(whole)} = {' + '.join(map(fmt.count, facts.shares))}"
        most = max(facts.shares)
        parts = f", at most {fmt.count(part)} at once" if part is not None and part < most else ""
        return words + parts
    own, rest = divmod(whole, facts.ranks)
    ranks = f" x {facts.ranks} rank{'' if facts.ranks == 1 else 's'}"
    if facts.devices > 1:
        ranks += f", shared out over {facts.devices} devices"
    if rest:
        most = min(own + 1, part or own + 1)
        return f"{fmt.count(whole)} over {facts.ranks} ranks, at most {fmt.count(most)} at once"
    cut = fmt.count(own)
    if part is not None and part < own:
        cut = f"{fmt.count(part)} x {own // part} accumulated"
        if own % part:
            cut = f"{fmt.count(own)} (in parts of {fmt.count(part)})"
    return f"{fmt.count(whole)} = {cut}{ranks}"


def _length(settings: Settings, facts: StartFacts) -> Iterator[str]:
    steps, epoch = facts.total_steps - facts.first_step, facts.steps_per_epoch
    words = f"{fmt.count(steps)} steps"
    if epoch and steps < epoch:
        words += f" of an epoch of {fmt.count(epoch)}"
    elif epoch:
        epochs = f"{steps / epoch:.3g}"
        words += f", {epochs} epoch{'' if epochs == '1' else 's'} of {fmt.count(epoch)}"
    if settings.stage is not None:
        words += f", of stage {settings.stage.title}, to step {fmt.count(facts.total_steps)}"
    yield words
    if facts.committed_step > facts.first_step:
        yield f"resumed at step {fmt.count(facts.committed_step)}"
    if settings.run.max_time is not None:
        yield f"this launch saves and ends after {fmt.duration(settings.run.max_time)}"


def _compiled(run: RunSettings) -> Iterator[str]:
    """The mode; with ``run.deterministic`` also what the mode costs."""
    yield f"mode {run.compile_mode}; evaluations run uncompiled"
    if run.deterministic and run.compile_mode in _MODE_COSTS:
        yield f"{run.compile_mode} with deterministic: {_MODE_COSTS[run.compile_mode]}"


def _training(settings: Settings, facts: StartFacts) -> Iterator[tuple[str, list[str]]]:
    optim = settings.optim
    words = facts.optimizer or (
        f"{optim.optimizer}, learning rate {optim.learning_rate:g}"
        f", weight decay {optim.weight_decay:g}"
    )
    words += (
        ", gradients not clipped"
        if optim.max_grad_norm is None
        else f", gradient norm at most {optim.max_grad_norm:g}"
    )
    if optim.max_grad_value is not None:
        words += f", gradient values at most {optim.max_grad_value:g}"
    yield "optimizer", [words]
    if not facts.optimizer:
        yield "schedule", [facts.schedule]
    if layers := list(_layers(optim)):
        yield "layers", layers
    if settings.run.compile:
        yield "compiled", list(_compiled(settings.run))
    kept = settings.memory.activation_checkpointing
    if kept != "off":
        what = "all blocks" if kept == "all" else ", ".join(kept)
        yield "recomputed", [f"activations of {what}, in backward"]
    if summed := list(_summed(settings)):
        yield "over ranks", summed
    if optim.ema_decay is not None:
        yield "average", [_average(optim)]
    if watched := list(_watched(settings)):
        yield "loss watch", watched


def _layers(optim: OptimSettings) -> Iterator[str]:
    """Yield a line for each choice of layers, if it is not the task's."""
    if optim.train_layers != "full":
        yield f"trained from the first step: {', '.join(_words(optim.train_layers))}"
    for word in _words(optim.unfreeze):
        what, _, when = word.rpartition("@")
        number = float(when)
        at = f"{number:g} of the run" if number < 1 else f"step {fmt.count(int(number))}"
        yield f"{what} from {at} on"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _summed(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting of DDP that is not the default."""
    ddp = settings.ddp
    if ddp.sync_batchnorm:
        yield "batch norm uses the batches of all ranks (sync_batchnorm)"
    if ddp.gradient_dtype != "auto":
        yield f"gradients are summed in {ddp.gradient_dtype}"
    if ddp.static_graph:
        yield "every step uses the same parameters (static_graph)"


def _watched(settings: Settings) -> Iterator[str]:
    """Yield a line for each additional consequence of the loss."""
    optim, run, recovery = settings.optim, settings.run, settings.recovery
    if recovery.explosion_loss_max is not None:
        yield f"loss above {recovery.explosion_loss_max:g}: the step is skipped"
    if recovery.explosion_rate_factor < 1:
        steps = fmt.count(recovery.explosion_recover_steps)
        factor = recovery.explosion_rate_factor
        yield f"after an explosion: learning rate x {factor:g}, back over {steps} steps"
    if optim.plateau_patience:
        count = fmt.count(optim.plateau_patience)
        yield f"{count} evaluations without improvement: learning rate x {optim.plateau_factor:g}"
    if run.early_stopping_patience:
        yield f"{fmt.count(run.early_stopping_patience)} evaluations without improvement: the run ends"


def _average(optim: OptimSettings) -> str:
    words = f"of the weights, decay {optim.ema_decay:g}"
    if optim.ema_every > 1:
        words += f", every {fmt.count(optim.ema_every)} steps"
    if optim.ema_start_step:
        words += f", from step {fmt.count(optim.ema_start_step)}"
    if optim.ema_device == "cpu":
        words += ", in host memory"
    return f"{words}; evaluation uses it"


def _checkpoints(settings: Settings, facts: StartFacts) -> Iterator[tuple[str, list[str]]]:
    if facts.checkpoint_bytes is None:
        return
    count = settings.checkpoint.keep_last + 2  # and the best one, and the next while it is written
    words = f"about {fmt.byte_size(facts.checkpoint_bytes)} each, at most {count} at a time"
    if facts.room_bytes is not None:
        fit = facts.room_bytes // max(facts.checkpoint_bytes, 1)
        room = f"room for {fmt.count(fit)}" if fit < 1000 else "room for over 1,000"
        words += f", {room}"
    lines = [words]
    if every := settings.checkpoint.keep_every:
        count = facts.total_steps // every - max(0, facts.committed_step) // every
        steps = "1 step" if every == 1 else f"{fmt.count(every)} steps"
        lines.append(f"and one every {steps} is never deleted, {fmt.count(count)} more of these")
    if facts.left_out:
        frozen = fmt.count(facts.left_out)
        lines.append(f"without {frozen} frozen parameters: a resume needs the same start weights")
    yield "checkpoints", lines


def _block(rows: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    for label, paragraphs in rows:
        for number, text in enumerate(paragraphs):
            yield f" {'' if number else label:<{_LABEL_COLUMNS}}{text}"
