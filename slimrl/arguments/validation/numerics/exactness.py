"""Rules about numerical equality: --true-on-policy-mode, and routing replay.

True on-policy is accepted for what it was shown to be exact for, or else refused by name. Both sides compute in one
order of additions for the families in `FAMILIES`: in float32 on CPUs, in bfloat16 with GPU kernels, for models without
experts and without tensor parallelism. Whatever adds in another order, or samples from other weights than those that
are trained, is rejected here. When the run starts, the machine is compared with the precision (`cluster.launch`),
because the command line may be checked on another one.

Routing replay (--use-routing-replay, --use-rollout-routing-replay) repeats the chosen experts, not the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.engine_groups import policy_options
from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context

_MODE = "--true-on-policy-mode"
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # tested with a server and training ranks
# columns of a dense block or an expert that a rank of a server on a CPU has at least: it pads others with zeros
_ALIGNED = 32


def true_on_policy_has_a_precision(args: Arguments, context: Context) -> Iterator[Problem]:
    """float32 stands for the operators of CPUs, bfloat16 for those of GPUs, which FlashAttention 3 needs."""
    on_gpus = args.true_on_policy_mode and args.bf16
    if args.attn_implementation not in ((None, "flash_attention_3") if on_gpus else (None,)):
        yield Problem(
            "--attn-implementation",
            f"--attn-implementation {args.attn_implementation} has a use with {_MODE} and --bf16 only, as"
            " flash_attention_3: leave it out; --attention-backend chooses the attention of training.",
        )
    if not args.true_on_policy_mode:
        return
    for given, flag in (
        (args.fp16, "--fp16"),
        (args.fp8_format is not None, "--fp8-format"),
        (args.fp4_format is not None, "--fp4-format"),
    ):
        if given:
            yield Problem(
                flag, f"{_MODE} computes in float32 on CPUs and in bfloat16 on GPUs, not with {flag}: leave it out."
            )


def true_on_policy_knows_the_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """The layers of the model are those of the batch-invariant operators."""
    if not args.true_on_policy_mode:
        return
    kind = _model_type(args.hf_checkpoint)
    if kind is not None and kind not in FAMILIES:
        yield Problem(
            "--hf-checkpoint",
            f"--hf-checkpoint is a {kind} model, and {_MODE} has the layers of {', '.join(FAMILIES)}: give one of"
            f" these, or leave {_MODE} out.",
        )
        return
    own = "computes in slimrl's own layers"
    for given, flag, reason in (
        (args.custom_model_provider_path is not None, "--custom-model-provider-path", own),
        (args.spec is not None, "--spec", own),
        (args.transformer_impl == "transformer_engine", "--transformer-impl transformer_engine", own),
        (args.lora_rank is not None, "--lora-rank", "has no products with an adapter"),
        (args.use_rope_scaling, "--use-rope-scaling", "has plain rotary positions"),
        (args.position_embedding_type != "rope", "--position-embedding-type", "has plain rotary positions"),
        (args.rotary_interleaved, "--rotary-interleaved", "has plain rotary positions"),
        (args.rotary_percent != 1, "--rotary-percent", "has plain rotary positions"),
        (args.softmax_scale is not None, "--softmax-scale", "has the usual scale of attention"),
        (args.fp32_residual_connection, "--fp32-residual-connection", "adds in the dtype of the weights"),
        (args.attention_dropout > 0, "--attention-dropout", "has no dropout in the engines"),
        (args.hidden_dropout > 0, "--hidden-dropout", "has no dropout in the engines"),
        (args.keep_logits, "--keep-logits", "computes log-probabilities from chunks of rows"),
        (args.has_divergence, "--opd-divergence", "has no divergence from a teacher"),
        (args.num_experts is not None and args.moe_shared_expert_intermediate_size is not None, *_SHARED),
        (args.moe_router_score_function != "softmax", "--moe-router-score-function", "has softmax routers"),
        (args.moe_router_enable_expert_bias, "--moe-router-enable-expert-bias", "has softmax routers"),
        (args.moe_router_group_topk is not None, "--moe-router-group-topk", "has softmax routers"),
        (args.moe_router_topk_scaling_factor is not None, "--moe-router-topk-scaling-factor", "has softmax routers"),
        (args.moe_router_dtype == "fp64", "--moe-router-dtype fp64", "computes in float32"),
        (args.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor", "drops no token"),
        (args.moe_apply_probs_on_input, "--moe-apply-probs-on-input", "scales the experts' outputs"),
        (args.num_experts is not None and args.bf16, "--num-experts", "has experts in float32 on CPUs only"),
        (args.moe_input_jitter_eps is not None, "--moe-input-jitter-eps", "has no noise in the engines"),
    ):
        if given:
            yield Problem(flag, f"{_MODE} {reason}: leave {flag} out, or {_MODE}.")


_SHARED = ("--moe-shared-expert-intermediate-size", "has no shared experts")


def true_on_policy_adds_in_one_order(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training and engines split every sum in the same way."""
    if not args.true_on_policy_mode or args.server_models:  # engines.groups applies the rule to each group
        return
    ranks, engine = args.tensor_model_parallel_size, args.rollout_num_gpus_per_engine
    if args.debug_train_only:
        engine = ranks
    if args.bf16 and max(ranks, engine) > 1:
        flag, size = ("--tensor-model-parallel-size", ranks) if ranks > 1 else ("--rollout-num-gpus-per-engine", engine)
        yield Problem(flag, f"{flag} {size} with {_MODE} is for float32 on CPUs; in bfloat16 on GPUs give 1.")
    elif ranks != engine:
        yield Problem(
            "--rollout-num-gpus-per-engine",
            f"--tensor-model-parallel-size {ranks} and --rollout-num-gpus-per-engine {engine} split sums differently,"
            f" and {_MODE} needs the same: give one number for both.",
        )
    elif ranks > 2:
        yield Problem(
            "--tensor-model-parallel-size",
            f"--tensor-model-parallel-size {ranks} adds the sums of ranks in an order that depends on the number of"
            f" tokens, and {_MODE} needs one order: give 1 or 2.",
        )
    elif ranks == 2:
        yield from _halves_are_equal(args)
    for given, flag, reason in (
        (args.context_parallel_size > 1, "--context-parallel-size", "attends within one rank"),
        (args.use_megatron_fsdp, "--use-megatron-fsdp", "was not shown to be exact with Megatron-FSDP"),
    ):
        if given:
            yield Problem(flag, f"{_MODE} {reason}: leave {flag} out, or {_MODE}.")


