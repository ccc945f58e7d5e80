"""``run`` of a loop that attaches, on several machines: what each of them plans, and who does not fit."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddp_runner.core.launch_plan import OpaqueProgram
from ddp_runner.features.machines import launching
from ddp_runner.features.machines.parent.admission import why_not
from ddp_runner.features.script import parent, run_command
from ddp_runner.kernel.rules.errors import BadInputError

PROGRAM = "import ddp_runner\nimport layers\nrun = ddp_runner.attach()\n"
WHERE = ("--nnodes", "2", "--rdzv-endpoint", "node0:29400", "--token-file", "token")


@pytest.fixture
def plan_in(tmp_path, monkeypatch):
    """``plan_in("node0", *words)``: what ``run`` would start there, in a folder with a program of two files."""
    planned = []
    monkeypatch.setattr(parent, "supervise", lambda *given, **how: planned.append((given, how)))

    def plan(name, *words, program=PROGRAM, layers="WIDTH = 24\n", options=()):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "loop.py").write_text(program, encoding="utf-8")
        (folder / "layers.py").write_text(layers, encoding="utf-8")
        monkeypatch.chdir(folder)
        run_command.run(["--cpu", "-n", "2", *WHERE, *options, "loop.py", *words])
        return planned[-1]

    return plan


def refused(theirs, mine):
    """What the machine is refused with whose plan is ``theirs``; None where it is let in."""
    theirs, mine = (
        launching.meeting(plan, token=b"of this test alone", silent_s=1.0)
        for plan in (theirs, mine)
    )
    hello = SimpleNamespace(
        run_id=theirs.options.run_id,
        versions=theirs.versions,
        ranks=theirs.ranks,
        meaning=theirs.meaning,
        host="node1",
        code=theirs.code,
        asked=theirs.asked,
    )
    found = why_not(hello, mine)
    return found and str(BadInputError(found.name, found.value, found.expected))


def test_a_loop_has_the_ranks_of_all_machines(plan_in):
    """The program is that of the machine's own command line; a spare, which would run it ahead, is off."""
    (plan, script), how = plan_in("node0", "--lr", "1")
    assert (script, how) == (None, {"token_file": "token"})
    assert (plan.world_size, plan.ranks_per_node, plan.nodes.most) == (4, 2, 2)
    assert (plan.loop.source, plan.loop.arguments) == (PROGRAM.encode(), ("--lr", "1"))
    assert plan.loop.path.endswith("/node0/loop.py")
    recovery = plan.settings.recovery
    assert (recovery.warm_spare, recovery.drill_at) == (False, (2, 50, 1000))


def test_a_machine_with_another_program_is_refused_in_one_line(plan_in):
    """Its arguments, its file, what it imports, and whether it attaches; where it lies may differ."""
    (mine, _), _ = plan_in("node0", "--lr", "1")
    (same, _), _ = plan_in("elsewhere", "--lr", "1")
    assert refused(same, mine) is None
    here = socket.gethostname()
    for name, words, files, line in (
        ("a", ("--lr", "2"), {}, "run=loop.py --lr 2: the coordinator has loop.py --lr 1: give"),
        (
            "b",
            ("--lr", "1"),
            {"program": PROGRAM + "# new\n"},
            rf"loop.py: is \w+ on node1, and \w+ on {re.escape(here)}, the coord",
        ),
        ("c", ("--lr", "1"), {"layers": "WIDTH = 25\n"}, "layers.py: is "),
    ):
        (theirs, _), _ = plan_in(name, *words, **files)
        assert re.match(line, refused(theirs, mine)), line
    program = OpaqueProgram(
        name="loop.py", module="", code=same.loop.code, arguments=same.loop.arguments
    )
    line = "calls attach()=no: the coordinator has yes: give all nodes the same settings"
    assert refused(replace(same, loop=None, opaque=program), mine) == line
    (theirs, _), _ = plan_in("d", "--key", "--api-key", "hunter22")
    assert "hunter22" not in refused(theirs, mine)


def test_stages_of_a_loop_are_refused_on_several_machines_too(plan_in, tmp_path):
    """As on one."""
    (tmp_path / "stages.yaml").write_text("stages:\n  - name: one\n    max_steps: 3\n")
    with pytest.raises(BadInputError, match="stages: are for"):
        plan_in("node0", options=("--config", str(tmp_path / "stages.yaml")))


@pytest.mark.parametrize("program", [PROGRAM, "print('a script')\n"])
def test_a_setting_of_the_optimizer_is_refused_for_a_program(plan_in, program):
    """It would change nothing. In a file that tasks share it may stand."""
    with pytest.raises(BadInputError, match=r"optim\.learning_rate=0\.5: is for a task: the"):
        plan_in("node0", options=("learning_rate=0.5",), program=program)


def test_in_place_is_for_a_script_that_names_trainer(plan_in, monkeypatch):
    """The script's text calls no attach(): its Trainer does. Without the library it is refused."""
    program = "from transformers import Trainer\n"
    monkeypatch.setattr(run_command, "find_spec", lambda name: name)
    (plan, script), _ = plan_in("node0", program=program, options=("--in-place",))
    assert (plan.loop.in_place, script) == (True, None)
    (plan, script), _ = plan_in("node1", program=program)
    assert plan.loop is None
    monkeypatch.setattr(run_command, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"--in-place: needs transformers: pip install"):
        plan_in("node2", program=program, options=("--in-place",))
