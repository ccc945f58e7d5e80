"""Another local program at the store: what it writes, deletes or says is never taken for a rank's."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from ddp_runner.kernel.group import group as group_module
from ddp_runner.kernel.group.signed import SignedStore, key_prefix
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from tests.processes import hosted_store, poll, ranks, results, run_ranks

from .joining import SECRET, join

FORGED = "the value of here/1/1 in the store was written by no rank of this run"


def meddling(port):
    """A connection to the store like any local user's."""
    limit = timedelta(seconds=20)
    return TCPStore("127.0.0.1", port, None, is_master=False, timeout=limit)


def signed(inner, secret="secret"):
    """``inner`` as the ranks of one generation see it."""
    return SignedStore(inner, secret, timeout_s=20.0)


# The test's other program asks a store what is in it; the package itself never does.
needs_list_keys = pytest.mark.skipif(
    not hasattr(TCPStore, "list_keys"), reason="this torch cannot list a store's keys"
)


def key_of(store, name):
    """The full name of ``name``; None as long as it is not there."""
    return next((key for key in store.list_keys() if key.endswith(name)), None)


def test_what_is_written_is_read():
    """Text and bytes, also empty ones, come back as they are."""
    inner = HashStore()
    mine, other = signed(inner), signed(inner)
    mine.set("text", "ü")
    mine.set("bytes", b"\x00\xff")
    mine.set("nothing", "")
    assert [other.get(key) for key in ("text", "bytes", "nothing")] == [
        "ü".encode(),
        b"\x00\xff",
        b"",
    ]


@pytest.mark.parametrize(
    "forge",
    [
        lambda inner: inner.set("a", "17"),
        lambda inner: inner.set("a", ""),
        lambda inner: inner.set("a", inner.get("b")),
        lambda inner: signed(inner, "another secret").set("a", "17"),
    ],
    ids=["plain", "empty", "of another key", "of another generation"],
)
def test_a_value_that_no_rank_wrote_is_named(forge):
    """The fault says which key; nobody's code gets to see the value."""
    inner = HashStore()
    store = signed(inner)
    store.set("a", "16")
    store.set("b", "17")
    forge(inner)
    with pytest.raises(FaultError, match="the value of a in the store") as raised:
        store.get("a")
    assert raised.value.fault.kind is FaultKind.STORE_TAMPERED
    assert store.get("b") == b"17"

    with pytest.raises(FaultError, match="the value of a in the store") as raised:
        store.multi_get(["b", "a"])
    assert raised.value.fault.kind is FaultKind.STORE_TAMPERED


class _Counting(HashStore):
    """Counts what is asked of it."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def check(self, keys):
        self.asked.append("check")
        return super().check(keys)

    def get(self, key):
        self.asked.append("get")
        return super().get(key)

    def multi_get(self, keys):
        self.asked.append("multi_get")
        return super().multi_get(keys)


def test_many_values_are_asked_for_at_once():
    """In the order that they were asked for in, with as many round trips for a thousand as for two."""
    inner = _Counting()
    store = signed(inner)
    keys = [str(number) for number in range(1000)]
    for key in keys:
        store.set(key, f"value of {key}")
    assert store.multi_get(keys[::-1]) == [f"value of {key}".encode() for key in keys[::-1]]
    assert inner.asked == ["check", "multi_get"]
    assert store.multi_get([]) == []
    assert inner.asked == ["check", "multi_get"]


def test_a_wait_for_many_values_ends_at_the_timeout():
    """One that nobody writes is waited for as long as a single one, and torch is not asked for it."""
    inner = _Counting()
    store = SignedStore(inner, "secret", timeout_s=0.05)
    store.set("a", "1")
    with pytest.raises(RuntimeError):
        store.multi_get(["a", "b"])
    assert "multi_get" not in inner.asked


def test_keys_cannot_be_guessed_and_differ_from_generation_to_generation():
    """Who knows the source code alone does not know where to write."""
    names = {key_prefix(secret, number) for secret in ("secret", "other") for number in (1, 2)}
    assert len(names) == 4
    assert all("secret" not in name and "other" not in name for name in names)


def _exchange_while_one_meddles(me, port):
    with join(me, port) as group:
        if me.rank == 0:
            me.say("formed")
            me.hear()
        try:
            return group.exchange("here", str(me.rank))
        except FaultError as error:
            return error.fault.kind, error.fault.cause


@needs_list_keys
def test_a_value_deleted_by_another_program_ends_the_wait_for_it():
    """Who waits for a value that was deleted finds others missing, and says so; no deadline has to come."""
    with hosted_store() as port, ranks(_exchange_while_one_meddles, 2, port) as (first, second):
        assert first.hear() == "formed"
        vandal = meddling(port)
        poll(lambda: key_of(vandal, "here/1/1"), what="the other rank's value")
        for key in vandal.list_keys():
            vandal.delete_key(key)
        first.say("go on")
        kind, cause = second.result()
        assert kind is FaultKind.STORE_TAMPERED
        assert "deleted from the store" in cause
        kind, cause = first.result()
        assert kind in (FaultKind.STORE_TAMPERED, FaultKind.COLLECTIVE_FAILED), cause


@needs_list_keys
def test_a_value_overwritten_by_another_program_is_found():
    """It would have been a TypeError in our own code, and a user's error."""
    with hosted_store() as port, ranks(_exchange_while_one_meddles, 2, port) as (first, second):
        assert first.hear() == "formed"
        vandal = meddling(port)
        key = poll(lambda: key_of(vandal, "here/1/1"), what="the other rank's value")
        vandal.set(key, "[1, 2]")
        first.say("go on")
        assert first.result() == (
            FaultKind.STORE_TAMPERED,
            f"another program meddled: {FORGED}",
        )
        assert second.result()[0] is FaultKind.STORE_TAMPERED


def _form_with_another_address(me, port):
    try:
        with join(me, port, timeout_s=5.0, secret=SECRET if me.rank else "another secret"):
            return "formed"
    except (RuntimeError, FaultError) as error:
        return type(error).__name__


def test_ranks_without_the_same_secret_do_not_even_connect():
    """gloo's addresses are under the names, and signatures, of one generation."""
    with hosted_store() as port:
        assert "formed" not in run_ranks(_form_with_another_address, 2, port)


def _form_beside_an_impostor(me, port):
    if me.rank == 1:
        group_module.proof = lambda secret, *, of, to: bytes(32)
    try:
        with join(me, port):
            return "formed"
    except FaultError as error:
        return error.fault.kind, error.fault.cause
    except (RuntimeError, dist.DistError) as error:
        return type(error).__name__


def test_whoever_connects_to_gloo_without_the_secret_is_no_peer():
    """It has come through gloo's door, which is open; a peer shows the secret before it counts."""
    with hosted_store() as port, ranks(_form_beside_an_impostor, 2, port) as processes:
        answers = results(processes)
    assert answers[0] == (
        FaultKind.STORE_TAMPERED,
        "another program meddled: what connected as rank 1 is not a rank of this run",
    )


def _sum_without_a_secret(me, port):
    with join(me, port, secret="") as group:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return float(tensor), group.exchange("here", str(me.rank))


def test_under_another_launcher_there_is_no_secret_and_nothing_is_signed():
    """Its store is its own; ranks form as ever."""
    with hosted_store() as port:
        assert run_ranks(_sum_without_a_secret, 2, port) == [(2.0, ["0", "1"])] * 2
