"""What a checkpoint directory holds: order, damage, pointers, setting aside, leftovers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_runner.checkpoint.catalog import NO_FILE, NO_MANIFEST, Catalog
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import temporary_path, writer_of
from tests.processes import poll
from tests.temporaries import of_a_dead_writer

from .states import save


def _flip(path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(bytes(content))


def test_steps_are_ordered_as_integers(tmp_path):
    """A step of nine digits is newer than any of eight, though its name sorts first."""
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert [entry.step for entry in Catalog(tmp_path).entries()] == [100_000_000, 99_999_999]


def test_a_directory_that_does_not_exist_holds_nothing(tmp_path):
    """No directory, no checkpoint, no error."""
    catalog = Catalog(tmp_path / "none")
    assert (catalog.entries(), catalog.resolve("auto"), catalog.best()) == ([], [], None)
    assert catalog.pointer("last") is None
    assert catalog.clean_leftovers() == []
    assert catalog.set_all_aside("x") is None


def _truncate(directory):
    path = directory / "step_00000010.pt"
    path.write_bytes(path.read_bytes()[:-7])


def _empty(directory):
    (directory / "step_00000010.pt").write_bytes(b"")


def _remove_manifest(directory):
    (directory / "step_00000010.json").unlink()


def _tear_manifest(directory):
    path = directory / "step_00000010.json"
    path.write_text(path.read_text()[:40])


def _remove_file(directory):
    (directory / "step_00000010.pt").unlink()


@pytest.mark.parametrize(
    ("damage", "problem", "reason"),
    [
        (lambda directory: None, None, None),
        (_truncate, "its manifest says", "its manifest says"),
        (_empty, "0 bytes, its manifest says", "0 bytes, its manifest says"),
        (lambda directory: _flip(directory / "step_00000010.pt", 700), None, "SHA-256"),
        (_remove_manifest, NO_MANIFEST, None),
        (_tear_manifest, "its manifest is damaged: not JSON", None),
        (_remove_file, NO_FILE, NO_FILE),
    ],
)
def test_damage_is_named(tmp_path, damage, problem, reason):
    """A look shows damage to names, manifests and sizes; only reading shows a flipped bit."""
    save(tmp_path, 10)
    damage(tmp_path)
    catalog = Catalog(tmp_path)
    [entry] = catalog.entries()
    for wanted, got in ((problem, entry.problem), (reason, catalog.verify(entry))):
        assert (got is None) if wanted is None else (wanted in got)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_without_a_manifest_the_archive_checks_itself(tmp_path, damage):
    """A file whose manifest is missing is refused when its own CRC-32 or directory does not fit."""
    path = save(tmp_path, 10).path
    content = path.read_bytes()
    at = content.index(b"\x00\x00\x20\x41")  # 10.0, the first weight
    _remove_manifest(tmp_path)
    if damage == "flip":
        _flip(path, at)
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncate" else b"")
    [entry] = Catalog(tmp_path).entries()
    assert "no usable manifest" in Catalog(tmp_path).verify(entry).replace("it has ", "")


def test_pointers_name_the_newest_and_the_best(tmp_path):
    """``last`` follows the newest save, ``best`` the lowest monitored value."""
    for step, monitored in ((10, 2.0), (20, 1.0), (30, 1.5)):
        save(tmp_path, step, monitored=monitored)
    catalog = Catalog(tmp_path)
    assert catalog.pointer("last").name == "step_00000030.pt"
    assert catalog.pointer("best").name == "step_00000020.pt"
    assert catalog.pointer_problem("best") is None
    assert [entry.step for entry in catalog.resolve("best")] == [20, 30]
    assert [entry.step for entry in catalog.resolve("last")] == [30, 20]
    assert catalog.resolve("none") == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"step_000",
        b"step_00000020.pt",
        b"\x00" * 30,
        b"\xff\xfe",
        b"../x\n",
        b"step_00000099.pt\n",
    ],
)
def test_a_torn_pointer_is_none_with_a_reason_and_costs_nothing(tmp_path, content):
    """A pointer that is cut, zeroed or stale is no exception, and best is still found."""
    save(tmp_path, 10, monitored=1.0)
    save(tmp_path, 20, monitored=2.0)
    (tmp_path / "best").write_bytes(content)
    catalog = Catalog(tmp_path)
    assert catalog.pointer("best") is None
    assert "best" in catalog.pointer_problem("best")
    assert catalog.resolve("best")[0].step == 10
    save(tmp_path, 30, monitored=3.0)
    assert catalog.pointer("best").name == "step_00000010.pt"


def test_a_path_may_name_a_file_manifest_pointer_or_directory(tmp_path):
    """Every way to write one and the same checkpoint for --resume finds it."""
    save(tmp_path, 10)
    catalog = Catalog(tmp_path / "elsewhere")
    for name in ("", "step_00000010.pt", "step_00000010.json", "last"):
        assert [entry.step for entry in catalog.resolve(str(tmp_path / name))] == [10]


@pytest.mark.parametrize("name", ["gone.pt", "step_00000099.pt", "empty", "notes.txt", "best"])
def test_a_path_that_is_no_checkpoint_is_bad_input(tmp_path, name):
    """--resume with a path that holds none is refused, naming the path."""
    save(tmp_path, 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "best").write_text("torn")
    with pytest.raises(BadInputError) as caught:
        Catalog(tmp_path).resolve(str(tmp_path / name))
    assert caught.value.option == "resume"  # of a program: the command has --resume
    assert name in str(caught.value)


def test_set_all_aside_moves_all_of_ours_and_nothing_else(tmp_path):
    """--resume none keeps every file, in a new directory each time, and leaves other files alone."""
    for step in (10, 20):
        save(tmp_path, step, monitored=1.0)
    (tmp_path / "step_00000005.pt.bad").write_text("b")
    (tmp_path / "run.lock").write_text("mine")
    before = {path.name for path in tmp_path.iterdir()} - {"run.lock"}
    aside = Catalog(tmp_path).set_all_aside("20260101T000000Z")
    assert {path.name for path in aside.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {aside.name, "run.lock"}
    assert [entry.step for entry in Catalog(aside).entries()] == [20, 10]
    assert Catalog(tmp_path).set_all_aside("20260101T000000Z") is None
    save(tmp_path, 30)
    assert Catalog(tmp_path).set_all_aside("20260101T000000Z").name.endswith("Z_2")


def test_what_is_later_is_moved_with_the_pointers_that_name_it(tmp_path):
    """Control: what is not later stays, and so does a pointer that names it."""
    for step, monitored in ((10, 1.0), (20, 2.0), (30, 3.0)):
        save(tmp_path, step, monitored=monitored)
    aside = Catalog(tmp_path).set_later_aside(10, "20260101T000000Z")
    assert [entry.step for entry in Catalog(aside).entries()] == [30, 20]
    assert (aside / "last").exists()
    assert not (tmp_path / "last").exists()
    assert Catalog(tmp_path).pointer("best") == tmp_path / "step_00000010.pt"
    assert Catalog(tmp_path).set_later_aside(10, "20260101T000000Z") is None


def renamed(path, old, new):
    """The file under a name with ``new`` in place of ``old``."""
    assert old in path.name
    return path.rename(path.with_name(path.name.replace(old, new)))


def test_leftovers_of_the_dead_are_removed_and_of_others_kept(tmp_path):
    """A temporary file goes when its writer has ended, by its own machine's judgement, and only then."""
    wanted = tmp_path / "step_00000010.pt"
    mine = temporary_path(wanted)
    mine.write_text("half")
    me = writer_of(mine.name)
    dead = of_a_dead_writer(wanted)
    # Its pid is of a living process by now, which began at another time.
    recycled = of_a_dead_writer(tmp_path / "last")
    recycled = renamed(recycled, f"-{writer_of(recycled.name).pid}-", f"-{os.getppid()}-")
    parent = temporary_path(wanted)
    parent.write_text("half")
    life = hashlib.sha256(boot_id() + began(os.getppid())).hexdigest()[:12]
    parent = renamed(parent, f"-{me.pid}-{me.life}-", f"-{os.getppid()}-{life}-")
    foreign = renamed(of_a_dead_writer(wanted), f"{me.host}-", "node7~00c0ffee-")
    others = [".step_00000010.pt.tmp-1", ".userfile.tmp-keepme", "step_00000010.pt.tmp-1", ".x.tmp"]
    for name in others:
        (tmp_path / name).write_text("x")
    catalog = Catalog(tmp_path)
    assert set(catalog.clean_leftovers()) == {mine, dead, recycled}
    assert set(catalog.foreign_leftovers()) == {foreign, tmp_path / others[0]}
    assert set(tmp_path.iterdir()) == {parent, foreign, *(tmp_path / name for name in others)}


