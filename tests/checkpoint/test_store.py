"""Save, retention and load: what a user of the store relies on."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest
import torch

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.file_hash import digest_of
from ddp_runner.checkpoint.manifest import Manifest, manifest_name
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.run_stages import StageOfFile
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from tests.processes import run_ranks
from tests.temporaries import of_a_dead_writer

from .states import facts_of, save, state_of, steps_in


def _load(directory, which="auto", **options):
    return CheckpointStore(directory, keep_last=2).load(which, **options)


def _damage(directory, step: int) -> None:
    path = directory / f"step_{step:08d}.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def test_what_was_saved_is_loaded(tmp_path):
    """State, manifest and path come back as they were given, without the store's own key."""
    saved = save(tmp_path / "new", 10, monitored=2.5)
    loaded = _load(tmp_path / "new")
    assert loaded.manifest == saved.manifest
    assert (loaded.path, loaded.rejected) == (saved.path, ())
    assert set(loaded.state) == set(state_of(10))
    assert torch.equal(loaded.state["model"]["weight"], state_of(10)["model"]["weight"])
    assert saved.manifest.meaning == {"model": {"hidden_size": 64}, "seed": 7}
    assert 0 < saved.write_s < saved.blocked_s


def test_plain_torch_load_reads_the_file(tmp_path):
    """A checkpoint needs no code of ours to be read."""
    content = torch.load(save(tmp_path, 10).path, weights_only=True)
    assert content["counters"] == {"step": 10, "mark": ""}
    assert content["manifest"]["run_id"] == "run-1"


def test_an_empty_directory_has_nothing_to_load(tmp_path):
    """Nothing there, or only what a cut-off first save leaves, is None, no error."""
    assert _load(tmp_path / "none") is None
    (tmp_path / ".step_00000010.pt.tmp-1").write_bytes(b"half")
    for which in ("auto", "last", "best", "none"):
        assert _load(tmp_path, which) is None


def test_of_each_stage_that_is_over_the_last_and_the_best_stay(tmp_path):
    """What is the best is asked of each stage alone, and of the newest by those that only say best."""
    names = ("pre", "tune")
    values = {10: 0.1, 20: 0.3, 30: 0.2, 40: 5.0, 50: 4.0, 60: 6.0, 70: 7.0}
    for step, monitored in values.items():
        number = int(step > 30)
        stage = StageOfFile(number=number, first_step=30 * number, names=names[: number + 1])
        about = {"stage": stage.to_record()}
        saved = save(tmp_path, step, monitored=monitored, keep_last=1, about=about)
    assert steps_in(tmp_path) == [10, 30, 50, 70]
    assert saved.manifest.about["best"] == {"step": 50, "value": 4.0}
    catalog = CheckpointStore(tmp_path, keep_last=1).catalog
    assert (catalog.best().step, catalog.best("pre").step) == (50, 10)
    assert catalog.pointer("best").name == "step_00000050.pt"


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    """The last N stay and the best one beside them; everything else goes, manifests included."""
    for step, monitored in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5), (50, 2.2)):
        save(tmp_path, step, monitored=monitored, keep_last=2)
    assert steps_in(tmp_path) == [20, 40, 50]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"step_000000{n}.{e}" for n in (20, 40, 50) for e in ("pt", "json")} | {
        "last",
        "best",
    }
    assert _load(tmp_path, "best").manifest.step == 20


def test_every_so_many_steps_one_is_kept_for_good(tmp_path):
    """Beside the newest and the best; step 0, what the run began with, is none of them."""
    for step in range(0, 80, 10):
        save(tmp_path, step, monitored=3.0 - step / 100, keep_last=2, keep_every=30)
    assert steps_in(tmp_path) == [30, 60, 70]


def test_the_best_value_survives_a_relaunch_and_ignores_what_is_not_finite(tmp_path):
    """A new store knows the best of its predecessors; NaN never becomes best, ties keep the older."""
    for step, monitored in ((10, math.nan), (20, 1.0), (30, 1.0), (40, math.nan), (50, None)):
        save(tmp_path, step, monitored=monitored, keep_last=1)
    assert steps_in(tmp_path) == [20, 50]
    assert _load(tmp_path, "best").manifest.monitored == 1.0


