"""Builds the model of a training worker from flags, with a function or layers of the user's where they say so.

Promises a bare `GPTModel` on this process' device, with vocabulary-parallel logits over the padded vocabulary
and every parameter marked the way gradient reduction needs. Called by the trainer and by the converters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slimrl.arguments import Arguments
from slimrl.hooks import HookFailedError, LayerSpec, ModelProvider, accepted, named, naming_calls, resolve
from slimrl.megatron.config import transformer_config
from slimrl.megatron.model.layer_spec import block_of, block_spec
from slimrl.megatron.model.layers import PostNorms
from slimrl.megatron.model.output_layer import PolicyModel
from slimrl.megatron.parallel import ParallelState


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
    stages = [_build_stage(args, config, parallel, number) for number in numbers]
    if args.custom_model_provider_path is not None and not args.untie_embeddings_and_output_weights:
        _check_tie(args.custom_model_provider_path, stages, parallel)
    return stages


def _check_tie(path: str, stages: list[GPTModel], parallel: ParallelState) -> None:
    """A tied weight is on two pipeline stages, which add their gradients up: one without any would be waited for."""
    ends = [stage.shared_embedding_or_output_weight() for stage in stages if stage.pre_process or stage.post_process]
    of_stages: list[list[bool]] = [[] for _ in range(parallel.pp_size)]
    dist.all_gather_object(of_stages, [weight.requires_grad for weight in ends], group=parallel.pp_group)
    if len({trained for found in of_stages for trained in found}) > 1:
        raise HookFailedError(
            f"--custom-model-provider-path {path} freezes the embedding or the head, which are one weight here: freeze"
            " shared_embedding_or_output_weight() on both stages"
        )


def policy_model(
    args: Arguments,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    layers: TransformerBlockSubmodules | None = None,
) -> PolicyModel:
    """slimrl's own model of a stage, in host memory; `layers` are `own_layers` where None is given."""
    return PolicyModel(
        config=config,
        transformer_layer_spec=layers if layers is not None else own_layers(args, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        vp_stage=vp_stage,
    )


def own_layers(args: Arguments, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """slimrl's own layers of a stage, with all that the flags ask for."""
    post_norms = PostNorms(self_attention=args.post_self_attn_layernorm, mlp=args.post_mlp_layernorm)
    return block_spec(config, vp_stage, post_norms)


def _build_stage(
    args: Arguments, config: TransformerConfig, parallel: ParallelState, virtual_stage: int | None
) -> GPTModel:
    ends = parallel.holds_embedding(virtual_stage), parallel.holds_head(virtual_stage)
    if args.custom_model_provider_path is not None:
        where, path = "--custom-model-provider-path", args.custom_model_provider_path
        model = _provided(where, path, named(where, path, ModelProvider), args, config, ends, virtual_stage)
    elif args.spec is not None:
        model = _from_spec(args, config, ends, virtual_stage)
    else:
        model = policy_model(args, config, *ends, virtual_stage)
    mark_expert_parameters(model)
    return model.to(parallel.device)


def _from_spec(
    args: Arguments, config: TransformerConfig, ends: tuple[bool, bool], virtual_stage: int | None
) -> GPTModel:
    """The model of the layers that --spec describes."""
    path = ".".join(args.spec or ())
    found = resolve(path, LayerSpec)
    if not isinstance(found, ModuleSpec):
        found = named("--spec", path, LayerSpec)(args, config, virtual_stage)
    if isinstance(found, ModuleSpec | TransformerBlockSubmodules):
        return policy_model(args, config, *ends, virtual_stage, block_of(config, found, virtual_stage))
    if inspect.isroutine(found):
        return _provided("--spec", path, naming_calls("--spec", path, found), args, config, ends, virtual_stage)
    raise HookFailedError(
        f"--spec {path} returned a value of type {type(found).__name__}: return a ModuleSpec of a layer,"
        " TransformerBlockSubmodules or a function that builds the model"
    )


def _provided(
    flag: str,
    path: str,
    function: Callable[..., Any],
    args: Arguments,
    config: TransformerConfig,
    ends: tuple[bool, bool],
    virtual_stage: int | None,
) -> GPTModel:
    """What a model provider gives; raises HookFailedError where nothing here can train it."""
    model = function(*ends, **accepted(function, ModelProvider, vp_stage=virtual_stage, args=args, config=config))
    if not isinstance(model, GPTModel):
        raise HookFailedError(f"{flag} {path} returned a value of type {type(model).__name__}: return a GPTModel")
    if not isinstance(model, PolicyModel) and not args.keep_logits:
        raise HookFailedError(
            f"{flag} {path} returned a plain GPTModel, which gives logits: add --keep-logits, or build it with"
            " slimrl.megatron.model.policy_model"
        )
    return model


def mark_expert_parameters(model: torch.nn.Module) -> None:
    """Have expert weights reduced over the expert-data-parallel group.

    megatron-core marks them only where expert parallelism is larger than 1; with tensor parallelism alone their
    gradients would silently stay unreduced, and checkpoints could not change their expert layout.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
