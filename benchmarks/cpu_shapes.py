"""Shapes that the CPU benchmark measures, their random inputs, and the float64 results."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

import attrs
import torch

from mla import MLADims, RopeSpec, build_metadata, decode_group
from mla.metadata import DecodeMetadata

__all__ = [
    "BLOCK_SIZE",
    "DECODE",
    "LATENT",
    "PREFILL",
    "QUICK_DECODE",
    "QUICK_PREFILL",
    "RANK",
    "SCALE",
    "V_DIM",
    "DecodeInputs",
    "DecodeShape",
    "PrefillInputs",
    "PrefillShape",
    "add_sink",
    "attend_float64",
    "checked_heads",
    "decode_inputs",
    "describe_lengths",
    "dims_of",
    "named",
    "prefill_inputs",
]

BLOCK_SIZE = 16
SPARE_BLOCKS = 3
RANK, LATENT, QK_DIM, V_DIM = 512, 576, 192, 128
SCALE = QK_DIM**-0.5


def dims_of(num_heads: int) -> MLADims:
    """DeepSeek-V3's widths."""
    rope = RopeSpec(dim=64, interleaved=True)
    return MLADims(
        num_heads=num_heads, kv_lora_rank=RANK, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=V_DIM, rope=rope
    )


def describe_lengths(lengths: Sequence[int]) -> list[int] | str:
    """The lengths themselves if they are few, else in words."""
    if len(lengths) <= 8:
        return list(lengths)
    low, high = min(lengths), max(lengths)
    return f"{len(lengths)} x {low}" if low == high else f"{len(lengths)} in {low}..{high}"


@attrs.frozen(kw_only=True)
class DecodeShape:
    """Sequences of these lengths, the last `query_len` tokens of each new."""

    name: str
    heads: int
    lengths: tuple[int, ...]
    query_len: int = 1

    @property
    def flops(self) -> int:
        """Scores and values of every key that a new token sees, and no other."""
        seen = sum(n - self.query_len + 1 + i for n in self.lengths for i in range(self.query_len))
        return 2 * self.heads * (LATENT + RANK) * seen


@attrs.frozen(kw_only=True)
class PrefillShape:
    """Prompts of these lengths, causal; with `context_len`, all of them over a chunk of context, not causal."""

    name: str
    heads: int
    query_lens: tuple[int, ...]
    context_len: int = 0

    @property
    def causal(self) -> bool:
        """Whether a query sees only the keys up to its own."""
        return not self.context_len

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys of each prompt."""
        return self.query_lens if self.causal else (self.context_len,) * len(self.query_lens)

    @property
    def flops(self) -> int:
        """Only the lower triangle where it is causal."""
        pairs = sum(n * (n + 1) // 2 for n in self.query_lens) if self.causal else sum(self.query_lens) * self.context_len
        return 2 * self.heads * (QK_DIM + V_DIM) * pairs


Shape = TypeVar("Shape", DecodeShape, PrefillShape)


def _ragged(count: int, longest: int) -> tuple[int, ...]:
    chosen = random.Random(1)  # noqa: S311  (a fixed draw of lengths)
    return tuple(chosen.randint(1, longest) for _ in range(count))


DECODE = (
    DecodeShape(name="H16 L1024", heads=16, lengths=(1024,)),
    DecodeShape(name="H16 L8192", heads=16, lengths=(8192,)),
    DecodeShape(name="H128 L4096", heads=128, lengths=(4096,)),
    DecodeShape(name="B32 H16 L1024", heads=16, lengths=(1024,) * 32),
    DecodeShape(name="B64 H16 ragged", heads=16, lengths=_ragged(64, 4096)),
    DecodeShape(name="B8 H128 L2048", heads=128, lengths=(2048,) * 8),
    DecodeShape(name="B32 H16 L1024 new 4", heads=16, lengths=(1024,) * 32, query_len=4),
    DecodeShape(name="H16 L8192 new 4", heads=16, lengths=(8192,), query_len=4),
)
QUICK_DECODE = (
    DecodeShape(name="H2 ragged", heads=2, lengths=(40, 1, 33)),
    DecodeShape(name="B2 H2 L48 new 2", heads=2, lengths=(48, 48), query_len=2),
)
MIX = (37, 128, 300, 513, 700, 1100)
PREFILL = (
    *(PrefillShape(name=f"H{h} T{n}", heads=h, query_lens=(n,)) for h in (16, 128) for n in (128, 512, 2048)),
    PrefillShape(name="H16 mix", heads=16, query_lens=MIX),
    PrefillShape(name="H16 T2048 over 4096", heads=16, query_lens=(2048,), context_len=4096),
)
QUICK_PREFILL = (
    PrefillShape(name="H2 mix", heads=2, query_lens=(20, 33)),
    PrefillShape(name="H2 T20 over 40", heads=2, query_lens=(20,), context_len=40),
)


def named(shapes: Sequence[Shape], part: str) -> list[Shape]:
    """The shapes whose name contains this."""
    return [shape for shape in shapes if part in shape.name]


@attrs.frozen(kw_only=True, eq=False)
class DecodeInputs:
    """Shuffled blocks, every slot that no sequence holds NaN."""

    shape: DecodeShape
    q: torch.Tensor
    latent_cache: torch.Tensor
    metadata: DecodeMetadata

    def rows(self, seq: int) -> torch.Tensor:
        """The cached rows of a sequence, in order."""
        length = self.shape.lengths[seq]
        blocks = self.metadata.block_table[seq, : -(-length // self.latent_cache.shape[1])].long()
        return self.latent_cache[blocks].reshape(-1, LATENT)[:length]

    def float64(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE in float64."""
        out, lse = [], []
        count = self.shape.query_len
        for seq, length in enumerate(self.shape.lengths):
            rows = self.rows(seq).double()
            hidden = torch.ones(count, length, dtype=torch.bool, device=rows.device).triu(1 + length - count)
            scores = self.q[seq * count : (seq + 1) * count].double() @ rows.T * SCALE
            scores.masked_fill_(hidden[:, None], -torch.inf)
            out.append(scores.softmax(-1) @ rows[:, :RANK])
            lse.append(scores.logsumexp(-1))
        return torch.cat(out), torch.cat(lse)


