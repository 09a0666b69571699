"""Builds the models of a training rank from flags, the policy optionally with a custom provider or custom layers.

The result is a bare `GPTModel` on this process' device, with vocabulary-parallel logits over the padded vocabulary and
every parameter marked as gradient reduction needs it. Called by the trainer and by the converters.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slimrl.arguments.flags.model import AttentionArguments
from slimrl.arguments.namespace import Arguments, MegatronArguments
from slimrl.hooks import HookFailedError, LayerSpec, ModelProvider, accepted, named, naming_calls, resolve
from slimrl.hooks.base import RunArguments
from slimrl.megatron.config import transformer_config
from slimrl.megatron.model.layer_spec import block_of, block_spec
from slimrl.megatron.model.layers import PostNorms
from slimrl.megatron.model.lora import add_adapters
from slimrl.megatron.model.output_layer import PolicyModel, ValueModel
from slimrl.megatron.model.vision import VisionLanguageModel, tower_of, vision_tower
from slimrl.megatron.parallel import ParallelState
from slimrl.models.adapters import AdapterConfig


@dataclasses.dataclass(frozen=True)
class CustomModel:
    """Custom functions that build the model or its layers; without a path slimrl builds its own."""

    provider_path: str | None = None
    spec: str | None = None
    keep_logits: bool = False  # whether a model that gives logits can be trained
    hook_args: RunArguments | None = None  # passed to the functions

    @classmethod
    def from_args(cls, args: Arguments) -> CustomModel:
        """From --custom-model-provider-path and --spec."""
        spec = None if args.spec is None else ".".join(args.spec)
        return cls(args.custom_model_provider_path, spec, args.keep_logits, args)


_NO_CUSTOM_MODEL = CustomModel()


def build_model(flags: MegatronArguments, parallel: ParallelState, custom: CustomModel = _NO_CUSTOM_MODEL) -> GPTModel:
    """This rank's part of the model, freshly initialised, for a layout without virtual pipeline stages.

    `parallel.initialize` must have run. The logits of `model(...)` are [1, tokens, padded_vocab_size / tp], in the
    parameters' dtype.
    """
    return _build_stage(flags, transformer_config(flags), parallel, None, custom)


def build_stages(
    flags: MegatronArguments, parallel: ParallelState, custom: CustomModel = _NO_CUSTOM_MODEL
) -> list[GPTModel]:
    """This rank's model chunks: one, or one for each of its virtual pipeline stages."""
    config = transformer_config(flags)  # one object: the schedule reads that of the first stage
    stages = [_build_stage(flags, config, parallel, number, custom) for number in _stage_numbers(parallel)]
    if custom.provider_path is not None and not flags.untie_embeddings_and_output_weights:
        _check_tie(custom.provider_path, stages, parallel)
    return stages


# flags of a model with a value head, which shares no weight with the embedding
OF_VALUE_MODEL: dict[str, Any] = {"untie_embeddings_and_output_weights": True}


def build_value_stages(flags: MegatronArguments, parallel: ParallelState) -> list[GPTModel]:
    """This rank's chunks of a model of the same sizes with a value head (`output_layer`)."""
    config = transformer_config(flags)
    stages: list[GPTModel] = []
    for number in _stage_numbers(parallel):
        ends = parallel.holds_embedding(number), parallel.holds_head(number)
        model = ValueModel(**_settings(flags, config, *ends, number, own_layers(flags, config, number)))
        mark_expert_parameters(model)
        stages.append(model.to(parallel.device))
    return stages


def _stage_numbers(parallel: ParallelState) -> Iterable[int | None]:
    return [None] if parallel.virtual_stages is None else range(parallel.virtual_stages)


def _check_tie(path: str, stages: list[GPTModel], parallel: ParallelState) -> None:
    """Raises HookFailedError if only one end of the tied weight is frozen: its gradient all-reduce would hang."""
    ends = [stage.shared_embedding_or_output_weight() for stage in stages if stage.pre_process or stage.post_process]
    of_stages: list[list[bool]] = [[] for _ in range(parallel.pp_size)]
    dist.all_gather_object(of_stages, [weight.requires_grad for weight in ends], group=parallel.pp_group)
    if len({trained for found in of_stages for trained in found}) > 1:
        raise HookFailedError(
            f"--custom-model-provider-path {path} freezes only one of embedding and head, which share one weight:"
            " freeze shared_embedding_or_output_weight() on both pipeline stages"
        )