def _halves_are_equal(args: Arguments) -> Iterator[Problem]:
    """Two ranks of training and of a server have the same halves of dense blocks and of experts."""
    experts = args.num_experts is not None
    if experts and args.expert_tensor_parallel_size != 2:
        yield Problem(
            "--expert-tensor-parallel-size",
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} has whole experts in training, of which"
            f" two ranks of an engine have halves, and {_MODE} needs the same: give 2, or"
            " --tensor-model-parallel-size 1.",
        )
    pattern = args.moe_layer_freq
    dense = not experts or isinstance(pattern, int) or 0 in pattern
    sizes = {"--ffn-hidden-size": args.ffn_hidden_size if dense else None}
    sizes["--moe-ffn-hidden-size"] = args.moe_ffn_hidden_size if experts else None
    for flag, size in sizes.items():
        if size and size % (2 * _ALIGNED):
            yield Problem(
                flag,
                f"{flag} {size} is not a multiple of {2 * _ALIGNED}, to which a server with 2 ranks pads it, and"
                f" {_MODE} needs the same halves: give --tensor-model-parallel-size 1.",
            )


# options of SGLang that change no number; of the others some do
_HARMLESS = {
    "api_key",
    "chunked_prefill_size",
    "context_length",
    "disable_chunked_prefix_cache",
    "disable_radix_cache",
    "enable_cache_report",
    "enable_deterministic_inference",
    "enable_metrics",
    "host",
    "load_format",
    "log_level",
    "log_level_http",
    "log_requests",
    "log_requests_level",
    "max_prefill_tokens",
    "max_queued_requests",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
    "page_size",
    "schedule_conservativeness",
    "schedule_policy",
    "skip_tokenizer_init",
    "sleep_on_idle",
    "stream_interval",
    "tokenizer_path",
    "trust_remote_code",
    "watchdog_timeout",
}
# those with one allowed value, in float32 and in bfloat16
_ON_CPUS = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
_ON_GPUS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "rl_on_policy_target": "fsdp",  # servers do not get it: see `engines.sglang.server`
}
# which launch the same kernels in another way
_GRAPHS = ("cuda_graph_", "disable_cuda_graph")


