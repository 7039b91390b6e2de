"""What a wrong result looks like: the float64 attention again, under one mistake after the other, until one matches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import attrs
import torch

from mla.golden.bundle import Tolerance
from mla.golden.case import GoldenCase
from mla.golden.compare import close, errors_of, place
from mla.golden.inputs import CaseInputs, part_of

__all__ = ["Problem", "diagnose"]

MAX_BLOCK_PAIRS = 1 << 20
LN2 = math.log(2)
DEEPSEEK_V3_LATENT_DIM = 576
"""A width that kernels have as a literal."""


@attrs.frozen(kw_only=True, eq=False)
class Query:
    """One new token.

    Parameters
    ----------
    seq : int
        Its sequence.
    offset : int
        Which of the sequence's new tokens it is.
    visible : int
        Keys that it sees.
    """

    seq: int
    offset: int
    visible: int


Choose = Callable[["Problem", Query], torch.Tensor]
"""Cache slots of the keys that a query sees."""


@attrs.frozen(kw_only=True, eq=False)
class Problem:
    """A case as plain float64 attention over cache rows, all at once and open to mistakes.

    Parameters
    ----------
    case : GoldenCase
        The numbers.
    q : torch.Tensor of shape (num_tokens, num_heads, width), float64
        Queries.
    keys, values : torch.Tensor of shape (num_slots, num_heads or 1, width), float64
        Of every cache row, NaN where no key lies.
    queries : tuple of Query
        The new tokens that are none of padding.
    slots : tuple of torch.Tensor of shape (seq_len,), int64
        Cache slots of each sequence, in order.
    context_lens : tuple of int
        Cached tokens of each sequence.
    """

    case: GoldenCase
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: tuple[Query, ...]
    slots: tuple[torch.Tensor, ...]
    context_lens: tuple[int, ...]

    @classmethod
    def of(cls, case: GoldenCase, inputs: CaseInputs) -> Problem:
        """The problem of a case; `inputs` as `make_inputs` made them.

        Raises
        ------
        GoldenError
            Inputs of prompts and decoding sequences together.
        """
        dims, part = case.dims, part_of(inputs.metadata)
        wide = inputs.to(dtype=torch.float64)
        rows = wide.written_cache().reshape(-1, dims.latent_dim)
        if wide.kv_b_proj is None:
            keys, values = rows[:, None], rows[:, None, : dims.kv_lora_rank]
        else:
            weight = wide.kv_b_proj.reshape(dims.num_heads, -1, dims.kv_lora_rank)
            up = torch.einsum("sc,hdc->shd", rows[:, : dims.kv_lora_rank], weight)
            shared = rows[:, None, dims.kv_lora_rank :].expand(-1, dims.num_heads, -1)
            keys, values = torch.cat([up[..., : dims.qk_nope_head_dim], shared], dim=2), up[..., dims.qk_nope_head_dim :]
        starts, seq_lens = part.query_start_loc.tolist(), part.seq_lens.tolist()
        table = part.block_table
        queries, slots = [], []
        for seq, length in enumerate(seq_lens):
            positions = torch.arange(length)
            blocks = positions if table is None else table[seq][positions // case.block_size].long()
            slots.append(blocks * case.block_size + positions % case.block_size)
            new = starts[seq + 1] - starts[seq]
            queries += [Query(seq=seq, offset=t, visible=length - new + t + 1) for t in range(new)]
        return cls(
            case=case,
            q=wide.q,
            keys=keys,
            values=values,
            queries=tuple(queries),
            slots=tuple(slots),
            context_lens=tuple(part.context_lens.tolist()),
        )

    def own(self, query: Query) -> torch.Tensor:
        """Slots of the keys that a query ought to see."""
        return self.slots[query.seq][: query.visible]

    def scores(self, token: int, slots: torch.Tensor, scale: float, q: torch.Tensor) -> torch.Tensor:
        """Of one token with these keys, (num_heads, num_keys)."""
        keys = self.keys[slots]
        return torch.einsum("hd,shd->hs", q[token], keys.expand(-1, q.shape[1], -1)) * scale

    def attend(
        self, *, choose: Choose = own, scale: float | None = None, q: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of all tokens, right or under a mistake.

        Parameters
        ----------
        choose : callable
            Slots of the keys that a query sees.
        scale : float or None
            Factor on q.k; None for the case's.
        q : torch.Tensor of shape (num_tokens, num_heads, width), float64, or None
            Other queries.
        """
        q = self.q if q is None else q
        heads = q.shape[1]
        out = q.new_zeros(len(q), heads, self.values.shape[2])
        lse = q.new_full((len(q), heads), -torch.inf)
        for token, query in enumerate(self.queries):
            slots = choose(self, query)
            if not len(slots):
                continue
            scores = self.scores(token, slots, self.case.dims.softmax_scale if scale is None else scale, q)
            lse[token] = scores.logsumexp(dim=1)
            out[token] = torch.einsum("hs,shv->hv", scores.softmax(dim=1), self.values[slots].expand(-1, heads, -1))
        return out, lse

    def merge(self, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of prompts whose parts (new tokens, then every chunk of the context) are merged by `factor` times LSE.

        Parameters
        ----------
        factor : float
            1 is right; 1 / ln 2 takes an LSE for one in base 2, 0 weighs all parts alike.
        """
        size = self.case.context_chunk_tokens
        seen: list[Choose] = [_new_tokens]
        seen += [functools.partial(_chunk, first=first, size=size) for first in range(0, max(self.context_lens), size)]
        parts = [self.attend(choose=choose) for choose in seen]
        lses = torch.stack([torch.where(lse.isneginf(), lse, lse * factor) for _, lse in parts])
        total = lses.logsumexp(dim=0)
        weights = torch.where(lses.isneginf(), 0.0, (lses - total).exp())
        return (weights[..., None] * torch.stack([out for out, _ in parts])).sum(dim=0), total


def _scales(problem: Problem) -> Iterator[tuple[str, float]]:
    """Scales that are taken by mistake, each once, with all that it may come from."""
    dims = problem.case.dims
    right = dims.softmax_scale
    widths = [("latent_dim", dims.latent_dim), ("qk_head_dim", dims.qk_head_dim), ("kv_lora_rank", dims.kv_lora_rank)]
    widths += [("qk_nope_head_dim", dims.qk_nope_head_dim), ("v_head_dim", dims.v_head_dim)]
    if dims.latent_dim != DEEPSEEK_V3_LATENT_DIM:
        widths.append(("a literal, latent_dim of DeepSeek-V3", DEEPSEEK_V3_LATENT_DIM))
    scales = [(f"{width} ** -0.5 ({name})", width**-0.5) for name, width in widths]
    scales += [("no scale at all", 1.0), ("the right one squared", right**2), ("the right one times log2(e)", right / LN2)]
    scales += [("the right one times ln 2", right * LN2), ("the right one inverted", 1 / right)]
    while scales:
        scale = scales[0][1]
        equal = [name for name, other in scales if math.isclose(other, scale, rel_tol=1e-6)]
        scales = [pair for pair in scales if pair[0] not in equal]
        if not math.isclose(scale, right, rel_tol=1e-6):
            yield " or ".join(equal), scale


def _cut(problem: Problem, query: Query, visible: int) -> torch.Tensor:
    return problem.slots[query.seq][: max(visible, 0)]


def _new_tokens(problem: Problem, query: Query) -> torch.Tensor:
    return problem.own(query)[problem.context_lens[query.seq] :]


def _chunk(problem: Problem, query: Query, *, first: int, size: int) -> torch.Tensor:
    return problem.slots[query.seq][first : min(first + size, problem.context_lens[query.seq])]


def _whole_blocks(problem: Problem, query: Query) -> torch.Tensor:
    size = problem.case.block_size
    return _cut(problem, query, query.visible // size * size)


KEYS: list[tuple[str, Choose]] = [
    ("the last key were not attended", lambda p, x: _cut(p, x, min(x.visible, len(p.slots[x.seq]) - 1))),
    ("the last key of every query were not attended", lambda p, x: _cut(p, x, x.visible - 1)),
    ("the first key were not attended", lambda p, x: p.own(x)[1:]),
    ("every query saw the key after its own (causal mask off by one)", lambda p, x: _cut(p, x, x.visible + 1)),
    ("there were no causal mask", lambda p, x: p.slots[x.seq]),
    ("the causal mask were aligned at the first key (top-left)", lambda p, x: _cut(p, x, x.offset + 1)),
    ("the cached context were not attended", _new_tokens),
    ("only the cached context were attended", lambda p, x: _cut(p, x, p.context_lens[x.seq])),
    ("the last, partly filled block were not attended", _whole_blocks),
    ("only the first block were attended", lambda p, x: _cut(p, x, min(x.visible, p.case.block_size))),
]
"""Keys that are seen by mistake."""


def _mistakes(problem: Problem) -> Iterator[tuple[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]]:
    """Sentences, each with the results of the mistake that it names."""
    dims, right = problem.case.dims, problem.case.dims.softmax_scale
    for name, scale in _scales(problem):
        sentence = f"looks like softmax_scale {scale:.7g} = {name}, expected {right:.7g}"
        yield sentence, functools.partial(problem.attend, scale=scale)
    for name, choose in KEYS:
        yield f"looks as if {name}", functools.partial(problem.attend, choose=choose)
    if problem.case.kind == "chunked_context":
        yield "looks as if the parts of a context were merged by an LSE in base 2", functools.partial(problem.merge, 1 / LN2)
        yield "looks as if the parts of a context were averaged and not merged by LSE", functools.partial(problem.merge, 0.0)
    plain = problem.q.clone()
    plain[..., -dims.qk_rope_head_dim :] = 0
    yield "looks as if the k_pe columns did not count in the scores", functools.partial(problem.attend, q=plain)
    rotated = problem.q.clone()
    rotated[..., : -dims.qk_rope_head_dim] = 0
    yield "looks as if only the k_pe columns counted in the scores", functools.partial(problem.attend, q=rotated)


def diagnose(
    case: GoldenCase,
    inputs: CaseInputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    expected_out: torch.Tensor,
    expected_lse: torch.Tensor,
    tolerance: Tolerance,
) -> list[str]:
    """Sentences on what wrong results look like; empty where they are right or like nothing known.

    Parameters
    ----------
    case : GoldenCase
        The numbers.
    inputs : CaseInputs
        As `make_inputs` made them, before a kernel wrote to the cache.
    out, expected_out : torch.Tensor of shape (num_tokens, num_heads, width), float64
        Outputs.
    lse, expected_lse : torch.Tensor of shape (num_tokens, num_heads), float64
        Natural logarithms.
    tolerance : Tolerance
        How close a mistake must come to be named.
    """
    good_out, good_lse = close(errors_of(out, lse, expected_out, expected_lse), tolerance)
    if good_out and good_lse:
        return []
    problem = Problem.of(case, inputs)
    right = problem.attend()
    if not all(close(errors_of(*right, expected_out, expected_lse), _EXACT)):
        return ["the bundle itself looks damaged: its reference is not what its case gives in float64"]
    found = _lse_alone(lse, expected_lse, tolerance) if not good_lse else []
    if good_out:
        return found or _mistaken(problem, out, lse, tolerance, lse_alone=True)
    found += _mistaken(problem, out, lse, tolerance) or _read_elsewhere(problem, out, lse, tolerance)
    return found or _moved(out, expected_out, expected_lse, tolerance)


_EXACT = Tolerance(out_rel=1e-9, lse_abs=1e-9)


def _mistaken(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, tolerance: Tolerance, *, lse_alone: bool = False
) -> list[str]:
    """The mistake of the table that gives these results best, and what is wrong with the LSE even so."""
    right_out, right_lse = problem.attend()
    found: list[tuple[float, list[str]]] = []
    for sentence, make in _mistakes(problem):
        wrong = make()
        moved_out, moved_lse = (not good for good in close(errors_of(*wrong, right_out, right_lse), tolerance))
        errors = errors_of(out, lse, *wrong)
        same_out, same_lse = close(errors, tolerance)
        if (moved_lse and same_lse) if lse_alone else (moved_out and same_out):
            rest = [] if same_lse else _lse_alone(lse, wrong[1], tolerance)
            found.append((errors.lse_abs if lse_alone else errors.out_rel, [sentence, *rest]))
    return min(found, key=lambda pair: pair[0])[1] if found else []


def _lse_alone(lse: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> list[str]:
    """The LSE in another base, with another sign, or as a sum and no logarithm."""
    for sentence, wrong in (
        ("LSE is the expected one divided by ln 2: base 2?", expected / LN2),
        ("LSE is the expected one times ln 2: converted from base 2 twice?", expected * LN2),
        ("LSE is the expected one divided by ln 10: base 10?", expected / math.log(10)),
        ("LSE is the expected one with the other sign", -expected),
    ):
        rows = expected.isfinite()
        off = (lse - wrong)[rows].abs()
        if off.numel() and float(off.max()) <= 2 * tolerance.lse_abs:
            return [sentence]
    sums = expected.isfinite()
    if sums.any() and torch.allclose(lse[sums], expected[sums].exp(), rtol=2 * tolerance.lse_abs, atol=0):
        return ["LSE is the sum of exponentials itself: logarithm missing?"]
    return []


def _read_elsewhere(problem: Problem, out: torch.Tensor, lse: torch.Tensor, tolerance: Tolerance) -> list[str]:
    """Blocks taken for others: one sequence's for another's, or a single block."""
    nan = out.isnan()
    found = []
    if bool(nan.any()):
        first = int(nan.flatten().nonzero()[0])
        found.append(
            f"{int(nan.sum())} of {nan.numel()} outputs are NaN, first at {place(first, out.shape)}: looks as if cache rows "
            "were read that no key lies in (they hold NaN here)"
        )
    right_out, right_lse = problem.attend()
    seen = set()
    for token, query in enumerate(problem.queries):
        rows = slice(token, token + 1)
        results = out[rows], lse[rows]
        if query.seq in seen or nan[token].any():
            continue
        if all(close(errors_of(*results, right_out[rows], right_lse[rows]), tolerance)):
            continue
        sentence = _other_block(problem, token, results, tolerance) or _other_sequence(problem, token, results, tolerance)
        if sentence:
            seen.add(query.seq)
            found.append(sentence)
    return found[:4]


def _one(problem: Problem, token: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of one token over other keys."""
    single = attrs.evolve(problem, q=problem.q[token : token + 1], queries=problem.queries[token : token + 1])
    return single.attend(choose=lambda _, __: slots)


def _other_sequence(
    problem: Problem, token: int, results: tuple[torch.Tensor, torch.Tensor], tolerance: Tolerance
) -> str | None:
    query = problem.queries[token]
    for seq, slots in enumerate(problem.slots):
        if seq != query.seq and len(slots) >= query.visible > 0:
            wrong = _one(problem, token, slots[: query.visible])
            if all(close(errors_of(*results, *wrong), tolerance)):
                return f"looks as if sequence {query.seq} read the blocks of sequence {seq}"
    return None


def _other_block(problem: Problem, token: int, results: tuple[torch.Tensor, torch.Tensor], tolerance: Tolerance) -> str | None:
    """One block of the sequence for which another of the cache was read: found by the LSE, proven by the output."""
    query, size = problem.queries[token], problem.case.block_size
    own = problem.own(query)
    num_blocks, count = len(problem.keys) // size, -(-len(own) // size)
    if count * num_blocks > MAX_BLOCK_PAIRS:
        return None
    scores = problem.scores(token, torch.arange(len(problem.keys)), problem.case.dims.softmax_scale, problem.q)
    top = scores[:, own].amax(dim=1, keepdim=True)
    weights = (scores - top).exp().view(len(scores), num_blocks, size)
    held = weights.reshape(len(scores), -1)[:, own]
    observed = (results[1][0] - top[:, 0]).exp()
    for i in range(count):
        length = min(size, len(own) - i * size)
        others = held.sum(dim=1) - held[:, i * size : i * size + length].sum(dim=1)
        totals = others[:, None] + weights[:, :, :length].sum(dim=2)
        near = ((totals.log() - observed[:, None].log()).abs() <= 2 * tolerance.lse_abs).all(dim=0)
        for block in near.nonzero().flatten().tolist():
            slots = own.clone()
            slots[i * size : i * size + length] = block * size + torch.arange(length)
            if not torch.equal(slots, own) and all(close(errors_of(*results, *_one(problem, token, slots)), tolerance)):
                right = int(own[i * size]) // size
                return f"looks as if sequence {query.seq} read block {block} of the cache as its block {i}, expected {right}"
    return None


def _moved(out: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor, tolerance: Tolerance) -> list[str]:
    """Right numbers in the wrong row, times a factor, or in rows that see no key."""
    empty = expected_lse.isneginf()
    if bool(empty.any()) and not bool((out[empty] == 0).all()):
        row = int(empty.flatten().nonzero()[0])
        return [f"row {place(row, empty.shape)} sees no key: expected an output of 0 and an LSE of -inf"]
    if not bool(out.isfinite().all()):
        return []
    norm = float(expected.square().sum())
    factor = float((out * expected).sum()) / norm if norm else 1.0
    lse = torch.zeros(out.shape[:2], dtype=torch.float64)
    if abs(factor) > tolerance.out_rel and close(errors_of(out / factor, lse, expected, lse), tolerance)[0]:
        return [f"looks like the expected output times {factor:.6g}"]
    flat, wanted = out.flatten(0, 1), expected.flatten(0, 1)
    scale = torch.linalg.vector_norm(wanted, dim=1).clamp(min=1e-300)
    off = torch.cdist(flat, wanted, compute_mode="donot_use_mm_for_euclid_dist") / scale
    wrong = (off.diagonal() > 4 * tolerance.out_rel).nonzero().flatten().tolist()
    for row in wrong:
        nearest = int(off[row].argmin())
        if nearest != row and float(off[row, nearest]) <= 4 * tolerance.out_rel:
            here, there = place(row, out.shape[:2]), place(nearest, out.shape[:2])
            return [f"row {here} (token, head) has what is expected in row {there}: rows or heads permuted?"]
    return []
