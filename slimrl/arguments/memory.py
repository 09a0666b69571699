"""Estimates the memory of a training GPU of each pipeline stage, from flags alone.

Pure functions: they look at no file and no machine. Weights, gradients and optimizer state are exact (a test compares
them with a real trainer). Activations and the loss are estimates, made for the largest micro-batch of a rollout.
docs/dry-run.md has the formulas. The dry run shows them, and each training rank compares what it measures.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.layout import Groups, critic_groups, groups_of, stage_layers
from slimrl.arguments.namespace import Arguments
from slimrl.models.adapters import AdapterConfig, adapter_weights
from slimrl.models.model_size import (
    ElementWise,
    Setting,
    Split,
    Weights,
    buffer_elements,
    critic_weights,
    layer_input_bytes,
    output_bytes,
    saved_bytes,
    stage_weights,
    working_bytes,
)
from slimrl.models.model_spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Batches:
    """One rollout, step by step; `micro_batches` is None if it depends on the samples' lengths."""

    prompts: int
    samples: int
    steps: int
    samples_per_step: int
    samples_per_rank: int
    micro_batches: int | None


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The largest forward pass: tokens on one GPU, and whether a single sample decides it.

    `longest_sample` (tokens) is what the flags allow; `basis` says in words what it counts.
    """

    tokens_per_gpu: int
    longest_sample: int
    basis: str
    alone: bool


def batches(args: Arguments, groups: Groups) -> Batches:
    """The numbers of one rollout, from checked flags."""
    samples = args.prompts_trained_per_rollout * args.n_samples_per_prompt
    per_rank = args.global_batch_size // groups.data
    return Batches(
        prompts=args.rollout_batch_size,
        samples=samples,
        steps=args.num_steps_per_rollout,
        samples_per_step=args.global_batch_size,
        samples_per_rank=per_rank,
        micro_batches=None if args.use_dynamic_batch_size else per_rank // args.micro_batch_size,
    )


def longest_sample(args: Arguments) -> tuple[int, str]:
    """Tokens of the longest sample that the flags allow, and in words what they count."""
    if args.rollout_max_context_len is not None:
        return args.rollout_max_context_len, "the longest sample"
    if args.rollout_max_response_len is None:
        return args.seq_length, "a sample of --seq-length (the flags bound no sample)"
    if args.rollout_max_prompt_len is not None:
        return args.rollout_max_prompt_len + args.rollout_max_response_len, "the longest sample"
    return args.rollout_max_response_len, "the longest response (prompts have no limit)"


ASSUMED_PROMPT_SHARE = 0.5


def image_share(args: Arguments) -> float:
    """The part of a micro-batch that may be tokens of images: the whole prompt of the longest sample.

    Half of it if no flag bounds prompts, 0 without images. In supervised training all of it.
    """
    if not args.multimodal_keys:
        return 0.0
    longest = longest_sample(args)[0]
    if args.rollout_max_response_len is None:
        return 1.0
    prompt = args.rollout_max_prompt_len or longest - args.rollout_max_response_len
    return min(prompt / longest, 1.0) if prompt > 0 else ASSUMED_PROMPT_SHARE


def largest_micro_batch(args: Arguments, groups: Groups) -> MicroBatch:
    """The most tokens that one GPU sees in one forward pass.

    With dynamic batches that is --max-tokens-per-gpu, or a longer sample alone; else --micro-batch-size samples.
    Context parallel GPUs share the tokens; a share is padded to a multiple of --data-pad-size-multiplier x TP.
    """
    longest, basis = longest_sample(args)
    if args.use_dynamic_batch_size:
        assert args.max_tokens_per_gpu is not None
        cap = args.max_tokens_per_gpu * groups.context
        tokens, alone = max(cap, longest), longest > cap
    else:
        tokens, alone = longest * args.micro_batch_size, False
    share, unit = -(-tokens // groups.context), args.data_pad_size_multiplier * groups.tensor
    return MicroBatch(-(-share // unit) * unit, longest, basis, alone)


_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
FP32 = 4


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """One GPU of one pipeline stage; all numbers but `layers` and `parameters` (elements) are bytes."""

    layers: tuple[int, ...]
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward pass, of all micro-batches in flight
    loss: int  # of the output layer: logits or pieces of them, gradients, a teacher's states; last stage only
    backward: int  # of the layer that the backward pass is at
    critic: int  # its weights and optimizer state; 0 without one
    critic_gradients: int
    weight_update: int  # two buckets of new weights, and what is gathered then: none of the three above is there
    host_models: int  # in host memory: weights of reference and teacher, and room for the policy's beside each
    host_optimizer: int  # in host memory, with --optimizer-cpu-offload: state and gradients

    @property
    def host(self) -> int:
        """All in host memory."""
        return self.host_models + self.host_optimizer

    @property
    def resident(self) -> int:
        """What stays all the time."""
        return self.weights + self.gradients + self.optimizer + self.critic + self.critic_gradients

    @property
    def total(self) -> int:
        """The peak: the loss and the backward pass are not at their largest at the same time."""
        return self.resident + max(self.activations + max(self.loss, self.backward), self.weight_update)


@dataclasses.dataclass(frozen=True)
class HeldModels:
    """What one group of training ranks holds. With a value head the model has no logits (critic, reward model)."""

    groups: Groups
    value_head: bool
    critic: bool = False  # beside the policy, in the same ranks
    on_host: int = 0  # reference and teacher
    updates_engines: bool = False


def training_memory(args: Arguments, *, tokens: int | None = None) -> tuple[StageMemory, ...]:
    """The memory of one GPU of each pipeline stage of the policy, for the largest micro-batch that the flags allow.

    `tokens` is the size of another micro-batch, in tokens of one GPU.
    """
    held = HeldModels(
        groups_of(args),
        value_head=args.trains_reward_model,
        critic=args.use_critic and not args.eval_only and not args.critic_num_gpus,
        on_host=0 if args.eval_only or args.lora_rank else args.use_reference + args.has_megatron_teacher,
        updates_engines=not args.debug_train_only,
    )
    return _stages(args, held, tokens)


def critic_memory(args: Arguments, *, tokens: int | None = None) -> tuple[StageMemory, ...]:
    """The same of one GPU of a critic on GPUs of its own; empty if there is none."""
    return _stages(args, HeldModels(critic_groups(args), value_head=True), tokens) if args.critic_num_gpus else ()


def parameter_bytes(args: Arguments) -> int:
    """Bytes of one weight, and of one activation, in training."""
    return 2 if args.bf16 or args.fp16 else 4


def _stages(args: Arguments, held: HeldModels, tokens: int | None) -> tuple[StageMemory, ...]:
    spec, parts = ModelSpec.from_args(args), stage_layers(args)
    if tokens is None:
        tokens = largest_micro_batch(args, held.groups).tokens_per_gpu
    setting = _setting(args, held.groups, tokens)
    return tuple(_stage(args, held, spec, setting, parts, number) for number in range(len(parts)))


def _stage(
    args: Arguments, held: HeldModels, spec: ModelSpec, setting: Setting, parts: list[tuple[int, ...]], number: int
) -> StageMemory:
    groups, first, last = held.groups, number == 0, number == len(parts) - 1
    split = Split(groups.tensor, groups.expert_tensor, groups.expert)
    count = critic_weights if held.value_head else stage_weights
    weights = count(spec, split, parts[number], first=first, last=last)
    trains, whole = not args.eval_only, weights.total * setting.element
    trained_spec = spec if held.value_head else _without_frozen_tower(args, spec)  # a critic trains all of its own
    trained = count(trained_spec, split, parts[number], first=first, last=last)
    own, adapters = _trained_model(args, groups, trained), AdapterConfig.from_args(args)
    own = dataclasses.replace(own, weights=own.weights + (weights.total - trained.total) * setting.element)
    if held.value_head and not args.trains_reward_model:
        own = _critic(args, groups, spec, parts[number], first=first, last=last)
    elif adapters is not None and not held.value_head:  # beside weights that are not trained
        own = _trained_model(args, groups, adapter_weights(spec, split, parts[number], adapters))
        own = dataclasses.replace(own, weights=own.weights + whole)
    critic = _TrainedModel(0, 0, 0, 0, 0)
    if held.critic:
        critic = _critic(args, groups, spec, parts[number], first=first, last=last)
    sent = own.weights - whole if args.engines_have_adapters else whole
    kept, added = saved_bytes(spec, setting, parts[number], last=last), 0
    if first:
        images = setting.tokens * image_share(args)
        kept += (
            int(images * args.vision_activations * (held.critic or bool(trained_spec.vision_weights))) * setting.element
        )
        added = args.vision_levels * layer_input_bytes(spec, setting) * bool(images)
    return StageMemory(
        layers=parts[number],
        parameters=weights.total,
        weights=own.weights,
        gradients=own.gradients,
        optimizer=own.optimizer,
        activations=trains * int(kept * _in_flight(args, groups, number) + added),
        loss=_output_bytes(args, groups, spec, setting) if last and trains and not held.value_head else 0,
        critic=critic.weights + critic.gathered + critic.optimizer,
        critic_gradients=critic.gradients,
        backward=trains * working_bytes(spec, setting, parts[number]),
        weight_update=own.gathered + held.updates_engines * min(2 * args.update_weight_buffer_size, sent),
        host_models=2 * held.on_host * (own.weights if args.use_megatron_fsdp else whole),
        host_optimizer=own.on_host + critic.on_host,
    )


def _critic(
    args: Arguments, groups: Groups, spec: ModelSpec, layers: tuple[int, ...], *, first: bool, last: bool
) -> _TrainedModel:
    """A critic of these layers: whole, or with --critic-lora-rank adapters and the head beside weights at rest."""
    split = Split(groups.tensor, groups.expert_tensor, groups.expert)
    weights, adapters = critic_weights(spec, split, layers, first=first, last=last), AdapterConfig.of_critic(args)
    if adapters is None:
        return _trained_model(args, groups, weights)
    head = Weights((ElementWise(spec.hidden_size),) if last else ())
    own = _trained_model(args, groups, adapter_weights(spec, split, layers, adapters) + head)
    return dataclasses.replace(own, weights=own.weights + (weights.total - head.total) * parameter_bytes(args))


def _without_frozen_tower(args: Arguments, spec: ModelSpec) -> ModelSpec:
    """The model without the tensors of the vision tower that are not trained."""
    trains = args.lora_rank is None  # else the adapters of the decoder alone
    tower = tuple((name, size) for name, size in spec.vision_weights if trains and args.trains_weight(name))
    return dataclasses.replace(spec, vision_weights=tower)


@dataclasses.dataclass(frozen=True)
class _TrainedModel:
    """Bytes of a model in training on one GPU; `on_host` are those that --optimizer-cpu-offload moves to the host."""

    weights: int
    gathered: int  # by Megatron-FSDP with sharded weights, outside of the model's own passes: whole weights beside them
    gradients: int
    optimizer: int
    on_host: int


def _trained_model(args: Arguments, groups: Groups, weights: Weights) -> _TrainedModel:
    dense, expert = _buffers(args, groups, weights)
    state = _optimizer_bytes(args, groups, weights, dense, expert)
    offloaded = int(state * args.optimizer_offload_fraction) if args.optimizer_cpu_offload else 0
    copied = offloaded * FP32 // max(_state_bytes(args), 1)  # gradients, in float32
    kept = _shared_out(args, groups, dense, expert, "optim_grads_params") * parameter_bytes(args)
    whole = (dense + expert) * parameter_bytes(args)
    gradients = _shared_out(args, groups, dense, expert, "optim_grads", "optim_grads_params") * gradient_bytes(args)
    return _TrainedModel(kept, whole if kept < whole else 0, gradients, state - offloaded, offloaded + copied)


def _shared_out(args: Arguments, groups: Groups, dense: int, expert: int, *strategies: str) -> int:
    """Elements of a GPU, divided where Megatron-FSDP runs with one of `strategies`; without the layers at work."""
    if args.use_megatron_fsdp and args.data_parallel_sharding_strategy in strategies:
        return dense // groups.optimizer_shares + expert // groups.expert_data
    return dense + expert


def _output_bytes(args: Arguments, groups: Groups, spec: ModelSpec, setting: Setting) -> int:
    own = output_bytes(spec, setting, args.log_probs_chunk_size, keep_logits=args.keep_logits)
    return own + _teacher_bytes(args, groups, spec, setting)


def _teacher_bytes(args: Arguments, groups: Groups, spec: ModelSpec, setting: Setting) -> int:
    """With --opd-divergence, for the longest responses: a teacher's last hidden states, and its output weight.

    Of a teacher on servers: the ids (int64) and log-probabilities (float32) of its top tokens.
    """
    if not args.has_divergence:
        return 0
    longest = args.rollout_max_response_len or longest_sample(args)[0]
    samples = (args.global_batch_size or 0) // groups.data * (args.num_steps_per_rollout or 1)
    tokens = samples * longest // groups.context
    if args.has_served_teacher:
        return tokens * args.opd_top_k * 12
    return (spec.padded_vocab_size // setting.tensor + tokens) * spec.hidden_size * setting.element


def gradient_bytes(args: Arguments) -> int:
    """Bytes of one gradient in Megatron's buffer: float32 with --bf16, unless --grad-reduce-in-bf16."""
    wide = args.accumulate_allreduce_grads_in_fp32 or (args.bf16 and not args.grad_reduce_in_bf16)
    return FP32 if wide else parameter_bytes(args)


