"""Which machine coordinates, before any process: names that are known late, or never."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest

from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.config.identity import with_shared
from ddp_runner.core.launch_plan import DevicePlan, NodeOptions
from ddp_runner.features.machines import launching
from ddp_runner.features.machines.parent.admission import why_not
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.folder_owner import FolderOwner
from ddp_runner.kernel.system.interfaces import is_loopback
from ddp_runner.system.run_directories import RunDirectories
from tests.features.machines.whole_runs.conftest import free_port
from tests.test_identity import other_value

TOKEN = b"of this test alone"


@pytest.fixture
def late_name(monkeypatch):
    """A name that is asked for twice before the machine knows it, as that of a pod is."""
    real, asked = socket.getaddrinfo, []

    def getaddrinfo(host, *arguments, **named):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *arguments, **named)

    monkeypatch.setattr(launching.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(launching, "_LOOK_AGAIN_S", 0.01)
    return asked


def _options(**how):
    return NodeOptions(least=2, most=2, host="train-0.train", port=free_port(), **how)


def test_the_coordinator_waits_for_its_own_name(late_name):
    """Which a pod may get some seconds after it has been started."""
    options = _options(node_rank=0, local_addr="127.0.0.1")
    door = launching.coordinators_door(options)
    with door.listening:
        assert (door.address, len(late_name)) == ("127.0.0.1", 3)


@pytest.mark.parametrize("how", [{}, {"node_rank": 0, "join_timeout_s": 0.0}])
def test_a_name_that_nobody_knows_is_wrong_input(late_name, how):
    """At once where it may be misspelled, for it may be any machine's; else when the time is over."""
    with pytest.raises(BadInputError, match="is no name that this machine can resolve"):
        launching.coordinators_door(_options(**how))
    assert len(late_name) == 1


@pytest.fixture
def resolves(monkeypatch):
    """Has every name resolve to these addresses, on a machine that others reach at 10.1.2.3."""

    def so(*addresses):
        found = [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0))
            for one in addresses
        ]
        monkeypatch.setattr(launching.socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr(launching, "address_leading_out", lambda: "10.1.2.3")

    return so


@pytest.mark.parametrize("node_rank", [0, None])
def test_a_name_that_is_loopback_at_home_is_listened_at_everywhere(resolves, capsys, node_rank):
    """As Debian's /etc/hosts has a machine's own name; others hear of an address that they reach."""
    resolves("127.0.1.1")
    options = _options(node_rank=node_rank)
    door = launching.coordinators_door(options)
    with door.listening:
        assert door.listening.getsockname() == ("0.0.0.0", options.port)
        assert door.address == "10.1.2.3"
        (line,) = capsys.readouterr().out.splitlines()
        assert "train-0.train is 127.0.1.1 here" in line
        if node_rank is None:  # another process of this machine has the door: it is followed
            assert launching.coordinators_door(options) is None
        else:
            says = (
                r"cannot be listened on: another process .* leave out --node-rank 0 to join its run"
            )
            with pytest.raises(BadInputError, match=says):
                launching.coordinators_door(options)


def test_a_given_local_address_is_listened_at_alone(resolves, capsys):
    """Where the endpoint's name would lead nobody here."""
    resolves("127.0.1.1")
    door = launching.coordinators_door(_options(local_addr="127.0.0.2"))
    with door.listening:
        assert door.listening.getsockname()[0] == door.address == "127.0.0.2"
    assert not capsys.readouterr().out


def test_a_local_address_may_be_a_name(late_name, monkeypatch, capsys):
    """This machine waits for its own name and is bound to its address; the others look the name up."""
    monkeypatch.setattr(launching.socket, "gethostname", lambda: "train-0")
    alone = replace(_options(local_addr="train-0.train"), host="localhost")
    options = launching._with_local_address(alone)
    assert (options.local_addr, options.local_name) == ("127.0.0.1", "train-0.train")
    said = "--local-addr=train-0.train: waiting up to 60 s for this name to resolve\n"
    assert capsys.readouterr().out == said
    for given in ("", "127.0.0.1"):
        assert launching._with_local_address(replace(alone, local_addr=given)).local_name == ""


def test_a_local_name_that_is_not_this_machines_is_refused_at_once(late_name):
    """It is misspelled: what others are called, this machine need not wait for."""
    with pytest.raises(BadInputError, match="--local-addr=nosuch: is no name that this machine"):
        launching._with_local_address(_options(local_addr="nosuch"))
    assert len(late_name) == 1


def test_a_local_address_of_another_machine_is_refused():
    """In one line that names the option."""
    with pytest.raises(BadInputError, match="is no address of this machine"):
        launching._with_local_address(_options(local_addr="192.0.2.7"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("vm", r"vm: is 127\.0\.0\.1 here, a loopback address"),
        ("localhost", r"localhost: is 127\.0\.0\.1 here, a loopback address"),
        ("127.0.0.1", r"127\.0\.0\.1: is a loopback address"),
    ],
)
def test_a_local_name_that_no_other_machine_reaches_is_refused(resolves, given, says):
    """As Debian's /etc/hosts has a machine's own name; control: an endpoint of this machine alone."""
    resolves("127.0.0.1")
    with pytest.raises(BadInputError, match=f"--local-addr={says}"):
        launching._with_local_address(_options(local_addr=given))
    alone = replace(_options(local_addr=given), host="localhost")
    assert launching._with_local_address(alone).local_addr == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "localhost.localdomain"])
