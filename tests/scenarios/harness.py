"""Starts real runs, watches them through their files, sends real signals, and checks what is left."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from ddp_runner.kernel.wire import events
from tests import processes, ready
from tests.scenarios.leftovers import (
    listening_inodes,
    ownerless_shared_memory,
    processes_with,
    shared_memory,
)

HURRY_NAME = "hurry"  # as in workload.py, which imports torch

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = Path(__file__).with_name("workload.py")
DEADLINE_S = 120.0  # only a hang comes so far; a loaded machine is slow
GONE_WITHIN_S = 10.0  # what the kernel ends, on a machine with ten times more to do than cores
LISTENING_EVERY_S = 0.5
NOTICED_WITHIN_S = 0.3  # as the supervisor of a busy machine
STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
NO_DRILLS = "recovery.drill_at=off"  # they would take time from a test of something else
QUICK_HANGS = "recovery.hang_min_s=2"  # as most wait for one, and nothing here is as slow as that
# The only rank would have every core, where torch's threads turn while they wait for its next step.
ONE_THREAD = "run.threads_per_rank=1"
# What a person types, with interpreters that have imported nothing yet.
PYTHON_M = (sys.executable, "-m", "ddp_runner")
TRAIN = (*PYTHON_M, "train")
# Every process of a job inherits this variable, whoever its parent is by now.
MARK = "SCENARIO_RUN"

EVENTS = {each.name for each in vars(events).values() if hasattr(each, "written")}

poll = functools.partial(processes.poll, every_s=0.01)  # most of these looks read a file


class Outputs:
    """The files of a run, in a folder of its own; a relaunch there is the same run."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.logs = self.folder / "logs"
        self.checkpoints = self.folder / "checkpoints"
        self._journal = b"", []  # what of it has been read, and its records

    @property
    def digest(self):
        return self.summary()["weights_sha256"]

    def status(self):
        """The newest status.json; None while there is none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.logs / "status.json").read_text(encoding="utf-8"))
        return None

    def summary(self):
        return json.loads((self.logs / "summary.json").read_text(encoding="utf-8"))

    def events(self, name=None):
        """The journal's records, of all launches; with ``name`` only those of this event, which exists."""
        assert name is None or name in EVENTS, name
        path = self.logs / "events.jsonl"
        written = path.read_bytes() if path.exists() else b""
        # While the run lives, its last line may be half there: a write shows page by page.
        written = written[: written.rfind(b"\n") + 1]
        read, records = self._journal
        if not written.startswith(read):
            read, records = b"", []
        # Asked for a hundred times a second while a test waits: only what has come since is parsed.
        records = records + [json.loads(line) for line in written[len(read) :].splitlines()]
        self._journal = written, records
        return [record for record in records if name in (None, record["event"])]

    def audit(self, world):
        """Per rank, the newest audit record of each step, over all launches."""
        return [
            {record["step"]: record for record in self.audit_lines(rank)} for rank in range(world)
        ]

    def audit_lines(self, rank):
        """A rank's audit records in the order in which they were written."""
        lines = (self.logs / f"audit_rank_{rank}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in lines.splitlines()]


def assert_every_sample_once(outputs, world, *, samples):
    """Every committed step has all its samples, each once an epoch, whoever took them."""
    steps = {}
    for audit in outputs.audit(world):
        for step, line in audit.items():
            steps.setdefault(step, []).append(line)
    assert sorted(steps) == list(range(1, outputs.summary()["steps"] + 1))
    batch = outputs.summary()["samples"] // len(steps)
    seen = {}
    for step, lines in steps.items():
        # A step that was rolled back is done again by a later generation, perhaps a smaller one.
        newest = max(line["generation"] for line in lines)
        counted = [line for line in lines if line["generation"] == newest]
        indices = [index for line in counted for index in line["indices"]]
        assert len(indices) == batch, f"step {step}: {counted}"
        seen.setdefault(counted[0]["epoch"], []).extend(indices)
    for epoch, indices in seen.items():
        assert len(indices) == len(set(indices)), f"epoch {epoch}"
        assert set(indices) <= set(range(samples))


class Run(Outputs):
    """One launch of ``python -m ddp_runner train``, or of another ``verb``, in a folder of its own.

    Without a ``command``, which is everything up to the options, and an ``environment``, the command and its
    zygote are forks of a process that has imported torch (see tests.ready): of ``launcher``, where one is
    given. ``task`` None trains the built-in one in the folders that the command chooses itself. Without a
    word about them there are no fire drills. ``world`` None: ``variables``, which are added to those of
    the test, say it. ``cgroup``: that in which the forks live.
    """

    def __init__(
        self,
        folder,
        *arguments,
        world=2,
        task=f"{WORKLOAD}:PacedTask",
        verb="train",
        command=None,
        environment=None,
        variables=None,
        launcher=None,
        cgroup=None,
    ):
        super().__init__(folder)
        self.folder.mkdir(exist_ok=True, parents=True)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.output_path = self.folder / "console.txt"
        self._hurry = self.folder / HURRY_NAME
        self.is_stopping = False  # as far as a signal of the test has asked it to
        self.noticed_s = 0.0  # when it has noticed what the test has last done to it
        is_ready = command is None and environment is None
        words = [*(command or (*PYTHON_M, verb)), "--cpu"]
        if world is not None:
            words += ["-n", str(world)]
        if task is not None:
            words += ["--task", task, "-l", str(self.logs), "-c", str(self.checkpoints)]
        if not any("drill_at" in str(argument) for argument in arguments):
            words.append(NO_DRILLS)
        if not any("hang_min_s" in str(argument) for argument in arguments):
            words.append(QUICK_HANGS)
        if world == 1:
            words.append(ONE_THREAD)
        self._output_begin = self.output_path.stat().st_size if self.output_path.exists() else 0
        self._audit_begin = self._audit_size()
        self._events_begin = len(self.events())
        self._shared_before = shared_memory()
        self._inodes = set()
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        words += (str(argument) for argument in arguments)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            name: value,
            **(environment or {}),
            **(variables or {}),
        }
        with self.output_path.open("ab") as output:
            if is_ready:
                words = words[len(PYTHON_M) :]
                launcher = launcher or ready.shared()
                self.process = launcher.start(
                    words, cwd=folder, output=output, env=env, cgroup=cgroup
                )
            else:
                self.process = subprocess.Popen(
                    words,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=env,
                )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def console(self):
        """What this launch has printed so far."""
        with self.output_path.open("rb") as file:
            file.seek(self._output_begin)
            return file.read().decode(errors="replace")

    def processes(self):
        """Every living process of this job; zombies hold nothing and do not count."""
        return processes_with(self._mark)

    def named(self, name):
        """The one process of the job whose name for ``ps`` is ``name``, such as ``ddp:store``."""
        found = []

        def is_alone():  # a process that has just been forked still has its parent's name
            found[:] = [process for process in self.processes() if process.name == name]
            return len(found) == 1

        poll(is_alone, timeout_s=5.0, what=f"one {name} of {self.processes()}")
        return found[0]

    def phase(self, rank):
        """What the rank is doing, by the newest status; None before there is one."""
        status = self.status()
        return None if status is None else status["ranks"][rank]["phase"]

    def rank_pid(self, rank):
        return self.named(f"ddp:rank{rank}").pid

    def committed(self):
        """The newest step that rank 0 of this launch has committed, by its audit file; 0 for none."""
        size = self._audit_size()
        if size <= self._audit_begin:
            return 0
        with self._audit_path.open("rb") as file:
            file.seek(max(self._audit_begin, size - 4096))
            whole = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        with contextlib.suppress(ValueError):  # the first line is longer than what was read
            return json.loads(whole)["step"]
        return 0

    def wait_for_step(self, step):
        """Wait until ``step`` steps are committed; fails if the run ends before."""

        def reached():
            assert self.process.poll() is None, f"ended early:\n{self.console}"
            return self.committed() >= step

        poll(reached, what=f"step {step}")
        self._note_listening()

    def wait_for_checkpoint(self, step):
        """Wait until a checkpoint of ``step`` or later counts: its manifest is there."""

        def published():
            assert self.process.poll() is None, f"ended early:\n{self.console}"
            names = [path.stem for path in self.checkpoints.glob("step_*.json")]
            return any(int(name.removeprefix("step_")) >= step for name in names)

        poll(published, what=f"a checkpoint of step {step}")

    def wait_for_event(self, name, **fields):
        """Wait until the journal holds such an event of this launch."""
        assert name in EVENTS, name

        def found():
            has_ended = self.process.poll() is not None  # then there is nothing to come
            records = [
                record
                for record in self.events()[self._events_begin :]
                if record["event"] == name
                and all(record.get(key) == value for key, value in fields.items())
            ]
            assert records or not has_ended, f"ended early:\n{self.console}"
            return records

        return poll(found, what=f"event {name}")[-1]

    def signal(self, number, pid=None):
        self.is_stopping |= number in STOPS
        self.noticed_s = time.monotonic() + NOTICED_WITHIN_S
        os.kill(self.process.pid if pid is None else pid, number)

    def signals_at_once(self, *each):
        """Send each ``(number, pid)``; the supervisor learns of the first one when all are sent.

        Should this test be held up between two of them, it would have repaired the first by then.
        """
        self.signal(signal.SIGSTOP)
        for number, pid in each:
            self.signal(number, pid)
        self.signal(signal.SIGCONT)

    def hurry(self):
        """Have no step take longer than it must from here on."""
        self._hurry.touch()

    def wait(self, timeout_s=DEADLINE_S, *, hurries=True):
        """The exit code. Everything of the job is gone by then, or the test fails.

        ``hurries``: it may come as soon as it can, as nothing more is done to the run.
        """
        if hurries:
            hurry([self])
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                left_s = max(0.0, deadline_s - time.monotonic())
                code = self.process.wait(min(LISTENING_EVERY_S, left_s))
                break
            assert time.monotonic() < deadline_s, (
                f"still running after {timeout_s:g} s:\n{self.console}"
            )
            self._note_listening()
        self._hurry.unlink(missing_ok=True)
        left = self.processes()
        assert not left, f"still there when the command had returned: {left}"
        self.assert_nothing_left()
        return code

    @property
    def ports_seen(self):
        """How many sockets of the job have been seen listening; none of them may be left."""
        return len(self._inodes)

    def _note_listening(self):
        self._inodes |= listening_inodes([process.pid for process in self.processes()])

    def assert_gone(self, *, within_s=GONE_WITHIN_S):
        """Every process ends within the time, without anybody's help."""
        poll(lambda: not self.processes(), timeout_s=within_s, what=f"end of {self.processes()}")
        self.process.wait(within_s)

    def assert_nothing_left(self):
        """No temporary file, listening socket or shared memory of the job is left."""
        unfinished = [path.name for path in self.checkpoints.glob("*tmp*")]
        unfinished += [path.name for path in self.checkpoints.glob(".drill")]
        assert not unfinished, unfinished
        self.assert_machine_clean()

    def assert_machine_clean(self):
        """As above, but for a save that a SIGKILL cut off: the next launch removes its file."""
        # torch makes the folder of its compile cache when it is imported, torchrun one for its logs.
        made = [path.relative_to(self.temporary).parts for path in self.temporary.rglob("*")]
        not_ours = ("torchinductor_", "torchelastic_")
        leftovers = [parts for parts in made if not parts[0].startswith(not_ours)]
        assert not leftovers, leftovers
        # A killed process shows no environment while the kernel still closes its files.
        poll(
            lambda: not self._inodes & listening_inodes(None),
            timeout_s=GONE_WITHIN_S,
            what="the end of the job's listening sockets",
        )
        poll(
            lambda: not ownerless_shared_memory(shared_memory() - self._shared_before),
            timeout_s=GONE_WITHIN_S,
            what=f"end of one of {shared_memory() - self._shared_before} in shared memory",
        )

    @property
    def _audit_path(self):
        return self.logs / "audit_rank_0.jsonl"

    def _audit_size(self):
        return self._audit_path.stat().st_size if self._audit_path.exists() else 0


def hurry(runs):
    """Have them come to their end: not before they have noticed what was done to them, nor if they are to stop first."""
    if any(run.is_stopping for run in runs):
        return
    time.sleep(max(0.0, *(run.noticed_s - time.monotonic() for run in runs)))
    for run in runs:
        run.hurry()


def ended(*runs):
    """The exit codes of runs that train together, when all have ended: see :meth:`Run.wait`."""
    hurry(runs)
    return tuple(run.wait() for run in runs)
