"""Views and summaries for the tests of the displays."""

import io
from typing import Any

from rich.console import Console
from rich.segment import Segment

from ddp_runner.features.display.frame import frame
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.observe.summary import ExactProof, FaultRecord, RunSummary, TimeShares
from ddp_runner.observe.view import RankView, RunView


def rank_view(rank: int, **changes: Any) -> RankView:
    """A rank in the middle of training."""
    fields: dict[str, Any] = {
        "rank": rank,
        "pid": 100 + rank,
        "state": "running",
        "step": 930,
        "phase": "forward",
        "phase_age_s": 0.01,
        "rss_bytes": 412_000_000,
        "device": "cpu",
        "loader_pids": (200 + rank,),
        "loss": 2.3456,
        "samples_per_s": 617.2,
        "data_wait_share": 0.01,
    }
    return RankView(**{**fields, **changes})


def run_view(world_size: int = 2, **changes: Any) -> RunView:
    """A run in the middle of training."""
    fields: dict[str, Any] = {
        "run_id": "20261120-194720-ab12",
        "pid": 99,
        "state": "running",
        "generation": 3,
        "world_size": world_size,
        "step": 930,
        "max_steps": 1500,
        "epoch": 1,
        "epochs": 10,
        "loss": 2.3456,
        "samples_per_s": 1234.4,
        "eta_s": 123.0,
        "elapsed_s": 754.0,
        "faults_total": 0,
        "restarts": 0,
        "ranks": tuple(rank_view(rank) for rank in range(world_size)),
        "title": "bytes",
        "log_dir": "logs",
        "logged_step": 930,
        "logged_epoch": 1,
        "logged_loss": 2.3456,
        "learning_rate": 3e-4,
        "grad_norm": 0.91,
    }
    return RunView(**{**fields, **changes})


def run_summary(**changes: Any) -> RunSummary:
    """A run that was repaired once and completed."""
    fault = FaultRecord(
        kind="rank_killed",
        rank=1,
        step=412,
        cause="rank 1 was killed by SIGKILL",
        detected_s=50.0,
        recovered_s=51.8,
        steps_lost=1,
        generation=1,
    )
    fields: dict[str, Any] = {
        "run_id": "20261120-194720-ab12",
        "status": RunStatus.COMPLETED,
        "exit_code": 0,
        "steps": 1500,
        "epochs": 3,
        "samples": 48_000,
        "world_size": 2,
        "final_loss": 1.7312,
        "weights_sha256": "ab12cd34ef56" * 5 + "0123",
        "exact": True,
        "exact_proof": ExactProof(repeated=1, drilled=(2, 50), repairs_proved="1 of 1"),
        "wall_s": 184.0,
        "time_s": TimeShares(startup=4.0, productive=162.0, recovery=1.8),
        "faults": (fault,),
        "checkpoint": "checkpoints/step_00001500.pt",
        "peak_rss_bytes": 512_000_000,
        "figures": {"validation_bits_per_byte": 2.4971},
    }
    return RunSummary(**{**fields, **changes})


def drawn(
    view: RunView, *, width: int = 80, lines_max: int = 15, encoding: str = "utf-8"
) -> list[list[Segment]]:
    """The live display's frame on a terminal with colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=99, force_terminal=True, legacy_windows=False)
    return frame(view, console, lines_max=lines_max)


def text_of(lines: list[list[Segment]]) -> list[str]:
    """Lines as they are read."""
    return ["".join(segment.text for segment in line) for line in lines]


def style_of(lines: list[list[Segment]], text: str) -> str:
    """The style of the first piece that is ``text``."""
    return next(str(one.style) for line in lines for one in line if one.text.strip() == text)