def test_who_names_loopback_gets_loopback(resolves, capsys, host):
    """That is a run of several supervisors on this machine alone."""
    resolves("127.0.0.1" if host.startswith("local") else host)
    door = launching.coordinators_door(replace(_options(), host=host))
    with door.listening:
        assert door.listening.getsockname()[0] == door.address
        assert door.address.startswith("127.")
    assert not capsys.readouterr().out


def test_each_address_of_the_name_may_be_this_machines(resolves, monkeypatch):
    """Not only the first; and with none of them it is another machine."""
    monkeypatch.setattr(launching, "is_loopback", lambda address: False)
    resolves("192.0.2.7", "2001:db8::7", "127.0.0.3")
    door = launching.coordinators_door(_options())
    with door.listening:
        assert door.listening.getsockname()[0] == door.address == "127.0.0.3"
    resolves("192.0.2.7", "192.0.2.8")
    assert launching.coordinators_door(_options()) is None


def test_a_service_of_ipv6_alone_is_listened_at_by_both_families(resolves):
    """Its address is no machine's, and who is there by IPv4 is heard as well."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    resolves("2001:db8::7")
    options = _options(node_rank=0, local_addr="::1")
    door = launching.coordinators_door(options)
    with door.listening, socket.socket() as plain:
        plain.connect(("127.0.0.1", options.port))
        assert (door.listening.getsockname()[0], door.address) == ("::", "::1")


def test_an_address_that_leads_out_is_no_loopback():
    """It is one of this machine, where it has any other."""
    address = launching.address_leading_out()
    others = {
        one.address.partition("%")[0]
        for there in psutil.net_if_addrs().values()
        for one in there
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }
    assert address == "" or (address in others and not is_loopback(address))


def _plan(*words):
    words = ["--nnodes", "2", "--rdzv-endpoint", "node0", *words]
    return plan_launch(parse_train(words), words=words)


def test_machines_need_the_same_threads_for_the_same_sums():
    """Which follow from the cores of each where they are not given: then the line names the option."""
    mine = launching.meeting(_plan("--cpu", "-n", "2"), token=TOKEN, silent_s=1.0)
    plan = _plan("--cpu", "-n", "2")
    other = launching.meeting(
        replace(plan, threads_per_rank=plan.threads_per_rank + 1), token=TOKEN, silent_s=1.0
    )
    hello = _says_hello(other)
    refused = why_not(hello, mine)
    assert (refused.name, refused.value) == ("run.threads_per_rank", str(plan.threads_per_rank + 1))
    hello.meaning = mine.meaning
    assert why_not(hello, mine) is None
    on_gpus = [DevicePlan(device="cuda:0", name="GPU", visible_index=0)]
    plans = [replace(plan, devices=(*on_gpus,) * 4, threads_per_rank=count) for count in (1, 8)]
    meanings = [launching.meeting(one, token=TOKEN, silent_s=1.0).meaning for one in plans]
    assert meanings[0] == meanings[1]


def test_machines_compare_secrets_without_showing_them():
    """Equal ones fit whatever salt each machine draws; others are refused, and no line has either."""
    words = ("--cpu", "-n", "2", "task.api_key=hunter22", "task.service={password: hunter23}")
    mine, same, other, nested = (
        launching.meeting(_plan(*words, *more), token=TOKEN, silent_s=1.0)
        for more in ((), (), ("task.api_key=other24",), ("task.service={password: other25}",))
    )
    hello = _says_hello(same)
    assert why_not(hello, mine) is None
    for one, key in ((other, "task.api_key"), (nested, "task.service")):
        hello.meaning = one.meaning
        refused = why_not(hello, mine)
        assert (refused.name, refused.value) == (key, "***")
        assert refused.expected == "the coordinator has another: give all nodes the same settings"
    sent = str([mine.meaning, other.meaning, nested.meaning])
    assert not any(secret in sent for secret in ("hunter", "other2"))
    assert "task.api_key" in mine.meaning


@pytest.fixture
def task_in(tmp_path, monkeypatch):
    """Writes a task that imports two files of its own, in a folder like a checkout's; gives its meeting."""

    def written(name, *words, helper="RATE = 1", deep="DEPTH = 2"):
        folder = tmp_path / name
        (folder / "parts").mkdir(parents=True)
        (folder / "vision.py").write_text("import numpy\nfrom helper import RATE\n\nclass T: ...\n")
        (folder / "helper.py").write_text(f"def later():\n    from parts import deep\n\n{helper}\n")
        (folder / "parts" / "__init__.py").write_text("from . import deep\n")
        (folder / "parts" / "deep.py").write_text(f"import random, helper\n{deep}\n")
        monkeypatch.chdir(folder)
        plan = _plan("--cpu", "-n", "2", "--task", "vision.py", *words)
        return launching.meeting(plan, token=TOKEN, silent_s=1.0)

    return written


