"""The model scripts: each matches its model's published config.json and parameter count."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from slimrl.arguments import Arguments, Problem, read_args
from slimrl.arguments.hf_config import disagreements
from slimrl.arguments.namespace import all_flag_specs
from slimrl.models.families.vision import decoder_config
from tests.scripts.model_size import parameters, tower_parameters

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "scripts/models"
# config.json of each model on the Hugging Face Hub, without keys unrelated to its shape
CONFIGS = Path(__file__).parent / "published_configs"
# scripts that are aliases of another one
ALIASES = {
    "llama3.2-3B-Instruct-amd": "llama3.2-3B-Instruct",
    "qwen3.5-35B-A3B-vl": "qwen3.5-35B-A3B",
}
FIRST_LAYERS = {"deepseek-v3-5layer": 5, "deepseek-v3-20layer": 20}
NOT_SERVED = re.compile(r"qwen3-next|qwen3\.5|glm5|minimax")
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
SERVED = [name for name in NAMES if not NOT_SERVED.match(name)]

# Billions of parameters in total, counted in the published weights (without MTP layers), and, from the model cards,
# active per token.
PUBLISHED_SIZE = {
    "deepseek-v3": (671.03, 37),
    "glm4-9B": (9.4, None),
    "glm4-32B": (32.57, None),
    "glm4.5-106B-A12B": (106, 12),
    "glm4.5-355B-A32B": (355, 32),
    "glm4.7-30B-A3B": (29.94, None),
    "glm5-744B-A40B": (744, 40),
    "glm5.2-744B-A40B": (744, 40),
    "kimi-k2": (1026.4, 32),
    "kimi-k2-thinking": (1026.4, 32),
    "llama2-7B": (6.738, None),
    "llama2-13B": (13.016, None),
    "llama2-70B": (68.977, None),
    "llama3.1-8B-Instruct": (8.03, None),
    "llama3.2-3B-Instruct": (3.21, None),
    "mimo-7B-rl": (7.62, None),
    "minimax-m2": (228.69, 10),
    "moonlight": (15.96, None),
    "qwen2.5-0.5B": (0.494, None),
    "qwen2.5-1.5B": (1.544, None),
    "qwen2.5-3B": (3.086, None),
    "qwen2.5-7B": (7.62, None),
    "qwen2.5-32B": (32.76, None),
    "qwen2.5-VL-3B": (3.7546, None),
    "qwen2.5-VL-7B": (8.2922, None),
    "qwen3-VL-4B": (4.4378, None),
    "qwen3-VL-8B": (8.7671, None),
    "qwen3-VL-30B-A3B": (31.07, 3.0),
    "qwen3-VL-235B-A22B": (235.67, 22),
    "qwen3-0.6B": (0.596, None),
    "qwen3-1.7B": (1.72, None),
    "qwen3-4B": (4.02, None),
    "qwen3-4B-Instruct-2507": (4.02, None),
    "qwen3-8B": (8.19, None),
    "qwen3-14B": (14.77, None),
    "qwen3-32B": (32.76, None),
    "qwen3-30B-A3B": (30.53, 3.0),
    "qwen3-235B-A22B": (235.09, 22),
    "qwen3-next-80B-A3B": (79.67, None),
    "qwen3.5-0.8B": (0.7524, None),
    "qwen3.5-4B": (4.21, None),
    "qwen3.5-9B": (8.95, None),
    "qwen3.5-27B": (26.9, None),
    "qwen3.5-35B-A3B": (34.66, 3),
}
ROUND = {"glm4.5-106B-A12B", "glm4.5-355B-A32B"}  # only from the name

# key of config.json -> field of the flags; checked for every family, also those missing from slimrl's own table
NUMBERS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_epsilon",
    "max_position_embeddings": "max_position_embeddings",
    "num_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
    "full_attention_interval": "linear_attention_freq",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
}


def model_args(name: str, folder: Path = MODELS, **environment: str) -> list[str]:
    """MODEL_ARGS as a script with the strictest options gets them, run from another folder."""
    command = f"set -euo pipefail; source {folder}/{name}.sh; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    options = {"cwd": "/", "env": {"PATH": "/usr/bin:/bin", **environment}, "timeout": 60}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, **options)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


@cache
def parsed(name: str) -> tuple[Arguments, list[Problem]]:
    return read_args(model_args(name), entry="convert_hf_to_torch_dist.py")


def published(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def test_every_model_script_is_checked_against_its_model():
    assert {path.stem for path in MODELS.glob("*.sh")} == set(NAMES) | ALIASES.keys() | FIRST_LAYERS.keys()
    assert PUBLISHED_SIZE.keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_of_a_model_script_exists(name):
    spellings = {spelling for spec in all_flag_specs() for spelling in spec.on + spec.off}
    assert [word for word in model_args(name) if word.startswith("--") and word not in spellings] == []


@pytest.mark.parametrize("name", SERVED)
def test_model_script_matches_the_published_config(name):
    args, problems = parsed(name)
    assert [problem for problem in problems if problem.flag not in ("--hf-checkpoint", "--save")] == []
    assert disagreements(args, published(name)) == []
    layers = decoder_config(published(name))["num_hidden_layers"]
    assert disagreements(args, published(name) | {"num_hidden_layers": layers + 1}) != []


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SERVED)))
def test_family_without_a_weight_table_is_rejected(name):
    args, _ = parsed(name)
    (problem,) = disagreements(args, published(name))
    assert problem.flag == "--hf-checkpoint" and "qwen3_moe" in problem.sentence


@pytest.mark.parametrize("name", NAMES)
def test_model_script_has_the_published_numbers(name):
    args, _ = parsed(name)
    config, values = decoder_config(published(name)), vars(args)
    if config["model_type"] == "qwen3_5_moe_text":
        config["intermediate_size"] = config["moe_intermediate_size"]  # it has no dense layer
    stated = {key: config[key] for key in NUMBERS if key in config}
    assert {key: values[NUMBERS[key]] for key in stated} == stated
    rope = config.get("rope_parameters") or config
    assert values["rotary_base"] == rope.get("rope_theta", 10000.0)  # Llama 2 states the default by leaving it out
    assert values["untie_embeddings_and_output_weights"] is not config.get("tie_word_embeddings", False)


@pytest.mark.parametrize("name", NAMES)
def test_model_has_the_published_parameter_count(name):
    total, active = (count / 1e9 for count in parameters(parsed(name)[0]))
    total += tower_parameters(published(name).get("vision_config")) / 1e9
    published_total, published_active = PUBLISHED_SIZE[name]
    assert total == pytest.approx(published_total, rel=0.012 if name in ROUND else 0.002)
    if published_active is not None:  # published in round numbers, some with the embedding and some without
        assert active == pytest.approx(published_active, rel=0.08)


@pytest.mark.parametrize("name", ALIASES)
def test_alias_is_the_same_model(name):
    assert model_args(name) == model_args(ALIASES[name])


def test_no_two_scripts_differ_only_in_case():
    names = [path.name.lower() for path in MODELS.glob("*.sh")]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", FIRST_LAYERS)
def test_first_layers_of_a_model_differ_only_in_the_layer_count(name):
    args, _ = parsed(name)
    layers = FIRST_LAYERS[name]
    assert disagreements(args, published("deepseek-v3") | {"num_hidden_layers": layers}) == []
    assert args.moe_layer_freq == [0, 0, 0] + [1] * (layers - 3)


@pytest.mark.parametrize("name", NAMES)
def test_rotary_base_of_a_fine_tuned_model_can_be_overridden(name):
    words = model_args(name, MODEL_ARGS_ROTARY_BASE="1234")
    assert words[words.index("--rotary-base") + 1] == "1234"
    assert words.count("--rotary-base") == 1
