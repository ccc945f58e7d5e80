"""Keeps per-rank state at each step, and restores it at the step from which a rank resumes.

Such state is an environment, a replay buffer, a generator or a running mean: no other rank has a copy of it. Only asks
other ranks how far they are (``rank_memory``).
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.kernel.rules.faults import rank_list
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.wire.board import Slot
from ddp_runner.system.local_places import BETWEEN, STEPS
from ddp_runner.training.local_state.by_value import KeptLocally, Pickled
from ddp_runner.training.local_state.elsewhere import Elsewhere, Guest, Seat
from ddp_runner.training.local_state.rank_memory import (
    CHANGES_LATE,
    KNOWN,
    NO_STEP,
    SETTLED,
    Place,
    RankMemory,
    newest_of,
)

LOCAL = "local"  # in a state: rank, as text -> bytes
LARGE_BYTES = 64 << 20
LARGE_ELSEWHERE_BYTES = 4 << 20  # the same, where it is sent to another machine
_SEALS_TIMED = 8
_LOOKS_YIELDING = 200  # at the other ranks, before this one sleeps between two looks
_LOOK_S = 0.0002
_STEP_BITS = 40  # of a value on the ranks' board; the generation is above


class LocalState:
    """Keeps the objects of one rank. Without objects every method does nothing, at no cost.

    The order of calls in a step: :meth:`seal` before any rank can commit the step, :meth:`committed`, and
    :meth:`settle` once the program has ended the step. :meth:`put_back` follows if the next step is given up.
    """

    def __init__(
        self, objects: Mapping[str, Any] | None = None, *, option: str = "", is_tasks: bool = False
    ) -> None:
        """``option``: the name of the user's call, for error lines. ``is_tasks``: no user code follows an update.

        Raises BadInputError for an object that cannot be kept.
        """
        self._kept = KeptLocally(objects, option=option) if objects else None
        self.option = option
        self.names = () if self._kept is None else self._kept.names
        self._flags = KNOWN if is_tasks else 0  # for the next place that is written
        self._as_of_update: dict[int, int] = {}  # by rank: see Header
        self._rank = self._world_size = 0
        self._local_world_size = 1
        self._memory: RankMemory | None = None
        self._places: list[int] = []  # of the group's ranks, by their numbers on this machine
        self._live_step: int | None = (
            None  # the step whose state the objects have, or had when it was sealed
        )
        self._count = 0
        self._is_between = False  # functions between steps have changed the objects since then
        self._loaded: tuple[int, dict[str, Tensor]] | None = None  # of a file, by rank
        self._elsewhere = Elsewhere()
        self._lacking_step: int | None = None  # whose state this machine does not have
        self._handed: Tensor | None = (
            None  # by this rank's other process, in the place of the file's
        )
        self._gathered: tuple[int, dict[str, Tensor]] | None = None  # of ranks of other machines
        self._seal_s = 0.0
        self._seals = 0
        self._size_bytes = 0
        self._lost: list[str] = []

    def belongs_to(self, rank_info: RankInfo) -> None:
        """Keep the objects as those of this rank, in the memory that ``rank_info`` names."""
        if self._kept is None:
            return
        self._rank, self._world_size = rank_info.rank, rank_info.world_size
        self._local_world_size = rank_info.local_world_size
        if self._memory is not None:
            self._memory.close()
        self._memory = RankMemory(
            rank_info.local_slots,
            local_rank=max(0, rank_info.local_rank),
            local_world_size=rank_info.local_world_size,
        )
        headers = [header for one in self._memory.own if (header := one.header()) is not None]
        if headers:
            newest = max(headers, key=lambda header: header.count)
            self._count = newest.count
            self._flags |= newest.flags & (CHANGES_LATE | KNOWN)
            if newest.as_of_update != NO_STEP:
                self._as_of_update[self._rank] = newest.as_of_update
            self._memory.own[BETWEEN].clear()

    def inner(self) -> list[Any]:
        """Return the objects, and the objects inside them that are restored in place."""
        return [] if self._kept is None else self._kept.inner()

    def seal(self, step: int) -> None:
        """Keep the objects as of ``step``, which no rank has committed yet. Raises OSError if memory is short.

        The state of the step before it stays as long as the ranks may have to begin from there.
        """
        # INVARIANT local-before-commit: no rank commits a step before each rank has sealed its own state of that step.
        # Broken if: a rank seals its state after the last point at which the others wait for it.
        # Guarded by: test_a_rank_that_dies_behind_the_sum_gets_that_step.
        if self._kept is None:
            return
        began_s = time.perf_counter()
        pickled = self._kept.pickled()
        self._write(pickled, step, settled=False)
        self._seal_s += time.perf_counter() - began_s
        self._seals += 1
        self._send(pickled, step, flags=self._flags)

    def _send(self, pickled: Pickled, step: int, *, flags: int) -> None:
        """Have another machine keep it, too. Every rank must call it."""
        if self._elsewhere.is_paired:
            is_sent = pickled.size_bytes <= LARGE_BYTES
            self._elsewhere.send(step, Guest(flags, packed(pickled)) if is_sent else None)

    def committed(self, step: int) -> None:
        """Note that ``step`` counts: the objects have its state."""
        self._live_step, self._is_between = step, False
        self._loaded = None

    def settle(self) -> None:
        """Also keep changes after the update of the newest step, once the program has ended that step."""
        if self._kept is None or self._memory is None or self._live_step is None:
            return
        found = newest_of(self._memory.own[:STEPS], self._live_step)
        if found is None or found[1].flags & SETTLED:
            return
        began_s = time.perf_counter()
        place, header = found
        pickled = self._kept.pickled()
        self._flags |= KNOWN
        if place.holds(header, pickled):
            place.sign(replace(header, flags=self._flags | SETTLED))
        else:
            self._find_late(says=True)
            self._write(pickled, self._live_step, settled=True)
        self._seal_s += time.perf_counter() - began_s

    # INVARIANT late-is-known: a replacement with objects as of an update is exact only while no process of the run is
    # known to change objects after an update.
    # Broken if: a process knows its own late changes only, or forgets that it took such objects.
    # Guarded by: test_what_one_rank_changes_late_is_known_of_all.
    def _find_late(self, *, says: bool) -> None:
        """Note that the program changes objects after an update. ``says``: this rank names those that lack changes."""
        self._flags |= CHANGES_LATE
        taken, self._as_of_update = self._as_of_update, {}
        if says:
            self._lost += [self._lacks_late(rank, step) for rank, step in sorted(taken.items())]

    def _lacks_late(self, rank: int, step: int) -> str:
        return (
            f"{', '.join(self.names)} of rank {rank}: the process was lost, or its step cut short, after"
            f" optimizer.step() of step {step:,}, where the loop may change kept objects: change them before that"
        )

    def known(self) -> list[Any]:
        """Return what this rank knows of changes after updates, for other ranks and later launches."""
        return [bool(self._flags & CHANGES_LATE), sorted(self._as_of_update.items())]

    def learn(self, every: Iterable[Any], *, says: bool) -> None:
        """Take in what :meth:`known` gave on other ranks, or in a launch before. ``says``: see above."""
        is_late = bool(self._flags & CHANGES_LATE)
        for is_known_late, taken in every:
            is_late |= bool(is_known_late)
            for rank, step in taken:
                newest = max(int(step), self._as_of_update.get(int(rank), NO_STEP))
                self._as_of_update[int(rank)] = newest
        if is_late:
            self._find_late(says=says)

    def begin(self, step: int) -> None:
        """Begin at ``step``: keep its state now if it is not kept yet, before the objects change."""
        if self._kept is None or self._memory is None:
            return
        self._live_step, self._is_between = step, False
        self._memory.own[BETWEEN].clear()
        if newest_of(self._memory.own[:STEPS], step) is None:
            self._write(self._kept.pickled(), step, settled=True)

    def changed_between(self) -> None:
        """Keep changes by functions that were called between two steps, for a file of this step.

        A rank that begins from this step does not receive them: it calls the functions again.
        """
        if self._kept is None or self._memory is None or self._live_step is None:
            return
        pickled = self._kept.pickled()
        found = newest_of(self._memory.own[:STEPS], self._live_step)
        self._is_between = found is None or not found[0].holds(found[1], pickled)
        place = self._memory.own[BETWEEN]
        if self._is_between:
            self._count += 1
            place.write(
                pickled,
                step=self._live_step,
                count=self._count,
                flags=self._flags | SETTLED,
                as_of_update=self._as_of_update.get(self._rank, NO_STEP),
            )
        else:
            place.clear()

    def forget_between(self) -> None:
        """Drop those changes: the functions are called again, so :meth:`put_back` returns to the state before them."""
        if self._kept is not None and self._memory is not None:
            self._is_between = False
            self._memory.own[BETWEEN].clear()

    # INVARIANT once-each-step: after a step was given up, the objects of every rank hold the state of the newest committed
    # step, so that each step changes them once.
    # Broken if: a survivor keeps changes of the step that broke, or gets the state of another rank.
    # Guarded by: test_a_survivor_has_what_the_committed_step_has_left.
    def put_back(self) -> None:
        """Restore the objects to the newest committed step."""
        if self._kept is None or self._memory is None or self._live_step is None:
            return
        own = self._memory.own
        found = newest_of(own if self._is_between else own[:STEPS], self._live_step)
        if found is None:
            self._lose(f"the state after step {self._live_step:,} was not kept")
            return
        self._give(found[0].read(found[1]), is_foreign=False)

    def go_to(self, step: int, record: Any, *, is_begin: bool) -> None:
        """Restore this rank's objects to ``step``, whose state it has just received or loaded.

        ``record``: the per-rank state of all ranks, if the state came from a file. ``is_begin``: no step was made yet.
        """
        of_file = _checked(record)
        if self._handed is not None:
            of_file[str(self._rank)] = self._handed
        if self._kept is None:
            self._loaded = (step, of_file) if of_file else None
            return
        self._loaded = (step, of_file) if of_file else None
        was_live, self._live_step, self._is_between = self._live_step, None, False
        self._lacking_step = None
        if of_file:
            self._take_of_file(step, of_file)
        elif not self._take_of_memory(step):
            is_as_built = is_begin and was_live is None
            if was_live != step and not is_as_built:
                self._lacking_step = step
        if self._memory is not None and (of_file or not is_begin):
            self._leave_others(step)
        if self._lacking_step is None:
            self.begin(step)

    def _go_without(self) -> None:
        """Go on with the objects as they are, where no machine has this rank's state."""
        step, self._lacking_step = self._lacking_step, None
        if step is not None:
            self._lose(f"nothing was kept for rank {self._rank} at step {step:,}")
            self.begin(step)

    def _take_of_file(self, step: int, of_file: Mapping[str, Tensor]) -> None:
        mine = of_file.get(str(self._rank))
        if mine is None:
            self._lose(f"the checkpoint of step {step:,} has no state of rank {self._rank}")
        else:
            self._give(unpacked(mine), is_foreign=True)
            # Another branch may have left a step of this number.
            for place in () if self._memory is None else self._memory.own:
                place.clear()
        gone = [int(one) for one in of_file if int(one) >= self._world_size]
        if gone and self._rank == 0:
            self._lost.append(
                f"the per-rank state of {rank_list(sorted(gone))} ({', '.join(self.names)}) is left out: this run has"
                f" {self._world_size} ranks"
            )

    def _take_of_memory(self, step: int) -> bool:
        """Restore the objects from memory; return False if neither this process nor the one before kept ``step``."""
        found = None if self._memory is None else newest_of(self._memory.own[:STEPS], step)
        if found is None:
            return False
        place, header = found
        self._give(place.read(header), is_foreign=False)
        self._judge(header.flags, step)
        return True

    def _judge(self, flags: int, step: int) -> None:
        """Note whether what was taken over may lack changes; ``flags``: of its place."""
        if flags & SETTLED:
            return
        if flags & KNOWN and not flags & CHANGES_LATE:
            self._as_of_update[self._rank] = step
        else:
            self._lost.append(self._lacks_late(self._rank, step))

    def _leave_others(self, step: int) -> None:
        """Forget the state of other steps: another branch of the run may have left it."""
        assert self._memory is not None, "checked by the caller"
        for place in self._memory.own:
            header = place.header()
            if header is not None and header.step != step:
                place.clear()

    def _give(self, pickled: Pickled, *, is_foreign: bool) -> None:
        assert self._kept is not None, "checked by the caller"
        try:
            self._kept.put_back(pickled, is_foreign=is_foreign)
            reordered = self._kept.has_reordered(pickled)
            if reordered is not False:
                now = (
                    "now iterates" if reordered else "may now iterate (it is too large to compare)"
                )
                self._lost.append(
                    f"a set in {', '.join(self.names)} of rank {self._rank} was restored, and {now} in another"
                    " order: loop over sorted(s), or use a dict"
                )
        except Exception as error:
            if lacks_memory(error):
                raise
            self._lose(f"it could not be put back ({type(error).__name__}: {error})")

    def _lose(self, why: str) -> None:
        verb = "keeps" if len(self.names) == 1 else "keep"
        names = ", ".join(self.names)
        self._lost.append(f"{names} of rank {self._rank} {verb} the content of this process: {why}")

    def take_lost(self) -> list[str]:
        """Return a line for each object that could not be restored since the last call."""
        self._go_without()
        found, self._lost = self._lost, []
        return found

    def await_all(self, group: Group, slot: Slot, step: int) -> None:
        """Return once every rank of the group has sealed its state of ``step``. Every rank must call it."""
        if self._kept is None or group.world_size == 1:
            return
        membership = group.membership
        with waiting_for_peers(slot):
            is_here = membership.local_world_size == membership.world_size
            is_freed_here = not group.ends_in_silence  # by a check for an aborted generation
            if self._memory is None or not (self._memory.is_shared and is_here and is_freed_here):
                group.exchange(f"local/{step}", "")
                return
            value = membership.generation << _STEP_BITS | step
            self._memory.announce(value)
            looks = 0
            while not self._memory.have_announced(self._places, value):
                group.refuse_aborted()
                looks += 1
                time.sleep(0 if looks < _LOOKS_YIELDING else _LOOK_S)

    def agree(self, group: Group, slot: Slot, *, places: Sequence[int], step: int) -> str:
        """Begin a generation at ``step``; return in what the kept names differ between ranks, or an empty text.

        ``places``: the group's ranks, by their numbers in the launch. Every rank must call it.
        """
        if self._kept is None:
            return ""
        self._places = [place % max(1, self._local_world_size) for place in places]
        if self._lacking_step is None:
            self.begin(step)
        with waiting_for_peers(slot):
            every = [
                _Said(**json.loads(one)) for one in group.exchange("kept locally", self._said())
            ]
        self.learn((one.known for one in every), says=group.rank == 0)
        names = [one.names for one in every]
        other = next((rank for rank, one in enumerate(names) if one != names[0]), None)
        if other is not None:
            return f"ranks 0 and {other} keep {names[0]} and {names[other]}"
        with waiting_for_peers(slot):
            self._take_from_elsewhere(group, every)
        self._go_without()
        self._elsewhere.pair(group, slot, [Seat(one.rank, one.machine) for one in every])
        if self._elsewhere.is_paired and (found := self._newest(step)) is not None:
            self._send(found[0].read(found[1]), step, flags=found[1].flags)
        return ""

    def _said(self) -> str:
        return json.dumps(
            asdict(
                _Said(
                    names=", ".join(self.names),
                    known=self.known(),
                    rank=self._rank,
                    machine=self.machine,
                    lacking_step=self._lacking_step,
                    held=self._elsewhere.held(),
                )
            )
        )

    # INVARIANT outlives-its-machine: if a machine is lost, a replaced rank gets the state of its step from another one.
    # Broken if: a step is committed that no other machine has, or a replacement begins before it has asked.
    # Guarded by: test_a_rank_gets_its_state_from_another_machine.
    def _take_from_elsewhere(self, group: Group, every: Sequence[_Said]) -> None:
        """Hand over what lost machines' ranks have left here, and take what this rank lacks."""
        for number, one in enumerate(every):
            step = one.lacking_step
            giver = next(
                (n for n, other in enumerate(every) if [one.rank, step] in other.held), None
            )
            if step is None or giver is None or giver == number:
                continue
            if group.rank == giver:
                self._elsewhere.hand_over(group, one.rank, step, to=number)
            elif group.rank == number:
                guest = self._elsewhere.receive_own(group, source=giver)
                self._lacking_step = None
                self._give(unpacked(guest.content), is_foreign=True)
                self._judge(guest.flags, step)
                self.begin(step)

    def leave(self) -> None:
        """Ask no other machine any more: the generation has ended."""
        self._elsewhere.leave()

    def of_ranks(self, step: int) -> dict[str, Any]:
        """Return the per-rank state of ``step`` for a file, as far as this rank knows it; empty if nothing is kept.

        Ranks of this machine have sealed theirs; that of other machines was gathered.
        """
        if self._kept is None or self._memory is None:
            return {}
        found: dict[str, Tensor] = {}
        gathered_step, gathered = self._gathered or (None, {})
        first = self._rank - self._rank % max(1, self._local_world_size)
        for local_rank in range(self._local_world_size):
            kept = self._packed_of(local_rank, step)
            if kept is not None:
                found[str(first + local_rank)] = kept
        if gathered_step == step:
            found = {**gathered, **found}
        return {LOCAL: found} if found else {}

    def _packed_of(self, local_rank: int, step: int) -> Tensor | None:
        assert self._memory is not None, "checked by the caller"
        is_own = local_rank == self._rank % max(1, self._local_world_size)
        if not self._memory.is_shared and not is_own:
            return None
        places = self._memory.own if is_own else self._memory.places_of(local_rank)
        between = places[BETWEEN].header()
        is_later = between is not None and between.step == step
        found = newest_of(places[BETWEEN:] if is_later else places[:STEPS], step)
        return None if found is None else packed(found[0].read(found[1]))

    def mine(self, step: int) -> Tensor | None:
        """Return this rank's state of ``step``, for a rank that saves on another machine."""
        if self._kept is None or self._memory is None:
            return None
        return self._packed_of(self._rank % max(1, self._local_world_size), step)

    def to_hand_over(self, step: int) -> Tensor | None:
        """Return what this rank has of ``step`` where another rank may have read less; None where it has the same.

        It reads what was sealed. What follows an update, or is between two steps, may not be there yet.
        """
        # INVARIANT drilled-as-begun: a drilled step begins with what its rank had of its own as it began.
        # Broken if: it begins with what another rank has read, while this one was still changing it.
        # Guarded by: test_a_late_change_on_the_drilled_rank_is_in_its_drill.
        is_sealed_whole = not self._is_between and not self._flags & CHANGES_LATE
        return None if is_sealed_whole else self.mine(step)

    def begin_with(self, handed: Tensor) -> None:
        """Begin with what this rank has handed over, whatever the state has of it."""
        self._handed = handed

    @property
    def rank(self) -> int:
        """The number of this rank in the launch."""
        return self._rank

    @property
    def machine(self) -> int:
        """The number of this machine, whose ranks can read each other's state; -1 if no other rank can read this one's."""
        is_shared = self._memory is not None and self._memory.is_shared
        return self._rank // max(1, self._local_world_size) if is_shared else -1

    def gathered(self, step: int, found: dict[str, Tensor]) -> None:
        """Take in the state of ``step`` of ranks that cannot be read from here."""
        self._gathered = (step, found)

    def to_hand_on(self, step: int) -> dict[str, Any]:
        """Return the per-rank state of all ranks from a file, for ranks that receive the loaded state of ``step``."""
        if self._loaded is None or self._loaded[0] != step:
            return {}
        return {LOCAL: self._loaded[1]}

    def cost_line(self) -> str:
        """Return a line on the cost of keeping, once, if the cost is high; else an empty text."""
        limit = LARGE_ELSEWHERE_BYTES if self._elsewhere.is_paired else LARGE_BYTES
        if self._kept is None or self._seals != _SEALS_TIMED or self._size_bytes <= limit:
            return ""
        self._seals += 1
        each_ms = 1e3 * self._seal_s / _SEALS_TIMED
        sent = ""
        if self._elsewhere.is_paired:
            sent = "; each step also sends them to another machine"
            if self._size_bytes > LARGE_BYTES:
                sent = "; they are too large to be sent to another machine"
        return (
            f"{', '.join(self.names)}: {self._size_bytes / 1e6:,.0f} MB are copied for this rank at each step, which"
            f" takes {each_ms:.1f} ms{sent}"
        )

    def _write(self, pickled: Pickled, step: int, *, settled: bool) -> None:
        """Write into the place that no rank needs any more: neither the newest of the committed step nor of ``step``."""
        if self._memory is None:
            return
        self._size_bytes = pickled.size_bytes
        own = self._memory.own[:STEPS]
        needed = {id(found[0]) for one in (self._live_step, step) if (found := self._newest(one))}
        if not settled and (same := self._newest(step)) and self._live_step != step:
            needed.discard(id(same[0]))  # it is of a step that was given up
        headers = [(one.header(), one) for one in own if id(one) not in needed]
        place = min(headers, key=lambda pair: -1 if pair[0] is None else pair[0].count)[1]
        self._count += 1
        place.write(
            pickled,
            step=step,
            count=self._count,
            flags=self._flags | (SETTLED if settled else 0),
            as_of_update=self._as_of_update.get(self._rank, NO_STEP),
        )

    def _newest(self, step: int | None) -> tuple[Place, Any] | None:
        if step is None or self._memory is None:
            return None
        return newest_of(self._memory.own[:STEPS], step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """Says what a rank has of its state when a generation begins. ``held``: ranks and steps that it keeps for others."""

    names: str
    known: list[Any]
    rank: int
    machine: int
    lacking_step: int | None
    held: Sequence[Sequence[int]]


def packed(pickled: Pickled) -> Tensor:
    """Return ``pickled`` as a tensor of bytes, padded to a round size so that its memory can be reused."""
    sizes = [len(pickled.text), *[one.nbytes for one in pickled.buffers]]
    head = struct.pack(f"<{len(sizes) + 1}q", len(sizes), *sizes)
    end = len(head) + pickled.size_bytes
    grain = max(1024, 1 << max(0, end.bit_length() - 4))
    found = np.zeros(-(-end // grain) * grain, dtype=np.uint8)
    at = 0
    parts: list[bytes | memoryview] = [head, pickled.text, *pickled.buffers]
    for part in parts:
        own = np.frombuffer(part, dtype=np.uint8)
        found[at : at + own.size] = own
        at += own.size
    return torch.from_numpy(found)


def unpacked(tensor: Tensor) -> Pickled:
    """The inverse of :func:`packed`."""
    raw = memoryview(tensor.detach().cpu().numpy().tobytes())
    (count,) = struct.unpack_from("<q", raw)
    sizes = struct.unpack_from(f"<{count}q", raw, 8)
    at = 8 * (count + 1)
    parts = []
    for size in sizes:
        parts.append(raw[at : at + size])
        at += size
    # Copies, as the loaded objects must be writable.
    return Pickled(bytes(parts[0]), [memoryview(bytearray(one)) for one in parts[1:]])


def _checked(record: Any) -> dict[str, Tensor]:
    """Return the per-rank state of a file. Raises ValueError if ``record`` has another form."""
    if record is None:
        return {}
    is_one = isinstance(record, Mapping) and all(
        isinstance(rank, str) and rank.isdigit() and isinstance(one, Tensor)
        for rank, one in record.items()
    )
    if not is_one:
        raise ValueError("its per-rank state (local) has another form")
    return dict(record)
