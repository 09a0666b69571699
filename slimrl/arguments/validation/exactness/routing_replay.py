"""Rules about routing replay (--use-routing-replay, --use-rollout-routing-replay)."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.engine_groups import policy_options
from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context

_PASS, _ENGINES = "--use-routing-replay", "--use-rollout-routing-replay"


def replayed_routers_are_plain(args: Arguments, context: Context) -> Iterator[Problem]:
    """The routers are those whose top-k megatron-core lets another function choose."""
    flag = _ENGINES if args.use_rollout_routing_replay else _PASS if args.use_routing_replay else None
    if flag is None or args.num_experts is None:
        return
    whole = args.moe_layer_recompute or (
        args.recompute_granularity == "selective" and {"moe", "mlp"} & set(args.recompute_modules or ())
    )
    for given, other, reason in (
        (args.moe_router_fusion, "--moe-router-fusion", "the fused kernel chooses experts itself"),
        (
            "sinkhorn" in args.moe_router_load_balancing_type,
            "--moe-router-load-balancing-type sinkhorn",
            "its experts are not the top-k of the scores",
        ),
        (
            bool(whole) and args.pipeline_model_parallel_size > 1,
            "--recompute-modules moe" if not args.moe_layer_recompute else "--moe-layer-recompute",
            "with pipeline stages a layer is recomputed after other micro-batches: recompute whole layers"
            " (--recompute-granularity full)",
        ),
        (not args.compute_advantages_and_returns, f"--loss-type {args.loss_type}", "it trains on no sampled tokens"),
    ):
        if given:
            yield Problem(flag, f"{flag} and {other} exclude each other: {reason}; leave one out.")


def engines_return_their_routing(args: Arguments, context: Context) -> Iterator[Problem]:
    """The servers are SGLang's, and of this run: they are started with the switch for it."""
    if not args.use_rollout_routing_replay:
        return
    for given, other, reason in (
        (args.uses_vllm, "--rollout-engine vllm", "only SGLang's answers are read"),
        (
            bool(args.rollout_external_engine_addrs),
            "--rollout-external-engine-addrs",
            "whether they return their routing is not known before they answer",
        ),
        (
            any(model.update_weights and model.disaggregated for model in args.server_models),
            "prefill and decode servers",
            "neither has the routing of the whole answer",
        ),
        (
            any(policy_options(args, "enable_eplb")) or any(policy_options(args, "ep_num_redundant_experts")),
            "redundant experts (--sglang-enable-eplb, --sglang-ep-num-redundant-experts)",
            "a copy of an expert has another number",
        ),
    ):
        if given:
            yield Problem(_ENGINES, f"{_ENGINES} and {other} exclude each other: {reason}; leave one out.")
