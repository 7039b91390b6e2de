"""What must be refused: the class, the text with the field and the offending value, and nothing written."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from functools import partial as call
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch

import mla
from mla import BlockPool, LatentCacheSpec, MLADims, MLAMetadata, MLAWeights, RopeSpec, RopeTable, SequenceGroup, YarnSpec
from mla.cache import allocate_latent_cache, copy_blocks_, gather_latent_cache, swap_blocks_, write_latent_cache_
from mla.compute import (
    absorb_query,
    apply_rope,
    decode,
    expand_latent,
    explain,
    head_linear,
    kernel_set,
    kernels_for,
    linear,
    merge_attn_states,
    prefill,
    prefill_workspace_bytes,
    project_output,
    rope_table,
    split_kv_b_proj,
)
from mla.errors import CacheError, DimsError, KernelError, MetadataError, MLAError, WeightsError
from mla.layer import rms_norm
from mla.loading import dequantize_block_fp8, dims_from_config, load_weights, weights_from_state_dict
from mla.metadata import (
    ContextChunk,
    DecodeMetadata,
    PagedKV,
    PrefillMetadata,
    build_metadata,
    context_workspace_tokens,
    decode_group,
    prompt_group,
    validate_metadata_values,
)

FORM = re.compile(r"(?P<field>[^:]+): expected (?P<expected>.+), got (?P<got>.+)", re.DOTALL)
PREFIX = "model.layers.0.self_attn."
INT32_MAX = 2**31 - 1
CONFIG = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 2,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "q_lora_rank": None,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


def values(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).sin().reshape(shape)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def int64(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


class World:
    """Arguments that fit one another; each case spoils one of them.

    Blocks of 4: a prompt of 3 new tokens after 4 cached ones in blocks 1 and 2, a decoding sequence of 5 tokens in 3 and 4. All
    other slots are NaN.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dims = MLADims(
            num_heads=2,
            kv_lora_rank=8,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=10,
            rope=RopeSpec(dim=4, interleaved=True),
        )
        self.kernels = kernels_for("cpu")
        self.metadata = build_metadata(
            [prompt_group(3, [1, 2], context_len=4), decode_group(5, [3, 4])],
            block_size=4,
            page_sizes=(2,),
            context_chunk_tokens=4,
        )
        self.cache = torch.full((8, 4, 12), torch.nan)
        for block in (1, 3):
            self.cache[block] = values(4, 12)
        self.q, self.kv_c, self.k_pe = values(4, 2, 10), values(4, 8), values(4, 4)
        self.slots = int64(8, 9, 10, 16)
        self.hidden = values(4, 14)
        self.table = rope_table(self.dims.rope, 16)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            "kv_a_proj_with_mqa": values(12, 14),
            "kv_a_layernorm": values(8),
            "kv_b_proj": values(32, 8),
            "o_proj": values(14, 20),
            "q_proj": values(20, 14),
        }

    @cached_property
    def compressed(self) -> dict[str, torch.Tensor]:
        """The weights of a model with q_lora_rank 5."""
        rest = {name: tensor for name, tensor in self.tensors.items() if name != "q_proj"}
        return {**rest, "q_a_proj": values(5, 14), "q_a_layernorm": values(5), "q_b_proj": values(20, 5)}

    @property
    def weights(self) -> MLAWeights:
        return MLAWeights(dims=self.dims, **self.tensors)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The weights as a checkpoint names them."""
        return {f"{PREFIX}{name}.weight": tensor for name, tensor in self.tensors.items()}

    def make_weights(self, **changes: object) -> call[Any]:
        return call(MLAWeights, **{"dims": self.dims, **self.tensors, **changes})

    def make_compressed(self, **changes: object) -> call[Any]:
        return call(MLAWeights, **{"dims": attrs.evolve(self.dims, q_lora_rank=5), **self.compressed, **changes})

    def from_state(self, changes: Mapping[str, object], *, prefix: str = PREFIX, **options: object) -> call[Any]:
        state = {name: tensor for name, tensor in {**self.state, **changes}.items() if tensor is not None}
        return call(weights_from_state_dict, state, self.dims, prefix=prefix, **options)

    def load(self, config: object = None, state: Mapping[str, torch.Tensor] | None = None, layer: object = 0) -> call[Any]:
        """`load_weights` on a written checkpoint; strings stand for a file's whole text."""
        from safetensors.torch import save_file

        text = config if isinstance(config, str) else json.dumps(CONFIG if config is None else config)
        (self.folder / "config.json").write_text(text)
        save_file(self.state if state is None else dict(state), self.folder / "model.safetensors")
        return call(load_weights, self.folder, layer)

    def load_indexed(self, index: object) -> call[Any]:
        loading = self.load()
        text = index if isinstance(index, str) else json.dumps(index)
        (self.folder / "model.safetensors.index.json").write_text(text)
        return loading

    def write(self, **changes: object) -> call[Any]:
        whole = {"latent_cache": self.cache, "kv_c": self.kv_c, "k_pe": self.k_pe, "slot_mapping": self.slots}
        return call(write_latent_cache_, **{**whole, **changes})

    def gather(self, **changes: object) -> call[Any]:
        return call(
            gather_latent_cache, **{"latent_cache": self.cache, "slots": int64(4, 5), "out": torch.zeros(3, 12), **changes}
        )

    def merge(self, **changes: object) -> call[Any]:
        whole = {
            "prefix_out": values(3, 2, 5),
            "prefix_lse": values(3, 2),
            "suffix_out": values(3, 2, 5),
            "suffix_lse": values(3, 2),
        }
        return call(merge_attn_states, **{**whole, **changes})

    def attend(self, **changes: object) -> call[Any]:
        whole = {
            "q": self.q,
            "kv_c_normed": self.kv_c,
            "k_pe": self.k_pe,
            "latent_cache": self.cache,
            "metadata": self.metadata,
            "kv_b_proj": self.tensors["kv_b_proj"],
            "dims": self.dims,
            "kernels": self.kernels,
        }
        return call(mla.attend, **{**whole, **changes})

    def layer(self, **changes: object) -> call[Any]:
        whole = {
            "hidden_states": self.hidden,
            "weights": self.weights,
            "latent_cache": self.cache,
            "metadata": self.metadata,
            "rope_table": self.table,
            "kernels": self.kernels,
        }
        return call(mla.mla_attention, **{**whole, **changes})

    def prefill(self, **changes: object) -> call[Any]:
        whole = {
            "q": self.q[:3],
            "kv_c": self.kv_c[:3],
            "k_pe": self.k_pe[:3],
            "latent_cache": self.cache,
            "metadata": self.metadata.prefill,
            "kv_b_proj": self.tensors["kv_b_proj"],
            "dims": self.dims,
            "kernels": self.kernels,
        }
        return call(prefill, **{**whole, **changes})

    def decode(self, **changes: object) -> call[Any]:
        whole = {
            "q": self.q[3:],
            "latent_cache": self.cache,
            "metadata": self.metadata.decode,
            "kv_b_proj": self.tensors["kv_b_proj"],
            "dims": self.dims,
            "kernels": self.kernels,
        }
        return call(decode, **{**whole, **changes})

    def raw_decode(self, **changes: object) -> call[Any]:
        whole = {"q": values(1, 2, 12), "latent_cache": self.cache, "metadata": self.metadata.decode}
        return call(self.kernels.paged_decode, **{**whole, "kv_lora_rank": 8, "softmax_scale": 0.3, **changes})

    def raw_varlen(self, **changes: object) -> call[Any]:
        whole = {"q": values(2, 2, 10), "k": values(3, 2, 10), "v": values(3, 2, 6), "causal": True, "softmax_scale": 0.3}
        starts = {"query_start_loc": int32(0, 2), "kv_start_loc": int32(0, 3), "max_query_len": 2, "max_kv_len": 3}
        return call(self.kernels.varlen_attention, **{**whole, **starts, **changes})

    def plan_of(self, *groups: SequenceGroup) -> object:
        return self.kernels.plan(build_metadata(list(groups), block_size=4).decode)

    def part(self, name: str, **changes: object) -> call[Any]:
        """Remake one part of the metadata with other fields."""
        return call(attrs.evolve, getattr(self.metadata, name), **changes)

    def record(self, **changes: object) -> call[Any]:
        return call(attrs.evolve, self.metadata, **changes)

    def chunk(self, **changes: object) -> call[Any]:
        return call(attrs.evolve, self.metadata.prefill.context_chunks[0], **changes)

    def paged(self, **changes: object) -> call[Any]:
        return call(attrs.evolve, self.metadata.decode.paged_kv[0], **changes)

    def tampered(self, part: str, **changes: object) -> MLAMetadata:
        return attrs.evolve(self.metadata, **{part: self.part(part, **changes)()})

    def validate(self, part: str = "", num_blocks: int | None = None, **changes: object) -> call[Any]:
        """`validate_metadata_values` of a record with changed values, in the whole or in one part."""
        metadata = self.tampered(part, **changes) if part else self.record(**changes)()
        return call(validate_metadata_values, metadata, num_blocks=num_blocks)

    def validate_chunk(self, **changes: object) -> call[Any]:
        return self.validate("prefill", context_chunks=(self.chunk(**changes)(),))

    def validate_paged(self, **changes: object) -> call[Any]:
        return self.validate("decode", paged_kv=(self.paged(**changes)(),))


Make = Callable[[World], "call[Any]"]


class Bad(NamedTuple):
    """A refused call: the message opens with `field`, and what follows ``got`` contains `got` as a word of its own."""

    name: str
    make: Make
    field: str
    got: str
    error: type[MLAError] | None = None
    fault: str | None = None


def build(*groups: object, block_size: object = 4, **options: object) -> Make:
    return lambda _: call(build_metadata, list(groups), block_size=block_size, **options)


def group(**changes: object) -> SequenceGroup:
    return SequenceGroup(**{"is_prompt": True, "query_lens": (3,), "context_lens": (0,), "block_ids": ((1,),), **changes})


def make_group(**changes: object) -> Make:
    return lambda _: call(group, **changes)


PROMPT, DECODE = prompt_group(3, [1]), decode_group(5, [2, 3])
CRASH = "another exception class"
ACCEPTED = "accepted silently"

GROUPS = [
    Bad("group_flag_is_int", make_group(is_prompt=1), "is_prompt", "1"),
    Bad("group_flag_is_none", make_group(is_prompt=None), "is_prompt", "None"),
    Bad("group_without_sequences", make_group(query_lens=(), context_lens=(), block_ids=()), "query_lens", "none"),
    Bad("group_context_lens_too_many", make_group(context_lens=(0, 1)), "context_lens", "2"),
    Bad("group_tables_too_many", make_group(block_ids=((1,), (2,))), "block_ids", "2"),
    Bad("group_seq_lens_too_few", make_group(seq_lens=()), "seq_lens", "0"),
    Bad("group_seq_ids_too_many", make_group(seq_ids=(1, 2)), "seq_ids", "2"),
    Bad("group_query_lens_is_none", make_group(query_lens=None), "query_lens", "None"),
    Bad("group_query_lens_is_float", make_group(query_lens=3.0), "query_lens", "3.0"),
    Bad("group_table_of_a_bare_int", make_group(block_ids=5), "block_ids", "5"),
    Bad("prompt_length_is_negative", lambda _: call(prompt_group, -1), "query_len", "-1"),
    Bad("prompt_length_is_bool", lambda _: call(prompt_group, True), "query_len", "True"),
    Bad("prompt_length_is_float", lambda _: call(prompt_group, 3.0), "query_len", "3.0"),
    Bad("prompt_length_is_text", lambda _: call(prompt_group, "3"), "query_len", "'3'"),
    Bad("prompt_length_is_tensor", lambda _: call(prompt_group, int64(3)), "query_len", "tensor"),
    Bad("prompt_length_is_array", lambda _: call(prompt_group, np.array([3])), "query_len", "array"),
    Bad("decode_length_is_negative", lambda _: call(decode_group, -1, [1]), "seq_len", "-1"),
    Bad("decode_length_is_numpy_float", lambda _: call(decode_group, np.float64(3), [1]), "seq_len", "3.0"),
    Bad("decode_query_is_none", lambda _: call(decode_group, 3, [1], query_len=None), "query_len", "None"),
    Bad(
        "decode_query_longer_than_sequence",
        lambda _: call(decode_group, 3, [1], query_len=5),
        "query_len",
        "5",
    ),
]