def judged(folder, step, value, *, monitor="all/hits", mode="max"):
    store = CheckpointStore(folder, keep_last=1)
    facts = facts_of(step, monitored=value, monitor=monitor, mode=mode)
    return store.save(state_of(step), facts).manifest


def test_the_best_is_the_highest_where_that_is_asked_for(tmp_path):
    """Kept, named by its pointer, and in what each later manifest says; ties keep the older."""
    found = [judged(tmp_path, step, value) for step, value in ((10, 1.0), (20, 3.0), (30, 3.0))]
    assert [one.about["best"]["step"] for one in found] == [10, 20, 20]
    assert steps_in(tmp_path) == [20, 30]
    assert (tmp_path / "best").read_text() == "step_00000020.pt\n"


def test_only_what_was_judged_by_the_same_figure_is_compared(tmp_path):
    """A resume with another monitor or mode begins by itself; files of before, which name none, count."""
    save(tmp_path, 10, monitored=0.5, keep_last=1)
    assert judged(tmp_path, 20, 2.0, monitor="validation_loss", mode="min").about["best"] == {
        "step": 10,
        "value": 0.5,
    }
    assert judged(tmp_path, 40, 0.1).about["best"] == {"step": 40, "value": 0.1}
    assert _load(tmp_path, "best").manifest.step == 40


def cut_short(path):
    path.write_bytes(b"short")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit])
def test_retention_counts_only_sound_checkpoints(tmp_path, damage):
    """Damaged newer files do not push out the older ones that can still be loaded."""
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=5)
    for step in (20, 30):
        damage(tmp_path / f"step_{step:08d}.pt")
    save(tmp_path, 40, keep_last=2)
    assert 10 in steps_in(tmp_path)
    save(tmp_path, 50, keep_last=2)
    assert steps_in(tmp_path) == [40, 50]


def test_retention_spares_what_a_roll_back_would_need(tmp_path):
    """The newest one up to that step, and one at a time: the one of before goes with the next save."""
    catalog = Catalog(tmp_path)
    catalog.spare(10)  # control: there is none yet
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert steps_in(tmp_path) == [20, 30]
    catalog.spare(25)
    for step in (40, 50):
        save(tmp_path, step)
    assert steps_in(tmp_path) == [20, 40, 50]
    catalog.spare(15)  # none is left from before that
    save(tmp_path, 60)
    assert steps_in(tmp_path) == [20, 50, 60]
    catalog.spare(55)
    save(tmp_path, 70)
    save(tmp_path, 80)
    assert steps_in(tmp_path) == [50, 70, 80]
    catalog.spare_none()
    save(tmp_path, 90)
    assert steps_in(tmp_path) == [80, 90]


def test_retention_reads_each_file_once(tmp_path, monkeypatch):
    """In one process; what is damaged while it lives is found when the next one is saved."""
    store = CheckpointStore(tmp_path, keep_last=2)
    read = []
    verify = store.catalog.verify
    monkeypatch.setattr(store.catalog, "verify", lambda e: read.append(e.step) or verify(e))
    for step in range(10, 70, 10):
        notes = store.save(state_of(step), facts_of(step)).notes
        assert notes == (), "control"
        if step == 50:
            flip_a_bit(tmp_path / "step_00000050.pt")
            break
    assert read == [20, 30, 40]
    (note,) = store.save(state_of(60), facts_of(60)).notes
    assert "step_00000050.pt is unusable" in note
    assert steps_in(tmp_path) == [40, 50, 60]
    assert store.save(state_of(70), facts_of(70)).notes == (), "said once"
    assert steps_in(tmp_path) == [60, 70]


