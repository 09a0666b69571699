"""The sizes of a model: `ModelShape` for the shapes of weight tensors, `Shape` for counts of weights and activations.

`ModelShape` is read from flags or from config.json, and resolves the dimension names of the weight tables. `Shape` is
read from checked flags, and is the only place where the dry run reads them; `parameters` and `activations` are
arithmetic on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from slimrl.models.config_tables import stated_flags
from slimrl.models.families import family_for

_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


class ModelFlags(Protocol):
    """The model flags as attributes; `slimrl.arguments.Arguments` is one."""

    def __getattr__(self, name: str) -> Any: ...


@dataclasses.dataclass(frozen=True)
class LatentDims:
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
    latent: LatentDims | None = None

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer (counted from 0) has experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    def has(self, condition: str) -> bool:
        """Whether the model has what `ParamMapping.when` names. Raises KeyError for a name that no table uses."""
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
    def from_args(cls, args: ModelFlags) -> ModelShape:
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


def _latent(flags: Mapping[str, Any]) -> LatentDims | None:
    if not flags["multi_latent_attention"]:
        return None
    return LatentDims(
        q_lora_rank=flags["q_lora_rank"] or 0,
        kv_lora_rank=flags["kv_lora_rank"],
        qk_head_dim=flags["qk_head_dim"],
        qk_pos_emb_head_dim=flags["qk_pos_emb_head_dim"],
        v_head_dim=flags["v_head_dim"],
    )


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Widths of multi-head latent attention; `q_rank` is None where queries have no latent vector."""

    q_rank: int | None
    kv_rank: int
    qk_width: int  # of a head, without rotary positions
    rotary_width: int  # of a head, with rotary positions
    v_width: int  # of a head


@dataclasses.dataclass(frozen=True)
class Experts:
    """One mixture-of-experts layer; `shared_width` is 0 without a shared expert."""

    number: int
    top_k: int
    width: int
    shared_width: int
    shared_gate: bool
    selection_bias: bool  # one number per expert, no trained weight


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder. `moe_layers` has one entry per layer, True where it has experts."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    head_width: int
    vocab: int
    padded_vocab: int
    tied: bool
    gated: bool
    qk_norm: bool
    linear_bias: bool
    qkv_bias: bool
    norm_bias: bool
    norms_per_layer: int
    moe_layers: tuple[bool, ...]
    experts: Experts | None = None
    latent: LatentAttention | None = None
    mtp_layers: int = 0

    @property
    def layers(self) -> int:
        """Transformer layers, without those of multi-token prediction."""
        return len(self.moe_layers)

    @property
    def fc1_rows(self) -> int:
        """Matrices side by side in the first linear layer of a feed-forward block: gate and up, or one."""
        return 2 if self.gated else 1

    def unpadded(self) -> Shape:
        """The same model with the vocabulary that the Hugging Face checkpoint has."""
        return dataclasses.replace(self, padded_vocab=self.vocab)


def shape_of(args: ModelFlags) -> Shape:
    """The shape that checked model flags describe."""
    return Shape(
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        groups=args.num_query_groups,
        head_width=args.kv_channels,
        vocab=args.vocab_size,
        padded_vocab=args.padded_vocab_size,
        tied=not args.untie_embeddings_and_output_weights,
        gated=args.swiglu,
        qk_norm=args.qk_layernorm,
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_bias_linear or args.add_qkv_bias,
        norm_bias=args.normalization == "LayerNorm",
        norms_per_layer=2 + args.post_self_attn_layernorm + args.post_mlp_layernorm,
        moe_layers=_moe_layers(args),
        experts=_experts(args),
        latent=_mla_dimensions(args),
        mtp_layers=args.mtp_num_layers or 0,
    )


def _moe_layers(args: ModelFlags) -> tuple[bool, ...]:
    """--moe-layer-freq: one 0 or 1 per layer, or N for layers 0, N, 2N ..."""
    frequency = args.moe_layer_freq
    if args.num_experts is None or frequency is None:
        return (False,) * args.num_layers
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(args.num_layers))
    return tuple(bool(entry) for entry in frequency)


def _experts(args: ModelFlags) -> Experts | None:
    if args.num_experts is None:
        return None
    return Experts(
        number=args.num_experts,
        top_k=args.moe_router_topk,
        width=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        shared_width=args.moe_shared_expert_intermediate_size or 0,
        shared_gate=args.moe_shared_expert_gate,
        selection_bias=args.moe_router_enable_expert_bias,
    )


def _mla_dimensions(args: ModelFlags) -> LatentAttention | None:
    if not args.multi_latent_attention:
        return None
    return LatentAttention(
        q_rank=args.q_lora_rank,
        kv_rank=args.kv_lora_rank,
        qk_width=args.qk_head_dim,
        rotary_width=args.qk_pos_emb_head_dim,
        v_width=args.v_head_dim,
    )
