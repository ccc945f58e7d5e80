"""How a command is declared: parser and help of one table, and every row leads to a declaration."""

from __future__ import annotations

from importlib import import_module

import pytest

from ddp_runner.cli.command import Arguments, SmallCommand
from ddp_runner.cli.commands import commands, main
from ddp_runner.core.settings.declaration import Option
from ddp_runner.kernel.rules.errors import BadInputError


def declared(**how):
    options = (
        Option("--to", short="-t", metavar="DIR", says="the folder"),
        Option("--pair", metavar="A B", says="two words"),
        Option("--task", key="run.task", metavar="FILE", says="of train"),
        Option("--hidden", says=""),
    )
    return SmallCommand(usage="Usage", options=options, perform=lambda _: 0, **how)


@pytest.mark.parametrize("name", commands())
def test_each_row_leads_to_a_declaration_with_a_help_that_fits(name, capsys):
    """Its help is printed as it is declared, and the exit code is 0."""
    command = import_module(commands()[name].module).DECLARATION
    assert command.run(["--help"]) == 0
    assert capsys.readouterr().out == command.help() + "\n"
    assert max(map(len, command.help().splitlines())) <= 82


def test_parser_and_help_are_made_of_the_same_options():
    """Values by long name, a switch where the metavar is of several words or empty."""
    command = declared(words_max=2)
    found = command.parse(["-t=x", "--pair", "a", "b", "--hidden"])
    assert found == Arguments(
        words=("a", "b"), values={"--to": "x"}, switches=frozenset({"--pair", "--hidden"})
    )
    assert "--hidden" not in command.help()
    assert "\n  -t, --to DIR              the folder\n" in command.help()


def test_the_words_of_train_are_left_to_train():
    """With its options, which the help shows, and in their order."""
    found = declared(takes_rest=True).parse(["--task", "a.py", "lr=1", "--to", "x", "--odd"])
    assert found.words == ("--task", "a.py", "lr=1", "--odd")
    assert found.values == {"--to": "x"}


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--tto", "x"], "did you mean --to"),
        (["--to"], "needs a value"),
        (["a"], "unexpected word"),
        (["--task", "x"], "unknown option"),
    ],
)
def test_what_was_not_declared_is_refused(words, reported):
    """In a line that names it."""
    with pytest.raises(BadInputError, match=reported):
        declared().parse(words)


@pytest.mark.parametrize("words", [["--dry-run"], ["report"]])
def test_a_working_folder_that_is_gone_is_one_line(tmp_path, monkeypatch, capsys, words):
    """A shell stays in it, also where a folder of that name is there again."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(words) == 2
    said = "ddp_runner: error: working folder: is gone: cd to one that exists\n"
    assert capsys.readouterr().err == said
