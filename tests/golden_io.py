"""Reading golden files; `golden/README.md` describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mla.metadata import SequenceGroup

GOLDEN_DIR = Path(__file__).parent / "golden"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
MASK = 0xFFFFFFFF


def mixed_hash(count: int, salt: int) -> np.ndarray:
    """`count` uint64 values below 2**32 of the integer hash."""
    h = (np.arange(count, dtype=np.uint64) * 2654435761 + salt) & MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= h >> shift
        h = (h * factor) & MASK
    return h ^ (h >> 16)


def hash_tensor(shape: Sequence[int], salt: int, gain: float = 1.0, offset: float = 0.0) -> torch.Tensor:
    """float32 values in [-1, 1) of the hash, times `gain`, plus `offset`; all of it exact."""
    h = mixed_hash(int(np.prod(shape)), salt)
    values = (h >> 17).astype(np.float64) / 2**14 - 1
    return torch.from_numpy((values * gain + offset).astype(np.float32)).reshape(*shape)


def hash_input(spec: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of a file's `meta`, rounded to the dtype of the case."""
    return hash_tensor(spec["shape"], spec["salt"], spec.get("gain", 1.0), spec.get("offset", 0.0)).to(dtype)


def hash_fp8_bytes(spec: dict[str, Any]) -> torch.Tensor:
    """An fp8 weight as bytes: the top byte of the hash, never one of e4m3fn's two NaN."""
    h = (mixed_hash(int(np.prod(spec["shape"])), spec["salt"]) >> 24).astype(np.uint8)
    return torch.from_numpy(h - ((h & 127) == 127)).reshape(*spec["shape"])


def json_tensor(value: dict[str, Any]) -> torch.Tensor:
    """A tensor of a JSON file: ``{"dtype", "shape", "data"}`` or, where it is constant, ``fill`` in place of ``data``."""
    dtype = getattr(torch, value["dtype"])
    if "fill" in value:
        return torch.full(value["shape"], 0 if value["fill"] is None else value["fill"], dtype=dtype)
    return torch.tensor(value["data"], dtype=dtype).reshape(value["shape"])


def load_npz(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The `meta` and the arrays of a numeric file."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "meta"}
        return json.loads(str(file["meta"])), arrays


def metadata_cases(folder: Path) -> list[dict[str, Any]]:
    """The cases of every ``metadata_*.json``."""
    return [case for path in sorted(folder.glob("metadata_*.json")) for case in json.loads(path.read_text())]


def section_cases(folder: Path, file: str, section: str) -> list[dict[str, Any]]:
    """The cases of one section of ``state.json`` or ``advance_step.json``; a section of named facts is a case for each."""
    path = folder / file
    cases = json.loads(path.read_text()).get(section, []) if path.is_file() else []
    return [{"id": name, "expected": fact} for name, fact in cases.items()] if isinstance(cases, dict) else cases


def sequence_groups(case_input: dict[str, Any]) -> list[SequenceGroup]:
    """The neutral input as sequence groups; a group whose sequences all lack a table has no `block_ids`."""
    groups = []
    for group in case_input["groups"]:
        sequences = group["sequences"]
        tables = [sequence["block_ids"] for sequence in sequences]
        groups.append(
            SequenceGroup(
                is_prompt=group["is_prompt"],
                query_lens=[sequence["query_len"] for sequence in sequences],
                context_lens=[sequence["context_len"] for sequence in sequences],
                seq_lens=[sequence["orig_seq_len"] for sequence in sequences],
                seq_ids=[sequence["seq_id"] for sequence in sequences],
                block_ids=None if all(table is None for table in tables) else tables,
                prefix_cache_hit=group["prefix_cache_hit"],
                sliding_window=case_input["sliding_window"],
            )
        )
    return groups
