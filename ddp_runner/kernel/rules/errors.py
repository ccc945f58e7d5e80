"""A mistake of the user's, as an error. What fails by itself is a fault: see faults."""

from __future__ import annotations

from ddp_runner.kernel.rules.secrets import masked


class BadInputError(Exception):
    """The user's settings, data or files are wrong: exit 2, one line, nothing touched.

    ``option`` is the name that the user wrote or would write (``--data``, ``data.batch_size``), ``value``
    its value, ``expected`` the right kind of value. A secret is not shown.
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        value = masked(value, option)
        shown = str(value).replace("\n", "\\n")
        super().__init__(f"{option}={shown}: {expected}" if shown else f"{option}: {expected}")
        self.option = option
        self.value = value
        self.expected = expected