def policy_model(
    args: MegatronArguments,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    layers: TransformerBlockSubmodules | None = None,
) -> PolicyModel:
    """slimrl's own model of a stage, in host memory; `layers` defaults to `own_layers`, with the adapters of LoRA."""
    chosen = layers
    if chosen is None:
        chosen = add_adapters(own_layers(args, config, vp_stage), AdapterConfig.from_args(args))
    settings = _settings(args, config, pre_process, post_process, vp_stage, chosen)
    if args.vision_folder is None:
        return PolicyModel(**settings)
    tower = vision_tower(args.vision_folder, config.params_dtype) if pre_process else None
    interleaves = tower_of(args.vision_folder).interleaves_positions
    return VisionLanguageModel(tower, interleaves_positions=interleaves, **settings)


def _settings(
    args: MegatronArguments,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    layers: TransformerBlockSubmodules,
) -> dict[str, Any]:
    """The arguments of a GPTModel of a stage."""
    return {
        "config": config,
        "transformer_layer_spec": layers,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
        "vp_stage": vp_stage,
    }


def own_layers(args: AttentionArguments, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """slimrl's own layers of a stage, as the flags configure them."""
    post_norms = PostNorms(self_attention=args.post_self_attn_layernorm, mlp=args.post_mlp_layernorm)
    return block_spec(config, vp_stage, post_norms)


def _build_stage(
    flags: MegatronArguments,
    config: TransformerConfig,
    parallel: ParallelState,
    virtual_stage: int | None,
    custom: CustomModel,
) -> GPTModel:
    ends = parallel.holds_embedding(virtual_stage), parallel.holds_head(virtual_stage)
    if custom.provider_path is not None:
        where, path = "--custom-model-provider-path", custom.provider_path
        model = _provided(where, path, named(where, path, ModelProvider), custom, config, ends, virtual_stage)
    elif custom.spec is not None:
        model = _from_spec(flags, custom.spec, custom, config, ends, virtual_stage)
    else:
        model = policy_model(flags, config, *ends, virtual_stage)
    mark_expert_parameters(model)
    return model.to(parallel.device)


def _from_spec(
    flags: MegatronArguments,
    path: str,
    custom: CustomModel,
    config: TransformerConfig,
    ends: tuple[bool, bool],
    virtual_stage: int | None,
) -> GPTModel:
    """The model of the layers that --spec describes."""
    found = resolve(path, LayerSpec)
    if not isinstance(found, ModuleSpec):
        found = named("--spec", path, LayerSpec)(custom.hook_args, config, virtual_stage)
    if isinstance(found, ModuleSpec | TransformerBlockSubmodules):
        return policy_model(flags, config, *ends, virtual_stage, block_of(config, found, virtual_stage))
    if inspect.isroutine(found):
        return _provided("--spec", path, naming_calls("--spec", path, found), custom, config, ends, virtual_stage)
    raise HookFailedError(
        f"--spec {path} returned a value of type {type(found).__name__}: return a ModuleSpec of a layer,"
        " TransformerBlockSubmodules or a function that builds the model"
    )


def _provided(
    flag: str,
    path: str,
    function: Callable[..., Any],
    custom: CustomModel,
    config: TransformerConfig,
    ends: tuple[bool, bool],
    virtual_stage: int | None,
) -> GPTModel:
    """The model that a custom provider builds; raises HookFailedError if the trainer cannot train it."""
    offers = {"vp_stage": virtual_stage, "args": custom.hook_args, "config": config}
    model = function(*ends, **accepted(function, ModelProvider, **offers))
    if not isinstance(model, GPTModel):
        raise HookFailedError(f"{flag} {path} returned a value of type {type(model).__name__}: return a GPTModel")
    if not isinstance(model, PolicyModel) and not custom.keep_logits:
        raise HookFailedError(
            f"{flag} {path} returned a plain GPTModel, which outputs logits: add --keep-logits, or build it with"
            " slimrl.megatron.model.policy_model"
        )
    return model


def mark_expert_parameters(model: torch.nn.Module) -> None:
    """Mark expert weights for gradient reduction over the expert-data-parallel group.

    megatron-core marks them only if expert parallelism is larger than 1. With tensor parallelism alone their gradients
    would silently stay unreduced, and checkpoints could not be loaded in another expert layout.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
