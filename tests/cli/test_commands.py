"""The command as a process: exit codes, one-line errors, and that wrong input touches nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_runner.__main__ import main
from ddp_runner.checkpoint.manifest import Manifest, checkpoint_name, manifest_name
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.features.doctor import doctor
from ddp_runner.features.script.other_summary import AttemptRecord, ScriptSummary
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.observe.summary import (
    FaultRecord,
    RunSummary,
    TimeShares,
    write_summary,
)
from tests import ready

ROOT = Path(__file__).resolve().parents[2]
LOOP = str(ROOT / "docs" / "examples" / "my_loop.py")


_TASK_BEYOND_ASCII = """
import torch
from torch import nn
from ddp_runner import Datasets


class Täsk:
    def build_model(self):
        return nn.Linear(3, 2)

    def build_datasets(self):
        print("données ☃")
        return Datasets(train=[torch.ones(3) for _ in range(40)])

    def loss(self, model, batch):
        return model(batch).mean()
"""


def command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddp_runner", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["tran"], ["tran: unknown command; did you mean train?"]),
        (
            [__file__, "--lr", "1"],
            [f"{__file__} is a file: run {__file__} (a script), or --task {__file__} (a task)"],
        ),
        (["run"], ["run: needs a script: "]),
        (["run", "gone.py"], ["run=gone.py: no such file"]),
        (["run", "-m", "no.such.module"], ["-m=no.such.module: no module of this name"]),
        (["run", "--nnodes", "2", __file__], ["--rdzv-endpoint: is needed with several machines"]),
        (["run", "--rdzv_endpoint=a:1", __file__], ["--rdzv-endpoint=a:1: is for several mach"]),
        (["run", "--master_addr=10.0.0.1", __file__], ["--master-addr=10.0.0.1: is for several"]),
        (["run", "--nnodes=2", "--master-addr=a", "--node-rank=2", __file__], ["--node-rank=2: "]),
        (
            ["run", "--standalone", "--nnodes=2", "--rdzv-endpoint=a:1", __file__],
            ["--standalone: is for one machine, and not 2"],
        ),
        (["run", "--no-python", "gone"], ["--no-python=gone: no program of this name can be run"]),
        (["run", "--no_python", "-m", "x"], ["--module=x: is for Python: it has no use"]),
        (["run", "--no-python", "--hang-timeout=9", "ls"], ["--hang-timeout=9: is for Python: it"]),
        (["run", "--hang_timeout=soon", __file__], ["--hang-timeout=soon: must be a number"]),
        (["run", "--tee", "9", __file__], ["--tee=9: must be 0 to 3, or rank:0 to 3 for some"]),
        (["run", "--local_ranks_filter=a", __file__], ["--local-ranks-filter=a: must be ranks"]),
        (["run", "--monitor_interval=x", __file__], ["--monitor-interval=x: must be a number"]),
        (["run", "-r", "7", __file__], ["--redirects=7: must be 0 to 3, or rank:0 to 3 for some"]),
        (["run", "--rdzv-backend=etcd", __file__], ["--rdzv-backend=etcd: must be c10d or"]),
        (["run", "--node_rank=1", __file__], ["--node-rank=1: is for several machines"]),
        (
            ["run", "--shutdown-timeout=9", "x.py"],
            ["--shutdown-timeout=9: is called --grace-period"],
        ),
        (
            ["run", "--virtual-local-rank", "x.py"],
            ["--virtual-local-rank: is not supported: each rank sees all"],
        ),
        (["run", "--epochs", "3", "x.py"], ["--epochs: unknown option; run --help lists them"]),
        (
            ["run", "--grace-perod=3", "x.py"],
            ["--grace-perod=3: unknown option; did you mean --grace-period?"],
        ),
        (["run", "--preload", "no_such", __file__], ["--preload=no_such: no module of this name"]),
        (["run", "--resume-with", "a.pt", __file__], ["--resume-with=a.pt: must be a file and"]),
        (["run", "--grace-period", "soon", __file__], ["--grace-period=soon: must be a number"]),
        (["run", "--tee=3", LOOP], ["--tee: is for other scripts: a loop that calls attach()"]),
        (["run", "--resume-with", "a:b", LOOP], ["--resume-with: is for other scripts: a loop"]),
        (["run", "--inject=kill", __file__], ["--inject: needs a loop that calls ddp_runner.att"]),
        (["demo", "-n", "1"], ["--nproc-per-node=1: must be 2 to 8: what is left of a world"]),
        (["demo", "--kep"], ["--kep: unknown option; did you mean --keep?"]),
        (["--cpu", "--bacth-size", "3"], ["--bacth-size: unknown option; did you mean --batch-"]),
        (["--cpu", "-b", "x"], ["--batch-size=x: must be a whole number, 1 or more"]),
        (["--cpu", "-n", "two"], ["--nproc-per-node=two: must be a whole number, 1 or more, or"]),
        (["--cpu", "--gpus", "0"], ["--gpus=0: contradicts --cpu; give one of them"]),
        (["train", "--cpu", "-l", "file"], ["--log-dir=file: must be a folder, but "]),
        (["--cpu", "--config", "file"], ["--config=file: is not a mapping; write lines such as"]),
        (["--cpu", "--config", "no"], ["--config=no: no such file"]),
        (["--cpu", "--data", "no"], ["--data=no: no such file or folder"]),
        (["--cpu", "--resume", "no"], ["--resume=no: must be auto, last, best, none or the path"]),
        (["--cpu", "--resume", "last"], ["--resume=last: there is no checkpoint in checkpoints/"]),
        (
            ["--cpu", "--resume", "file"],
            ["--resume=file: is not named like a checkpoint; expected"],
        ),
        (["--cpu", "--resume", "."], ["--resume=.: is a folder without checkpoints"]),
        (["run", "--cpu", "--resume", "best", __file__], ["--resume: needs a loop that calls"]),
        (["check", "--loop", "file"], ["--loop=file: does not call ddp_runner.attach()"]),
        (["run", "--cpu", "--resume", "best", LOOP], ["--resume=best: there is no checkpoint in"]),
        (["--cpu", "--init-from", "no"], ["--init-from=no: no such file or folder"]),
        (["--cpu", "--task", "no.py"], ["--task=no.py: no such file no.py"]),
        (
            ["--cpu", "num_workers=-1", "dropout=2"],
            ["num_workers=-1: must be a whole number, 0", "dropout=2: must be a number, 0 or more"],
        ),
        (["checkpoints", "weed"], ["weed: unknown action; use list, verify, show, export, prune"]),
        (
            ["checkpoints", "prune", "-c", "."],
            ["--keep: is required: the number of checkpoints to keep, 1 or more"],
        ),
        (["checkpoints", "prune", "--keep=0", "-c", "."], ["--keep=0: must be the number of"]),
        (["checkpoints", "show", "--keep=1"], ["--keep: is an option of checkpoints prune"]),
        (["checkpoints", "list", "best"], ["best: unexpected word: list acts on all checkpoints"]),
        (["checkpoints", "show", "-c", "."], ["last: . holds no checkpoint"]),
        (["checkpoints", "show", "7", "-c", "."], ["7: has no checkpoint in .;"]),
        (["checkpoints", "export", "-c", "."], ["--to: is required: the folder for the files"]),
        (["checkpoints", "-c", "no"], ["--checkpoint-dir=no: no such folder"]),
        (["checkpoints", "-c", "file"], ["--checkpoint-dir=file: is a file; give a folder"]),
        (["report", "-l", "no"], ["--log-dir=no: no such folder"]),
        (["report", "-l", "file"], ["--log-dir=file: is a file; give a folder"]),
        (["evaluate"], ["--checkpoint-dir=checkpoints: no such folder: no run has saved here;"]),
        (["report", "-l", "."], ["--log-dir=.: holds no run: no summary.json"]),
        (
            ["train", "recovery.warm_spare=2"],
            ["recovery.warm_spare=2: must be true or false, or process, or model"],
        ),
        (["evaluate", "bst"], ["bst: does not exist; did you mean best?"]),
        (["docs", "--port", "99999"], ["--port=99999: must be a whole number from 1 to 65535"]),
        (["doctor", "--jsno"], ["--jsno: unknown option; did you mean --json?"]),
    ],
)
def test_wrong_input_is_one_line_and_exit_2_and_touches_nothing(
    words, lines, tmp_path, monkeypatch, capsys
):
    """Each mistake is one line on standard error, and nothing is created."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_RUNNER_COMMAND", "ddp-runner")  # as the command itself does
    Path("file").write_text("text\n")
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    printed = said.err.splitlines()
    assert len(printed) == len(lines)
    for line, expected in zip(printed, lines, strict=True):
        assert line.startswith(f"ddp_runner: error: {expected}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_wrong_command_is_refused_as_a_process(tmp_path):
    """The same through the interpreter: exit 2, one line, no traceback."""
    done = command("--batch-sze", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr
        == "ddp_runner: error: --batch-sze: unknown option; did you mean --batch-size?\n"
    )
    from_environment = command("--cpu", cwd=tmp_path, DDP_RUNNER_EPOCHS="none")
    assert from_environment.returncode == 2
    assert from_environment.stderr.startswith("ddp_runner: error: DDP_RUNNER_EPOCHS=none: must be")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--version"], ["report", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_disk_is_one_line(words, unbuffered, tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ddp_runner", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )

    assert done.stderr == "ddp_runner: error: cannot write: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["train", "-h"], ["help"], ["--help-settings"], ["--version"],
        ["checkpoints", "-h"], ["report", "--help"], ["doctor", "-h"],
        ["demo", "-h"], ["check", "-h"], ["docs", "-h"],
    ],
)  # fmt: skip
def test_help_is_on_standard_output_and_exit_0(words, capsys):
    """Every command explains itself within 80 columns."""
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.strip()
    assert max(len(line) for line in said.out.splitlines()) < 80


