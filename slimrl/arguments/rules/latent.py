"""Rules about latent attention (MLA) and YaRN positions, which come with it."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
_YARN = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def latent_flags_have_latent_attention(args: Arguments, context: Context) -> Iterator[Problem]:
    """No width of latent attention and no stretch of its positions is ignored."""
    if args.multi_latent_attention:
        return
    for name in (*_LATENT, *_YARN):
        if name in context.given:
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} belongs to latent attention: add --multi-latent-attention, or leave it out.")
    if args.position_embedding_type == "yarn":
        yield Problem(
            "--position-embedding-type",
            "--position-embedding-type yarn is served with --multi-latent-attention only: use rope.",
        )


def latent_attention_is_plain_otherwise(args: Arguments, context: Context) -> Iterator[Problem]:
    """What megatron-core cannot combine with latent attention."""
    if args.multi_latent_attention and args.rotary_interleaved:
        yield Problem(
            "--rotary-interleaved",
            "--rotary-interleaved and --multi-latent-attention exclude each other (its rotary channels have an order of"
            " their own): leave the first out.",
        )
    if args.multi_latent_attention and args.use_rope_scaling:
        yield Problem(
            "--use-rope-scaling",
            "--use-rope-scaling is Llama 3's and --multi-latent-attention stretches with --rotary-scaling-factor: leave"
            " the first out.",
        )
    tp, training = args.tensor_model_parallel_size, context.is_training and not args.debug_rollout_only
    # with experts another rule asks for it
    if args.multi_latent_attention and tp > 1 and not args.sequence_parallel and args.num_experts is None and training:
        yield Problem(
            "--sequence-parallel",
            f"--multi-latent-attention with --tensor-model-parallel-size {tp} trains with --sequence-parallel only: add"
            " it.",
        )
