"""The record that holds a set of kernels, and what is asked of every set."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from mla._checks import check_instance, describe, dtype_name
from mla.cache.paged import gather_latent_cache, write_latent_cache_
from mla.compute.contracts import GatherLatentCache, PagedDecode, Plan, VarlenAttention, WriteLatentCache
from mla.errors import KernelError
from mla.metadata.dims import MLADims
from mla.metadata.records import DecodeMetadata

__all__ = ["KernelSet", "explain", "refuse_features", "refuse_gradients"]


def _no_plan(metadata: DecodeMetadata) -> Plan | None:
    return None


def _any_cache(latent_cache: torch.Tensor) -> None:
    return


def _no_objection(dims: MLADims) -> str | None:
    return None


def _no_route(dims: MLADims, dtype: torch.dtype) -> str:
    return ""


def _no_bytes(dims: MLADims, num_tokens: int, num_kv_tokens: int, dtype: torch.dtype) -> int:
    return 0


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@attrs.frozen(kw_only=True, eq=False)
class KernelSet:
    """The kernels of one device, as a value: pass it where it is needed, or make your own.

    Parameters
    ----------
    name : str
        Such as ``"CPU_MLA"``.
    device_types : tuple of str
        Devices that it runs on (``torch.device.type``); empty for any.
    dtypes : tuple of torch.dtype
        Dtypes of q that it takes.
    paged_decode, varlen_attention : callable
        See `PagedDecode` and `VarlenAttention`.
    write_latent_cache_, gather_latent_cache : callable
        See `WriteLatentCache` and `GatherLatentCache`; plain torch by default.
    make_plan : callable
        ``make_plan(decode_metadata)``: what `paged_decode` derives from a step's record and every layer uses; see `plan`.
    plan_type : type
        Of what `make_plan` returns.
    check_cache : callable
        ``check_cache(latent_cache)`` refuses a cache that the kernels cannot read, before anything is written to it.
    page_size : int or None
        The `PagedKV` that `paged_decode` needs in the metadata; None for none.
    objection : callable
        ``objection(dims)``: why a model of these dimensions cannot run, as the end of a sentence, or None.
    varlen_bytes : callable
        ``varlen_bytes(dims, num_tokens, num_kv_tokens, dtype)``: what `varlen_attention` takes beyond its results at most.
    differentiable : bool
        Whether gradients go through `varlen_attention`. `mla.compute.as_operators` gives every set that.
    plans_in_capture : bool
        Whether a plan made while a CUDA graph is captured is made anew at every replay, so that records over a state's buffers
        have one there.
    remark : str
        What `explain` adds about how it runs.
    route : callable
        ``route(dims, dtype)``: which of its kernels such a model takes on the current device, and why, as the end of a
        sentence; empty where there is no choice.

    Raises
    ------
    KernelError
        A field of another type.

    Examples
    --------
    >>> from mla.compute import kernel_set
    >>> mine = attrs.evolve(kernel_set("CPU_MLA"), name="MINE", dtypes=(torch.float32,))
    >>> explain(mine, dtype=torch.bfloat16)
    'MINE does not run: dtype: expected float32, got bfloat16'
    """

    name: str
    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    paged_decode: PagedDecode
    varlen_attention: VarlenAttention
    write_latent_cache_: WriteLatentCache = write_latent_cache_
    gather_latent_cache: GatherLatentCache = gather_latent_cache
    make_plan: Callable[[DecodeMetadata], Plan | None] = _no_plan
    plan_type: type = object
    check_cache: Callable[[torch.Tensor], None] = _any_cache
    page_size: int | None = None
    objection: Callable[[MLADims], str | None] = _no_objection
    varlen_bytes: Callable[[MLADims, int, int, torch.dtype], int] = _no_bytes
    differentiable: bool = False
    plans_in_capture: bool = False
    remark: str = ""
    route: Callable[[MLADims, torch.dtype], str] = _no_route

    def __attrs_post_init__(self) -> None:
        check_instance("name", self.name, str, KernelError)
        for field, kind in (("device_types", str), ("dtypes", torch.dtype)):
            value = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(item, kind) for item in value):
                raise KernelError(f"{field}: expected a tuple of {kind.__name__}, got {describe(value)}")
        for field in (
            "paged_decode", "varlen_attention", "write_latent_cache_", "gather_latent_cache", "make_plan", "check_cache",
            "objection", "varlen_bytes", "route",
        ):  # fmt: skip
            if not callable(getattr(self, field)):
                raise KernelError(f"{field}: expected a function, got {describe(getattr(self, field))}")

    def plan(self, metadata: DecodeMetadata) -> Plan | None:
        """What `paged_decode` derives once per step and every layer uses; None where there is no such thing.

        A record over a state's buffers has no plan outside of a graph, for its numbers change: the kernel derives it at every
        call. Nor is one made in compiled code, where the kernel is an operator that takes tensors and numbers only.

        Examples
        --------
        >>> from mla import build_metadata, decode_group, kernel_set
        >>> metadata = build_metadata([decode_group(17, [7, 2])], block_size=16)
        >>> kernel_set("CPU_MLA").plan(metadata.decode).metadata is metadata.decode
        True
        >>> kernel_set("REFERENCE").plan(metadata.decode) is None
        True
        """
        if torch.compiler.is_compiling():
            return None
        if metadata.over_buffers and not (self.plans_in_capture and _is_capturing(metadata.seq_lens.device)):
            return None
        return self.make_plan(metadata)

    def check_gradients(self, *, reads_cache: bool, **tensors: torch.Tensor | None) -> None:
        """Refuse inputs whose gradients would silently be lost.

        Parameters
        ----------
        reads_cache : bool
            Whether rows of the cache are attended, decoding or as a context: they are stored detached.
        **tensors : torch.Tensor or None
            Inputs by name.

        Raises
        ------
        KernelError
            Naming the tensor, where gradients are recorded and not all of them would be computed.

        Examples
        --------
        >>> from mla.compute import kernel_set
        >>> q = torch.ones(1, 4, 24, requires_grad=True)
        >>> kernel_set("CPU_MLA").check_gradients(reads_cache=False, q=q)
        >>> kernel_set("CPU_MLA").check_gradients(reads_cache=True, q=q)
        Traceback (most recent call last):
            ...
        mla.errors.KernelError: q: expected no gradients through cached rows (use torch.no_grad()), got requires_grad=True
        """
        if reads_cache:
            refuse_gradients("through cached rows", **tensors)
        elif not self.differentiable:
            refuse_gradients(f"with {self.name}", **tensors)

    def check_plan(self, plan: Plan | None, metadata: DecodeMetadata | None) -> None:
        """Refuse a plan that was not made of this very record; None is no plan.

        Raises
        ------
        KernelError
            Something else, or the plan of another record.

        Examples
        --------
        >>> from mla import build_metadata, decode_group, kernel_set
        >>> kernels = kernel_set("CPU_MLA")
        >>> now, later = (build_metadata([decode_group(n, [7, 2])], block_size=16).decode for n in (17, 18))
        >>> kernels.check_plan(kernels.plan(now), now)
        >>> kernels.check_plan(kernels.plan(now), later)
        Traceback (most recent call last):
            ...
        mla.errors.KernelError: plan: expected CPU_MLA.plan(metadata.decode) of this step, got the plan of another record
        """
        if plan is None:
            return
        if not hasattr(plan, "metadata") or not isinstance(plan, self.plan_type):
            raise KernelError(f"plan: expected what {self.name}.plan(metadata.decode) returns, got {describe(plan)}")
        if plan.metadata is not metadata:
            raise KernelError(f"plan: expected {self.name}.plan(metadata.decode) of this step, got the plan of another record")


def refuse_gradients(where: str = "through the latent cache", /, **tensors: torch.Tensor | None) -> None:
    """Refuse inputs that require gradients while gradients are recorded; `where` they would be lost is part of the message.

    Raises
    ------
    KernelError
        Naming the tensor.
    """
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise KernelError(f"{name}: expected no gradients {where} (use torch.no_grad()), got requires_grad=True")


def explain(kernels: KernelSet, *, dims: MLADims | None = None, dtype: torch.dtype | None = None) -> str:
    """One sentence on what `kernels` will do with such a model, or why it will not.

    Raises
    ------
    KernelError
        Arguments of another type.

    Examples
    --------
    >>> from mla.compute import kernel_set
    >>> explain(kernel_set("CPU_MLA"), dtype=torch.int8)
    'CPU_MLA does not run: dtype: expected float64, float32, bfloat16 or float16, got int8'
    """
    check_instance("kernels", kernels, KernelSet, KernelError)
    if dims is not None:
        check_instance("dims", dims, MLADims, KernelError)
    if dtype is not None and dtype not in kernels.dtypes:
        names = [dtype_name(d) for d in kernels.dtypes]
        allowed = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
        return f"{kernels.name} does not run: dtype: expected {allowed}, got {dtype_name(dtype)}"
    reason = None if dims is None else kernels.objection(dims)
    if reason is not None:
        return f"{kernels.name} does not run: {reason}"
    heads = "" if dims is None else f" with {dims.num_heads} heads of latent width {dims.latent_dim}"
    kind = "" if dtype is None else f" in {dtype_name(dtype)}"
    route = "" if dims is None or dtype is None else kernels.route(dims, dtype)
    remarks = "; ".join(remark for remark in (kernels.remark, route) if remark)
    return f"{kernels.name} runs{heads}{kind}{': ' + remarks if remarks else ''}"


def refuse_features(
    *,
    alibi_slopes: object = None,
    sliding_window: object = None,
    blocksparse_params: object = None,
    logits_soft_cap: object = None,
    attn_type: str = "decoder",
) -> None:
    """Refuse by name what no kernel set here computes; the defaults ask for nothing.

    Raises
    ------
    KernelError
        Naming the feature.
    """
    for name, value in (
        ("alibi_slopes", alibi_slopes),
        ("sliding_window", sliding_window),
        ("blocksparse_params", blocksparse_params),
        ("logits_soft_cap", logits_soft_cap),
    ):
        if value is not None:
            raise KernelError(f"{name}: expected None (not supported by MLA here), got {value!r}")
    if attn_type != "decoder":
        raise KernelError(f"attn_type: expected 'decoder' (encoder attention is not supported by MLA here), got {attn_type!r}")
