"""`ModelSpec`: the sizes and structure of a decoder, from the model flags or from config.json.

Used by tensor names and resharding (`families.param_mapping`, `slimrl.weights`), by the dry run and by the training
metrics (`parameters`, `activations`). Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slimrl.models.families import family_for, stated_flags
from slimrl.models.families.vision import TowerWeights, decoder_config, tower_weights

_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# config.json has no entry for these: every family has RMSNorm, and multi-token prediction layers are not trained
_SAME_FOR_ALL = {"normalization": "RMSNorm", "mtp_num_layers": None}


class ModelFlags(Protocol):
    """The model flags as attributes; `slimrl.arguments.Arguments` is one."""

    def __getattr__(self, name: str) -> Any: ...


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Widths in channels; head widths are per head.

    `q_lora_rank` is None if queries have no latent vector. `qk_head_dim` counts the channels of a query or key without
    rotary positions, `qk_pos_emb_head_dim` those with them.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    @property
    def qk_channels(self) -> int:
        """All channels of a query or key of one head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture-of-experts block, the same in each layer that has one. Widths in channels.

    `ffn_hidden_size` is the width of one routed expert, `shared_ffn_hidden_size` that of all shared experts together
    (0 without any). A token is routed to `top_k` of `number` routed experts. `expert_bias`: each expert has a bias that
    is added to its score for the selection, and is not trained by gradients.
    """

    number: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    expert_bias: bool = False


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder. Widths are in channels, vocabulary sizes in rows of the embedding; layers are counted from 0.

    `moe_layers` has one entry per layer, True if it has experts. `padded_vocab_size` counts Megatron's rows including
    padding at the end. `kv_channels` is the width of one head. With latent attention `kv_channels` and
    `num_query_groups` (key-value heads) do not apply and are 0. `tied`: embedding and output matrix share one weight.
    `gated`: the feed-forward block multiplies by a gate (SwiGLU). `linear_bias`: all linear layers have biases;
    `qkv_bias`: queries, keys and values do. `norms_per_layer` counts norms of the hidden states only. `mtp_layers`
    counts multi-token prediction layers, which follow the decoder. `vision_weights` are the tensors of the vision
    tower before it; none for a model of text.
    """

    moe_layers: tuple[bool, ...]
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
    gated: bool = True
    linear_bias: bool = False
    norm_bias: bool = False
    norms_per_layer: int = 2
    experts: Experts | None = None
    latent: LatentAttention | None = None
    mtp_layers: int = 0
    vision_weights: TowerWeights = ()

    @property
    def num_layers(self) -> int:
        """Transformer layers, without those of multi-token prediction."""
        return len(self.moe_layers)

    @property
    def num_experts(self) -> int:
        """Routed experts per MoE layer; 0 in a dense model."""
        return self.experts.number if self.experts is not None else 0

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def fc1_matrices(self) -> int:
        """Matrices in the first linear layer of a feed-forward block: 2 (gate and up) or 1."""
        return 2 if self.gated else 1

    def unpadded(self) -> ModelSpec:
        """The same model with the vocabulary of the Hugging Face checkpoint."""
        return dataclasses.replace(self, padded_vocab_size=self.vocab_size)

    def has(self, condition: str) -> bool:
        """Whether the model has the property `ParamMapping.when`. Raises KeyError for an unknown property."""
        experts, latent = self.experts, self.latent
        return {
            "qk_layernorm": self.qk_layernorm,
            "qkv_bias": self.qkv_bias,
            "shared_experts": experts is not None and experts.shared_ffn_hidden_size > 0,
            "shared_expert_gate": experts is not None and experts.shared_gate,
            "expert_bias": experts is not None and experts.expert_bias,
            "query_latent": latent is not None and latent.q_lora_rank is not None,
            "no_query_latent": latent is not None and latent.q_lora_rank is None,
        }[condition]

    def dimension(self, name: str) -> int:
        """The size in elements of the dimension `name` of a parameter mapping; a number stands for itself.

        Raises KeyError for an unknown name, or for a size of experts or of latent attention that the model does not
        have.
        """
        if name.isdecimal():
            return int(name)
        heads, sizes = self.num_attention_heads, _plain_sizes(self)
        if self.experts is not None:
            sizes |= {
                "experts": self.experts.number,
                "moe_ffn": self.experts.ffn_hidden_size,
                "shared_ffn": self.experts.shared_ffn_hidden_size,
            }
        if self.latent is not None:
            latent = self.latent
            sizes |= {
                "q_latent": latent.q_lora_rank or 0,
                "kv_latent": latent.kv_lora_rank,
                "kv_latent_and_rope": latent.kv_lora_rank + latent.qk_pos_emb_head_dim,
                "latent_queries": heads * latent.qk_channels,
                "latent_keys_values": heads * (latent.qk_head_dim + latent.v_head_dim),
                "latent_values": heads * latent.v_head_dim,
            }
        return sizes[name]

    @classmethod
    def from_args(cls, flags: ModelFlags) -> ModelSpec:
        """The model of validated flags. Raises ValueError if --moe-layer-freq does not match --num-layers."""
        return cls._from_flags(vars(flags))

    @classmethod
    def from_hf_config(cls, hf_config: dict[str, Any]) -> ModelSpec:
        """The model of a config.json, without vocabulary padding.

        Raises ValueError for an unknown model_type, a variant that the family's mapping does not support, a missing
        required entry, or a list of layers whose length is not num_hidden_layers.
        """
        family = family_for(hf_config)
        entries = decoder_config(hf_config)
        for key in _NEEDED:
            if key not in entries:
                raise ValueError(f"config.json of model_type {family.model_type} has no {key}: the file is incomplete")
        flags = stated_flags(hf_config)
        more = {"padded_vocab_size": flags["vocab_size"], "vision_weights": tower_weights(family.tower_rows)}
        return cls._from_flags(flags | _SAME_FOR_ALL | more)

    @classmethod
    def _from_flags(cls, flags: Mapping[str, Any]) -> ModelSpec:
        experts, latent = _experts(flags), _latent_attention(flags)
        layers = flags["num_layers"]
        return cls(
            moe_layers=expand_layer_pattern(flags["moe_layer_freq"], layers) if experts else (False,) * layers,
            hidden_size=flags["hidden_size"],
            ffn_hidden_size=flags["ffn_hidden_size"],
            num_attention_heads=flags["num_attention_heads"],
            # one latent vector serves all heads, and head widths have their own entries
            num_query_groups=0 if latent else flags["num_query_groups"],
            kv_channels=0 if latent else flags["kv_channels"],
            vocab_size=flags["vocab_size"],
            padded_vocab_size=flags["padded_vocab_size"],
            tied=not flags["untie_embeddings_and_output_weights"],
            qk_layernorm=flags["qk_layernorm"],
            qkv_bias=flags["add_bias_linear"] or flags["add_qkv_bias"],
            gated=flags["swiglu"],
            linear_bias=flags["add_bias_linear"],
            norm_bias=flags["normalization"] == "LayerNorm",
            norms_per_layer=2 + flags["post_self_attn_layernorm"] + flags["post_mlp_layernorm"],
            experts=experts,
            latent=latent,
            mtp_layers=flags["mtp_num_layers"] or 0,
            vision_weights=flags["vision_weights"],
        )


