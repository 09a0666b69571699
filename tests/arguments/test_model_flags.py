"""The model flags are consistent and match the model in config.json."""

from __future__ import annotations

import json

import pytest

from slimrl.arguments import PassthroughFlag, read_args


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


NEWER_ROPE = {"rope_theta": "absent", "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}


@pytest.mark.parametrize(
    ("changes", "flag", "given", "key"),
    [
        ({"hidden_size": 2048}, "--hidden-size", 2560, "hidden_size 2048"),
        ({"num_hidden_layers": 28}, "--num-layers", 36, "num_hidden_layers 28"),
        ({"num_attention_heads": 16}, "--num-attention-heads", 32, "num_attention_heads 16"),
        ({"num_key_value_heads": 4}, "--num-query-groups", 8, "num_key_value_heads 4"),
        ({"head_dim": 64}, "--kv-channels", 128, "head_dim 64"),
        ({"intermediate_size": 12288}, "--ffn-hidden-size", 9728, "intermediate_size 12288"),
        ({"vocab_size": 151669}, "--vocab-size", 151936, "vocab_size 151669"),
        ({"rms_norm_eps": 1e-5}, "--norm-epsilon", 1e-06, "rms_norm_eps 1e-05"),
        ({"rope_theta": 5000000}, "--rotary-base", 1000000, "rope_theta 5000000"),
        (NEWER_ROPE, "--rotary-base", 1000000, "rope_theta 5000000"),
        ({"rope_theta": "absent"}, "--rotary-base", 1000000, "rope_theta 10000"),
    ],
)
def test_number_that_differs_from_the_config_is_reported_with_both_values(recipe, changes, flag, given, key):
    recipe.write_config(**changes)
    wanted = key.split()[1]
    assert sentences(recipe.line()) == [f"{flag} is {given} and config.json says {key}: give {flag} {wanted}."]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"tie_word_embeddings": False},
            "--untie-embeddings-and-output-weights is missing and config.json says tie_word_embeddings false: add"
            " --untie-embeddings-and-output-weights.",
        ),
        (
            {"hidden_act": "gelu"},
            "--swiglu is given and config.json says hidden_act 'gelu': leave --swiglu out.",
        ),
        (
            {"model_type": "llama"},
            "--qk-layernorm is given and config.json says model_type 'llama': leave --qk-layernorm out.",
        ),
        (
            {"model_type": "gpt_oss"},
            "--hf-checkpoint has model_type 'gpt_oss', and slimrl supports llama, qwen2, qwen2_5_vl,"
            " qwen2_moe, qwen3, qwen3_vl, qwen3_moe, qwen3_vl_moe, glm4, glm4_moe, deepseek_v3, kimi_k2, glm4_moe_lite,"
            " mimo: give a model of these families.",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "--hf-checkpoint has rope type 'yarn' in config.json, which is unsupported: use another.",
        ),
        (
            {"use_sliding_window": True},
            "--hf-checkpoint has use_sliding_window true in config.json, which is unsupported: use another.",
        ),
    ],
)
def test_other_model_type_is_rejected(recipe, changes, sentence):
    recipe.write_config(**changes)
    assert sentences(recipe.line()) == [sentence]


def test_layer_norm_is_rejected_for_an_rms_norm_model(recipe):
    assert sentences(recipe.line("--normalization LayerNorm")) == [
        "--normalization is LayerNorm and config.json says an RMSNorm model: give --normalization RMSNorm."
    ]


