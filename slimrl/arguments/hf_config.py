"""Compares the model flags with a Hugging Face config.json: a wrong shape or theta trains without any error otherwise.

One table says which key states which flag; values that the file leaves out are the model class's own defaults.
Called by the rules here and by the converters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem

MODEL_TYPES = ("llama", "qwen2", "qwen3")


def disagreements(args: Arguments, config: Mapping[str, Any]) -> list[Problem]:
    """One problem for each flag whose value is not the file's; none where they describe the same model."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        return [
            Problem(
                "--hf-checkpoint",
                f"--hf-checkpoint has model_type {model_type!r} and this version trains {', '.join(MODEL_TYPES)}:"
                " give a model of these families.",
            )
        ]
    problems = [*_unsupported(config)]
    values = vars(args)
    for name, (key, wanted) in _numbers(config).items():
        given = values[name]
        if given is not None and wanted is not None and given != wanted:
            flag = "--" + name.replace("_", "-")
            problems.append(
                Problem(flag, f"{flag} is {given} and config.json says {key} {wanted}: give {flag} {wanted}.")
            )
    if args.normalization != "RMSNorm":
        flag, given = "--normalization", args.normalization
        sentence = f"{flag} is {given} and config.json says an RMSNorm model: give {flag} RMSNorm."
        problems.append(Problem(flag, sentence))
    for name, (flag, key, wanted) in _switches(config).items():
        if values[name] != wanted:
            # --disable-bias-linear sets its field to False: the flag is on where the field is off
            given = values[name] != flag.startswith("--disable")
            mend = f"leave {flag} out" if given else f"add {flag}"
            state = "given" if given else "missing"
            problems.append(Problem(flag, f"{flag} is {state} and config.json says {key}: {mend}."))
    return problems


def _numbers(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """field -> (key in config.json, value there)."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    rope = _rope(config)
    head_dim = config.get("head_dim")
    if head_dim is None and heads and hidden:
        head_dim = 128 if config["model_type"] == "qwen3" else hidden // heads
    return {
        "num_layers": ("num_hidden_layers", config.get("num_hidden_layers")),
        "hidden_size": ("hidden_size", hidden),
        "ffn_hidden_size": ("intermediate_size", config.get("intermediate_size")),
        "num_attention_heads": ("num_attention_heads", heads),
        "num_query_groups": ("num_key_value_heads", config.get("num_key_value_heads", heads)),
        "kv_channels": ("head_dim", head_dim),
        "vocab_size": ("vocab_size", config.get("vocab_size")),
        "norm_epsilon": ("rms_norm_eps", config.get("rms_norm_eps")),
        "rotary_base": ("rope_theta", _whole(rope.get("rope_theta", 10000))),
        "rotary_percent": ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)),
        "rope_scaling_factor": ("rope factor", rope.get("factor") if _is_llama3(rope) else None),
    }


def _switches(config: Mapping[str, Any]) -> dict[str, tuple[str, str, bool]]:
    """field -> (flag that switches it, what config.json says, the field's value then)."""
    model_type = config["model_type"]
    activation = config.get("hidden_act", "silu")
    tied = config.get("tie_word_embeddings", False)
    qkv_bias = model_type == "qwen2" or config.get("attention_bias", False)
    scaled = _is_llama3(_rope(config))
    return {
        "swiglu": ("--swiglu", f"hidden_act {activation!r}", activation == "silu"),
        "untie_embeddings_and_output_weights": (
            "--untie-embeddings-and-output-weights",
            f"tie_word_embeddings {str(tied).lower()}",
            not tied,
        ),
        "qk_layernorm": ("--qk-layernorm", f"model_type {model_type!r}", model_type == "qwen3"),
        "add_qkv_bias": (
            "--add-qkv-bias",
            f"model_type {model_type!r}"
            + ("" if model_type == "qwen2" else f", attention_bias {str(qkv_bias).lower()}"),
            qkv_bias,
        ),
        "add_bias_linear": ("--disable-bias-linear", "no bias in its linear layers", False),
        "rotary_interleaved": ("--rotary-interleaved", f"model_type {model_type!r}", False),
        "use_rope_scaling": (
            "--use-rope-scaling",
            "llama3 rope scaling" if scaled else "no llama3 rope scaling",
            scaled,
        ),
    }


def _unsupported(config: Mapping[str, Any]) -> list[Problem]:
    found = []
    rope_type = _rope_type(_rope(config))
    if rope_type not in ("default", "llama3"):
        found.append(f"rope type {rope_type!r}")
    if config.get("use_sliding_window", False):
        found.append("use_sliding_window true")
    if config.get("mlp_bias", False):
        found.append("mlp_bias true")
    if config.get("attention_bias", False) and config["model_type"] != "qwen2":
        found.append("attention_bias true")
    return [
        Problem("--hf-checkpoint", f"--hf-checkpoint has {what} in config.json, which is not served yet: use another.")
        for what in found
    ]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings: `rope_parameters` in newer files, `rope_theta` and `rope_scaling` in older ones."""
    older = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return {**older, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _is_llama3(rope: Mapping[str, Any]) -> bool:
    return _rope_type(rope) == "llama3"


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value
