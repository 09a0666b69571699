"""Functions of training of one's own: each where it is called, none where it never would be."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context


def own_loss_has_its_function(args: Arguments, context: Context) -> Iterator[Problem]:
    """--loss-type custom_loss and --custom-loss-function-path come together, and replace the policy loss whole."""
    own = args.loss_type == "custom_loss"
    if own and args.custom_loss_function_path is None:
        yield Problem(
            "--loss-type",
            "--loss-type custom_loss has no loss: give --custom-loss-function-path, or --loss-type policy_loss.",
        )
    if not own and args.custom_loss_function_path is not None:
        yield Problem(
            "--custom-loss-function-path",
            f"--custom-loss-function-path {args.custom_loss_function_path} is not called with --loss-type"
            f" {args.loss_type}: add --loss-type custom_loss, or leave it out.",
        )
    if not own:
        return
    for flag, given in (("--use-tis", args.use_tis), ("--use-opsm", args.use_opsm)):
        if given:
            yield Problem(flag, f"{flag} corrects the policy loss, and --loss-type is custom_loss: leave it out.")


def parts_of_the_policy_loss_have_one(args: Arguments, context: Context) -> Iterator[Problem]:
    """A mean, a correction and advantages of one's own belong to a loss that uses them."""
    for flag, path in (
        ("--custom-tis-function-path", args.custom_tis_function_path),
        ("--custom-pg-loss-reducer-function-path", args.custom_pg_loss_reducer_function_path),
    ):
        if path is not None and args.loss_type != "policy_loss":
            yield Problem(
                flag, f"{flag} {path} is part of the policy loss, and --loss-type is {args.loss_type}: leave it out."
            )
    if args.custom_tis_function_path is not None and not args.use_tis:
        path = args.custom_tis_function_path
        yield Problem(
            "--custom-tis-function-path",
            f"--custom-tis-function-path {path} belongs to --use-tis: add it, or leave the path out.",
        )
    for flag, path in (
        ("--custom-advantage-function-path", args.custom_advantage_function_path),
        ("--custom-megatron-before-log-prob-hook-path", args.custom_megatron_before_log_prob_hook_path),
    ):
        if path is not None and not args.compute_advantages_and_returns:
            yield Problem(
                flag,
                f"{flag} {path} is never called: --loss-type {args.loss_type} computes no log-probabilities before"
                " training and no advantages. Leave it out.",
            )


def own_model_is_one(args: Arguments, context: Context) -> Iterator[Problem]:
    """--spec is module and function; a provider builds the layers too."""
    if args.spec is not None and len(args.spec) != 2:
        yield Problem("--spec", f"--spec {' '.join(args.spec)} is not two words: give a module and a function in it.")
    if args.spec is not None and args.custom_model_provider_path is not None:
        yield Problem(
            "--spec",
            f"--spec {' '.join(args.spec)} and --custom-model-provider-path {args.custom_model_provider_path} both make"
            " the layers: give one.",
        )


def written_weights_are_files(args: Arguments, context: Context) -> Iterator[Problem]:
    """Only the disk transport writes anything."""
    path = args.custom_update_weight_post_write_path
    if path is not None and args.update_weight_transport != "disk":
        yield Problem(
            "--custom-update-weight-post-write-path",
            f"--custom-update-weight-post-write-path {path} is never called, because --update-weight-transport"
            f" {args.update_weight_transport} writes no files: add --update-weight-transport disk, or leave it out.",
        )
