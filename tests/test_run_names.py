"""What a run is called, which folders that gives it, and what is said where these hold another run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ddp_runner.cli.runs import latest_logs
from ddp_runner.config import check_relations, from_flat, resolve, to_yaml, ways_on
from ddp_runner.config.run_names import is_name, name_of_task
from ddp_runner.config.ways_on import own_folder, words_of_old
from ddp_runner.core.settings import RunSettings, Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.system.run_directories import RunDirectories, point


def run_of(*pairs, **sources):
    return resolve(command_line=pairs, **sources).settings.run


def folders(run):
    return run.log_dir, run.checkpoint_dir


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("bytes", "bytes"),
        ("synthetic", "synthetic"),
        ("my_task.py", "my_task"),
        ("~/deep/er/My Task-2.py:Mine", "My_Task-2"),
        ("package.tasks.rings:RingsTask", "rings"),
        ("__main__:Mine", "Mine"),
        ("../.hidden.py", "hidden"),
        ("test.py", "test_task"),
        ("latest.py", "latest_task"),
        ("...py", "task"),
        ("\u0437\u0430\u0434\u0430\u0447\u0430.py", "task"),
        (f"{'x' * 300}.py", "x" * 100),
    ],
)
def test_a_run_is_called_as_its_task(task, name):
    """Whatever the task is called, the name is one that a folder can have."""
    assert name_of_task(task) == name
    assert is_name(name)
    run = run_of(("--task", task))
    assert (run.name, *folders(run)) == (name, f"logs/{name}", f"checkpoints/{name}")
    assert from_flat({"task": task}).run == run


def test_the_defaults_are_those_of_the_default_task():
    """Settings made by hand and settings made of nothing are the same."""
    assert resolve().settings == Settings()


def test_a_given_name_moves_both_folders():
    """From the command line, the environment or a file."""
    expected = ("logs/v1.2-b", "checkpoints/v1.2-b")
    assert folders(run_of(("--name", "v1.2-b"))) == expected
    assert folders(run_of(environment={"DDP_RUNNER_RUN__NAME": "v1.2-b"})) == expected
    assert from_flat({"name": "v1.2-b"}).run.log_dir == expected[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "--name='': must be letters"),
        (".", "--name=.: must be letters"),
        ("..", "--name=..: must be letters"),
        ("a/b", "--name=a/b: must be letters"),
        ("/tmp", "--name=/tmp: must be letters"),
        ("-x", "--name=-x: must be letters"),
        (".x", "--name=.x: must be letters"),
        ("a b", "--name=a b: must be letters"),
        ("a\nb", "--name=a\\nb: must be letters"),
        ("a\n", "--name=a\\n: must be letters"),
        ("x" * 101, "must be letters"),
        ("latest", "--name=latest: is taken by the newest run"),
        ("test", "--name=test: is taken by --test"),
    ],
)
def test_what_is_no_safe_folder_is_refused(name, said):
    """Nothing outside of the two folders, nothing hidden, no option, and nobody else's name."""
    with pytest.raises(BadInputError) as caught:
        run_of(("--name", name))
    assert said in str(caught.value)


def test_folders_that_are_named_are_used_exactly(tmp_path):
    """Each by itself; a name does not move them, nor does the task's."""
    run = run_of(("--name", "mine"), ("--log-dir", "L"))
    assert folders(run) == ("L", "checkpoints/mine")
    file = tmp_path / "c.yaml"
    file.write_text("checkpoint_dir: /big/disk\n")
    run = run_of(("--name", "mine"), ("--log-dir", "L"), files=[file])
    assert folders(run) == ("L", "/big/disk")


def test_a_runs_own_configuration_file_takes_another_name(tmp_path):
    """It names its folders; alone it means that run, with a name that comes later another one."""
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(resolve(command_line=[("--name", "one")]).settings))
    assert folders(run_of(files=[file])) == ("logs/one", "checkpoints/one")
    run = run_of(("--name", "two"), files=[file])
    assert folders(run) == ("logs/two", "checkpoints/two")
    run = run_of(("--test", "true"), files=[file])
    assert (run.name, *folders(run)) == ("test", "logs/one/test", "checkpoints/one/test")


def test_a_smoke_test_has_a_name_that_no_run_has():
    """It begins afresh each time; where it is given a name, it goes on like any run."""
    run = run_of(("--test", "true"), ("--task", "mine.py"))
    assert (run.name, *folders(run), run.resume) == (
        "test",
        "logs/test",
        "checkpoints/test",
        "none",
    )
    run = run_of(("--test", "true"), ("--name", "try"))
    assert (run.name, *folders(run), run.resume) == ("try", "logs/try", "checkpoints/try", "auto")


