"""Decides from the environment alone if this process is a rank of another launcher. Looks nothing up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from ddp_runner import installed
from ddp_runner.kernel.rules.errors import BadInputError

PLAIN_RANK = "DDP_RUNNER_PLAIN_RANK"
# Of a launcher that starts a process a rank; one that starts a process a machine sets neither.
_MARKS = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")
_OF_RANK = ("RANK", "WORLD_SIZE")
_PORT_MAX = 65_535
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRank:
    """One rank among ``world_size``; it starts no ranks, and its launcher restarts it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def plain_rank(environment: Mapping[str, str]) -> PlainRank | None:
    """Return the rank that this process is; None if it starts its ranks itself.

    Kubernetes' PyTorchJob and TrainJob set RANK and WORLD_SIZE for each *pod*, together with PET_NNODES, so
    those two alone prove nothing: a shell may have inherited them. Raises BadInputError for impossible values.
    """
    has_both = "RANK" in environment and "WORLD_SIZE" in environment
    asked = environment.get(PLAIN_RANK, "")
    if asked not in ("", "0", "1"):
        raise BadInputError(PLAIN_RANK, asked, "must be 1 (this process is one rank) or 0")
    if asked == "1" and not has_both:
        raise BadInputError(PLAIN_RANK, asked, "needs RANK and WORLD_SIZE as well")
    is_marked = has_both and any(name in environment for name in _MARKS)
    if asked == "1" or (is_marked and asked != "0"):
        return _checked(environment)
    return None


def launched_part(rank: PlainRank) -> ModuleType:
    """Import what runs a rank of another launcher; it imports torch. Raises BadInputError where it is not installed."""
    for part in installed.parts("launched"):
        return part
    raise BadInputError("RANK", rank.rank, "the feature launchers is not installed")


def restarts_of(environment: Mapping[str, str]) -> int:
    """Return how often the launcher has restarted this job; it keeps its store, so keys must differ each time."""
    return sum(int(environment.get(name, "0")) for name in _RESTART_COUNTS)


def what_is_ignored(environment: Mapping[str, str]) -> str:
    """A line for people where RANK or WORLD_SIZE are set and mean no rank; else empty."""
    found = [f"{name}={environment[name]}" for name in _OF_RANK if name in environment]
    if not found:
        return ""
    return (
        f"{' and '.join(found)} of the environment {'is' if len(found) == 1 else 'are'} not used: this command "
        f"starts its ranks itself ({PLAIN_RANK}=1 makes it one rank, NNODES one of several machines)"
    )


def _checked(environment: Mapping[str, str]) -> PlainRank:
    rank = _whole(environment, "RANK", least=0)
    world_size = _whole(environment, "WORLD_SIZE", least=1)
    local_rank = _whole(environment, "LOCAL_RANK", least=0, otherwise=rank)
    local_world_size = _whole(environment, "LOCAL_WORLD_SIZE", least=1, otherwise=world_size)
    if rank >= world_size:
        raise BadInputError("RANK", rank, f"must be below WORLD_SIZE={world_size}")
    if world_size > 1:
        if not environment.get("MASTER_ADDR"):
            raise BadInputError("MASTER_ADDR", "", _STORE_EXPECTED)
        port = _whole(environment, "MASTER_PORT", least=1)
        if port > _PORT_MAX:
            raise BadInputError("MASTER_PORT", port, f"must be at most {_PORT_MAX}")
    return PlainRank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )


_STORE_EXPECTED = (
    "must be set with WORLD_SIZE above 1: the host of rank 0, where the ranks meet "
    "(torchrun sets it); unset RANK and WORLD_SIZE to have ranks started here"
)


def _whole(
    environment: Mapping[str, str], name: str, *, least: int, otherwise: int | None = None
) -> int:
    text = environment.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not text and name == "MASTER_PORT":
        raise BadInputError(
            name, "", "must be set with WORLD_SIZE above 1, together with MASTER_ADDR"
        )
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise BadInputError(
            name,
            text or "''",
            f"must be a whole number, {least} or more; unset RANK and WORLD_SIZE to have ranks "
            "started here",
        )
    return int(text)
