"""What the demo does: the faults of its acts, where they happen, and the settings of its runs."""

from __future__ import annotations

from dataclasses import dataclass

Blow = tuple[str, ...]  # specs of ``--inject`` that come at the same step; without it, or a rank

_SAVE_EVERY_STEPS = 20
SETTINGS = (
    *("model.vocab_size=64", "model.dataset_size=20000", "model.seq_len=32"),
    *("model.hidden_size=64", "model.num_layers=2", "model.num_heads=2", "model.dropout=0.1"),
    *("data.batch_size=16", "data.num_workers=1", "optim.learning_rate=3e-3"),
    *("optim.warmup_steps=20", f"checkpoint.save_every_steps={_SAVE_EVERY_STEPS}"),
    *("log.evaluate_every_steps=60", "log.evaluate_batches=8", "log.log_interval=20"),
    *("recovery.max_restarts=100", "recovery.hang_min_s=2"),
)
# Act 3 has what a run needs so that these can be noticed, or repaired.
CHANGING_SETTINGS = (
    *("ddp.find_unused_parameters=false", "data.on_bad_sample=substitute"),
    "recovery.explosion_window=50",
)

_HARMLESS: tuple[Blow, ...] = (
    ("kill:phase=reduce",),
    ("kill:phase=commit",),
    ("disk_full:rank=0,phase=checkpoint,seconds=0.3",),
    ("raise:phase=forward",),
    ("exit:phase=backward",),
    ("loader_kill:phase=data",),
    ("loader_stop:phase=data",),
    ("disk_error:rank=0,phase=checkpoint",),
    ("oom:phase=evaluate",),
    ("stop:phase=forward",),
    ("hang:phase=backward",),
    ("spin:phase=data",),
    ("slow_disk:rank=0,phase=checkpoint",),
    ("gil:phase=optimizer",),
    ("slow:phase=forward",),
)
_CHANGING: tuple[Blow, ...] = (
    ("oom:phase=backward",),
    ("unused",),
    ("nan",),
    ("bad_sample:phase=data",),
    ("spike",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The faults of the second and the third act, ``fault_interval_steps`` apart, and their place."""

    world_size: int
    steps: int
    harmless: tuple[Blow, ...]
    changing: tuple[Blow, ...]
    fault_interval_steps: int = _SAVE_EVERY_STEPS

    def injections(self, blows: tuple[Blow, ...]) -> list[str]:
        """The faults as specs of ``--inject``, on one rank after the other, midway between saves."""
        return [
            _complete(spec, rank=number % self.world_size, step=self._step_of(number))
            for number, blow in enumerate(blows, start=1)
            for spec in blow
        ]

    def _step_of(self, number: int) -> int:
        return number * self.fault_interval_steps - self.fault_interval_steps // 2


def script_for(world_size: int) -> Script:
    """Every kind of fault, in the act where it belongs for so many ranks.

    A replica that changes is no majority of two: they go back to a checkpoint, and it leaves no
    trace. Of more it is healed by the others, which have summed its gradients by then. What damages
    a checkpoint shows where one is loaded.
    """
    lost = "diverge" if world_size == 2 else "kill:rank=all,phase=backward"
    harmless = (*_HARMLESS, ("corrupt_checkpoint:rank=0", lost))
    changing = _CHANGING if world_size == 2 else (*_CHANGING, ("diverge",))
    return Script(
        world_size=world_size,
        steps=(len(harmless) + 1) * _SAVE_EVERY_STEPS,
        harmless=harmless,
        changing=changing,
    )


def _complete(spec: str, *, rank: int, step: int) -> str:
    kind, _, rest = spec.partition(":")
    values = rest.split(",") if rest else []
    if not any(value.startswith("rank=") for value in values):
        values.append(f"rank={rank}")
    return f"{kind}:{','.join([*values, f'step={step}'])}"
