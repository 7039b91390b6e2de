"""Decode on Hopper: the work is shared out on the device, attended by a kernel for few rows or for many, and joined.

Two kernels in Gluon, for latent rows of 512 + 64 numbers in a 16-bit dtype: `few` (up to 16 rows of new tokens times heads a
sequence) and `wide` (64 rows a program). Which one a sequence gets depends on its own rows only.

Work plan
---------
`plan_shares` shares the batch out from the lengths on the device; nothing is read on the host, and the grid is fixed. Any share
may begin and end anywhere, but a sequence is summed in units that depend on its own length only (GROUPS of 4096 keys in pieces
of 512 with few rows; pieces of 4096 keys, of 2048 beyond 32,768, with many), and a unit that a share cuts is carried on by the
next program from the exact state: so bits do not depend on the batch. `balanced` knows no units: shares are equal,
parts begin where shares do, and bits depend on the batch. Beginning a sequence counts as a few tiles where sequences differ.

Carrying on waits for the program before. Programs are no more than the chip has multiprocessors and start in their order, and
each hands over before it waits itself, so the one waited for always runs.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import attrs
import torch

from mla.compute.triton_launch import Launcher, num_processors, raw_stream, rows_side_by_side
from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata

__all__ = ["FEW_ROWS", "KV_LORA_RANK", "LATENT_DIM", "HopperPlan", "attend"]

KV_LORA_RANK, LATENT_DIM = 512, 576
"""The widths that these kernels are written for."""

FEW_ROWS = 16
"""Rows of a sequence that the kernel for few rows takes."""

WIDE_ROWS = 64
BOX, WHOLE_BOX = (64, 64), (64, 512)
"""Rows and columns that the copy engine reads at a time."""

UNLIMITED = 2**31 - 1
MAX_SEQS = 1024
MAX_PART_BYTES = 2**30
LOG2_E = 1.4426950408889634


@attrs.frozen(kw_only=True)
class _Units:
    """How a kernel sums a sequence: TILE keys at a time, PIECE tiles from nothing, GROUP pieces joined before the rest.

    `seq_cost` is what beginning and ending a sequence takes, in tiles, about.
    """

    tile: int
    piece: int
    group: int
    long_seq: int
    long_piece: int
    seq_cost: int

    def constants(self, *, balanced: bool) -> dict[str, int | bool]:
        """For the kernels around the attention."""
        return {
            "TILE": self.tile, "PIECE": self.piece, "GROUP": self.group, "LONG_SEQ": self.long_seq,
            "LONG_PIECE": self.long_piece, "BALANCED": balanced,
        }  # fmt: skip

    def max_slots(self, num_seqs: int, max_seq_len: int, num_groups: int, *, balanced: bool) -> int:
        """Parts that a batch may leave, at most."""
        if balanced:
            return 2 * num_groups
        pieces = -(-min(max_seq_len, self.long_seq) // (self.piece * self.tile))
        if max_seq_len > self.long_seq:
            pieces = max(pieces, -(-max_seq_len // (self.long_piece * self.tile)))
        if self.group == 1:
            return num_seqs * pieces
        # Pieces stay apart only in batches with less than a group of tiles for each program.
        apart = min(num_seqs * pieces, num_groups * self.group + num_seqs)
        return max(num_seqs * -(-pieces // self.group), apart)


FEW = _Units(tile=64, piece=8, group=8, long_seq=UNLIMITED, long_piece=8, seq_cost=1)
WIDE = _Units(tile=128, piece=32, group=1, long_seq=32768, long_piece=16, seq_cost=3)


@functools.cache
def _module(name: str) -> ModuleType:
    """A module of kernels, imported at the first launch and not before: it imports Triton."""
    try:
        return importlib.import_module(f"mla.compute.triton_{name}_kernels")
    except ImportError as error:
        raise KernelError(f"triton: expected an installed Triton for these kernels, got {error}; pip install triton") from error


@attrs.frozen(kw_only=True)
class _Case:
    """What the kernels are specialised for, and what decides their grids: all from shapes and the record's host integers."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    block_size: int
    max_query_len: int
    max_seq_len: int
    num_seqs: int
    few: bool
    balanced: bool

    @property
    def units(self) -> _Units:
        """How a sequence is summed."""
        return FEW if self.few else WIDE

    @property
    def row_tiles(self) -> int:
        """Programs that share a group's tiles, each with its own rows."""
        return 1 if self.few else -(-self.max_query_len * self.num_heads // WIDE_ROWS)

    @property
    def rows_per_slot(self) -> int:
        """Rows of a part."""
        return FEW_ROWS if self.few else self.row_tiles * WIDE_ROWS

    @property
    def num_groups(self) -> int:
        """Shares."""
        return max(1, num_processors(self.device) // self.row_tiles)

    @property
    def limits(self) -> tuple[int, int]:
        """Rows of the sequences that it takes: more than the first, at most the second."""
        if self.few:
            return 0, FEW_ROWS
        return (FEW_ROWS if self.num_heads <= FEW_ROWS else 0), UNLIMITED

    @property
    def num_states(self) -> int:
        """States that programs may hand over: one for each group of four warps that computes."""
        if self.balanced or self.num_groups == 1:
            return 0
        return self.num_groups * self.row_tiles * (1 if self.few else 2)

    @property
    def step(self) -> int:
        """Sequences of one launch, so that their parts stay within the memory granted."""
        most = min(self.num_seqs, MAX_SEQS)
        if self.balanced:
            return most
        slots = self.units.max_slots(1, self.max_seq_len, 0, balanced=False)
        return max(1, min(most, MAX_PART_BYTES // (slots * self.rows_per_slot * (KV_LORA_RANK + 2) * 4)))


@attrs.frozen(kw_only=True, eq=False)
class _Kernels:
    """The launchers of a case, and its numbers worked out."""

    case: _Case
    plan: Launcher
    attend: Launcher
    join: Launcher
    step: int
    num_groups: int
    row_tiles: int
    rows_per_slot: int
    num_states: int
    num_slots: int
    boxes: tuple[tuple[int, int], ...]
    """As which the attention reads the cache."""
    join_grid: tuple[int, int]
    """Programs of `join_parts` for the rows of a sequence and for columns."""


def _join_shape(case: _Case) -> dict[str, int]:
    """Rows and columns of a program of `join_parts`, and parts that it asks for at a time.

    Few sequences have many parts: many programs with many parts on their way. A large batch has few parts a sequence, or none:
    few programs, so that those with nothing to do are gone soon.
    """
    rows = case.num_seqs * case.num_heads * case.max_query_len
    if rows > 512:
        many = case.few and not case.balanced
        return {"ROWS": 4, "COLUMNS": 512, "TOGETHER": 8 if many else 2, "SIDE_BY_SIDE": 0, "num_warps": 8 if many else 4}
    parts = case.num_groups // case.num_seqs + 2
    together = 8 if parts <= 8 else 16 if parts <= 16 else 32
    columns = 64 if rows <= 32 else 128 if rows <= 256 else 256
    if case.balanced:
        most = 1 << (case.num_groups - 1).bit_length()
        if parts > 32:
            parts = min(parts, case.num_groups)
            together = -(-parts // -(-parts // (66 if columns == 64 else 48)))
        return {"ROWS": 1, "COLUMNS": columns, "TOGETHER": together, "SIDE_BY_SIDE": most, "num_warps": 2}
    return {"ROWS": 1, "COLUMNS": columns, "TOGETHER": together, "SIDE_BY_SIDE": 0, "num_warps": 2}


def _box_within(block_size: int) -> tuple[int, int]:
    """The largest box that never leaves a block that it begins in; where that has few rows, one that is not used."""
    return (block_size & -block_size if block_size % 8 == 0 and block_size % 64 != 0 else BOX[0]), BOX[1]


@functools.lru_cache(maxsize=256)
def _launchers(
    device: torch.device, dtype: torch.dtype, num_heads: int, block_size: int, few: bool, balanced: bool
) -> tuple[dict[str, int | bool], Launcher]:
    """Constants of the kernels around the attention, and its own launcher."""
    units = FEW if few else WIDE
    boxes = block_size % 64 == 0
    if few:
        constants = {
            "NUM_HEADS": num_heads, "BLOCK_SIZE": block_size, "PIECE": units.piece, "GROUP": units.group, "ROWS": FEW_ROWS,
            "BALANCED": balanced, "LOAD_REGS": 40 if boxes else 112, "num_warps": 4, "maxnreg": 240 if boxes else 184,
        }  # fmt: skip
        attend = Launcher(_module("decode_few").attend_few, constants)
    else:
        constants = {
            "NUM_HEADS": num_heads, "BLOCK_SIZE": block_size, "SHORT_PIECE": units.piece, "LONG_SEQ": units.long_seq,
            "LONG_PIECE": units.long_piece, "BALANCED": balanced, "num_warps": 4, "maxnreg": 168,
        }  # fmt: skip
        attend = Launcher(_module("decode_wide").attend_wide, constants)
    return {"NUM_HEADS": num_heads, **units.constants(balanced=balanced)}, attend


@functools.lru_cache(maxsize=256)
def _around(kind: str, device: torch.device, dtype: torch.dtype, constants: tuple[tuple[str, int | bool], ...]) -> Launcher:
    """The launcher of a kernel before or after the attention: one for each set of constants."""
    return Launcher(getattr(_module("schedule"), kind), dict(constants))


@functools.lru_cache(maxsize=1024)
def _kernels(case: _Case) -> _Kernels:
    constants, attend = _launchers(case.device, case.dtype, case.num_heads, case.block_size, case.few, case.balanced)
    step = case.step
    max_seqs = max(32, 1 << (step - 1).bit_length())
    threads = 32 if max_seqs <= 256 else max_seqs // 4  # a single warp waits for no other
    plan = {**constants, "SEQS": max_seqs, "THREADS": threads, "SEQ_COST": case.units.seq_cost, "num_warps": threads // 32}
    shape = _join_shape(case)
    join = {**constants, **shape, "LAUNCHED_EARLY": True, "launch_pdl": True}
    row_programs = -(-case.num_heads * case.max_query_len // shape["ROWS"])
    if shape["ROWS"] > 1:
        # As many as run side by side: in a large batch most find nothing to join.
        row_programs = min(row_programs, -(-8 * num_processors(case.device) // case.num_seqs))
    return _Kernels(
        case=case,
        plan=_around("plan_shares", case.device, case.dtype, tuple(plan.items())),
        attend=attend,
        join=_around("join_parts", case.device, case.dtype, tuple(join.items())),
        step=step,
        num_groups=case.num_groups,
        row_tiles=case.row_tiles,
        rows_per_slot=case.rows_per_slot,
        num_states=case.num_states,
        num_slots=case.units.max_slots(step, case.max_seq_len, case.num_groups, balanced=case.balanced),
        boxes=(WHOLE_BOX, _box_within(case.block_size)) if case.few else (_box_within(case.block_size),),
        join_grid=(row_programs, KV_LORA_RANK // shape["COLUMNS"]),
    )


@attrs.frozen(kw_only=True, eq=False)
class _Share:
    """Sequences of one launch, shared out: the launches' arguments that are the same for every layer."""

    kernels: _Kernels
    given: tuple[torch.Tensor, ...]
    """The block table, where queries start, the plan, where programs leave parts and states, and the flags of the latter."""
    num_seqs: int
    is_last: bool
    tensors: tuple[tuple[Any, ...], ...] = attrs.field(init=False)
    """Arguments of the attention before and behind those of the layer, and the first of `join_parts`."""
    addresses: tuple[tuple[Any, ...], ...] = attrs.field(init=False)
    """The same with addresses for tensors."""
    grids: tuple[tuple[int, int, int], tuple[int, int, int]] = attrs.field(init=False)
    """Programs of the attention, and of `join_parts` with one more sequence for the rows behind the last."""

    def __attrs_post_init__(self) -> None:
        kernels, num_seqs = self.kernels, self.num_seqs
        row_programs, column_programs = kernels.join_grid
        grids = (kernels.num_groups * kernels.row_tiles, 1, 1), (row_programs, num_seqs + self.is_last, column_programs)
        object.__setattr__(self, "tensors", self._arranged(self.given))
        object.__setattr__(self, "addresses", self._arranged(tuple(x.data_ptr() for x in self.given)))
        object.__setattr__(self, "grids", grids)

    def _arranged(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        table, starts, work, part_out, part_stat, *states = given
        numbers = self.given[0].stride(0), self.kernels.num_groups, self.num_seqs
        tiles = () if self.kernels.case.few else (self.kernels.row_tiles,)
        behind = part_out, part_stat, *states, *numbers, *tiles
        return (table, starts, work), behind, (part_out, part_stat, work, starts)


@attrs.frozen(kw_only=True, eq=False)
class HopperPlan:
    """A step's work plan: made on the device at the first layer's call and kept for the others on that stream.

    Parameters
    ----------
    metadata : DecodeMetadata
        The record that it serves.
    balanced : bool
        Which of the two kinds it is.
    captured : bool
        Whether it was made while a CUDA graph was captured: its kernels are part of that graph, and it serves no call outside.
    """

    metadata: DecodeMetadata
    balanced: bool
    captured: bool = False
    _shares: dict[tuple[int, torch.dtype, int], tuple[_Share, ...]] = attrs.field(factory=dict, init=False)

    def shares(self, q: torch.Tensor, stream: int) -> tuple[_Share, ...]:
        """The launches for these heads on this stream.

        What a plan makes while a graph is captured is part of that graph: one made before keeps nothing of it.

        Raises
        ------
        KernelError
            No Triton.
        """
        key = q.shape[1], q.dtype, stream
        found = self._shares.get(key)
        if found is not None and (self.captured or not torch.cuda.is_current_stream_capturing()):
            return found
        made = _share_out(q, self.metadata, stream, balanced=self.balanced)
        if self.captured or not torch.cuda.is_current_stream_capturing():
            self._shares[key] = made
        return made


def _share_out(q: torch.Tensor, metadata: DecodeMetadata, stream: int, *, balanced: bool) -> tuple[_Share, ...]:
    """Launch the plan of each kernel that the step may need, for as many sequences at a time as memory is granted for."""
    num_heads, num_seqs = q.shape[1], metadata.num_seqs
    shares: list[_Share] = []
    for few in (True, False):
        most_rows = num_heads * metadata.max_query_len
        # A record over buffers has capacities for numbers: what is equal there need not be.
        all_alike = not metadata.over_buffers and metadata.num_tokens == num_seqs * metadata.max_query_len
        least_rows = most_rows if all_alike else num_heads
        if (few and least_rows > FEW_ROWS) or (not few and most_rows <= FEW_ROWS):
            continue
        case = _Case(
            device=q.device, dtype=q.dtype, num_heads=num_heads, block_size=metadata.block_size,
            max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len, num_seqs=num_seqs,
            few=few, balanced=balanced,
        )  # fmt: skip
        kernels = _kernels(case)
        rows, groups, states, step = kernels.rows_per_slot, kernels.num_groups, kernels.num_states, kernels.step
        state = FEW_ROWS * KV_LORA_RANK if few else WIDE_ROWS * KV_LORA_RANK // 2
        sizes = kernels.num_slots * rows * KV_LORA_RANK, kernels.num_slots * rows * 2, states * state, states * 2 * WIDE_ROWS
        parts = torch.empty(sum(sizes), dtype=torch.float32, device=q.device).split_with_sizes(sizes)
        for first in range(0, num_seqs, step):
            last = min(first + step, num_seqs)
            size = groups * 4 + 4 + 4 * (last - first)
            plan, flags = torch.empty(size + states, dtype=torch.int32, device=q.device).split_with_sizes((size, states))
            table, starts, lens = rows_side_by_side(metadata)
            if step < num_seqs:
                table, starts, lens = table[first:last], starts[first : last + 1], lens[first:last]
            kernels.plan.way((groups + 1, 1, 1), stream, plan, flags, lens, starts, last - first, groups, states, *case.limits)
            shares.append(
                _Share(
                    kernels=kernels,
                    given=(table, starts, plan, *parts, flags),
                    num_seqs=last - first,
                    is_last=last == num_seqs,
                )
            )
    return tuple(shares)


def attend(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    plan: HopperPlan,
) -> None:
    """Fill `out` and `lse` for every row of q.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, 576)
        Contiguous, bfloat16 or float16, beginning at a multiple of 16 bytes.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, 576)
        Contiguous, in the dtype of q, beginning at a multiple of 16 bytes.
    out : torch.Tensor of shape (num_tokens, num_heads, 512)
        In the dtype of q, contiguous.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        float32.
    softmax_scale : float
        Factor on q.k.
    plan : HopperPlan
        Of the record that says where the rows lie, with at least one sequence.
    """
    stream = raw_stream(q.device)
    scale_log2 = softmax_scale * LOG2_E
    num_tokens, num_heads, _ = q.shape
    num_blocks, block_size, _ = latent_cache.shape
    rows, query_rows = (num_blocks * block_size, LATENT_DIM), (num_tokens * num_heads, LATENT_DIM)
    tail = num_tokens
    given: tuple[Any, ...]
    for share in plan.shares(q, stream):
        kernels, (grid, join_grid) = share.kernels, share.grids
        attention, join = kernels.attend.way, kernels.join.way
        if attention.takes_addresses and join.takes_addresses:
            given = q.data_ptr(), latent_cache.data_ptr(), out.data_ptr(), lse.data_ptr()
            before, behind, parts = share.addresses
        else:
            given = q, latent_cache, out, lse
            before, behind, parts = share.tensors
        q_, cache, out_, lse_ = given
        queries = (q_,) if kernels.case.few else attention.boxes(q, query_rows, LATENT_DIM, BOX)
        boxes = attention.boxes(latent_cache, rows, LATENT_DIM, *kernels.boxes)
        attention(grid, stream, *queries, *boxes, cache, *before, out_, lse_, *behind, scale_log2)
        last = tail if share.is_last else -1
        join(join_grid, stream, *parts, out_, lse_, share.num_seqs, kernels.num_groups, last, kernels.rows_per_slot)
        if share.is_last:
            tail = -1  # filled
