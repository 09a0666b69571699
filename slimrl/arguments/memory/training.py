"""Estimates the memory of one training GPU of each pipeline stage, from the flags alone.

A pure function: it looks at no file and no machine. Weights, gradients and optimizer state are exact (a test compares
them with a real trainer). Activations and the loss are estimates; docs/dry-run.md has the formulas. The dry run shows
them, and each training rank compares what it measures.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.layout import Groups, groups_of, stage_layers
from slimrl.arguments.memory.batch import largest_micro_batch
from slimrl.arguments.namespace import Arguments
from slimrl.models.activation_memory import Setting, output_bytes, saved_bytes, working_bytes
from slimrl.models.model_spec import ModelSpec
from slimrl.models.parameters import Split, Weights, buffer_elements, critic_weights, stage_weights

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
    loss: int  # the output layer's logits or pieces of them and its gradients, last stage only
    backward: int  # of the layer that the backward pass is at
    critic: int  # its weights and optimizer state; 0 without one
    critic_gradients: int
    weight_update: int  # two buckets of new weights, and what is gathered then: none of the three above is there
    host: int  # in host memory: weights of reference and teacher; with --optimizer-cpu-offload state and gradients

    @property
    def resident(self) -> int:
        """What stays all the time."""
        return self.weights + self.gradients + self.optimizer + self.critic + self.critic_gradients

    @property
    def total(self) -> int:
        """The peak: the loss and the backward pass are not at their largest at the same time."""
        return self.resident + max(self.activations + max(self.loss, self.backward), self.weight_update)


def training_memory(args: Arguments, *, tokens: int | None = None) -> tuple[StageMemory, ...]:
    """The memory of one training GPU of each pipeline stage, for the largest micro-batch that the flags allow.

    `tokens` is the size of another micro-batch, in tokens of one GPU.
    """
    spec, parts, groups = ModelSpec.from_args(args), stage_layers(args), groups_of(args)
    if tokens is None:
        tokens = largest_micro_batch(args, groups).tokens_per_gpu
    setting = _setting(args, groups, tokens)
    return tuple(_stage(args, spec, setting, parts, number) for number in range(len(parts)))


def parameter_bytes(args: Arguments) -> int:
    """Bytes of one weight, and of one activation, in training."""
    return 2 if args.bf16 or args.fp16 else 4


def _stage(
    args: Arguments, spec: ModelSpec, setting: Setting, parts: list[tuple[int, ...]], number: int
) -> StageMemory:
    groups, element = groups_of(args), setting.element
    first, last = number == 0, number == len(parts) - 1
    split = Split(groups.tensor, groups.expert_tensor, groups.expert)
    count = critic_weights if args.trains_reward_model else stage_weights
    weights = count(spec, split, parts[number], first=first, last=last)
    dense, expert = _buffers(args, groups, weights)
    state = _optimizer_bytes(args, groups, dense, expert)
    of_critic = critic_weights(spec, split, parts[number], first=first, last=last)
    critic, critic_gradients, of_critic_on_host = _critic_bytes(args, groups, of_critic)
    offloaded, copied = _offloaded_bytes(args, state)
    held = _shared_out(args, groups, dense, expert, "optim_grads_params") * element
    trains = not args.eval_only
    host_models = trains * (args.use_reference + args.has_megatron_teacher)  # each also has room for the policy
    gathered = (dense + expert) * element - held  # Megatron-FSDP holds weights whole between two passes
    return StageMemory(
        layers=parts[number],
        parameters=weights.total,
        weights=held,
        gradients=_shared_out(args, groups, dense, expert, "optim_grads", "optim_grads_params") * gradient_bytes(args),
        optimizer=state - offloaded,
        activations=trains
        * int(saved_bytes(spec, setting, parts[number], last=last) * _in_flight(args, groups, number)),
        loss=_output_bytes(args, spec, setting) if last and trains and not args.trains_reward_model else 0,
        critic=critic,
        critic_gradients=critic_gradients,
        backward=trains * working_bytes(spec, setting, parts[number]),
        weight_update=gathered + _bucket_bytes(args, weights.total * element),
        host=offloaded + copied + of_critic_on_host + 2 * host_models * weights.total * element,
    )


def _critic_bytes(args: Arguments, groups: Groups, weights: Weights) -> tuple[int, int, int]:
    """Weights and optimizer state on the device, gradients, and what --optimizer-cpu-offload moves to the host.

    With Megatron-FSDP the weights are whole outside of the critic's own passes.
    """
    if not args.use_critic or args.eval_only:
        return 0, 0, 0
    dense, expert = _buffers(args, groups, weights)
    state = _optimizer_bytes(args, groups, dense, expert)
    offloaded, copied = _offloaded_bytes(args, state)
    gradients = _shared_out(args, groups, dense, expert, "optim_grads", "optim_grads_params") * gradient_bytes(args)
    return (dense + expert) * parameter_bytes(args) + state - offloaded, gradients, offloaded + copied


def _offloaded_bytes(args: Arguments, state: int) -> tuple[int, int]:
    """Of --optimizer-cpu-offload: the state on the host, and the gradients copied to it, in float32."""
    offloaded = int(state * args.optimizer_offload_fraction) if args.optimizer_cpu_offload else 0
    return offloaded, offloaded * FP32 // max(_state_bytes(args), 1)


def _bucket_bytes(args: Arguments, weights: int) -> int:
    """The two buckets that new weights travel in."""
    return 0 if args.debug_train_only else min(2 * args.update_weight_buffer_size, weights)


def _shared_out(args: Arguments, groups: Groups, dense: int, expert: int, *strategies: str) -> int:
    """Elements of a GPU, divided where Megatron-FSDP runs with one of `strategies`; without the layers at work."""
    if args.use_megatron_fsdp and args.data_parallel_sharding_strategy in strategies:
        return dense // groups.optimizer_shares + expert // groups.expert_data
    return dense + expert


def _output_bytes(args: Arguments, spec: ModelSpec, setting: Setting) -> int:
    return output_bytes(spec, setting, args.log_probs_chunk_size, keep_logits=args.keep_logits)


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


def _optimizer_bytes(args: Arguments, groups: Groups, dense: int, expert: int) -> int:
    """State of the fullest share: float32 copies of 16-bit weights, and the moments."""
    if args.use_distributed_optimizer:
        dense, expert = dense // groups.optimizer_shares, expert // groups.expert_data
    return (dense + expert) * _state_bytes(args)


def _state_bytes(args: Arguments) -> int:
    """Bytes of the optimizer's state for one weight; moments begin with the first step."""
    moments = 0 if args.eval_only else _moment_bytes(args)
    return (_copy_bytes(args) if parameter_bytes(args) < FP32 else 0) + moments


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