def test_neither_the_command_nor_the_package_imports_torch(tmp_path):
    """`import ddp_runner` loads nothing heavy; planning a run loads no torch."""
    code = (
        "import sys, ddp_runner; heavy = {'torch', 'numpy', 'pydantic', 'rich', 'yaml', 'psutil'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "assert 'DDPTrainer' in dir(ddp_runner);"
        "from ddp_runner.cli.parser import parse_train; from ddp_runner.cli.planning import plan_launch;"
        "import ddp_runner.features.doctor.doctor, ddp_runner.features.report.run_report, ddp_runner.cli.checkpoints;"
        "plan_launch(parse_train(['--cpu']), words=['--cpu']);"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "ddp_runner"], ["./launch_training.sh"]]
)
def test_an_inspecting_python_ends_with_the_commands_exit_code(program):
    """It would show the exit code as a traceback, and end with 1."""
    found = subprocess.run(
        [*program, "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONINSPECT": "1", "DDP_RUNNER_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("ddp_runner ")


def test_names_of_files_are_utf8_in_every_locale(tmp_path):
    """A task beside no ASCII trains, is listed and is named where the locale has ASCII only."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    locale["PYTHONIOENCODING"] = "ascii"
    folder = tmp_path / "dé☃"
    folder.mkdir()
    (folder / "tâsk.py").write_text(_TASK_BEYOND_ASCII, encoding="utf-8")
    words = ["--task", "tâsk.py:Täsk", "--max-steps", "2", "-n", "1"]
    words += ["num_workers=0", "recovery.warm_spare=false", "recovery.drill_at=off"]
    trained = command("train", *words, cwd=folder, **locale)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    for line in (["checkpoints", "list"], ["report"]):
        done = command(*line, cwd=folder, **locale)
        assert done.returncode == 0, done.stderr
    refused = command("train", "--task", "nö.py:T", cwd=folder, **locale)
    assert refused.stderr == "ddp_runner: error: --task=n\\xf6.py:T: no such file n\\xf6.py\n"
    assert refused.returncode == 2


def test_the_version_is_the_packages(capsys):
    """The command, the module and pyproject.toml agree."""
    assert main(["--version"]) == 0
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert capsys.readouterr().out == f"ddp_runner {version[1]}\n"


def test_a_plan_holds_every_decision(tmp_path, monkeypatch):
    """What the supervisor gets: devices, threads, settings with origins, resume key and digest."""
    monkeypatch.chdir(tmp_path)
    words = ["--cpu", "-n", "3", "--test", "-l", "L", "seed=9"]
    plan = plan_launch(parse_train(words), words=words)
    assert plan.world_size == len(plan.devices) == 3
    assert {place.device for place in plan.devices} == {"cpu"}
    assert plan.threads_per_rank >= 1
    assert (plan.settings.run.log_dir, plan.settings.run.checkpoint_dir) == (
        "L",
        "checkpoints/test",
    )
    assert plan.origins["run.seed"] == "command line"
    assert plan.origins["model.hidden_size"] == "preset"
    assert plan.resume_key["data.batch_size x ranks"] == plan.settings.data.batch_size * 3
    assert plan.command[-len(words) :] == tuple(words)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_has_a_share_for_each_rank(tmp_path, monkeypatch):
    """Their number is known before any process is."""
    monkeypatch.chdir(tmp_path)
    for words, ranks in ((["--cpu", "-n", "3"], 3), (["--cpu", "-n", "1"], 1)):
        shares = ",".join("3" * (ranks + 1))
        with pytest.raises(BadInputError, match=rf"data\.shares={shares}: must be a number for"):
            plan_launch(parse_train([*words, f"shares={shares}"]), words=words)
    plan = plan_launch(parse_train(["--cpu", "-n", "3", "shares=3,3,2"]), words=[])
    assert plan.settings.data.shares == (3, 3, 2)


def saved(directory: Path, step: int, *, monitored: float, **more) -> Path:
    content = os.urandom(64)
    path = directory / checkpoint_name(step)
    path.write_bytes(content)
    manifest = Manifest(
        step=step,
        epoch=1,
        samples=step * 8,
        run_id="r",
        file=path.name,
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        monitored=monitored,
        meaning={},
        settings_digest="d",
        **more,
        versions={},
        created_utc="2026-11-20T19:00:00Z",
        reason="interval",
    )
    (directory / manifest_name(step)).write_text(manifest.to_json())
    return path


def test_checkpoints_are_listed_newest_first_and_verified(tmp_path, capsys):
    """`list` reads no content; `verify` does, and exits 1 when one is damaged."""
    saved(tmp_path, 9, monitored=1.5)
    older = saved(tmp_path, 10, monitored=2.5)
    where = ["-c", str(tmp_path)]
    assert main(["checkpoints", "list", *where]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["step", "10"]
    assert second.split()[:2] == ["step", "9"]
    assert "  loss 1.5000  " in second, "of what, no file of before says"
    assert second.endswith("best")
    saved(tmp_path, 11, monitored=0.5, monitor="bach/hits", mode="max")
    assert main(["checkpoints", "list", *where]) == 0
    newest = capsys.readouterr().out.splitlines()[0]
    assert "  bach/hits 0.5000  " in newest
    assert newest.endswith("best"), "the only one that is judged by that figure"
    (tmp_path / checkpoint_name(11)).unlink()
    (tmp_path / manifest_name(11)).unlink()
    assert main(["checkpoints", "verify", *where]) == 0
    assert capsys.readouterr().out.count(" ok") == 2
    older.write_bytes(b"x" * 64)
    assert main(["checkpoints", "list", *where]) == 0
    capsys.readouterr()
    assert main(["checkpoints", "verify", "--json", *where]) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [bool(record["problem"]) for record in records] == [True, False]
    assert "SHA-256" in records[0]["problem"]


def test_a_folder_without_checkpoints_says_so(tmp_path, capsys):
    """An empty folder is no mistake."""
    assert main(["checkpoints", "-c", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no checkpoint\n"


SUMMARY = RunSummary(
    run_id="r1",
    status=RunStatus.COMPLETED,
    exit_code=0,
    steps=1500,
    epochs=3,
    samples=48_000,
    world_size=2,
    final_loss=1.25,
    weights_sha256="ab" * 32,
    exact=True,
    wall_s=100.0,
    time_s=TimeShares(startup=10.0, productive=81.0, recovery=2.0),
    faults=(
        FaultRecord(
            kind="rank_killed",
            rank=1,
            step=60,
            cause="killed by SIGKILL",
            detected_s=20.0,
            recovered_s=21.5,
            steps_lost=1,
            generation=2,
        ),
    ),
    checkpoint="checkpoints/step_00001500.pt",
    figures={"bits_per_byte": 2.1},
)


def test_a_report_shows_result_time_and_faults(tmp_path, capsys):
    """The figures of summary.json and the counts of events.jsonl, in words."""
    write_summary(tmp_path / "summary.json", SUMMARY)
    (tmp_path / "events.jsonl").write_text('{"event": "run_started"}\n{"event": "x"}\ngarbage')
    assert main(["report", "-l", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "status completed run r1 steps 1,500 steps, 48,000 samples, 2 ranks" in text
    assert "exit code 0 epochs 3" in text
    assert "step 60: rank 1: killed by SIGKILL, repaired in 1.5s, 1 step again" in text
    assert "bits per byte" in text
    assert "run_started 1, x 1, (unreadable line) 1" in text


def test_a_report_of_a_script_says_nothing_of_exactness(tmp_path, capsys):
    """Its attempts and what ended them; the newest step of a run that goes on, and of no number."""
    attempts = [
        AttemptRecord(
            attempt=number,
            steps=1234,
            seconds=9.0,
            first_step_s=1.0,
            rank=None if number else 1,
            cause="" if number else "ValueError: bad row",
            detail="",
            exit_code=None if number else 1,
        )
        for number in range(2)
    ]
    summary = ScriptSummary(
        run_id="r1",
        status=RunStatus.GAVE_UP,
        exit_code=3,
        script="own.py",
        arguments=("--lr", "1"),
        world_size=2,
        steps=1234,
        wall_s=20.0,
        attempts=tuple(attempts),
    )
    write_summary(tmp_path / "summary.json", summary)
    assert main(["report", "-l", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "gave up (exit 3)" in text
    assert "1,234 optimizer steps on 2 ranks in the newest of 2 attempts" in text
    assert "attempt 0  rank 1: ValueError: bad row, after 1,234 optimizer steps" in text
    assert "exact" not in text
    assert main(["report", "--compare", str(tmp_path), str(tmp_path)]) == 2
    assert "is the run of a script" in capsys.readouterr().err
    (tmp_path / "summary.json").unlink()
    status = {"run_id": "r1", "state": "running", "step": 5, "max_steps": 0, "pid": os.getpid()}
    (tmp_path / "status.json").write_text(
        json.dumps({**status, "world_size": 2, "faults_total": 0})
    )
    assert main(["report", "-l", str(tmp_path)]) == 0
    assert "running at step 5, 2 ranks" in capsys.readouterr().out


HOSTILE = "\x1b[2Jabc\u202egpj.\u200b\udcff\nrun  another"
HARMLESS = r"\x1b[2Jabc\u202egpj.\u200b\udcff\nrun  another"


def test_a_report_shows_what_files_hold_and_obeys_none_of_it(tmp_path):
    """No terminal obeys a run's name or the cause of a fault, and half a character ends no report."""
    fault = replace(SUMMARY.faults[0], cause=HOSTILE.replace("\n", " "))
    summary = replace(SUMMARY, run_id=HOSTILE, faults=(fault,), checkpoint=HOSTILE)
    write_summary(tmp_path / "summary.json", summary)
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": HOSTILE}))
    answer = command("report", "-l", str(tmp_path), cwd=tmp_path)
    assert answer.returncode == 0, answer
    assert answer.stdout.count(HARMLESS.replace(r"\n", " ")) == 4, answer.stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u200b\u202e]", answer.stdout)
    ascii_only = command("report", "-l", str(tmp_path), cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0, ascii_only


DEEP = "[" * 100_000
RECORD = SUMMARY.to_record()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (DEEP, "it is nested too deeply"),
        ("[1, 2]", "it is not a JSON object"),
        (json.dumps({**RECORD, "steps": "many"}), "its field steps: "),
        (json.dumps({**RECORD, "figures": {"loss": "low"}}), "its field figures.loss: "),
        (json.dumps({**RECORD, "weights_sha256": 5}), "its field weights_sha256: "),
        (json.dumps({**RECORD, "own_step_s": {"0": None}}), "its field own_step_s.0: "),
    ],
)
def test_a_summary_that_somebody_else_has_written_is_one_line(tmp_path, capsys, text, why):
    """Values of another kind, and brackets that no parser gets out of, are no crash of ours."""
    (tmp_path / "summary.json").write_text(text)
    assert main(["report", "-l", str(tmp_path)]) == 2
    assert f"its summary.json cannot be read: {why}" in capsys.readouterr().err


