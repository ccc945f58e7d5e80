"""The synthetic task: sequences made up on the fly, learnable, from no files at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_runner.tasks.transformer import TransformerLM, likeliest_tokens, next_token_loss
from ddp_runner.training.task import Batch, Datasets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_runner.core.settings import Settings

NOISE = 0.1  # share of tokens that are drawn at random instead of following the rule
_EXP_MAX = 700.0  # exp() of more overflows a float
_GOLDEN = 0.6180339887


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRule:
    """The rule to learn: ``next = (multiplier * token + increment) % vocab_size``.

    A tenth of the tokens break the rule, so the loss of a model that has learned it falls from
    ``log(vocab_size)`` to :attr:`entropy_nats` and no further.
    """

    vocab_size: int
    multiplier: int
    increment: int

    @classmethod
    def of_vocabulary(cls, vocab_size: int) -> SequenceRule:
        """The one rule of a vocabulary; it maps no two tokens to the same one."""
        multiplier = max(1, round(vocab_size * _GOLDEN))
        while math.gcd(multiplier, vocab_size) != 1:
            multiplier += 1
        return cls(vocab_size=vocab_size, multiplier=multiplier, increment=vocab_size // 3 + 1)

    @property
    def entropy_nats(self) -> float:
        """The lowest mean loss that any model can reach, in nats per token."""
        other = NOISE / self.vocab_size  # a random draw hits the rule's own token as well
        right = 1 - NOISE + other
        return -right * math.log(right) - (self.vocab_size - 1) * other * math.log(other)

    def powers(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pair (a, b) for each ``k < count``, such that k applications are ``a * token + b``."""
        multipliers, increments = [1], [0]
        for _ in range(count - 1):
            multipliers.append(multipliers[-1] * self.multiplier % self.vocab_size)
            increments.append((increments[-1] * self.multiplier + self.increment) % self.vocab_size)
        return np.array(multipliers, dtype=np.int64), np.array(increments, dtype=np.int64)


class SyntheticSequences(Dataset[Tensor]):
    """``size`` sequences, int64 ``[seq_len + 1]``, each a pure function of (seed, first + index).

    Nothing is stored: every token's randomness is a hash of its place (SplitMix64, Steele et al.,
    2014), so any process computes any sample, in any order.
    """

    deterministic = True

    def __init__(
        self, rule: SequenceRule, *, seed: int, first: int, size: int, seq_len: int
    ) -> None:
        self._rule = rule
        self._first = first
        self._size = size
        self._places = np.arange(seq_len + 1, dtype=np.int64)
        self._multipliers, self._increments = rule.powers(seq_len + 1)
        self._key = _mixed(np.array([seed], dtype=np.uint64))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """The samples of ``indices``, made together. Raises IndexError outside ``range(size)``."""
        numbers = np.asarray(indices, dtype=np.int64)
        if ((numbers < 0) | (numbers >= self._size)).any():
            raise IndexError(f"{indices} is not within {self._size} sequences")
        bits = self._random_bits(numbers)
        drawn = ((bits & np.uint64(0xFFFFFFFF)) % np.uint64(self._rule.vocab_size)).astype(np.int64)
        restarts = (bits >> np.uint64(32)) < np.uint64(round(NOISE * 2**32))
        restarts[:, 0] = True
        # A sequence is pieces of the rule's orbits: each token is the last restart's, moved on.
        restart_at = np.maximum.accumulate(np.where(restarts, self._places, 0), axis=1)
        moves = self._places - restart_at
        start = np.take_along_axis(drawn, restart_at, axis=1)
        tokens = self._multipliers[moves] * start + self._increments[moves]
        return list(torch.from_numpy(tokens % self._rule.vocab_size).unbind(0))

    def _random_bits(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """64 random bits for each token: ``[len(numbers), seq_len + 1]``."""
        rows = _mixed((numbers + self._first).astype(np.uint64) + self._key)
        return _mixed(rows[:, None] + self._places.astype(np.uint64))


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser over an array (arrays wrap on overflow, as it needs)."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class SyntheticTask:
    """``--task synthetic``: shaped by ``model.vocab_size``, ``dataset_size`` and ``seq_len``."""

    takes_settings = True

    def __init__(self, settings: Settings) -> None:
        self._model = settings.model
        self._seed = settings.run.seed
        self._rule = SequenceRule.of_vocabulary(settings.model.vocab_size)

    def build_model(self) -> nn.Module:
        """A fresh :class:`TransformerLM`."""
        return TransformerLM.shaped(self._model, vocab_size=self._model.vocab_size)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens that a sample is trained to predict."""
        return self._model.seq_len

    def build_datasets(self) -> Datasets:
        """``dataset_size`` sequences to train on and a tenth as many others to validate on."""
        size = self._model.dataset_size
        held_out = max(1, size // 10)
        vocabulary, seq_len = self._rule.vocab_size, self._model.seq_len
        return Datasets(
            train=self._sequences(first=0, size=size),
            validation=self._sequences(first=size, size=held_out),
            fingerprint=f"synthetic-1:{self._seed}:{vocabulary}:{seq_len}:{size}",
            notes=(self._note(size),),
        )

    def _note(self, size: int) -> str:
        vocabulary = self._rule.vocab_size
        return (
            f"{size:,} synthetic sequences of {self._model.seq_len} tokens, vocabulary {vocabulary:,}; the "
            f"loss can fall from {math.log(vocabulary):.2f} to {self._rule.entropy_nats:.2f}"
        )

    def _sequences(self, *, first: int, size: int) -> SyntheticSequences:
        return SyntheticSequences(
            self._rule, seed=self._seed, first=first, size=size, seq_len=self._model.seq_len
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy over next tokens, in nats."""
        return next_token_loss(model, batch)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The likeliest token at each place after the first, ``[B, seq_len]``."""
        return likeliest_tokens(model, batch)

    def figures(self, loss: float) -> Mapping[str, float]:
        """Return the perplexity: the number of tokens that the model hesitates between."""
        return {"perplexity": math.exp(min(loss, _EXP_MAX))}
