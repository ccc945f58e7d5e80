"""Translates the names and values of other trainers' options into this project's. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ddp_runner.config.fields import SWITCHES, normal_name, removed
from ddp_runner.config.foreign import (
    ALWAYS,
    FACTS,
    SAID,
    SWITCHES_OF_FACTS,
    WORDS,
)
from ddp_runner.core.settings.declaration import read_switch
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddp_runner.config.sources import Assignment
    from ddp_runner.core.plain_rank import PlainRank

# As configure writes them, and others' files have them. A host without its port is no endpoint.
_OPTION_OF = {
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "--nnodes"),
    **dict.fromkeys(("node_rank", "machine_rank"), "--node-rank"),
    "rdzv_endpoint": "--rdzv-endpoint",
}
_OPEN = ("", "none", "null", "auto", "-1")  # who writes these says nothing
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "[::1]")  # noqa: S104 - nothing is bound to it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run that its start decides, not a setting.

    ``starter``: the commands train or run, or another launcher or program. ``rank`` and ``local_rank``:
    of this process, None if the command starts the ranks. ``node_rank``: None if machines are numbered as they
    join. ``host`` and ``port``: the meeting place of the machines; ``own_host``: the name of this one. ``mode``: that
    of a task, empty if none was chosen. ``files``: the settings files, as they were given.
    """

    starter: Literal["train", "run", "launcher"]
    ranks: int
    machines: int = 1
    least_machines: int = 1
    node_rank: int | None = 0
    host: str = ""
    port: str = ""
    own_host: str = ""
    rank: int | None = None
    local_rank: int | None = None
    mode: str = ""
    is_dry: bool = False
    files: tuple[str, ...] = ()

    @property
    def is_one_rank(self) -> bool:
        """True for a run of one rank without data parallelism; it may be called distributed or not."""
        return self.ranks == 1 and self.mode != "data_parallel"


