"""What the decode kernels for Hopper share: a program's share of the work, state handed to a neighbour, and joining.

Importing this module imports Triton; `mla.compute.triton_hopper` does so when it launches.

The keys of the batch are one line of tiles, sequence after sequence, and every group of programs takes one stretch of it. A
sequence is summed in *units*: a unit begins where the sequence's own length says and is summed from left to right without a
break. Where a stretch ends inside a unit, the program hands its exact float32 state to the next group, which carries on: so
where stretches end changes no bit.
"""

from __future__ import annotations

from triton.experimental import gluon  # noqa: TID253  (this module is imported inside the launching function only)
from triton.experimental.gluon import language as gl  # noqa: TID253
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma  # noqa: TID253

__all__ = [
    "await_state",
    "barrier",
    "hand_over",
    "let_join_begin",
    "load_box",
    "load_rows",
    "opaque_zero",
    "plan_of_seqs",
    "read_share",
    "scaled",
    "stretch",
    "view_as",
    "weights",
]

# Names up to Triton 3.6, and after.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def opaque_zero():
    """A 0 that the compiler cannot see through: addresses made of it are computed where they are used, not kept."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_join_begin():
    """Let the kernel that joins parts begin where multiprocessors are free: it waits for the end of this one itself."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


def _scale_text(count: int) -> str:
    """PTX that multiplies `count` numbers by factors, unless all factors of the warp are 1.

    A thread has numbers of two rows of a tensor core's result, two by two: the first and the third factor are those of both.
    """
    product = "".join(f"mul.f32 ${i}, ${count + i}, ${2 * count + i};" for i in range(count))
    return (
        "{ .reg .pred p;"
        + "".join(f"mov.f32 ${i}, ${count + i};" for i in range(count))
        + f"setp.neu.f32 p, ${2 * count}, 0f3F800000;"
        + f"setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
        + "vote.sync.any.pred p, p, 0xffffffff;"
        + f"@!p bra.uni DONE; {product} DONE: }}"
    )


AT_ONCE = gl.constexpr(32)
SCALE = gl.constexpr(_scale_text(32))
SCALE_OPERANDS = gl.constexpr(",".join(["=f"] * 32 + ["f"] * 64))


@gluon.jit
def scaled(acc, factor):
    """A tensor core's result times a factor of each row; a warp whose factors are all 1 spares itself the products."""
    factors = gl.broadcast(acc, factor[:, None])[1]
    return gl.inline_asm_elementwise(SCALE, SCALE_OPERANDS, [acc, factors], dtype=gl.float32, is_pure=True, pack=AT_ONCE)


@gluon.jit
def view_as(memory, shape: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory seen in another shape, chunks of 64 columns one after the other."""
    if REINTERPRETS:  # noqa: SIM108  (one of the two does not compile)
        seen = memory.reinterpret(memory.dtype, shape, LAYOUT)
    else:
        seen = memory._reinterpret(memory.dtype, shape, LAYOUT)
    return seen


@gluon.jit
def plan_of_seqs(plan, num_groups, num_seqs):
    """The plan's four numbers of each sequence: keys, first slot for parts, first and last group that attend it.

    Keys are -1 for a sequence that this launch leaves to another, whose new tokens fit another tile.
    """
    at = plan + num_groups * 4 + 4
    return at, at + num_seqs, at + 2 * num_seqs, at + 3 * num_seqs


@gluon.jit
def read_share(plan, lens, group, unit, TILE: gl.constexpr, BALANCED: gl.constexpr):
    """A group's share of the tiles, from (first_seq, first_tile) to (last_seq, end_tile), and where its three parts meet.

    The unit that the share's end cuts off comes first, so that its state is there before the neighbour wants it; then the
    whole units; the unit that the share's start cut off comes last. `unit` is in tiles. BALANCED knows no units: all is one
    part. For few rows; those of many are walked otherwise (`mla.compute.triton_decode_wide_load_kernels.share_of`).

    Returns
    -------
    tuple of (first_seq, first_tile, whole, last_seq, tail, end_tile)
        Whole units begin at tile `whole` of the first sequence, the one cut off at the end at tile `tail` of the last.
    """
    first_seq = gl.load(plan + group * 4)
    first_tile = gl.load(plan + group * 4 + 1)
    last_seq = gl.load(plan + group * 4 + 2)
    end_tile = gl.load(plan + group * 4 + 3)
    whole = first_tile
    tail = end_tile
    if not BALANCED:
        first_tiles = (gl.load(lens + first_seq) + TILE - 1) // TILE
        last_tiles = (gl.load(lens + last_seq) + TILE - 1) // TILE
        whole = gl.minimum((first_tile + unit - 1) // unit * unit, first_tiles)
        whole = gl.where(first_seq == last_seq, gl.minimum(whole, end_tile), whole)
        tail = end_tile // unit * unit
        tail = gl.where(first_seq == last_seq, gl.maximum(tail, whole), tail)
        tail = gl.where(end_tile < last_tiles, tail, end_tile)
    return first_seq, first_tile, whole, last_seq, tail, end_tile


@gluon.jit
def stretch(part, share):
    """Part 0, 1 or 2 of a share: (first_seq, first_tile, last_seq, end_tile)."""
    first_seq = gl.where(part == 0, share[3], share[0])
    first_tile = gl.where(part == 0, share[4], gl.where(part == 1, share[2], share[1]))
    last_seq = gl.where(part == 2, share[0], share[3])
    end_tile = gl.where(part == 0, share[5], gl.where(part == 1, share[4], share[2]))
    return first_seq, first_tile, last_seq, end_tile


@gluon.jit
def await_state(flag):
    """Wait until the neighbour has handed over, and take the flag down for the next launch."""
    at = flag.to(gl.int64)
    seen = gl.inline_asm_elementwise("ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)
    while seen == 0:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
        )
    barrier()
    gl.store(flag, 0)


@gluon.jit
def hand_over(flag):
    """Tell the neighbour that all that this group of four warps has stored is there."""
    barrier()
    gl.atomic_add(flag, 1, sem="release", scope="gpu")


@gluon.jit
def weights(high, part_high):
    """Joining what has been summed with a part: the new maximum, and the factors of either (base 2).

    Joined is ``fma(part, second, summed * first)``, everywhere in this order. Nothing summed yet (-inf, 0) leaves the bits of
    the part as they are; neither having seen a key stays so.
    """
    new_high = gl.maximum(high, part_high)
    shift = gl.where(new_high == float("-inf"), 0.0, new_high)
    return new_high, gl.exp2(high - shift), gl.exp2(part_high - shift)
