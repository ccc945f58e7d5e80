"""Lets a follower take a lost coordinator's place, by the rules of :mod:`ddp_runner.features.machines.rules.succession`."""

from __future__ import annotations

import contextlib
import selectors
import socket
from dataclasses import replace
from pathlib import Path

from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.features.machines.parent.admission import Meeting
from ddp_runner.features.machines.parent.coordinator import Heir, Taken
from ddp_runner.features.machines.parent.follower import Follower
from ddp_runner.features.machines.parent.other_nodes import Place
from ddp_runner.features.machines.parent.voting import Voting
from ddp_runner.features.machines.rules.succession import (
    Act,
    Arbiter,
    Claim,
    Kept,
    Stage,
    is_newest,
    why_no_successor,
)
from ddp_runner.kernel.parent.signal_box import SignalBox
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.resources import StorePlace
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.system.folder_owner import FolderOwner, Owner, new_term
from ddp_runner.system import followed_run
from ddp_runner.system.code_files import digest_of
from ddp_runner.system.run_directories import RunDirectories

_SILENT = "over NCCL, ranks end with their coordinator"


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on ``port``, or on any free one if it is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, port))
        except OSError:
            listening.bind((address, 0))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


class Succession:
    """Decides for a follower without a coordinator whether its machine takes that place."""

    def __init__(self, plan: LaunchPlan, *, clock: Clock, voting: Voting | None = None) -> None:
        """``voting``: this machine's part where a majority decides; None: no majority ever does."""
        assert plan.nodes is not None
        self._voting = voting
        self._options = plan.nodes
        self._folder = Path(plan.settings.run.checkpoint_dir)
        self._directories = RunDirectories(plan.settings.run)
        self._clock = clock
        self._began_s = clock.monotonic()  # the time at which this machine joined the run
        self._claim = Claim()
        self._taken: Taken | None = None
        otherwise = "the engine restarts it" if plan.nodes.moving_fd is not None else ""
        if plan.opaque is not None and not plan.opaque.may_restart:
            otherwise = "a script restarts only with --max-restarts or --resume-with"
        self._arbiter = Arbiter(
            shares_folder=False,
            keeps_locks=False,
            folder="checkpoint folder" if plan.opaque is None else "log folder",
            otherwise=otherwise,
        )
        self._loses_all = plan.opaque is not None  # in any case: a script's ranks restart
        self._term = ""  # of the newest coordinator that has formed
        self._said = ""

    @property
    def may_succeed(self) -> bool:
        """True if this machine may become the coordinator throughout this term."""
        return not why_no_successor(self._arbiter)

    @property
    def has_claimed(self) -> bool:
        """True while this machine's claim in the folder is not confirmed yet."""
        return self._claim.stage is Stage.CLAIMED

    def formed(self, term: str, *, shares_folder: bool, loses_memory: bool = False) -> str:
        """Note that a coordinator holds its lock. Return a log line if there is news, else an empty text.

        ``loses_memory``: ranks here end with their coordinator.
        """
        if term == self._term:
            return ""
        self._term = term
        self._arbiter = replace(
            self._arbiter,
            shares_folder=shares_folder,
            keeps_locks=shares_folder and self._directories.are_checkpoints_held(),
            otherwise=self._arbiter.otherwise or _SILENT * (loses_memory and not self._loses_all),
            votes=not shares_folder and self._voting is not None and self._voting.holds,
            no_vote="" if self._voting is None else self._voting.why_none,
        )
        why = why_no_successor(self._arbiter)
        line = f"it must be restarted: {why}" if why else "another machine takes over"
        if self._arbiter.votes and not why:
            line = "a majority of the machines has another one take over"
        line = f"if the coordinator is lost, {line}"
        was, self._said = self._said, line
        return "" if line == was else line

    def look(self, kept: Kept | None, address: str, *, lost: int) -> Taken | None:
        """Take the next step of a claim. Return the coordinator's place once this machine has it, else None.

        ``address``: the address of this machine for the others; ``lost``: the number of the lost coordinator's machine.
        """
        if why_no_successor(self._arbiter):
            return None
        if self._arbiter.votes:
            return self._elected(kept, lost)
        ours = "" if self._taken is None else self._taken.owner.term
        act = self._claim.next(
            self._clock.monotonic(),
            kept=kept,
            arbiter=self._arbiter,
            owner=FolderOwner(self._folder, ours).read(),
            ours=ours,
        )
        if act is Act.CLAIM and kept is not None:
            self._take(kept, address, lost)
        elif act is Act.WITHDRAW:
            self.withdraw()
        elif act is Act.LEAD:
            self._claim.leads()
            return self._taken
        return None

    def _elected(self, kept: Kept | None, lost: int) -> Taken | None:
        """Stand for election, and return the coordinator's place once a majority has voted for this machine."""
        voting = self._voting
        if voting is None or voting.door is None or kept is None or not kept.have_left:
            return None
        ballot = voting.stand()
        if ballot is None or not self._directories.hold_checkpoints():
            return None
        number, term = ballot
        there = {peer.number for peer in voting.file.read().members}
        behind = tuple(one for one in range(self._options.most) if one not in there)
        without = tuple(sorted({*behind, lost}))
        owner = FolderOwner(self._folder, term, at=voting.at)
        try:
            owner.take(without=without, after=kept.term)
        except OSError:
            self._directories.release()
            return None
        self._claim.leads()
        self._taken = Taken(
            owner=owner,
            before=Owner(term=kept.term, without=behind),
            without=without,
            directories=self._directories,
            listening=voting.give_door(),
            address=voting.at[0],
            lost=lost,
            ballot=number,
        )
        return self._taken

    def withdraw(self) -> None:
        """Give up the claim."""
        if self._taken is not None:
            self._taken.listening.close()
        self._taken = None
        self._directories.release()
        self._claim.withdrew()

    def _take(self, kept: Kept, address: str, lost: int) -> None:
        """Lock the folder and write this machine's term and address, unless another machine was first."""
        if not self._directories.hold_checkpoints():
            return
        before = FolderOwner(self._folder, "").read()
        try:
            if before is None or not is_newest(kept, before):
                self._directories.release()
                return
            if self._voting is not None:
                self._voting.close_door()
            listening = listen(address, self._options.port if self._options.host != address else 0)
        except OSError:
            self._directories.release()
            return
        at = (address, int(listening.getsockname()[1]))
        owner = FolderOwner(self._folder, new_term(), at=at)
        without = tuple(sorted({*before.without, lost}))  # machines whose memory is lost
        self._taken = Taken(
            owner=owner,
            before=before,
            without=without,
            directories=self._directories,
            listening=listening,
            address=address,
            lost=lost,
        )
        try:
            owner.take(without=without, after=kept.term)
        except OSError:
            self.withdraw()
            return
        self._claim.claimed(self._clock.monotonic())

    def heir(
        self,
        plan: LaunchPlan,
        meeting: Meeting,
        *,
        node: Node,
        follower: Follower,
        stop: StopReason | None,
        signals: SignalBox,
        selector: selectors.BaseSelector,
    ) -> Heir:
        """Return the starting point of a coordinator on this machine, which has the place.

        ``plan`` and ``meeting``: this machine's, with the settings of all machines.
        """
        taken = self._taken
        assert taken is not None
        parked = follower.of_before()
        port = int(taken.listening.getsockname()[1])
        options = replace(meeting.options, host=taken.address, port=port, node_rank=parked.node)
        run = replace(plan.settings.run, resume="auto")  # the files of the run that continues
        limit = plan.time_limit
        if limit is not None:
            limit = replace(
                limit, seconds=max(0.0, limit.seconds - (self._clock.monotonic() - self._began_s))
            )
        code = "" if meeting.allows_different_code else digest_of(meeting.code)
        self._lead_from(node, taken, plan, number=parked.node)
        return Heir(
            plan=replace(
                plan,
                settings=replace(plan.settings, run=run),
                nodes=options,
                time_limit=limit,
                code=code,
            ),
            place=Place(
                meeting=replace(meeting, options=options),
                number=parked.node,
                listening=taken.listening,
                address=taken.address,
                store_host=taken.address,
                votes=None if self._voting is None else self._voting.file,
            ),
            taken=taken,
            node=node,
            kept=follower.hand_over(),
            generation=parked.generation,
            run_id=parked.run_id,
            restarts=follower.restarts,
            inexact_reasons=tuple(parked.inexact_reasons),
            stop=stop,
            signals=signals,
            selector=selector,
            lost_host="" if follower.followed is None else follower.followed.host,
        )

    @staticmethod
    def _lead_from(node: Node, taken: Taken, plan: LaunchPlan, *, number: int) -> None:
        """Turn this machine's node into the coordinator's: set its term, folders and store."""
        node.term = taken.owner.term
        if not node.shares_logs:
            node.logs_number = number
            with contextlib.suppress(OSError):
                (Path(plan.settings.run.log_dir) / followed_run.NAME).unlink(missing_ok=True)
        node.shares_checkpoints = node.shares_logs = True
        node.store_at = StorePlace.on_this_machine(plan.settings.ddp.port, address=taken.address)