def true_on_policy_engines_compute_alike(args: Arguments, context: Context) -> Iterator[Problem]:
    """Engines are this run's, and no option changes their arithmetic."""
    if not args.true_on_policy_mode:
        return
    if args.rollout_engine != "sglang":
        yield Problem(
            "--rollout-engine",
            f"--rollout-engine {args.rollout_engine} has operators of its own, and {_MODE} has those of sglang: give"
            " sglang.",
        )
    if args.rollout_external_engine_addrs:
        yield Problem(
            "--rollout-external-engine-addrs",
            f"--rollout-external-engine-addrs has servers with operators of their own, and {_MODE} starts its own:"
            " leave it out.",
        )
    fixed = _ON_GPUS if args.bf16 else _ON_CPUS
    for name, value in args.sglang_options.items():
        flag = f"--sglang-{name.replace('_', '-')}"
        if name not in fixed and name in _ON_GPUS:
            yield Problem(
                flag,
                f"{flag} {value} names kernels of GPUs, which {_MODE} has in bfloat16: leave {flag} out, or give --bf16"
                " on GPUs.",
            )
        elif name in fixed and value != fixed[name]:
            yield Problem(
                flag,
                f"{flag} {value} is another choice than {fixed[name]}, which {_MODE} needs in"
                f" {fixed['dtype']}: give that.",
            )
        elif args.bf16 and name.startswith(_GRAPHS):
            continue
        elif name == "enable_deterministic_inference" and not value:
            yield Problem(flag, f"{_MODE} samples with a seed per sample: leave --no-sglang-{flag[9:]} out.")
        elif name not in _HARMLESS and name not in fixed and value:
            yield Problem(
                flag, f"{flag} was not shown to leave log-probabilities as they are: leave it, or {_MODE} out."
            )


def on_policy_target_belongs_to_the_mode(args: Arguments, context: Context) -> Iterator[Problem]:
    """By itself the option makes SGLang deterministic without seeds.

    Its log-probabilities are then of bfloat16 for some batches and of float32 for others.
    """
    target = args.sglang_options.get("rl_on_policy_target")
    if target is not None and not args.true_on_policy_mode and not args.debug_train_only:
        flag = "--sglang-rl-on-policy-target"
        yield Problem(
            flag,
            f"{flag} {target} makes SGLang compute log-probabilities in a way of its own, which depends on the batch,"
            f" and only {_MODE} has it right: add {_MODE}, or leave the flag out.",
        )


def true_on_policy_trains_what_it_samples(args: Arguments, context: Context) -> Iterator[Problem]:
    """Samples are trained by the weights that generated them."""
    if not args.true_on_policy_mode:
        return
    if context.entry == "train_async.py":
        yield Problem(
            _MODE,
            f"{_MODE} trains samples of the current weights, and train_async.py those of older ones: start train.py.",
        )
    if args.partial_rollout:
        yield Problem(
            "--partial-rollout",
            f"--partial-rollout continues responses of older weights, and {_MODE} has none: leave one out.",
        )


def _model_type(folder: str | None) -> str | None:
    """model_type in config.json; None if another rule reports the folder."""
    if folder is None:
        return None
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("model_type") if isinstance(found, dict) else None


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
