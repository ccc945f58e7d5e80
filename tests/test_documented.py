"""What the documentation says can be typed: every command of it, in its order, in one folder.

A block of code is run as it stands: commands by a shell, Python by this interpreter. A comment in
front of it, which readers do not see, says otherwise: ``<!-- saved as my_task.py -->``,
``<!-- run by tests/FILE.py::TEST -->`` or ``<!-- not run: why it cannot be -->``. A block of neither
kind, or of ``text``, is what a command has printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ready
from tests.scenarios.harness import ROOT

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"^(\./|python|pip |ddp-runner|torchrun )", re.MULTILINE)
_EXAMPLE = re.compile(r"^    (\./launch_training\.sh .*)$", re.MULTILINE)
_SAVED = "saved as "
_NOT_RUN = "not run: "
_RUN_BY = "run by "
# A few steps of each run, of a small model where the task is built in, without a process that stands by; the command
# line, and what it means, stay as they are written.
SHORT = {
    "DDP_RUNNER_RUN__MAX_STEPS": "6",
    "DDP_RUNNER_RUN__DEVICE": "cpu",
    "DDP_RUNNER_LOG__EVALUATE_BATCHES": "2",
    "DDP_RUNNER_MODEL__HIDDEN_SIZE": "64",
    "DDP_RUNNER_MODEL__NUM_LAYERS": "1",
    "DDP_RUNNER_MODEL__SEQ_LEN": "16",
    "DDP_RUNNER_RECOVERY__WARM_SPARE": "false",
}


@dataclass(frozen=True)
class Block:
    """A piece of code in a document. ``mark`` is what the comment in front of it says."""

    place: str
    mark: str
    language: str
    text: str

    @property
    def is_code(self):
        is_command = self.language != "text" and bool(_COMMAND.search(self.text))
        return self.language == "python" or is_command


def blocks_of(path):
    """The blocks of a Markdown file, or the commands that an example shows in its docstring."""
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    if path.suffix == ".py":
        return [Block(name, "", "", f"{found[1]}\n") for found in _EXAMPLE.finditer(text)]
    return [
        Block(
            f"{name}:{text.count(chr(10), 0, found.start()) + 1}",
            found["mark"] or "",
            found["language"],
            found["text"],
        )
        for found in _BLOCK.finditer(text)
    ]


def documents():
    docs = ROOT / "docs"
    return [ROOT / "README.md", *sorted(docs.rglob("*.md")), *sorted(docs.rglob("*.py"))]


def run_block(block, folder, *, short=SHORT, is_cold=False):
    """Run it in ``folder`` as a reader would; what it printed.

    What is launched is a fork of the ready process, unless it ``is_cold``, and so are Python blocks.
    """
    program = folder / "program.py"
    if block.language == "python":
        program.write_text(block.text, encoding="utf-8")
        words = [sys.executable, str(program)]
    else:
        words = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(
        words,
        cwd=folder,
        env={
            **os.environ,
            **short,
            **({"PYTHONPATH": str(ROOT)} if is_cold else ready.environment(programs=True)),
            "DDP_RUNNER_PYTHON": sys.executable,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # for torchrun
            "TMPDIR": str(folder),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    program.unlink(missing_ok=True)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, f"{block.place}: exit {done.returncode}\n{block.text}\n{printed}"
    if short:  # what takes minutes shows faults that are asked for
        assert "Traceback" not in printed, f"{block.place}:\n{printed}"
    return printed


def run_in_a_row(blocks, folder):
    """Run these Python blocks in one process, each with names of its own."""
    lines = [
        f"exec(compile({block.text!r}, {block.place!r}, 'exec'), {{'__name__': '__main__'}})\n"
        for block in blocks
    ]
    if lines:
        run_block(Block(blocks[0].place, "", "python", "".join(lines)), folder)
    blocks.clear()


@pytest.mark.whole_run
@pytest.mark.timeout(600)  # some fifteen launches
def test_every_documented_command_works_one_after_the_other_in_one_folder(tmp_path):
    """Nobody who types what is written is refused for what was written before it."""
    folder = checkout(tmp_path)
    ran, in_a_row = [], []
    for block in all_blocks():
        if block.mark.startswith(_SAVED):
            run_in_a_row(in_a_row, folder)
            (folder / block.mark.removeprefix(_SAVED)).write_text(block.text, encoding="utf-8")
        elif block.is_code and not block.mark.startswith((_NOT_RUN, _RUN_BY)):
            assert not block.mark, f"{block.place}: what does {block.mark!r} mean?"
            # What launches is run alone: its interpreter stands for the user's program.
            if block.language != "python" or "launch(" in block.text:
                run_in_a_row(in_a_row, folder)
                run_block(block, folder)
            else:
                in_a_row.append(block)
            ran.append(block)
    run_in_a_row(in_a_row, folder)
    languages = [block.language for block in ran]
    assert languages.count("python") >= 2
    assert len(languages) - languages.count("python") >= 3
    assert any(block.place.startswith("docs") for block in ran)
    assert (folder / "logs" / "latest").resolve().parent == folder / "logs"


def checkout(tmp_path):
    """A folder from which the command is started, with what the documents have a reader save."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("launch_training.sh", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for block in all_blocks():
        if block.mark.startswith(_SAVED):
            (folder / block.mark.removeprefix(_SAVED)).write_text(block.text, encoding="utf-8")
    return folder


