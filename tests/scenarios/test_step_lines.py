"""metrics.jsonl has the line of each step that is due, whatever dies once the step is committed."""

from __future__ import annotations

import json

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run

QUICK = ("-b", 8, "--max-steps", 4, "num_workers=0", "log_interval=1", *PATIENT)


def test_a_step_whose_comparison_is_cut_short_has_its_line(tmp_path):
    """A rank dies in its first commit: the other has committed, and waits for it with what it has computed."""
    with Run(tmp_path, *QUICK, "--inject", "kill:rank=1,step=0,phase=commit") as run:
        assert run.wait() == 0, run.console
    assert [fault["kind"] for fault in run.summary()["faults"]] == ["rank_killed"]
    text = (run.logs / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [one for one in map(json.loads, text.splitlines()) if "loss" in one]
    assert {one["step"] for one in lines} == {1, 2, 3, 4}
