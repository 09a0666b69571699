"""Rules about generation that goes on beside training: which program, which flags go with it, what the engines need."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_BOUND, _IN_FLIGHT = "--max-weight-staleness", "--update-weights-in-flight"
_RETRACTION_IS_RIGHT_FROM = (0, 5, 21)


def asynchrony_has_its_program(args: Arguments, context: Context) -> Iterator[Problem]:
    """train.py generates and trains in turns: nothing goes stale and nothing is in flight."""
    if context.entry != "train.py":
        return
    for flag, value in (
        (f"{_BOUND} {args.max_weight_staleness}", args.max_weight_staleness is not None),
        (_IN_FLIGHT, args.update_weights_in_flight and args.max_weight_staleness is None),
    ):
        if value:
            yield Problem(
                flag.split()[0],
                f"{flag} belongs to train_async.py; with train.py generation and training take turns: start"
                " train_async.py, or leave it out.",
            )


def continuous_generation_is_alone(args: Arguments, context: Context) -> Iterator[Problem]:
    """What cuts generation into rollouts has no meaning where it goes on without end."""
    if args.max_weight_staleness is None:
        return
    endless = f"{_BOUND} {args.max_weight_staleness} generates without end"
    if args.has_own_rollout_function:
        yield Problem(
            "--rollout-function-path",
            f"{endless}, and --rollout-function-path {args.rollout_function_path} makes one rollout after the other:"
            " leave one of the two out; --custom-generate-function-path makes single samples.",
        )
    if args.partial_rollout:
        yield Problem(
            "--partial-rollout",
            f"{endless}, and no rollout cuts anything off to be continued: leave --partial-rollout out.",
        )
    if args.discard_surplus_groups:
        yield Problem(
            "--discard-surplus-groups",
            f"{endless}, and no rollout has a surplus: leave --discard-surplus-groups out; what is too old is generated"
            " anew.",
        )
    if "over_sampling_batch_size" in context.given:
        yield Problem(
            "--over-sampling-batch-size",
            f"{endless}: how much is under way follows from {_BOUND} and --sglang-server-concurrency; leave"
            f" --over-sampling-batch-size {args.over_sampling_batch_size} out.",
        )


def pushes_keep_up(args: Arguments, context: Context) -> Iterator[Problem]:
    """The last rollout before a push trains on the oldest weights that the engines ever have."""
    bound, interval = args.max_weight_staleness, args.update_weights_interval
    if bound is not None and bound < interval - 1 and "update_weights_interval" not in context.broken:
        yield Problem(
            _BOUND,
            f"{_BOUND} {bound} cannot be kept with --update-weights-interval {interval}, with which engines are"
            f" {interval - 1} rollouts behind before each push: give at least {interval - 1}, or push more often.",
        )


def requests_can_go_on(args: Arguments, context: Context) -> Iterator[Problem]:
    """SGLang before 0.5.21 lets a request that goes on after an update read the old weights' keys and values."""
    if context.entry != "train_async.py" or not args.update_weights_in_flight or args.debug_train_only:
        return
    installed = _sglang_version()
    if installed is None or installed[0] >= _RETRACTION_IS_RIGHT_FROM or args.sglang_options.get("disable_radix_cache"):
        return
    cause = (
        f"{_BOUND} {args.max_weight_staleness} pushes"
        if args.max_weight_staleness is not None
        else f"{_IN_FLIGHT} pushes"
    )
    yield Problem(
        _IN_FLIGHT,
        f"{cause} weights under running requests, which SGLang {installed[1]} continues with stale keys and values out"
        " of its radix cache: add --sglang-disable-radix-cache, install sglang 0.5.21 or later, or give"
        " --no-update-weights-in-flight.",
    )


def _sglang_version() -> tuple[tuple[int, ...], str] | None:
    """As numbers to compare and as text; None where it is not installed here."""
    try:
        text = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3]), text