def expand_layer_pattern(pattern: int | Sequence[int], num_layers: int) -> tuple[bool, ...]:
    """--moe-layer-freq as one entry per layer: N for layers 0, N, 2N and so on, or a 0 or 1 for each layer.

    Raises ValueError for a list whose length is not `num_layers`.
    """
    if isinstance(pattern, int):
        return tuple(layer % pattern == 0 for layer in range(num_layers))
    if len(pattern) != num_layers:
        raise ValueError(
            f"--moe-layer-freq describes {len(pattern)} layers and --num-layers is {num_layers}:"
            " give one 0 or 1 for each layer"
        )
    return tuple(bool(entry) for entry in pattern)


def _plain_sizes(spec: ModelSpec) -> dict[str, int]:
    return {
        "one": 1,
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "ffn": spec.ffn_hidden_size,
        "twice_ffn": 2 * spec.ffn_hidden_size,
        "queries": spec.num_attention_heads * spec.kv_channels,
        "keys": spec.num_query_groups * spec.kv_channels,
        "head": spec.kv_channels,
    }


def _experts(flags: Mapping[str, Any]) -> Experts | None:
    if flags["num_experts"] is None:
        return None
    return Experts(
        number=flags["num_experts"],
        top_k=flags["moe_router_topk"],
        ffn_hidden_size=flags["moe_ffn_hidden_size"] or flags["ffn_hidden_size"],
        shared_ffn_hidden_size=flags["moe_shared_expert_intermediate_size"] or 0,
        shared_gate=flags["moe_shared_expert_gate"],
        expert_bias=flags["moe_router_enable_expert_bias"],
    )


def _latent_attention(flags: Mapping[str, Any]) -> LatentAttention | None:
    if not flags["multi_latent_attention"]:
        return None
    return LatentAttention(
        q_lora_rank=flags["q_lora_rank"] or None,
        kv_lora_rank=flags["kv_lora_rank"],
        qk_head_dim=flags["qk_head_dim"],
        qk_pos_emb_head_dim=flags["qk_pos_emb_head_dim"],
        v_head_dim=flags["v_head_dim"],
    )
