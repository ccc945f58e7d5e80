"""Which arithmetic is chosen, and that the scaler's state is kept."""

import copy
import itertools

import pytest
import torch
from torch.torch_version import TorchVersion

from ddp_runner.core.settings import OptimSettings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.session import Votes
from ddp_runner.training.components import precision as choosing
from ddp_runner.training.components.precision import Precision, cpu_has_fast_bf16
from ddp_runner.values.generators import seed_step
from tests.kernel.group.joining import join
from tests.processes import hosted_store, run_ranks

from .building import build_replica, build_state, build_stepper, micro_batches

CPU = torch.device("cpu")


def result_dtype(precision):
    weight = torch.ones(4, 4)
    with precision.autocast():
        return (weight @ weight).dtype


def test_amp_off_is_float32_without_a_note():
    """Control: nothing is cast, scaled or reported."""
    precision = Precision("fp32", device=CPU)
    assert (precision.name, precision.notes) == ("fp32", ())
    assert result_dtype(precision) is torch.float32
    assert not precision.scaler.is_enabled()
    assert precision.state_dict() == {}


def test_amp_on_a_cpu_follows_its_instructions():
    """With bf16 instructions a product is bf16; without them it stays float32 and a note says so."""
    precision = Precision("auto", device=CPU)
    fast = cpu_has_fast_bf16()
    assert precision.name == ("bf16" if fast else "fp32")
    assert result_dtype(precision) is (torch.bfloat16 if fast else torch.float32)
    assert bool(precision.notes) is not fast
    assert not precision.scaler.is_enabled()


def test_a_cpu_without_bf16_instructions_gets_a_note(monkeypatch):
    """A torch whose checks say no, or that has none, means float32 and one sentence."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    precision = Precision("auto", device=CPU)
    assert precision.name == "fp32"
    assert precision.notes == ("This cpu has no fast bf16; precision=auto is fp32.",)


def test_a_state_of_another_precision_changes_nothing():
    """Control: an fp16 scaler's state is no error for a run without a scaler."""
    precision = Precision("fp32", device=CPU)
    precision.load_state_dict({"scale": 2.0, "growth_factor": 2.0})
    precision.load_state_dict({})
    assert precision.state_dict() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_amp_on_a_gpu_is_bf16_or_scaled_fp16():
    """Exactly fp16 has an enabled scaler, and its state goes round."""
    precision = Precision("auto", device=torch.device("cuda", 0))
    assert precision.name in ("bf16", "fp16")
    assert precision.scaler.is_enabled() is (precision.name == "fp16")
    precision.load_state_dict(precision.state_dict())


def test_an_update_that_an_abort_has_cut_short_begins_again():
    """Between unscaling and the update; control: the scaler itself would refuse to unscale again."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision("fp32", device=CPU)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def unscale():
        precision.scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        precision.scaler.unscale_(optimizer)

    unscale()
    with pytest.raises(RuntimeError, match="already been called"):
        unscale()
    precision.drop_unfinished_step()
    unscale()
    assert precision.scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_what_is_asked_for_by_name_is_computed_on_a_cpu_too(name, dtype):
    """Exactly fp16 scales its loss; bf16 without instructions for it is slow, and says so."""
    precision = Precision(name, device=CPU)
    assert (precision.name, result_dtype(precision)) == (name, dtype)
    assert precision.scaler.is_enabled() is (name == "fp16")
    assert bool(precision.notes) is (name == "bf16" and not cpu_has_fast_bf16())


def test_a_gpu_without_bf16_refuses_it_by_name(monkeypatch):
    """With the device's name and the cure; auto takes fp16 there, and says so."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(choosing, "_gpu_has_bf16", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(BadInputError) as caught:
        Precision("bf16", device=device)
    assert str(caught.value).startswith("optim.precision=bf16: Tesla T4 has no bf16: take fp16")
    assert choosing._auto(device) == (
        "fp16",
        ("The GPU has no bf16; using fp16 with loss scaling.",),
    )


def test_the_loss_scale_is_set_up_as_asked():
    """Its begin and its growth; of a saved state the scale holds, and the settings' growth."""
    asked = OptimSettings(precision="fp16", amp_init_scale=512.0, amp_growth_interval=7)
    precision = Precision.of(asked, CPU)
    assert precision.scaler.get_scale() == 512.0
    assert precision.scaler.get_growth_interval() == 7
    saved = {**precision.state_dict(), "scale": 8.0, "growth_interval": 99, "_growth_tracker": 3}
    precision.load_state_dict(saved)
    kept = precision.state_dict()
    assert (kept["scale"], kept["growth_interval"], kept["_growth_tracker"]) == (8.0, 7, 3)


