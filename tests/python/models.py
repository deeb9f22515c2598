"""Small models that tests train with Dovetail and with torch's own fully_shard."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Mlp(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
                                    for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) * self.scale


class Conditioned(nn.Module):
    """Its forward calls a module of its first block once more, as DiT's does."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Linear(3, 5), nn.Linear(5, 5)

        def forward(self, x):
            return self.out(torch.tanh(self.embed(x)))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return sum(block(x) for block in self.blocks) * self.blocks[0].embed(x) * self.scale


class Convolutions(nn.Module):
    """With batch norm, whose buffers each rank keeps.

    Convolutions without bias: the gradient of one before a batch norm is nothing but rounding, of which Adam would make
    whole steps.
    """

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                                  nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Tied(nn.Module):
    """Embedding and head share their weight; the middle layer is frozen."""

    def __init__(self, vocabulary=40, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.middle = nn.Linear(width, width)
        self.block = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for p in self.middle.parameters():
            p.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.block(torch.tanh(self.middle(x))))


class Decoder(nn.Module):
    """A causal transformer with nested structures as inputs and outputs of its blocks."""

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm = nn.RMSNorm(width)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 2 * width)
            self.down = nn.Linear(2 * width, width)

        def forward(self, state, *, causal):
            x = state["x"]
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))
            return {"x": x + self.down(F.silu(self.up(self.norm(x)))), "depth": state["depth"] + 1}

    def __init__(self, vocabulary=64, width=32, heads=4, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Decoder.Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        state = {"x": self.embedding(tokens), "depth": 0}
        for block in self.blocks:
            state = block(state, causal=True)
        return self.head(state["x"])


class Llama(nn.Module):
    """A decoder with rotary positions and gated MLPs, whose blocks also get tensors that are no activations."""

    class Block(nn.Module):
        def __init__(self, width, heads, hidden):
            super().__init__()
            self.heads = heads
            self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
            self.w2 = nn.Linear(hidden, width, bias=False)

        def forward(self, x, cos, sin):
            h = self.attention_norm(x)
            q, k, v = (w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            h = self.mlp_norm(x)
            return x + self.w2(F.silu(self.w1(h)) * self.w3(h))

    def __init__(self, vocabulary=64, width=32, heads=4, depth=2, hidden=88, longest=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Llama.Block(width, heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(longest).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                into_residual = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * depth) if into_residual else 1.0))

    def forward(self, tokens):
        x, length = self.embedding(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


def rotated(x, cos, sin):
    """x: [batch, heads, length, head]; the first half of a head is the real part, the second the imaginary one."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
