"""``--engine ray``: has Ray place an actor a machine, each with a supervisor, and ends with the coordinator's exit code.

What follows when one is lost is decided in ``features/ray/rules.py``. Nothing of Ray is imported before it is asked for.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddp_runner import start
from ddp_runner.cli.planning import asked_settings, with_nproc
from ddp_runner.features.machines.letters import endpoint_bytes
from ddp_runner.features.ray import ray_actor
from ddp_runner.features.ray.ray_cluster import (
    Look,
    Phase,
    Seat,
    Terminal,
    connected,
    machines,
    quiet,
)
from ddp_runner.features.ray.rules import (
    WINDOW_S,
    Answer,
    Ended,
    Machine,
    Next,
    Share,
    after_end,
    engine_options,
    share_of_a_machine,
    words_for_machine,
)
from ddp_runner.kernel.parent.signal_box import STOP_SIGNALS, SignalBox
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import (
    EXIT_CODE_OF_STATUS,
    STATUS_OF_REASON,
    ExitCode,
    StopReason,
)
from ddp_runner.kernel.system.folder_owner import OWNER_NAME

if TYPE_CHECKING:
    from ddp_runner.cli.parser import TrainArguments
    from ddp_runner.cli.several import OnEach
    from ddp_runner.core.launch_plan import NodeOptions
    from ddp_runner.core.settings import Settings

TICK_S = 0.25
AGAIN_S = 3.0  # after a supervisor has ended: the run may be ending
GROW_EVERY_S = 2.0
LAST_WORDS_S = 15.0  # for the others to end, once the coordinator has
_PLACED = "ddp_runner.features.ray.ray_entry"
# What of the driver's environment goes to the machines; more by Ray's own runtime_env.
_HANDED_ON = ("DDP_RUNNER_", "NCCL_", "GLOO_", "TORCH_", "CUBLAS_", "OMP_NUM_THREADS", "PYTHONPATH")
_KEPT_HERE = ("DDP_RUNNER_TOKEN", "DDP_RUNNER_MARK", "DDP_RUNNER_LAUNCHED")


def place(on_each: OnEach, arguments: TrainArguments) -> int:
    """Run a command on each machine of Ray's cluster; the coordinator's exit code. Raises BadInputError.

    The settings are checked here, and once more by each supervisor.
    """
    asked = engine_options(dict(arguments.nodes), os.environ)
    arguments = replace(arguments, assignments=with_nproc(arguments.assignments, os.environ))
    settings = asked_settings(arguments, os.environ).settings
    if settings.run.gpus:
        raise BadInputError("--gpus", "", "Ray decides which GPUs: give their number by -n")
    terminal = Terminal(out=sys.stdout, err=sys.stderr)
    with quiet(shows=settings.run.debug):
        ray = connected()
        signals = SignalBox()
        try:
            with signals.installed():  # after Ray, which has a handler of its own
                driver = _Driver(
                    ray, on_each, asked=asked, settings=settings, signals=signals, terminal=terminal
                )
                return driver.run()
        finally:
            ray.shutdown()


class _Driver:
    def __init__(
        self,
        ray: ModuleType,
        on_each: OnEach,
        *,
        asked: NodeOptions,
        settings: Settings,
        signals: SignalBox,
        terminal: Terminal,
    ) -> None:
        self._ray = ray
        self._terminal = terminal
        self._on_each = on_each
        self._asked = asked
        self._settings = settings
        self._signals = signals
        self._token = secrets.token_hex(32)
        self._seats: list[Seat] = []
        self._group: Any = None
        self._endpoint: tuple[str, int] | None = None  # None: nobody is to look for it now
        self._owners = ("", "")  # of the checkpoints: before the run, and at the newest look
        self._left_out: set[str] = set()  # machines
        self._stop: StopReason | None = None
        self._end: Answer | None = None
        self._instead: int | None = None  # of the coordinator's exit code
        self._since_s = time.monotonic()  # nobody is the coordinator
        self._grown_at_s = time.monotonic()
        run = settings.run
        self._folder = str(Path.cwd())
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            self._folder = ""
            if not Path(on_each.owner_folder(settings)).is_absolute():
                expected = (
                    "lies in the folder of the Ray job, which Ray removes: give a full path that all"
                    " machines share"
                )
                raise BadInputError(on_each.owner_option, on_each.owner_folder(settings), expected)
        self._share = share_of_a_machine(
            machines(ray), asked=asked, ranks=run.nproc_per_node, device=run.device
        )

    def run(self) -> int:
        """Run until the coordinator has ended for good, and return its exit code."""
        try:
            self._place()
            while self._end is None:
                self._take_signals()
                self._hear()
                self._begin_ready()
                self._grow()
            code = self._end.exit_code if self._instead is None else self._instead
            if self._end.why:
                self._terminal.say(self._end.why)
            self._await_others()
            return int(code)
        finally:
            for seat in self._seats:
                self._ray.kill(seat.handle)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)

    def _fitting(self) -> list[Machine]:
        return [machine for machine in machines(self._ray) if self._share.fits(machine)]

    def _place(self) -> None:
        """A placement group with a bundle a machine: as many as there are, or after a while the fewest."""
        asked = self._asked
        most = min(asked.most, len(self._fitting()))
        self._terminal.say(f"Ray: {_in_words(most, self._share)}")
        counts = [(most, asked.last_call_s), (asked.least, asked.join_timeout_s)]
        if most == asked.least:
            counts = counts[1:]
        strategies = import_module("ray.util.scheduling_strategies")
        for count, wait_s in counts:
            bundles = [{self._share.kind: self._share.ranks}] * count
            self._group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
            if self._await_group(wait_s):
                for index in range(count):
                    self._seat(
                        strategies.PlacementGroupSchedulingStrategy(
                            self._group, placement_group_bundle_index=index
                        )
                    )
                self._since_s = time.monotonic()
                return
            self._ray.util.remove_placement_group(self._group)
            self._group = None
            if self._end is not None:
                return
        why = f"the cluster had no {_in_words(asked.least, self._share)} free in time"
        self._end = Answer(next=Next.END, exit_code=ExitCode.PREEMPTED, why=why)

    def _await_group(self, wait_s: float) -> bool:
        began_s = time.monotonic()
        is_said = False
        ready = self._group.ready()
        while self._end is None and time.monotonic() < began_s + wait_s:
            if self._ray.wait([ready], timeout=TICK_S)[0]:
                return True
            self._take_signals()
            if not is_said and time.monotonic() > began_s + AGAIN_S:
                is_said = True
                self._terminal.say("waiting: others use the cluster")
        return False

    def _seat(self, strategy: Any) -> None:
        """One more actor."""
        import_module("ray.cloudpickle").register_pickle_by_value(ray_actor)
        on_gpus = self._share.kind == "GPU"
        remote = self._ray.remote(ray_actor.NodeActor).options(
            num_cpus=0 if on_gpus else self._share.ranks,
            num_gpus=self._share.ranks if on_gpus else 0,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )
        seat = Seat(number=len(self._seats), handle=remote.remote(), terminal=self._terminal)
        self._seats.append(seat)
        self._introduce(seat)

    def _introduce(self, seat: Seat) -> None:
        """Answered as soon as Ray has (again) started it somewhere."""
        owner = str(Path(self._on_each.owner_folder(self._settings), OWNER_NAME))
        own = str(Path(start.__file__).resolve())
        asked = seat.handle.introduce.options(max_task_retries=-1)
        seat.await_(Phase.INTRODUCING, asked.remote(self._folder, owner, own))

    def _hear(self) -> None:
        waiting = {seat.answer: seat for seat in self._seats if seat.answer is not None}
        if not waiting:
            time.sleep(TICK_S)
            return
        self._ray.wait(list(waiting), num_returns=1, timeout=TICK_S)
        ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for answer in ready:
            self._heard(waiting[answer], answer)

    def _heard(self, seat: Seat, answer: Any) -> None:
        errors = import_module("ray.exceptions")
        seat.answer = None
        try:
            found = self._ray.get(answer)
        except errors.RayTaskError as error:
            self._refused(seat, f"{error.cause}")
            return
        except errors.RayError as error:  # of the actor, or of its machine
            self._lost(seat, error)
            return
        if seat.phase is Phase.INTRODUCING:
            self._introduced(seat, found)
        elif seat.phase is Phase.BEGINNING:
            self._look(seat)
        else:
            self._looked(seat, found)

    def _look(self, seat: Seat) -> None:
        seat.await_(Phase.RUNNING, seat.handle.look.remote(TICK_S))

    def _lost(self, seat: Seat, error: Exception) -> None:
        """Its machine, or the actor's process: Ray starts it again, on another one if need be."""
        if seat.phase is Phase.INTRODUCING:  # and cannot
            self._leave_out(seat, f"Ray cannot start it again ({' '.join(str(error).split())})")
            return
        self._terminal.say(f"{seat.name} is lost; Ray starts it again where there is room")
        if seat.number == 0:
            self._endpoint = None
            self._since_s = time.monotonic()
        self._introduce(seat)

    def _introduced(self, seat: Seat, found: Mapping[str, Any]) -> None:
        is_same = seat.found.get("incarnation") == found["incarnation"]
        is_new = not seat.found
        if is_same and seat.has_begun:  # it could not be reached for a while
            if seat.number == 0:
                self._endpoint = (seat.found["address"], seat.found["port"])
            self._look(seat)
            return
        seat.found = found
        if found["problem"]:
            self._refused(seat, found["problem"])
        elif seat.number == 0 and is_new:
            self._owners = (found["owner"], found["owner"])
            self._coordinate_from(seat)
        elif seat.number == 0:
            self._follow_answer(seat, None)
        else:
            seat.ready(time.monotonic())

    def _coordinate_from(self, seat: Seat) -> None:
        self._endpoint = (seat.found["address"], seat.found["port"])
        seat.ready(time.monotonic())
        for other in self._seats[1:]:
            if other.is_running:
                other.handle.move.remote(endpoint_bytes(*self._endpoint))

    def _looked(self, seat: Seat, found: Look) -> None:
        if seat.number == 0:
            self._owners = (self._owners[0], found["owner"] or self._owners[1])
        for stream, written in found["written"]:
            seat.show(stream, written)
        if found["code"] is None:
            self._look(seat)
            return
        seat.phase = Phase.ENDED
        seat.code = found["code"]
        self._follow_answer(seat, seat.code)

    def _follow_answer(self, seat: Seat, code: int | None) -> None:
        """Perform the next move after a supervisor has ended, or its machine was lost (None)."""
        now_s = time.monotonic()
        seat.ended_at_s = [at_s for at_s in seat.ended_at_s if at_s > now_s - WINDOW_S]
        answer = after_end(
            Ended(
                is_coordinator=seat.number == 0,
                code=code,
                is_stopping=self._stop is not None,
                has_begun=self._has_begun,
                recent=len(seat.ended_at_s),
                has_its_state=seat.found["owner"] == self._owners[1]
                or any(other.is_running for other in self._seats[1:]),
                starts_again_from_newest=self._on_each.resumes(self._settings),
            )
        )
        seat.ended_at_s.append(now_s)
        match answer.next:
            case Next.AGAIN:
                seat.ready(now_s + (0.0 if code is None else AGAIN_S))
            case Next.ELSEWHERE:
                self._terminal.say(f"the coordinator is now on {seat.name}")
                self._coordinate_from(seat)
            case Next.LEAVE_OUT:
                seat.show_rest()
                self._leave_out(seat, f"its supervisor has ended ({code})")
            case Next.END if seat.number == 0:
                self._end = answer
            case Next.END:
                self._end_with(answer.exit_code)

    @property
    def _has_begun(self) -> bool:
        """True if a coordinator of this run has taken the checkpoints."""
        return self._owners[0] != self._owners[1]

    def _refused(self, seat: Seat, problem: str) -> None:
        """Continue without machines that cannot take part, or end if nothing has begun."""
        if self._has_begun and seat.number:
            self._leave_out(seat, problem)
            return
        self._terminal.err.write(f"ddp_runner: error: {seat.name} {problem}\n")
        seat.phase = Phase.ENDED
        self._end_with(ExitCode.BAD_USAGE)

    def _leave_out(self, seat: Seat, why: str) -> None:
        self._terminal.say(f"{seat.name} is left out: {why}")
        seat.phase = Phase.ENDED
        self._left_out.add(str(seat.found.get("machine", "")))
        self._ray.kill(seat.handle)

    def _end_with(self, exit_code: int) -> None:
        """Have the coordinator end, if there is one, and then with this exit code."""
        self._instead = exit_code
        self._stop = self._stop or StopReason.PREEMPTED
        if self._seats[0].is_running:
            self._seats[0].handle.signal.remote(int(signal.SIGTERM))
        else:
            self._end = Answer(next=Next.END, exit_code=exit_code)

    def _begin_ready(self) -> None:
        now_s = time.monotonic()
        if self._endpoint is None and now_s > self._since_s + self._asked.join_timeout_s:
            why = "no machine has taken the coordinator's place in time"
            self._end = Answer(next=Next.END, exit_code=ExitCode.PREEMPTED, why=why)
        for seat in self._seats:
            is_due = seat.phase is Phase.READY and now_s >= seat.due_s
            if is_due and self._endpoint is not None and self._stop is None:
                self._begin(seat, *self._endpoint)

    def _begin(self, seat: Seat, host: str, port: int) -> None:
        if seat.code is not None:
            self._terminal.say(
                f"{seat.name}: its supervisor has ended ({seat.code}), and starts again"
            )
            seat.show_rest()
        words = words_for_machine(
            self._on_each.options,
            self._asked,
            host=host,
            port=port,
            number=seat.number,
            share=self._share,
            program=self._on_each.program,
        )
        seat.has_begun, seat.code = True, None
        command = [seat.found["start"], _PLACED, self._on_each.verb, *words]
        seat.handle.move.remote(endpoint_bytes(host, port))
        begun = seat.handle.begin.remote(command, seat.found["folder"], self._environment())
        seat.await_(Phase.BEGINNING, begun)

    def _environment(self) -> dict[str, str]:
        # INVARIANT token-by-environment: the secret of a run is in the environment of its supervisors alone.
        # Broken if: it becomes a word of a command line, or is written.
        # Guarded by: test_a_machine_that_is_removed_costs_no_step_and_no_bit.
        handed_on = {
            name: value
            for name, value in os.environ.items()
            if name.startswith((*_HANDED_ON, *self._on_each.variables)) and name not in _KEPT_HERE
        }
        return {**handed_on, "DDP_RUNNER_TOKEN": self._token}

    def _grow(self) -> None:
        """Take in a machine that has joined the cluster, up to MAX."""
        now_s = time.monotonic()
        there = [seat for seat in self._seats if seat.phase is not Phase.ENDED]
        is_settled = all(seat.phase is Phase.RUNNING for seat in there)
        if now_s < self._grown_at_s + GROW_EVERY_S or not is_settled or self._stop is not None:
            return
        self._grown_at_s = now_s
        if len(there) >= self._asked.most:
            return
        taken = {seat.found["machine"] for seat in there} | self._left_out
        for machine in self._fitting():
            if machine.key not in taken:
                self._terminal.say(f"{machine.name} has come: a supervisor starts there")
                strategies = import_module("ray.util.scheduling_strategies")
                self._seat(
                    strategies.NodeAffinitySchedulingStrategy(node_id=machine.key, soft=False)
                )
                return

    def _take_signals(self) -> None:
        """Pass them on to the coordinator, which ends the others."""
        for number in self._signals.take():
            reason = next((why for one, why in STOP_SIGNALS.items() if one == number), None)
            is_running = bool(self._seats) and self._seats[0].is_running
            if reason is not None:
                self._stop = self._stop or reason
            if is_running and number != signal.SIGCHLD:
                self._seats[0].handle.signal.remote(number)
            elif reason is not None:
                code = EXIT_CODE_OF_STATUS[STATUS_OF_REASON[reason]]
                self._end = Answer(next=Next.END, exit_code=code)

    def _await_others(self) -> None:
        """They end as the coordinator has said; who does not is ended."""
        self._stop = self._stop or StopReason.COMPLETED
        give_up_s = time.monotonic() + LAST_WORDS_S
        while any(seat.is_running for seat in self._seats) and time.monotonic() < give_up_s:
            self._hear()


def _in_words(count: int, share: Share) -> str:
    return f"{count} machine{'s' * (count > 1)} with {share.ranks} {share.kind}{'s' * (share.ranks > 1)} each"
