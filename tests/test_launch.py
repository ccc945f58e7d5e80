"""launch_training.sh finds or makes the environment; ddp_runner.launch() starts it from Python."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_runner.cli import python_environment as environment
from ddp_runner.cli.from_code import launch as launcher
from ddp_runner.kernel.rules.errors import BadInputError

ROOT = Path(__file__).resolve().parents[1]
SYSTEM_PATH = "/usr/bin:/bin"
STUB = """import os, sys
def main(words):
    print("|".join([sys.executable, os.environ.get("STUB_CWD") or os.getcwd(), *words]))
    return 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A checkout with the real scripts and a package that only prints how it was started."""

    root: Path

    def run(self, *words: str, script: Path | None = None, cwd: Path | None = None, **variables):
        clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
        return subprocess.run(
            [str(script or self.root / "launch_training.sh"), *words],
            cwd=cwd or self.root,
            env={**clean, "DDP_RUNNER_PYTHON": "", **variables},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "a check out"
    (root / "ddp_runner").mkdir(parents=True)
    (root / "tests").mkdir()
    shutil.copy(ROOT / "launch_training.sh", root)
    for folder in ("cli", "on_path/ddp_runner"):
        (root / "ddp_runner" / folder).mkdir(parents=True)
    for name in ("cli/python_environment.py", "on_path/ddp_runner/__init__.py", "start.py"):
        shutil.copy(ROOT / "ddp_runner" / name, root / "ddp_runner" / name)
    for package in ("", "cli"):
        (root / "ddp_runner" / package / "__init__.py").write_text("")
    (root / "ddp_runner" / "__main__.py").write_text(STUB)
    (root / "requirements.txt").write_text("# nothing\n")
    return Checkout(root=root)


def complete_venv(checkout: Checkout) -> Path:
    """A `.venv` that looks finished for the checkout's requirements."""
    folder = checkout.root / ".venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (folder / environment._OURS).write_text("with pip")
    environment.Repository(checkout.root, extra="").mark_complete()
    return folder / "bin" / "python"


def fake_python(folder: Path) -> Path:
    """A `python3` that is this very interpreter, but sees no installed package."""
    folder.mkdir(exist_ok=True)
    path = folder / "python3"
    path.write_text(f'#!/bin/sh\nexec "{Path(sys.executable).resolve()}" -S -s "$@"\n')
    path.chmod(0o755)
    return path


def test_arguments_and_folder_reach_the_command_unchanged(checkout, tmp_path):
    """Words with spaces, quotes and nothing pass through; the user's folder stays theirs."""
    words = ["--task", "my file.py", "a=b c", "", "it's", "*", "$HOME"]
    done = checkout.run(*words, cwd=tmp_path, DDP_RUNNER_PYTHON=sys.executable)
    assert done.stderr == ""
    assert done.stdout.rstrip("\n").split("|")[1:] == [str(tmp_path), *words]


