"""A torch trace of a few steps of this rank, a table of its operations, and the allocator's history.

Changes nothing of what is computed, and no fault of its own ends a run: it is a warning.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_runner.core.profile import OPTION, ProfileAsked, parse_profile, refuse_beyond_end
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.board import Slot
from ddp_runner.system.launch_folder import at_launch

TABLE_ROWS = 25
_ROWS_SHOWN = 5
_HISTORY_ENTRIES_MAX = 100_000


class StepProfile:
    """Receives the begin and end of each step, on one rank. This one does nothing: nobody has asked for a profile."""

    def before(self, step: int) -> None:
        """The step comes next of whose predecessors ``step`` are committed."""

    def after(self, step: int) -> None:
        """``step`` steps are committed."""

    def leave(self) -> None:
        """The generation is left, perhaps amid a step."""

    def conclude(self) -> None:
        """Training has ended: what was begun is written."""


def step_profile(
    settings: Settings, runtime: Runtime, *, device: torch.device, total_steps: int
) -> StepProfile:
    """Return the profile that ``log.profile`` asks for. Raises BadInputError if the run ends before it.

    A stage, which ends after ``total_steps`` of the run, is trained all the same: others follow it, or have
    been trained before it.
    """
    text, stage = settings.log.profile, settings.stage
    asked = parse_profile(text)
    if asked is None:
        return StepProfile()
    rank = runtime.rank_info.rank
    if stage is None:
        refuse_beyond_end(asked, text=text, total_steps=total_steps)
    elif stage.is_last and rank == 0 and asked.last > total_steps:
        where = f"is beyond the end of the run, which has {total_steps:,} steps"
        runtime.logger.warning(f"{OPTION}={text}: {where}")
    if asked.first > total_steps:
        return StepProfile()
    folder = at_launch(settings.run.log_dir)
    found = Profile(asked, folder=folder, rank=rank, device=device, runtime=runtime)
    if asked.memory:
        found.watch_memory()
    return found


class Profile(StepProfile):
    """The profile of one rank; its files are ``profile_rank_<r>.json`` and ``.txt``."""

    def __init__(
        self,
        asked: ProfileAsked,
        *,
        folder: Path,
        rank: int,
        device: torch.device,
        runtime: Runtime,
    ) -> None:
        self._asked = asked
        self._folder = folder
        self._rank = rank
        self._device = device
        self._slot: Slot = runtime.slot
        self._logger = runtime.logger
        self._trace: Any = None  # while steps are traced
        self._stopped: Any = None  # a trace of which nothing is written yet
        self._first = self._last = 0  # of the steps that are in there
        self._step: Any = None  # the mark of the step in hand
        self._has_memory = False  # the allocator notes what it does

    def watch_memory(self) -> None:
        """Have the allocator note what it does, and write that at the first lack of memory."""
        if self._device.type != "cuda":
            if self._rank == 0:
                self._logger.info(
                    "--profile memory: a snapshot is of a GPU's allocator; on the CPU the trace has what"
                    " each operation takes"
                )
            return
        with self._warned("memory"):
            torch.cuda.memory._record_memory_history(  # noqa: SLF001 - torch documents it so
                max_entries=_HISTORY_ENTRIES_MAX
            )
            self._has_memory = True
            attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)  # noqa: SLF001
            if attach is not None:
                attach(first_only(lambda: self._write_memory("out_of_memory")))

    def before(self, step: int) -> None:
        """Begin where the first of the steps comes next, or a later one after a repair."""
        self._stopped = None  # of a generation that broke: these steps are done again
        if self._trace is None and self._asked.begins_before(step):
            self._begin(step)
        if self._trace is not None:
            self._close_step()
            self._step = record_function(f"step {step + 1}")
            self._step.__enter__()

    def after(self, step: int) -> None:
        """End after the last of the steps."""
        if self._trace is None:
            return
        self._last = step
        if step >= self._asked.last:
            self.leave()
            self.conclude()

    def leave(self) -> None:
        """Trace no more; what there is waits for :meth:`conclude`, or is dropped where steps come again."""
        if self._trace is None:
            return
        self._close_step()
        trace, self._trace = self._trace, None
        with self._aside(), self._warned("profile"):
            trace.stop()
            self._stopped = trace

    def conclude(self) -> None:
        """Write what was traced and not written yet."""
        trace, self._stopped = self._stopped, None
        if trace is None or self._last < self._first:
            return
        with self._aside():
            with self._warned("profile"):
                self._write(trace)
            if self._has_memory:
                self._write_memory("profile")

    def _begin(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with self._aside(), self._warned("profile"):
            trace = profile(activities=activities, profile_memory=self._asked.memory)
            trace.start()
            self._trace, self._first, self._last = trace, step + 1, step

    def _close_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _write(self, trace: Any) -> None:
        path = self._folder / f"profile_rank_{self._rank}.json"
        unfinished = path.with_name(f".{path.name}")
        trace.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
        averages = trace.key_averages()
        which = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        what = f"steps {self._first} to {self._last} of rank {self._rank}, by own time\n\n"
        table = averages.table(sort_by=which, row_limit=TABLE_ROWS)
        path.with_suffix(".txt").write_text(what + table, encoding="utf-8")
        if self._rank == 0:
            self._logger.info(
                f"profiled steps {self._first} to {self._last}: {path.with_suffix('.txt')}; most time"
                f" in {top_operations(averages, which)}",
                step=self._last,
            )

    def _write_memory(self, what: str) -> None:
        path = self._folder / f"memory_{what}_rank_{self._rank}.pickle"
        with self._warned("memory"):
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # noqa: SLF001
            self._logger.warning(
                f"the allocator's history is in {path}: docs.pytorch.org/memory_viz"
            )

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A phase of its own, which may take long: a profiler loads libraries, and writes much."""
        before = self._slot.read().phase
        self._slot.stamp(Phase.PROFILE, time.monotonic_ns())
        yield
        self._slot.stamp(before, time.monotonic_ns())

    @contextlib.contextmanager
    def _warned(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no profile is worth a run
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._logger.warning(f"--profile: no {what} ({text})")


def top_operations(averages: Any, which: str) -> str:
    """The operations with most time of their own, with their shares."""
    times = sorted(((getattr(one, which), one.key) for one in averages), reverse=True)
    own = [(took, name) for took, name in times if not name.startswith("step ")]
    total = sum(took for took, _ in own) or 1
    return ", ".join(f"{name} {took / total:.0%}" for took, name in own[:_ROWS_SHOWN])


def first_only(act: Callable[[], None]) -> Callable[..., None]:
    """Something that does ``act`` when it is called the first time, with whatever."""
    has_acted: list[bool] = []

    def observer(*_: object) -> None:
        if not has_acted:
            has_acted.append(True)
            act()

    return observer