def test_going_back_sets_the_left_branch_aside(tmp_path):
    """After a save at an earlier step, no later step of the abandoned branch is the newest."""
    for step, monitored in ((10, 3.0), (20, 2.0), (30, 1.0)):
        save(tmp_path, step, monitored=monitored, keep_last=3)
    save(tmp_path, 15, monitored=2.5, keep_last=3)
    assert steps_in(tmp_path) == [10, 15]
    assert _load(tmp_path).manifest.step == 15
    assert _load(tmp_path, "best").manifest.step == 15
    [aside] = tmp_path.glob("set_aside_*")
    assert steps_in(aside) == [20, 30]
    assert _load(tmp_path, str(aside)).manifest.step == 30


def test_load_walks_to_the_newest_that_verifies(tmp_path):
    """Damaged checkpoints are passed over, newest first, and named with their reasons."""
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=3)
    _damage(tmp_path, 30)
    (tmp_path / "step_00000020.pt").unlink()
    loaded = _load(tmp_path)
    assert loaded.manifest.step == 10
    assert [(path.name, reason[:12]) for path, reason in loaded.rejected] == [
        ("step_00000030.pt", "its SHA-256 "),
        ("step_00000020.pt", "a manifest w"),
    ]
    assert steps_in(tmp_path) == [10, 30]


def test_bad_ones_are_set_aside_only_where_a_sound_one_exists(tmp_path):
    """A bad checkpoint keeps its bytes under ``.bad`` with the reason beside; it is not tried again."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    _damage(tmp_path, 20)
    content = (tmp_path / "step_00000020.pt").read_bytes()
    assert _load(tmp_path, set_bad_aside=True).manifest.step == 10
    assert (tmp_path / "step_00000020.pt.bad").read_bytes() == content
    assert "SHA-256" in (tmp_path / "step_00000020.pt.bad.reason").read_text()
    assert _load(tmp_path).rejected == ()
    _damage(tmp_path, 10)
    for _ in range(2):
        with pytest.raises(FaultError):
            _load(tmp_path, set_bad_aside=True)
    assert steps_in(tmp_path) == [10]


def _loaded_in_little_memory(me, directory):
    """What a process without room for the file says, and the step that it loads once there is room."""
    _load(directory)  # what starts with the first one takes room of its own
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, before[1]))
    try:
        with pytest.raises(RuntimeError) as caught:
            _load(directory, set_bad_aside=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return str(caught.value), _load(directory, set_bad_aside=True).manifest.step


def test_memory_that_does_not_suffice_is_no_fault_of_the_file(tmp_path):
    """An older checkpoint would lose steps, and the good one be set aside."""
    save(tmp_path, 10)
    big = {**state_of(20), "model": {"weight": torch.zeros(2**26, dtype=torch.uint8)}}
    save(tmp_path, 20, state=big)
    # In a new process: what earlier tests have left to be freed would be room for the file.
    ((said, step),) = run_ranks(_loaded_in_little_memory, 1, tmp_path)
    assert "can't allocate memory" in said
    assert step == 20


def test_none_that_verifies_is_a_fault_that_names_each(tmp_path):
    """Where checkpoints exist but none can be loaded, the run must not start from nothing."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    _damage(tmp_path, 10)
    (tmp_path / "step_00000020.pt").write_bytes(b"")
    with pytest.raises(FaultError) as caught:
        _load(tmp_path)
    fault = caught.value.fault
    assert fault.kind is FaultKind.CHECKPOINT_BAD
    for text in ("step_00000010.pt: its SHA-256", "step_00000020.pt: 0 bytes", '"resume": "none"'):
        assert text in fault.cause


def test_a_path_that_does_not_verify_is_bad_input(tmp_path):
    """What the user named is loaded or refused, never replaced by another one."""
    save(tmp_path, 10)
    path = save(tmp_path, 20).path
    assert _load(tmp_path, str(tmp_path / "step_00000010.pt")).manifest.step == 10
    _damage(tmp_path, 20)
    with pytest.raises(BadInputError, match=r"resume.*does not verify.*SHA-256"):
        _load(tmp_path, str(path), set_bad_aside=True)
    assert path.exists()


def test_a_file_alone_still_says_what_it_is(tmp_path):
    """A checkpoint that was copied without its manifest loads with the same manifest."""
    saved = save(tmp_path, 10, monitored=2.0)
    copy = tmp_path / "copy"
    copy.mkdir()
    saved.path.rename(copy / saved.path.name)
    assert _load(copy).manifest == saved.manifest


