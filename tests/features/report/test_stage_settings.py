"""What stages have of their own, as the settings of a run that is read from its folder."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

from ddp_runner.features.report.report_comparison import differing_settings
from ddp_runner.observe.history.run_history import RunHistory


def test_what_a_stage_has_of_its_own_is_a_setting(tmp_path):
    """However it is written; its secrets are hidden, and what nobody understands is shown as it stands."""
    text = """
        optim: {learning_rate: 0.01}
        stages:
        - {name: pre, epochs: 1, learning_rate: "1e-3", task: {api_key: secret, at: x}}
        - {name: tune, optim: {learning_rate: 0.002}, max_steps: 9, later.word: [1, 2], optim.beta1: 2}
        - 7
    """
    (tmp_path / "config.yaml").write_text(textwrap.dedent(text), encoding="utf-8")
    found = {row.key: row.value for row in RunHistory(tmp_path).settings()}
    assert found == {
        "optim.learning_rate": 0.01,
        "stages": ("pre", "tune"),
        "stages.pre.run.epochs": 1,
        "stages.pre.optim.learning_rate": 0.001,
        "stages.pre.task.api_key": "***",
        "stages.pre.task.at": "x",
        "stages.tune.init_from": "previous",
        "stages.tune.optim.learning_rate": 0.002,
        "stages.tune.run.max_steps": 9,
        "stages.tune.later.word": (1, 2),
        "stages.tune.optim.beta1": 2,
    }
    (tmp_path / "config.yaml").write_text("stages: 7", encoding="utf-8")
    assert RunHistory(tmp_path).settings() == []


def test_runs_whose_stages_differ_are_not_the_same(tmp_path):
    """In a rate, in what a later one begins with, in their order."""
    pre, tune = "{name: pre, epochs: 1}", "{name: tune, max_steps: 9, learning_rate: %s}"
    texts = [f"{pre}, {tune % rate}" for rate in ("1e-3", "0.001", "0.002")]
    texts += [f"{tune % 0.001}, {pre}"]
    runs = []
    for number, text in enumerate(texts):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(f"stages: [{text}]", encoding="utf-8")
        settings = {row.key: row.value for row in RunHistory(folder).settings()}
        runs.append(SimpleNamespace(settings=settings))
    assert list(differing_settings(runs[0], runs[1])) == []
    (only,) = differing_settings(runs[0], runs[2])
    assert (only.name, only.first, only.second) == (
        "stages.tune.optim.learning_rate",
        "0.001",
        "0.002",
    )
    names = [row.name for row in differing_settings(runs[0], runs[3])]
    assert names == ["stages", "stages.pre.init_from", "stages.tune.init_from"]
