"""The examples run, and the demo notices when attention is wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import attrs
import pytest
import torch

from mla import RopeTable

ROOT = Path(__file__).parent.parent
NUM_NEW = 24


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


generate = load(ROOT / "examples" / "generate.py")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    generate.write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(checkpoint):
    return generate.as_tokens(checkpoint, generate.PROMPTS)


def serve(checkpoint, prompts, change=lambda model: model, **options):
    with torch.inference_mode():
        model = change(generate.load_model(checkpoint, num_blocks=120, block_size=16))
        return generate.serve(model, prompts, num_new_tokens=NUM_NEW, chunk=80, **options)


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    with torch.inference_mode():
        torso = generate.load_model(checkpoint, num_blocks=1, block_size=16).torso
        return generate.generate_alone(torso, prompts, NUM_NEW)


def num_changed(tokens, expected) -> int:
    return sum(a != b for x, y in zip(tokens, expected, strict=True) for a, b in zip(x, y, strict=True))


def test_every_token_equals_transformers(checkpoint, prompts, expected):
    tokens, numbers = serve(checkpoint, prompts)
    assert tokens == expected
    assert numbers["reused"] > 0


def test_the_command_prints_its_table(checkpoint, capsys):
    assert generate.main(["--checkpoint", str(checkpoint), "--new-tokens", "3", "--block-size", "7", "--chunk", "50"]) == 0
    assert "18 of 18" in capsys.readouterr().out


def half_scale(model):
    def halve(weights):
        return attrs.evolve(weights, dims=attrs.evolve(weights.dims, softmax_scale=weights.dims.softmax_scale / 2))

    return attrs.evolve(model, weights=tuple(map(halve, model.weights)))


def no_rope(model):
    cos, sin = torch.ones_like(model.rope.cos), torch.zeros_like(model.rope.sin)
    return attrs.evolve(model, rope=RopeTable(cos=cos, sin=sin, interleaved=model.rope.interleaved))


@pytest.mark.parametrize("change", [half_scale, no_rope])
def test_a_wrong_scale_or_no_rope_changes_most_tokens(checkpoint, prompts, expected, change):
    tokens, _ = serve(checkpoint, prompts, change)
    assert num_changed(tokens, expected) >= len(prompts) * NUM_NEW / 2


def test_two_swapped_blocks_change_most_tokens(checkpoint, prompts, expected):
    def swapped(pool, lengths, chunk):
        order, groups = generate.step_groups(pool, lengths, chunk)
        if any(group.is_prompt for group in groups) or 0 not in pool.sequences or 4 not in pool.sequences:
            return order, groups
        # A block of the prefix that four prompts share, and one of a prompt without it.
        a, b = pool[0].block_ids[3], pool[4].block_ids[3]
        other = {a: b, b: a}

        def swap(group):
            tables = tuple(tuple(other.get(i, i) for i in ids) for ids in group.block_ids)
            return attrs.evolve(group, block_ids=tables)

        return order, [swap(group) for group in groups]

    tokens, _ = serve(checkpoint, prompts, groups_of=swapped)
    assert num_changed(tokens, expected) >= len(prompts) * NUM_NEW / 2
