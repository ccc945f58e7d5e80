"""Formats the results of a dry run as lines: the modules, and the memory of a rank. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.observe import format as fmt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COLUMNS = 79
ROWS_MAX = 60
_NAME_COLUMNS_MIN, _KIND_COLUMNS_MIN, _KIND_COLUMNS_MAX, _DTYPE_COLUMNS_MAX = 12, 8, 20, 14
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """A module with parameters of its own, each of which is counted once in a model."""

    name: str
    kind: str
    parameters: int
    trained: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Bytes on the device of one rank, but for ``average_on_host``. ``activations``: kept by forward for backward."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    average_on_host: bool
    batch: int
    activations: int
    samples: int
    peak: int | None = None
    available: int | None = None

    @property
    def total(self) -> int:
        """The bytes of the device's memory in use."""
        average = 0 if self.average_on_host else self.average
        kept = self.weights + self.gradients + self.optimizer + average
        return kept + self.batch + self.activations


def module_table(modules: Sequence[ModuleFacts], *, columns: int = COLUMNS) -> list[str]:
    """Return a row for each; modules that differ only in a number of a list share one."""
    groups: dict[tuple[object, ...], list[ModuleFacts]] = {}
    for one in modules:
        pattern = _NUMBER.sub("*", f".{one.name}")[1:]
        is_trained = (one.trained > 0, one.trained < one.parameters)
        groups.setdefault((pattern, one.kind, one.dtypes, is_trained), []).append(one)
    rows = [
        (
            str(pattern) if len(members) > 1 else members[0].name or "(the model itself)",
            _cut(str(kind), _KIND_COLUMNS_MAX - 6)
            + (f" x {len(members)}" if len(members) > 1 else ""),
            fmt.count(sum(one.parameters for one in members)),
            _trained(members),
            _cut(", ".join(members[0].dtypes), _DTYPE_COLUMNS_MAX),
        )
        for (pattern, kind, _, _), members in groups.items()
    ]
    left_out = len(rows) - ROWS_MAX
    shown = [("module", "type", "parameters", "trained", "dtype"), *rows[:ROWS_MAX]]
    widths = [max(len(row[column]) for row in shown) for column in range(5)]
    room = columns - 9 - sum(widths[2:])  # for the names and types
    widths[1] = max(_KIND_COLUMNS_MIN, min(widths[1], room - _NAME_COLUMNS_MIN))
    widths[0] = max(_NAME_COLUMNS_MIN, min(widths[0], room - widths[1]))
    cut = [(*map(_cut, row[:2], widths), *row[2:]) for row in shown]
    lines = [_aligned(row, widths) for row in cut]
    lines.insert(1, " " + "-" * (max(map(len, lines)) - 1))
    return lines + ([f" and {left_out} more"] if left_out > 0 else [])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    name, kind, parameters, trained, dtype = (
        cell.rjust(width) if column == 2 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return f" {name}  {kind}  {parameters}  {trained}  {dtype}".rstrip()


def _trained(members: Sequence[ModuleFacts]) -> str:
    trained = sum(one.trained for one in members)
    if trained == sum(one.parameters for one in members):
        return "yes"
    return fmt.count(trained) if trained else "no"


def _cut(text: str, columns: int) -> str:
    """The ends of a long name say more than its middle."""
    if len(text) <= columns:
        return text
    half = (columns - 3) // 2
    return f"{text[: columns - 3 - half]}...{text[-half:]}"


def memory_table(facts: MemoryFacts) -> Iterator[str]:
    """A row for each use, and what they come to."""
    rows = [
        ("weights and buffers", facts.weights, ""),
        ("gradients", facts.gradients, ""),
        ("optimizer", facts.optimizer, "from its first step on"),
        *([("average", facts.average, "in host memory")] if facts.average_on_host else []),
        *([("average", facts.average, "")] if facts.average and not facts.average_on_host else []),
        ("batch", facts.batch, ""),
        ("activations", facts.activations, f"as seen, of {facts.samples} samples"),
    ]
    yield " memory of a rank"
    yield " " + "-" * 52
    for name, size, note in rows:
        yield f" {name:<21}{fmt.byte_size(size):>8}  {note}".rstrip()
    of = "" if facts.available is None else f"of {fmt.byte_size(facts.available)} on the device"
    yield f" {'together, about':<21}{fmt.byte_size(facts.total):>8}  {of}".rstrip()
    if facts.peak is not None:
        yield f" {'most at once, here':<21}{fmt.byte_size(facts.peak):>8}  without optimizer and average"