def _says_hello(meeting, **other):
    return SimpleNamespace(
        run_id=meeting.options.run_id,
        versions=meeting.versions,
        ranks=2,
        meaning=meeting.meaning,
        host="node1",
        code={**meeting.code, **other},
        asked=json.loads(json.dumps(meeting.asked)),
    )


def test_another_file_on_a_machine_is_refused_by_name(task_in):
    """The task's, one that it imports anywhere, a package's version, one of this package's own."""
    mine, same = task_in("one"), task_in("two")
    assert why_not(_says_hello(same), mine) is None
    assert mine.code["numpy"] == metadata.version("numpy")
    here = socket.gethostname()
    for name, theirs in (
        ("helper.py", task_in("three", helper="RATE = 2")),
        ("parts/deep.py", task_in("four", deep="DEPTH = 3")),
    ):
        refused = why_not(_says_hello(theirs), mine)
        digests = theirs.code[name], mine.code[name]
        assert (refused.name, refused.value) == (name, "")
        assert refused.expected == (
            "is {} on node1, and {} on {}, the coordinator's: run the same code on all, or give the"
            " coordinator --allow-different-code".format(*digests, here)
        )
    own = {"ddp_runner/version.py": "0", "numpy": "1.0"}
    assert why_not(_says_hello(same, **own), mine).expected.startswith("is 1.0 on node1, and ")
    refused = why_not(_says_hello(same, **{"ddp_runner/version.py": "0"}), mine)
    assert refused.name == "ddp_runner/version.py"


def test_different_code_is_let_in_where_the_coordinator_says_so(task_in):
    """What a follower says of it does not count."""
    theirs = task_in("one", "--allow-different-code", helper="RATE = 2")
    assert why_not(_says_hello(theirs), task_in("two", "--allow-different-code")) is None
    assert why_not(_says_hello(theirs), task_in("three")).name == "helper.py"