def facts_of_rank(rank: PlainRank, environment: Mapping[str, str]) -> RunFacts:
    """Return the facts of a run whose ranks another launcher, or the program itself, has started."""
    machines = max(1, rank.world_size // rank.local_world_size)
    return RunFacts(
        starter="launcher",
        ranks=rank.world_size,
        machines=machines,
        least_machines=machines,
        node_rank=rank.rank // rank.local_world_size,
        host=environment.get("MASTER_ADDR", ""),
        port=environment.get("MASTER_PORT", ""),
        rank=rank.rank,
        local_rank=rank.local_rank,
    )


def machines_said(given: Iterable[Assignment]) -> dict[str, tuple[str, str]]:
    """Return the machine facts among the given settings: option to (name as written, text of the value)."""
    found = {}
    for one in given:
        option = _OPTION_OF.get(normal_name(one.name))
        word = str(one.value).strip()
        if option is not None and word.lower() not in _OPEN:
            found[option] = (one.written, word)
    return found


def is_foreign_switch(name: str) -> bool:
    """Return True if ``name`` is a switch in other trainers, which as an option needs no value."""
    return normal_name(name) in {*ALWAYS, *SWITCHES, *SWITCHES_OF_FACTS}


def is_fact(name: str) -> bool:
    """Return True if ``name`` states a fact about the run (which may be wrong) and is no setting."""
    return normal_name(name) in FACTS


def untrue(given: Iterable[Assignment], facts: RunFacts) -> list[BadInputError]:
    """Return an error for each given fact that is wrong for this run; the last value of each name counts."""
    said = {normal_name(one.name): one for one in given if is_fact(one.name)}
    found = []
    for name, one in said.items():
        word = str(one.value).strip()
        if word.lower() in _OPEN:
            continue
        if expected := _CHECKS[FACTS[name]](word, facts):
            found.append(BadInputError(one.written, word, expected))
    return found


def in_our_values(given: Assignment) -> Assignment | None:
    """``given`` with the value that its setting takes; None where it asks for what is so anyway.

    Raises BadInputError where it asks to turn off what is always done.
    """
    name = normal_name(given.name)
    if name in FACTS:
        return None
    gone = removed(name)
    if gone is not None and str(given.value).strip().lower() == gone[0]:
        return None
    if name in ALWAYS:
        if not _is_on(given):
            raise BadInputError(given.written, "false", f"cannot be turned off: {ALWAYS[name]}")
        return None
    if name in SWITCHES:
        value = SWITCHES[name][0 if _is_on(given) else 1]
        return None if value is None else replace(given, value=value)
    alone = given.value[0] if isinstance(given.value, list) and len(given.value) == 1 else None
    word = str(given.value if alone is None else alone).strip().lower()
    return replace(given, value=WORDS.get(name, {}).get(word, given.value))


def note_on(given: Assignment) -> str:
    """Return a note for a person who asked for something that is always done; usually empty."""
    name = normal_name(given.name)
    return f"{given.written}: {ALWAYS[name]}" if name in SAID else ""


def _is_on(given: Assignment) -> bool:
    try:
        return read_switch(given.value)
    except ValueError:
        raise BadInputError(given.written, given.value, "must be true or false") from None


def _machines(word: str, facts: RunFacts) -> str:
    least, most = facts.least_machines, facts.machines
    if word in (str(most), f"{least}:{most}"):
        return ""
    has = f"this run is on {'one machine' if most == 1 else f'{most} machines'}"
    if facts.starter == "launcher":
        return f"{has}, as it was started: leave it out"
    return f"{has}: set the number with the option --nnodes N on each machine"


def _node_rank(word: str, facts: RunFacts) -> str:
    if word == str(facts.node_rank):
        return ""
    if facts.machines == 1:
        return "this run is on one machine: leave it out"
    if facts.node_rank is None:
        return "machines are numbered in the order of joining: use the option --node-rank R for another number"
    return f"this machine is number {facts.node_rank}: leave it out"


def _endpoint(word: str, facts: RunFacts) -> str:
    host, colon, port = word.rpartition(":")
    if not colon or not port.isdecimal():
        host, port = word, ""
    is_here = host.lower() in (*_LOCAL, facts.own_host.lower())
    if facts.machines == 1 and facts.starter != "launcher":
        if is_here:
            return ""
        return "the ranks of one machine find each other: leave it out, or use --nnodes N for several machines"
    if (host, port) in ((facts.host, facts.port), (facts.host, "")) or not facts.host:
        return ""
    return f"the ranks of this run meet at {facts.host}:{facts.port}: leave it out"


def _init_method(word: str, facts: RunFacts) -> str:
    if word == "env://":
        return ""
    if word.startswith("tcp://"):
        return _endpoint(word.removeprefix("tcp://"), facts)
    return "ranks meet at a store of the run: leave it out, or write env://"


def _ranks(word: str, facts: RunFacts) -> str:
    if word == str(facts.ranks):
        return ""
    has = f"this run has {facts.ranks} rank{'' if facts.ranks == 1 else 's'}"
    if facts.starter == "launcher":
        return f"{has}, as it was started: leave it out"
    each = "" if facts.machines == 1 else ", for each machine"
    return f"{has}: set the number with --nproc-per-node N{each}"


def _numbered(word: str, number: int | None, facts: RunFacts) -> str:
    if word == str(number or 0):
        return ""
    if number is None:
        return f"this command starts all ranks ({facts.ranks}) and numbers them: leave it out"
    return f"this process was started as {number}: leave it out"


def _rank(word: str, facts: RunFacts) -> str:
    return _numbered(word, facts.rank, facts)


def _local_rank(word: str, facts: RunFacts) -> str:
    return _numbered(word, facts.local_rank, facts)


def _of_mode(mode: str) -> Callable[[str, RunFacts], str]:
    def check(word: str, facts: RunFacts) -> str:
        is_so = (facts.mode or "distributed") == mode
        try:
            wanted = read_switch(word)
        except ValueError:
            return "must be true or false"
        if wanted == is_so or (mode == "distributed" and facts.is_one_rank):
            return ""
        if facts.starter == "train":
            cure = f"use mode={mode}" if wanted else "use mode=single for one rank"
            return f"this run is {facts.mode}: {cure}"
        return "each rank is a process: leave it out"

    return check


def _dry_run(word: str, facts: RunFacts) -> str:
    try:
        wanted = read_switch(word)
    except ValueError:
        return "must be true or false"
    if wanted == facts.is_dry:
        return ""
    if not wanted:
        return "this is a dry run: leave out --dry-run"
    if facts.starter == "run":
        return "only tasks have a dry run (train --dry-run): leave it out"
    return "this run trains; use train's option --dry-run for a dry run"


def _file(word: str, facts: RunFacts) -> str:
    names = {form for file in facts.files for form in (file, *_forms(file))}
    if word in names:
        return ""
    has = (
        f"the settings are those of {', '.join(facts.files)}" if facts.files else "no file is read"
    )
    cure = "leave it out" if facts.starter == "launcher" else "use the option --config FILE"
    return f"{has}: {cure}"


def _forms(file: str) -> tuple[str, str]:
    """Its name without folder, and without its ending."""
    name = file.rpartition("/")[2]
    return name, name.rpartition(".")[0]


_CHECKS: Mapping[str, Callable[[str, RunFacts], str]] = {
    "machines": _machines,
    "node rank": _node_rank,
    "endpoint": _endpoint,
    "init method": _init_method,
    "ranks": _ranks,
    "rank": _rank,
    "local rank": _local_rank,
    "distributed": _of_mode("distributed"),
    "data parallel": _of_mode("data_parallel"),
    "dry run": _dry_run,
    "file": _file,
}