@pytest.mark.parametrize(
    ("more", "changes"),
    [
        ("--untie-embeddings-and-output-weights", {"tie_word_embeddings": False}),
        ("--rotary-base 5000000", NEWER_ROPE),
        ("--rotary-base 10000", {"rope_theta": "absent"}),
        ("--kv-channels 80", {"head_dim": "absent", "model_type": "llama"}),
        ("--num-query-groups 32", {"num_key_value_heads": "absent"}),
        ("--add-qkv-bias", {"model_type": "qwen2", "attention_bias": "absent"}),
        ("--use-rope-scaling", {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
    ],
)
def test_flags_that_match_the_config_are_accepted(recipe, more, changes):
    recipe.write_config(**changes)
    line = recipe.line(more)
    if changes.get("model_type", "qwen3") != "qwen3":
        line.remove("--qk-layernorm")
    assert sentences(line) == []


def test_all_mismatches_are_reported_together(recipe):
    recipe.write_config(num_hidden_layers=28, hidden_size=1024, tie_word_embeddings=False)
    assert len(sentences(recipe.line())) == 3


def test_missing_model_switches_are_named(recipe):
    line = recipe.line()
    for switch in ("--swiglu", "--qk-layernorm", "--disable-bias-linear"):
        line.remove(switch)
    assert sentences(line) == [
        "--swiglu is missing and config.json says hidden_act 'silu': add --swiglu.",
        "--qk-layernorm is missing and config.json says model_type 'qwen3': add --qk-layernorm.",
        "--disable-bias-linear is missing and config.json says no bias in its linear layers: add"
        " --disable-bias-linear.",
    ]


def test_folder_without_a_model_is_rejected(recipe):
    (recipe.dir / "hf" / "config.json").write_text("{")
    assert "config.json is not JSON" in sentences(recipe.line())[0]
    (recipe.dir / "hf" / "config.json").unlink()
    assert sentences(recipe.line()) == [
        f"--hf-checkpoint {recipe.dir}/hf has no config.json: give the folder with the model's files."
    ]
    assert sentences(recipe.line("--hf-checkpoint {dir}/hff")) == [
        f"--hf-checkpoint {recipe.dir}/hff does not exist (only {recipe.dir} of it does): give the folder of a"
        " Hugging Face model."
    ]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "--num-query-groups 6",
            "--num-attention-heads 32 does not divide by --num-query-groups 6: choose a divisor.",
        ),
        ("--kv-channels 127", "--kv-channels 127 is odd and rotary channels come in pairs: give an even number."),
        (
            "--padded-vocab-size 151680",
            "--padded-vocab-size 151680 is below --vocab-size 151936: raise it.",
        ),
    ],
)
def test_impossible_shapes_are_rejected(recipe, more, sentence):
    assert sentence in sentences(recipe.line(more))


def test_query_groups_and_their_switch_require_each_other(recipe):
    assert (
        "--num-query-groups 8 is used with --group-query-attention only: add it, or leave --num-query-groups out."
        in sentences(recipe.line(without="--group-query-attention"))
    )
    assert "--group-query-attention needs --num-query-groups: add it." in sentences(
        recipe.line(without="--num-query-groups")
    )


def test_head_width_other_than_hidden_size_over_heads_needs_kv_channels(recipe):
    assert (
        "--hidden-size 2561 does not divide by --num-attention-heads 32: give --kv-channels, the width of a head."
        in sentences(recipe.line("--hidden-size 2561", without="--kv-channels"))
    )


def test_tensor_parallel_size_divides_heads_groups_and_widths(recipe):
    layout = "--actor-num-gpus-per-node 16 --num-gpus-per-node 16 --tensor-model-parallel-size {tp}"
    assert sentences(recipe.line(layout.replace("{tp}", "8"))) == []
    assert sentences(recipe.line(layout.replace("{tp}", "16"))) == [
        "--num-query-groups 8 does not divide by --tensor-model-parallel-size 16: choose a tensor parallel size that"
        " divides it."
    ]
    assert sentences(recipe.line("--padded-vocab-size 151937")) == [
        "--padded-vocab-size 151937 does not divide by --tensor-model-parallel-size 2: choose a tensor parallel size"
        " that divides it."
    ]


def test_feed_forward_width_defaults_as_in_megatron():
    line = ["--num-layers", "2", "--hidden-size", "2560", "--num-attention-heads", "32", "--vocab-size", "100"]
    args, _ = read_args(line, entry="tool.py")
    assert (args.ffn_hidden_size, args.kv_channels, args.num_query_groups) == (10240, 80, 32)
    assert args.padded_vocab_size == 128
    args, _ = read_args([*line, "--swiglu"], entry="tool.py")
    assert args.ffn_hidden_size == 6784  # int(4 * 2560 * 2 / 3) = 6826 = 106 * 64 + 42


def test_servers_reject_quantized_weights_that_a_weight_update_would_corrupt(recipe):
    recipe.write_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    (sentence,) = sentences(recipe.line())
    assert sentence.startswith("--hf-checkpoint holds weights quantised as 'fp8' and weight updates send unquantised")
    assert sentence not in sentences(recipe.line("--debug-train-only --load-debug-rollout-data {dir}/dump.pt"))
    assert read_args(recipe.model_line(), entry="convert_hf_to_torch_dist.py")[1] == []


def test_tokenizer_with_remote_code_runs_only_when_allowed(recipe):
    path = recipe.dir / "hf/tokenizer_config.json"
    path.write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}))
    tables = {"sglang": lambda: {"trust-remote-code": PassthroughFlag("trust_remote_code", action="store_true")}}
    _, problems = read_args(recipe.line(), passthrough=tables)
    assert [str(problem) for problem in problems] == [
        f"--hf-checkpoint {recipe.dir}/hf has a tokenizer in Python code: review it, and add"
        f" --sglang-trust-remote-code to run it."
    ]
    assert read_args(recipe.line("--sglang-trust-remote-code"), passthrough=tables)[1] == []