def boot_id():
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def began(pid):
    """When a process began, in the kernel's ticks."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]


def test_a_writer_that_was_killed_and_not_waited_for_is_dead(tmp_path):
    """A zombie has its number and its beginning still; it writes nothing any more."""
    command = [sys.executable, "-c", WRITE_AND_WAIT, str(tmp_path / "last")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        left = Path(child.stdout.readline().decode().strip())
        assert Catalog(tmp_path).clean_leftovers() == []
        child.kill()
        poll(lambda: Catalog(tmp_path).clean_leftovers() == [left], what="the end of its writer")


WRITE_AND_WAIT = """
import sys, time
from pathlib import Path
from ddp_runner.kernel.system.run_files import temporary_path
path = temporary_path(Path(sys.argv[1]))
path.write_text("half")
print(path, flush=True)
time.sleep(600)
"""


def test_a_checkpoint_deleted_while_it_is_looked_at_is_no_error(tmp_path, monkeypatch):
    """The thread that saves removes old ones, while another one asks how new the newest is."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    look = Path.stat

    def is_gone_after_the_look(path, **options):
        found = look(path, **options)
        if path.name == "step_00000010.pt":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", is_gone_after_the_look)
    assert [entry.step for entry in Catalog(tmp_path).entries()] == [20, 10]
    monkeypatch.undo()
    assert [entry.problem for entry in Catalog(tmp_path).entries()] == [None, NO_FILE]