def test_a_link_to_the_script_finds_its_checkout(checkout, tmp_path):
    """The script resolves its own real path, through several links, from any folder."""
    (tmp_path / "one").symlink_to(checkout.root / "launch_training.sh")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "two").symlink_to("../one")
    done = checkout.run(
        "x=1", script=tmp_path / "bin" / "two", cwd=tmp_path, DDP_RUNNER_PYTHON=sys.executable
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("|x=1\n")


def test_a_folder_that_is_gone_does_not_stop_the_command(checkout, tmp_path):
    """A shell may stand in a folder that was removed; the script needs nothing of it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    script = checkout.root / "launch_training.sh"
    done = subprocess.run(
        ["bash", "-c", f'cd "{gone}" && rmdir "{gone}" && exec "{script}" doctor'],
        env={**os.environ, "DDP_RUNNER_PYTHON": sys.executable, "STUB_CWD": "gone"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("|gone|doctor\n")


def test_the_commands_exit_code_is_the_scripts(checkout):
    """The script becomes the command, so the shell sees its code."""
    (checkout.root / "ddp_runner" / "__main__.py").write_text("raise SystemExit(75)\n")
    assert checkout.run(DDP_RUNNER_PYTHON=sys.executable).returncode == 75


def test_the_active_environment_is_used_if_it_satisfies(checkout, tmp_path):
    """The control: nothing is made where everything is there."""
    folder = tmp_path / "active"
    venv.create(folder, with_pip=False, symlinks=True)
    done = checkout.run("environment", VIRTUAL_ENV=str(folder), PATH=SYSTEM_PATH)
    assert done.stdout == f"{folder}/bin/python\n"
    assert done.stderr == ""
    assert not (checkout.root / ".venv").exists()


def test_an_active_environment_that_is_passed_over_is_named(checkout, tmp_path):
    """One line says which environment, what it lacks, and the command that makes it fit."""
    (checkout.root / "requirements.txt").write_text("torch>=2\n")
    python = complete_venv(checkout)
    folder = tmp_path / "active"
    venv.create(folder, with_pip=False, symlinks=True)
    done = checkout.run("environment", VIRTUAL_ENV=str(folder), PATH=SYSTEM_PATH)
    assert done.stdout == f"{python}\n"
    [line] = done.stderr.splitlines()
    assert f"the active environment {folder} does not fit: torch is missing" in line
    assert f"pip install -r '{checkout.root}/requirements.txt'" in line
    assert line.endswith(f"using {checkout.root}/.venv instead")


def test_a_broken_active_environment_is_named(checkout, tmp_path):
    """An environment whose interpreter is gone is passed over in one line, not in silence."""
    done = checkout.run("environment", VIRTUAL_ENV=str(tmp_path / "gone"), PATH=SYSTEM_PATH)
    assert f"the active environment {tmp_path / 'gone'} has no Python 3.10 or newer" in done.stderr


def test_an_activated_conda_environment_counts_as_active(checkout, monkeypatch):
    """Conda's interpreter is its own base, so CONDA_PREFIX says that the user chose it."""
    complete_venv(checkout)
    repository = environment.Repository(checkout.root, extra="")
    monkeypatch.delenv("DDP_RUNNER_PYTHON", raising=False)
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert environment.find_python(repository) == repository.python
    monkeypatch.setenv("CONDA_PREFIX", sys.prefix)
    assert environment.find_python(repository) == Path(sys.executable)


def test_a_python_without_the_packages_leads_to_the_complete_venv(checkout, tmp_path):
    """The first python3 on PATH is only asked; what it lacks, `.venv` has."""
    (checkout.root / "requirements.txt").write_text("torch>=2\n")
    python = complete_venv(checkout)
    path = f"{fake_python(tmp_path / 'fake').parent}:{SYSTEM_PATH}"
    assert checkout.run("environment", PATH=path).stdout == f"{python}\n"
    assert checkout.run("a b", "--run", PATH=path).stdout == f"{python}|{checkout.root}|a b|--run\n"


def test_a_package_is_found_by_the_name_of_its_folder(tmp_path, monkeypatch):
    """The first on the path counts; an older form is found too, and what an uninstall has left is none."""
    names = ("a/My_Pkg.x-1.2+cpu.dist-info", "b/my_pkg_x-3.dist-info", "b/older-2.egg-info")
    for name in (*names, "b/gone-1.dist-info"):
        (tmp_path / name).mkdir(parents=True)
    for name in names:
        file = "PKG-INFO" if name.endswith("egg-info") else "METADATA"
        version = name.rpartition("-info")[0].rpartition("-")[2].rpartition(".")[0]
        (tmp_path / name / file).write_text(f"Name: {name[2:5]}\nVersion: {version}\n")
    monkeypatch.setattr(
        sys, "path", [str(tmp_path / "no"), str(tmp_path / "a"), str(tmp_path / "b")]
    )
    environment._installed.cache_clear()
    found = [environment.installed_version(name) for name in ("my-pkg.X", "older", "gone", "none")]
    environment._installed.cache_clear()
    assert found == ["1.2+cpu", "2", "", ""]


def test_other_requirements_make_a_venv_incomplete(checkout):
    """The marker holds the digest of the requirements for which `.venv` was finished."""
    complete_venv(checkout)
    assert environment.Repository(checkout.root, extra="").is_complete()
    (checkout.root / "requirements.txt").write_text("torch>=2\n")
    assert not environment.Repository(checkout.root, extra="").is_complete()


def test_a_chosen_python_that_lacks_packages_is_an_error_not_a_detour(checkout):
    """DDP_RUNNER_PYTHON was asked for by name; silently using another would hide the mistake."""
    (checkout.root / "requirements.txt").write_text("no-such-package-here>=1\npytest<1\n")
    done = checkout.run(DDP_RUNNER_PYTHON=sys.executable)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        f"ddp_runner: error: DDP_RUNNER_PYTHON={sys.executable}: "
        "no-such-package-here is missing; pytest is "
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["page", "docs"])
def test_the_help_of_a_command_needs_no_extra(checkout, command):
    """Nothing is installed to print a text; the command itself asks for its extra, as before."""
    (checkout.root / "pyproject.toml").write_text(
        '[project.optional-dependencies]\npage = [\n  "no-such-a>=1",\n]\ndocs = [\n  "no-such-a>=1",\n]\n'
    )
    for words in (["--help"], ["--port", "1", "-h"]):
        done = checkout.run(command, *words, DDP_RUNNER_PYTHON=sys.executable)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("|".join([command, *words]) + "\n")
    refused = checkout.run(command, "--port", "1", DDP_RUNNER_PYTHON=sys.executable)
    assert refused.returncode == 2
    assert "no-such-a is missing" in refused.stderr