BUILDER = [
    Bad("no_groups", build(), "groups", "none"),
    Bad("group_of_another_type", build({"query_len": 3}), "groups[0]", "dict"),
    Bad("group_is_none", build(PROMPT, None), "groups[1]", "None"),
    Bad("one_group_not_in_a_list", lambda _: call(build_metadata, PROMPT, block_size=4), "groups", "SequenceGroup"),
    Bad("prompt_after_decode", build(DECODE, PROMPT), "groups", "groups[1]"),
    Bad("prompt_after_decode_later", build(PROMPT, DECODE, prompt_group(1, [7])), "groups", "groups[2]"),
    Bad("sliding_window", build(PROMPT, group(sliding_window=128)), "sliding_window", "128 in groups[1]"),
    Bad("sliding_window_of_zero", build(group(sliding_window=0)), "sliding_window", "0 in groups[0]"),
    Bad("query_len_negative", build(group(query_lens=(-3,))), "query_lens[0]", "-3"),
    Bad("query_len_float", build(group(query_lens=(3.0,))), "query_lens[0]", "3.0"),
    Bad("query_len_numpy_float", build(group(query_lens=(np.float32(2),))), "query_lens[0]", "2.0"),
    Bad("query_len_bool", build(group(query_lens=(True,))), "query_lens[0]", "True"),
    Bad(
        "query_len_bool_beside_an_int",
        build(group(query_lens=(1, True), context_lens=(0, 0), block_ids=((1,), (2,)))),
        "query_lens[1]",
        "True",
    ),
    Bad("query_len_text", build(group(query_lens="3")), "query_lens[0]", "'3'"),
    Bad("query_len_none", build(group(query_lens=(None,))), "query_lens[0]", "None"),
    Bad("query_len_past_int32", build(group(query_lens=(2**31,))), "query_lens[0]", "2147483648"),
    Bad("query_len_past_int64", build(group(query_lens=(2**70,))), "query_lens[0]", str(2**70)),
    Bad("context_len_negative", build(group(context_lens=(-1,))), "context_lens[0]", "-1"),
    Bad("prompt_context_len_negative", lambda _: call(prompt_group, 3, [1], context_len=-1), "context_len", "-1"),
    Bad("context_len_float", build(group(context_lens=(1.5,))), "context_lens[0]", "1.5"),
    Bad("context_len_past_int32", build(prompt_group(3, [1], context_len=2**31)), "context_lens[0]", str(2**31)),
    Bad("seq_len_does_not_add_up", build(group(seq_lens=(4,))), "seq_lens", "4"),
    Bad("seq_len_of_a_named_sequence", build(group(seq_lens=(2,), seq_ids=(77,))), "seq_lens", "2"),
    Bad("seq_len_float", build(group(seq_lens=(3.0,))), "seq_lens[0]", "3.0"),
    Bad("block_id_negative", build(prompt_group(3, [-1])), "block_ids[0]", "-1"),
    Bad("block_id_negative_in_array", build(PROMPT, decode_group(5, np.array([2, -7]))), "block_ids[1]", "-7"),
    Bad("block_id_past_int32", build(prompt_group(3, [2**31])), "block_ids[0]", "2147483648"),
    Bad("block_id_past_int32_in_array", build(prompt_group(3, np.array([2**31]))), "block_ids[0]", "2147483648"),
    Bad("block_id_past_int64", build(prompt_group(3, [2**63])), "block_ids[0][0]", str(2**63)),
    Bad(
        "block_id_past_int64_in_array",
        build(prompt_group(3, np.array([2**63], np.uint64))),
        "block_ids[0]",
        str(2**63),
    ),
    Bad("block_id_float", build(prompt_group(3, [1.5])), "block_ids[0][0]", "1.5"),
    Bad("block_id_numpy_float", build(prompt_group(3, [np.float64(2.7)])), "block_ids[0][0]", "2.7"),
    Bad("block_id_bool", build(prompt_group(3, [True])), "block_ids[0][0]", "True"),
    Bad("block_id_text", build(prompt_group(3, ["3"])), "block_ids[0][0]", "'3'"),
    Bad("block_id_none", build(prompt_group(3, [None])), "block_ids[0][0]", "None"),
    Bad("table_of_floats", build(prompt_group(3, np.array([1.0]))), "block_ids[0]", "float64"),
    Bad(
        "table_of_floats_beside_a_list",
        build(PROMPT, prompt_group(3, np.array([2.9]))),
        "block_ids[1][0]",
        "2.9",
    ),
    Bad("table_of_bools", build(prompt_group(3, np.array([True]))), "block_ids[0]", "bool"),
    Bad("table_with_two_dimensions", build(prompt_group(3, np.ones((1, 1), int))), "block_ids[0]", "(1, 1)"),
    Bad("table_is_an_int", build(prompt_group(3, 5)), "block_ids[0]", "5"),
    Bad("table_too_short", build(decode_group(9, [2, 3])), "block_ids", "2"),
    Bad("table_empty", build(prompt_group(3, [])), "block_ids", "0"),
    Bad("tables_for_some_prompts_only", build(PROMPT, prompt_group(3)), "block_ids", "groups[1]"),
    Bad(
        "table_of_one_sequence_missing",
        build(group(query_lens=(3, 3), context_lens=(0, 0), block_ids=((1,), None))),
        "block_ids",
        "None",
    ),
    Bad("decode_without_table", build(group(is_prompt=False, block_ids=None)), "block_ids", "groups[0]"),
    Bad(
        "prefix_hit_without_table",
        build(group(block_ids=None, context_lens=(4,), prefix_cache_hit=True)),
        "block_ids",
        "groups[0]",
    ),
    Bad("slot_of_two_sequences", build(prompt_group(3, [1]), prompt_group(2, [1])), "block_ids", "sequences 0 and 1"),
    Bad("slot_of_prompt_and_decode", build(prompt_group(3, [4]), decode_group(5, [2, 4])), "block_ids", "slot 16"),
    Bad("block_twice_in_one_table", build(prompt_group(8, [3, 3], seq_id=9)), "block_ids", "sequences 9 and 9"),
    Bad(
        "slot_in_the_context_of_another",
        build(prompt_group(3, [2]), decode_group(5, [2, 4])),
        "block_ids",
        "slot 8",
    ),
    Bad("block_size_zero", build(PROMPT, block_size=0), "block_size", "0"),
    Bad("block_size_negative", build(PROMPT, block_size=-16), "block_size", "-16"),
    Bad("block_size_float", build(PROMPT, block_size=4.0), "block_size", "4.0"),
    Bad("block_size_bool", build(PROMPT, block_size=True), "block_size", "True"),
    Bad("block_size_none", build(PROMPT, block_size=None), "block_size", "None"),
    Bad("block_size_array", build(PROMPT, block_size=np.array([4])), "block_size", "array"),
    Bad(
        "slots_past_int64",
        build(prompt_group(1, [2**30]), block_size=2**34),
        "block_size",
        str(2**34),
    ),
    Bad("page_size_does_not_divide", build(PROMPT, page_sizes=(3,)), "page_sizes", "3"),
    Bad("page_size_above_block_size", build(PROMPT, page_sizes=(8,)), "page_sizes", "8"),
    Bad("page_size_zero", build(PROMPT, page_sizes=(2, 0)), "page_sizes[1]", "0"),
    Bad("page_size_float", build(PROMPT, page_sizes=(1.0,)), "page_sizes[0]", "1.0"),
    Bad("page_size_twice", build(PROMPT, page_sizes=(2, 2)), "paged_kv", "[2, 2]"),
    Bad("page_sizes_is_an_int", build(PROMPT, page_sizes=2), "page_sizes", "2"),
    Bad("page_size_does_not_divide_on_profile_run", build(prompt_group(3), page_sizes=(3,)), "page_sizes", "3"),
    Bad("page_numbers_past_int32", build(prompt_group(3, [INT32_MAX]), page_sizes=(1,)), "page_sizes", str(2**33 - 1)),
    Bad(
        "total_past_int32",
        build(decode_group(INT32_MAX, [0, 1]), decode_group(INT32_MAX, [2, 3]), block_size=2**30),
        "seq_lens",
        str(2 * INT32_MAX),
    ),
    Bad(
        "length_past_int32",
        build(prompt_group(1, [0, 1, 2], context_len=INT32_MAX), block_size=2**30, context_chunk_tokens=2**30),
        "seq_lens",
        str(2**31),
    ),
    Bad("chunk_zero", build(PROMPT, context_chunk_tokens=0), "context_chunk_tokens", "0"),
    Bad("chunk_float", build(PROMPT, context_chunk_tokens=64.0), "context_chunk_tokens", "64.0"),
    Bad(
        "chunk_zero_without_prompts",
        build(DECODE, context_chunk_tokens=0),
        "context_chunk_tokens",
        "0",
    ),
    Bad("workspace_zero", build(PROMPT, context_workspace_tokens=0), "context_workspace_tokens", "0"),
    Bad(
        "workspace_below_chunk",
        build(PROMPT, context_chunk_tokens=64, context_workspace_tokens=63),
        "context_workspace_tokens",
        "63",
    ),
    Bad(
        "equal_shares_below_a_block",
        build(
            prompt_group(1, [1, 2], context_len=4),
            prompt_group(1, [3, 4], context_len=4),
            chunk_policy="equal_shares",
            context_workspace_tokens=7,
        ),
        "context_workspace_tokens",
        "7",
    ),
    Bad(
        "equal_shares_of_nothing",
        build(PROMPT, chunk_policy="equal_shares", context_workspace_tokens=0),
        "context_workspace_tokens",
        "0",
    ),
    Bad("chunk_policy_unknown", build(PROMPT, chunk_policy="equal"), "chunk_policy", "'equal'"),
    Bad("chunk_policy_none", build(PROMPT, chunk_policy=None), "chunk_policy", "None"),
    Bad("padding_below_decodes", build(DECODE, decode_group(1, [5]), pad_decodes_to=1), "pad_decodes_to", "1"),
    Bad("padding_zero", build(PROMPT, pad_decodes_to=0), "pad_decodes_to", "0"),
    Bad("padding_float", build(DECODE, pad_decodes_to=4.0), "pad_decodes_to", "4.0"),
    Bad("padding_on_profile_run", build(prompt_group(3), pad_decodes_to=4), "pad_decodes_to", "4"),
    Bad("row_limit_too_small", build(DECODE, max_blocks_per_seq=1), "max_blocks_per_seq", "1"),
    Bad("row_limit_zero", build(PROMPT, max_blocks_per_seq=0), "max_blocks_per_seq", "0"),
    Bad("row_limit_bool", build(PROMPT, max_blocks_per_seq=True), "max_blocks_per_seq", "True"),
    Bad("row_limit_zero_on_profile_run", build(prompt_group(3), max_blocks_per_seq=0), "max_blocks_per_seq", "0"),
    Bad("device_unknown", build(PROMPT, device="nowhere"), "device", "nowhere"),
    Bad(
        "workspace_rule_without_room",
        lambda _: call(context_workspace_tokens, max_model_len=4096, max_num_seqs=1024, block_size=256),
        "limit",
        "131072",
    ),
    Bad(
        "workspace_rule_without_sequences",
        lambda _: call(context_workspace_tokens, max_model_len=4096, max_num_seqs=0, block_size=16),
        "max_num_seqs",
        "0",
    ),
]

