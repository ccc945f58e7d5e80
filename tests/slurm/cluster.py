"""A SLURM cluster on this machine, from the distribution's packages: a controller and three nodes, each a daemon."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from tests.features.machines.whole_runs.conftest import free_port
from tests.processes import poll
from tests.scenarios.leftovers import processes_with

NODES = ("n1", "n2", "n3")
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# A lost node is to be found out within seconds, and a requeued job to start again at once (SLURM takes 2 minutes).
_SUPERVISORS = ("ddp:supervisor", "ddp:follower")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=4
MessageTimeout=5
TCPTimeout=1
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
PARTITION = "PartitionName={name} Nodes=n1,n2,n3 Default={default} State=UP PriorityTier={tier} GraceTime=30\n"


def missing_programs():
    """What of SLURM is not installed here."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class Cluster:
    """Three nodes, partitions ``low`` and ``high``; jobs of the second preempt those of the first."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.environment = {
            **os.environ,
            "PATH": PATH,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._mark = f"SLURM_CONF={self.folder / 'slurm.conf'}"

    def start(self):
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(
            host=host, port=free_port(), folder=self.folder, user=getpass.getuser()
        )
        for name in NODES:
            text += NODE.format(name=name, host=host, port=free_port())
        text += PARTITION.format(name="low", default="YES", tier=1)
        text += PARTITION.format(name="high", default="NO", tier=2)
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        words = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self.run("munged", "--force", f"--key-file={key}", *words)
        self.run("slurmctld")
        self.local.mkdir()
        for name in NODES:
            self.disk(name).mkdir()
            self.begin_node(name)
        for name in NODES:
            self.wait_for_node(name, "idle")

    @property
    def local(self):
        """A folder that has the same name on each node, and is another one on each."""
        return self.folder / "local"

    def disk(self, name):
        """What a node has in its :attr:`local`."""
        return self.folder / f"disk-{name}"

    def begin_node(self, name):
        """Its daemon, in a mount namespace of its own."""
        mounts = f"mount --bind {self.disk(name)} {self.local} && exec slurmd -N {name}"
        is_root = os.geteuid() == 0
        self.run("unshare", "-m" if is_root else "-Urm", "sh", "-c", mounts)

    def run(self, *words, environment=None):
        """What the command prints."""
        asked = subprocess.run(
            [str(word) for word in words],
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert asked.returncode == 0, f"{words}: {asked.stdout}{asked.stderr}"
        return asked.stdout.strip()

    def job(self, number):
        """What SLURM knows of a job: ``JobState``, ``Restarts``, ``NodeList`` and the like."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)

    def wait_for_job(self, number, **wanted):
        """Until the job has all of these, such as ``JobState="RUNNING"``."""

        def has_all():
            job = self.job(number)
            return all(job.get(name) == value for name, value in wanted.items())

        poll(has_all, every_s=0.2, what=f"{wanted} of job {number}")

    def wait_for_node(self, name, state):
        """Until it is ``idle``, ``drained``, ``down``; a mark for one that does not answer is left out."""
        shown = ("sinfo", "--noheader", "--partition=low", f"--nodes={name}", "--format=%T")
        poll(lambda: self.run(*shown).rstrip("*~#") == state, every_s=0.2, what=f"{name} {state}")

    def take_away(self, name):
        """As if its power went: the daemon, and everything that it has started there."""
        os.kill(int((self.folder / f"slurmd-{name}.pid").read_text()), signal.SIGKILL)
        of_job = [pid for pid in self._pids() if _variable(pid, "SLURMD_NODENAME") == name]
        for pid in {*of_job, *map(_step_daemon, of_job)} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def give_back(self, name):
        self.begin_node(name)
        self.wait_for_node(name, "idle")

    def ranks(self, node=None):
        """The processes of ranks on a node, or on all of them."""
        found = [one for one in processes_with(self._mark) if one.name.startswith("ddp:rank")]
        return {one.pid for one in found if node in (None, _variable(one.pid, "SLURMD_NODENAME"))}

    def supervisor(self, node):
        """The process that has the ranks there."""
        found = [one for one in processes_with(self._mark) if one.name in _SUPERVISORS]
        (pid,) = (one.pid for one in found if _variable(one.pid, "SLURMD_NODENAME") == node)
        return pid

    def stop(self):
        """Every job, then every daemon; whatever is left after that is killed."""
        with contextlib.suppress(AssertionError):
            self.run("scancel", "--user", getpass.getuser())
        for name in ("slurmctld.pid", *(f"slurmd-{node}.pid" for node in NODES), "munge.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / name).read_text()), signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            poll(lambda: not self._pids(), timeout_s=5.0, every_s=0.1)
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pids(self):
        return [process.pid for process in processes_with(self._mark)]


def _variable(pid, name):
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(f"{name}=".encode()):
                return word.partition(b"=")[2].decode()
    return ""


def _step_daemon(pid):
    """The ``slurmstepd`` above a process; 0 for none."""
    with contextlib.suppress(OSError):
        while pid > 1:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            if "(slurmstepd" in fields:
                return pid
            pid = int(fields.rpartition(")")[2].split()[1])
    return 0
