"""`Shape`: the numbers that decide how many weights and activations a model has, taken from the model flags.

Owns the one place where the plan reads model flags. Plain arithmetic on top of it: `parameters`, `activations`.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.namespace import Arguments


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


def shape_of(args: Arguments) -> Shape:
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
        latent=_latent(args),
        mtp_layers=args.mtp_num_layers or 0,
    )


def _moe_layers(args: Arguments) -> tuple[bool, ...]:
    """--moe-layer-freq: one 0 or 1 per layer, or N for layers 0, N, 2N ..."""
    frequency = args.moe_layer_freq
    if args.num_experts is None or frequency is None:
        return (False,) * args.num_layers
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(args.num_layers))
    return tuple(bool(entry) for entry in frequency)


def _experts(args: Arguments) -> Experts | None:
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


def _latent(args: Arguments) -> LatentAttention | None:
    if not args.multi_latent_attention:
        return None
    return LatentAttention(
        q_rank=args.q_lora_rank,
        kv_rank=args.kv_lora_rank,
        qk_width=args.qk_head_dim,
        rotary_width=args.qk_pos_emb_head_dim,
        v_width=args.v_head_dim,
    )