def _given(settings, key):
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def test_settings_that_hold_for_all_are_the_coordinators():
    """A machine that was given none takes them; one that was asked for something else is refused."""
    words = ("--cpu", "-n", "2")
    plain = _plan(*words)
    mine = launching.meeting(plain, token=TOKEN, silent_s=1.0)
    of_all = sorted(mine.shared)
    assert {"log.evaluate_every_steps", "recovery.replica_check_steps", "run.resume"} <= {*of_all}
    assert mine.asked == {}
    for key in of_all:
        if key in ("run.init_from", "run.stage", "run.test"):  # a file, a stage, and a whole preset
            continue
        more = (f"{key}={other_value(key)}",)
        if key == "recovery.regrow_after":
            more += ("recovery.min_ranks=1",)
        try:
            other = _plan(*words, *more)
        except BadInputError:  # it needs another setting beside it
            continue
        asked = launching.meeting(other, token=TOKEN, silent_s=1.0)
        refused = why_not(_says_hello(asked), mine)
        assert refused.name in {one.partition("=")[0] for one in more}, key
        assert refused.expected.startswith("the coordinator has "), key
        if more[1:]:
            continue
        assert why_not(_says_hello(mine), asked) is None
        taken = with_shared(plain.settings, json.loads(json.dumps(asked.shared)))
        assert _given(taken, key) == _given(other.settings, key) != _given(plain.settings, key)


def test_a_machine_has_its_own_paths_cores_and_memory(tmp_path):
    """These may differ from the coordinator's, and stay as they are."""
    own = (
        "-l",
        str(tmp_path),
        "num_workers=1",
        "max_memory_gb=3",
        "display=none",
        "warm_spare=off",
    )
    mine = launching.meeting(_plan("--cpu", "-n", "2"), token=TOKEN, silent_s=1.0)
    plan = _plan("--cpu", "-n", "2", *own)
    assert why_not(_says_hello(launching.meeting(plan, token=TOKEN, silent_s=1.0)), mine) is None
    assert with_shared(plan.settings, mine.shared) == plan.settings


@pytest.mark.parametrize(
    ("words", "name"),
    [(("--nnodes", "3"), "--nnodes"), (("--nnodes", "1:2"), "--nnodes")],
)
def test_another_number_of_machines_is_refused_by_its_option(words, name):
    """Which a follower's own plan of the world follows from."""
    mine = launching.meeting(_plan("--cpu", "-n", "2"), token=TOKEN, silent_s=1.0)
    theirs = launching.meeting(_plan("--cpu", "-n", "2", *words), token=TOKEN, silent_s=1.0)
    refused = why_not(_says_hello(theirs), mine)
    assert (refused.name, refused.value) == (name, words[1])
    assert refused.expected == "the coordinator has 2: give all nodes the same settings"


@pytest.mark.parametrize(
    ("is_held", "listens", "waits_s"),
    [(False, False, 0.0), (True, False, 0.3), (False, True, 0.0), (True, True, 0.9)],
    ids=["dead", "dead, and locked", "silent", "silent, and locked"],
)
def test_a_start_waits_shortly_for_a_successor_that_is_none(
    tmp_path, monkeypatch, is_held, listens, waits_s
):
    """Whom the folder names does not answer: only while somebody holds the folder may it be about to."""
    for name, seconds in {
        "CLAIMING": 0.3,
        "TAKING_OVER": 0.9,
        "ANSWER": 0.1,
        "LOOK_AGAIN": 0.01,
    }.items():
        monkeypatch.setattr(launching, f"_{name}_S", seconds)
    folder = tmp_path / "kept"
    plan = _plan("--cpu", "-n", "2", "-c", str(folder), "-l", str(tmp_path / "logs"))
    folder.mkdir()
    holder = RunDirectories(plan.settings.run)
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = server.getsockname()
        if not listens:
            server.close()
        FolderOwner(folder, "another", at=at).take()
        if is_held:
            assert holder.hold_checkpoints()
        began_s = time.monotonic()
        assert not launching.leads_elsewhere(plan, TOKEN)
        assert waits_s <= time.monotonic() - began_s < waits_s + 0.8
    holder.release()