def _buffers(args: Arguments, groups: Groups, weights: Weights) -> tuple[int, int]:
    """Elements of the gradient buffers of dense and expert weights."""
    distributed = args.use_distributed_optimizer
    return (
        buffer_elements(weights.dense, groups.optimizer_shares, distributed=distributed),
        buffer_elements(weights.expert, groups.expert_data, distributed=distributed),
    )


def _optimizer_bytes(args: Arguments, groups: Groups, weights: Weights, dense: int, expert: int) -> int:
    """State of the fullest share: float32 copies of 16-bit weights, and the moments; Muon has one per matrix."""
    if args.optimizer == "muon":
        return weights.total * _state_bytes(args) - (0 if args.eval_only else weights.matrices * FP32)
    if args.use_distributed_optimizer:
        dense, expert = dense // groups.optimizer_shares, expert // groups.expert_data
    return (dense + expert) * _state_bytes(args)


def _state_bytes(args: Arguments) -> int:
    """Bytes of the optimizer's state for one weight; moments begin with the first step.

    Megatron-FSDP keeps a copy of float32 weights too.
    """
    moments = 0 if args.eval_only else _moment_bytes(args)
    return (_copy_bytes(args) if parameter_bytes(args) < FP32 or args.use_megatron_fsdp else 0) + moments


