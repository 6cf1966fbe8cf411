"""A small GPT as programs for flash-attn are written: packed projections, ALiBi slopes, a cache.

test_compat_flash_attn.py changes one line, the import below, and runs it.
"""

import torch
from flash_attn import flash_attn_qkvpacked_func, flash_attn_with_kvcache
from torch import nn


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.Wqkv, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        slopes = [2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
        self.register_buffer("alibi_slopes", torch.tensor(slopes, dtype=torch.float32))

    def forward(self, x, cache=None, cache_seqlens=None):
        batch, seqlen, _ = x.shape
        qkv = self.Wqkv(self.norm_1(x)).view(batch, seqlen, 3, self.num_heads, -1)
        options = {"causal": True, "alibi_slopes": self.alibi_slopes}
        if cache is None:
            context = flash_attn_qkvpacked_func(qkv, dropout_p=0.0, **options)
        else:
            q, k, v = qkv.unbind(dim=2)
            context = flash_attn_with_kvcache(
                q, *cache, k, v, cache_seqlens=cache_seqlens, **options
            )
        x = x + self.out_proj(context.view(batch, seqlen, -1))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size=16, width=32, num_heads=4, num_layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens, caches=None, cache_seqlens=None):
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache, cache_seqlens)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens, max_length):
        batch = len(tokens)
        heads, width = self.blocks[0].num_heads, self.embedding.embedding_dim
        shape = (2, batch, max_length, heads, width // heads)
        caches = [tuple(torch.zeros(shape)) for _ in self.blocks]
        filled, new = torch.zeros(batch, dtype=torch.int32), tokens
        while tokens.shape[1] < max_length:
            logits = self(new, caches, filled)
            filled = filled + new.shape[1]
            new = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens
