"""`ModelShape`: the sizes that decide every weight tensor's shape, from flags or from config.json."""

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
            kv_channels=hf_config.get("head_dim") or family.head_dim or hf_config["hidden_size"] // heads,
            vocab_size=hf_config["vocab_size"],
            padded_vocab_size=hf_config["vocab_size"],
            tied=hf_config.get("tie_word_embeddings", False),
            qk_layernorm=family.qk_layernorm,
            qkv_bias=family.qkv_bias,
        )
