"""What a golden bundle tests, as numbers: dimensions, sequences, and the salts that all inputs are made from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import torch

from mla._checks import FLOATS, check_choice, check_instance, check_int, dtype_name, named_fields
from mla.errors import GoldenError
from mla.golden.files import read_file
from mla.golden.hashing import mixed_hash
from mla.metadata.dims import MLADims
from mla.metadata.groups import SequenceGroup
from mla.serialize import fields_from_json, fields_to_json, parse_json

__all__ = ["KINDS", "Gains", "GoldenCase", "Salts", "case_from_json", "case_to_json", "read_cases"]

KINDS = ("decode", "prefill", "chunked_context")
"""`paged_decode`; prompts without context; prompts of which at least one has context, cut into chunks."""

MAX_NUMBERS = 1 << 25
"""Numbers that all tensors of a case may have together: 256 MiB of float64."""

MAX_PRODUCTS = 1 << 36
"""Multiplications that the float64 reference of a case may take."""

MAX_TOKENS = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
CASE_FILE_FIELDS = ("cases",)


def _check_salt(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    check_int(attribute.name, value, low=0, high=2**32 - 1, error=GoldenError)


def _check_gain(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    # A power of two keeps the numbers of the hash exact in float32.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 2**-10 <= value <= 2**10:
        raise GoldenError(f"{attribute.name}: expected a power of two in 2**-10..2**10, got {value!r}")
    if np.frexp(value)[0] != 0.5:  # the mantissa of every power of two
        raise GoldenError(f"{attribute.name}: expected a power of two, got {value!r}")


@named_fields(GoldenError)
@attrs.frozen(kw_only=True)
class Salts:
    """Salts of the integer hash, one for each input.

    Parameters
    ----------
    q, kv_c, k_pe, kv_b_proj, latent_cache : int
        Of the tensors, in ``0 .. 2**32 - 1``.
    blocks : int
        Of the order in which blocks are dealt to sequences that come without.

    Raises
    ------
    GoldenError
        A salt out of range.

    Examples
    --------
    >>> Salts(q=11).q, Salts().kv_c
    (11, 2)
    """

    q: int = attrs.field(default=1, validator=_check_salt)
    kv_c: int = attrs.field(default=2, validator=_check_salt)
    k_pe: int = attrs.field(default=3, validator=_check_salt)
    kv_b_proj: int = attrs.field(default=4, validator=_check_salt)
    latent_cache: int = attrs.field(default=5, validator=_check_salt)
    blocks: int = attrs.field(default=6, validator=_check_salt)


@named_fields(GoldenError)
@attrs.frozen(kw_only=True)
class Gains:
    """Factors on the numbers of the hash, which lie in [-1, 1).

    Parameters
    ----------
    q, kv_c, k_pe, kv_b_proj, latent_cache : float
        Powers of two.

    Raises
    ------
    GoldenError
        Another number.

    Examples
    --------
    >>> Gains(q=8).q
    8
    >>> Gains(q=3)
    Traceback (most recent call last):
        ...
    mla.errors.GoldenError: q: expected a power of two, got 3
    """

    q: float = attrs.field(default=1.0, validator=_check_gain)
    kv_c: float = attrs.field(default=1.0, validator=_check_gain)
    k_pe: float = attrs.field(default=1.0, validator=_check_gain)
    kv_b_proj: float = attrs.field(default=0.25, validator=_check_gain)
    latent_cache: float = attrs.field(default=1.0, validator=_check_gain)


@named_fields(GoldenError)
@attrs.frozen(kw_only=True, eq=False)
class GoldenCase:
    """One batch of one kind, small enough to be recomputed in float64.

    Parameters
    ----------
    name : str
        Letters, digits, ``_`` and ``-``; the bundle's folder is called so.
    kind : str
        ``"decode"``, ``"prefill"`` or ``"chunked_context"``.
    dims : MLADims
        Of the model.
    groups : tuple of SequenceGroup
        The sequences; their `query_lens` are the new tokens. Without `block_ids`, blocks are dealt in the order of the hash,
        one of look-ahead to each sequence.
    block_size : int
        Tokens per block of the cache.
    dtype : torch.dtype
        Of all tensors.
    num_blocks : int or None
        Blocks of the cache; None takes half as many again as are needed.
    context_chunk_tokens : int
        Where contexts are cut, see `build_metadata`.
    pad_decodes_to : int or None
        Rows of the decode part, see `build_metadata`.
    salts : Salts
        Of the inputs.
    gains : Gains
        Factors on them.

    Raises
    ------
    GoldenError
        Fields that contradict themselves, or sizes that no golden test needs.

    Examples
    --------
    Two prompts without blocks are dealt 2 and 3, one of look-ahead included; the cache has half as many again.

    >>> from mla.metadata import RopeSpec, prompt_group
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> case = GoldenCase(name="short", kind="prefill", dims=dims, groups=(prompt_group(5), prompt_group(20)),
    ...                   block_size=16, dtype=torch.float32)
    >>> case.sequences, case.num_tokens, case.out_shape, case.cache_blocks
    ([(5, 0), (20, 0)], 25, (25, 4, 24), 8)
    """

    name: str
    kind: str
    dims: MLADims
    groups: tuple[SequenceGroup, ...]
    block_size: int
    dtype: torch.dtype
    num_blocks: int | None = None
    context_chunk_tokens: int = 4096
    pad_decodes_to: int | None = None
    salts: Salts = attrs.field(factory=Salts)
    gains: Gains = attrs.field(factory=Gains)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise GoldenError(f"name: expected at most 80 letters, digits, '_' and '-', got {str(self.name)[:80]!r}")
        check_choice("kind", self.kind, KINDS, GoldenError)
        check_instance("groups", self.groups, tuple, GoldenError)
        if not self.groups:
            raise GoldenError("groups: expected at least one sequence group, got none")
        for name, kind in (("dims", MLADims), ("salts", Salts), ("gains", Gains)):
            check_instance(name, getattr(self, name), kind, GoldenError)
        if self.dtype not in FLOATS:
            raise GoldenError(f"dtype: expected one of {', '.join(map(dtype_name, FLOATS))}, got {self.dtype!r}")
        self._check_groups()
        self._check_numbers()
        self._check_size()

    def _check_groups(self) -> None:
        """Refuse sequences of another kind."""
        for i, group in enumerate(self.groups):
            check_instance(f"groups[{i}]", group, SequenceGroup, GoldenError)
            if group.is_prompt == (self.kind == "decode"):
                wanted = "decoding sequences" if self.kind == "decode" else "prompts"
                raise GoldenError(f"groups[{i}]: expected {wanted} for kind {self.kind}, got is_prompt={group.is_prompt}")
        for i, (query_len, context_len) in enumerate(self.sequences):
            for name, value in (("query_lens", query_len), ("context_lens", context_len)):
                check_int(f"{name} of sequence {i}", value, low=0, high=MAX_TOKENS, error=GoldenError)
        contexts = [context_len for _, context_len in self.sequences]
        if self.kind != "decode" and (self.kind == "chunked_context") != any(contexts):
            wanted = "a prompt with context" if self.kind == "chunked_context" else "no context"
            raise GoldenError(f"groups: expected {wanted} for kind {self.kind}, got {contexts[:8]}")

    def _check_numbers(self) -> None:
        for name in ("block_size", "context_chunk_tokens"):
            check_int(name, getattr(self, name), low=1, high=MAX_TOKENS, error=GoldenError)
        for name in ("num_blocks", "pad_decodes_to"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=1, high=MAX_TOKENS, error=GoldenError)
        if self.pad_decodes_to is not None and (self.kind != "decode" or self.pad_decodes_to < len(self.sequences)):
            wanted = f"at least {len(self.sequences)} rows" if self.kind == "decode" else f"None for kind {self.kind}"
            raise GoldenError(f"pad_decodes_to: expected {wanted}, got {self.pad_decodes_to}")

    def _check_size(self) -> None:
        """Refuse what would need more memory or time than a golden test is worth, before any of it is taken."""
        dims = self.dims
        lengths = [query_len + context_len for query_len, context_len in self.sequences]
        num_tokens = self.num_tokens
        widths = dims.latent_dim + dims.qk_head_dim + dims.v_head_dim
        blocks = self.cache_blocks
        numbers = (num_tokens + sum(lengths)) * dims.num_heads * widths + blocks * self.block_size * dims.latent_dim
        numbers += dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim) * dims.kv_lora_rank
        longest = max([-(-max(lengths) // self.block_size) + 1, *(len(ids) for g in self.groups for ids in g.block_ids or ())])
        numbers += longest * max(len(lengths), self.pad_decodes_to or 0)
        if numbers > MAX_NUMBERS:
            raise GoldenError(f"dims, groups, num_blocks: expected at most {MAX_NUMBERS} numbers in all tensors, got {numbers}")
        products = max(lengths) * num_tokens * dims.num_heads * widths
        if products > MAX_PRODUCTS:
            raise GoldenError(f"dims, groups: expected at most {MAX_PRODUCTS} products in float64, got {products}")

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """New and cached tokens of each sequence."""
        return [pair for group in self.groups for pair in zip(group.query_lens, group.context_lens, strict=True)]

    @property
    def num_tokens(self) -> int:
        """New tokens, padded ones included."""
        query_lens = [query_len for query_len, _ in self.sequences]
        padded = 0 if self.pad_decodes_to is None else self.pad_decodes_to - len(query_lens)
        return sum(query_lens) + padded * max(query_lens)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """Of the output: latent to decode, else of the values."""
        width = self.dims.kv_lora_rank if self.kind == "decode" else self.dims.v_head_dim
        return self.num_tokens, self.dims.num_heads, width

    def _wanted(self, query_len: int, context_len: int) -> int:
        """Blocks that a sequence without any is dealt."""
        length = query_len + context_len
        return -(-length // self.block_size) + 1 if length else 0

    @property
    def cache_blocks(self) -> int:
        """`num_blocks`, or as many as there must be for the blocks given and to deal."""
        if self.num_blocks is not None:
            return self.num_blocks
        highest, dealt = 0, 0
        for group in self.groups:
            if group.block_ids is None:
                dealt += sum(map(self._wanted, group.query_lens, group.context_lens))
            else:
                highest = max([highest, *(int(block) + 1 for ids in group.block_ids for block in ids)])
        needed = highest + dealt
        return needed + needed // 2 + 1

    def placed(self) -> GoldenCase:
        """The same case with `num_blocks`, and with blocks for every sequence, shuffled by the hash.

        Raises
        ------
        GoldenError
            Too few blocks, or blocks outside the cache.

        Examples
        --------
        >>> from mla.metadata import RopeSpec, prompt_group
        >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        ...                rope=RopeSpec(dim=8, interleaved=True))
        >>> case = GoldenCase(name="short", kind="prefill", dims=dims, groups=(prompt_group(5), prompt_group(20)),
        ...                   block_size=16, dtype=torch.float32)
        >>> placed = case.placed()
        >>> placed.num_blocks, [len(ids) for group in placed.groups for ids in group.block_ids]
        (8, [2, 3])
        """
        count = self.cache_blocks
        taken = {int(block) for group in self.groups for ids in group.block_ids or () for block in ids}
        if taken and not 0 <= min(taken) <= max(taken) < count:
            raise GoldenError(f"block_ids: expected blocks in 0..{count - 1}, got {min(taken)}..{max(taken)}")
        order = np.argsort(mixed_hash(count, self.salts.blocks), kind="stable").tolist()
        free = [block for block in order if block not in taken]
        groups = []
        for group in self.groups:
            if group.block_ids is not None:
                groups.append(group)
                continue
            tables = []
            for wanted in map(self._wanted, group.query_lens, group.context_lens):
                if wanted > len(free):
                    raise GoldenError(f"num_blocks: expected blocks for all sequences, got {count}")
                tables.append(tuple(free[:wanted]))
                del free[:wanted]
            groups.append(attrs.evolve(group, block_ids=tuple(tables)))
        return attrs.evolve(self, groups=tuple(groups), num_blocks=count)


def case_to_json(case: GoldenCase) -> dict[str, object]:
    """A case as plain JSON data.

    Raises
    ------
    GoldenError
        What JSON cannot hold.

    Examples
    --------
    >>> from mla.golden import SHIPPED, load_bundle
    >>> data = case_to_json(load_bundle(SHIPPED / "decode_f32_few_heads").case)
    >>> data["kind"], data["dtype"], data["gains"]["q"]
    ('decode', 'float32', 4.0)
    """
    return fields_to_json(case, case.name)


def case_from_json(data: object, path: str = "case") -> GoldenCase:
    """The case in JSON data; `path` is what messages call it.

    Raises
    ------
    GoldenError
        Unknown fields, wrong types, or what `GoldenCase` refuses.

    Examples
    --------
    >>> from mla.golden import SHIPPED, load_bundle
    >>> data = case_to_json(load_bundle(SHIPPED / "decode_f32_few_heads").case)
    >>> case_from_json({**data, "block_size": 0}, "mine")
    Traceback (most recent call last):
        ...
    mla.errors.GoldenError: mine.block_size: expected an int in 1..1048576, got 0
    """
    return fields_from_json(GoldenCase, data, path)


def read_cases(path: Path | str) -> Sequence[GoldenCase]:
    """The cases of a case file: ``{"cases": [...]}``, each with the fields of `GoldenCase`.

    Raises
    ------
    GoldenError
        No such file, or one that is damaged; two cases of one name.

    Examples
    --------
    >>> import json, tempfile
    >>> from mla.golden import SHIPPED, load_bundle
    >>> case = load_bundle(SHIPPED / "decode_f32_few_heads").case
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "cases.json")
    ...     _ = file.write_text(json.dumps({"cases": [case_to_json(case)]}))
    ...     [case.name for case in read_cases(file)]
    ['decode_f32_few_heads']
    """
    file = Path(path)
    data = parse_json(read_file(file, file.name), file.name)
    if not isinstance(data, dict) or set(data) != set(CASE_FILE_FIELDS) or not isinstance(data["cases"], list):
        raise GoldenError(f'{file.name}: expected {{"cases": [...]}}, got another JSON value')
    cases = [case_from_json(each, f"cases[{i}]") for i, each in enumerate(data["cases"])]
    names = [case.name.lower() for case in cases]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise GoldenError(f"cases[{i}].name: expected a name of its own, got {cases[i].name!r} again")
    return cases