RECORDS = [
    Bad("part_seq_lens_rank", lambda w: w.part("decode", seq_lens=torch.ones(1, 1, dtype=torch.int32)), "seq_lens", "(1, 1)"),
    Bad("part_seq_lens_dtype", lambda w: w.part("decode", seq_lens=int64(5)), "seq_lens", "torch.int64"),
    Bad("part_seq_lens_device", lambda w: w.part("decode", seq_lens=int32(5).to("meta")), "seq_lens", "meta"),
    Bad("part_seq_lens_list", lambda w: w.part("decode", seq_lens=[5]), "seq_lens", "list"),
    Bad("part_seq_lens_none", lambda w: w.part("decode", seq_lens=None), "seq_lens", "None"),
    Bad("part_seq_lens_too_many", lambda w: w.part("decode", seq_lens=int32(5, 5)), "seq_lens", "(2,)"),
    Bad("part_starts_too_few", lambda w: w.part("decode", seq_start_loc=int32(0)), "seq_start_loc", "(1,)"),
    Bad("part_starts_empty", lambda w: w.part("decode", query_start_loc=int32()), "query_start_loc", "(0,)"),
    Bad("part_positions_dtype", lambda w: w.part("decode", positions=int32(4)), "positions", "torch.int32"),
    Bad("part_positions_too_many", lambda w: w.part("decode", positions=int64(4, 5)), "positions", "(2,)"),
    Bad("part_slots_dtype", lambda w: w.part("prefill", slot_mapping=int32(8, 9, 10)), "slot_mapping", "torch.int32"),
    Bad("part_slots_rank", lambda w: w.part("prefill", slot_mapping=torch.tensor(8)), "slot_mapping", "()"),
    Bad("part_table_rank", lambda w: w.part("decode", block_table=int32(3, 4)), "block_table", "(2,)"),
    Bad("part_table_rows", lambda w: w.part("decode", block_table=int32(3, 4).view(2, 1)), "block_table", "(2, 1)"),
    Bad("part_table_dtype", lambda w: w.part("decode", block_table=int64(3, 4)[None]), "block_table", "torch.int64"),
    Bad("part_decode_table_missing", lambda w: w.part("decode", block_table=None), "block_table", "None"),
    Bad("part_context_without_table", lambda w: w.part("prefill", block_table=None), "block_table", "None"),
    Bad("part_count_negative", lambda w: w.part("decode", max_query_len=-1), "max_query_len", "-1"),
    Bad("part_count_tensor", lambda w: w.part("decode", max_seq_len=int64(5)), "max_seq_len", "tensor"),
    Bad("part_count_float", lambda w: w.part("prefill", min_num_blocks=3.0), "min_num_blocks", "3.0"),
    Bad("part_block_size_zero", lambda w: w.part("prefill", block_size=0), "block_size", "0"),
    Bad("part_steps_negative", lambda w: w.part("decode", steps_left=-1), "steps_left", "-1"),
    Bad(
        "part_pages_of_other_rows",
        lambda w: w.part("decode", paged_kv=(w.paged(paged_kv_indptr=int32(0, 1, 3), paged_kv_last_page_lens=int32(2, 1))(),)),
        "paged_kv_last_page_lens (page_size 2)",
        "(2,)",
    ),
    Bad(
        "part_pages_elsewhere",
        lambda w: w.part("decode", paged_kv=(w.metadata.decode.paged_kv[0].to("meta"),)),
        "paged_kv_last_page_lens (page_size 2)",
        "meta",
    ),
    Bad("part_pages_twice", lambda w: w.part("decode", paged_kv=w.metadata.decode.paged_kv * 2), "paged_kv", "[2, 2]"),
    Bad("part_pages_none", lambda w: w.part("decode", paged_kv=None), "paged_kv", "None"),
    Bad("part_pages_of_another_type", lambda w: w.part("decode", paged_kv=(2,)), "paged_kv[0]", "int"),
    Bad(
        "part_pages_in_a_list",
        lambda w: w.part("decode", paged_kv=list(w.metadata.decode.paged_kv)),
        "paged_kv",
        "list",
    ),
    Bad(
        "part_chunk_of_more_prompts",
        lambda w: w.part(
            "prefill",
            context_chunks=(
                w.chunk(num_seqs=2, query_start_loc=int32(0, 3, 3), kv_start_loc=int32(0, 4, 4), starts=int32(0, 0))(),
            ),
        ),
        "context_chunks",
        "2 and 3",
    ),
    Bad(
        "part_chunk_of_more_tokens",
        lambda w: w.part("prefill", context_chunks=(w.chunk(first_token=1)(),)),
        "context_chunks",
        "1 and 4",
    ),
    Bad(
        "part_chunk_elsewhere",
        lambda w: w.part("prefill", context_chunks=(w.metadata.prefill.context_chunks[0].to("meta"),)),
        "context_chunks[0]",
        "meta",
    ),
    Bad("part_chunks_none", lambda w: w.part("prefill", context_chunks=None), "context_chunks", "None"),
    Bad("part_chunk_of_another_type", lambda w: w.part("prefill", context_chunks=(7,)), "context_chunks[0]", "int"),
    Bad("chunk_count_of_prompts", lambda w: w.chunk(num_seqs=2), "query_start_loc", "(2,)"),
    Bad("chunk_slots_dtype", lambda w: w.chunk(slots=int32(4, 5, 6, 7)), "slots", "torch.int32"),
    Bad("chunk_starts_rank", lambda w: w.chunk(starts=torch.tensor(0, dtype=torch.int32)), "starts", "()"),
    Bad("chunk_device", lambda w: w.chunk(starts=int32(0).to("meta")), "starts", "meta"),
    Bad("chunk_count_negative", lambda w: w.chunk(first_seq=-1), "first_seq", "-1"),
    Bad("paged_page_size_zero", lambda w: w.paged(page_size=0), "page_size", "0"),
    Bad("paged_indptr_of_length_one", lambda w: w.paged(paged_kv_indptr=int32(0)), "paged_kv_last_page_lens", "(1,)"),
    Bad("paged_indices_rank", lambda w: w.paged(paged_kv_indices=int32(6, 7, 8)[None]), "paged_kv_indices", "(1, 3)"),
    Bad("paged_dtype", lambda w: w.paged(paged_kv_indices=int64(6, 7, 8)), "paged_kv_indices", "torch.int64"),
    Bad("whole_without_parts", lambda w: w.record(prefill=None, decode=None), "prefill, decode", "None"),
    Bad("whole_without_prefill", lambda w: w.record(prefill=None), "slot_mapping", "4"),
    Bad("whole_block_size", lambda w: w.record(block_size=8), "prefill.block_size", "4"),
    Bad("whole_block_size_bool", lambda w: w.record(block_size=True), "block_size", "True"),
    Bad("whole_part_elsewhere", lambda w: w.record(decode=w.metadata.decode.to("meta")), "decode", "meta"),
    Bad("whole_slots_too_few", lambda w: w.record(slot_mapping=int64(8, 9, 10)), "positions", "(4,)"),
    Bad("whole_slots_list", lambda w: w.record(slot_mapping=[8, 9, 10, 16]), "slot_mapping", "list"),
    Bad(
        "whole_decode_as_prefill",
        lambda w: w.record(prefill=w.metadata.decode, decode=w.metadata.prefill),
        "prefill",
        "DecodeMetadata",
    ),
    Bad("whole_part_of_another_type", lambda w: w.record(prefill="prompt"), "prefill", "str"),
    Bad(
        "whole_profile_run_with_blocks",
        lambda w: w.record(is_profile_run=True),
        "is_profile_run",
        "True",
    ),
]

NO_VALUE = "the text says 'got other values' and shows none of them"

VALUES = [
    Bad("value_metadata_of_another_type", lambda w: call(validate_metadata_values, 5), "metadata", "int"),
    Bad(
        "value_metadata_is_a_part",
        lambda w: call(validate_metadata_values, w.metadata.decode),
        "metadata",
        "DecodeMetadata",
    ),
    Bad("value_cache_too_small", lambda w: w.validate(num_blocks=4), "min_num_blocks", "5"),
    Bad("value_slot_outside", lambda w: w.validate(slot_mapping=int64(8, 9, 10, 999)), "slot_mapping", "999"),
    Bad("value_slot_below_padding", lambda w: w.validate(slot_mapping=int64(8, 9, 10, -2)), "slot_mapping", "-2"),
    Bad("value_slot_twice", lambda w: w.validate(slot_mapping=int64(8, 9, 9, 16)), "slot_mapping", "slot 9"),
    Bad(
        "value_slot_of_part_differs",
        lambda w: w.validate("decode", slot_mapping=int64(17)),
        "slot_mapping",
        "17",
    ),
    Bad(
        "value_position_of_part_differs",
        lambda w: w.validate("prefill", positions=int64(4, 5, 7)),
        "positions",
        "7",
    ),
    Bad(
        "value_slot_of_another_block",
        lambda w: call(
            validate_metadata_values,
            attrs.evolve(w.tampered("decode", slot_mapping=int64(12)), slot_mapping=int64(8, 9, 10, 12)),
        ),
        "slot_mapping",
        "12",
    ),
    Bad(
        "value_position_not_counting",
        lambda w: call(
            validate_metadata_values, attrs.evolve(w.tampered("decode", positions=int64(3)), positions=int64(4, 5, 6, 3))
        ),
        "positions",
        "3",
    ),
    Bad("value_query_starts_decrease", lambda w: w.validate("prefill", query_start_loc=int32(0, -3)), "query_start_loc", "-3"),
    Bad(
        "value_query_starts_not_at_zero",
        lambda w: w.validate("decode", query_start_loc=int32(1, 2)),
        "query_start_loc",
        "[1, 2]",
    ),
    Bad("value_seq_starts_step", lambda w: w.validate("decode", seq_start_loc=int32(0, 6)), "seq_start_loc", "6"),
    Bad("value_context_negative", lambda w: w.validate("decode", context_lens=int32(-1)), "context_lens", "-1"),
    Bad("value_context_beyond_longest", lambda w: w.validate("prefill", context_lens=int32(8)), "context_lens", "8"),
    Bad("value_lengths_do_not_add_up", lambda w: w.validate("decode", context_lens=int32(3)), "seq_lens", "5"),
    Bad("value_query_beyond_longest", lambda w: w.validate("prefill", max_query_len=2), "query lengths (query_start_loc)", "3"),
    Bad("value_seq_beyond_longest", lambda w: w.validate("prefill", max_seq_len=6), "seq_lens", "7"),
    Bad("value_blocks_beyond_min_num_blocks", lambda w: w.validate("prefill", min_num_blocks=2), "block_table", "2"),
    Bad("value_block_negative", lambda w: w.validate("decode", block_table=int32(3, -1)[None]), "block_table", "-1"),
    Bad("value_block_outside", lambda w: w.validate("decode", block_table=int32(3, 99)[None]), "block_table", "99"),
    Bad("value_table_too_narrow", lambda w: w.validate("decode", block_table=int32(3)[None]), "block_table", "4"),
    Bad("value_page_counts", lambda w: w.validate_paged(paged_kv_indptr=int32(0, 2)), "paged_kv_indptr", "2"),
    Bad("value_page_starts_decrease", lambda w: w.validate_paged(paged_kv_indptr=int32(0, -3)), "paged_kv_indptr", "-3"),
    Bad("value_pages_missing", lambda w: w.validate_paged(paged_kv_indices=int32(6, 7)), "paged_kv_indices", "2"),
    Bad("value_page_outside", lambda w: w.validate_paged(paged_kv_indices=int32(6, 7, 99)), "paged_kv_indices", "99"),
    Bad(
        "value_page_of_another_block",
        lambda w: w.validate_paged(paged_kv_indices=int32(6, 7, 2)),
        "paged_kv_indices",
        "2",
    ),
    Bad(
        "value_last_page",
        lambda w: w.validate_paged(paged_kv_last_page_lens=int32(2)),
        "paged_kv_last_page_lens",
        "2",
    ),
    Bad(
        "value_page_size_above_block_size",
        lambda w: w.validate_paged(
            page_size=8, paged_kv_indptr=int32(0, 1), paged_kv_indices=int32(1), paged_kv_last_page_lens=int32(5)
        ),
        "page_size",
        "8",
    ),
    Bad("value_chunk_slots", lambda w: w.validate_chunk(slots=int64(4, 5, 6, 999)), "slots", "999"),
    Bad("value_chunk_slots_negative", lambda w: w.validate_chunk(slots=int64(-1, 5, 6, 7)), "slots", "-1"),
    Bad("value_chunk_key_starts", lambda w: w.validate_chunk(kv_start_loc=int32(0, 9)), "kv_start_loc", "9"),
    Bad(
        "value_chunk_query_starts",
        lambda w: w.validate_chunk(query_start_loc=int32(0, 2)),
        "query_start_loc",
        "2",
    ),
    Bad("value_chunk_start", lambda w: w.validate_chunk(starts=int32(3)), "starts", "3"),
    Bad("value_chunk_longest_key", lambda w: w.validate_chunk(max_kv_len=3), "max_kv_len", "3"),
    Bad("value_chunks_missing", lambda w: w.validate("prefill", context_chunks=()), "context_chunks", "0"),
    Bad("value_steps_left", lambda w: w.validate("decode", steps_left=4), "steps_left", "4"),
]


