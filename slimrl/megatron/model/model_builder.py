"""Builds the models of a training rank from flags, the policy optionally with a custom provider or custom layers.

The result is a bare `GPTModel` on this process' device, with vocabulary-parallel logits over the padded vocabulary and
every parameter marked as gradient reduction needs it. Called by the trainer and by the converters.

`block_spec` says which modules a transformer block is built from. With --transformer-impl transformer_engine these are
Transformer Engine's layers, otherwise megatron-core's local layers with this package's packed attention and norms that
support sequence parallelism. --moe-layer-freq decides which layers are dense and which have experts.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slimrl.arguments.flags.model import AttentionArguments
from slimrl.arguments.namespace import Arguments, MegatronArguments
from slimrl.hooks import HookFailedError, LayerSpec, ModelProvider, accepted, named, naming_calls, resolve
from slimrl.hooks.contracts import RunArguments
from slimrl.megatron.config import transformer_config
from slimrl.megatron.model.attention import PackedCoreAttention, attention_spec, with_latent_epsilon
from slimrl.megatron.model.layers import PostNorms, RMSNorm, Router, with_post_norms, with_token_frequencies
from slimrl.megatron.model.lora import add_adapters
from slimrl.megatron.model.output_layer import PolicyModel, ValueModel
from slimrl.megatron.model.routing_replay import replay_routing
from slimrl.megatron.model.vision import VisionLanguageModel, VisionValueModel, vision_arguments
from slimrl.megatron.parallel import ParallelState
from slimrl.models.adapters import AdapterConfig
from slimrl.models.model_spec import expand_layer_pattern


def block_spec(
    config: TransformerConfig, virtual_stage: int | None = None, post_norms: PostNorms | None = None
) -> TransformerBlockSubmodules:
    """The spec of this rank's transformer block, or of one of its virtual pipeline stages.

    Raises ValueError for a normalisation other than RMSNorm without Transformer Engine, and for experts in a layout
    that no parameter mapping describes.
    """
    if config.moe_grouped_gemm and config.moe_use_legacy_grouped_gemm:
        raise ValueError(
            "--moe-use-legacy-grouped-gemm joins all experts of a GPU in one matrix, which weight conversion does not"
            " support: leave it out, --moe-grouped-gemm alone uses Transformer Engine's kernels"
        )
    fused = config.transformer_impl == "transformer_engine"
    if not fused and config.normalization != "RMSNorm":
        raise ValueError(
            f"--normalization {config.normalization} needs --transformer-impl transformer_engine: install it on a"
            " machine with a GPU or train a model with --normalization RMSNorm"
        )
    norm = _engine_norm() if fused else RMSNorm
    make = _engine_layer_spec if fused else _local_layer_spec
    kinds = {}
    for moe in set(moe_layers(config)):
        layer = with_token_frequencies(make(config, moe=moe), config)
        kinds[moe] = with_post_norms(layer, post_norms or PostNorms(), norm)
        if moe:
            kinds[moe].submodules.mlp.submodules.router = Router
    first = get_transformer_layer_offset(config, virtual_stage)
    local = moe_layers(config)[first : first + get_num_layers_to_build(config, virtual_stage)]
    # For a bare layer spec megatron-core adds its own final norm, which does not support sequence parallelism.
    return TransformerBlockSubmodules(layer_specs=[kinds[moe] for moe in local], layer_norm=norm)


def block_of(
    config: TransformerConfig, found: ModuleSpec | TransformerBlockSubmodules, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    """The block that --spec describes, either as a block or as one layer spec used for every layer."""
    if isinstance(found, TransformerBlockSubmodules):
        return found
    if isinstance(found.submodules, TransformerBlockSubmodules):
        return found.submodules
    norm = _engine_norm() if config.transformer_impl == "transformer_engine" else RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[found] * get_num_layers_to_build(config, virtual_stage), layer_norm=norm
    )


def moe_layers(config: TransformerConfig) -> tuple[bool, ...]:
    """Whether each layer of the whole model has experts.

    Raises ValueError if config.moe_layer_freq is a list whose length is not config.num_layers.
    """
    if config.num_moe_experts is None:
        return (False,) * config.num_layers
    return expand_layer_pattern(config.moe_layer_freq, config.num_layers)


def _engine_norm() -> type:
    # imported here because it needs Transformer Engine, which may be absent
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _engine_layer_spec(config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm and moe,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        use_te_activation_func=config.use_te_activation_func,
    )
    return with_latent_epsilon(layer) if config.multi_latent_attention and config.qk_layernorm else layer


def _local_layer_spec(config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        # the grouped kernels need a GPU; the checkpoint format is the same with either
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    submodules = layer.submodules
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    if config.multi_latent_attention:
        submodules.self_attention = attention_spec(config)
    else:
        attention = submodules.self_attention.submodules
        attention.core_attention = PackedCoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = RMSNorm
            attention.k_layernorm = RMSNorm
    submodules.sharded_state_dict_keys_map = _stored_names(config, moe=moe)
    return layer


def _stored_names(config: TransformerConfig, *, moe: bool) -> dict[str, str]:
    """Checkpoint names of the norms: those of Transformer Engine's layers, so that both can load the checkpoint.

    Transformer Engine fuses a norm with the linear layer after it, if there is exactly one.
    """
    names = {}
    if config.multi_latent_attention:
        for latent in ("q", "kv"):
            names[f"self_attention.{latent}_layernorm."] = f"self_attention.linear_{latent}_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not moe:  # in a layer with experts the norm feeds the router and every expert
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


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
    if flags.replays_routing:
        replay_routing(stages)
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
        layers = add_adapters(own_layers(flags, config, number), AdapterConfig.from_args(flags))
        settings = _settings(flags, config, *ends, number, layers)
        if flags.vision_folder is None:
            model: GPTModel = ValueModel(**settings)
        else:
            vision = _vision_arguments(flags, config, first_stage=ends[0])
            model = VisionValueModel(**settings, **vision)
        mark_parameters(model)
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
    return VisionLanguageModel(**settings, **_vision_arguments(args, config, first_stage=pre_process))


def _vision_arguments(args: MegatronArguments, config: TransformerConfig, *, first_stage: bool) -> dict[str, Any]:
    assert args.vision_folder is not None
    sharded = args.use_megatron_fsdp
    return vision_arguments(args.vision_folder, config.params_dtype, first_stage=first_stage, sharded=sharded)


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
    mark_parameters(model)
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


def mark_parameters(model: torch.nn.Module) -> None:
    """Set what megatron-core's and Transformer Engine's layers say wrongly of their weights.

    Experts are reduced over the expert-data-parallel group: megatron-core marks them only if expert parallelism is
    larger than 1. With tensor parallelism alone their gradients would silently stay unreduced, and checkpoints could
    not be loaded in another expert layout. Transformer Engine's grouped experts name the wrong axis of the output
    projection's shards, and its down-projections of latent attention, whole on every tensor-parallel rank, count as
    shards, several times in the gradient norm.
    """
    for name, parameter in model.named_parameters():
        marks: Any = parameter
        if ".experts." in name:
            marks.allreduce = False
            if ".linear_fc2.weight" in name and getattr(parameter, "partition_dim", -1) == 0:
                marks.partition_dim = 1
        elif name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight")):
            marks.tensor_model_parallel, marks.partition_dim = False, -1
