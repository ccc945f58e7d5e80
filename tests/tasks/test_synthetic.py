"""The synthetic task: the same data everywhere, and something to learn in it."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from ddp_runner.core.settings import ModelSettings, RunSettings, Settings
from ddp_runner.tasks.synthetic import NOISE, SequenceRule, SyntheticTask
from ddp_runner.training.task import NamesLoss, TakesSettings, Task


def task(
    *, seed: int = 5, vocab_size: int = 32, dataset_size: int = 400, seq_len: int = 16
) -> SyntheticTask:
    shape = ModelSettings(
        vocab_size=vocab_size,
        dataset_size=dataset_size,
        seq_len=seq_len,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        dropout=0.0,
    )
    return SyntheticTask(Settings(run=RunSettings(seed=seed), model=shape))


def test_it_is_a_task_like_a_users():
    """The built-in task satisfies the public protocols."""
    made = task()
    assert isinstance(made, Task)
    assert isinstance(made, NamesLoss)
    assert isinstance(made, TakesSettings)


def test_sample_depends_on_seed_and_index_only():
    """Alone, in a batch, in another order or in another process: the same sequence."""
    data = task().build_datasets().train
    batch = data.__getitems__([9, 3, 399, 3])
    assert all(torch.equal(data[i], row) for i, row in zip([9, 3, 399, 3], batch, strict=True))
    assert torch.equal(pickle.loads(pickle.dumps(data))[9], batch[0])
    assert torch.equal(task().build_datasets().train[9], batch[0])
    assert not torch.equal(task(seed=6).build_datasets().train[9], batch[0])


def test_samples_are_tokens_of_the_asked_shape():
    """seq_len + 1 int64 tokens, each within the vocabulary and all of them used."""
    everything = torch.stack(task().build_datasets().train.__getitems__(range(400)))
    assert everything.shape == (400, 17)
    assert everything.dtype == torch.int64
    assert everything.unique().tolist() == list(range(32))


def test_validation_holds_other_sequences():
    """A tenth as many sequences, none of them trained on, and never nothing."""
    data = task(vocab_size=1000, seq_len=128).build_datasets()
    trained = {tuple(row.tolist()) for row in data.train.__getitems__(range(400))}
    held_out = {tuple(row.tolist()) for row in data.validation.__getitems__(range(40))}
    assert len(data.validation) == 40
    assert len(trained) == 400
    assert not trained & held_out
    assert len(task(dataset_size=3).build_datasets().validation) == 1


@pytest.mark.parametrize("index", [-1, 400])
def test_index_outside_the_dataset_is_refused(index):
    """No sample is made up beyond the size."""
    with pytest.raises(IndexError):
        task().build_datasets().train[index]


@pytest.mark.parametrize("vocab_size", [2, 3, 32, 1000, 50_257])
def test_tokens_follow_the_rule_but_for_the_noise(vocab_size):
    """Nine transitions of ten are the rule's, for any vocabulary."""
    rule = SequenceRule.of_vocabulary(vocab_size)
    data = task(vocab_size=vocab_size, dataset_size=2000).build_datasets().train
    rows = torch.stack(data.__getitems__(range(2000)))
    expected = (rows[:, :-1] * rule.multiplier + rule.increment) % vocab_size
    follows = (rows[:, 1:] == expected).float().mean().item()
    assert follows == pytest.approx(1 - NOISE + NOISE / vocab_size, abs=0.01)


def test_a_few_steps_reduce_the_loss():
    """The model learns the rule, and cannot fall below the noise."""
    made = task()
    torch.manual_seed(0)
    model, data = made.build_model(), made.build_datasets().train
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        start = step * 32 % 384
        loss = made.loss(model, torch.stack(data.__getitems__(range(start, start + 32))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(32), abs=0.2)
    floor = SequenceRule.of_vocabulary(32).entropy_nats
    assert floor - 0.15 < losses[-1] < math.log(32) / 2


def test_figures_and_fingerprint():
    """Perplexity is exp(loss), whatever the loss; other data has another fingerprint."""
    made = task()
    assert made.figures(math.log(32))["perplexity"] == pytest.approx(32)
    assert made.figures(1e6)["perplexity"] > 1e300
    assert math.isnan(made.figures(math.nan)["perplexity"])
    prints = {
        task(seed=s, dataset_size=n).build_datasets().fingerprint
        for s, n in [(1, 9), (2, 9), (1, 8)]
    }
    assert len(prints) == 3


def test_outputs_for_predict_are_the_likeliest_tokens():
    """One for each token that the loss counts; the model alone cannot take a whole window."""
    made = task()
    model = made.build_model().eval()
    batch = torch.stack([made.build_datasets().validation[at] for at in range(3)])
    found = made.predict(model, batch)
    assert torch.equal(found, model(batch[:, :-1]).argmax(-1))