def dims(**changes: object) -> Make:
    return lambda w: call(attrs.evolve, w.dims, **changes)


def new_dims(**changes: object) -> Make:
    sizes = {"num_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
    return lambda w: call(MLADims, **{**sizes, "rope": w.dims.rope, **changes})


def rope(**changes: object) -> Make:
    return lambda _: call(RopeSpec, **{"dim": 4, "interleaved": True, **changes})


def yarn(**changes: object) -> Make:
    return lambda _: call(YarnSpec, **{"factor": 40.0, "original_max_position_embeddings": 4096, **changes})


DIMS = [
    Bad("dims_heads_zero", dims(num_heads=0), "num_heads", "0"),
    Bad("dims_heads_negative", dims(num_heads=-2), "num_heads", "-2"),
    Bad("dims_heads_bool", dims(num_heads=True), "num_heads", "True"),
    Bad("dims_heads_float", dims(num_heads=2.0), "num_heads", "2.0"),
    Bad("dims_heads_text", dims(num_heads="2"), "num_heads", "'2'"),
    Bad("dims_rank_none", dims(kv_lora_rank=None), "kv_lora_rank", "None"),
    Bad("dims_nope_negative", new_dims(qk_nope_head_dim=-128), "qk_nope_head_dim", "-128"),
    Bad("dims_nope_none", new_dims(qk_nope_head_dim=None), "qk_nope_head_dim", "None"),
    Bad("dims_nope_text", new_dims(qk_nope_head_dim="128"), "qk_nope_head_dim", "'128'"),
    Bad("dims_value_zero", dims(v_head_dim=0), "v_head_dim", "0"),
    Bad("dims_rope_odd", new_dims(qk_rope_head_dim=7), "qk_rope_head_dim", "7"),
    Bad("dims_rope_of_another_width", new_dims(rope=RopeSpec(dim=8, interleaved=True)), "rope", "dim 8"),
    Bad("dims_rope_none", new_dims(rope=None), "rope", "None"),
    Bad("dims_rope_dict", new_dims(rope={"dim": 4}), "rope", "{'dim': 4}"),
    Bad("dims_q_rank_zero", dims(q_lora_rank=0), "q_lora_rank", "0"),
    Bad("dims_q_rank_bool", dims(q_lora_rank=True), "q_lora_rank", "True"),
    Bad("dims_eps_zero", dims(rms_norm_eps=0), "rms_norm_eps", "0"),
    Bad("dims_eps_text", dims(rms_norm_eps="1e-6"), "rms_norm_eps", "'1e-6'"),
    Bad("dims_scale_zero", dims(softmax_scale=0.0), "softmax_scale", "0.0"),
    Bad("dims_scale_nan", dims(softmax_scale=float("nan")), "softmax_scale", "nan"),
    Bad("dims_scale_infinite", dims(softmax_scale=float("inf")), "softmax_scale", "inf"),
    Bad("dims_scale_tensor", dims(softmax_scale=torch.tensor(0.5)), "softmax_scale", "tensor"),
    Bad("dims_scale_none", dims(softmax_scale=None), "softmax_scale", "None"),
    Bad("rope_dim_odd", rope(dim=7), "dim", "7"),
    Bad("rope_dim_zero", rope(dim=0), "dim", "0"),
    Bad("rope_dim_none", rope(dim=None), "dim", "None"),
    Bad("rope_pairing_none", rope(interleaved=None), "interleaved", "None"),
    Bad("rope_pairing_int", rope(interleaved=1), "interleaved", "1"),
    Bad("rope_theta_zero", rope(theta=0.0), "theta", "0.0"),
    Bad("rope_theta_nan", rope(theta=float("nan")), "theta", "nan"),
    Bad("rope_yarn_dict", rope(yarn={"factor": 40.0}), "yarn", "{'factor': 40.0}"),
    Bad(
        "rope_theta_one_under_yarn",
        lambda _: call(RopeSpec, dim=4, interleaved=True, theta=1.0, yarn=yarn()(None)()),
        "theta",
        "1.0",
    ),
    Bad("yarn_factor_zero", yarn(factor=0.0), "factor", "0.0"),
    Bad("yarn_factor_infinite", yarn(factor=float("inf")), "factor", "inf"),
    Bad("yarn_factor_below_one", yarn(factor=0.5), "factor", "0.5"),
    Bad("yarn_length_float", yarn(original_max_position_embeddings=4096.0), "original_max_position_embeddings", "4096.0"),
    Bad("yarn_beta_negative", yarn(beta_fast=-32.0), "beta_fast", "-32.0"),
    Bad(
        "yarn_betas_swapped",
        yarn(beta_fast=1.0, beta_slow=32.0),
        "beta_fast",
        "1.0",
    ),
    Bad("yarn_mscale_negative", yarn(mscale=-1.0), "mscale", "-1.0"),
    Bad("yarn_mscale_text", yarn(mscale_all_dim="1"), "mscale_all_dim", "'1'"),
]


def spec(**changes: object) -> Make:
    sizes = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "block_size": 4, "dtype": torch.float32}
    return lambda _: call(LatentCacheSpec, **{**sizes, **changes})


SPEC = spec()(None)()
POOL = BlockPool.empty(num_blocks=2, block_size=4).allocate("a", [1, 2, 3])