def _copy_bytes(args: Arguments) -> int:
    """Bytes of the optimizer's own copy of a 16-bit weight; a bf16 weight and its 16 missing bits are one too.

    With --optimizer-cpu-offload the copy is whole, on the host and on the device.
    """
    if not args.use_precision_aware_optimizer or args.optimizer_cpu_offload:
        return FP32
    remainders = args.bf16 and args.store_param_remainders and args.main_params_dtype == "fp32"
    return 2 if remainders else _DTYPE_BYTES[args.main_params_dtype]


def _moment_bytes(args: Arguments) -> int:
    """Adam has two moments; SGD one, with momentum."""
    if args.optimizer == "sgd":
        return FP32 if args.sgd_momentum else 0
    if args.use_precision_aware_optimizer:
        return _DTYPE_BYTES[args.exp_avg_dtype] + _DTYPE_BYTES[args.exp_avg_sq_dtype]
    return 2 * FP32


def _setting(args: Arguments, groups: Groups, tokens: int) -> Setting:
    return Setting(
        tokens=tokens,
        element=parameter_bytes(args),
        tensor=groups.tensor,
        sequence=groups.tensor if args.sequence_parallel else 1,
        expert_tensor=groups.expert_tensor,
        fused=args.transformer_impl != "local",
        granularity=args.recompute_granularity,
        modules=tuple(args.recompute_modules or ("core_attn",)),
        method=args.recompute_method,
        unit=args.recompute_num_layers or 1,
    )


def _in_flight(args: Arguments, groups: Groups, stage: int) -> float:
    """Micro-batches that a stage has begun and not finished, in the 1F1B schedule (arXiv:2104.04473, section 2.2).

    Stage i of p holds p - i of them; with v virtual stages up to 2 (p - i - 1) + (v - 1) p + 1 pieces of 1 / v.
    """
    stages, rounds = groups.pipeline, args.virtual_pipeline_model_parallel_size or 1
    begun = (2 * (stages - stage - 1) + (rounds - 1) * stages + 1) / rounds if rounds > 1 else stages - stage
    return min(begun, _micro_batches(args, groups))


def _micro_batches(args: Arguments, groups: Groups) -> int:
    """Micro-batches of one optimizer step on one GPU: at most one per sample."""
    samples = max((args.global_batch_size or 1) // groups.data, 1)
    return samples if args.use_dynamic_batch_size else max(samples // args.micro_batch_size, 1)
