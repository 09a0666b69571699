"""Remedies for a plan that does not fit into its GPUs, each tested on the estimate before it is named.

Never names a remedy that cannot help. Called by `errors`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from slimrl.arguments.dry_run.memory import EngineSettings, GroupMemory, engine_memory
from slimrl.arguments.dry_run.plan import Plan
from slimrl.arguments.memory import training_memory
from slimrl.arguments.namespace import Arguments

_FACTORS = (2, 4, 8, 16, 32, 64)
_HIGHEST_FRACTION = 0.95


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What to do, in words, and the fields that change by it."""

    words: str
    changes: dict[str, Any]


def less_training(plan: Plan) -> str:
    """What brings training down to its GPU: any of what is enough alone, else all that helps together, else GPUs."""
    assert plan.gpu is not None
    args, limit = plan.args, plan.gpu.bytes
    tried = [*_divisions(args), *_switches(args), *_more_nodes(args)]
    enough = _first_of_each([remedy for remedy in tried if _needs(args, remedy) <= limit])
    if enough:
        return _either([remedy.words for remedy in enough])
    # of the parallel sizes one alone: together they may ask for more GPUs than there are
    division = min(_last_of_each(_divisions(args)), key=lambda remedy: _needs(args, remedy), default=None)
    helps = [one for one in [division, *_switches(args)] if one is not None and _helps(args, one)]
    together = _together(helps)
    if helps and _needs(args, together) <= limit:
        return f"none of these suffices alone, together they do: {together.words}"
    for remedy in _more_nodes(args):
        if _needs(args, _together([*helps, remedy])) <= limit:
            return f"the other flags do not suffice on these GPUs: {_together([*helps, remedy]).words}"
    return "no supported flag reduces it that far: use a smaller model, or GPUs with more memory"


def more_cache(plan: Plan) -> str:
    """What gives an engine room for the longest sample."""
    args, settings, need = plan.args, plan.engine_settings, plan.micro_batch.longest_sample
    gpus = args.rollout_num_gpus_per_engine
    means = []
    for size in (gpus * factor for factor in _FACTORS):
        if _tokens(plan, settings, size) >= need:
            on_more = "" if size <= args.rollout_num_gpus else f" and --rollout-num-gpus to {size}"
            means.append(f"raise --rollout-num-gpus-per-engine to {size}{on_more}")
            break
    higher = dataclasses.replace(settings, fraction=_HIGHEST_FRACTION)
    if settings.fraction < _HIGHEST_FRACTION and _tokens(plan, higher, gpus) >= need:
        means.append("raise --sglang-mem-fraction-static")
    return _either(means) if means else "take a smaller model, shorter samples, or GPUs with more memory"


def more_room(group: GroupMemory, tokens: int, gpu_bytes: int) -> str:
    """What gives the servers of a group of --sglang-config room for their weights and `tokens`."""
    means, own = [], group.settings.fraction
    for size in (group.per_server * factor for factor in _FACTORS):
        if group.holds(tokens, gpu_bytes, per_server=size, fraction=own):
            means.append(
                f"raise its num_gpus_per_engine to {size}{'' if size <= group.gpus else ', with its num_gpus'}"
            )
            break
    if own < _HIGHEST_FRACTION and group.holds(
        tokens, gpu_bytes, per_server=group.per_server, fraction=_HIGHEST_FRACTION
    ):
        means.append("raise its mem_fraction_static")
    return _either(means) if means else "serve a smaller model, or use GPUs with more memory"


def _tokens(plan: Plan, settings: EngineSettings, gpus: int) -> int:
    assert plan.gpu is not None
    return engine_memory(plan.spec, settings, gpus, plan.gpu.bytes).tokens or 0