CACHE = [
    Bad("spec_rank_zero", spec(kv_lora_rank=0), "kv_lora_rank", "0"),
    Bad("spec_rope_bool", spec(qk_rope_head_dim=True), "qk_rope_head_dim", "True"),
    Bad("spec_block_size_float", spec(block_size=16.0), "block_size", "16.0"),
    Bad("spec_dtype_int8", spec(dtype=torch.int8), "dtype", "torch.int8"),
    Bad("spec_dtype_text", spec(dtype="float32"), "dtype", "'float32'"),
    Bad("spec_shape_negative", lambda _: call(SPEC.shape, -1), "num_blocks", "-1"),
    Bad("spec_budget_negative", lambda _: call(SPEC.blocks_that_fit, -1), "num_bytes", "-1"),
    Bad("spec_layers_zero", lambda _: call(SPEC.blocks_that_fit, 1000, num_layers=0), "num_layers", "0"),
    Bad("allocate_negative", lambda _: call(allocate_latent_cache, SPEC, -1), "num_blocks", "-1"),
    Bad("allocate_float", lambda _: call(allocate_latent_cache, SPEC, 2.0), "num_blocks", "2.0"),
    Bad("allocate_without_spec", lambda _: call(allocate_latent_cache, (2, 4, 12), 2), "spec", "tuple"),
    Bad("write_slot_outside", lambda w: w.write(slot_mapping=int64(8, 9, 10, 32)), "slot_mapping", "32"),
    Bad("write_slot_below_padding", lambda w: w.write(slot_mapping=int64(8, 9, -2, 16)), "slot_mapping", "-2"),
    Bad("write_slot_twice", lambda w: w.write(slot_mapping=int64(8, 9, 8, -1)), "slot_mapping", "slot 8"),
    Bad("write_slots_int32", lambda w: w.write(slot_mapping=int32(8, 9, 10, 16)), "slot_mapping", "torch.int32"),
    Bad("write_slots_list", lambda w: w.write(slot_mapping=[8, 9, 10, 16]), "slot_mapping", "list"),
    Bad("write_slots_rank", lambda w: w.write(slot_mapping=w.slots[None]), "slot_mapping", "(1, 4)"),
    Bad("write_slots_elsewhere", lambda w: w.write(slot_mapping=w.slots.to("meta")), "slot_mapping", "meta"),
    Bad("write_latents_too_few", lambda w: w.write(kv_c=w.kv_c[:3]), "kv_c", "(3, 8)"),
    Bad("write_latents_rank", lambda w: w.write(kv_c=w.kv_c[0]), "kv_c", "(8,)"),
    Bad("write_latents_elsewhere", lambda w: w.write(kv_c=w.kv_c.to("meta")), "kv_c", "meta"),
    Bad("write_latents_int", lambda w: w.write(kv_c=w.kv_c.int(), k_pe=w.k_pe.int()), "kv_c", "torch.int32"),
    Bad("write_latents_too_wide", lambda w: w.write(kv_c=values(4, 9)), "kv_c, k_pe", "9 + 4"),
    Bad("write_keys_of_another_dtype", lambda w: w.write(k_pe=w.k_pe.double()), "k_pe", "torch.float64"),
    Bad("write_keys_missing", lambda w: w.write(k_pe=None), "k_pe", "None"),
    Bad("write_cache_missing", lambda w: w.write(latent_cache=None), "latent_cache", "None"),
    Bad("write_cache_rank", lambda w: w.write(latent_cache=w.cache.view(-1, 12)), "latent_cache", "(32, 12)"),
    Bad(
        "write_cache_of_keys_and_values",
        lambda w: w.write(latent_cache=torch.zeros(2, 8, 4, 1, 12)),
        "latent_cache",
        "(2, 8, 4, 1, 12)",
    ),
    Bad("write_cache_dtype", lambda w: w.write(latent_cache=w.cache.to(torch.int8)), "latent_cache", "torch.int8"),
    Bad("write_cache_strided", lambda w: w.write(latent_cache=torch.zeros(8, 4, 24)[..., ::2]), "latent_cache", "(96, 24, 2)"),
    Bad(
        "write_cache_expanded",
        lambda w: w.write(latent_cache=torch.zeros(1, 4, 12).expand(8, 4, 12)),
        "latent_cache",
        "(0, 12, 1)",
    ),
    Bad("write_cache_elsewhere", lambda w: w.write(latent_cache=w.cache.to("meta")), "slot_mapping", "cpu"),
    Bad("gather_slot_outside", lambda w: w.gather(slots=int64(4, 32)), "slots", "32"),
    Bad("gather_slot_padding", lambda w: w.gather(slots=int64(-1, 4)), "slots", "-1"),
    Bad("gather_slots_int32", lambda w: w.gather(slots=int32(4, 5)), "slots", "torch.int32"),
    Bad("gather_workspace_too_small", lambda w: w.gather(out=torch.zeros(1, 12)), "out", "1"),
    Bad("gather_workspace_too_narrow", lambda w: w.gather(out=torch.zeros(3, 11)), "out", "(3, 11)"),
    Bad("gather_workspace_rank", lambda w: w.gather(out=torch.zeros(36)), "out", "(36,)"),
    Bad("gather_workspace_elsewhere", lambda w: w.gather(out=torch.zeros(3, 12, device="meta")), "out", "meta"),
    Bad(
        "gather_workspace_int",
        lambda w: w.gather(out=torch.zeros(3, 12, dtype=torch.int32)),
        "out",
        "torch.int32",
    ),
    Bad(
        "gather_cache_strided", lambda w: w.gather(latent_cache=torch.zeros(8, 4, 24)[..., ::2]), "latent_cache", "(96, 24, 2)"
    ),
    Bad("copy_without_caches", lambda _: call(copy_blocks_, [], torch.tensor([[1, 2]])), "latent_caches", "none"),
    Bad("copy_source_outside", lambda w: call(copy_blocks_, [w.cache], torch.tensor([[8, 2]])), "src_to_dst", "8"),
    Bad("copy_destination_negative", lambda w: call(copy_blocks_, [w.cache], torch.tensor([[1, -1]])), "src_to_dst", "-1"),
    Bad(
        "copy_destination_twice",
        lambda w: call(copy_blocks_, [w.cache], torch.tensor([[1, 5], [3, 5]])),
        "src_to_dst",
        "[5, 5]",
    ),
    Bad("copy_pairs_flat", lambda w: call(copy_blocks_, [w.cache], int64(1, 2)), "src_to_dst", "(2,)"),
    Bad("copy_pairs_in_a_list", lambda w: call(copy_blocks_, [w.cache], [(1, 2)]), "src_to_dst", "list"),
    Bad("copy_pairs_float", lambda w: call(copy_blocks_, [w.cache], torch.tensor([[1.0, 2.0]])), "src_to_dst", "torch.float32"),
    Bad(
        "copy_second_cache_rank",
        lambda w: call(copy_blocks_, [w.cache, w.cache[0]], torch.tensor([[1, 2]])),
        "latent_caches[1]",
        "(4, 12)",
    ),
    Bad(
        "copy_second_cache_smaller",
        lambda w: call(copy_blocks_, [w.cache, torch.zeros(3, 4, 12)], torch.tensor([[1, 3]])),
        "latent_caches[1]",
        "3",
    ),
    Bad(
        "copy_second_cache_of_another_layout",
        lambda w: call(copy_blocks_, [w.cache, torch.zeros(8, 2, 12)], torch.tensor([[1, 2]])),
        "latent_caches[1]",
        "(8, 2, 12)",
    ),
    Bad(
        "copy_one_cache_twice",
        lambda w: call(copy_blocks_, [w.cache, w.cache], torch.tensor([[1, 2], [2, 3]])),
        "latent_caches[1]",
        "latent_caches[0]",
    ),
    Bad(
        "copy_one_cache_not_in_a_list",
        lambda w: call(copy_blocks_, w.cache, torch.tensor([[1, 2]])),
        "latent_caches",
        "Tensor",
    ),
    Bad(
        "copy_pairs_elsewhere",
        lambda w: call(copy_blocks_, [w.cache], torch.tensor([[1, 2]], device="meta")),
        "src_to_dst",
        "meta",
    ),
    Bad(
        "swap_layouts_differ",
        lambda w: call(swap_blocks_, w.cache, torch.zeros(8, 4, 13), torch.tensor([[1, 2]])),
        "dst_cache",
        "(4, 13)",
    ),
    Bad(
        "swap_dtypes_differ",
        lambda w: call(swap_blocks_, w.cache, w.cache.double(), torch.tensor([[1, 2]])),
        "dst_cache",
        "torch.float64",
    ),
    Bad(
        "swap_source_outside",
        lambda w: call(swap_blocks_, w.cache[:2], w.cache.clone(), torch.tensor([[2, 2]])),
        "src_to_dst",
        "2",
    ),
    Bad(
        "swap_destination_outside",
        lambda w: call(swap_blocks_, w.cache, torch.zeros(2, 4, 12), torch.tensor([[1, 2]])),
        "src_to_dst",
        "2",
    ),
    Bad(
        "swap_destination_twice",
        lambda w: call(swap_blocks_, w.cache, w.cache.clone(), torch.tensor([[1, 0], [3, 0]])),
        "src_to_dst",
        "[0, 0]",
    ),
    Bad("swap_source_missing", lambda w: call(swap_blocks_, None, w.cache, torch.tensor([[1, 2]])), "src_cache", "None"),
    Bad("pool_without_blocks", lambda _: call(BlockPool.empty, num_blocks=0, block_size=4), "num_blocks", "0"),
    Bad("pool_block_size_float", lambda _: call(BlockPool.empty, num_blocks=2, block_size=4.0), "block_size", "4.0"),
    Bad(
        "pool_made_by_hand_of_nothing",
        lambda _: call(BlockPool, num_blocks=0, block_size=0, holders=(), free_order=()),
        "num_blocks",
        "0",
    ),
    Bad("pool_unknown_sequence", lambda _: call(POOL.__getitem__, "b"), "seq_id", "'b'"),
    Bad("pool_name_in_use", lambda _: call(POOL.allocate, "a", [1]), "seq_id", "'a'"),
    Bad("pool_no_tokens", lambda _: call(POOL.allocate, "b", []), "token_ids", "none"),
    Bad("pool_token_negative", lambda _: call(POOL.allocate, "b", [1, -1]), "token_ids[1]", "-1"),
    Bad("pool_token_float", lambda _: call(POOL.allocate, "b", [1.0]), "token_ids[0]", "1.0"),
    Bad("pool_tokens_not_a_list", lambda _: call(POOL.allocate, "b", 5), "token_ids", "5"),
    Bad("pool_name_not_hashable", lambda _: call(POOL.allocate, ["b"], [1]), "seq_id", "['b']"),
    Bad("pool_lookahead_negative", lambda _: call(POOL.allocate, "b", [1], lookahead=-1), "lookahead", "-1"),
    Bad("pool_full", lambda _: call(POOL.allocate, "b", range(5)), "free blocks", "1"),
    Bad("pool_append_to_unknown", lambda _: call(POOL.append, "b", [1]), "seq_id", "'b'"),
    Bad("pool_append_too_many", lambda _: call(POOL.append, "a", range(6)), "free blocks", "1"),
    Bad("pool_computed_too_many", lambda _: call(POOL.mark_computed, "a", 4), "num_tokens", "4"),
    Bad("pool_computed_bool", lambda _: call(POOL.mark_computed, "a", True), "num_tokens", "True"),
    Bad("pool_fork_before_computed", lambda _: call(POOL.fork, "a", "b"), "seq_id", "3 left"),
    Bad("pool_fork_into_itself", lambda _: call(POOL.mark_computed("a").fork, "a", "a"), "new_id", "'a'"),
    Bad("pool_free_unknown", lambda _: call(POOL.free, "b"), "seq_id", "'b'"),
]


def rotate(**changes: object) -> Make:
    return lambda w: call(apply_rope, **{"x": w.k_pe, "positions": int64(0, 1, 2, 3), "table": w.table, **changes})


def table(**changes: object) -> Make:
    return lambda _: call(RopeTable, **{"cos": values(8, 2), "sin": values(8, 2), "interleaved": True, **changes})


COMPUTE = [
    Bad("table_length_zero", lambda w: call(rope_table, w.dims.rope, 0), "max_len", "0"),
    Bad("table_length_float", lambda w: call(rope_table, w.dims.rope, 8.0), "max_len", "8.0"),
    Bad("table_dtype", lambda w: call(rope_table, w.dims.rope, 8, dtype=torch.bfloat16), "dtype", "torch.bfloat16"),
    Bad("table_of_dims", lambda w: call(rope_table, w.dims, 8), "spec", "MLADims"),
    Bad("table_sin_of_other_positions", table(sin=values(7, 2)), "sin", "(7, 2)"),
    Bad("table_cos_rank", table(cos=values(8)), "cos", "(8,)"),
    Bad("table_cos_dtype", table(cos=values(8, 2).half()), "cos", "torch.float16"),
    Bad("table_sin_elsewhere", table(sin=values(8, 2).to("meta")), "sin", "meta"),
    Bad("table_two_dtypes", table(sin=values(8, 2).double()), "sin", "torch.float64"),
    Bad("table_pairing_none", table(interleaved=None), "interleaved", "None"),
    Bad("rotate_position_outside", rotate(positions=int64(0, 1, 2, 16)), "positions", "16"),
    Bad("rotate_position_negative", rotate(positions=int64(0, -1, 2, 3)), "positions", "-1"),
    Bad("rotate_positions_int32", rotate(positions=int32(0, 1, 2, 3)), "positions", "torch.int32"),
    Bad("rotate_positions_too_few", rotate(positions=int64(0, 1, 2)), "positions", "(3,)"),
    Bad("rotate_positions_elsewhere", rotate(positions=int64(0, 1, 2, 3).to("meta")), "positions", "meta"),
    Bad("rotate_width", rotate(x=values(4, 6)), "x", "(4, 6)"),
    Bad("rotate_rank", rotate(x=values(4, 2, 1, 4)), "x", "(4, 2, 1, 4)"),
    Bad("rotate_list", rotate(x=[1.0]), "x", "list"),
    Bad("rotate_elsewhere", rotate(x=values(4, 4).to("meta")), "x", "meta"),
    Bad("rotate_int", rotate(x=torch.ones(4, 4, dtype=torch.int32)), "x", "torch.int32"),
    Bad("rotate_without_table", rotate(table=None), "table", "None"),
    Bad("merge_out_rank", lambda w: w.merge(prefix_out=values(3, 10)), "prefix_out", "(3, 10)"),
    Bad("merge_outs_differ", lambda w: w.merge(suffix_out=values(3, 2, 4)), "suffix_out", "(3, 2, 4)"),
    Bad("merge_heads_first", lambda w: w.merge(prefix_lse=values(2, 3)), "prefix_lse", "(2, 3)"),
    Bad("merge_lse_dtype", lambda w: w.merge(suffix_lse=values(3, 2).bfloat16()), "suffix_lse", "torch.bfloat16"),
    Bad("merge_lse_dtypes_differ", lambda w: w.merge(suffix_lse=values(3, 2).double()), "suffix_lse", "torch.float64"),
    Bad("merge_lse_missing", lambda w: w.merge(prefix_lse=None), "prefix_lse", "None"),
    Bad("merge_elsewhere", lambda w: w.merge(suffix_out=values(3, 2, 5).to("meta")), "suffix_out", "meta"),
    Bad(
        "merge_ints",
        lambda w: w.merge(prefix_out=torch.ones(3, 2, 5).int(), suffix_out=torch.ones(3, 2, 5).int()),
        "prefix_out",
        "torch.int32",
    ),
    Bad("linear_width", lambda _: call(linear, values(4, 3), values(5, 4)), "weight", "(5, 4)"),
    Bad("linear_rank", lambda _: call(linear, values(3), values(5, 3)), "x", "(3,)"),
    Bad("linear_dtype", lambda _: call(linear, values(4, 3), values(5, 3).double()), "weight", "torch.float64"),
    Bad("linear_elsewhere", lambda _: call(linear, values(4, 3), values(5, 3).to("meta")), "weight", "meta"),
    Bad("linear_bias_width", lambda _: call(linear, values(4, 3), values(5, 3), values(1)), "bias", "(1,)"),
    Bad("linear_bias_dtype", lambda _: call(linear, values(4, 3), values(5, 3), values(5).double()), "bias", "torch.float64"),
    Bad(
        "linear_ints",
        lambda _: call(linear, torch.ones(4, 3).int(), torch.ones(5, 3).int()),
        "x",
        "torch.int32",
    ),
    Bad("head_linear_heads", lambda _: call(head_linear, values(4, 2, 3), values(1, 3, 5)), "weight", "(1, 3, 5)"),
    Bad("head_linear_rank", lambda _: call(head_linear, values(4, 3), values(1, 3, 5)), "x", "(4, 3)"),
    Bad("head_linear_dtype", lambda _: call(head_linear, values(4, 1, 3), values(1, 3, 5).half()), "weight", "torch.float16"),
    Bad("norm_width", lambda _: call(rms_norm, values(4, 3), values(4), 1e-6), "weight", "(4,)"),
    Bad("norm_dtype", lambda _: call(rms_norm, values(4, 3), values(3).double(), 1e-6), "weight", "torch.float64"),
    Bad("norm_eps_negative", lambda _: call(rms_norm, values(4, 3), values(3), -1.0), "eps", "-1.0"),
    Bad("split_rows", lambda w: call(split_kv_b_proj, values(20, 8), w.dims), "kv_b_proj", "(20, 8)"),
    Bad("split_transposed", lambda w: call(split_kv_b_proj, values(8, 32), w.dims), "kv_b_proj", "(8, 32)"),
    Bad("split_without_dims", lambda w: call(split_kv_b_proj, values(32, 8), None), "dims", "None"),
    Bad("absorb_heads", lambda w: call(absorb_query, values(4, 3, 10), w.tensors["kv_b_proj"], w.dims), "q", "(4, 3, 10)"),
    Bad("absorb_weight_rows", lambda w: call(absorb_query, w.q, values(32, 7), w.dims), "kv_b_proj", "(32, 7)"),
    Bad(
        "absorb_dtypes",
        lambda w: call(absorb_query, w.q, w.tensors["kv_b_proj"].double(), w.dims),
        "kv_b_proj",
        "torch.float64",
    ),
    Bad("project_width", lambda w: call(project_output, values(4, 2, 10), w.tensors["kv_b_proj"], w.dims), "out", "(4, 2, 10)"),
    Bad(
        "expand_latent_width",
        lambda w: call(expand_latent, values(4, 12), w.k_pe, w.tensors["kv_b_proj"], w.dims),
        "kv_c",
        "(4, 12)",
    ),
    Bad(
        "expand_key_dtype",
        lambda w: call(expand_latent, w.kv_c, w.k_pe.half(), w.tensors["kv_b_proj"], w.dims),
        "k_pe",
        "torch.float16",
    ),
    Bad("expand_weight", lambda w: call(expand_latent, w.kv_c, w.k_pe, values(8, 32), w.dims), "kv_b_proj", "(8, 32)"),
    Bad(
        "workspace_bytes_negative",
        lambda w: call(prefill_workspace_bytes, w.dims, num_query_tokens=-1, context_chunk_tokens=0, dtype=torch.float32),
        "num_query_tokens",
        "-1",
    ),
]

