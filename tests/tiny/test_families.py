"""Toy models of other families: the flags of a published model with toy sizes describe the files."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from slimrl.arguments import read_args
from slimrl.arguments.hf_config import disagreements
from slimrl.tiny.models import (
    FAMILIES,
    build_family_model,
    build_tokenizer,
    publish_config,
    sees,
    size_args_script,
)
from tests.scripts.model_size import parameters, tower_parameters

ROOT = Path(__file__).resolve().parents[2]
# A published model of each family, and whether its output layer has its own weights
MODELS = {
    "llama": ("llama3.1-8B-Instruct", True),
    "qwen2": ("qwen2.5-0.5B", False),
    "qwen2_5_vl": ("qwen2.5-VL-3B", False),
    "qwen3": ("qwen3-4B", False),
    "qwen3_vl": ("qwen3-VL-4B", False),
    "qwen3_moe": ("qwen3-30B-A3B", True),
    "qwen3_vl_moe": ("qwen3-VL-30B-A3B", True),
    "glm4": ("glm4-9B", True),
    "glm4_moe": ("glm4.5-355B-A32B", True),
    "glm4_moe_lite": ("glm4.7-30B-A3B", True),
    "deepseek_v3": ("deepseek-v3", True),
    "kimi_k2": ("kimi-k2", True),
    "moonlight": ("moonlight", True),
    "mimo": ("mimo-7B-rl", True),
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(max_length=2048)


def test_every_family_has_a_published_model():
    assert MODELS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_published_model_flags_with_toy_sizes_describe_the_toy(family, tokenizer, tmp_path):
    script, untied = MODELS[family]
    if sees(family):
        tokenizer = build_tokenizer(max_length=2048, vision=True)
    model = build_family_model(family, tokenizer, seed=0, untie=untied)
    model.save_pretrained(tmp_path)
    publish_config(family, tmp_path)
    sizes = tmp_path / "size_args.sh"
    sizes.write_text(size_args_script(family, model.config))
    assert (ROOT / f"scripts/lib/tiny/{family}.sh").read_text() == sizes.read_text()  # what scripts check flags with
    source = (
        f"source scripts/models/{script}.sh; source {shlex.quote(str(sizes))}; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    )
    words = subprocess.run(
        ["bash", "-euc", source], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    args, problems = read_args(words, entry="convert_hf_to_torch_dist.py")
    assert [problem for problem in problems if problem.flag not in ("--hf-checkpoint", "--save")] == []
    assert disagreements(args, json.loads((tmp_path / "config.json").read_text())) == []
    tower = json.loads((tmp_path / "config.json").read_text()).get("vision_config")
    assert parameters(args)[0] + tower_parameters(tower) == model.num_parameters()


def test_same_seed_gives_the_same_weights_and_keeps_the_random_state(tokenizer):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again = (build_family_model("qwen3_moe", tokenizer, seed=1).state_dict() for _ in range(2))
    other = build_family_model("qwen3_moe", tokenizer, seed=2).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
