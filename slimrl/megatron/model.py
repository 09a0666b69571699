"""Builds the model of a training worker from flags.

Promises a bare `GPTModel` on this process' device, with vocabulary-parallel logits over the padded vocabulary
and every parameter marked the way gradient reduction needs. Called by the trainer and by the converters.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from slimrl.arguments import Arguments
from slimrl.megatron.config import transformer_config
from slimrl.megatron.output import PolicyModel
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.post_norm import PostNorms
from slimrl.megatron.spec import block_spec


def build_model(args: Arguments, parallel: ParallelState) -> GPTModel:
    """This rank's part of the model, freshly initialised, for a layout without virtual pipeline stages.

    `parallel.initialize` must have run. The logits of `model(...)` are [1, tokens, padded_vocab_size / tp], in the
    parameters' dtype.
    """
    return _build_stage(args, transformer_config(args), parallel, None)


def build_stages(args: Arguments, parallel: ParallelState) -> list[GPTModel]:
    """The parts of the model that this rank holds: one, or one for each of its virtual pipeline stages."""
    config = transformer_config(args)  # one object: the schedule reads that of the first stage
    numbers = [None] if parallel.virtual_stages is None else range(parallel.virtual_stages)
    return [_build_stage(args, config, parallel, number) for number in numbers]


def _build_stage(
    args: Arguments, config: TransformerConfig, parallel: ParallelState, virtual_stage: int | None
) -> GPTModel:
    post_norms = PostNorms(self_attention=args.post_self_attn_layernorm, mlp=args.post_mlp_layernorm)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config, virtual_stage, post_norms),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel.holds_embedding(virtual_stage),
        post_process=parallel.holds_head(virtual_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        vp_stage=virtual_stage,
    )
    mark_expert_parameters(model)
    return model.to(parallel.device)


def mark_expert_parameters(model: torch.nn.Module) -> None:
    """Have expert weights reduced over the expert-data-parallel group.

    megatron-core marks them only where expert parallelism is larger than 1; with tensor parallelism alone their
    gradients would silently stay unreduced, and checkpoints could not change their expert layout.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
