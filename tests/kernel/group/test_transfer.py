"""State from rank to rank: every bit arrives where it is meant to, and nobody else takes part."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import threading
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_runner.kernel.group import transfer
from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.kernel.values.nested import SENT, Hole, put_back, take_out
from tests.processes import hosted_store, poll, ranks, run_ranks

from .joining import freed_after_s, is_stopped, join, trip_when_asked

SMALL_PIECE_BYTES = 37  # prime: pieces end inside elements
FREED_WITHIN_S = 5.0  # of a group whose timeout is 20 s


def nested_state():
    """Every kind of leaf and container that a training state has; the same at each call."""
    generator = torch.Generator().manual_seed(5)
    random = torch.randn(7, 5, generator=generator)
    per_parameter = defaultdict(dict)
    per_parameter[0] = {"step": torch.tensor(12.0), "exp_avg": random * 3}
    per_parameter[1] = {"step": torch.tensor(13), "momentum_buffer": None}
    return {
        "model": OrderedDict(
            weight=random,
            transposed=random.t(),
            strided=random[::2, 1::2],
            expanded=torch.tensor([1.5]).expand(4),
            half=random.to(torch.bfloat16),
            double=random.double() / 3,
            count=torch.arange(2**62, 2**62 + 5),
            mask=random > 0,
            complex=torch.view_as_complex(random[:, :2].contiguous()),
            conjugated=torch.view_as_complex(random[:, 2:4].contiguous()).conj(),
            negative=torch.view_as_complex(random[:, 2:4].contiguous()).conj().imag,
            empty=torch.empty(0, 3),
            nothing_is_finite=torch.tensor([float("nan"), float("inf"), -0.0]),
        ),
        "optimizer": {
            "state": per_parameter,
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "counters": {"committed_step": 41, "name": "a run", "flags": [True, False]},
        "pair": (torch.ones(2), [torch.zeros(()), (torch.full((3,), 2, dtype=torch.uint8),)]),
    }


def bits(tensor):
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def as_plain(value):
    """The state as values that compare equal exactly when every bit does."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.device.type, bits(value))
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_plain(item) for item in value)
    return value


def _groups_of(state):
    tensors = []
    take_out(state, tensors, SENT, once=True)
    return transfer._groups([tensor.numel() * tensor.element_size() for tensor in tensors])


def send_in_pieces():
    """Have this process receive as from another machine."""
    transfer.peer_memory.can_read = lambda _: False


def _hand_over(me, port, piece_bytes, among):
    source, receivers, in_pieces = among
    transfer.PIECE_BYTES = piece_bytes
    if me.rank in in_pieces:
        send_in_pieces()
    with join(me, port) as group:
        group.exchange("joined", "")  # who takes no part must not leave before all have come
        if me.rank == source:
            state, signs = nested_state(), []
            sent_bytes = send_state(group, state, to=receivers, on_progress=lambda: signs.append(1))
            ways = {rank in in_pieces for rank in receivers}
            assert len(signs) == len(list(_groups_of(state))) * len(ways)
            assert as_plain(state) == as_plain(nested_state()), "the source's own state changed"
            return sent_bytes
        if me.rank in receivers:
            signs = []
            state = receive_state(group, source=source, on_progress=lambda: signs.append(1))
            assert len(signs) == len(list(_groups_of(state)))
            return as_plain(state)
        return "did not take part"


@pytest.mark.parametrize("in_pieces", [(), (1,)], ids=["read", "sent"])
@pytest.mark.parametrize("piece_bytes", [SMALL_PIECE_BYTES, 64, transfer.PIECE_BYTES])
def test_every_bit_of_a_nested_state_arrives(piece_bytes, in_pieces):
    """Types, shapes, containers and bits are those of the source, read there or cut in pieces."""
    with hosted_store() as port:
        sent_bytes, received = run_ranks(_hand_over, 2, port, piece_bytes, (0, (1,), in_pieces))
    assert received == as_plain(nested_state())
    assert list(received["model"]) == list(nested_state()["model"])
    assert sent_bytes > 10 * SMALL_PIECE_BYTES


