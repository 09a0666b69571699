"""Estimates the memory of a training GPU of each pipeline stage and of a GPU of an SGLang server, from flags alone.

Pure functions: they look at no file and no machine. Weights, gradients and optimizer state are exact (a test compares
them with a real trainer). Activations and the loss are estimates, made for the largest micro-batch of a rollout. SGLang
gives weights and KV cache together a fixed fraction of the GPU (its --mem-fraction-static); the cache is what the
weights leave of it. docs/dry-run.md has the formulas. The dry run shows them, and each training rank compares what it
measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slimrl.arguments.layout import Groups, critic_groups, groups_of, stage_layers
from slimrl.arguments.namespace import Arguments
from slimrl.models.activation_memory import Setting, output_bytes, saved_bytes, working_bytes
from slimrl.models.model_spec import ModelSpec
from slimrl.models.parameters import Split, Weights, buffer_elements, critic_weights, stage_weights, total_parameters


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
    host: int  # in host memory: weights of reference and teacher; with --optimizer-cpu-offload state and gradients

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
        on_host=0 if args.eval_only else args.use_reference + args.has_megatron_teacher,
        updates_engines=not args.debug_train_only,
    )
    return _stages(args, held, tokens)


def critic_memory(args: Arguments) -> tuple[StageMemory, ...]:
    """The same of one GPU of a critic on GPUs of its own; empty if there is none."""
    return _stages(args, HeldModels(critic_groups(args), value_head=True), None) if args.critic_num_gpus else ()


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
    groups, element = held.groups, setting.element
    first, last = number == 0, number == len(parts) - 1
    split = Split(groups.tensor, groups.expert_tensor, groups.expert)
    count = critic_weights if held.value_head else stage_weights
    weights = count(spec, split, parts[number], first=first, last=last)
    dense, expert = _buffers(args, groups, weights)
    state = _optimizer_bytes(args, groups, weights, dense, expert)
    of_critic = critic_weights(spec, split, parts[number], first=first, last=last)
    critic, critic_gradients, of_critic_on_host = _critic_bytes(args, groups, of_critic) if held.critic else (0, 0, 0)
    offloaded, copied = _offloaded_bytes(args, state)
    kept = _shared_out(args, groups, dense, expert, "optim_grads_params") * element
    trains = not args.eval_only
    gathered = (dense + expert) * element - kept  # Megatron-FSDP holds weights whole between two passes
    return StageMemory(
        layers=parts[number],
        parameters=weights.total,
        weights=kept,
        gradients=_shared_out(args, groups, dense, expert, "optim_grads", "optim_grads_params") * gradient_bytes(args),
        optimizer=state - offloaded,
        activations=trains
        * int(saved_bytes(spec, setting, parts[number], last=last) * _in_flight(args, groups, number)),
        loss=_output_bytes(args, groups, spec, setting) if last and trains and not held.value_head else 0,
        critic=critic,
        critic_gradients=critic_gradients,
        backward=trains * working_bytes(spec, setting, parts[number]),
        weight_update=gathered + held.updates_engines * _bucket_bytes(args, weights.total * element),
        # each model on the host also has room for the policy
        host=offloaded + copied + of_critic_on_host + 2 * held.on_host * weights.total * element,
    )


def _critic_bytes(args: Arguments, groups: Groups, weights: Weights) -> tuple[int, int, int]:
    """Weights and optimizer state on the device, gradients, and what --optimizer-cpu-offload moves to the host.

    With Megatron-FSDP the weights are whole outside of the critic's own passes.
    """
    dense, expert = _buffers(args, groups, weights)
    state = _optimizer_bytes(args, groups, weights, dense, expert)
    offloaded, copied = _offloaded_bytes(args, state)
    gradients = _shared_out(args, groups, dense, expert, "optim_grads", "optim_grads_params") * gradient_bytes(args)
    return (dense + expert) * parameter_bytes(args) + state - offloaded, gradients, offloaded + copied


def _offloaded_bytes(args: Arguments, state: int) -> tuple[int, int]:
    """Of --optimizer-cpu-offload: the state on the host, and the gradients copied to it, in float32."""
    offloaded = int(state * args.optimizer_offload_fraction) if args.optimizer_cpu_offload else 0
    return offloaded, offloaded * FP32 // max(_state_bytes(args), 1)


def _bucket_bytes(args: Arguments, weights: int) -> int:
    """The two buckets that new weights travel in."""
    return min(2 * args.update_weight_buffer_size, weights)


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


# SGLang computes its own where none is given, between 0.8 and 0.95 on the GPUs of today.
ASSUMED_FRACTION = 0.88
_ELEMENT_BYTES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0, "auto": None}


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How a server keeps its numbers. `max_tokens` bounds the cache where the user (or the CPU's defaults) did."""

    weight_bytes: float = 2.0  # per element
    cache_bytes: int = 2  # per element
    fraction: float = ASSUMED_FRACTION
    max_tokens: int | None = None
    stages: int = 1  # pipeline stages of a server

    @classmethod
    def from_options(cls, options: Mapping[str, Any], weight_bytes: float = 2.0) -> EngineSettings:
        """From the --sglang-* options by the server's own names; `weight_bytes` is what the checkpoint's files say."""
        given = _ELEMENT_BYTES.get(str(options.get("dtype", "auto")))
        element = given or weight_bytes
        cache = str(options.get("kv_cache_dtype", "auto"))
        wide = 4 if element >= 4 else 2
        tokens, fraction = options.get("max_total_tokens"), options.get("mem_fraction_static")
        return cls(
            weight_bytes=element,
            cache_bytes=1 if "fp8" in cache else 2 if cache == "bfloat16" else wide,
            fraction=ASSUMED_FRACTION if fraction is None else float(fraction),
            max_tokens=None if tokens is None else int(tokens),
            stages=int(options.get("pp_size") or 1),
        )


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """One GPU of a server, bytes. `cache` and `tokens` are None if the GPU's memory is not known."""

    weights: int
    cache_per_token: int
    cache: int | None
    tokens: int | None

    @property
    def total(self) -> int:
        """Weights and KV cache."""
        return self.weights + (self.cache or 0)


def engine_memory(spec: ModelSpec, settings: EngineSettings, gpus: int, gpu_bytes: int | None) -> EngineMemory:
    """Weights divided over the server's GPUs (norms and the like are not, which is not counted), cache by token."""
    weights = int(total_parameters(spec) * settings.weight_bytes) // gpus
    per_token = cache_elements_per_token(spec, gpus, settings.stages) * settings.cache_bytes
    tokens = settings.max_tokens
    if gpu_bytes is not None:
        room = max(int(gpu_bytes * settings.fraction) - weights, 0) // per_token
        tokens = room if tokens is None else min(tokens, room)
    return EngineMemory(weights, per_token, None if tokens is None else tokens * per_token, tokens)


def cache_elements_per_token(spec: ModelSpec, gpus: int, stages: int = 1) -> int:
    """Keys and values of every layer of a stage; with latent attention one vector per layer, whole on every GPU.

    Fewer key/value heads than GPUs are held several times.
    """
    layers = -(-spec.num_layers // stages)
    if spec.latent is not None:
        return layers * (spec.latent.kv_lora_rank + spec.latent.qk_pos_emb_head_dim)
    return layers * 2 * max(spec.num_query_groups * stages // gpus, 1) * spec.kv_channels
