"""Which checkpoints are found that no rank has reported."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from ddp_runner.checkpoint.manifest import Manifest, checkpoint_name, manifest_name
from ddp_runner.checkpoint.unreported import REPORTED_KEPT_MIN, Published
from ddp_runner.kernel.wire.events import CheckpointSaved


@pytest.fixture
def folder(tmp_path):
    """Holds a checkpoint of an earlier launch."""
    publish(tmp_path, 10, digest="a")
    return tmp_path


def publish(folder, step, *, digest):
    """As a rank does it: the same name again, later."""
    manifest = Manifest(
        step=step,
        epoch=0,
        samples=0,
        run_id="x",
        file=checkpoint_name(step),
        size_bytes=1,
        sha256=digest * 64,
        monitored=None,
        meaning={},
        settings_digest="0",
        versions={},
        created_utc="",
        reason="interval",
    )
    path = folder / manifest_name(step)
    after_ns = max((one.stat().st_mtime_ns for one in folder.iterdir()), default=0) + 1_000_000
    path.with_name("new").write_text(manifest.to_json())
    os.utime(path.with_name("new"), ns=(after_ns, after_ns))
    path.with_name("new").replace(path)
    return CheckpointSaved(
        rank=0, step=step, path=str(path), blocked_s=0, size_bytes=1, sha256=manifest.sha256
    )


def steps(manifests):
    return [manifest.step for manifest in manifests]


def test_what_nobody_has_reported_is_found_once(folder):
    """Oldest first; control: what was there before is none of this launch's."""
    published = Published(folder)
    assert not published.is_any_new
    publish(folder, 30, digest="b")
    publish(folder, 20, digest="c")
    assert published.is_any_new
    assert steps(published.find()) == [30, 20]
    assert published.find() == []


def test_what_its_rank_has_reported_is_not_found(folder):
    """Control; and the same step again, after a roll-back, is another one."""
    published = Published(folder)
    assert published.is_news(publish(folder, 10, digest="b"))
    assert published.find() == []
    publish(folder, 10, digest="c")
    assert steps(published.find()) == [10]


def test_what_was_reported_is_remembered_while_it_is_on_disk_only(folder):
    """However many saves a run reports; control: one that is still there is not found."""
    published = Published(folder)
    kept = publish(folder, 20, digest="b")
    assert published.is_news(kept)
    for step in range(30, 30 + 3 * REPORTED_KEPT_MIN):
        assert published.is_news(replace(kept, step=step))  # deleted since then
        assert len(published._reported) <= REPORTED_KEPT_MIN
    assert published.find() == []


def test_a_disk_that_cannot_be_read_for_a_moment_makes_nothing_new(folder):
    """Neither of an earlier launch nor reported; control: what was published meanwhile is found."""
    published = Published(folder)
    assert published.is_news(publish(folder, 20, digest="b"))
    folder.rename(folder.with_name("away"))
    assert published.find() == []
    folder.with_name("away").rename(folder)
    publish(folder, 30, digest="c")
    assert steps(published.find()) == [30]


def test_a_rank_that_lived_does_not_report_it_twice(folder):
    """It may be found before its rank, at its next step, says so."""
    published = Published(folder)
    saved = publish(folder, 20, digest="b")
    assert steps(published.find()) == [20]
    assert not published.is_news(saved)
    assert published.is_news(replace(saved, step=30))


def test_a_manifest_written_at_the_start_is_of_an_earlier_launch(folder):
    """Whoever resumes repairs what a crash left; nothing has been trained yet."""
    published = Published(folder)
    publish(folder, 20, digest="b")
    published.begin()
    assert published.find() == []


def test_a_torn_manifest_or_none_is_passed_over(folder):
    """Control: it stands for nothing."""
    published = Published(folder)
    (folder / manifest_name(20)).write_text("{")
    assert published.find() == []
    assert Published(folder / "missing").find() == []
