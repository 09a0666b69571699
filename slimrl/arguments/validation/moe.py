"""Rules about mixture-of-experts layers: experts, router, layers with experts."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.flag import Problem, flag_specs
from slimrl.arguments.flags.moe import MoeArguments
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.rule import Context


def expert_flags_have_experts(args: Arguments, context: Context) -> Iterator[Problem]:
    """Expert flags are rejected if the model has no experts."""
    if args.num_experts is not None or "num_experts" in context.broken:
        return
    values = vars(args)
    for spec in flag_specs(MoeArguments):
        unserved = spec.not_served is not None
        if spec.dest in context.given and values[spec.dest] != spec.default and not unserved:
            yield Problem(
                spec.name, f"{spec.name} needs experts and the model has none: give --num-experts, or leave it out."
            )


def router_can_choose_experts(args: Arguments, context: Context) -> Iterator[Problem]:
    """A token's experts exist, in as many groups as it may choose from."""
    experts, topk = args.num_experts, args.moe_router_topk
    groups, group_topk = args.moe_router_num_groups, args.moe_router_group_topk
    if experts is None:
        return
    if topk > experts:
        yield Problem("--moe-router-topk", f"--moe-router-topk {topk} is more than --num-experts {experts}: lower it.")
    if (groups is None) != (group_topk is None):
        yield Problem(
            "--moe-router-num-groups",
            "--moe-router-num-groups and --moe-router-group-topk belong together: give both, or neither.",
        )
    elif groups is not None and group_topk is not None:
        yield from _group_problems(args, experts, groups, group_topk)


def _group_problems(args: Arguments, experts: int, groups: int, group_topk: int) -> Iterator[Problem]:
    if experts % groups:
        yield Problem(
            "--moe-router-num-groups",
            f"--num-experts {experts} does not divide by --moe-router-num-groups {groups}: choose a divisor.",
        )
    if group_topk > groups:
        yield Problem(
            "--moe-router-group-topk",
            f"--moe-router-group-topk {group_topk} is more than --moe-router-num-groups {groups}: lower it.",
        )
    if args.moe_router_topk % group_topk:
        yield Problem(
            "--moe-router-group-topk",
            f"--moe-router-topk {args.moe_router_topk} does not divide by --moe-router-group-topk {group_topk}, the"
            " groups of each token: choose a divisor.",
        )


def router_is_consistent(args: Arguments, context: Context) -> Iterator[Problem]:
    """megatron-core's router supports the combination of scores, bias, scale and losses."""
    if args.num_experts is None:
        return
    softmax = args.moe_router_score_function == "softmax"
    if args.moe_router_enable_expert_bias and softmax:
        yield Problem(
            "--moe-router-enable-expert-bias",
            "--moe-router-enable-expert-bias needs sigmoid scores: add --moe-router-score-function sigmoid.",
        )
    if args.moe_router_topk == 1 and softmax and not args.moe_router_pre_softmax:
        yield Problem(
            "--moe-router-topk",
            "--moe-router-topk 1 with a softmax after the top-k gives every expert weight 1: add"
            " --moe-router-pre-softmax.",
        )
    if args.moe_router_topk_scaling_factor is not None and softmax and not args.moe_router_pre_softmax:
        yield Problem(
            "--moe-router-topk-scaling-factor",
            f"--moe-router-topk-scaling-factor {args.moe_router_topk_scaling_factor:g} needs sigmoid scores or"
            " --moe-router-pre-softmax: add one of them, or leave it out.",
        )
    kinds, weights = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    if len(kinds) != len(weights) and len(weights) != 1:
        yield Problem(
            "--moe-aux-loss-coeff",
            f"--moe-aux-loss-coeff has {len(weights)} weights and --moe-router-load-balancing-type {len(kinds)} kinds:"
            " give one weight for each kind.",
        )
    if args.moe_shared_expert_gate and args.moe_shared_expert_intermediate_size is None:
        yield Problem(
            "--moe-shared-expert-gate",
            "--moe-shared-expert-gate needs a shared expert: give --moe-shared-expert-intermediate-size.",
        )
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        yield Problem(
            "--moe-pad-expert-input-to-capacity",
            "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor: give it, or leave the first out.",
        )


def moe_layer_pattern_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """A layer pattern has one number per layer."""
    pattern, layers = args.moe_layer_freq, args.num_layers
    if isinstance(pattern, list) and layers is not None and len(pattern) != layers:
        yield Problem(
            "--moe-layer-freq",
            f"--moe-layer-freq describes {len(pattern)} layers and --num-layers is {layers}: make them agree.",
        )
