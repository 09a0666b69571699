"""Rules about the model's own flags, and their agreement with config.json of --hf-checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.hf_config import disagreements
from slimrl.arguments.installed import transformer_engine_installed
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context


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
