"""Builds the parts of a rank before it is known which rank that will be. None of them has been trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddp_runner import config
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.training.components.optimizer_state import room_for_state
from ddp_runner.training.starting.fork_safety import make_forks_safe
from ddp_runner.training.state import TrainState
from ddp_runner.training.workload import TaskWorkload, build_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAhead:
    """The parts of a rank with these settings, for any rank on this device."""

    settings: Settings
    rank_info: RankInfo
    workload: TaskWorkload
    state: TrainState

    def taken(self, settings: Settings, rank_info: RankInfo) -> tuple[TaskWorkload, TrainState]:
        """Return the parts for the rank that they were built for. Raises RuntimeError for any other."""
        # What is resumed is known last, and nothing that is built follows from it.
        as_built, workload = settings, self.workload
        if settings.run.resume != self.settings.run.resume:
            run = replace(settings.run, resume=self.settings.run.resume)
            as_built = replace(settings, run=run)
            workload = replace(workload, settings_digest=config.digest(settings))
        own, wanted = self.rank_info, rank_info
        if as_built != self.settings or (
            (own.device, own.other_devices, own.world_size)
            != (wanted.device, wanted.other_devices, wanted.world_size)
        ):
            raise RuntimeError("a spare was taken for another run than it was built for")
        return workload, self.state


# INVARIANT built-as-a-rank-builds: what is built ahead is what the rank would build: after the same seeds, from
# the same settings, and in nothing after its own number.
# Broken if: the building draws what a rank's does not, or something is drawn between it and the rank.
# Guarded by: test_what_is_built_ahead_is_what_a_rank_builds.
def build_ahead(settings: Settings, rank_info: RankInfo) -> BuiltAhead:
    """Build task, data and model, with memory for the optimizer's state that is there already.

    Raises BadInputError as :func:`build_workload` does, and whatever the task raises.
    """
    make_forks_safe()
    workload, state = build_workload(settings, rank_info)
    state.room = room_for_state(state.optimizer)
    return BuiltAhead(settings=settings, rank_info=rank_info, workload=workload, state=state)
