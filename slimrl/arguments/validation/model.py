"""Rules about the model: shape, config.json, MLA and YaRN, number formats, unsupported values, experts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.derive import transformer_engine_installed
from slimrl.arguments.flag import FlagSpec, Problem, flag_specs
from slimrl.arguments.flags.kernels import PrecisionArguments
from slimrl.arguments.flags.model import ModelArguments
from slimrl.arguments.flags.moe import MoeArguments
from slimrl.arguments.hf_config import disagreements
from slimrl.arguments.namespace import Arguments, Context, all_flag_specs, missing

_OF_FP16 = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_OF_FP8 = (
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "tp_only_amax_red",
    "activation_func_fp8_input_store",
)
_OF_FP4 = ("fp4_recipe",)


def shape_is_possible(args: Arguments, context: Context) -> Iterator[Problem]:
    """Heads divide the hidden size, groups divide the heads, padding does not shrink the vocabulary."""
    hidden, heads, groups = args.hidden_size, args.num_attention_heads, args.num_query_groups
    plain = not args.multi_latent_attention  # MLA has separate flags for head widths
    if plain and hidden and heads and "kv_channels" not in context.given and hidden % heads:
        yield Problem(
            "--hidden-size",
            f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}: give --kv-channels, the width"
            " of a head.",
        )
    if "num_query_groups" in context.given and not args.group_query_attention and groups != heads:
        yield Problem(
            "--num-query-groups",
            f"--num-query-groups {groups} is used with --group-query-attention only: add it, or leave"
            " --num-query-groups out.",
        )
    if args.group_query_attention and groups is None and "num_query_groups" not in context.broken:
        yield Problem("--num-query-groups", "--group-query-attention needs --num-query-groups: add it.")
    if heads and groups and heads % groups:
        yield Problem(
            "--num-query-groups",
            f"--num-attention-heads {heads} does not divide by --num-query-groups {groups}: choose a divisor.",
        )
    if args.kv_channels is not None and args.kv_channels % 2:
        yield Problem(
            "--kv-channels",
            f"--kv-channels {args.kv_channels} is odd and rotary channels come in pairs: give an even number.",
        )
    if args.vocab_size and args.padded_vocab_size and args.padded_vocab_size < args.vocab_size:
        yield Problem(
            "--padded-vocab-size",
            f"--padded-vocab-size {args.padded_vocab_size} is below --vocab-size {args.vocab_size}: raise it.",
        )


def kernels_are_installed(args: Arguments, context: Context) -> Iterator[Problem]:
    """--transformer-impl transformer_engine needs the package and its torch binding, a separate package."""
    if args.transformer_impl == "transformer_engine" and not transformer_engine_installed():
        yield Problem(
            "--transformer-impl",
            "--transformer-impl transformer_engine needs a package that is not installed: install transformer_engine,"
            " or leave the flag out.",
        )


def model_agrees_with_hf_config(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every model flag against config.json; both values are named."""
    if args.hf_checkpoint is None or args.debug_rollout_only:
        return
    path = Path(args.hf_checkpoint) / "config.json"
    if not path.is_file():
        return  # another rule's problem
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        yield Problem("--hf-checkpoint", f"--hf-checkpoint: {path} is not JSON ({error}): copy the model again.")
        return
    if not isinstance(config, dict):
        yield Problem("--hf-checkpoint", f"--hf-checkpoint: {path} is not a JSON object: copy the model again.")
        return
    quantisation = config.get("quantization_config")
    quantised = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
    if quantised is not None and context.is_training and not args.debug_train_only:
        yield Problem(
            "--hf-checkpoint",
            f"--hf-checkpoint holds weights quantised as {quantised!r} and weight updates send unquantised tensors:"
            f" give"
            " the model in bf16 (from block-wise fp8, convert with tools/convert_hf_to_torch_dist.py and then"
            " tools/convert_torch_dist_to_hf.py).",
        )
    for problem in disagreements(args, config):
        if problem.flag.removeprefix("--").replace("-", "_") not in context.broken:
            yield problem


def remote_code_is_trusted(args: Arguments, context: Context) -> Iterator[Problem]:
    """A tokenizer that is Python code in the model's folder runs only with the user's permission."""
    if args.hf_checkpoint is None or args.trusts_remote_code:
        return
    path = Path(args.hf_checkpoint) / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # another rule reports an unreadable tokenizer
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    if isinstance(auto_map, dict) and "AutoTokenizer" in auto_map:
        yield Problem(
            "--sglang-trust-remote-code",
            f"--hf-checkpoint {args.hf_checkpoint} has a tokenizer in Python code: review it, and add"
            " --sglang-trust-remote-code to run it.",
        )


_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
_YARN = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def latent_flags_have_latent_attention(args: Arguments, context: Context) -> Iterator[Problem]:
    """No width of latent attention and no YaRN setting is ignored."""
    if args.multi_latent_attention:
        return
    for name in (*_LATENT, *_YARN):
        if name in context.given:
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} belongs to latent attention: add --multi-latent-attention, or leave it out.")
    if args.position_embedding_type == "yarn":
        yield Problem(
            "--position-embedding-type",
            "--position-embedding-type yarn is supported with --multi-latent-attention only: use rope.",
        )