KERNELS = [
    Bad("set_unknown", lambda _: call(kernel_set, "ROCM"), "name", "'ROCM'"),
    Bad("set_none", lambda _: call(kernel_set, None), "name", "None"),
    Bad("set_not_hashable", lambda _: call(kernel_set, ["CPU_MLA"]), "name", "['CPU_MLA']"),
    Bad("device_without_kernels", lambda _: call(kernels_for, "xpu"), "device", "'xpu'"),
    Bad("device_meta", lambda _: call(kernels_for, torch.device("meta")), "device", "'meta'"),
    Bad("kernels_device_unknown", lambda _: call(kernels_for, "nowhere"), "device", "nowhere"),
    Bad("kernels_device_none", lambda _: call(kernels_for, None), "device", "None"),
    Bad("kernels_dtype", lambda _: call(kernels_for, "cpu", dtype=torch.int8), "dtype", "int8"),
    Bad("kernels_dims", lambda _: call(kernels_for, "cpu", dims=128), "dims", "128"),
    Bad("explain_dims", lambda w: call(explain, w.kernels, dims=128), "dims", "128"),
    Bad("explain_a_name", lambda _: call(explain, "CPU_MLA"), "kernels", "'CPU_MLA'"),
    Bad("set_of_one_dtype", lambda w: call(attrs.evolve, w.kernels, dtypes=torch.float32), "dtypes", "dtype"),
    Bad("set_of_one_device", lambda w: call(attrs.evolve, w.kernels, device_types="cpu"), "device_types", "'cpu'"),
    Bad("set_without_prefill", lambda w: call(attrs.evolve, w.kernels, varlen_attention=None), "varlen_attention", "None"),
    Bad("set_of_a_number", lambda w: call(attrs.evolve, w.kernels, name=7), "name", "7"),
    Bad("feature_alibi", lambda _: call(kernels_for, "cpu", alibi_slopes=[0.5]), "alibi_slopes", "[0.5]"),
    Bad("feature_alibi_tensor", lambda _: call(kernels_for, "cpu", alibi_slopes=values(2)), "alibi_slopes", "tensor"),
    Bad("feature_sliding_window", lambda _: call(kernels_for, "cpu", sliding_window=4096), "sliding_window", "4096"),
    Bad(
        "feature_blocksparse",
        lambda _: call(kernels_for, "cpu", blocksparse_params={"local": 4}),
        "blocksparse_params",
        "{'local': 4}",
    ),
    Bad("feature_soft_cap", lambda _: call(kernels_for, "cpu", logits_soft_cap=30.0), "logits_soft_cap", "30.0"),
    Bad("feature_encoder", lambda _: call(kernels_for, "cpu", attn_type="encoder"), "attn_type", "'encoder'"),
    Bad("feature_no_attn_type", lambda _: call(kernels_for, "cpu", attn_type=None), "attn_type", "None"),
]

RAW = [
    Bad("raw_decode_q_rank", lambda w: w.raw_decode(q=values(2, 12)), "q", "(2, 12)"),
    Bad("raw_decode_q_width", lambda w: w.raw_decode(q=values(1, 2, 10)), "q", "10"),
    Bad("raw_decode_q_dtype", lambda w: w.raw_decode(q=values(1, 2, 12).int()), "q", "torch.int32"),
    Bad("raw_decode_q_too_few", lambda w: w.raw_decode(q=values(1, 2, 12)[:0]), "q", "0"),
    Bad("raw_decode_cache_too_small", lambda w: w.raw_decode(latent_cache=w.cache[:4]), "latent_cache", "4"),
    Bad("raw_decode_cache_rank", lambda w: w.raw_decode(latent_cache=w.cache.view(32, 12)), "latent_cache", "(32, 12)"),
    Bad("raw_decode_cache_elsewhere", lambda w: w.raw_decode(latent_cache=w.cache.to("meta")), "latent_cache", "meta"),
    Bad(
        "raw_decode_cache_strided",
        lambda w: w.raw_decode(latent_cache=torch.zeros(8, 4, 24)[..., ::2]),
        "latent_cache",
        "(96, 24, 2)",
    ),
    Bad(
        "raw_decode_cache_block_size",
        lambda w: w.raw_decode(latent_cache=torch.zeros(8, 8, 12)),
        "latent_cache",
        "8",
    ),
    Bad("raw_decode_rank_zero", lambda w: w.raw_decode(kv_lora_rank=0), "kv_lora_rank", "0"),
    Bad("raw_decode_rank_above_width", lambda w: w.raw_decode(kv_lora_rank=13), "kv_lora_rank", "13"),
    Bad("raw_decode_scale_nan", lambda w: w.raw_decode(softmax_scale=float("nan")), "softmax_scale", "nan"),
    Bad("raw_decode_scale_zero", lambda w: w.raw_decode(softmax_scale=0.0), "softmax_scale", "0.0"),
    Bad("raw_decode_plan_of_another_type", lambda w: w.raw_decode(plan="plan"), "plan", "str"),
    Bad(
        "raw_decode_plan_of_another_step",
        lambda w: w.raw_decode(plan=w.plan_of(decode_group(6, [3, 4]))),
        "plan",
        "another record",
    ),
    Bad(
        "raw_decode_plan_of_other_blocks",
        lambda w: w.raw_decode(plan=w.plan_of(decode_group(5, [2, 4]))),
        "plan",
        "another record",
    ),
    Bad("raw_varlen_rank", lambda w: w.raw_varlen(k=values(3, 20)), "k", "(3, 20)"),
    Bad("raw_varlen_heads", lambda w: w.raw_varlen(k=values(3, 1, 10)), "k", "1"),
    Bad("raw_varlen_width", lambda w: w.raw_varlen(k=values(3, 2, 9)), "k", "9"),
    Bad("raw_varlen_dtype", lambda w: w.raw_varlen(v=values(3, 2, 6).half()), "v", "torch.float16"),
    Bad("raw_varlen_q_dtype", lambda w: w.raw_varlen(q=values(2, 2, 10).int()), "q", "torch.int32"),
    Bad("raw_varlen_values_too_few", lambda w: w.raw_varlen(v=values(2, 2, 6)), "v", "2"),
    Bad("raw_varlen_elsewhere", lambda w: w.raw_varlen(v=values(3, 2, 6).to("meta")), "v", "meta"),
    Bad(
        "raw_varlen_starts_differ", lambda w: w.raw_varlen(kv_start_loc=int32(0, 3, 3)), "query_start_loc, kv_start_loc", "(3,)"
    ),
    Bad("raw_varlen_queries_missing", lambda w: w.raw_varlen(query_start_loc=int32(0, 3)), "query_start_loc", "3"),
    Bad("raw_varlen_keys_missing", lambda w: w.raw_varlen(kv_start_loc=int32(0, 4)), "kv_start_loc", "4"),
    Bad("raw_varlen_scale_negative", lambda w: w.raw_varlen(softmax_scale=-0.3), "softmax_scale", "-0.3"),
]

LATE = "refused only after the new tokens were written"
WEIGHT = "refused as `weight`, a name that the caller does not know"

