"""`ModelShape`: the sizes that decide every weight tensor's shape, from flags or from config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slimrl.arguments.hf_config.tables import stated_flags
from slimrl.weights.families import family_for

if TYPE_CHECKING:
    from slimrl.arguments import Arguments

_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Widths of multi-latent attention; `q_lora_rank` 0: queries have no latent vector."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. `padded_vocab_size` counts the embedding rows that Megatron keeps (true rows first).

    `moe_layers` says of each layer whether it has experts; it is empty for a model without experts.
    """

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
    num_experts: int = 0
    moe_layers: tuple[bool, ...] = ()
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    shared_expert_gate: bool = False
    expert_bias: bool = False
    latent: LatentShape | None = None

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer (counted from 0) has experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    def has(self, condition: str) -> bool:
        """Whether the model has what `Row.when` names. Raises KeyError for a name that no table uses."""
        return {
            "qk_layernorm": self.qk_layernorm,
            "qkv_bias": self.qkv_bias,
            "shared_experts": self.shared_ffn_hidden_size > 0,
            "shared_expert_gate": self.shared_expert_gate,
            "expert_bias": self.expert_bias,
            "query_latent": self.latent is not None and self.latent.q_lora_rank > 0,
            "no_query_latent": self.latent is not None and self.latent.q_lora_rank == 0,
        }[condition]

    def dimension(self, name: str) -> int:
        """The size a family's table means by `name`. Raises KeyError for a name that no table uses."""
        sizes = {
            "one": 1,
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "twice_ffn": 2 * self.ffn_hidden_size,
            "queries": self.num_attention_heads * self.kv_channels,
            "keys": self.num_query_groups * self.kv_channels,
            "head": self.kv_channels,
            "experts": self.num_experts,
            "moe_ffn": self.moe_ffn_hidden_size,
            "shared_ffn": self.shared_ffn_hidden_size,
        }
        if self.latent is not None:
            heads, latent = self.num_attention_heads, self.latent
            sizes |= {
                "q_latent": latent.q_lora_rank,
                "kv_latent": latent.kv_lora_rank,
                "kv_latent_and_rope": latent.kv_lora_rank + latent.qk_pos_emb_head_dim,
                "latent_queries": heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim),
                "latent_keys_values": heads * (latent.qk_head_dim + latent.v_head_dim),
                "latent_values": heads * latent.v_head_dim,
            }
        return sizes[name]

    @classmethod
    def from_args(cls, args: Arguments) -> ModelShape:
        """The shape that the model flags describe."""
        return cls._from_flags(vars(args))

    @classmethod
    def from_hf_config(cls, hf_config: dict[str, Any]) -> ModelShape:
        """The shape that a config.json describes, without vocabulary padding.

        Raises ValueError for an unknown model_type or an entry that every such config must have.
        """
        family = family_for(hf_config)
        for key in _NEEDED:
            if key not in hf_config:
                raise ValueError(f"config.json of model_type {family.model_type} has no {key}: the file is incomplete")
        flags = stated_flags(hf_config)
        return cls._from_flags(flags | {"padded_vocab_size": flags["vocab_size"]})

    @classmethod
    def _from_flags(cls, flags: Mapping[str, Any]) -> ModelShape:
        latent = _latent(flags)
        dense = cls(
            num_layers=flags["num_layers"],
            hidden_size=flags["hidden_size"],
            ffn_hidden_size=flags["ffn_hidden_size"],
            num_attention_heads=flags["num_attention_heads"],
            # one latent vector serves all heads, whose widths are its own
            num_query_groups=0 if latent else flags["num_query_groups"],
            kv_channels=0 if latent else flags["kv_channels"],
            vocab_size=flags["vocab_size"],
            padded_vocab_size=flags["padded_vocab_size"],
            tied=not flags["untie_embeddings_and_output_weights"],
            qk_layernorm=flags["qk_layernorm"],
            qkv_bias=flags["add_qkv_bias"],
            latent=latent,
        )
        if flags["num_experts"] is None:
            return dense
        return dataclasses.replace(
            dense,
            num_experts=flags["num_experts"],
            moe_layers=moe_layers(flags["moe_layer_freq"], dense.num_layers),
            moe_ffn_hidden_size=flags["moe_ffn_hidden_size"] or dense.ffn_hidden_size,
            shared_ffn_hidden_size=flags["moe_shared_expert_intermediate_size"] or 0,
            shared_expert_gate=flags["moe_shared_expert_gate"],
            expert_bias=flags["moe_router_enable_expert_bias"],
        )


def moe_layers(moe_layer_freq: int | list[int], num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every N-th from the first on for a number, as it says for a list."""
    if isinstance(moe_layer_freq, int):
        return tuple(layer % moe_layer_freq == 0 for layer in range(num_layers))
    return tuple(bool(flag) for flag in moe_layer_freq)


def _latent(flags: Mapping[str, Any]) -> LatentShape | None:
    if not flags["multi_latent_attention"]:
        return None
    return LatentShape(
        q_lora_rank=flags["q_lora_rank"] or 0,
        kv_lora_rank=flags["kv_lora_rank"],
        qk_head_dim=flags["qk_head_dim"],
        qk_pos_emb_head_dim=flags["qk_pos_emb_head_dim"],
        v_head_dim=flags["v_head_dim"],
    )
