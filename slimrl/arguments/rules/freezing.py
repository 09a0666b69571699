"""Rules about the weights that are not trained."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context


def trained_weights_have_one_list(args: Arguments, context: Context) -> Iterator[Problem]:
    """One list says it: what is trained, or what is not; an empty list says nothing."""
    only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
    for flag, patterns in (("--only-train-params-name-list", only), ("--freeze-params-name-list", frozen)):
        if patterns == []:
            yield Problem(flag, f"{flag} is given without a regular expression: give at least one, or leave it out.")
    if only and frozen:
        yield Problem(
            "--freeze-params-name-list",
            f"--only-train-params-name-list {' '.join(only)} and --freeze-params-name-list {' '.join(frozen)} exclude"
            " each other: give one.",
        )
