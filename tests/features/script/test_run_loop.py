"""Which programs attach, by their text."""

from __future__ import annotations

import pytest

from ddp_runner.__main__ import main
from ddp_runner.features.script.run_loop import calls_attach, may_be_run


@pytest.mark.parametrize(
    "text",
    [
        "import ddp_runner\nrun = ddp_runner.attach()",
        "import ddp_runner as ddpr\n\ndef main():\n    with_run(ddpr.attach(config))",
        "import ddp_runner.version\nddp_runner.attach()",
        "from ddp_runner import (\n    Task,\n    attach,\n)\nattach()",
        "def main():\n    from ddp_runner import attach as begin\n    return begin()",
        "from ddp_runner.integrations.transformers import Trainer",
        "from ddp_runner.integrations import transformers as in_place",
        "import ddp_runner.integrations.transformers as ours",
    ],
)
def test_a_call_is_found_whatever_the_names(text):
    assert calls_attach(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "import ddp_runner  # ddp_runner.attach() comes later",
        "import ddp_runner\n'''ddp_runner.attach()'''",
        "from debugger import attach\nattach()",
        "import ddp_runner\nimport debugger\ndebugger.attach()",
        "import ddp_runner.version as ddp_runner_version\nimport other as ddp\nddp.attach()",
        "from ddp_runner import attach",
        "# from ddp_runner.integrations.transformers import Trainer",
        "from mine.ddp_runner.integrations import attach",
        "this is no Python: ddp_runner.attach()",
        "",
    ],
)
def test_what_only_looks_like_one_is_none(text):
    assert not calls_attach(text.encode())


@pytest.mark.parametrize(
    ("module", "may_be"),
    [
        ("json", True),
        ("json.tool", True),
        ("json.no_such", False),
        ("spaces.inner.go", True),
        ("spaces.inner.no_such", False),
        ("moved.elsewhere", True),
        ("no_such.go", False),
        ("json.tool.no_such", False),
    ],
)
def test_a_module_is_found_without_an_import(tmp_path, monkeypatch, module, may_be):
    """By files alone, in packages without a file of their own too; one that says where to look may have any."""
    (tmp_path / "spaces" / "inner").mkdir(parents=True)
    (tmp_path / "spaces" / "inner" / "go.py").write_text("raise AssertionError('imported')")
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "__init__.py").write_text("__path__.append('elsewhere'); 1 / 0")
    monkeypatch.chdir(tmp_path)
    assert may_be_run(module) == may_be


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preload", "json.nothere"], "--preload=json.nothere: no module of this name"),
        (["--preload", "os.path,json."], "--preload=json.: no module of this name"),
        (["--preload", ".json"], "--preload=.json: no module of this name"),
        (
            ["--resume-with", "a.pt:--from 'b"],
            "--resume-with=a.pt:--from 'b: its words: No closing",
        ),
    ],
)
def test_wrong_words_for_run_are_one_line(words, said, tmp_path, capsys):
    """A module below another that is there, and a quotation mark that is not closed, too."""
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--cpu", *words, str(script)]) == 2
    assert capsys.readouterr().err.startswith(f"ddp_runner: error: {said}")
