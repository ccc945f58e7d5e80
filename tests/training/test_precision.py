"""Which arithmetic is chosen, and that the scaler's state is kept."""

import pytest
import torch

from ddp_runner.training.components.precision import Precision, cpu_has_fast_bf16

CPU = torch.device("cpu")


def result_dtype(precision):
    weight = torch.ones(4, 4)
    with precision.autocast():
        return (weight @ weight).dtype


def test_amp_off_is_float32_without_a_note():
    """Control: nothing is cast, scaled or reported."""
    precision = Precision(use_amp=False, device=CPU)
    assert (precision.name, precision.notes) == ("fp32", ())
    assert result_dtype(precision) is torch.float32
    assert not precision.scaler.is_enabled()
    assert precision.state_dict() == {}


def test_amp_on_a_cpu_follows_its_instructions():
    """With bf16 instructions a product is bf16; without them it stays float32 and a note says so."""
    precision = Precision(use_amp=True, device=CPU)
    fast = cpu_has_fast_bf16()
    assert precision.name == ("bf16" if fast else "fp32")
    assert result_dtype(precision) is (torch.bfloat16 if fast else torch.float32)
    assert bool(precision.notes) is not fast
    assert not precision.scaler.is_enabled()


def test_a_cpu_without_bf16_instructions_gets_a_note(monkeypatch):
    """A torch whose checks say no, or that has none, means float32 and one sentence."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    precision = Precision(use_amp=True, device=CPU)
    assert precision.name == "fp32"
    assert precision.notes == ("This cpu has no fast bf16; use_amp=true is ignored.",)


def test_a_state_of_another_precision_changes_nothing():
    """Control: an fp16 scaler's state is no error for a run without a scaler."""
    precision = Precision(use_amp=False, device=CPU)
    precision.load_state_dict({"scale": 2.0, "growth_factor": 2.0})
    precision.load_state_dict({})
    assert precision.state_dict() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_amp_on_a_gpu_is_bf16_or_scaled_fp16():
    """Exactly fp16 has an enabled scaler, and its state goes round."""
    precision = Precision(use_amp=True, device=torch.device("cuda", 0))
    assert precision.name in ("bf16", "fp16")
    assert precision.scaler.is_enabled() is (precision.name == "fp16")
    precision.load_state_dict(precision.state_dict())


def test_an_update_that_an_abort_has_cut_short_begins_again():
    """Between unscaling and the update; control: the scaler itself would refuse to unscale again."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision(use_amp=False, device=CPU)
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