def all_blocks():
    return [block for path in documents() for block in blocks_of(path)]


def marked(test):
    """The blocks that say that they are run by that test of this file."""
    return [
        block
        for block in all_blocks()
        if block.mark == f"{_RUN_BY}tests/{Path(__file__).name}::{test}"
    ]


def test_a_mark_says_which_test_runs_it_or_why_none_can():
    """The test that a mark names is there."""
    for block in all_blocks():
        kinds = [kind for kind in (_SAVED, _NOT_RUN, _RUN_BY) if block.mark.startswith(kind)]
        assert kinds or not (block.mark and block.is_code), block
        if kinds == [_RUN_BY]:
            file, _, test = block.mark.removeprefix(_RUN_BY).partition("::")
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), block


@pytest.mark.whole_run
@pytest.mark.timeout(300)
def test_the_commands_for_your_own_script_start_it(tmp_path):
    """Each of them runs train.py, or the module, with its arguments."""
    folder = checkout(tmp_path)
    (folder / "package").mkdir()
    for path in (folder / "train.py", folder / "package" / "train.py"):
        path.write_text("import sys\nprint('trained with', *sys.argv[1:])\n", encoding="utf-8")
    blocks = marked("test_the_commands_for_your_own_script_start_it")
    assert {block.place.partition(":")[0] for block in blocks} == {
        "README.md",
        "docs/own-script.md",
        "docs/own-loop.md",
    }
    # The same line stands on several pages.
    lines = list(dict.fromkeys(line for block in blocks for line in block.text.splitlines()))
    printed = run_block(Block("documents", "", "", "".join(f"{line}\n" for line in lines)), folder)
    for arguments in ("--lr 1e-3", "--epochs 3", "ARGS"):
        asked = sum(line.endswith(arguments) for line in lines)
        assert printed.count(f"trained with {arguments}\n") >= asked > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_command_that_takes_minutes_works_as_it_is_written(tmp_path):
    """The demo, and the check of one's own task."""
    folder = checkout(tmp_path)
    blocks = marked("test_a_command_that_takes_minutes_works_as_it_is_written")
    assert any("demo" in block.text for block in blocks)
    for text in sorted({block.text for block in blocks}):
        run_block(Block("documents", "", "", text), folder, short={}, is_cold=True)


def test_blocks_are_distinguished(tmp_path, monkeypatch):
    """Control: commands, Python, what is saved, what is not run, and what was printed."""
    monkeypatch.setattr("tests.test_documented.ROOT", tmp_path)
    path = tmp_path / "a.md"
    path.write_text(
        "```\n./x --y\n```\ntext\n```\nprinted ./x\n```\n<!-- saved as m.py -->\n```python\na\n```\n"
        "<!-- not run: it is long -->\n```\n./tests/run\n```\n"
    )
    command, printed, saved, left = blocks_of(path)
    assert (command.is_code, printed.is_code, saved.is_code) == (True, False, True)
    assert (command.text, command.place, saved.mark) == ("./x --y\n", "a.md:1", "saved as m.py")
    assert left.mark == "not run: it is long"