def test_a_python_that_does_not_start_is_named(checkout):
    """One line, exit 2, for a chosen interpreter that is none."""
    done = checkout.run(DDP_RUNNER_PYTHON="/no/such/python")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ddp_runner: error: DDP_RUNNER_PYTHON=/no/such/python: "
        "must be a Python 3.10 or newer that starts\n"
    )


def test_no_python_at_all_is_named(checkout, tmp_path):
    """A machine without Python gets one line that says what to install."""
    for tool in ("bash", "readlink", "dirname", "env"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = checkout.run(PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        "ddp_runner: error: no Python 3.10 or newer found; install one or set DDP_RUNNER_PYTHON\n"
    )


def test_a_venv_that_somebody_else_made_is_never_changed(checkout):
    """An own `.venv` without the packages is an error with its cure, and stays as it was."""
    (checkout.root / "requirements.txt").write_text("no-such-package-here\n")
    folder = checkout.root / ".venv"
    venv.create(folder, with_pip=False, symlinks=True)
    before = sorted(folder.rglob("*"))
    base = Path(sys.executable).resolve()
    done = checkout.run(PATH=f"{base.parent}:{SYSTEM_PATH}")
    assert done.returncode == 2
    assert "was not made by this script and no-such-package-here is missing" in done.stderr
    assert sorted(folder.rglob("*")) == before


def wheel(folder: Path, name: str) -> None:
    """The smallest package that pip can install, so that a test needs no network."""
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")


def test_an_interrupted_venv_is_made_again(checkout, tmp_path):
    """A failed install leaves no `.venv` that counts; the next launches make it, once, together."""
    base = Path(sys.executable).resolve()
    path = f"{base.parent}:{SYSTEM_PATH}"
    requirements = checkout.root / "requirements.txt"
    requirements.write_text(f"--no-index\n--find-links {tmp_path}\ntiny-thing>=1\n")
    failed = checkout.run("environment", PATH=path)
    assert failed.returncode == 2
    assert f"ddp_runner: making {checkout.root}/.venv (once) with Python" in failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("ddp_runner: error: pip could not install the requirements")
    assert not environment.Repository(checkout.root, extra="").is_complete()

    wheel(tmp_path, "tiny_thing")
    answers: list[subprocess.CompletedProcess[str]] = []
    launches = [
        threading.Thread(target=lambda: answers.append(checkout.run("environment", PATH=path)))
        for _ in range(2)
    ]
    for thread in launches:
        thread.start()
    for thread in launches:
        thread.join()
    made = f"{checkout.root}/.venv/bin/python\n"
    assert [answer.stdout for answer in answers] == [made, made]
    assert sum("Successfully installed" in answer.stderr for answer in answers) == 1
    assert environment.Repository(checkout.root, extra="").is_complete()
    again = checkout.run("environment", PATH=path)
    assert (again.stdout, again.stderr) == (made, "")
    where = [made.strip(), "-c", "import sys; print(sys.path[-1])"]
    last = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    expected = str(checkout.root / "ddp_runner" / "on_path")
    assert last.strip() == expected, "`python train.py` there finds the package"


def test_an_empty_environment_finds_a_python_that_can_be_started(checkout):
    """Without PATH the shell makes one up, from which Python does not know where it is itself."""
    done = subprocess.run(
        ["/usr/bin/env", "-i", str(checkout.root / "launch_training.sh"), "environment"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_absolute()
    assert os.access(done.stdout.strip(), os.X_OK)
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
def test_a_venv_that_cannot_be_made_leaves_no_half_of_it(checkout, monkeypatch, python):
    """The folder goes again, so that nobody takes it for one that only lacks packages."""
    monkeypatch.setattr(environment.sys, "executable", python)
    with pytest.raises(environment.EnvironmentUnfitError, match="cannot be made"):
        environment._create(environment.Repository(checkout.root, extra=""))
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_venv_of_another_user_is_one_line(mode):
    """Root's incomplete `.venv` is named with its owner, whether it can be read or only not be changed."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        (root / "requirements.txt").write_text("no-such-package-here\n")
        (root / ".venv").mkdir()
        (root / ".venv" / environment._OURS).write_text("with pip")
        is_root = os.geteuid() == 0
        (root / ".venv").chmod(mode if is_root else mode & 0o555 if mode == 0o755 else 0)
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                if is_root:
                    os.setuid(65534)
                environment._made(environment.Repository(root, extra=""))
            except BaseException as error:  # noqa: BLE001 - the other process compares it
                os.write(write, repr(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        said = os.read(read, 4096).decode()
        os.close(read)
        (root / ".venv").chmod(0o755)
    assert said.startswith("EnvironmentUnfitError("), said
    assert "made it, and this user may not use or change it; have " in said
    assert "set DDP_RUNNER_PYTHON" in said


def test_a_checkout_that_cannot_be_written_says_what_to_do(checkout):
    """Where `.venv` cannot be made, the line names it and the way out."""
    (checkout.root / "requirements.txt").write_text("no-such-package-here\n")
    (checkout.root / ".venv").symlink_to("/proc/no-such-folder/here")
    base = Path(sys.executable).resolve()
    done = checkout.run(PATH=f"{base.parent}:{SYSTEM_PATH}")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert ".venv: cannot be made (" in last
    assert "set DDP_RUNNER_PYTHON" in last


@pytest.mark.parametrize(
    ("version", "clauses", "is_met"),
    [
        ("2.13.0+cpu", ">=2.6,<2.14", True),
        ("2.15.0+cu132", ">=2.6", True),
        ("2.14.0", ">=2.6,<2.14", False),
        ("2.14.0a1", "<2.14", False),
        ("2.5.1", ">=2.6,<2.14", False),
        ("6.0", ">=6", True),
        ("6", ">=6.0.0", True),
        ("10.0", ">9.9", True),
        ("1.2.3", "==1.2.3", True),
        ("1.2.3", "==1.2.*", True),
        ("1.3", "!=1.2.*", True),
        ("1.2", "!=1.2", False),
        ("1.4.5", "~=1.4", True),
        ("2.0", "~=1.4", False),
        ("1.0", "", True),
        ("1.0", "%1", False),
    ],
)
def test_versions_are_compared_as_requirements_mean(version, clauses, is_met):
    """Numbers, not texts; local and pre-release tags do not count."""
    assert environment.satisfies(version, clauses) is is_met


def test_requirement_files_and_extras_are_read():
    """Comments and options of pip are no requirements; the test extra is found without tomllib."""
    text = "# c\n--no-index\n-r other.txt\nnumpy>=1 # why\n\nrich\n"
    assert environment.requirement_lines(text) == ["numpy>=1", "rich"]
    extra = environment.extra_lines((ROOT / "pyproject.toml").read_text(), "test")
    assert any(line.startswith("pytest>=") for line in extra)
    assert environment.extra_lines((ROOT / "pyproject.toml").read_text(), "none") == []
    assert environment.unmet(["pytest>=1", "no-such-package-here[x]>=1"]) == [
        "no-such-package-here is missing"
    ]
    assert environment.unmet([*environment.requirement_lines("pydantic>=2\n"), *extra]) == []


def test_finding_the_environment_needs_only_the_standard_library():
    """It runs before anything is installed."""
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-s",
            ROOT / "ddp_runner" / "cli" / "python_environment.py",
            "--check",
            "torch",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "torch is missing", "")


def test_the_scripts_are_valid_bash():
    """Every shell script parses, is strict, and is executable."""
    for name in ("launch_training.sh", "tests/run", ".ci/run"):
        path = ROOT / name
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", path], check=True)
    assert "./tests/run" not in (ROOT / "tests/run").read_text()


@pytest.fixture
def free_program(tmp_path, monkeypatch):
    """Run launch() in a Python program of its own; returns its output."""

    def run(code: str, *, name: str = "program.py") -> subprocess.CompletedProcess[str]:
        file = tmp_path / name
        file.write_text(textwrap.dedent(code))
        return subprocess.run(
            [sys.executable, file],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run


def test_launch_runs_the_command_and_streams_its_output(free_program, tmp_path):
    """The child's output is the program's, also when `sys.stdout` is not descriptor 1."""
    done = free_program(
        """
        import io, sys, ddp_runner
        result = ddp_runner.launch(arguments=["--help"])
        assert (result.exit_code, result.summary) == (0, None)
        real, sys.stdout = sys.stdout, io.StringIO()
        ddp_runner.launch(arguments=["--version"], nproc=1)
        text, sys.stdout = sys.stdout.getvalue(), real
        assert text.startswith("ddp_runner "), text
        print(result.log_dir, result.checkpoint_dir)
        """
    )
    assert done.stderr == ""
    assert done.stdout.startswith("ddp_runner - training that keeps going.")
    assert done.stdout.endswith(f"{tmp_path}/logs/bytes {tmp_path}/checkpoints/bytes\n")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_launch_refuses_wrong_settings_as_the_caller_wrote_them(tmp_path, monkeypatch):
    """No process is started, and the message does not show a temporary file."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(launcher.tempfile, "tempdir", None)
    with pytest.raises(BadInputError, match=r"^batch_size=0: must be"):
        launcher.launch(config={"batch_size": 0})
    with pytest.raises(BadInputError, match=r"^--epochs=x: must be"):
        launcher.launch(config={"data": {"batch_size": 4}}, arguments=["-e", "x"])
    assert list(tmp_path.iterdir()) == []


def test_launch_is_refused_inside_its_own_ranks(monkeypatch):
    """A file whose launch() call is not guarded would start runs without end."""
    monkeypatch.setenv("DDP_RUNNER_LAUNCHED", "1")
    with pytest.raises(RuntimeError, match="__name__ == '__main__'"):
        launcher.launch()


class TopLevel:
    """Stands for a Task that a file defines."""


def test_a_task_class_is_named_so_that_ranks_can_import_it(free_program, monkeypatch):
    """A file or module and a name; a notebook's own class cannot be imported and says so."""
    name = launcher.task_spec(TopLevel)
    assert name in (f"{__file__}:TopLevel", f"{__name__}:TopLevel")
    assert (
        launcher.task_spec(environment.Repository) == "ddp_runner.cli.python_environment:Repository"
    )
    done = free_program(
        """
        from ddp_runner.cli.from_code.launch import task_spec
        class Mine: pass
        print(task_spec(Mine))
        """,
        name="my task.py",
    )
    assert done.stdout.endswith("/my task.py:Mine\n")

    class Local:
        pass

    with pytest.raises(BadInputError, match="must be a class at the top level"):
        launcher.task_spec(Local)
    notebook = type("Mine", (), {"__module__": "__main__"})
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(BadInputError, match="is defined in a notebook"):
        launcher.task_spec(notebook)


WAITS = """
import os, signal, sys, time
from ddp_runner.kernel.system.parent_death import die_with_parent
die_with_parent(int(sys.argv[1]))
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("pid", os.getpid(), flush=True)
time.sleep(100)
"""
PROGRAM = f"""
import ddp_runner.cli.from_code.launch as launcher
launcher._CHILD = {WAITS!r}
print("exit", launcher.launch(nproc=1).exit_code, flush=True)
"""


def started(tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    """A program inside launch(), and the process id of the child that it waits for."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    word, pid = program.stdout.readline().split()
    assert word == "pid"
    return program, int(pid)


def test_an_interrupt_reaches_the_run_once(tmp_path):
    """KeyboardInterrupt in the program becomes one SIGINT for the run, whose code comes back."""
    program, pid = started(tmp_path)
    assert os.getpgid(pid) != os.getpgid(program.pid)
    program.send_signal(signal.SIGINT)
    output, _ = program.communicate(timeout=120)
    assert output == "exit 130\n"
    assert program.returncode == 0


EARLY = f"""
import os, signal, subprocess
class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
subprocess.Popen = Popen
{PROGRAM}
"""


def test_an_interrupt_while_the_run_is_started_reaches_it(tmp_path):
    """Raised at once it would leave behind a run that nobody waits for."""
    done = subprocess.run(
        [sys.executable, "-c", EARLY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("exit ")


def test_the_run_dies_with_the_program(tmp_path):
    """SIGKILL on the program leaves no run behind."""
    program, pid = started(tmp_path)
    program.kill()
    program.communicate(timeout=120)
    deadline_s = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline_s, "the child outlived its program"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_an_old_summary_is_not_taken_for_the_runs(tmp_path, monkeypatch):
    """A run that wrote none has none, even where an earlier run left one."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "logs" / "bytes" / "summary.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"run_id": "old"}')
    digest = hashlib.sha256(file.read_bytes()).digest()
    monkeypatch.setattr(launcher, "_CHILD", "raise SystemExit(1)")
    assert launcher.launch().summary is None
    assert hashlib.sha256(file.read_bytes()).digest() == digest
    monkeypatch.setattr(
        launcher,
        "_CHILD",
        "open('logs/bytes/summary.json', 'w').write('{\"run_id\": \"new\"}')",
    )
    assert launcher.launch().summary == {"run_id": "new"}


VERSIONS = (
    "0.9",
    "1.26.4",
    "2.0",
    "2.6",
    "2.6.0",
    "2.13.0+cpu",
    "2.14",
    "3.0.1",
    "3.6",
    "9.5",
    "13.580",
)
EXTRAS = (
    "test",
    "docs",
    "frameworks",
    "transformers",
    "report",
    "page",
    "ray",
    "hub",
    "tensorboard",
    "wandb",
    "mlflow",
    "gpu",
)


def test_versions_are_compared_as_packaging_does():
    """Of each requirement that is asked for; only pre-releases, which are not among these, count otherwise."""
    specifiers = pytest.importorskip("packaging.specifiers")
    lines = environment.requirement_lines((environment.REPOSITORY / "requirements.txt").read_text())
    for extra in EXTRAS:
        lines += environment.extra_lines(
            (environment.REPOSITORY / "pyproject.toml").read_text(), extra
        )
    clauses = {environment._REQUIREMENT.match(line).group(3) for line in lines}
    assert len(clauses) > 10
    for one in {*clauses, "~=2.6", "~=2.6.1", "==2.*", "!=2.6", "<=2.13", ">1,!=3.6"}:
        wanted = specifiers.SpecifierSet(one, prereleases=True)
        for version in VERSIONS:
            assert environment.satisfies(version, one) == wanted.contains(version), (version, one)


SAYS_COMMAND = """
import subprocess, sys
from ddp_runner import start

def main(words):
    print(start.COMMAND, flush=True)
    if words == ["twice"]:
        subprocess.run([sys.executable, start.__file__, "ddp_runner.__main__"])
    return 0

if __name__ == "__main__":
    main(sys.argv[1:])
"""


def test_messages_name_the_command_as_it_was_typed(checkout, tmp_path):
    """By a path, by bash, as a module, or as the installed command; the processes of a run know it too."""
    root, python, path = checkout.root, sys.executable, os.environ["PATH"]
    (root / "ddp_runner" / "__main__.py").write_text(SAYS_COMMAND)
    installed = tmp_path / "bin" / "ddp-runner"
    installed.parent.mkdir()
    installed.write_text("from ddp_runner import start\nprint(start.COMMAND)\n")
    by_path = str(root / "launch_training.sh")
    for words, on_path, said in (
        ([by_path], path, by_path.replace(" ", "\\ ")),
        (["./launch_training.sh", "--help"], path, "./launch_training.sh"),
        (["bash", "launch_training.sh"], path, "./launch_training.sh"),
        ([python, "-um", "ddp_runner", "twice"], path, f"{python} -um ddp_runner"),
        ([python, str(installed)], path, str(installed)),
        ([python, str(installed)], f"{installed.parent}:{path}", "ddp-runner"),
        ([python, "ddp_runner/start.py", "ddp_runner.__main__"], path, "./launch_training.sh"),
    ):
        found = {"DDP_RUNNER_PYTHON": python, "PYTHONPATH": str(root), "PATH": on_path}
        done = subprocess.run(
            words,
            cwd=root,
            env={**os.environ, **found},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        times = 2 if "twice" in words else 1
        assert (done.stdout, done.stderr) == (f"{said}\n" * times, "")