class RunsCode:
    """Unpickled, it would make a file."""

    def __reduce__(self):
        return (open, ("made_by_code", "w"))


def put_code(directory, step):
    """A checkpoint with a manifest that fits, and with an object in it that runs code."""
    saved = save(directory, step)
    torch.save({"manifest": {}, "model": RunsCode()}, saved.path)
    facts = saved.manifest.facts()
    size_bytes, digest = saved.path.stat().st_size, digest_of(saved.path)
    manifest = Manifest.from_facts(
        facts, file=saved.path.name, size_bytes=size_bytes, sha256=digest
    )
    (directory / manifest_name(step)).write_text(manifest.to_json())
    return saved.path


def test_what_could_run_code_is_refused_and_set_aside(tmp_path, monkeypatch):
    """Its digest may be right: it takes no sound one's place, and the next one is loaded."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints"
    for step in (10, 20):
        save(folder, step)
    bad = put_code(folder, 30)
    saved = CheckpointStore(folder, keep_last=2).save(state_of(40), facts_of(40))
    assert steps_in(folder) == [20, 30, 40], "30 is not one of the two that are kept"
    (note,) = saved.notes
    assert f"{bad} is unusable (holds objects that could run code; refused (io.open))" in note
    saved.path.write_bytes(b"damaged")
    loaded = _load(folder, set_bad_aside=True)
    assert loaded.manifest.step == 20
    assert loaded.rejected[1] == (bad, "holds objects that could run code; refused (io.open)")
    aside = bad.with_name(f"{bad.name}.bad")
    assert (aside.exists(), bad.exists()) == (True, False)
    assert "could run code" in aside.with_name(f"{aside.name}.reason").read_text()
    with pytest.raises(BadInputError, match="could run code"):
        _load(folder, str(put_code(folder, 50)))
    assert not Path("made_by_code").exists()


def test_a_foreign_file_under_our_name_is_refused_with_the_reason(tmp_path):
    """A torch file that we did not write, and one that only code could read, are no checkpoints."""
    torch.save({"model": {}}, tmp_path / "step_00000010.pt")
    torch.save({"manifest": pytest.Item}, tmp_path / "step_00000020.pt")
    with pytest.raises(FaultError, match=r"20\.pt: holds objects .*10\.pt: it was not written"):
        _load(tmp_path)


def test_a_state_that_cannot_be_read_again_is_never_written(tmp_path):
    """A wrong value or a key that is ours is an error of the caller; nothing is written."""
    for state in ({"x": object()}, {"manifest": 1}):
        with pytest.raises((TypeError, ValueError)):
            save(tmp_path / "new", 10, state=state)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="keep_last=0"):
        CheckpointStore(tmp_path, keep_last=0)


def test_the_first_save_removes_what_a_killed_writer_left(tmp_path):
    """A kill in the middle of a save costs no disk space beyond the next save."""
    left = of_a_dead_writer(tmp_path / "step_00000010.pt")
    saved = save(tmp_path, 20)
    assert list(tmp_path.glob(".*")) == []
    assert saved.notes == (f"removed {left}, which a writer that was killed had left",)


def test_what_only_another_machine_can_judge_is_left_alone_and_said(tmp_path):
    """It may be saving there now; so may an earlier version, whose names have no machine."""
    left = of_a_dead_writer(tmp_path / "step_00000010.pt")
    elsewhere = left.rename(left.with_name(left.name.replace(".tmp-", ".tmp-node7~")))
    earlier = tmp_path / ".step_00000011.pt.tmp-1"
    earlier.write_bytes(b"half")
    saved = save(tmp_path, 20)
    assert sorted(tmp_path.glob(".*")) == sorted([elsewhere, earlier])
    assert [note.split(" ")[0] for note in saved.notes] == sorted(map(str, [elsewhere, earlier]))
    assert all("only its own machine knows whether it goes on" in one for one in saved.notes)