FP16 = OptimSettings(
    precision="fp16",
    amp_init_scale=2.0**24,
    amp_growth_interval=2,
    learning_rate=0.01,
    warmup_steps=0,
    schedule="constant",
)


def _trained_in_fp16(me, port, steps):
    state = build_state(optim=FP16, ema=False)
    state.precision = Precision.of(FP16, CPU)
    with join(me, port) as group:
        replica = build_replica(state, group)
        stepper = build_stepper(state, replica, rank=0, world_size=1, optim=FP16)
        results = [stepper.run(micro_batches(step, 0), votes=Votes()) for step in range(steps)]
    scales = [result.loss_scale for result in results]
    weights = {name: one.clone() for name, one in state.model.state_dict().items()}
    return scales, [result.applied for result in results], weights


def by_hand(steps):
    """A loop as torch's documentation has it, with its GradScaler on the CPU."""
    state = build_state(optim=FP16, ema=False)
    model, optimizer = state.model, state.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    scales, applied = [], []
    for step in range(steps):
        before = copy.deepcopy(model.state_dict())
        seed_step(seed=7, step=step, rank=0, micro_step=0)
        inputs, targets, _ = micro_batches(step, 0)[0].batch
        model.train()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        applied.append(scaler.get_scale() >= scales[-1])
        if not applied[-1]:  # of a step that does not count no batch statistics stay either
            model.load_state_dict(before)
    return scales, applied, model.state_dict()


def test_fp16_on_a_cpu_is_the_loop_with_torchs_scaler():
    """Overflows at the begin, growth and overflows later: every bit of the weights, every scale."""
    steps = 24
    with hosted_store() as port:
        ((scales, applied, weights),) = run_ranks(_trained_in_fp16, 1, port, steps)
    hand_scales, hand_applied, expected = by_hand(steps)
    assert (scales, applied) == (hand_scales, hand_applied)
    assert not applied[0], "it begins far too high"
    assert any(later > before for before, later in itertools.pairwise(scales))
    # In torch 2.6 the norm of all gradients depends in its last bit on where they lie in memory.
    if TorchVersion(torch.__version__) >= (2, 7):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def falling(precision, steps, *, every, start=0):
    """The lines of a run in which each so-manieth step overflows."""
    lines = {}
    for step in range(start + 1, start + steps + 1):
        before = precision.scale()
        if step % every == 0:
            scale = before / 2
            precision.load_state_dict({**precision.state_dict(), "scale": scale})
        if line := precision.watch(step=step, before=before):
            lines[step] = line
    return lines


def test_a_loss_scale_that_only_falls_for_long_is_reported():
    """With both scales; again after as many. Its count goes on in a process that follows."""
    precision = Precision("fp16", device=CPU, init_scale=2.0**20)
    assert falling(precision, 600, every=100) == {}
    follower = Precision("fp16", device=CPU)
    follower.load_state_dict(precision.state_dict())
    lines = falling(follower, 1600, every=100, start=600)
    assert list(lines) == [1100, 2100]
    assert "has only fallen for 1,000 steps, from 1.04858e+06 to 512" in lines[1100]


def test_a_loss_scale_that_grows_between_is_no_news():
    """Controls: the search at the begin, and the usual way up and down."""
    precision = Precision("fp16", device=CPU)
    assert falling(precision, 20, every=2) == {}
    steady = precision.scaler.get_scale()
    assert all(precision.watch(step=step, before=steady) == "" for step in range(21, 5000))
    for step in range(5000, 9000, 500):
        now = precision.scaler.get_scale()
        precision.load_state_dict({**precision.scaler.state_dict(), "scale": now * 2})
        assert precision.watch(step=step, before=now) == ""
        precision.load_state_dict({**precision.scaler.state_dict(), "scale": now})
        assert precision.watch(step=step + 100, before=now * 2) == ""


def test_the_loss_scale_is_read_once_between_two_updates(monkeypatch):
    """Reading waits for the device; control: what was loaded, or lowered, is seen."""
    precision = Precision("fp16", torch.device("cpu"))
    reads = []
    read = torch.amp.GradScaler.get_scale
    monkeypatch.setattr(
        torch.amp.GradScaler, "get_scale", lambda scaler: reads.append(1) or read(scaler)
    )
    assert [precision.scale() for _ in range(3)] == [65536.0] * 3
    assert not precision.has_lowered(precision.scale())
    assert len(reads) == 1
    precision.load_state_dict({**precision.scaler.state_dict(), "scale": 8.0})
    assert precision.scale() == 8.0
    assert precision.has_lowered(16.0)