def test_latest_leads_to_the_newest_run(tmp_path, monkeypatch):
    """A link that is replaced whole, with nothing left beside it."""
    monkeypatch.chdir(tmp_path)
    assert latest_logs() is None
    for name in ("one", "two", "one"):
        directories = RunDirectories(run_of(("--name", name)))
        directories.claim()
        directories.release()
        assert latest_logs() == Path("logs", name)
        assert Path("logs/latest").samefile(f"logs/{name}")
    elsewhere = RunDirectories(run_of(("--log-dir", "other/place"), ("--checkpoint-dir", "c")))
    elsewhere.claim()
    elsewhere.release()
    assert latest_logs() == Path("logs/one")
    assert sorted(path.name for path in Path("logs").iterdir()) == ["latest", "one", "two"]
    assert [path.name for path in Path("other").iterdir()] == ["place"]


@pytest.mark.parametrize(
    ("folder", "way_on"), [("logs/mine", "another --name"), ("other", "another directory")]
)
def test_a_second_run_of_a_script_hears_of_names(tmp_path, monkeypatch, folder, way_on):
    """It has one folder for all; control: one that is elsewhere, whatever its name."""
    monkeypatch.chdir(tmp_path)
    run = run_of(("--name", "mine"), ("--log-dir", folder), ("--checkpoint-dir", folder))
    first = RunDirectories(run)
    first.claim()
    with pytest.raises(BadInputError, match=f"--log-dir={folder}: .*take {way_on}"):
        RunDirectories(run).claim()
    first.release()


def test_latest_is_a_file_where_there_are_no_links(tmp_path, monkeypatch):
    """Some file systems have none; the command finds the run all the same."""

    def has_no_links(*_, **__):
        raise OSError(95, "Operation not supported")

    (tmp_path / "one").mkdir()
    monkeypatch.setattr(Path, "symlink_to", has_no_links)
    point(tmp_path / "latest", tmp_path / "one")
    assert (tmp_path / "latest").read_text() == "one\n"
    assert latest_logs(tmp_path) == tmp_path / "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one"]


@pytest.mark.parametrize("target", ["../../etc", "/etc", "gone", "..", "latest"])
def test_latest_leads_nowhere_else(tmp_path, target):
    """Others may write to the folder: what leads out of it, or nowhere, is not followed."""
    (tmp_path / "latest").symlink_to(target)
    assert latest_logs(tmp_path) is None
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text(target)
    assert latest_logs(tmp_path) is None


