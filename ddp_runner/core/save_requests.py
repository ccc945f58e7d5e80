"""Checkpoints that were asked for, on one rank: which are to be heard, made, or written. No file, no clock."""

from __future__ import annotations


class SaveRequests:
    """Counts what a person asks for; a request stays until a file, or the disk's refusal, has answered it.

    Whoever is asked votes until a step that counts has shown it to all ranks; from there on it is rank 0's
    to fulfil. ``wanted_step`` is the last such step, also of a request of rank 0's own: every rank keeps
    it in mind for the case that rank 0 dies before the file is there.
    """

    def __init__(self) -> None:
        self.wanted_step = 0
        self._asked = 0
        self._begun = 0  # those that the newest save was made for
        self._answered = 0

    @property
    def is_open(self) -> bool:
        """Whether a person waits for an answer."""
        return self._asked > self._answered

    @property
    def is_new(self) -> bool:
        """Whether no save has been begun for it."""
        return self._asked > self._begun

    def ask(self) -> None:
        """A person wants the next save: it is tried, however many have failed."""
        self._asked += 1

    def heard(self, step: int, *, is_mine: bool, fulfils: bool) -> None:
        """All ranks know since ``step`` that one of them wants a save; this one ``fulfils`` it, or not."""
        self.wanted_step = step
        if not fulfils:
            self._begun = self._answered = self._asked
        elif not is_mine:
            self.ask()

    def begun(self) -> None:
        """A save is made for all there are."""
        self._begun = self._asked

    def answered(self) -> None:
        """The newest save has ended as a file, or was refused by the disk, which was reported."""
        self._answered = self._begun
