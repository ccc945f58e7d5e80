"""Whether two machines have one folder: by a file in it, not by its path."""

from __future__ import annotations

import pytest

from ddp_runner.features.machines.folder_probe import FolderProbe, is_shared
from ddp_runner.kernel.system.folder_owner import new_term


def test_a_folder_with_the_probe_in_it_is_the_coordinators(tmp_path):
    """Another one of the same name is not, nor is this one for another coordinator."""
    term = new_term()
    probe = FolderProbe(tmp_path / "a" / "kept", term)
    probe.write()
    assert is_shared(tmp_path / "a" / "kept", term)
    assert not is_shared(tmp_path / "b" / "kept", term)
    assert not is_shared(tmp_path / "a" / "kept", new_term())
    probe.remove()
    assert not is_shared(tmp_path / "a" / "kept", term)
    assert not list(tmp_path.iterdir())  # as it was


def test_folders_that_hold_something_stay(tmp_path):
    """What a run has written, and a folder that was there before."""
    probe = FolderProbe(tmp_path / "kept", new_term())
    probe.write()
    (tmp_path / "kept" / "step_00000020.pt").touch()
    probe.remove()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step_00000020.pt"]
    (tmp_path / "empty").mkdir()
    probe = FolderProbe(tmp_path / "empty", new_term())
    probe.write()
    probe.remove()
    assert (tmp_path / "empty").is_dir()


def test_probes_of_the_killed_are_removed_by_who_takes_the_folder(tmp_path):
    """And nothing else."""
    old, new = FolderProbe(tmp_path, new_term()), FolderProbe(tmp_path, new_term())
    for probe in (old, new):
        probe.write()
    (tmp_path / ".owner").touch()
    new.remove_others()
    assert len(list(tmp_path.glob(".probe-*"))) == 1
    new.remove()
    assert [path.name for path in tmp_path.iterdir()] == [".owner"]


@pytest.mark.parametrize("term", ["", "../secret", "a/b", "*"])
def test_a_term_that_is_no_plain_word_names_no_file(tmp_path, term):
    """It comes from another machine."""
    (tmp_path / f".probe-{term}").parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / ".probe-").touch()
    assert not is_shared(tmp_path, term)


def test_where_nothing_can_be_written_nothing_is_shared(tmp_path):
    """The run says later what is wrong with its folder."""
    (tmp_path / "file").touch()
    term = new_term()
    probe = FolderProbe(tmp_path / "file" / "kept", term)
    probe.write()
    probe.remove_others()
    probe.remove()
    assert not is_shared(tmp_path / "file" / "kept", term)