def test_a_folder_of_the_users_called_latest_stays(tmp_path):
    """A run is no reason to replace it, and it is no reason against a run."""
    (tmp_path / "latest").mkdir()
    (tmp_path / "one").mkdir()
    with pytest.raises(OSError, match="latest"):
        point(tmp_path / "latest", tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one"]


def test_the_words_for_the_old_settings_are_those_to_type(monkeypatch):
    """Options where there are some; a batch for the ranks of now; what no words bring back is named."""
    monkeypatch.setenv("DDP_RUNNER_COMMAND", "ddp-runner")
    old = {
        "run.task": "my task.py", "run.seed": 5, "data.path": "", "model.hidden_size": 64,
        "data.batch_size x ranks": 16, "task.deep": True, "data fingerprint": "a",
    }  # fmt: skip
    new = {
        "run.task": "bytes", "run.seed": 1, "data.path": "/x", "model.hidden_size": 32,
        "data.batch_size x ranks": 8, "task.wide": 3, "data fingerprint": "b",
    }  # fmt: skip
    words, others = words_of_old(old, new, world_size=2)
    assert set(words) == {
        "--task 'my task.py'", "--seed 5", "-b 8", "model.hidden_size=64", "task.deep=true",
    }  # fmt: skip
    assert set(others) == {"no --data", "no task.wide", "the data as it was"}
    assert words_of_old(old, new, world_size=3)[0].count("global_batch_size=16") == 1
    assert words_of_old(old, new, world_size=17)[0].count("-n 16 -b 1") == 1
    assert words_of_old(old, old, world_size=2) == ([], [])
    secret = words_of_old({"task.api_key": "abcdef"}, {"task.api_key": "ghijkl"}, world_size=2)
    assert secret == ([], ["the old task.api_key"])


def test_the_name_that_is_offered_is_free(tmp_path, monkeypatch):
    """No folder of logs or checkpoints has it; folders that were named exactly get a number alike."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_RUNNER_COMMAND", "ddp-runner")
    Path("logs/bytes-2").mkdir(parents=True)
    Path("checkpoints/bytes-3").mkdir(parents=True)
    assert own_folder(Settings()) == "--name bytes-4"
    numbered = resolve(command_line=[("--name", "bytes-3")]).settings
    assert own_folder(numbered) == "--name bytes-4"
    exact = from_flat({"log_dir": "my logs", "checkpoint_dir": "c"})
    assert own_folder(exact) == "-c c-2 -l 'my logs-2'"
    line = ways_on(Settings(), old={"run.seed": 1}, new={"run.seed": 2}, world_size=2)
    assert line.startswith("choose one: --name bytes-4 ")
    assert "; --resume none " in line
    assert line.endswith("the old settings: --seed 1")


def test_a_tilde_is_the_home_folder(monkeypatch):
    """No shell expands one behind an equals sign, or in a file: a folder of that name would be made here."""
    monkeypatch.setenv("HOME", "/home/me")
    folders_given = {"log_dir": "~/logs", "checkpoint_dir": "~/kept", "rescue_dir": "~/rescue"}
    given = from_flat(folders_given)
    assert folders(given.run) == ("/home/me/logs", "/home/me/kept")
    assert given.checkpoint.rescue_dir == "/home/me/rescue"


def test_python_is_offered_settings_and_no_options(tmp_path, monkeypatch):
    """attach() and DDPTrainer take them as ``config``; a program of the user's has no option of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDP_RUNNER_COMMAND", raising=False)
    old, new = {"run.seed": 1, "ranks": 2, "data.batch_size": 8}, {"run.seed": 2, "ranks": 1}
    line = ways_on(from_flat({"name": "loop"}), old=old, new=new, world_size=1)
    assert line == (
        'choose one: config={"name": "loop-2"} (a separate run); config={"resume": "none"} (start'
        ' fresh; old files go to a backup folder); or the old settings: config={"data.batch_size":'
        ' 8}, 2 ranks, config={"run.seed": 1}'
    )
    line = ways_on(from_flat({"name": "loop"}), old={"ranks": 1}, new={"ranks": 2}, world_size=2)
    assert line.endswith("the old settings: 1 rank")


def test_checkpoints_of_before_there_were_names_are_pointed_out(tmp_path, monkeypatch):
    """They are not resumed by themselves any more; the words that do it are said, once."""
    monkeypatch.chdir(tmp_path)
    assert check_relations(Settings()) == ()
    Path("checkpoints").mkdir()
    Path("checkpoints/step_00000009.pt").touch()
    (note,) = check_relations(Settings())
    assert "-c checkpoints -l logs resumes it" in note
    old = resolve(command_line=[("--checkpoint-dir", "checkpoints"), ("--log-dir", "logs")])
    assert check_relations(old.settings) == ()
    Path("checkpoints/bytes").mkdir()
    assert check_relations(Settings()) == ()


@pytest.mark.parametrize("key", ["log_dir", "checkpoint_dir", "rescue_dir"])
def test_the_home_folder_of_nobody_is_refused(key):
    """In one line with its option; it is no folder of that name here."""
    option = f"--{key.replace('_', '-')}"
    with pytest.raises(BadInputError, match=f"^{option}=~nosuchuser/x: no user of this machine"):
        from_flat({key: "~nosuchuser/x"})


def test_a_folder_that_became_a_file_is_named_once(tmp_path):
    """With the reason, and without the number of the error."""
    logs, checkpoints = tmp_path / "logs", tmp_path / "checkpoints"
    holder = RunDirectories(RunSettings(log_dir=str(logs), checkpoint_dir=str(checkpoints)))
    holder.claim()
    shutil.rmtree(checkpoints)
    checkpoints.touch()
    (change,) = holder.look()
    assert change.text == f"{checkpoints} was removed, and cannot be locked again (File exists)"
    holder.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("name", ["logs", "checkpoints"])
def test_a_folder_of_another_users_run_is_refused_before_anything_starts(monkeypatch, name):
    """With the option and the file, though the folder itself may be written."""
    with TemporaryDirectory() as folder:  # pytest's own may not be entered by others
        monkeypatch.chdir(folder)
        Path(folder).chmod(0o755)
        settings = RunSettings(log_dir="logs", checkpoint_dir="checkpoints")
        holder = RunDirectories(settings)
        holder.claim()
        holder.release()
        for one in map(Path, ("logs", "checkpoints")):
            one.chmod(0o777)
            for file in one.iterdir() if one.name != name else ():
                file.chmod(0o666)
        os.seteuid(65534)
        try:
            with pytest.raises(BadInputError, match=f"{name}: cannot be locked: .* another user's"):
                RunDirectories(settings).refuse_if_held()
        finally:
            os.seteuid(0)
