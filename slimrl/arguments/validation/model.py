"""Rules about the model: its shape, agreement with config.json of --hf-checkpoint, MLA and YaRN, unsupported values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.derive import transformer_engine_installed
from slimrl.arguments.flag import FlagSpec, Problem
from slimrl.arguments.hf_config import disagreements
from slimrl.arguments.namespace import Arguments, all_flag_specs
from slimrl.arguments.validation.rule import Context


def shape_is_possible(args: Arguments, context: Context) -> Iterator[Problem]:
    """Heads share the width, groups share the heads, padding only adds."""
    hidden, heads, groups = args.hidden_size, args.num_attention_heads, args.num_query_groups
    plain = not args.multi_latent_attention  # whose heads have widths of their own
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
        yield Problem("--num-query-groups", "--group-query-attention needs --num-query-groups: give its number.")
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
    """--transformer-impl transformer_engine needs that package and its binding for torch, a package of its own."""
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
            f"--hf-checkpoint holds weights quantised as {quantised!r} and its servers would take trained weights for"
            " quantised ones: give the model in bf16 (of block-wise fp8, tools/convert_hf_to_torch_dist.py and then"
            " tools/convert_torch_dist_to_hf.py make one).",
        )
    for problem in disagreements(args, config):
        if problem.flag.removeprefix("--").replace("-", "_") not in context.broken:
            yield problem


def code_of_the_model_is_trusted(args: Arguments, context: Context) -> Iterator[Problem]:
    """A tokenizer that is Python code of the model's folder runs only where the user says so."""
    if args.hf_checkpoint is None or args.sglang_options.get("trust_remote_code"):
        return
    path = Path(args.hf_checkpoint) / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # whoever opens the tokenizer says what is wrong
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    if isinstance(auto_map, dict) and "AutoTokenizer" in auto_map:
        yield Problem(
            "--sglang-trust-remote-code",
            f"--hf-checkpoint {args.hf_checkpoint} brings its tokenizer along as Python code: read it, and add"
            " --sglang-trust-remote-code to have it run.",
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
    """No width of latent attention and no stretch of its positions is ignored."""
    if args.multi_latent_attention:
        return
    for name in (*_LATENT, *_YARN):
        if name in context.given:
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} belongs to latent attention: add --multi-latent-attention, or leave it out.")
    if args.position_embedding_type == "yarn":
        yield Problem(
            "--position-embedding-type",
            "--position-embedding-type yarn is served with --multi-latent-attention only: use rope.",
        )


def latent_attention_is_plain_otherwise(args: Arguments, context: Context) -> Iterator[Problem]:
    """What megatron-core cannot combine with latent attention."""
    if args.multi_latent_attention and args.rotary_interleaved:
        yield Problem(
            "--rotary-interleaved",
            "--rotary-interleaved and --multi-latent-attention exclude each other (its rotary channels have an order of"
            " their own): leave the first out.",
        )
    if args.multi_latent_attention and args.use_rope_scaling:
        yield Problem(
            "--use-rope-scaling",
            "--use-rope-scaling is Llama 3's and --multi-latent-attention stretches with --rotary-scaling-factor: leave"
            " the first out.",
        )
    tp, training = args.tensor_model_parallel_size, context.is_training and not args.debug_rollout_only
    # with experts another rule asks for it
    if args.multi_latent_attention and tp > 1 and not args.sequence_parallel and args.num_experts is None and training:
        yield Problem(
            "--sequence-parallel",
            f"--multi-latent-attention with --tensor-model-parallel-size {tp} trains with --sequence-parallel only: add"
            " it.",
        )


def values_are_served(args: Arguments, context: Context) -> Iterator[Problem]:
    """Nothing is accepted and then ignored: what a flag's declaration does not serve is refused in its words."""
    values = vars(args)
    for spec in all_flag_specs():
        if spec.dest in context.given and spec.dest not in context.broken and spec.refuses(values[spec.dest]):
            yield Problem(spec.name, f"{_as_typed(spec, values[spec.dest])} is not served: {spec.not_served}.")


def _as_typed(spec: FlagSpec, value: object) -> str:
    if spec.is_switch:
        return spec.on[0] if value and spec.on else spec.off[0]
    if isinstance(value, list):
        return " ".join([spec.name, *map(str, value)])
    return f"{spec.name} {value}"
