"""`ModelShape`: the sizes that decide every weight tensor's shape, from flags or from config.json.

Also says where the two disagree, flag by flag; the converter refuses on it and training checks it at start.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from slimrl.weights.families import family_for

if TYPE_CHECKING:
    from slimrl.arguments import Arguments


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder. `padded_vocab_size` counts the embedding rows that Megatron keeps (true rows first)."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    qk_layernorm: bool
    qkv_bias: bool

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    def dimension(self, name: str) -> int:
        """The size a family's table means by `name`. Raises KeyError for a name that no table uses."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "queries": self.num_attention_heads * self.kv_channels,
            "keys": self.num_query_groups * self.kv_channels,
            "head": self.kv_channels,
        }[name]

    @classmethod
    def from_args(cls, args: Arguments) -> ModelShape:
        """The shape that the model flags describe."""
        return cls(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            kv_channels=args.kv_channels,
            vocab_size=args.vocab_size,
            padded_vocab_size=args.padded_vocab_size,
            tied=not args.untie_embeddings_and_output_weights,
            qk_layernorm=args.qk_layernorm,
            qkv_bias=args.add_qkv_bias,
        )

    @classmethod
    def from_hf_config(cls, hf_config: dict[str, Any]) -> ModelShape:
        """The shape that a config.json describes, without vocabulary padding.

        Raises ValueError for an unknown model_type or an entry that every such config must have.
        """
        family = family_for(hf_config)
        needed = (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "vocab_size",
        )
        for key in needed:
            if key not in hf_config:
                raise ValueError(f"config.json of model_type {family.model_type} has no {key}: the file is incomplete")
        heads = hf_config["num_attention_heads"]
        return cls(
            num_layers=hf_config["num_hidden_layers"],
            hidden_size=hf_config["hidden_size"],
            ffn_hidden_size=hf_config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=hf_config.get("num_key_value_heads") or heads,
            kv_channels=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
            vocab_size=hf_config["vocab_size"],
            padded_vocab_size=hf_config["vocab_size"],
            tied=hf_config.get("tie_word_embeddings", False),
            qk_layernorm=family.qk_layernorm,
            qkv_bias=family.qkv_bias,
        )


def disagreements(args: Arguments, hf_config: dict[str, Any]) -> list[str]:
    """One sentence per model flag that contradicts config.json, naming both values and the flag to write.

    Empty where all agree. Raises ValueError for a model_type without a table.
    """
    hf = ModelShape.from_hf_config(hf_config)
    rope_theta, rope_type, rope_factor = _rotary(hf_config)
    values = (
        ("--num-layers", args.num_layers, "num_hidden_layers", hf.num_layers),
        ("--hidden-size", args.hidden_size, "hidden_size", hf.hidden_size),
        ("--ffn-hidden-size", args.ffn_hidden_size, "intermediate_size", hf.ffn_hidden_size),
        ("--num-attention-heads", args.num_attention_heads, "num_attention_heads", hf.num_attention_heads),
        ("--num-query-groups", args.num_query_groups, "num_key_value_heads", hf.num_query_groups),
        ("--kv-channels", args.kv_channels, "head_dim", hf.kv_channels),
        ("--vocab-size", args.vocab_size, "vocab_size", hf.vocab_size),
        ("--normalization", args.normalization, None, "RMSNorm"),
        ("--norm-epsilon", args.norm_epsilon, "rms_norm_eps", hf_config.get("rms_norm_eps", 1e-6)),
        ("--rotary-base", args.rotary_base, "rope_theta", rope_theta),
    )
    switches = (
        ("--untie-embeddings-and-output-weights", args.untie_embeddings_and_output_weights, not hf.tied),
        ("--swiglu", args.swiglu, hf_config.get("hidden_act", "silu") == "silu"),
        ("--disable-bias-linear", not args.add_bias_linear, True),
        ("--qk-layernorm", args.qk_layernorm, hf.qk_layernorm),
        ("--add-qkv-bias", args.add_qkv_bias, hf.qkv_bias),
        ("--use-rope-scaling", args.use_rope_scaling, rope_type == "llama3"),
    )
    found = [
        f"{flag} is {'not given' if value is None else value} but {_origin(key, hf_config)} {_plain(wanted)}:"
        f" write {flag} {_plain(wanted)}"
        for flag, value, key, wanted in values
        if value != wanted
    ]
    found += [
        f"{flag} is {'on' if given else 'off'} but config.json (model_type {hf_config['model_type']}) describes a model"
        f" {'with' if wanted else 'without'} it: {'add' if wanted else 'remove'} {flag}"
        for flag, given, wanted in switches
        if given != wanted
    ]
    if rope_type not in ("default", "llama3"):
        found.append(
            f"config.json asks for rotary scaling of type {rope_type!r}, and the training side computes only"
            " the default and llama3: choose a model with one of those"
        )
    if rope_type == "llama3" and args.use_rope_scaling and args.rope_scaling_factor != rope_factor:
        found.append(
            f"--rope-scaling-factor is {args.rope_scaling_factor:g} but config.json has factor = {rope_factor:g}:"
            f" write --rope-scaling-factor {rope_factor:g}"
        )
    return found


def _rotary(hf_config: dict[str, Any]) -> tuple[float, str, float]:
    """(theta, type, scaling factor), from the newer `rope_parameters` or the older separate entries."""
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", hf_config.get("rope_theta", 10000.0))
    return theta, scaling.get("rope_type", scaling.get("type", "default")), scaling.get("factor", 1.0)


def _origin(key: str | None, hf_config: dict[str, Any]) -> str:
    return f"{hf_config['model_type']} models have" if key is None else f"config.json has {key} ="


def _plain(value: float | str) -> str:
    """1000000.0 as 1000000: the way the flag is written."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
