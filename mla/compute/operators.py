"""The kernels of a set as custom operators of torch: what `torch.compile` and autograd see of them.

An operator is opaque. `torch.compile` puts it into its graph as one call, with shapes from a fake implementation, so compiled
code runs the very kernel that eager code runs; autograd takes the formula of `mla.compute.gradients` for it. Operators take
tensors and numbers only: `paged_decode` gets the fields of its record, makes the record again inside, and its plan with it.

Eager code without gradients calls the Python functions themselves, without torch's dispatcher.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import attrs
import torch

from mla._checks import check_instance
from mla.compute.contracts import GatherLatentCache, PagedDecode, Plan, VarlenAttention, WriteLatentCache
from mla.compute.gradients import backward_of_varlen, save_for_varlen
from mla.compute.kernels import KernelSet, refuse_gradients
from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata, PagedKV

__all__ = ["as_operators", "operator_names"]

NAMESPACE = "mla"
DECODE = (
    "(Tensor q, Tensor latent_cache, Tensor query_start_loc, Tensor seq_start_loc, Tensor seq_lens, Tensor context_lens, "
    "Tensor slot_mapping, Tensor positions, Tensor block_table, Tensor[] paged_kv, SymInt[] page_sizes, SymInt block_size, "
    "SymInt max_query_len, SymInt max_seq_len, SymInt min_num_blocks, bool over_buffers, SymInt kv_lora_rank, "
    "float softmax_scale) -> (Tensor, Tensor)"
)
VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor kv_start_loc, SymInt max_query_len, SymInt max_kv_len, "
    "bool causal, float softmax_scale) -> (Tensor, Tensor)"
)
WRITE = "(Tensor(a!) latent_cache, Tensor kv_c, Tensor k_pe, Tensor slot_mapping) -> ()"
GATHER = "(Tensor latent_cache, Tensor slots, Tensor(a!) out) -> ()"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


@attrs.frozen(kw_only=True, eq=False)
class _Functions:
    """The four functions of a set."""

    paged_decode: PagedDecode
    varlen_attention: VarlenAttention
    write_latent_cache_: WriteLatentCache
    gather_latent_cache: GatherLatentCache

    @classmethod
    def of(cls, kernels: KernelSet) -> _Functions:
        return cls(**{field.name: getattr(kernels, field.name) for field in attrs.fields(cls)})

    def same_as(self, other: _Functions) -> bool:
        return all(_is_same(x, y) for x, y in zip(self.all(), other.all(), strict=True))

    def all(self) -> tuple[Callable[..., Any], ...]:
        return attrs.astuple(self, recurse=False)


@attrs.frozen(kw_only=True, eq=False)
class _Registered:
    """What has been made of a set: the functions that were given, and those that know the operators."""

    prefix: str
    kind: tuple[str, int | None, bool]
    given: _Functions
    made: _Functions

    @property
    def page_size(self) -> int | None:
        return self.kind[1]


_registered: list[_Registered] = []  # operators cannot be unregistered, so this only grows, as torch's own table does


def _is_same(x: object, y: object) -> bool:
    """Whether two functions do the same: partial ones, over records, are made anew with every set."""
    if isinstance(x, functools.partial) and isinstance(y, functools.partial):
        pairs = ((x.func, *x.args, *x.keywords.values()), (y.func, *y.args, *y.keywords.values()))
        return list(x.keywords) == list(y.keywords) and len(pairs[0]) == len(pairs[1]) and all(map(_is_same, *pairs))
    return x is y or (attrs.has(type(x)) and bool(x == y))


def as_operators(kernels: KernelSet) -> KernelSet:
    """The same set, with kernels that `torch.compile` can put into a graph and that prompts can be differentiated through.

    The sets of `mla.compute.kernel_set` are such sets already; a set of your own becomes one here. Its functions are registered
    with torch as ``mla::<name>_paged_decode``, ``_varlen_attention``, ``_write_latent_cache_`` and ``_gather_latent_cache``,
    for the rest of the process. The same functions are registered once; other functions under a name that is taken get a
    number. Nothing is run, read or changed besides.

    The functions must be deterministic in their arguments, must not keep them, and return new tensors.
    `paged_decode` is called without a plan in compiled code, so it has to make its own there.

    Parameters
    ----------
    kernels : KernelSet
        Any set.

    Returns
    -------
    KernelSet
        `varlen_attention` has gradients with respect to q, k and v. `paged_decode` and `gather_latent_cache` refuse inputs
        that require them with a `KernelError`; `write_latent_cache_` stores detached values.

    Raises
    ------
    KernelError
        Something else than a set.

    Examples
    --------
    >>> from mla.compute import reference
    >>> mine = KernelSet(name="MY_KERNELS", device_types=("cpu",), dtypes=(torch.float64,),
    ...                  paged_decode=reference.paged_decode, varlen_attention=reference.varlen_attention)
    >>> operators = as_operators(mine)
    >>> mine.differentiable, operators.differentiable, as_operators(operators) is operators
    (False, True, True)
    >>> operator_names(operators)[0]
    'mla::my_kernels_paged_decode'
    """
    check_instance("kernels", kernels, KernelSet, KernelError)
    given = _Functions.of(kernels)
    if any(entry.page_size == kernels.page_size and given.same_as(entry.made) for entry in _registered):
        return kernels if kernels.differentiable else attrs.evolve(kernels, differentiable=True)
    word = re.sub(r"[^a-z0-9]", "_", kernels.name.lower())
    kind = word, kernels.page_size, kernels.differentiable
    entry = next((x for x in _registered if x.kind == kind and given.same_as(x.given)), None)
    if entry is None:
        taken = {x.prefix for x in _registered}
        prefix = next(name for name in (word, *map(f"{word}_{{}}".format, range(2, len(taken) + 3))) if name not in taken)
        made = _Functions(
            paged_decode=_decode_operator(f"{prefix}_paged_decode", given.paged_decode, kernels.page_size),
            varlen_attention=_varlen_operator(
                f"{prefix}_varlen_attention", given.varlen_attention, differentiable=kernels.differentiable
            ),
            write_latent_cache_=_write_operator(f"{prefix}_write_latent_cache_", given.write_latent_cache_),
            gather_latent_cache=_gather_operator(f"{prefix}_gather_latent_cache", given.gather_latent_cache),
        )
        entry = _Registered(prefix=prefix, kind=kind, given=given, made=made)
        _registered.append(entry)
    changed = {field.name: getattr(entry.made, field.name) for field in attrs.fields(_Functions)}
    return attrs.evolve(kernels, differentiable=True, **changed)


def operator_names(kernels: KernelSet) -> tuple[str, ...]:
    """The operators of a set, such as ``mla::cpu_mla_paged_decode``; none for a set that has none.

    Raises
    ------
    KernelError
        Something else than a set.
    """
    check_instance("kernels", kernels, KernelSet, KernelError)
    given = _Functions.of(kernels)
    for entry in _registered:
        if given.same_as(entry.made):
            return tuple(f"{NAMESPACE}::{entry.prefix}_{field.name}" for field in attrs.fields(_Functions))
    return ()


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str, mutates: str = "") -> Any:
    """Register an operator; the definition, which takes an autograd formula."""
    definition = torch.library.custom_op(
        f"{NAMESPACE}::{name}", function, mutates_args=[mutates] if mutates else (), schema=schema
    )
    definition.register_fake(fake)
    return definition


def _operator(name: str) -> Callable[..., Any]:
    overload: Callable[..., Any] = getattr(torch.ops.mla, name).default
    return overload


def _refuse_in_autograd(name: str, operator: Callable[..., Any], **inputs: int) -> None:
    """Let the operator refuse inputs with gradients, given by name and position, before it runs."""

    def refuse(*args: Any) -> Any:
        refuse_gradients(**{word: args[position] for word, position in inputs.items()})
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    for key in ("AutogradCPU", "AutogradCUDA"):
        _library.impl(name, refuse, key)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fake_decode(q: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    kv_lora_rank = arguments[-2]
    return q.new_empty(q.shape[0], q.shape[1], kv_lora_rank), q.new_empty(q.shape[0], q.shape[1], dtype=_wide(q.dtype))


def _decode_operator(name: str, function: PagedDecode, page_size: int | None) -> PagedDecode:
    def run(
        q: torch.Tensor,
        latent_cache: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        context_lens: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        paged_kv: list[torch.Tensor],
        page_sizes: list[int],
        block_size: int,
        max_query_len: int,
        max_seq_len: int,
        min_num_blocks: int,
        over_buffers: bool,
        kv_lora_rank: int,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages = [
            PagedKV(page_size=size, paged_kv_indptr=indptr, paged_kv_indices=indices, paged_kv_last_page_lens=last)
            for size, indptr, indices, last in zip(page_sizes, *(paged_kv[i::3] for i in range(3)), strict=True)
        ]
        metadata = DecodeMetadata(  # without `steps_left`, which builders read and kernels do not
            query_start_loc=query_start_loc,
            seq_start_loc=seq_start_loc,
            seq_lens=seq_lens,
            context_lens=context_lens,
            slot_mapping=slot_mapping,
            positions=positions,
            block_size=block_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            min_num_blocks=min_num_blocks,
            paged_kv=tuple(pages),
            block_table=block_table,
            over_buffers=over_buffers,
        )
        out, lse = function(q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale)
        return out.contiguous(), lse.contiguous()

    _register(name, run, _fake_decode, DECODE)
    operator = _operator(name)
    _refuse_in_autograd(name, operator, q=0, latent_cache=1)

    def paged_decode(
        q: torch.Tensor,
        latent_cache: torch.Tensor,
        metadata: DecodeMetadata,
        *,
        kv_lora_rank: int,
        softmax_scale: float,
        plan: Plan | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled():
            refuse_gradients(q=q, latent_cache=latent_cache)
        if not torch.compiler.is_compiling():
            return function(q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale, plan=plan)
        pages = [] if page_size is None else [metadata.paged_kv_of(page_size)]
        result: tuple[torch.Tensor, torch.Tensor] = operator(
            q,
            latent_cache,
            metadata.query_start_loc,
            metadata.seq_start_loc,
            metadata.seq_lens,
            metadata.context_lens,
            metadata.slot_mapping,
            metadata.positions,
            metadata.block_table,
            [x for page in pages for x in (page.paged_kv_indptr, page.paged_kv_indices, page.paged_kv_last_page_lens)],
            [page.page_size for page in pages],
            metadata.block_size,
            metadata.max_query_len,
            metadata.max_seq_len,
            metadata.min_num_blocks,
            metadata.over_buffers,
            kv_lora_rank,
            softmax_scale,
        )
        return result

    return paged_decode


def _any_requires_grad(*tensors: torch.Tensor) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)  # the kernel refuses other things


def _fake_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[0], q.shape[1], dtype=_wide(q.dtype))


def _varlen_operator(name: str, function: VarlenAttention, *, differentiable: bool) -> VarlenAttention:
    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_start_loc: torch.Tensor,
        kv_start_loc: torch.Tensor,
        max_query_len: int,
        max_kv_len: int,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = function(
            q,
            k,
            v,
            query_start_loc=query_start_loc,
            kv_start_loc=kv_start_loc,
            max_query_len=max_query_len,
            max_kv_len=max_kv_len,
            causal=causal,
            softmax_scale=softmax_scale,
        )
        return out.contiguous(), lse.contiguous()

    _register(name, run, _fake_varlen, VARLEN).register_autograd(backward_of_varlen, setup_context=save_for_varlen)
    operator = _operator(name)

    def varlen_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        query_start_loc: torch.Tensor,
        kv_start_loc: torch.Tensor,
        max_query_len: int,
        max_kv_len: int,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by_formula = not differentiable and torch.is_grad_enabled() and _any_requires_grad(q, k, v)
        if by_formula or torch.compiler.is_compiling():
            result: tuple[torch.Tensor, torch.Tensor] = operator(
                q, k, v, query_start_loc, kv_start_loc, max_query_len, max_kv_len, causal, softmax_scale
            )
            return result
        return function(
            q,
            k,
            v,
            query_start_loc=query_start_loc,
            kv_start_loc=kv_start_loc,
            max_query_len=max_query_len,
            max_kv_len=max_kv_len,
            causal=causal,
            softmax_scale=softmax_scale,
        )

    return varlen_attention


def _no_result(*arguments: Any) -> None:
    return


def _write_operator(name: str, function: WriteLatentCache) -> WriteLatentCache:
    _register(name, function, _no_result, WRITE, "latent_cache")
    operator = _operator(name)

    def write_latent_cache_(
        latent_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if torch.compiler.is_compiling():
            operator(latent_cache, kv_c.detach(), k_pe.detach(), slot_mapping)
        else:
            function(latent_cache, kv_c, k_pe, slot_mapping)

    return write_latent_cache_


def _gather_operator(name: str, function: GatherLatentCache) -> GatherLatentCache:
    def run(latent_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
        function(latent_cache, slots, out=out)

    _register(name, run, _no_result, GATHER, "out")
    operator = _operator(name)
    _refuse_in_autograd(name, operator, latent_cache=0, out=2)

    def gather_latent_cache(latent_cache: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            refuse_gradients(latent_cache=latent_cache, out=out)
        if not torch.compiler.is_compiling():
            return function(latent_cache, slots, out=out)
        operator(latent_cache, slots, out)
        return out[: slots.shape[0]]

    return gather_latent_cache
