"""An immutable pool of cache blocks: who holds which block, and which blocks hold which tokens.

Every operation returns a new pool and leaves the old one as it was, so a failed step is undone by keeping the old pool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from mla._checks import as_items, check_int, named_fields
from mla.errors import CacheError
from mla.metadata.show import Shown, Table, runs

__all__ = ["BlockPool", "SequenceBlocks"]


@attrs.frozen(kw_only=True)
class SequenceBlocks:
    """What the pool knows of one sequence.

    Parameters
    ----------
    token_ids : tuple of int
        All its tokens so far.
    block_ids : tuple of int
        Its blocks in order; may go beyond the last token (look-ahead).
    num_computed : int
        Leading tokens whose rows are in the cache; the others are to be computed next.
    num_reused : int
        Leading tokens that were found in the pool when the sequence was allocated.

    Examples
    --------
    >>> pool = BlockPool.empty(num_blocks=8, block_size=4).allocate("a", [1, 2, 3, 4, 5])
    >>> sequence = pool.mark_computed("a", 3)["a"]
    >>> sequence.block_ids, sequence.num_computed, sequence.num_new
    ((0, 1), 3, 2)
    """

    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_computed: int = 0
    num_reused: int = 0

    @property
    def num_new(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.token_ids) - self.num_computed


def _frozen(mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return mapping if isinstance(mapping, MappingProxyType) else MappingProxyType(dict(mapping))


def _check_name(field: str, name: Hashable) -> None:
    try:
        hash(name)
    except TypeError:
        raise CacheError(f"{field}: expected a hashable name, got {name!r:.60}") from None


def _digest(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """Name of a full block: its tokens and, through `parent`, all tokens before it. Wide enough to never collide."""
    return hashlib.sha256(parent + b"".join(t.to_bytes(8, "little", signed=True) for t in token_ids)).digest()


@named_fields(CacheError)
@attrs.frozen(kw_only=True, eq=False)
class BlockPool(Shown):
    """Blocks of a cache, shared by sequences; full blocks are found again by their tokens.

    Parameters
    ----------
    num_blocks, block_size : int
        As of the cache.
    sequences : mapping of hashable to SequenceBlocks
        The live sequences, by the ids that the caller chose.
    holders : tuple of int
        How many sequences hold each block.
    free_order : tuple of int
        Free blocks, the next one to be given first. Their rows stay until they are given away.
    block_of : mapping of bytes to int
        Block by the digest of its tokens and all before them.
    digest_of : mapping of int to bytes
        The inverse of `block_of`.

    Raises
    ------
    CacheError
        A size below 1.

    Examples
    --------
    >>> pool = BlockPool.empty(num_blocks=8, block_size=4)
    >>> pool = pool.allocate("a", [1, 2, 3, 4, 5]).mark_computed("a")
    >>> pool = pool.allocate("b", [1, 2, 3, 4, 9])
    >>> pool["b"].num_computed, pool["a"].block_ids[0] == pool["b"].block_ids[0], pool.num_free
    (4, True, 5)
    """

    num_blocks: int
    block_size: int
    sequences: Mapping[Hashable, SequenceBlocks] = attrs.field(factory=dict, converter=_frozen)
    holders: tuple[int, ...]
    free_order: tuple[int, ...]
    block_of: Mapping[bytes, int] = attrs.field(factory=dict, converter=_frozen)
    digest_of: Mapping[int, bytes] = attrs.field(factory=dict, converter=_frozen)

    def __attrs_post_init__(self) -> None:
        check_int("num_blocks", self.num_blocks, low=1, error=CacheError)
        check_int("block_size", self.block_size, low=1, error=CacheError)
        if len(self.holders) != self.num_blocks:
            raise CacheError(f"holders: expected {self.num_blocks} entries, got {len(self.holders)}")

    @classmethod
    def empty(cls, *, num_blocks: int, block_size: int) -> BlockPool:
        """A pool with every block free.

        Raises
        ------
        CacheError
            A size below 1.

        Examples
        --------
        >>> pool = BlockPool.empty(num_blocks=8, block_size=4)
        >>> pool.num_free, dict(pool.sequences)
        (8, {})
        """
        check_int("num_blocks", num_blocks, low=1, error=CacheError)
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            holders=(0,) * num_blocks,
            free_order=tuple(range(num_blocks)),
        )

    def __getitem__(self, seq_id: Hashable) -> SequenceBlocks:
        _check_name("seq_id", seq_id)
        if seq_id not in self.sequences:
            raise CacheError(f"seq_id: expected one of {list(self.sequences)}, got {seq_id!r}")
        return self.sequences[seq_id]

    @property
    def num_free(self) -> int:
        """Blocks that can be given away."""
        return len(self.free_order)

    def _tables(self) -> list[Table]:
        shared, known = sum(n > 1 for n in self.holders), sum(block in self.digest_of for block in self.free_order)
        title = (
            f"BlockPool: {self.num_blocks} blocks of {self.block_size} tokens, {self.num_free} free "
            f"({known} of them with known tokens), {shared} shared"
        )
        rows = [
            (name, len(s.token_ids), s.num_computed, s.num_reused, s.num_new, runs(s.block_ids))
            for name, s in self.sequences.items()
        ]
        return [Table(title=title, columns=("seq_id", "tokens", "computed", "reused", "new", "block_ids"), rows=tuple(rows))]

    def allocate(self, seq_id: Hashable, token_ids: Iterable[int], *, lookahead: int = 0) -> BlockPool:
        """Admit a sequence: full blocks that the pool knows are shared, the rest is taken from the free ones.

        At least one token stays to be computed, since its output is what the next token is sampled from.

        Parameters
        ----------
        seq_id : hashable
            A name that is not in use.
        token_ids : iterable of int
            The prompt, at least one token.
        lookahead : int
            Further tokens to have room for.

        Raises
        ------
        CacheError
            A name in use, no tokens, or too few free blocks.

        Examples
        --------
        >>> pool = BlockPool.empty(num_blocks=3, block_size=4).allocate("a", [1, 2, 3, 4, 5], lookahead=4)
        >>> pool["a"].block_ids, pool.num_free
        ((0, 1, 2), 0)
        >>> pool.allocate("b", [6])
        Traceback (most recent call last):
            ...
        mla.errors.CacheError: free blocks: expected at least 1, got 0
        """
        _check_name("seq_id", seq_id)
        if seq_id in self.sequences:
            raise CacheError(f"seq_id: expected a new id, got {seq_id!r}, which is in use")
        tokens = self._tokens(token_ids)
        if not tokens:
            raise CacheError("token_ids: expected at least one token, got none")
        check_int("lookahead", lookahead, low=0, error=CacheError)
        known: list[int] = []
        parent = b""
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            parent = _digest(parent, tokens[start : start + self.block_size])
            if parent not in self.block_of:
                break
            known.append(self.block_of[parent])
        # The last full block is not looked up when it ends the prompt: one token must be computed.
        reused = len(known) * self.block_size
        wanted = -(-(len(tokens) + lookahead) // self.block_size) - len(known)
        pool, fresh = self._hold(known)._take(wanted)
        sequence = SequenceBlocks(token_ids=tokens, block_ids=(*known, *fresh), num_computed=reused, num_reused=reused)
        return attrs.evolve(pool, sequences={**pool.sequences, seq_id: sequence})

    def append(
        self, seq_id: Hashable, token_ids: Iterable[int], *, lookahead: int = 0
    ) -> tuple[BlockPool, tuple[tuple[int, int], ...]]:
        """Add tokens to a sequence, with the blocks they need.

        Returns
        -------
        pool : BlockPool
            The new pool.
        copies : tuple of (int, int)
            (source, destination) blocks to copy in every layer's cache (`copy_blocks_`) before the step runs: blocks that
            the new tokens go into and that other sequences hold too (copy-on-write).

        Raises
        ------
        CacheError
            An unknown sequence or too few free blocks.

        Examples
        --------
        >>> pool = BlockPool.empty(num_blocks=8, block_size=4).allocate("a", [1, 2, 3, 4, 5]).mark_computed("a")
        >>> pool, copies = pool.fork("a", "b").append("b", [6])
        >>> copies, pool["a"].block_ids, pool["b"].block_ids  # block 1 was shared
        (((1, 2),), (0, 1), (0, 2))
        """
        sequence, tokens = self[seq_id], self._tokens(token_ids)
        check_int("lookahead", lookahead, low=0, error=CacheError)
        held = len(sequence.token_ids)
        total = held + len(tokens)
        blocks = list(sequence.block_ids)
        wanted = -(-(total + lookahead) // self.block_size)
        shared = [i for i in range(held // self.block_size, min(wanted, len(blocks))) if self.holders[blocks[i]] > 1]
        pool, fresh = self._take(len(shared) + max(wanted - len(blocks), 0))
        pool = pool._release([blocks[i] for i in shared])
        # Only a block that holds tokens already has rows to copy.
        copies = tuple((blocks[i], fresh[k]) for k, i in enumerate(shared) if i * self.block_size < held)
        for k, i in enumerate(shared):
            blocks[i] = fresh[k]
        grown = attrs.evolve(sequence, token_ids=sequence.token_ids + tokens, block_ids=(*blocks, *fresh[len(shared) :]))
        return attrs.evolve(pool, sequences={**pool.sequences, seq_id: grown}), copies

    def mark_computed(self, seq_id: Hashable, num_tokens: int | None = None) -> BlockPool:
        """Say that the next `num_tokens` tokens (all, by default) are in the cache: their full blocks can be reused.

        Raises
        ------
        CacheError
            An unknown sequence, or more tokens than it has.

        Examples
        --------
        >>> pool = BlockPool.empty(num_blocks=8, block_size=4).allocate("a", [1, 2, 3, 4, 5])
        >>> pool.allocate("b", [1, 2, 3, 4, 5])["b"].num_reused  # nothing is in the cache yet
        0
        >>> pool.mark_computed("a").allocate("b", [1, 2, 3, 4, 5])["b"].num_reused
        4
        """
        sequence = self[seq_id]
        count = sequence.num_new if num_tokens is None else num_tokens
        check_int("num_tokens", count, low=0, high=sequence.num_new, error=CacheError)
        computed = sequence.num_computed + count
        sequences = {**self.sequences, seq_id: attrs.evolve(sequence, num_computed=computed)}
        if computed // self.block_size == sequence.num_computed // self.block_size:
            return attrs.evolve(self, sequences=sequences)
        block_of, digest_of = dict(self.block_of), dict(self.digest_of)
        parent = b""
        for i in range(computed // self.block_size):
            block = sequence.block_ids[i]
            parent = digest_of.get(block) or _digest(parent, self._block_tokens(sequence, i))
            # Two sequences may compute the same tokens side by side; the first block to be known stays the known one.
            if parent not in block_of:
                block_of[parent], digest_of[block] = block, parent
        return attrs.evolve(self, sequences=sequences, block_of=block_of, digest_of=digest_of)

    def fork(self, seq_id: Hashable, new_id: Hashable) -> BlockPool:
        """A second sequence with the same tokens on the same blocks; the first to append to a shared block gets a copy.

        Look-ahead blocks stay with the first sequence.

        Raises
        ------
        CacheError
            An unknown sequence, a name in use, or tokens that are still to be computed.

        Examples
        --------
        >>> pool = BlockPool.empty(num_blocks=8, block_size=4).allocate("a", [1, 2, 3, 4, 5]).mark_computed("a")
        >>> pool = pool.fork("a", "b")
        >>> pool["b"].block_ids, pool.holders[:3], pool.num_free
        ((0, 1), (2, 2, 0), 6)
        """
        sequence = self[seq_id]
        _check_name("new_id", new_id)
        if new_id in self.sequences:
            raise CacheError(f"new_id: expected a new id, got {new_id!r}, which is in use")
        if sequence.num_new:
            raise CacheError(f"seq_id: expected a sequence with all tokens computed, got {sequence.num_new} left to compute")
        blocks = sequence.block_ids[: -(-len(sequence.token_ids) // self.block_size)]
        pool = self._hold(blocks)
        child = attrs.evolve(sequence, block_ids=blocks)
        return attrs.evolve(pool, sequences={**pool.sequences, new_id: child})

    def free(self, seq_id: Hashable) -> BlockPool:
        """Let a sequence go; blocks that nobody else holds become free but can be found again until they are given away.

        Raises
        ------
        CacheError
            An unknown sequence.

        Examples
        --------
        >>> pool = BlockPool.empty(num_blocks=8, block_size=4).allocate("a", [1, 2, 3, 4, 5]).mark_computed("a").free("a")
        >>> pool.num_free, pool.allocate("b", [1, 2, 3, 4, 9])["b"].num_reused  # block 0 is found again
        (8, 4)
        """
        sequence = self[seq_id]
        # Last blocks first: the start of a prompt is the likeliest to be asked for again.
        pool = self._release(sequence.block_ids[::-1])
        return attrs.evolve(pool, sequences={key: value for key, value in pool.sequences.items() if key != seq_id})

    def _tokens(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        items = as_items("token_ids", token_ids, CacheError)
        return tuple(check_int(f"token_ids[{i}]", t, low=0, high=2**63 - 1, error=CacheError) for i, t in enumerate(items))

    def _block_tokens(self, sequence: SequenceBlocks, i: int) -> tuple[int, ...]:
        return sequence.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def _hold(self, blocks: Iterable[int]) -> BlockPool:
        holders = list(self.holders)
        taken = set()
        for block in blocks:
            if holders[block] == 0:
                taken.add(block)
            holders[block] += 1
        free_order = tuple(block for block in self.free_order if block not in taken) if taken else self.free_order
        return attrs.evolve(self, holders=tuple(holders), free_order=free_order)

    def _release(self, blocks: Iterable[int]) -> BlockPool:
        holders, freed = list(self.holders), []
        for block in blocks:
            holders[block] -= 1
            if holders[block] == 0:
                freed.append(block)
        return attrs.evolve(self, holders=tuple(holders), free_order=(*self.free_order, *freed))

    def _take(self, count: int) -> tuple[BlockPool, tuple[int, ...]]:
        """Give away free blocks; what was known of them is forgotten."""
        if count > len(self.free_order):
            raise CacheError(f"free blocks: expected at least {count}, got {len(self.free_order)}")
        fresh, rest = self.free_order[:count], self.free_order[count:]
        forgotten = {self.digest_of[block] for block in fresh if block in self.digest_of}
        holders = list(self.holders)
        for block in fresh:
            holders[block] = 1
        pool = attrs.evolve(
            self,
            holders=tuple(holders),
            free_order=rest,
            block_of={d: b for d, b in self.block_of.items() if d not in forgotten} if forgotten else self.block_of,
            digest_of={b: d for b, d in self.digest_of.items() if d not in forgotten} if forgotten else self.digest_of,
        )
        return pool, fresh