def _divisions(args: Arguments) -> Iterator[Remedy]:
    """Larger parallel sizes on the GPUs that there are, each from small to large."""
    world, tp, pp = args.actor_num_gpus, args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep, etp = args.context_parallel_size, args.expert_model_parallel_size, args.expert_tensor_parallel_size or 1
    widths = (args.num_attention_heads, args.num_query_groups or tp, args.hidden_size, args.ffn_hidden_size)
    for size in (tp * factor for factor in _FACTORS):
        if world % (size * pp * cp) == 0 and not any(width % size for width in widths):
            unit = args.make_vocab_size_divisible_by * size
            changes = {"tensor_model_parallel_size": size, "padded_vocab_size": -(-args.vocab_size // unit) * unit}
            if args.num_experts is None:
                changes["expert_tensor_parallel_size"] = size
            yield Remedy(f"raise --tensor-model-parallel-size to {size}", changes)
    split = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    if args.virtual_pipeline_model_parallel_size is None and split == (None, None):
        for size in (pp * factor for factor in _FACTORS):
            if world % (tp * size * cp) == 0 and world % (etp * ep * size) == 0 and args.num_layers % size == 0:
                words = f"raise --pipeline-model-parallel-size to {size}"
                yield Remedy(words, {"pipeline_model_parallel_size": size})
    experts = args.num_experts
    for size in (ep * factor for factor in _FACTORS) if experts is not None else ():
        if world % (etp * size * pp) == 0 and experts is not None and experts % size == 0:
            yield Remedy(f"raise --expert-model-parallel-size to {size}", {"expert_model_parallel_size": size})


def _switches(args: Arguments) -> Iterator[Remedy]:
    """What can be turned on or off."""
    if not args.use_distributed_optimizer and args.optimizer == "adam":
        yield Remedy("leave --no-use-distributed-optimizer out", {"use_distributed_optimizer": True})
    elif (
        args.optimizer == "adam"
        and not args.optimizer_cpu_offload
        and (args.bf16 or args.fp16)
        and not args.use_megatron_fsdp
    ):
        yield Remedy(
            "add --optimizer-cpu-offload and --use-precision-aware-optimizer",
            {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
        )
    if args.recompute_granularity != "full" and not args.vision_levels:  # levels_are_on_the_first_stage refuses it
        changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield Remedy("add --recompute-granularity full (--recompute-method uniform --recompute-num-layers 1)", changes)
    if args.use_dynamic_batch_size:
        yield Remedy("lower --max-tokens-per-gpu", {"max_tokens_per_gpu": 1})
    elif args.micro_batch_size > 1:
        yield Remedy("lower --micro-batch-size", {"micro_batch_size": 1})
    if args.keep_logits and args.loss_type != "custom_loss":
        yield Remedy("leave --keep-logits out", {"keep_logits": False})


def _more_nodes(args: Arguments) -> Iterator[Remedy]:
    """More GPUs for training, over which a distributed optimizer shards its state."""
    for factor in _FACTORS:
        nodes = args.actor_num_nodes * factor
        gpus = nodes * args.actor_num_gpus_per_node
        yield Remedy(f"train on {gpus} GPUs (--actor-num-nodes {nodes})", {"actor_num_nodes": nodes})


def _kind(remedy: Remedy) -> str:
    return next(iter(remedy.changes))


def _first_of_each(remedies: list[Remedy]) -> list[Remedy]:
    return [next(group) for _, group in itertools.groupby(remedies, key=_kind)]


def _last_of_each(remedies: Iterator[Remedy]) -> list[Remedy]:
    return [list(group)[-1] for _, group in itertools.groupby(remedies, key=_kind)]


def _together(remedies: list[Remedy]) -> Remedy:
    changes: dict[str, Any] = {}
    for remedy in remedies:
        changes |= remedy.changes
    return Remedy(_all([remedy.words for remedy in remedies]), changes)


def _needs(args: Arguments, remedy: Remedy) -> int:
    """Bytes of the fullest GPU with a remedy."""
    changed = copy.copy(args)
    for name, value in remedy.changes.items():
        setattr(changed, name, value)
    return max(stage.total for stage in training_memory(changed))


def _helps(args: Arguments, remedy: Remedy) -> bool:
    return _needs(args, remedy) < _needs(args, Remedy("", {}))


def _either(words: list[str]) -> str:
    return ", ".join(words[:-1]) + (" or " if words[1:] else "") + words[-1]


def _all(words: list[str]) -> str:
    return ", ".join(words[:-1]) + (" and " if words[1:] else "") + words[-1] if words else ""
