"""Whose a checkpoint folder is: the newest coordinator's that has taken it."""

from __future__ import annotations

from ddp_runner.kernel.system.folder_owner import OWNER_NAME, FolderOwner, new_term


def test_the_newest_that_takes_a_folder_has_it(tmp_path):
    """A folder that nobody has taken, or whose file is gone or unreadable, is no other's."""
    first, second = FolderOwner(tmp_path, new_term()), FolderOwner(tmp_path, new_term())
    assert (first.is_other(), second.is_other()) == (False, False)
    first.take()
    assert (first.is_other(), second.is_other()) == (False, True)
    second.take()
    assert (first.is_other(), second.is_other()) == (True, False)
    (tmp_path / OWNER_NAME).unlink()
    (tmp_path / OWNER_NAME).mkdir()
    assert (first.is_other(), second.is_other()) == (False, False)


def test_no_two_terms_are_alike():
    """Nor can one be guessed from another."""
    terms = {new_term() for _ in range(100)}
    assert len(terms) == 100
    assert {len(term) for term in terms} == {32}
