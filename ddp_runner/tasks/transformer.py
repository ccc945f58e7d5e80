"""A decoder-only Transformer language model. Knows nothing of data, devices or training.

Sources: GPT-2 (Radford et al., 2019) for the pre-norm block, learned positions and initialisation.
The output head is not tied to the embedding: at these vocabularies it is a small part of the
weights, byte embeddings and byte predictions want different geometry, and each name in
``state_dict()`` stays one tensor of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  (the name every torch user reads)
from torch import Tensor, nn

from ddp_runner.core.settings import ModelSettings

INIT_STD = 0.02
MLP_RATIO = 4


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which a position sees itself and what came before.

    ``dropout`` is not applied to the attention weights: torch has no fused kernel for that on the
    CPU, and falls back to one that stores a ``[B, heads, T, T]`` matrix.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.project = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]`` to the same shape."""
        batch, length, hidden = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, hidden))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then an MLP, each on a normalised copy and added to the residual stream."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = CausalSelfAttention(hidden_size, num_heads)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.expand = nn.Linear(hidden_size, MLP_RATIO * hidden_size)
        self.project = nn.Linear(MLP_RATIO * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]`` to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        wide = F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        return x + self.dropout(self.project(wide))  # type: ignore[no-any-return]


class TransformerLM(nn.Module):
    """Predicts the next token at every position.

    Raises ``ValueError`` if ``num_heads`` does not divide ``hidden_size``. Initial weights come
    from torch's global generator, as in any module.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide hidden_size={hidden_size}")
        self.seq_len = seq_len
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(seq_len, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights, zero biases; what is added to the residual stream starts smaller."""
        residual_std = INIT_STD / math.sqrt(2 * len(self.blocks))
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                std = residual_std if name.endswith(".project") else INIT_STD
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @classmethod
    def shaped(cls, shape: ModelSettings, *, vocab_size: int) -> TransformerLM:
        """Return a fresh model of the settings' shape."""
        return cls(
            vocab_size=vocab_size,
            seq_len=shape.seq_len,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            dropout=shape.dropout,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 ``[B, T]`` with ``T <= seq_len`` to logits ``[B, T, vocab_size]``."""
        length = tokens.shape[1]
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompt: Tensor,
    *,
    length: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """``prompt`` int64 ``[T]``, ``T >= 1``, and ``length`` sampled tokens after it, on the CPU.

    Draws on the CPU from ``generator``, so that one seed gives one text whatever the device; the
    model is used in the mode that it is in. Only the last ``seq_len`` tokens are looked at.
    """
    device = model.head.weight.device
    tokens = prompt.to("cpu", torch.int64)
    for _ in range(length):
        window = tokens[-model.seq_len :].to(device)
        logits = model(window[None])[0, -1].float().cpu()
        chosen = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
        tokens = torch.cat((tokens, chosen))
    return tokens


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of every token of ``windows`` after the first.

    ``windows`` is ``[B, T + 1]`` of any integer type. All windows are equally long, so the mean
    over tokens is the mean over samples. ``model`` may be wrapped, as in DDP.
    """
    tokens = windows.long()
    logits: Tensor = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def likeliest_tokens(model: nn.Module, windows: Tensor) -> Tensor:
    """Return for every token of ``windows`` after the first what the model expects in its place."""
    logits: Tensor = model(windows.long()[:, :-1])
    return logits.argmax(-1)