ATTENTION = [
    Bad(
        "attend_q_ints",
        lambda w: w.attend(q=w.q.int()),
        "q",
        "torch.int32",
    ),
    Bad("attend_q_dtype", lambda w: w.attend(q=w.q.double()), "kv_c_normed", "torch.float32"),
    Bad(
        "attend_all_ints",
        lambda w: w.attend(q=w.q.int(), kv_c_normed=w.kv_c.int(), k_pe=w.k_pe.int(), kv_b_proj=w.tensors["kv_b_proj"].int()),
        "q",
        "torch.int32",
    ),
    Bad("attend_q_heads", lambda w: w.attend(q=values(4, 3, 10)), "q", "(4, 3, 10)"),
    Bad("attend_q_flat", lambda w: w.attend(q=w.q.flatten(1)), "q", "(4, 20)"),
    Bad("attend_q_missing", lambda w: w.attend(q=None), "q", "None"),
    Bad("attend_q_elsewhere", lambda w: w.attend(q=w.q.to("meta")), "q", "meta"),
    Bad("attend_tokens_too_few", lambda w: w.attend(q=w.q[:3]), "q", "(3, 2, 10)"),
    Bad("attend_latents_too_few", lambda w: w.attend(kv_c_normed=w.kv_c[:3]), "kv_c_normed", "(3, 8)"),
    Bad("attend_latents_width", lambda w: w.attend(kv_c_normed=values(4, 12)), "kv_c_normed", "(4, 12)"),
    Bad("attend_keys_dtype", lambda w: w.attend(k_pe=w.k_pe.half()), "k_pe", "torch.float16"),
    Bad("attend_keys_elsewhere", lambda w: w.attend(k_pe=w.k_pe.to("meta")), "k_pe", "meta"),
    Bad("attend_weight_dtype", lambda w: w.attend(kv_b_proj=w.tensors["kv_b_proj"].double()), "kv_b_proj", "torch.float64"),
    Bad("attend_weight_shape", lambda w: w.attend(kv_b_proj=values(31, 8)), "kv_b_proj", "(31, 8)"),
    Bad("attend_cache_missing", lambda w: w.attend(latent_cache=None), "latent_cache", "None"),
    Bad("attend_cache_too_small", lambda w: w.attend(latent_cache=w.cache[:4]), "latent_cache", "4"),
    Bad("attend_cache_block_size", lambda w: w.attend(latent_cache=w.cache.view(4, 8, 12)), "latent_cache", "(8, 12)"),
    Bad("attend_cache_width", lambda w: w.attend(latent_cache=torch.zeros(8, 4, 16)), "latent_cache", "(4, 16)"),
    Bad(
        "attend_cache_rank",
        lambda w: w.attend(latent_cache=torch.zeros(2, 8, 4, 1, 12)),
        "latent_cache",
        "(2, 8, 4, 1, 12)",
        error=CacheError,
    ),
    Bad(
        "attend_cache_dtype",
        lambda w: w.attend(latent_cache=w.cache.to(torch.float8_e5m2)),
        "latent_cache",
        "torch.float8_e5m2",
        error=CacheError,
    ),
    Bad(
        "attend_cache_strided",
        lambda w: w.attend(latent_cache=w.cache.transpose(0, 1).contiguous().transpose(0, 1)),
        "latent_cache",
        "(12, 96, 1)",
        error=CacheError,
    ),
    Bad("attend_cache_elsewhere", lambda w: w.attend(latent_cache=w.cache.to("meta")), "latent_cache", "meta"),
    Bad("attend_workspace_too_small", lambda w: w.attend(workspace=torch.zeros(3, 12)), "workspace", "3"),
    Bad("attend_workspace_too_narrow", lambda w: w.attend(workspace=torch.zeros(8, 11)), "workspace", "(8, 11)"),
    Bad(
        "attend_workspace_dtype",
        lambda w: w.attend(workspace=torch.zeros(8, 12).double()),
        "workspace",
        "torch.float64",
    ),
    Bad(
        "attend_workspace_elsewhere",
        lambda w: w.attend(workspace=torch.zeros(8, 12, device="meta")),
        "workspace",
        "meta",
    ),
    Bad("attend_plan_of_another_type", lambda w: w.attend(plan="plan"), "plan", "str"),
    Bad(
        "attend_plan_of_another_step",
        lambda w: w.attend(plan=w.plan_of(decode_group(6, [3, 4]))),
        "plan",
        "another record",
    ),
    Bad(
        "attend_slot_outside",
        lambda w: w.attend(metadata=attrs.evolve(w.metadata, slot_mapping=int64(8, 9, 10, 99))),
        "slot_mapping",
        "99",
        error=CacheError,
    ),
    Bad(
        "attend_slot_twice",
        lambda w: w.attend(metadata=attrs.evolve(w.metadata, slot_mapping=int64(8, 9, 9, 16))),
        "slot_mapping",
        "slot 9",
        error=CacheError,
    ),
    Bad("attend_metadata_elsewhere", lambda w: w.attend(metadata=w.metadata.to("meta")), "q", "cpu"),
    Bad(
        "attend_metadata_is_a_part",
        lambda w: w.attend(metadata=w.metadata.decode),
        "metadata",
        "DecodeMetadata",
    ),
    Bad("attend_metadata_missing", lambda w: w.attend(metadata=None), "metadata", "None"),
    Bad("attend_kernels_by_name", lambda w: w.attend(kernels="CPU_MLA"), "kernels", "CPU_MLA"),
    Bad("attend_without_dims", lambda w: w.attend(dims=None), "dims", "None"),
    Bad("attend_kernels_without_dtype", lambda w: w.attend(kernels=kernel_set("REFERENCE")), "q", "torch.float32"),
    Bad(
        "attend_kernels_of_another_device",
        lambda w: w.attend(kernels=attrs.evolve(w.kernels, device_types=("cuda",))),
        "q",
        "cpu",
    ),
    Bad("attend_kernels_without_pages", lambda w: w.attend(kernels=attrs.evolve(w.kernels, page_size=1)), "metadata", "[2]"),
    Bad(
        "attend_kernels_object",
        lambda w: w.attend(kernels=attrs.evolve(w.kernels, objection=lambda d: f"num_heads: expected 16, got {d.num_heads}")),
        "num_heads",
        "2",
    ),
    Bad("prefill_q_heads", lambda w: w.prefill(q=values(3, 1, 10)), "q", "(3, 1, 10)"),
    Bad("prefill_q_of_the_batch", lambda w: w.prefill(q=w.q), "q", "(4, 2, 10)"),
    Bad("prefill_latents_dtype", lambda w: w.prefill(kv_c=w.kv_c[:3].double()), "kv_c", "torch.float64"),
    Bad("prefill_keys_width", lambda w: w.prefill(k_pe=values(3, 6)), "k_pe", "(3, 6)"),
    Bad("prefill_context_without_cache", lambda w: w.prefill(latent_cache=None), "latent_cache", "None"),
    Bad("prefill_cache_too_small", lambda w: w.prefill(latent_cache=w.cache[:2]), "latent_cache", "2"),
    Bad("prefill_workspace_too_small", lambda w: w.prefill(workspace=torch.zeros(3, 12)), "workspace", "3"),
    Bad("prefill_workspace_dtype", lambda w: w.prefill(workspace=torch.zeros(8, 12).half()), "workspace", "torch.float16"),
    Bad(
        "prefill_weight_dtype",
        lambda w: w.prefill(kv_b_proj=w.tensors["kv_b_proj"].half()),
        "kv_b_proj",
        "torch.float16",
    ),
    Bad(
        "prefill_of_decode_metadata",
        lambda w: w.prefill(metadata=w.metadata.decode),
        "metadata",
        "DecodeMetadata",
    ),
    Bad("decode_q_heads", lambda w: w.decode(q=values(1, 3, 10)), "q", "(1, 3, 10)"),
    Bad("decode_q_latent", lambda w: w.decode(q=values(1, 2, 12)), "q", "(1, 2, 12)"),
    Bad("decode_without_cache", lambda w: w.decode(latent_cache=None), "latent_cache", "None"),
    Bad("decode_cache_too_small", lambda w: w.decode(latent_cache=w.cache[:4]), "latent_cache", "4"),
    Bad("decode_cache_width", lambda w: w.decode(latent_cache=torch.zeros(8, 4, 8)), "latent_cache", "(4, 8)"),
    Bad("decode_weight_shape", lambda w: w.decode(kv_b_proj=values(16, 16)), "kv_b_proj", "(16, 16)"),
    Bad(
        "decode_weight_dtype",
        lambda w: w.decode(kv_b_proj=w.tensors["kv_b_proj"].half()),
        "kv_b_proj",
        "torch.float16",
    ),
    Bad(
        "decode_of_prefill_metadata",
        lambda w: w.decode(q=w.q[:3], metadata=w.metadata.prefill),
        "metadata",
        "PrefillMetadata",
    ),
    Bad("layer_hidden_too_few", lambda w: w.layer(hidden_states=w.hidden[:3]), "hidden_states", "(3, 14)"),
    Bad("layer_hidden_width", lambda w: w.layer(hidden_states=values(4, 13)), "hidden_states", "(4, 13)"),
    Bad("layer_hidden_dtype", lambda w: w.layer(hidden_states=w.hidden.double()), "hidden_states", "torch.float64"),
    Bad("layer_hidden_batched", lambda w: w.layer(hidden_states=w.hidden[None]), "hidden_states", "(1, 4, 14)"),
    Bad("layer_hidden_elsewhere", lambda w: w.layer(hidden_states=w.hidden.to("meta")), "hidden_states", "meta"),
    Bad(
        "layer_table_of_the_other_pairing",
        lambda w: w.layer(rope_table=attrs.evolve(w.table, interleaved=False)),
        "rope_table",
        "interleaved=False",
    ),
    Bad(
        "layer_table_of_another_width",
        lambda w: w.layer(rope_table=rope_table(RopeSpec(dim=8, interleaved=True), 16)),
        "rope_table",
        "dim 8",
    ),
    Bad("layer_table_too_short", lambda w: w.layer(rope_table=rope_table(w.dims.rope, 6)), "positions", "6"),
    Bad(
        "layer_table_elsewhere",
        lambda w: w.layer(rope_table=rope_table(w.dims.rope, 16, "meta")),
        "rope_table",
        "meta",
    ),
    Bad("layer_table_is_a_spec", lambda w: w.layer(rope_table=w.dims.rope), "rope_table", "RopeSpec"),
    Bad("layer_weights_elsewhere", lambda w: w.layer(weights=w.weights.to("meta")), "weights", "meta"),
    Bad("layer_weights_in_a_dict", lambda w: w.layer(weights=w.tensors), "weights", "dict"),
    Bad("layer_cache_missing", lambda w: w.layer(latent_cache=None), "latent_cache", "None"),
    Bad("layer_cache_width", lambda w: w.layer(latent_cache=torch.zeros(8, 4, 8)), "latent_cache", "(4, 8)"),
    Bad("layer_workspace_too_small", lambda w: w.layer(workspace=torch.zeros(3, 12)), "workspace", "3"),
]

WEIGHTS = [
    Bad("weights_query_missing", lambda w: w.make_weights(q_proj=None), "q_proj", "None"),
    Bad("weights_query_superfluous", lambda w: w.make_weights(q_a_proj=values(5, 14)), "q_a_proj", "a tensor"),
    Bad("weights_query_bias_superfluous", lambda w: w.make_weights(q_a_proj_bias=values(5)), "q_a_proj_bias", "a tensor"),
    Bad("weights_compressed_missing", lambda w: w.make_compressed(q_b_proj=None), "q_b_proj", "None"),
    Bad("weights_compressed_norm_missing", lambda w: w.make_compressed(q_a_layernorm=None), "q_a_layernorm", "None"),
    Bad("weights_both_queries", lambda w: w.make_compressed(q_proj=values(20, 14)), "q_proj", "a tensor"),
    Bad("weights_compressed_rank", lambda w: w.make_compressed(q_a_proj=values(6, 14)), "q_a_proj", "(6, 14)"),
    Bad("weights_query_transposed", lambda w: w.make_weights(q_proj=values(14, 20)), "q_proj", "(14, 20)"),
    Bad("weights_up_projection_of_more_heads", lambda w: w.make_weights(kv_b_proj=values(48, 8)), "kv_b_proj", "(48, 8)"),
    Bad("weights_hidden_sizes_differ", lambda w: w.make_weights(o_proj=values(15, 20)), "o_proj", "(15, 20)"),
    Bad("weights_norm_rank", lambda w: w.make_weights(kv_a_layernorm=values(1, 8)), "kv_a_layernorm", "(1, 8)"),
    Bad("weights_bias_width", lambda w: w.make_weights(o_proj_bias=values(20)), "o_proj_bias", "(20,)"),
    Bad("weights_none", lambda w: w.make_weights(o_proj=None), "o_proj", "None"),
    Bad("weights_array", lambda w: w.make_weights(o_proj=np.ones((14, 20))), "o_proj", "ndarray"),
    Bad("weights_dtypes_mixed", lambda w: w.make_weights(o_proj=values(14, 20).bfloat16()), "o_proj", "torch.bfloat16"),
    Bad("weights_devices_mixed", lambda w: w.make_weights(o_proj=values(14, 20).to("meta")), "o_proj", "meta"),
    Bad(
        "weights_ints",
        lambda w: call(MLAWeights, dims=w.dims, **{n: t.int() for n, t in w.tensors.items()}),
        "kv_b_proj",
        "torch.int32",
    ),
    Bad("weights_dims", lambda w: w.make_weights(dims=CONFIG), "dims", "dict"),
    Bad("shard_rank_too_high", lambda w: call(w.weights.shard, 2, 2), "rank", "2"),
    Bad("shard_rank_negative", lambda w: call(w.weights.shard, -1, 2), "rank", "-1"),
    Bad("shard_uneven", lambda w: call(w.weights.shard, 0, 3), "world_size", "3"),
    Bad("shard_world_zero", lambda w: call(w.weights.shard, 0, 0), "world_size", "0"),
    Bad("shard_world_float", lambda w: call(w.weights.shard, 0, 2.0), "world_size", "2.0"),
]


def config(**changes: object) -> Make:
    entries = {name: value for name, value in {**CONFIG, **changes}.items() if value != "absent"}
    return lambda _: call(dims_from_config, entries)


FP8 = values(32, 8).to(torch.float8_e4m3fn)
KV_B = f"{PREFIX}kv_b_proj.weight"

