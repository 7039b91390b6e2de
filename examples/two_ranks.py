"""One rank of a decode that is split by keys; notebook 08 starts two of these.

Every rank holds part of each sequence's latent rows, attends them for all heads, and sends its output and LSE to the others.
All ranks merge the parts in the same order, so all have the same bits.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mla import MLADims, RopeSpec, build_metadata, decode_group, kernels_for
from mla.compute import absorb_query, merge_attn_states, project_output

BLOCK_SIZE = 16
DIMS = MLADims(
    num_heads=8,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    rope=RopeSpec(dim=16, interleaved=True),
)


def keys_of(rank: int, world_size: int, seq_len: int) -> range:
    """The positions of a sequence that a rank holds: equal shares of whole blocks, in order; the last may be short or empty."""
    share = -(-seq_len // (world_size * BLOCK_SIZE)) * BLOCK_SIZE
    return range(min(rank * share, seq_len), min((rank + 1) * share, seq_len))


def attend_keys(q: torch.Tensor, rows: list[torch.Tensor], kv_b_proj: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over the rows at hand.

    Parameters
    ----------
    q : torch.Tensor of shape (num_seqs, num_heads, qk_head_dim)
        One new token of each sequence.
    rows : list of torch.Tensor of shape (num_keys, latent_dim)
        Latent rows of each sequence; may be none.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection.

    Returns
    -------
    out : torch.Tensor of shape (num_seqs, num_heads, kv_lora_rank)
        Attended latents; 0 without keys.
    lse : torch.Tensor of shape (num_seqs, num_heads)
        Natural logarithm; -inf without keys.
    """
    counts = [-(-len(r) // BLOCK_SIZE) for r in rows]
    cache = q.new_zeros(sum(counts) + 1, BLOCK_SIZE, DIMS.latent_dim)
    out = q.new_zeros(len(rows), DIMS.num_heads, DIMS.kv_lora_rank)
    lse = q.new_full((len(rows), DIMS.num_heads), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    groups, first, held = [], 0, []
    for seq, (r, count) in enumerate(zip(rows, counts, strict=True)):
        if len(r):
            cache.view(-1, DIMS.latent_dim)[first * BLOCK_SIZE :][: len(r)] = r
            groups.append(decode_group(len(r), range(first, first + count)))
            held.append(seq)
            first += count
    if held:
        metadata = build_metadata(groups, block_size=BLOCK_SIZE).decode
        if metadata is None:
            raise RuntimeError("metadata: expected a decode part, got none")
        out[held], lse[held] = kernels_for("cpu").paged_decode(
            absorb_query(q[held], kv_b_proj, DIMS),
            cache,
            metadata,
            kv_lora_rank=DIMS.kv_lora_rank,
            softmax_scale=DIMS.softmax_scale,
        )
    return out, lse


def decode_on_rank(q: torch.Tensor, rows: list[torch.Tensor], kv_b_proj: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of all ranks: attend one's own, gather the parts, merge them in the order of the ranks."""
    out, lse = attend_keys(q, rows, kv_b_proj)
    outs = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    lses = [torch.empty_like(lse) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, out)
    dist.all_gather(lses, lse)
    out, lse = outs[0], lses[0]
    for other_out, other_lse in zip(outs[1:], lses[1:], strict=True):
        out, lse = merge_attn_states(out, lse, other_out, other_lse)
    return project_output(out, kv_b_proj, DIMS), lse


def main() -> None:
    """Read the inputs from a folder, keep this rank's rows, decode, and leave the result there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{args.port}",
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=60),
    )
    inputs = torch.load(args.folder / "inputs.pt", weights_only=True)
    mine = [rows[list(keys_of(args.rank, args.world_size, len(rows)))] for rows in inputs["rows"]]
    out, lse = decode_on_rank(inputs["q"], mine, inputs["kv_b_proj"])
    torch.save({"out": out, "lse": lse}, args.folder / f"rank{args.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
