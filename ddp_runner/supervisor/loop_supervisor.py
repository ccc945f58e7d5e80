"""What is different for a program of the user's own whose loop attaches: it goes on when training has ended."""

from __future__ import annotations

from ddp_runner.core.exits import RunStatus
from ddp_runner.core.lifecycle import RankState
from ddp_runner.core.script import exit_code_of
from ddp_runner.supervisor.processes.children import Ended
from ddp_runner.supervisor.processes.rank_process import WhatItWrote
from ddp_runner.supervisor.rank_handle import RankHandle
from ddp_runner.supervisor.run_facts import Ending
from ddp_runner.supervisor.supervisor import Supervisor


class LoopSupervisor(Supervisor):
    """Driven as :class:`Supervisor` is. What a program does behind its loop has no limit of time."""

    exit_timeout_s = float("inf")

    def _on_rank_ended(self, handle: RankHandle, ended: Ended, wrote: WhatItWrote) -> None:
        had_finished = handle.state is RankState.FINISHED
        super()._on_rank_ended(handle, ended, wrote)
        was_asked = self._stop is not None or self.run_end.is_known
        if not had_finished or was_asked or ended.exit_code == 0:
            return
        code = exit_code_of(exit_code=ended.exit_code, signal_number=ended.signal_number)
        folder = self.run.log_dir
        self.run_end.begin(
            Ending.of(
                RunStatus.FAILED,
                f"training had ended, and the program failed behind it: rank {handle.rank} ended with"
                f" code {code}; see {folder}/rank_{handle.rank}.log",
                detail=wrote.last,
            )
        )
