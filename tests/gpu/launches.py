"""Runs of the product, ``python -m ddp_runner train`` or ``run``, in folders of their own, and what came of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ddp_runner.kernel.system import parent_death
from tests.gpu.facts import rehearses

TASKS = Path(__file__).with_name("tasks.py")
KIND = {"kill": "rank_killed", "raise": "rank_raised", "stop": "rank_hung"}
SETTINGS = (
    *("log.display=plain", "bucket_cap_mb=1", "save_every_steps=20", "save_interval=0"),
    *("recovery.drill_at=off", "recovery.max_restarts=1000", "recovery.no_progress_generations=5"),
    "recovery.hang_min_s=4",  # ranks share the device
)
OF_A_TASK = ("-b", "8", "evaluate_interval=0")
BY_DEVICE = "its device has not reached the sum"
EXACT = ("run.deterministic=true",)


def inject(harms):
    """The words for ``(kind, phase, rank, step)`` each."""
    return [
        word
        for kind, phase, rank, step in harms
        for word in ("--inject", f"{kind}:rank={rank},step={step},phase={phase}")
    ]


def expected(harms):
    """Whom ``summary.json`` is to name for them: kind, rank, step."""
    return [[KIND[kind], rank, step] for kind, _, rank, step in harms]


class Launch:
    """One run. It ends with this process, and all its processes with it.

    Of a task of ``tasks.py``, or of a ``program``: a path and its words. ``where`` says on which
    devices; otherwise all ranks are on the first GPU.
    """

    def __init__(self, folder, *words, task="", program=(), world, environment=None, where=()):
        self.folder = folder
        folder.mkdir(parents=True)
        self._begun_s = time.monotonic()
        self._seconds = None
        self._late = ""
        if rehearses():
            where = ("--cpu", "-n", str(world))
        elif not where:
            where = ("-g", ",".join("0" * world), *(("ddp.backend=gloo",) if world > 1 else ()))
        files = ["-l", str(folder / "logs"), "-c", str(folder / "checkpoints")]
        # Several runs at a time, and little to do for a thread beside the device.
        settings = [*where, *SETTINGS, *files, f"threads_per_rank={1 if rehearses() else 2}"]
        if task:
            verb, of_it = "train", [*OF_A_TASK, "--task", f"{TASKS}:{task}"]
        else:
            verb, of_it = "run", []
        words = [str(word) for word in (*words, *program)]
        command = [sys.executable, "-m", "ddp_runner", verb, *settings, *of_it, *words]
        parent = os.getpid()
        with (folder / "console.txt").open("wb") as console:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                preexec_fn=lambda: parent_death.die_with_parent(parent),  # noqa: PLW1509 - one thread
            )

    @property
    def pid(self):
        """Of the supervisor, whose children all others are."""
        return self._process.pid

    def is_over(self):
        """Whether it has ended by itself."""
        if self._process.poll() is None:
            return False
        self._seconds = self._seconds or time.monotonic() - self._begun_s
        return True

    def ask_for_stacks(self):
        """Have its ranks write what they are doing, each into its log, if it has not ended."""
        if self.is_over():
            return
        self._late = f"killed after {time.monotonic() - self._begun_s:.1f} s"
        for pid in {event.get("pid") for event in self.events("rank_formed")}:
            if parent_of(pid) == self._process.pid:  # the number may be somebody else's by now
                os.kill(pid, signal.SIGRTMIN)

    def end(self):
        """End it if it has not."""
        if not self.is_over():
            self._process.kill()
            self._process.wait(10)
            self._seconds = time.monotonic() - self._begun_s

    def summary(self):
        """Of the end; {} where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "logs" / "summary.json").read_text(encoding="utf-8"))
        return {}

    def events(self, name=None):
        """Of the journal, so far."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.folder / "logs" / "events.jsonl").read_bytes().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return [event for event in found if name in (None, event["event"])]

    @property
    def digest(self):
        """Of its weights; None if it did not get so far."""
        return self.summary().get("weights_sha256")

    def write_facts(self, facts, *, fault_free=None, culprits=None):
        """What came of it, as facts. ``fault_free``: the run to compare with; ``culprits``: who must be named."""
        summary = self.summary()
        code = self._process.returncode
        facts.note("exit", self._late or code)
        facts.note("seconds", self._seconds)
        for name in ("steps", "weights_sha256", "exact", "inexact_reasons", "time_s", "final_loss"):
            if name in summary:
                facts.note(name, summary[name])
        faults = summary.get("faults") or [
            {**event, "cause": event.get("text")} for event in self.events("fault")
        ]
        for number, fault in enumerate(faults):
            facts.under("faults").note(f"{number:02}", _fault_in_short(fault))
        # Of kernels that do not end: of whose hosts the devices' own words were read.
        by_device = [
            [f.get("rank"), f.get("step")] for f in faults if BY_DEVICE in str(f.get("cause"))
        ]
        if by_device:
            facts.note("reported_by_device", by_device)
        facts.note("verdict", self._verdict(summary, faults, fault_free, culprits))
        if self._late or code:
            facts.note("console", self._tail("console.txt", 1200))
            self._show()
        return summary

    def _verdict(self, summary, faults, fault_free, culprits):
        said = []
        if self._late or self._process.returncode:
            said.append(self._late or f"exit {self._process.returncode}")
        if fault_free is not None:
            is_equal = summary.get("weights_sha256") == fault_free and fault_free
            said.append(
                "weights of a fault-free run" if is_equal else "OTHER WEIGHTS than without faults"
            )
        if summary:
            said.append("exact" if summary.get("exact") else "reported inexact")
        if culprits is not None:
            named = [[fault.get("kind"), fault.get("rank"), fault.get("step")] for fault in faults]
            is_right = named == culprits if all(len(one) == 3 for one in culprits) else None
            if is_right is None:
                is_right = [one[:2] for one in named] == culprits
            said.append("culprits right" if is_right else f"culprits WRONG ({len(named)})")
            lost = sum(fault.get("steps_lost") or 0 for fault in faults)
            said.append(f"{lost} steps lost")
        return ", ".join(said)

    def _tail(self, name, characters):
        with contextlib.suppress(OSError):
            text = (self.folder / name).read_text(encoding="utf-8", errors="replace")
            return text[-characters:]
        return ""

    def _show(self):
        """Into the part's log: what a person needs who was not there."""
        print(f"----- {self.folder.name}: {self._late or self._process.returncode}")
        for path in ("console.txt", "logs/supervisor.log", "logs/events.jsonl"):
            print(f"--- {path}\n{self._tail(path, 6000)}")
        for path in sorted((self.folder / "logs").glob("rank_*.log")):
            print(f"--- {path.name}\n{self._tail(f'logs/{path.name}', 4000)}", flush=True)


def parent_of(pid):
    """The process id of its parent; None where there is no such process."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    return None


def _fault_in_short(fault):
    seconds = fault.get("seconds") or {}
    where = f"{fault.get('kind')} rank {fault.get('rank')} step {fault.get('step')}"
    reported = {
        "who": where,
        "cause": str(fault.get("cause"))[:120],
        "lost": fault.get("steps_lost"),
    }
    if isinstance(seconds, dict):
        reported["seconds"] = seconds
    return reported


def finish(launches, *, limit_s):
    """Wait until all have ended, at most so long; then they are ended."""
    by_s = time.monotonic() + limit_s
    while time.monotonic() < by_s and not all([launch.is_over() for launch in launches]):  # noqa: C419
        time.sleep(0.05)
    for launch in launches:
        launch.ask_for_stacks()
    if any([not launch.is_over() for launch in launches]):  # noqa: C419 - each notes its seconds
        time.sleep(0.5)
    for launch in launches:
        launch.end()