def test_a_status_that_somebody_else_has_written_is_one_line(tmp_path, capsys):
    """Also where the process it names can be none."""
    known = {"state": "running", "step": 3, "max_steps": 9, "world_size": 2, "faults_total": 0}
    for text in (DEEP, json.dumps({**known, "run_id": "r", "pid": float("inf")})):
        (tmp_path / "status.json").write_text(text)
        assert main(["report", "-l", str(tmp_path)]) == 2
        assert "its status.json cannot be read" in capsys.readouterr().err
    for pid in (0, -1):
        (tmp_path / "status.json").write_text(json.dumps({**known, "run_id": "r", "pid": pid}))
        assert main(["report", "-l", str(tmp_path)]) == 0
        assert "no longer alive" in capsys.readouterr().out


def test_a_run_of_another_machine_is_not_called_dead(tmp_path, capsys):
    """In a folder that machines share its process is not to be found here; one that ended is said so."""
    known = {"run_id": "r", "pid": 0, "step": 3, "max_steps": 9, "world_size": 2, "faults_total": 0}
    for state, words in (
        ("running", "the run is on node0, and wrote its status"),
        ("done", "the run has ended"),
    ):
        status = {**known, "state": state, "host": "node0"}
        (tmp_path / "status.json").write_text(json.dumps(status))
        assert main(["report", "-l", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert words in shown
        assert "no longer alive" not in shown


def test_a_journal_and_a_manifest_of_somebody_else_end_no_command(tmp_path, capsys):
    """An event or a manifest that cannot be read is said, and the rest is shown."""
    write_summary(tmp_path / "summary.json", SUMMARY)
    (tmp_path / "events.jsonl").write_text(f'{{"event": "x"}}\n{DEEP}\n')
    assert main(["report", "-l", str(tmp_path)]) == 0
    assert "x 1, (unreadable line) 1" in capsys.readouterr().out
    saved(tmp_path, 9, monitored=1.5)
    (tmp_path / manifest_name(10)).write_text(DEEP)
    (tmp_path / checkpoint_name(10)).write_bytes(b"x")
    assert main(["checkpoints", "list", "-c", str(tmp_path)]) == 0
    damaged, whole = capsys.readouterr().out.splitlines()
    assert "its manifest is damaged: not JSON: it is nested too deeply" in damaged
    assert whole.endswith("best")


def test_names_of_folders_are_shown_and_not_obeyed(tmp_path):
    """In the list of checkpoints, and in what refuses one."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    for words in (["list"], ["verify"]):
        answer = command("checkpoints", *words, "-c", HOSTILE, cwd=tmp_path)
        assert answer.returncode == 0, answer
        assert answer.stdout == f"{HARMLESS} holds no checkpoint\n"
    refused = command("checkpoints", "list", "-c", f"{HOSTILE}/no", cwd=tmp_path)
    assert refused.returncode == 2, refused
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u200b\u202e]", refused.stderr)


def test_a_report_shows_each_rank_s_own_time(tmp_path, capsys):
    """Outside collectives: there all wait for the slowest. Of many ranks the ends and the middle."""
    slow = replace(SUMMARY, own_step_s={"0": 0.0125, "1": 0.05}, stragglers={"1": 4.0})
    many = replace(SUMMARY, own_step_s={str(rank): rank / 1000 for rank in range(64)})
    texts = []
    for made in (slow, many, SUMMARY):
        write_summary(tmp_path / "summary.json", made)
        assert main(["report", "-l", str(tmp_path)]) == 0
        texts.append(" ".join(capsys.readouterr().out.split()))
    assert "rank 0 12.5 ms, rank 1 50.0 ms a step outside collectives; rank 1 persist" in texts[0]
    assert "persistently 4.0 times as slow as the others" in texts[0]
    assert "own time rank 0 0.0 ms, rank 32 32.0 ms, rank 63 63.0 ms a step" in texts[1]
    assert "own time" not in texts[2]


def test_a_report_shows_a_fault_that_was_not_repaired(tmp_path, capsys):
    """A run that gave up says so, without a journal too."""
    fault = replace(SUMMARY.faults[0], rank=-1, recovered_s=None)
    gave_up = replace(SUMMARY, status=RunStatus.GAVE_UP, exit_code=3, faults=(fault,))
    write_summary(tmp_path / "summary.json", gave_up)
    assert main(["report", "-l", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "gave up" in text
    assert "exit code 3" in text
    assert "step 60: all ranks: killed by SIGKILL, not repaired" in text
    assert "events none: there is no events.jsonl, which a supervised run writes" in text


def test_a_report_on_a_live_run_shows_its_status(tmp_path, capsys):
    """Without a summary the newest status is shown; a damaged file is named."""
    status = {
        "run_id": "r1", "state": "running", "step": 4680, "max_steps": 9000, "world_size": 2,
        "faults_total": 1, "pid": os.getpid(),
    }  # fmt: skip
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert main(["report", "-l", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "run r1: running at step 4,680 of 9,000, 2 ranks, 1 fault\n" in text
    assert f"the run is still training (process {os.getpid()})" in text
    (tmp_path / "summary.json").write_text("{}")
    assert main(["report", "-l", str(tmp_path)]) == 2
    assert "its summary.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "shown", "reported"),
    [
        ("running", "last seen running at step 5 of 9", "its end was not recorded"),
        ("done", "done at step 5 of 9", "its summary.json is missing"),
        ("failed", "failed at step 5 of 9", "its summary.json is missing"),
    ],
)
def test_a_report_on_a_dead_run_does_not_call_it_alive(tmp_path, capsys, state, shown, reported):
    """Killed, or with nothing but a full disk to write to: only what is known is said."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    status = {
        "run_id": "r1", "state": state, "step": 5, "max_steps": 9, "world_size": 2,
        "faults_total": 0, "pid": gone.pid,
    }  # fmt: skip
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert main(["report", "-l", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"run r1: {shown}" in text
    assert reported in text
    assert "goes on" not in text


def test_the_doctor_finds_a_healthy_machine_healthy(tmp_path, monkeypatch, capsys):
    """Every check has a verdict, and nothing is created."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json", "--quick"]) == 0
    checks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {check["verdict"] for check in checks} <= {"ok", "warn"}
    assert all(bool(check["cure"]) == (check["verdict"] != "ok") for check in checks)
    assert {"Python", "packages", "torch", "GPUs", "memory", "/dev/shm", "loopback"} <= {
        check["name"] for check in checks
    }
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_names_what_is_wrong_and_the_cure(tmp_path, capsys):
    """A folder that cannot be written fails the machine."""
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--quick", "-l", str(tmp_path / "file" / "logs")]) == 1
    lines = capsys.readouterr().out.splitlines()
    failing = [number for number, line in enumerate(lines) if line.startswith("fail")]
    assert len(failing) == 1
    assert "is a file" in lines[failing[0]]
    assert lines[failing[0] + 1].strip() == "-> choose another folder with --log-dir"


def test_the_doctor_warns_of_little_room(monkeypatch):
    """Too little of something that still trains is a warning with its cure."""
    monkeypatch.setattr(doctor, "_SHARED_MEMORY_BYTES_MIN", 2**62)
    check = doctor.check_shared_memory()
    assert check.verdict is doctor.Verdict.WARN
    assert "--shm-size" in check.cure


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"LOCAL_RANK": "0"}, "MASTER_ADDR: must be set with WORLD_SIZE above 1: "),
        ({"LOCAL_RANK": "0", "RANK": "2"}, "RANK=2: must be below WORLD_SIZE=2"),
    ],
    ids=["no store", "one too many"],
)
def test_a_rank_that_cannot_be_is_refused_before_anything_is_touched(tmp_path, environment, line):
    """In one line, at once: an outside launcher would start it again and again."""
    known = {"RANK": "0", "WORLD_SIZE": "2", **environment}
    answer = command("--cpu", cwd=tmp_path, **known)
    assert (answer.returncode, answer.stdout) == (2, ""), answer
    (said,) = answer.stderr.splitlines()
    assert said.startswith(f"ddp_runner: error: {line}")
    assert list(tmp_path.iterdir()) == []


def test_variables_of_a_launcher_in_the_shell_are_said_not_refused(tmp_path):
    """One line for each kind; the run is planned as without them."""
    found = {"RANK": "0", "WORLD_SIZE": "2", "PET_RDZV_BACKEND": "etcd", "PET_NPROC_PER_NODE": "x"}
    words = ("--cpu", "-n", "1", "--dry-run", "--task", "synthetic", "--max-steps", "2")
    answer = command(*words, cwd=tmp_path, **found, **ready.environment())
    assert answer.returncode == 0, answer
    said = answer.stdout + answer.stderr
    assert said.count("RANK=0 and WORLD_SIZE=2 of the environment are not used: ") == 1
    assert said.count("PET_NPROC_PER_NODE, PET_RDZV_BACKEND of the environment are not used") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("loader_kill:rank=1,step=3", "num_workers=0"),
            "loader_kill never comes: data.num_workers=0",
        ),
        (("random:kinds=kill+loader_stop", "num_workers=0"), "loader_stop never comes"),
        (("kill:step=31", "--max-steps", "30"), "step 31 never comes: run.max_steps=30"),
        (("kill:phase=profile",), "profile never comes: log.profile is not set"),
        (("loader_kill:step=30", "num_workers=1", "--max-steps", "30"), ""),
    ],
)
def test_an_injected_fault_that_cannot_come_is_refused(words, says):
    """Before the start; control: one that may come is none of it."""
    words = ["--cpu", "-n", "2", "--inject", *words]
    if not says:
        plan_launch(parse_train(words), words=words)
        return
    with pytest.raises(BadInputError, match=says):
        plan_launch(parse_train(words), words=words)
