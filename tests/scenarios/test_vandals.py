"""Another program on this machine meddles with a run: at the store and at gloo's ports."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.scenarios.conftest import LONG, WITHOUT_WORKERS
from tests.scenarios.harness import ROOT, Run, poll

VANDAL = Path(__file__).with_name("vandal.py")


class Vandal:
    """Such a program; within ``with`` it has imported what it needs, which takes longer than a short run."""

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(VANDAL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "", "PYTHONPATH": str(ROOT)},
        )
        with self.at_it("talk"):
            pass
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.communicate()

    @contextlib.contextmanager
    def at_it(self, what, *ports):
        """It does so for the length of the block."""
        self._say(" ".join([what, *map(str, ports)]), answer="at it")
        yield
        self._say("enough", answer="done")

    def _say(self, line, *, answer):
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{answer}\n"


def listening(pid):
    """The ports on which a process listens."""
    found = psutil.Process(pid).net_connections("tcp")
    return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]


def test_whoever_talks_to_a_run_s_ports_and_store_ends_nothing(fault_free, tmp_path):
    """Garbage, silence, and values in the store, overwritten and deleted: the weights are the fault-free ones."""
    settings = (*WITHOUT_WORKERS, *LONG, "task.pace_s=0.3", "recovery.max_restarts=100")
    with Vandal() as vandal, Run(tmp_path, *settings) as run:
        run.wait_for_step(3)
        (store,) = listening(run.named("ddp:store").pid)
        doors = [store, *listening(run.rank_pid(0)), *listening(run.rank_pid(1))]
        assert len(doors) >= 3
        with vandal.at_it("talk", *doors):
            run.wait_for_step(run.committed() + 1)
        for what in ("overwrite", "delete"):
            before = len(run.events("fault"))
            with vandal.at_it(what, store):
                while run.process.poll() is None and not meddled(run.events("fault")[before:]):
                    repaired = len(run.events("repaired"))
                    with contextlib.suppress(ProcessLookupError):  # a status that is a moment old
                        # Who forms again reads from the store; it may have, before it was harmed.
                        run.signal(signal.SIGKILL, run.rank_pid(1))
                    poll(
                        lambda before=before, repaired=repaired: (
                            run.process.poll() is not None
                            or meddled(run.events("fault")[before:])
                            or len(run.events("repaired")) > repaired
                        ),
                        what=f"what the {what} breaks",
                    )
            assert run.process.poll() is None, run.console
            run.wait_for_step(run.committed() + 1)
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2, *LONG).digest
    faults = {fault["kind"] for fault in run.summary()["faults"]}
    assert "store_tampered" in faults
    # Who waits for what was deleted is stuck, where nobody reads the store before its time is up.
    allowed = {
        "store_tampered",
        "store_died",
        "collective_failed",
        "collective_stuck",
        "rank_killed",
    }
    assert faults <= allowed, faults
    assert "another program meddled: the value of " in run.console
    assert "Traceback" not in run.console


def meddled(faults):
    return any(fault["kind"] == "store_tampered" for fault in faults)