def decode_inputs(shape: DecodeShape, dtype: torch.dtype, query_scale: float = 1.0) -> DecodeInputs:
    """Random inputs, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-n // BLOCK_SIZE) for n in shape.lengths]
    num_blocks = sum(counts) + SPARE_BLOCKS
    tables = torch.randperm(num_blocks, generator=generator)[: sum(counts)].split(counts)
    cache = torch.full((num_blocks, BLOCK_SIZE, LATENT), torch.nan, dtype=dtype)
    for table, length in zip(tables, shape.lengths, strict=True):
        slots = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
        cache.view(-1, LATENT)[slots] = torch.randn(length, LATENT, generator=generator).to(dtype)
    q = query_scale * torch.randn(len(shape.lengths) * shape.query_len, shape.heads, LATENT, generator=generator)
    groups = [
        decode_group(n, table.tolist(), query_len=shape.query_len) for n, table in zip(shape.lengths, tables, strict=True)
    ]
    metadata = build_metadata(groups, block_size=BLOCK_SIZE).decode
    return DecodeInputs(shape=shape, q=q.to(dtype), latent_cache=cache, metadata=metadata)


def add_sink(inputs: DecodeInputs, logits: float) -> None:
    """Lift one key of every sequence by this many logits for every query, in place."""
    along = torch.where(torch.arange(LATENT) % 3 == 0, 1.0, -1.0) * LATENT**-0.5
    q = inputs.q
    q += ((8 - q.float() @ along)[..., None] * along).to(q.dtype)
    for seq, length in enumerate(inputs.shape.lengths):
        block, offset = divmod(length // 3, BLOCK_SIZE)
        row = inputs.latent_cache[int(inputs.metadata.block_table[seq, block]), offset]
        row += (logits / SCALE / 8 * along).to(q.dtype)


@attrs.frozen(kw_only=True, eq=False)
class PrefillInputs:
    """Queries, keys and values as the layer has them: (tokens, heads, width)."""

    shape: PrefillShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    query_start_loc: torch.Tensor
    kv_start_loc: torch.Tensor

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Rows of q, and of k and v, of each sequence."""
        a = b = 0
        for new, keys in zip(self.shape.query_lens, self.shape.kv_lens, strict=True):
            yield slice(a, a + new), slice(b, b + keys)
            a, b = a + new, b + keys

    def float64(self, heads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of some heads in float64."""
        parts = [
            attend_float64(self.q[i][:, heads], self.k[j][:, heads], self.v[j][:, heads], causal=self.shape.causal)
            for i, j in self.sequences()
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def attend_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in float64, causal aligned at the end; a head and 256 rows at a time, which bounds the memory."""
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        keys, values = k[:, head].double(), v[:, head].double()
        for first in range(0, len(q), 256):
            rows = slice(first, min(first + 256, len(q)))
            scores = q[rows, head].double() @ keys.T * SCALE
            if causal:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + len(k) - len(q) + first)
                scores.masked_fill_(hidden, -torch.inf)
            lse[rows, head] = scores.logsumexp(-1)
            out[rows, head] = scores.softmax(-1) @ values
    return out, lse


def checked_heads(heads: int, flops: int, *, most_flops: float = 4e10) -> list[int]:
    """Heads that are compared with float64: all of them, or evenly spaced ones where that would take seconds."""
    count = min(heads, max(2, int(most_flops * heads / max(flops, 1))))
    return sorted({round(i * (heads - 1) / max(1, count - 1)) for i in range(count)})


def prefill_inputs(
    shape: PrefillShape, dtype: torch.dtype, query_scale: float = 1.0, device: torch.device | str = "cpu"
) -> PrefillInputs:
    """Random inputs, the same in every run on a device."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, shape.heads, width, generator=generator, device=device)

    def starts(lengths: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)

    new, keys = sum(shape.query_lens), sum(shape.kv_lens)
    return PrefillInputs(
        shape=shape,
        q=(query_scale * normal(new, QK_DIM)).to(dtype),
        k=normal(keys, QK_DIM).to(dtype),
        v=normal(keys, V_DIM).to(dtype),
        query_start_loc=starts(shape.query_lens),
        kv_start_loc=starts(shape.kv_lens),
    )
