"""`doctor`: the collectives that it tries, in a process with a limit, and what it says of GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli.hardware import machine_checks
from ddp_runner.cli.hardware.machine_checks import Check, Probed, Verdict, probe
from ddp_runner.features.doctor import doctor, gpu_checks
from ddp_runner.features.doctor.gpu_checks import (
    check_collectives,
    judge_driver,
    judge_memory,
    judge_nccl,
    judge_peers,
    parse_holders,
    parse_memory,
    parse_peers,
)
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.observe.gpus import Gpu, VisibleGpus
from ddp_runner.system.torch_versions import TorchBuild
from tests.processes import ROOT, poll
from tests.rank.failing_probe import VARIABLE

GIB = 1024**3
BUSY, IDLE = (
    Gpu(index=0, uuid="GPU-aaaa1111", name="NVIDIA H100", memory="81559 MiB"),
    Gpu(index=1, uuid="GPU-aaaa2222", name="NVIDIA H100", memory="81559 MiB"),
)
BANNER = """Mon Nov 10 12:00:00 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""
PEERS = """ \t\x1b[4mGPU0\tGPU1\tGPU2\t\x1b[0m
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tCNS\t
 GPU2\tCNS\tCNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
"""


@pytest.fixture
def mark(monkeypatch):
    """A word in the environment of all that a test starts; at its end nothing has it any more."""
    name, value = "DDP_TEST_MARK", uuid.uuid4().hex
    monkeypatch.setenv(name, value)

    def is_marked(process):
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            return not is_zombie and process.environ().get(name) == value
        return False

    def marked():
        others = (process for process in psutil.process_iter() if process.pid != os.getpid())
        return [process for process in others if is_marked(process)]

    yield marked
    poll(lambda: not marked(), what="the end of all that was started", timeout_s=20.0, every_s=0.05)


def _probe(how, *, limit_s=30.0, module="failing_probe"):
    return probe(
        backend="gloo",
        devices=["cpu", "cpu"],
        environment={**os.environ, VARIABLE: how, "PYTHONPATH": str(ROOT)},
        limit_s=limit_s,
        module=f"tests.rank.{module}",
    )