@given(
    sizes=st.lists(st.integers(0, 9000), max_size=60), piece_bytes=st.sampled_from([1, 37, 4096])
)
def test_pieces_cover_every_byte_once_and_in_order(sizes, piece_bytes):
    """Both sides cut alike from the sizes alone; nothing is larger than a piece, or sent twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PIECE_BYTES", piece_bytes)
        pieces = list(transfer._pieces(sizes))
    assert all(sum(part.end - part.start for part in piece) <= piece_bytes for piece in pieces)
    assert all(piece for piece in pieces)
    covered = {}
    for part in (part for piece in pieces for part in piece):
        assert part.start == covered.get(part.tensor, 0) < part.end
        covered[part.tensor] = part.end
    assert covered == {number: size for number, size in enumerate(sizes) if size}


def test_several_receivers_and_one_that_takes_no_part():
    """The ranks named get the same, however it comes; who needs nothing calls nothing and waits for nobody."""
    with hosted_store() as port:
        answers = run_ranks(_hand_over, 4, port, SMALL_PIECE_BYTES, (2, (0, 3), (3,)))
    assert answers[0] == answers[3] == as_plain(nested_state())
    assert answers[1] == "did not take part"
    assert isinstance(answers[2], int)


def test_collectives_work_right_after_a_transfer():
    """Point-to-point messages leave nothing behind that a later collective could meet."""
    with hosted_store() as port:
        assert run_ranks(_transfer_between_sums, 3, port) == [[6.0, 6.0]] * 3


def _transfer_between_sums(me, port):
    sums = []
    with join(me, port) as group:
        for _ in range(2):
            if me.rank == 1:
                send_state(group, nested_state(), to=(2, 0))
            else:
                receive_state(group, source=1)
            tensor = torch.tensor([me.rank + 1.0])
            dist.all_reduce(tensor)
            sums.append(float(tensor))
    return sums


def _trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _continue_from_the_other(me, port):
    model, optimizer = _trained(seed=me.rank)
    with join(me, port) as group:
        if me.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            send_state(group, state, to=(1,))
        else:
            state = receive_state(group, source=0)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    optimizer.zero_grad()
    model(torch.ones(8, 6)).square().mean().backward()
    optimizer.step()
    return as_plain({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_a_receiver_goes_on_as_the_source_does():
    """With model and optimizer received, the next step gives both ranks the same bits."""
    with hosted_store() as port:
        ours, theirs = run_ranks(_continue_from_the_other, 2, port)
    assert ours == theirs


def test_a_state_without_tensors_arrives():
    """Nothing but a header is sent, and that is enough."""
    with hosted_store() as port:
        sent_bytes, received = run_ranks(_plain_values, 2, port)
    assert sent_bytes == 0
    assert received == {"step": 3, "losses": [0.5, None]}


def _plain_values(me, port):
    with join(me, port) as group:
        if me.rank == 0:
            return send_state(group, {"step": 3, "losses": [0.5, None]}, to=(1,))
        return receive_state(group, source=0)


class _Calls:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments):
        self._call = (function, arguments)

    def __reduce__(self):
        return self._call


def test_tensors_that_are_alike_are_described_once():
    """By one object, which a header has once: of ten thousand parameters few differ."""
    tensors = [torch.zeros(4) for _ in range(500)] + [torch.zeros(4, dtype=torch.int32)]
    described = transfer.described_as(tensors)
    assert described[0] is described[499]
    assert described[500] == transfer.Description(torch.int32, (4,), False)
    holes = [Hole(number) for number in range(len(tensors))]
    assert len(pickle.dumps((holes, described))) < 20 * len(tensors)


def test_tied_weights_are_sent_once_and_views_of_them_each():
    """Tied weights are; a view of another shape, layout or type is a tensor of its own."""
    weight = torch.arange(6.0).view(2, 3)
    state = {
        "tied": [weight, nn.Parameter(weight)],
        "views": (weight[:1], weight.t(), weight.view(torch.int32), weight.view(3, 2)),
        "empty": [torch.empty(0), torch.empty(0), torch.empty(0, 2)],
    }
    tensors = []
    skeleton = take_out(state, tensors, SENT, once=True)
    assert len(tensors) == 7
    assert not any(one.requires_grad for one in tensors)
    assert skeleton["tied"][0] is skeleton["tied"][1]
    back = put_back(skeleton, tensors, SENT)
    for name, made in state.items():
        for one, other in zip(made, back[name], strict=True):
            assert (one.dtype, one.shape, one.stride()) == (
                other.dtype,
                other.shape,
                other.stride(),
            )
            assert torch.equal(one, other)


def _names_global(module, name):
    """A pickle that asks for ``module.name``, as protocol 4 writes it."""
    parts = [module.encode(), name.encode()]
    texts = b"".join(b"\x8c" + bytes([len(part)]) + part for part in parts)
    return b"\x80\x04" + texts + b"\x93."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("torch", "os.system"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("ddp_runner.kernel.group.transfer", "pickle.loads"),
        ("ddp_runner.kernel.values.nested", "rebuilt"),
    ],
)
def test_a_header_that_names_anything_else_is_refused(module, name):
    """A peer can send tensors and plain values; it cannot have code looked up, let alone run."""
    with pytest.raises(pickle.UnpicklingError):
        transfer.OwnTypes(io.BytesIO(_names_global(module, name))).load()


def test_a_header_cannot_run_a_command(tmp_path):
    """The usual attack: an object that reduces to os.system."""
    witness = tmp_path / "ran"
    header = pickle.dumps((_Calls(os.system, f"touch {witness}"), []))
    with pytest.raises(pickle.UnpicklingError):
        transfer.OwnTypes(io.BytesIO(header)).load()
    assert not witness.exists()


def test_a_header_of_our_own_is_read():
    """Control: every dtype's description comes back as it was."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    described = [transfer.Description(dtype, (2, 3), False) for dtype in dtypes]
    header = pickle.dumps(({"a": [Hole(0)]}, described))
    assert transfer.OwnTypes(io.BytesIO(header)).load() == (
        {"a": [Hole(0)]},
        described,
    )


