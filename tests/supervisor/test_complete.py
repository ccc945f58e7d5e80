"""What is reported of a complete run that is started again with other settings."""

from __future__ import annotations

from ddp_runner import config
from ddp_runner.supervisor.reporting.run_begin import changed_settings


def test_a_setting_newer_than_the_run_is_no_change_of_it(tmp_path):
    """Its file lacks the setting; who gives it a value now reads of that."""
    asked = {"log_dir": str(tmp_path), "learning_rate": 0.002}
    lines = config.to_yaml(config.from_flat({**asked, "learning_rate": 0.001})).splitlines()
    kept = [line for line in lines if "rescue_dir" not in line]
    assert len(kept) == len(lines) - 1
    (tmp_path / "config.yaml").write_text("\n".join(kept))
    changed = ["optim.learning_rate 0.001 -> 0.002"]
    assert changed_settings(config.from_flat(asked)) == changed
    elsewhere = config.from_flat({**asked, "rescue_dir": "elsewhere"})
    assert changed_settings(elsewhere) == ['checkpoint.rescue_dir "" -> elsewhere', *changed]
