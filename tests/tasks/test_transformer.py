"""The built-in language model: shapes, causality, initialisation, generation."""

from __future__ import annotations

import math

import pytest
import torch

from ddp_runner.tasks.transformer import TransformerLM, generate, next_token_loss


def tiny(*, dropout: float = 0.0, vocab_size: int = 50, seq_len: int = 16) -> TransformerLM:
    torch.manual_seed(3)
    return TransformerLM(
        vocab_size=vocab_size,
        seq_len=seq_len,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        dropout=dropout,
    )


def tokens(*shape: int, vocab_size: int = 50) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("length", [1, 7, 16])
def test_logits_have_one_row_per_position(length):
    """Any length up to seq_len gives [B, T, vocab]."""
    assert tiny()(tokens(3, length)).shape == (3, length, 50)


def test_later_tokens_do_not_change_earlier_predictions():
    """A position sees itself and the past only."""
    model = tiny()
    before = tokens(2, 16)
    after = before.clone()
    after[:, 10] = (after[:, 10] + 1) % 50
    old, new = model(before), model(after)
    torch.testing.assert_close(old[:, :10], new[:, :10], rtol=0, atol=1e-6)
    for position in range(10, 16):  # the control: they do change what follows
        assert (old[:, position] - new[:, position]).abs().max() > 1e-5


def test_position_matters():
    """The same token at another place is another input."""
    model = tiny()
    logits = model(torch.full((1, 16), 7))
    assert (logits[0, 0] - logits[0, 15]).abs().max() > 1e-5


def test_untrained_loss_is_that_of_a_uniform_guess():
    """The initial weights prefer no token: the loss is close to ln(V)."""
    loss = next_token_loss(tiny(), tokens(8, 17))
    assert loss.item() == pytest.approx(math.log(50), abs=0.1)


def test_loss_is_the_mean_over_samples():
    """Halves of a batch average to the whole, so micro-batches add up to the global batch."""
    model, windows = tiny(), tokens(8, 17)
    halves = [next_token_loss(model, half) for half in windows.chunk(2)]
    torch.testing.assert_close(next_token_loss(model, windows), sum(halves) / 2)


def test_loss_takes_bytes():
    """Windows may come as uint8, an eighth of the bytes to move."""
    model, windows = tiny(), tokens(4, 17)
    assert torch.equal(next_token_loss(model, windows.byte()), next_token_loss(model, windows))


def test_every_parameter_gets_a_gradient():
    """DDP waits for each parameter, so none may be left out."""
    model = tiny()
    next_token_loss(model, tokens(4, 17)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_initial_weights_follow_gpt2():
    """Residual projections start smaller by the root of twice the depth; the global seed decides."""
    model, again = tiny(), tiny()
    assert model.blocks[0].expand.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.blocks[0].project.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_dropout_is_for_training_only():
    """Two passes differ while training and agree in evaluation."""
    model, windows = tiny(dropout=0.5), tokens(2, 16)
    assert not torch.equal(model(windows), model(windows))
    model.eval()
    assert torch.equal(model(windows), model(windows))


def test_heads_must_divide_the_width():
    """An impossible shape is refused when it is made."""
    with pytest.raises(ValueError, match="num_heads=3 does not divide hidden_size=32"):
        TransformerLM(
            vocab_size=5, seq_len=4, hidden_size=32, num_layers=1, num_heads=3, dropout=0.0
        )


def test_generation_repeats_with_its_seed_and_goes_past_the_window():
    """The prompt is kept, the text may outgrow seq_len, and one seed gives one text."""
    model, prompt = tiny().eval(), tokens(5)

    def once(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, length=40, temperature=0.8, generator=generator)

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert torch.equal(once(1)[:5], prompt)
    assert len(once(1)) == 45


def test_generation_leaves_the_global_generator_alone():
    """Showing a sample must not change what is trained afterwards."""
    model = tiny().eval()
    before = torch.get_rng_state()
    generate(model, tokens(2), length=3, temperature=1.0, generator=torch.Generator())
    assert torch.equal(before, torch.get_rng_state())