def _receive_and_be_aborted(me, port, ends_in_silence):
    switch = AbortSwitch()
    with contextlib.suppress(ConnectionError), join(me, port, switch=switch) as group:
        group.ends_in_silence = ends_in_silence
        if me.rank == 0:
            send_state(group, nested_state(), to=[1])
            return None
        return as_plain(receive_state(group, source=0, on_progress=switch.trip))
    return "cut short"


def test_a_state_that_an_abort_may_have_cut_short_is_not_received():
    """Where the collectives themselves would not say so; what they call whole is taken."""
    for ends_in_silence, expected in ((True, "cut short"), (False, as_plain(nested_state()))):
        with hosted_store() as port:
            answers = run_ranks(_receive_and_be_aborted, 2, port, ends_in_silence)
        assert answers == [None, expected]


def _stop_inside_a_piece(me, pid, pieces):
    """Thread of the receiver: have ``pid`` stopped while the beginning of a piece is here alone."""

    def has_begun():
        return any(piece[0] and not piece[piece.numel() // 2] for piece in list(pieces))

    while True:
        poll(has_begun, every_s=0.001, what="the beginning of a piece")
        os.kill(pid, signal.SIGSTOP)
        if has_begun():
            me.say("stopped")
            return
        os.kill(pid, signal.SIGCONT)


def _transfer_until_freed(me, port, stopped):
    send_in_pieces()
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)
    state = {"bytes": torch.ones(transfer.PIECE_BYTES, dtype=torch.uint8)}
    pieces = deque(maxlen=1)
    transfer._back_with_memory = lambda piece: pieces.append(piece.zero_())

    def transfer_for_ever(group):
        pids = [int(pid) for pid in group.exchange("pid", str(os.getpid()))]
        if me.rank == 1:
            cut = threading.Thread(target=_stop_inside_a_piece, args=(me, pids[stopped], pieces))
            cut.start()
        while True:
            if me.rank == 0:
                send_state(group, state, to=[1])
            else:
                receive_state(group, source=0)

    with pytest.raises(RuntimeError), join(me, port, switch=switch) as group:
        transfer_for_ever(group)
    return freed_after_s(moments)


@pytest.mark.parametrize("stopped", [0, 1], ids=["the source", "the receiver"])
def test_a_transfer_cut_within_a_piece_frees_the_other_side(stopped):
    """gloo itself forgets a message that has begun, and holds who waits for it."""
    with hosted_store() as port, ranks(_transfer_until_freed, 2, port, stopped) as world:
        if stopped == 0:
            world[1].hear()
        else:
            poll(lambda: is_stopped(world[1]), what="the stop")
        world[1 - stopped].say("trip")
        assert world[1 - stopped].result() < FREED_WITHIN_S


def _receive_over_own(me, port):
    with join(me, port) as group:
        if me.rank == 0:
            source = torch.arange(6.0)
            others = {name: source.clone() for name in ("other_type", "longer", "strided")}
            tied = {"tied": source, "fits": source}
            send_state(group, {**tied, **others, "nested": [{"fits": source + 1}]}, to=(1,))
            return None
        base = torch.full((12,), 7.0)
        own = {
            "fits": torch.zeros(6),
            "other_type": torch.zeros(6, dtype=torch.float64),
            "longer": torch.zeros(7),
            "strided": base[::2],
            "nested": [{"fits": torch.zeros(6)}],
            "gone": torch.full((2,), 7.0),
        }
        received = receive_state(group, source=0, into=own)
        own_places = {
            "fits": received["fits"].data_ptr() == own["fits"].data_ptr(),
            "nested": received["nested"][0]["fits"].data_ptr()
            == own["nested"][0]["fits"].data_ptr(),
            "tied": received["tied"] is received["fits"],
        }
        return own_places, as_plain(received), as_plain([base, own["gone"], own["longer"]])


def test_a_state_is_received_into_the_memory_that_fits():
    """Where a tensor of the same kind stands in the same place; nothing else of the receiver's is touched."""
    with hosted_store() as port:
        _, (own_places, received, rest) = run_ranks(_receive_over_own, 2, port)
    assert own_places == {"fits": True, "nested": True, "tied": True}
    source = torch.arange(6.0)
    assert received == as_plain(
        {
            **dict.fromkeys(("fits", "tied", "other_type", "longer", "strided"), source),
            "nested": [{"fits": source + 1}],
        }
    )
    assert rest == as_plain([torch.full((12,), 7.0), torch.full((2,), 7.0), torch.zeros(7)])


def _be_left_by_the_source(me, port, how):
    switch = AbortSwitch()
    read = transfer.peer_memory.read

    def transfer_in(group):
        pids = [int(pid) for pid in group.exchange("pid", str(os.getpid()))]

        def read_from_the_dead(shown, parts):
            os.kill(pids[0], signal.SIGKILL)
            poll(lambda: not transfer.peer_memory.can_read(shown), what="its end")
            read(shown, parts)

        if how == "killed":
            transfer.peer_memory.read = read_from_the_dead
        if me.rank == 0:
            send_state(group, nested_state(), to=[1], on_progress=switch.trip)
        else:
            receive_state(group, source=0)

    with pytest.raises((ConnectionError, RuntimeError)), join(me, port, switch=switch) as group:
        transfer_in(group)
    return "cut short"


@pytest.mark.parametrize("how", ["killed", "aborted"])
def test_a_reader_whose_source_has_left_has_no_state(how):
    """Killed while it is read, or gone when all was read and before it has said that it stood still."""
    with hosted_store() as port, ranks(_be_left_by_the_source, 2, port, how) as world:
        assert world[1].result() == "cut short"
        if how == "aborted":
            assert world[0].result() == "cut short"