LOADING = [
    Bad("config_entry_missing", config(kv_lora_rank="absent"), "config", "num_attention_heads"),
    Bad("config_entry_null", config(v_head_dim=None), "config", "v_head_dim"),
    Bad("config_entry_text", config(num_attention_heads="2"), "num_heads", "'2'", error=DimsError),
    Bad("config_rope_odd", config(qk_rope_head_dim=7), "dim", "7", error=DimsError),
    Bad("config_rope_type_unknown", config(rope_scaling={"type": "longrope", "factor": 4.0}), "rope_type", "'longrope'"),
    Bad("config_rope_type_null", config(rope_scaling={"rope_type": None}), "rope_type", "None"),
    Bad("config_yarn_without_factor", config(rope_scaling={**YARN, "factor": None}), "rope_parameters", "rope_type"),
    Bad("config_yarn_factor_zero", config(rope_scaling={**YARN, "factor": 0.0}), "factor", "0.0", error=DimsError),
    Bad("config_yarn_not_truncated", config(rope_parameters={**YARN, "truncate": False}), "truncate", "False"),
    Bad("config_yarn_factor_text", config(rope_scaling={**YARN, "factor": "big"}), "factor", "'big'"),
    Bad(
        "config_yarn_length_fraction",
        config(rope_scaling={**YARN, "original_max_position_embeddings": 4096.7}),
        "original_max_position_embeddings",
        "4096.7",
    ),
    Bad("config_theta_text", config(rope_theta="big"), "rope_theta", "'big'"),
    Bad("config_theta_zero", config(rope_theta=0), "theta", "0", error=DimsError),
    Bad("config_pairing_text", config(rope_interleave="false"), "rope_interleave", "'false'"),
    Bad("config_rope_is_a_list", config(rope_scaling=[1]), "rope_scaling", "[1]"),
    Bad("config_of_another_type", lambda _: call(dims_from_config, 5), "config", "int"),
    Bad("fp8_dtype", lambda _: call(dequantize_block_fp8, values(4, 4), torch.ones(1, 1)), "weight", "torch.float32"),
    Bad("fp8_scales_dtype", lambda _: call(dequantize_block_fp8, FP8, torch.ones(1, 1).half()), "scale_inv", "torch.float16"),
    Bad("fp8_scales_of_smaller_blocks", lambda _: call(dequantize_block_fp8, FP8, torch.ones(2, 1)), "scale_inv", "(2, 1)"),
    Bad("fp8_scales_flat", lambda _: call(dequantize_block_fp8, FP8, torch.ones(1)), "scale_inv", "(1,)"),
    Bad(
        "fp8_scales_elsewhere", lambda _: call(dequantize_block_fp8, FP8, torch.ones(1, 1, device="meta")), "scale_inv", "meta"
    ),
    Bad("state_tensor_missing", lambda w: w.from_state({KV_B: None}), KV_B, "none"),
    Bad(
        "state_tensor_unexpected",
        lambda w: w.from_state({f"{PREFIX}kv_b_proj.bias": values(32)}),
        "state_dict",
        f"{PREFIX}kv_b_proj.bias",
    ),
    Bad("state_shape", lambda w: w.from_state({KV_B: values(8, 32)}), "kv_b_proj", "(8, 32)"),
    Bad(
        "state_prefix",
        lambda w: w.from_state({}, prefix="model.layers.1.self_attn."),
        "model.layers.1.self_attn.q_proj.weight",
        "none",
    ),
    Bad("state_scales_missing", lambda w: w.from_state({KV_B: FP8}), f"{KV_B}_scale_inv", "none"),
    Bad(
        "state_scales_shape", lambda w: w.from_state({KV_B: FP8, f"{KV_B}_scale_inv": torch.ones(2, 2)}), "scale_inv", "(2, 2)"
    ),
    Bad("state_array", lambda w: w.from_state({KV_B: np.ones((32, 8))}), KV_B, "ndarray"),
    Bad(
        "state_to_ints",
        lambda w: w.from_state({}, dtype=torch.int8),
        "dtype",
        "torch.int8",
    ),
    Bad(
        "state_unexpected_without_prefix",
        lambda w: call(
            weights_from_state_dict,
            {**{name.removeprefix(PREFIX): t for name, t in w.state.items()}, "kv_b_proj.bias": values(32)},
            w.dims,
        ),
        "state_dict",
        "kv_b_proj.bias",
    ),
    Bad(
        "state_other_fp8_without_prefix",
        lambda w: call(
            weights_from_state_dict,
            {
                **{name.removeprefix(PREFIX): t for name, t in w.state.items()},
                "kv_b_proj.weight": values(32, 8).to(torch.float8_e5m2),
                "kv_b_proj.weight_scale_inv": torch.full((1, 1), 7.0),
            },
            w.dims,
            dtype=torch.float32,
        ),
        "kv_b_proj.weight",
        "torch.float8_e5m2",
    ),
    Bad("load_folder_missing", lambda w: call(load_weights, w.folder / "absent", 0), "folder", "none"),
    Bad("load_weights_missing", lambda w: (w.load(), (w.folder / "model.safetensors").unlink())[0], "folder", "neither"),
    Bad("load_layer_missing", lambda w: w.load(layer=7), "layer", "7"),
    Bad("load_layer_negative", lambda w: w.load(layer=-1), "layer", "-1"),
    Bad("load_layer_float", lambda w: w.load(layer=0.0), "layer", "0.0"),
    Bad("load_tensor_missing", lambda w: w.load(state={n: t for n, t in w.state.items() if n != KV_B}), KV_B, "none"),
    Bad("load_config_incomplete", lambda w: w.load({"model_type": "llama"}), "config", "model_type"),
    Bad("load_config_cut_off", lambda w: w.load('{"kv_lora_rank": '), "folder", "config.json"),
    Bad("load_config_is_a_list", lambda w: w.load([1]), "config", "list"),
    Bad("load_index_empty", lambda w: w.load_indexed({}), "folder", "weight_map"),
    Bad("load_index_cut_off", lambda w: w.load_indexed("{"), "folder", "model.safetensors.index.json"),
    Bad(
        "load_index_names_absent_file",
        lambda w: w.load_indexed({"weight_map": {KV_B: "absent.safetensors"}}),
        "folder",
        "absent.safetensors",
    ),
    Bad(
        "load_index_names_absent_tensor",
        lambda w: w.load_indexed({"weight_map": {f"{PREFIX}other.weight": "model.safetensors"}}),
        "folder",
        f"{PREFIX}other.weight",
    ),
    Bad(
        "load_file_damaged",
        lambda w: (w.load(), (w.folder / "model.safetensors").write_bytes(b"damaged"))[0],
        "folder",
        "model.safetensors",
    ),
]

SECTIONS = (
    (MetadataError, (*GROUPS, *BUILDER, *RECORDS, *VALUES)),
    (DimsError, DIMS),
    (CacheError, CACHE),
    (KernelError, (*COMPUTE, *KERNELS, *RAW, *ATTENTION)),
    (WeightsError, (*WEIGHTS, *LOADING)),
)
CASES = [case if case.error else case._replace(error=error) for error, cases in SECTIONS for case in cases]


def marked(case: Bad) -> Any:
    """The case as a parameter; one that shows a fault of the package is expected to fail until that is mended."""
    marks = () if case.fault is None else (pytest.mark.xfail(strict=True, reason=case.fault),)
    return pytest.param(case, id=case.name, marks=marks)


def storages(value: object) -> list[torch.Tensor]:
    """Copies of the bytes below every tensor and array in `value`, views' neighbours included."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return []
        return [torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).clone()]
    if isinstance(value, np.ndarray):
        return [torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)] if value.size else []
    if isinstance(value, Mapping):
        return storages(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [copy for item in value for copy in storages(item)]
    if attrs.has(type(value)):
        return [copy for field in attrs.fields(type(value)) for copy in storages(getattr(value, field.name))]
    return []


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_is_refused_by_name_and_nothing_is_written(case: Bad, tmp_path: Path) -> None:
    refused = case.make(World(tmp_path))
    arguments = (refused.args, refused.keywords, getattr(refused.func, "__self__", None))
    before = storages(arguments)
    with pytest.raises(MLAError) as info:
        refused()
    message = FORM.fullmatch(str(info.value))
    assert message is not None, str(info.value)
    assert type(info.value) is case.error
    assert message["field"] == case.field
    assert re.search(rf"(?<![\w.-]){re.escape(case.got)}(?!\w)", message["got"]), str(info.value)
    after = storages(arguments)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_list_is_long_and_its_names_differ() -> None:
    assert len(CASES) >= 80
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_unspoilt_world_is_accepted(tmp_path: Path) -> None:
    world = World(tmp_path)
    validate_metadata_values(world.metadata, num_blocks=8)
    for accepted in (
        world.write(),
        world.gather(),
        world.merge(),
        world.attend(),
        world.layer(),
        world.prefill(),
        world.decode(),
    ):
        accepted()
    for made in (world.make_weights(), world.make_compressed(), world.from_state({}), world.load()):
        assert made().hidden_size == 14


def test_numpy_lengths_are_accepted_beside_given_seq_lens() -> None:
    lengths = group(query_lens=(np.int64(3),), context_lens=(np.int64(0),), block_ids=((2,),))
    assert build_metadata([group(seq_lens=(3,)), lengths], block_size=4).slot_mapping.tolist() == [4, 5, 6, 8, 9, 10]


def test_a_query_with_strides_gives_the_same_bits(tmp_path: Path) -> None:
    world = World(tmp_path)
    strided = torch.stack([world.q, torch.full_like(world.q, torch.nan)], dim=-1)[..., 0]
    assert strided.stride(-1) == 2
    plain = world.attend(latent_cache=world.cache.clone())()
    spread = world.attend(q=strided)()
    assert all(torch.equal(a, b) for a, b in zip(plain, spread, strict=True))


RECORD_CLASSES = [
    PagedKV,
    ContextChunk,
    PrefillMetadata,
    DecodeMetadata,
    MLAMetadata,
    SequenceGroup,
    MLADims,
    RopeSpec,
    YarnSpec,
    MLAWeights,
    LatentCacheSpec,
    RopeTable,
    BlockPool,
]


@pytest.mark.parametrize("record", RECORD_CLASSES)
def test_a_record_refuses_an_unknown_field_by_name(record: type) -> None:
    with pytest.raises(MLAError, match=f"{record.__name__}: expected fields of .*, got rotary_emb"):
        record(rotary_emb=None)


@pytest.mark.parametrize("record", RECORD_CLASSES)
def test_a_record_names_the_fields_that_are_missing(record: type) -> None:
    with pytest.raises(TypeError) as info:
        record()
    required = [field.name for field in attrs.fields(record) if field.default is attrs.NOTHING]
    assert required
    assert all(f"'{name}'" in str(info.value) for name in required)


PACKAGE = Path(inspect.getfile(mla)).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ERRORS = {name for name, value in vars(mla.errors).items() if isinstance(value, type) and issubclass(value, MLAError)}


def raises_of(tree: ast.AST) -> list[tuple[ast.Raise, frozenset[str]]]:
    """Every ``raise`` with the parameters of type ``type[MLAError]`` that are in reach."""
    found: list[tuple[ast.Raise, frozenset[str]]] = []

    def visit(node: ast.AST, reach: frozenset[str]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            reach |= {a.arg for a in arguments if a.annotation is not None and ast.unparse(a.annotation) == "type[MLAError]"}
        if isinstance(node, ast.Raise):
            found.append((node, reach))
        for child in ast.iter_child_nodes(node):
            visit(child, reach)

    visit(tree, frozenset())
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_only_errors_of_the_family_are_raised(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    for node, reach in raises_of(tree):
        if node.exc is None:
            continue
        raised = ast.unparse(node.exc.func) if isinstance(node.exc, ast.Call) else ast.unparse(node.exc)
        assert raised in ERRORS | reach, f"{path.name}:{node.lineno} raises {raised}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_written_message_has_the_form(path: Path) -> None:
    for node, _ in raises_of(ast.parse(path.read_text())):
        texts = [a for a in getattr(node.exc, "args", []) if isinstance(a, (ast.Constant, ast.JoinedStr))]
        for text in texts:
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            plain = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)
            assert FORM.fullmatch(plain), f"{path.name}:{node.lineno} says {plain}"
