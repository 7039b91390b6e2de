"""Around the decode kernels for Hopper, interpreted on the CPU: who attends what, and the joining of parts.

The kernels between the two run on a card only (``pytest -m gpu tests/test_triton_decode.py``). Triton decides at import whether
it compiles or interprets, so these tests run in a process of their own, which `test_under_the_interpreter` starts.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from triton_here import needs_interpreter

from mla.compute.triton_hopper import FEW, FEW_ROWS, WIDE, WIDE_ROWS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")
UNITS = {"few": FEW, "wide": WIDE}
LIMITS = (0, 2**31 - 1)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@needs_interpreter
def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """What the kernel has written, read on the host."""

    buffer: torch.Tensor
    shares: list[tuple[int, int, int, int]]
    is_apart: bool
    keys: list[int]
    slots: list[int]
    first_groups: list[int]
    last_groups: list[int]

    def stretches(self, units):
        """For each sequence the (first tile, end tile, group) that attend it, in the order of groups."""
        tiles = [-(-max(n, 0) // units.tile) for n in self.keys]
        found = [[] for _ in tiles]
        for group, (first_seq, first_tile, last_seq, end_tile) in enumerate(self.shares):
            for seq in range(first_seq, last_seq + 1):
                begin = first_tile if seq == first_seq else 0
                end = end_tile if seq == last_seq else tiles[seq]
                if end > begin:
                    found[seq].append((begin, end, group))
        return found


def plan_of(lens, units, num_groups, *, balanced, query_lens=None, num_heads=16, limits=LIMITS):
    from mla.compute.triton_schedule_kernels import plan_shares  # noqa: PLC0415

    num_seqs = len(lens)
    max_seqs = max(32, 1 << (num_seqs - 1).bit_length())
    starts = torch.tensor([0, *(query_lens or [1] * num_seqs)], dtype=torch.int32).cumsum(0).to(torch.int32)
    buffer = torch.full((num_groups * 4 + 4 + 4 * num_seqs,), -7, dtype=torch.int32)
    flags = torch.full((70,), 5, dtype=torch.int32)
    plan_shares[(num_groups + 1, 1, 1)](
        buffer, flags, torch.tensor(lens, dtype=torch.int32), starts, num_seqs, num_groups, 65, *limits,
        NUM_HEADS=num_heads, **units.constants(balanced=balanced), SEQS=max_seqs,
        THREADS=max(32, max_seqs // 4), SEQ_COST=units.seq_cost,
    )  # fmt: skip
    assert flags.tolist() == [0] * 65 + [5] * 5
    keys, slots, first_groups, last_groups = buffer[num_groups * 4 + 4 :].view(4, num_seqs).tolist()
    return Plan(
        buffer=buffer,
        shares=buffer[: num_groups * 4].view(-1, 4).tolist(),
        is_apart=bool(buffer[num_groups * 4]),
        keys=keys,
        slots=slots,
        first_groups=first_groups,
        last_groups=last_groups,
    )


def piece_of(units, num_keys):
    return units.long_piece if num_keys > units.long_seq else units.piece


def batches():
    gen = random.Random(5)
    yield from (
        [1],
        [3, 64, 65, 130, 1000, 600],
        [70000],
        [0, 0],
        [8192] * 13,
        [4096] * 5,
        [0, 5, 0, 64, 65],
        [512] * 40,
        [40000, 33000, 100],
        [gen.choice([0, gen.randint(1, 3000)]) for _ in range(300)],  # several warps, each thread with several sequences
    )
    for _ in range(7):
        top = gen.choice([100, 3000, 16384, 70000])
        yield [gen.randint(0, top) for _ in range(gen.choice([1, 2, 3, 8, 31]))]


@interpreted
@pytest.mark.parametrize(("kind", "balanced"), [("few", True), ("wide", True), ("wide", False)])
def test_beginning_a_sequence_counts_where_sequences_differ(kind, balanced):
    """Of a batch of short and long sequences, those who get the short ones get fewer tiles."""
    units, num_groups = UNITS[kind], 6
    lens = [64 * units.tile] * 3 + [4 * units.tile] * 48
    plan = plan_of(lens, units, num_groups, balanced=balanced)
    costs = [0.0] * num_groups
    for own in plan.stretches(units):
        for begin, end, group in own:
            costs[group] += end - begin + (units.seq_cost if begin == 0 else 0)
    mean = sum(-(-n // units.tile) + units.seq_cost for n in lens) / num_groups
    assert sum(costs) == num_groups * mean
    assert all(abs(cost - mean) <= 4 + 2 * mean / 28 for cost in costs), costs
    counts = [sum(group == own[2] for seq in plan.stretches(units) for own in seq) for group in range(num_groups)]
    assert max(counts) > 3 * min(counts), "the batch is as said"


@interpreted
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("kind", UNITS)
def test_shares_cover_the_batch(kind, balanced):
    """Every tile once, in key order; units cut by a share's end go to the next group; slots and groups are as read."""
    units = UNITS[kind]
    for number, lens in enumerate(batches()):
        num_groups = (7, 40, 1)[number % 3] if number < 6 else (7, 24, 1)[number % 3]
        plan = plan_of(lens, units, num_groups, balanced=balanced)
        assert plan.keys == lens
        stretches = plan.stretches(units)
        next_slot = 0
        for seq, (num_keys, own) in enumerate(zip(lens, stretches, strict=True)):
            tiles = -(-num_keys // units.tile)
            ends = [end for _, end, _ in own]
            assert [begin for begin, _, _ in own] == ([0, *ends[:-1]] if own else [])
            assert (ends[-1] if own else 0) == tiles
            if own:
                assert (plan.first_groups[seq], plan.last_groups[seq]) == (own[0][2], own[-1][2])
            if balanced:
                if own:
                    group = own[0][2]
                    assert [group for _, _, group in own] == [*range(group, own[-1][2] + 1)]
                    assert plan.slots[seq] == 2 * group + (plan.shares[group][0] != seq)
                continue
            piece = piece_of(units, num_keys)
            unit = piece if plan.is_apart else piece * units.group
            if units.group > 1:
                assert all(end % piece == 0 for end in ends[:-1])
            for (_, end, group), (_, _, neighbour) in itertools.pairwise(own):
                assert end % unit == 0 or neighbour == group + 1
            for first in range(0, tiles, unit):
                assert sum(begin < first + unit and end > first for begin, end, _ in own) <= 2, "a unit is handed over once"
            assert plan.slots[seq] == next_slot
            parts = -(-tiles // unit)
            next_slot += parts if parts > 1 else 0
        assert next_slot <= units.max_slots(len(lens), max(*lens, 1), num_groups, balanced=balanced)


@interpreted
def test_shares_are_even():
    """The longest share of a large batch is near the mean: what a launch takes is its longest share."""
    gen = random.Random(7)
    ragged = [gen.randint(1, 16384) for _ in range(24)]
    for kind, lens, limit in (
        ("few", ragged, 1.13),
        ("wide", ragged, 1.06),
        ("few", [8192] * 24, 1.0),
        ("wide", [8192] * 24, 1.0),
    ):
        for balanced in (False, True):
            plan = plan_of(lens, UNITS[kind], 24, balanced=balanced)
            cost = UNITS[kind].seq_cost if lens is ragged and (balanced or kind == "wide") else 0
            loads = [0] * 24
            for own in plan.stretches(UNITS[kind]):
                for begin, end, group in own:
                    loads[group] += end - begin + (cost if begin == 0 else 0)
            assert max(loads) / (sum(loads) / 24) <= (1.05 if balanced and lens is ragged else limit)


@interpreted
def test_other_launches_sequences_are_left_alone():
    plan = plan_of([700, 700, 0, 900], FEW, 5, balanced=False, query_lens=[1, 3, 1, 0], limits=(0, FEW_ROWS))
    assert plan.keys == [700, -1, 0, -1]
    assert [bool(own) for own in plan.stretches(FEW)] == [True, False, False, False]
    plan = plan_of([700, 700, 0, 900], WIDE, 5, balanced=False, query_lens=[1, 3, 1, 0], limits=(FEW_ROWS, LIMITS[1]))
    assert plan.keys == [-1, 700, -1, -1]


def joined(pieces, group):
    """(out, maximum, sum) of pieces in base 2, joined in the kernels' order; float32 throughout."""

    def join(left, right):
        high = torch.maximum(left[1], right[1])
        shift = torch.where(high == -torch.inf, 0.0, high)
        first, second = torch.exp2(left[1] - shift), torch.exp2(right[1] - shift)
        # fma: the product is not rounded before it is added.
        out = (right[0].double() * second.double()[:, None] + (left[0] * first[:, None]).double()).float()
        return out, high, (right[2].double() * second.double() + (left[2] * first).double()).float()

    rows = len(pieces[0][1])
    nothing = torch.zeros(rows, 512), torch.full((rows,), -torch.inf), torch.zeros(rows)
    whole = nothing
    for first in range(0, len(pieces), group):
        one = nothing
        for piece in pieces[first : first + group]:
            one = join(one, piece)
        whole = join(whole, one)
    return whole


@interpreted
@pytest.mark.parametrize("columns", [64, 512])
@pytest.mark.parametrize(("kind", "balanced", "lens", "num_groups", "side_by_side"), [
    ("few", False, [9000, 100, 0, 5000, 600], 9, 0),  # pieces stay apart
    ("few", False, [9000, 100, 0, 30000, 600], 2, 0),  # groups are joined, cut sequences only
    ("wide", False, [9000, 100, 0, 70000, 600], 3, 0),
    ("few", True, [9000, 100, 0, 5000, 600], 9, 0),
    ("wide", True, [9000, 100, 0, 5000, 600], 5, 0),
    ("few", True, [9000, 100, 0, 5000, 600], 9, 16),
    ("wide", True, [90000, 100, 0, 5000, 600], 23, 32),
])  # fmt: skip
def test_parts_are_joined_in_order(kind, balanced, lens, num_groups, side_by_side, columns):
    """Left to right, groups first; rows without keys and rows behind the last sequence are cleared."""
    from mla.compute.triton_schedule_kernels import join_parts  # noqa: PLC0415

    units, num_heads, num_tokens = UNITS[kind], 3, len(lens) + 2
    rows = FEW_ROWS if kind == "few" else WIDE_ROWS
    plan = plan_of(lens, units, num_groups, balanced=balanced, num_heads=num_heads)
    num_slots = units.max_slots(len(lens), max(lens), num_groups, balanced=balanced)
    gen = torch.Generator().manual_seed(3)
    part_out = torch.full((num_slots, rows, 512), torch.nan)
    part_stat = torch.full((num_slots, 2, rows), torch.nan)
    out = torch.full((num_tokens, num_heads, 512), 7.0)
    lse = torch.full((num_tokens, num_heads), 7.0)
    want_out, want_lse = out.clone(), lse.clone()
    for seq, own in enumerate(plan.stretches(units)):
        tiles = -(-lens[seq] // units.tile)
        piece = piece_of(units, lens[seq])
        if balanced:
            slots = [2 * group + (plan.shares[group][0] != seq) for _, _, group in own]
            apart = 1
        else:
            unit = piece if plan.is_apart or units.group == 1 else piece * units.group
            slots = [plan.slots[seq] + i for i in range(-(-tiles // unit))]
            apart = units.group if plan.is_apart else 1
            if units.group > 1 and len(own) == 1:
                slots = slots[:1]  # attended by one program, which has stored the result
        if len(slots) > 1:
            pieces = []
            for slot in slots:
                high = torch.randn(num_heads, generator=gen) * 8
                high[slot % 3] = -torch.inf if slot % 2 else high[slot % 3]
                seen = high.isfinite().float()
                made = (
                    torch.randn(num_heads, 512, generator=gen) * seen[:, None],
                    high,
                    torch.rand(num_heads, generator=gen) * seen,
                )
                part_out[slot, :num_heads], part_stat[slot, 0, :num_heads], part_stat[slot, 1, :num_heads] = made
                pieces.append(made)
            acc, high, total = joined(pieces, apart)
            want_out[seq] = acc / total[:, None]
            want_lse[seq] = (high + total.log2()) * 0.6931471805599453
    for blind in (lens.index(0), len(lens), len(lens) + 1):
        want_out[blind], want_lse[blind] = 0, -torch.inf
    starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    join_parts[(3 if side_by_side else 2, len(lens) + 1, 512 // columns)](
        part_out, part_stat, plan.buffer, starts, out, lse, len(lens), num_groups, num_tokens, rows,
        NUM_HEADS=num_heads, **units.constants(balanced=balanced),
        ROWS=1 if side_by_side else 2, COLUMNS=columns, TOGETHER=8, SIDE_BY_SIDE=side_by_side, LAUNCHED_EARLY=False,
    )  # fmt: skip
    torch.testing.assert_close(out, want_out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)