def latent_attention_is_plain_otherwise(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags that megatron-core cannot combine with latent attention are rejected."""
    if args.multi_latent_attention and args.rotary_interleaved:
        yield Problem(
            "--rotary-interleaved",
            "--rotary-interleaved and --multi-latent-attention exclude each other (MLA has its own order of rotary"
            " channels): leave the first out.",
        )
    if args.multi_latent_attention and args.use_rope_scaling:
        yield Problem(
            "--use-rope-scaling",
            "--use-rope-scaling is for Llama 3 and --multi-latent-attention uses --rotary-scaling-factor: leave the"
            " first out.",
        )
    tp, training = args.tensor_model_parallel_size, context.is_training and not args.debug_rollout_only
    # another rule checks models with experts
    if args.multi_latent_attention and tp > 1 and not args.sequence_parallel and args.num_experts is None and training:
        yield Problem(
            "--sequence-parallel",
            f"--multi-latent-attention with --tensor-model-parallel-size {tp} trains with --sequence-parallel only: add"
            " it.",
        )


def values_are_supported(args: Arguments, context: Context) -> Iterator[Problem]:
    """No flag is accepted and then ignored: a value that a declaration marks as unsupported is rejected."""
    values = vars(args)
    for spec in all_flag_specs():
        if spec.dest in context.given and spec.dest not in context.broken and spec.refuses(values[spec.dest]):
            yield Problem(spec.name, f"{_as_typed(spec, values[spec.dest])} is unsupported: {spec.not_served}.")


def _as_typed(spec: FlagSpec, value: object) -> str:
    if spec.is_switch:
        return spec.on[0] if value and spec.on else spec.off[0]
    if isinstance(value, list):
        return " ".join([spec.name, *map(str, value)])
    return f"{spec.name} {value}"


_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


def model_flags_are_given(args: Arguments, context: Context) -> Iterator[Problem]:
    """The flags of the model's shape are required."""
    absent_flags = missing(args, context, _MODEL)
    if absent_flags:
        names = ", ".join(absent_flags)
        yield Problem(
            absent_flags[0],
            f"{names} missing: give the flags that describe the model, for example from scripts/models/.",
        )


def few_bits_have_their_kernels(args: Arguments, context: Context) -> Iterator[Problem]:
    """fp8 and fp4 need Transformer Engine and bf16 weights."""
    for flag, value in (("--fp8-format", args.fp8_format), ("--fp4-format", args.fp4_format)):
        if value is None:
            continue
        if not transformer_engine_installed():
            yield Problem(
                flag,
                f"{flag} {value} needs a package that is not installed: install transformer_engine, or leave it out.",
            )
        if not args.bf16:
            yield Problem(flag, f"{flag} {value} computes from bf16 weights: add --bf16.")
    if args.fp8_format is not None and args.fp4_format is not None:
        yield Problem(
            "--fp4-format",
            f"--fp8-format {args.fp8_format} and --fp4-format {args.fp4_format} exclude each other: give one.",
        )


def few_bits_fit_the_layers(args: Arguments, context: Context) -> Iterator[Problem]:
    """megatron-core combines delayed scales and padding for few bits with these layers."""
    if args.moe_router_padding_for_quantization and args.fp8_format is None and args.fp4_format is None:
        yield Problem(
            "--moe-router-padding-for-quantization",
            "--moe-router-padding-for-quantization belongs to --fp8-format or --fp4-format: add one, or leave it out.",
        )
    if args.fp8_format is None or args.fp8_recipe != "delayed":
        return
    recomputed = [module for module in args.recompute_modules or () if module in ("moe_act", "layernorm")]
    for given, flag in (
        (args.first_last_layers_bf16, "--first-last-layers-bf16"),
        (recomputed, f"--recompute-modules {' '.join(recomputed)}"),
    ):
        if given:
            yield Problem(
                flag.split()[0],
                f"{flag} does not support --fp8-recipe delayed: give another, such as tensorwise, or leave it out.",
            )


def formats_have_their_settings(args: Arguments, context: Context) -> Iterator[Problem]:
    """Settings of a number format need that format, unless they have their default value."""
    for spec in flag_specs(PrecisionArguments) + flag_specs(ModelArguments):
        for names, needed, given in (
            (_OF_FP16, "--fp16", args.fp16),
            (_OF_FP8, "--fp8-format", args.fp8_format is not None),
            (_OF_FP4, "--fp4-format", args.fp4_format is not None),
        ):
            if spec.dest in names and vars(args)[spec.dest] != spec.default and not given:
                name = (spec.off if spec.is_switch and not vars(args)[spec.dest] else spec.on)[0]
                yield Problem(name, f"{name} belongs to {needed}: add it, or leave {name} out.")


def precision_is_single(args: Arguments, context: Context) -> Iterator[Problem]:
    """bf16 and fp16 exclude each other."""
    if args.bf16 and args.fp16:
        yield Problem("--bf16", "--bf16 and --fp16 exclude each other: give one, or neither for fp32.")


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
