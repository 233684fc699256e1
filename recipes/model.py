"""A decoder-only transformer over bytes: RMSNorm, rotary attention, squared ReLU, tied embeddings.

Small enough for a CPU, ordinary enough that what is seen here carries over: no biases, pre-normalisation, normalised
queries and keys, residual projections that start at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ModelSettings", "Transformer"]

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class ModelSettings:
    """Sizes of a `Transformer`.

    Attributes:
        width: channels of the residual stream, a multiple of 2 * heads.
        depth: blocks.
        heads: attention heads.
        context: tokens a sequence may have.
        vocabulary: tokens there are; 256 for bytes.
    """

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if min(self.width, self.depth, self.heads, self.context, self.vocabulary) < 1:
            raise ValueError(f"model sizes must be at least 1 but are {self}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads = {2 * self.heads} (rotary embeddings pair channels) "
                f"but is {self.width}"
            )


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.inputs = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.output = nn.Linear(settings.width, settings.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: (batch, length, width)
        batch, length, width = x.shape
        heads = self.inputs(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        q, k = rotate(F.rms_norm(q, q.shape[-1:]), cos, sin), rotate(F.rms_norm(k, k.shape[-1:]), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Block(nn.Module):
    """Attention, then a multilayer perceptron of four times the width, each added to its own input."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width)
        self.attention = Attention(settings)
        self.mlp_norm = nn.RMSNorm(settings.width)
        self.up = nn.Linear(settings.width, 4 * settings.width, bias=False)
        self.down = nn.Linear(4 * settings.width, settings.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y: Tensor = x + self.down(F.relu(self.up(self.mlp_norm(x))).square())
        return y


class Transformer(nn.Module):
    """Predict each next token: (batch, length) int64 tokens to (batch, length, vocabulary) logits.

    >>> model = Transformer(ModelSettings(width=16, depth=1, heads=2, context=8))
    >>> model(torch.zeros(3, 8, dtype=torch.int64)).shape
    torch.Size([3, 8, 256])
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocabulary, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.depth))
        self.norm = nn.RMSNorm(settings.width)
        cos, sin = rotary_table(settings.context, settings.width // settings.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from torch's global generator."""
        std = self.settings.width**-0.5
        nn.init.normal_(self.embedding.weight, std=std)
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.normal_(block.attention.inputs.weight, std=std)
            nn.init.normal_(block.up.weight, std=std)
            nn.init.zeros_(block.attention.output.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.settings.context:
            raise ValueError(f"a sequence has at most {self.settings.context} tokens here but this one has {length}")
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = F.rms_norm(self.embedding(tokens), (self.settings.width,))
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)


def rotary_table(context: int, channels: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/channels), each (context, channels / 2)."""
    rates = ROTARY_BASE ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + channels / 2]) by its position's angle (arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