def test_the_doctor_has_real_ranks_repair_themselves(mark, tmp_path, monkeypatch, capsys):
    """All-reduce, abort and second forming, over gloo; --quick leaves that out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    found = {
        check["name"]: check for check in map(json.loads, capsys.readouterr().out.splitlines())
    }
    said = found["collectives"]
    assert said["verdict"] == "ok", said
    assert said["found"].startswith("gloo, 2 ranks: all-reduce, abort, second forming in ")
    assert not mark()
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", "--quick", "--json"]) == 0
    assert "collectives" not in capsys.readouterr().out


def test_a_rank_that_is_stopped_fails_the_machine_within_the_limit(mark, monkeypatch, capsys):
    """The line says which rank, and in which part; exit 1; nothing of it is left."""
    answer = _probe("stop", limit_s=2.0)
    assert answer.failure.startswith("no end within 2 s: ")
    assert "rank 1 in all-reduce" in answer.failure
    assert not mark()
    monkeypatch.setattr(doctor, "probe", lambda **_: answer)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (number,) = [index for index, line in enumerate(lines) if line.startswith("fail")]
    assert "gloo, 2 ranks: no end within 2 s" in lines[number]
    assert "127.0.0.1" in lines[number + 1]


def test_the_process_that_leads_is_ended_when_it_hangs_itself(mark, monkeypatch):
    """Then nothing keeps its limit but ours."""
    monkeypatch.setattr(machine_checks, "_GRACE_S", 1.5)
    began_s = time.monotonic()
    answer = _probe("hang", limit_s=0.5, module="failing_start")
    assert answer.failure == "the check itself has not ended within 2 s"
    assert time.monotonic() - began_s < 60


def test_what_keeps_torch_from_being_imported_is_reported(mark):
    """The last line that was written, where the process ends without a word."""
    assert _probe("say why", module="failing_start").failure == (
        "the check ended with 1: ImportError: libcudart.so.12: cannot open shared object file"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_doctor_that_is_ended(mark, number):
    """Killed, or interrupted by Ctrl-C, while a rank hangs."""
    code = (
        "import os; from ddp_runner.cli.hardware.machine_checks import probe;"
        "probe(backend='gloo', devices=['cpu', 'cpu'], environment=os.environ,"
        " module='tests.rank.failing_probe')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, VARIABLE: "stop", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    ) as process:
        poll(
            lambda: any(p.status() == psutil.STATUS_STOPPED for p in mark()),
            what="the rank that stops itself",
            every_s=0.05,  # a look at every process of the machine
        )
        process.send_signal(number)
        assert process.wait(timeout=20) != 0
    poll(lambda: not mark(), what="the end of its ranks", timeout_s=20.0, every_s=0.05)


def test_gpus_and_backend_are_chosen_as_training_chooses_them(monkeypatch, capsys):
    """Each visible GPU with NCCL; two ranks on one over gloo; what cannot be is one line, exit 2."""
    asked = []
    monkeypatch.setattr(doctor, "find_gpus", lambda *_: VisibleGpus(gpus=(BUSY, IDLE)))
    monkeypatch.setattr(
        doctor, "torch_build", lambda: TorchBuild(version="2.9.0+cu128", cuda="12.8")
    )
    monkeypatch.setattr(gpu_checks, "ask", lambda _: "")
    monkeypatch.setattr(
        doctor,
        "probe",
        lambda **given: asked.append(given) or Probed(failure="", seconds=1.0, nccl="2.28.5"),
    )
    for words in ([], ["-g", "1"], ["-g", "0,0"], ["--cpu"], ["--backend", "gloo"]):
        main(["doctor", *words])
    assert [(given["backend"], given["devices"]) for given in asked] == [
        ("cpu:gloo,cuda:nccl", ["cuda:0", "cuda:1"]),
        ("cpu:gloo,cuda:nccl", ["cuda:1"]),
        ("gloo", ["cuda:0", "cuda:0"]),
        ("gloo", ["cpu", "cpu"]),
        ("gloo", ["cuda:0", "cuda:1"]),
    ]
    said = capsys.readouterr().out
    assert (
        said.count("warn  NCCL            2.28.5: 2.28.3 to 2.28.8 are known to abort badly") == 2
    )
    assert "NCCL 2.28.5, 2 ranks on cuda:0, cuda:1: all-reduce, abort, second forming" in said
    for words in (["-g", "7"], ["-g", "0,0", "--backend", "nccl"], ["--cpu", "--backend", "nccl"]):
        with pytest.raises(BadInputError):
            doctor.DECLARATION.run([*words, "--quick"])
    assert len(asked) == 5


@pytest.mark.parametrize(
    ("version", "is_sound"),
    [
        ("2.21.5", False),
        ("2.22.3", True),
        ("2.27.5", True),
        ("2.28.2", True),
        ("2.28.3", False),
        ("2.28.8", False),
        ("2.28.9", True),
        ("2.30", True),
        ("3.0.1", True),
        ("", True),
    ],
)
def test_versions_of_nccl_that_abort_badly_are_known(version, is_sound):
    """A warning with the wheel that cures it, named for torch's CUDA."""
    check = judge_nccl(version, cuda="13.0")
    assert check.verdict is (Verdict.OK if is_sound else Verdict.WARN)
    assert ("nvidia-nccl-cu13>=2.28.9" in check.cure) == (not is_sound)


