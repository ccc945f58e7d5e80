"""``--find-batch-size``: runs of a few steps until the largest batch that fits is known."""

from __future__ import annotations

import shutil
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.cli.from_code.from_python import LARGEST
from ddp_runner.cli.scratch import in_temporary_folder, say_now
from ddp_runner.cli.stage_choice import alone
from ddp_runner.core.batch_sizes import global_batch
from ddp_runner.features.tuning import batch_search
from ddp_runner.features.tuning.batch_search import Outcome, Tried
from ddp_runner.features.tuning.trials import MemoryWatch, Trial, refuse_ranks, steps_of, train
from ddp_runner.features.tuning.words import BATCH_SIZE
from ddp_runner.kernel.processes.memory_limits import container_limit, free_bytes
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.observe import format as fmt

if TYPE_CHECKING:
    from pathlib import Path

    from ddp_runner.cli.parser import Finding, TrainArguments
    from ddp_runner.core.launch_plan import LaunchPlan

SHARE = 0.8
STEPS = 4
_GB = 1_000_000_000
_UNTIMED = 2  # steps at the begin, which are slower
_REASON_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The memory limit of a rank. ``bytes`` is 0 on a device, whose memory only its rank knows."""

    share: float
    bytes: int
    of: str


def perform(plan: LaunchPlan, arguments: TrainArguments, *, is_rank: bool) -> int:
    """Look for it, in the first stage of a run in stages; the exit code. Raises BadInputError."""
    refuse_ranks(arguments, is_rank=is_rank)
    plan, finding = alone(plan), arguments.finding
    share = share_of(finding.value)
    if plan.settings.data.micro_batch_size:
        expected = "leave it out: the size that fits is the result"
        raise BadInputError("data.micro_batch_size", plan.settings.data.micro_batch_size, expected)
    search = _Search(plan, finding, share=share)
    return in_temporary_folder("find-batch-size", search.perform, keep=False, keeps_failed=False)


def share_of(text: str) -> float:
    """``0.8`` and ``80%``. Raises BadInputError."""
    try:
        share = (
            float(text.removesuffix("%")) / (100 if text.endswith("%") else 1) if text else SHARE
        )
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        expected = "must be a share of the memory, above 0 and at most 1, such as 0.8 or 80%"
        raise BadInputError(BATCH_SIZE, text, expected)
    return share


def limit_of(plan: LaunchPlan, *, share: float) -> Limit:
    """Return the current limit, of which a rank may take ``share``."""
    most_gb = plan.settings.memory.max_memory_gb
    if plan.devices[0].visible_index is not None:
        return Limit(share=share, bytes=0, of="its device's memory")
    if most_gb is not None:
        return Limit(share=share, bytes=int(most_gb * _GB), of=f"max_memory_gb={most_gb:g}")
    room_bytes = free_bytes(container_limit())
    ranks = plan.world_size
    of = f"its share of the {fmt.byte_size(room_bytes)} free"
    return Limit(share=share, bytes=room_bytes // ranks, of=of)


class _Search:
    """One search: its runs, one after the other, in one folder."""

    def __init__(self, plan: LaunchPlan, finding: Finding, *, share: float) -> None:
        self._plan = plan
        self._words = finding.words
        self._asked = plan.settings.data
        self._limit = limit_of(plan, share=share)
        self._free_bytes = free_bytes(container_limit())
        self._tried: list[Tried] = []

    def perform(self, folder: Path) -> ExitCode:
        """Try sizes and show each; then what to use."""
        self._show_begin()
        ranks = self._plan.computing_devices
        share = batch_search.share_of_rank(self._asked, world_size=ranks)
        first = self._asked.batch_size
        while size := batch_search.next_size(self._tried, first=first, share=share):
            outcome, trial = self._try(size, folder / str(size))
            is_refused = outcome is Outcome.REFUSED
            if outcome is Outcome.BROKEN or (is_refused and len(self._tried) == 1):
                return trial.show_failure()
            if is_refused:  # more than the data has, which memory does not change
                break
        return self._show_end()

    def _try(self, size: int, folder: Path) -> tuple[Outcome, Trial]:
        """Try a size, and show it unless the run failed for another reason."""
        limit = self._limit
        is_on_host = limit.bytes > 0
        most_bytes = int(limit.share * limit.bytes)
        watch = MemoryWatch(
            limit_bytes=most_bytes,
            floor_bytes=int((1 - limit.share) * self._free_bytes / 2),
        )
        # Between steps each rank judges itself, with its loader's workers, by the same limit.
        own_limit = [f"memory.max_memory_gb={most_bytes / _GB}"] if is_on_host else []
        trial = train(
            self._words,
            f"data.batch_size={size}",
            "data.compare_samples=off",
            f"run.max_steps={STEPS}",
            "run.resume=none",
            "memory.memory_check_interval=1",
            "recovery.warm_spare=false",
            "recovery.max_restarts=1",
            *own_limit,
            ranks=self._plan.computing_devices,
            folder=folder,
            look=watch.look,
        )
        rate = self._samples_per_s(trial)
        shutil.rmtree(folder, ignore_errors=True)  # a model's files, of many sizes
        host_bytes = max(watch.peak_bytes, trial.summary.get("peak_rss_bytes") or 0)
        peak_bytes = host_bytes if is_on_host else trial.summary.get("peak_device_bytes") or 0
        used_share = (trial.summary.get("peak_device_permille") or 0) / 1000
        if is_on_host:
            used_share = host_bytes / limit.bytes
        outcome = batch_search.outcome(
            exit_code=trial.exit_code,
            faults=trial.faults,
            was_ended=trial.was_ended,
            used_share=used_share,
            share=limit.share,
        )
        if outcome is not Outcome.BROKEN and (self._tried or outcome is not Outcome.REFUSED):
            peak = fmt.byte_size(peak_bytes) if peak_bytes else "-"
            used = fmt.percent(used_share) if used_share else "-"
            speed = fmt.rate(rate) if outcome is Outcome.FITS and rate else "-"
            said = fmt.printable(_says(outcome, trial))
            say_now(f"{size:>9,}  {peak:>14}  {used:>5}  {speed:>9}  {said}")
        self._tried.append(Tried(size=size, fits=outcome is Outcome.FITS))
        return outcome, trial

    def _samples_per_s(self, trial: Trial) -> float:
        """Return the samples per second after the first steps, by the slowest rank of each step."""
        steps = list(steps_of(trial.log_dir).values())[_UNTIMED:]
        seconds = [max(float(one["step_s"]) for one in ranks) for ranks in steps]
        samples = trial.summary.get("samples") or 0
        done = trial.summary.get("steps") or 0
        if not seconds or not done or not statistics.median(seconds):
            return 0.0
        return float(samples / done / statistics.median(seconds))

    def _show_begin(self) -> None:
        ranks, limit = self._plan.world_size, self._limit
        of = f" ({fmt.byte_size(limit.bytes)})" if limit.of.startswith("its share") else ""
        say_now(f"find-batch-size: {STEPS} steps on {ranks} rank{'s' * (ranks > 1)} at each size;")
        say_now(f"limit for each rank: {fmt.percent(limit.share)} of {limit.of}{of}")
        say_now("")
        say_now(f"{'batch':>9}  {'peak of a rank':>14}  {'share':>5}  {'samples/s':>9}")

    def _show_end(self) -> ExitCode:
        found, ranks = batch_search.largest(self._tried), self._plan.computing_devices
        say_now("")
        if not found:
            print(
                f"ddp_runner: error: not even batches of {min(one.size for one in self._tried)} fit:"
                " take a smaller model, memory.activation_checkpointing=all or fewer ranks",
                file=sys.stderr,
            )
            return ExitCode.FAILED
        step = global_batch(self._asked, world_size=ranks)
        say_now(f"{LARGEST} {found:,}; to use it:")
        for use in batch_search.uses(found, self._asked, world_size=ranks):
            than = "as asked" if use.step_samples == step else f"not {step:,} as asked"
            say_now(f"    {use.words:<44}  steps of {use.step_samples:,} samples, {than}")
        return ExitCode.DONE


def _says(outcome: Outcome, trial: Trial) -> str:
    """The outcome, and in short where it comes from; a size that just takes too much says so by its share."""
    why = ""
    if trial.was_ended:
        why = "a rank was ended beyond the limit"
    elif outcome is Outcome.REFUSED:
        why = trial.error
    elif outcome is Outcome.TOO_LARGE and trial.faults:
        why = trial.causes[-1]
    is_long = len(why) > _REASON_CHARACTERS
    return outcome.value + (f": {why[:_REASON_CHARACTERS]}{'...' * is_long}" if why else "")
