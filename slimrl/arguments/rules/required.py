"""Flags without which nothing can start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_TRAINING = ("hf_checkpoint", "prompt_data", "rollout_batch_size", "rollout_max_response_len")


def model_flags_are_given(args: Arguments, context: Context) -> Iterator[Problem]:
    """The shape of the model is not guessed."""
    missing = _missing(args, context, _MODEL)
    if missing:
        names = ", ".join(missing)
        yield Problem(
            missing[0], f"{names} missing: give the flags that describe the model, for example from scripts/models/."
        )


def training_flags_are_given(args: Arguments, context: Context) -> Iterator[Problem]:
    """What every run needs besides the model."""
    spared = {"rollout_max_response_len"} if args.debug_train_only else set()
    if args.has_own_data_source or not args.rollout_global_dataset or args.only_evaluates:
        spared.add("prompt_data")
    if args.only_evaluates and all(dataset.max_response_len is not None for dataset in args.eval_datasets):
        spared.add("rollout_max_response_len")
    for name in _missing(args, context, [name for name in _TRAINING if name not in spared]):
        yield Problem(name, f"{name} is missing: every run needs it.")


def run_has_a_length(args: Arguments, context: Context) -> Iterator[Problem]:
    """--num-rollout or --num-epoch."""
    if args.num_rollout is None and args.num_epoch is None and not {"num_rollout", "num_epoch"} & context.broken:
        yield Problem("--num-rollout", "the run has no length: give --num-rollout or --num-epoch.")


def _missing(args: Arguments, context: Context, names: Sequence[str]) -> list[str]:
    values = vars(args)
    return ["--" + name.replace("_", "-") for name in names if values[name] is None and name not in context.broken]