@pytest.mark.parametrize(
    ("banner", "cuda", "verdict", "found"),
    [
        (BANNER, "12.8", Verdict.OK, "550.54.15 for CUDA up to 12.4; torch is built with 12.8"),
        (BANNER, "13.0", Verdict.FAIL, "550.54.15 for CUDA up to 12.4; torch is built with 13.0"),
        (
            BANNER.replace("CUDA Version: 12.4", "CUDA Version: N/A "),
            "12.8",
            Verdict.OK,
            "550.54.15; torch is built with CUDA 12.8",
        ),
        ("", "12.8", Verdict.WARN, "not known: nvidia-smi does not say it"),
    ],
)
def test_a_driver_is_held_against_torchs_cuda(banner, cuda, verdict, found):
    """Within a major version newer toolkits run on older drivers; beyond it they do not."""
    check = judge_driver(banner, cuda=cuda)
    assert (check.verdict, check.found) == (verdict, found)
    assert bool(check.cure) == (verdict is not Verdict.OK)


def test_gpus_without_peer_access_are_named():
    """The matrix of nvidia-smi, its underlined header and its legend."""
    matrix = parse_peers(PEERS)
    assert len(matrix) == 9
    assert judge_peers(matrix, [0, 1]).found == "yes"
    check = judge_peers(matrix, [2, 0, 1])
    assert check.verdict is Verdict.WARN
    assert check.found == "none between GPU 0 and 2 (CNS); 1 and 2 (CNS)"
    assert judge_peers(matrix, [0, 5]).verdict is Verdict.WARN
    assert judge_peers(parse_peers("No devices were found\n"), [0, 1]).verdict is Verdict.WARN


def test_who_holds_a_gpus_memory_is_reported():
    """Free memory of each; processes by number and name; a warning where much is held."""
    memory = parse_memory("0, 20480, 81559\n1, 81000, 81559\n[N/A], [N/A], 1\n")
    assert memory == {0: (20 * GIB, 81559 * 1024**2), 1: (81000 * 1024**2, 81559 * 1024**2)}
    holders = parse_holders(
        "GPU-aaaa1111, 4711, /usr/bin/python, train.py, 59392\n"
        "GPU-aaaa1111, 4712, [Not Found], [N/A]\n"
        "No running processes found\n"
    )
    assert [(holder.pid, holder.name, holder.used_bytes) for holder in holders] == [
        (4711, "/usr/bin/python, train.py", 58 * GIB),
        (4712, "[Not Found]", None),
    ]
    check = judge_memory([BUSY, IDLE], memory, holders)
    assert check.verdict is Verdict.WARN
    assert "process 4711 /usr/bin/python, train.py (62" in check.found
    assert " and process 4712 [Not Found]; 1: " in check.found
    assert judge_memory([IDLE], memory, holders).verdict is Verdict.OK
    unseen = judge_memory([BUSY], memory, ())
    assert "nvidia-smi does not show" in unseen.found
    assert judge_memory([BUSY], {}, ()).verdict is Verdict.WARN


def test_a_failing_check_of_nccl_says_what_to_try():
    """Its failures have other causes than gloo's."""
    check = check_collectives(
        "cpu:gloo,cuda:nccl", ["cuda:0"], Probed(failure="rank 0 in forming: x", nccl="2.27.5")
    )
    assert check.verdict is Verdict.FAIL
    assert check.found == "NCCL 2.27.5, 1 rank on cuda:0: rank 0 in forming: x"
    assert "NCCL_DEBUG=WARN" in check.cure


def test_a_check_fits_a_narrow_terminal(monkeypatch, capsys):
    """Its lines are broken between words, below the finding."""
    check = Check(name="memory", verdict=Verdict.WARN, found="word " * 15, cure="free some of it")
    monkeypatch.setattr(doctor, "all_checks", lambda *parts, **named: iter([check]))
    monkeypatch.setattr(doctor, "_columns", lambda: 60)
    assert main(["doctor", "--cpu", "--quick"]) == 0
    first, *rest, cure = capsys.readouterr().out.splitlines()
    assert first.startswith("warn  memory          word")
    assert all(line.startswith(" " * 22 + "word") for line in rest)
    assert rest
    assert max(map(len, (first, *rest, cure))) < 60
    assert cure == " " * 22 + "-> free some of it"
