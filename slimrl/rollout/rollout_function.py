"""Calls custom rollout functions, checks what they return, and runs custom log functions.

`--rollout-function-path` names an ordinary function. It runs in its own thread, so that the event loop keeps running.
With the keyword argument `generator` it can call the built-in rollout (`generate_rollout`). A rollout returns a
`RolloutOutput`: its groups, and the metrics that cannot be computed from the samples.

Custom log functions run in the rollout manager's process when a rollout or evaluation is complete. Mean rewards are
always reported, because the run's summary needs them. Metrics that a function adds to `extra_metrics` are reported
under their names. A name that slimrl itself reports is rejected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slimrl.arguments import Arguments
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, RolloutArguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import (
    EvalRolloutLog,
    HookFailedError,
    RolloutFunction,
    RolloutLog,
    accepted,
    naming,
    own_path,
    resolve,
)
from slimrl.hooks.contracts import RunArguments
from slimrl.hooks.loader import plain_number
from slimrl.observability.metrics import is_known
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation.sample_tracker import RouterAccess
from slimrl.rollout.metrics import EvalResult


@dataclasses.dataclass(frozen=True)
class RolloutOutput:
    """`--rollout-batch-size` groups sorted by index, and flat metrics by name.

    `data_state` is the data state for the checkpoint if groups stay in flight across rollouts; None otherwise, and if
    no checkpoint is saved.
    `seconds` is the generation time if the groups were in flight before the rollout was requested.
    """

    groups: list[list[Sample]]
    metrics: dict[str, float]
    data_state: dict[str, Any] | None = None
    seconds: float | None = None


class Generator(Protocol):
    """The built-in rollout and evaluation, as coroutines."""

    async def builtin_rollout(self, rollout_id: int, data_source: RolloutDataSource) -> RolloutOutput: ...

    async def builtin_evaluation(self, rollout_id: int) -> dict[str, EvalResult]: ...


class BlockingGenerator:
    """The built-in rollout for code outside the event loop's thread."""

    def __init__(self, generator: Generator, loop: asyncio.AbstractEventLoop) -> None:
        self._generator = generator
        self._loop = loop
        self.failure: BaseException | None = None  # what the built-in rollout raised; not blamed on the function

    def rollout(self, rollout_id: int, data_source: RolloutDataSource) -> RolloutOutput:
        """Generates one rollout and waits for it."""
        return self._wait(self._generator.builtin_rollout(rollout_id, data_source))

    def evaluation(self, rollout_id: int) -> dict[str, EvalResult]:
        """Evaluates every dataset and waits for the results."""
        return self._wait(self._generator.builtin_evaluation(rollout_id))

    def _wait(self, work: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseException as error:
            self.failure = error
            raise


def generate_rollout(
    args: RunArguments,
    rollout_id: int,
    data_source: RolloutDataSource,
    *,
    evaluation: bool = False,
    generator: BlockingGenerator | None = None,
) -> RolloutOutput | dict[str, EvalResult]:
    """Runs the built-in rollout or evaluation. `generator` is the argument that the rollout function received."""
    if generator is None:
        raise ValueError(
            "generate_rollout was called without generator: accept the keyword argument `generator` in your rollout"
            " function and pass it to generate_rollout"
        )
    return generator.evaluation(rollout_id) if evaluation else generator.rollout(rollout_id, data_source)


@dataclasses.dataclass(frozen=True)
class CustomRollout:
    """A custom rollout function; `flag` is the flag that names it, `router` the router that it may call."""

    flag: str
    path: str
    function: Callable[..., Any]
    router: RouterAccess
    hook_args: RunArguments  # passed to the function

    @classmethod
    def for_training(cls, args: Arguments) -> CustomRollout | None:
        """The function of `--rollout-function-path`; None if it is the built-in one."""
        router = RouterAccess.from_args(args)
        return cls._load("--rollout-function-path", args.rollout_function_path, router, args)

    @classmethod
    def for_evaluation(cls, args: Arguments) -> CustomRollout | None:
        """The function of `--eval-function-path`, by default of `--rollout-function-path`; None if built in."""
        if args.eval_function_path:
            router = RouterAccess.from_args(args)
            return cls._load("--eval-function-path", args.eval_function_path, router, args)
        return cls.for_training(args)

    @classmethod
    def _load(cls, flag: str, path: str, router: RouterAccess, hook_args: RunArguments) -> CustomRollout | None:
        if own_path(path) == DEFAULT_ROLLOUT_FUNCTION:
            return None
        return cls(flag, path, resolve(path, RolloutFunction), router, hook_args)

    async def __call__(
        self,
        rollout_id: int,
        data_source: RolloutDataSource | None,
        *,
        evaluation: bool,
        tokenizer: Any,
        generator: Generator | None,
    ) -> Any:
        """Calls the function in a thread and returns its result.

        The function receives `generator` (None without engines) and `tokenizer` if it accepts them. Raises
        HookFailedError, which names flag and path, if it fails. Errors of the built-in rollout pass through unchanged.
        """
        blocking = None if generator is None else BlockingGenerator(generator, asyncio.get_running_loop())
        self.router.begin_calls()
        keywords = accepted(self.function, RolloutFunction, generator=blocking, tokenizer=tokenizer)

        def call() -> Any:
            # wrapped inside the thread: a StopIteration that leaves the thread never reaches the awaiting task
            with naming(self.flag, self.path, passes=lambda error: blocking is not None and error is blocking.failure):
                return self.function(self.hook_args, rollout_id, data_source, evaluation=evaluation, **keywords)

        return await asyncio.to_thread(call)


async def rollout_without_engines(
    custom: CustomRollout | None, expected: ExpectedOutput, rollout_id: int, data_source: Any, tokenizer: Any
) -> RolloutOutput:
    """Runs one rollout by a `--rollout-function-path` that uses no engines (`--debug-train-only`)."""
    if custom is None:
        raise ValueError("the built-in rollout needs engines: set --rollout-function-path to a function without them")
    data_source.begin_rollout(rollout_id)
    returned = await custom(rollout_id, data_source, evaluation=False, tokenizer=tokenizer, generator=None)
    return expected.checked(returned)


@dataclasses.dataclass(frozen=True)
class ExpectedOutput:
    """The number of samples that a rollout function may return: whole optimizer steps, unless rows are custom."""

    path: str
    max_samples: int
    samples_per_step: int | None  # None: any number

    @classmethod
    def from_args(cls, args: Arguments) -> ExpectedOutput:
        """The limits that the flags set for `--rollout-function-path`."""
        has_custom_sample_conversion = args.custom_convert_samples_to_train_data_path is not None
        return cls(
            path=args.rollout_function_path,
            max_samples=args.rollout_batch_size * args.n_samples_per_prompt,
            samples_per_step=None if has_custom_sample_conversion else args.global_batch_size or None,
        )

    def checked(self, returned: Any) -> RolloutOutput:
        """Converts what the function returned, like `rollout_output`.

        Also raises HookFailedError if the number of samples does not fit the optimizer steps of the flags.
        """
        output = rollout_output(returned, self.path)
        samples, step = sum(map(len, output.groups)), self.samples_per_step
        if step is not None and (samples > self.max_samples or samples % step):
            raise HookFailedError(
                f"--rollout-function-path {self.path} returned {samples} samples, but a rollout has at"
                f" most {self.max_samples} (--rollout-batch-size x --n-samples-per-prompt), in steps of"
                f" --global-batch-size {step}: return such a number, or set"
                " --custom-convert-samples-to-train-data-path to a function that makes the rows to train on"
            )
        return output


def rollout_output(returned: Any, path: str) -> RolloutOutput:
    """Converts what a rollout function returned: an object with groups (or `samples`) and metrics, or a list of groups.

    Raises TypeError for anything else, HookFailedError if a metric is not a number.
    """
    if isinstance(returned, RolloutOutput):
        return dataclasses.replace(returned, metrics=_plain_metrics(returned.metrics, path))
    groups = returned if isinstance(returned, list) else getattr(returned, "samples", None)
    metrics = getattr(returned, "metrics", None) or {}
    if not isinstance(groups, list) or not groups or not all(_is_group(group) for group in groups):
        raise TypeError(
            f"--rollout-function-path {path} returned {type(returned).__name__}: return RolloutOutput(groups, metrics)"
            " or a list of groups, each a list of Sample"
        )
    return RolloutOutput(groups, _plain_metrics(metrics, path))


def eval_results(returned: Any, path: str) -> dict[str, EvalResult]:
    """Converts what an evaluation function returned: by name an EvalResult, or a dict of rewards and samples.

    Raises TypeError for anything else, HookFailedError if a reward is not a finite number.
    """
    data = returned if isinstance(returned, dict) else getattr(returned, "data", None)
    if not isinstance(data, dict):
        raise TypeError(
            f"the evaluation function {path} returned {type(returned).__name__} with evaluation=True: return"
            " {name: EvalResult} or {name: {'rewards': [...], 'samples': [...]}}"
        )
    results = {
        name: result if isinstance(result, EvalResult) else EvalResult(name, result["rewards"], result["samples"], 1)
        for name, result in data.items()
    }
    return {
        name: dataclasses.replace(result, rewards=_plain_rewards(name, result.rewards, path))
        for name, result in results.items()
    }


def _plain_metrics(metrics: Mapping[str, Any], path: str) -> dict[str, float]:
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = plain_number(value)
        except TypeError as error:
            raise HookFailedError(
                f"--rollout-function-path {path} returned {value!r} for the metric {name!r}: return a number"
            ) from error
    return plain


def _plain_rewards(name: str, rewards: Sequence[Any], path: str) -> list[float]:
    plain = []
    for position, value in enumerate(rewards):
        try:
            plain.append(plain_number(value))
        except TypeError:
            plain.append(math.nan)
        if not math.isfinite(plain[-1]):
            raise HookFailedError(
                f"the evaluation function {path} returned {value!r} as reward {position} of {name!r}: return finite"
                " numbers"
            )
    return plain


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and all(isinstance(sample, Sample) for sample in group)


_REWARD = "rollout/raw_reward"


def reported_metrics(
    rollout: RolloutArguments,
    rollout_id: int,
    samples: list[Sample],
    metrics: dict[str, float],
    extra_metrics: dict[str, float],
    seconds: float,
    *,
    hook_args: RunArguments,
) -> dict[str, float]:
    """The metrics to report for a rollout, after the custom log function ran.

    `extra_metrics` are the entries of `metrics` that the rollout returned. `hook_args` is passed to the function.
    """
    path = rollout.custom_rollout_log_function_path
    if path is None:
        return metrics
    function = resolve(path, RolloutLog)
    after = dict(extra_metrics)  # the function adds to it
    with naming("--custom-rollout-log-function-path", path):
        replaced = function(rollout_id, hook_args, samples, after, seconds)
    reported = {_REWARD: metrics[_REWARD]} if replaced else metrics
    return reported | _added(f"--custom-rollout-log-function-path {path}", after, extra_metrics, reported, metrics)


def reported_scalars(
    rollout: RolloutArguments, rollout_id: int, results: dict[str, EvalResult], *, hook_args: RunArguments
) -> dict[str, dict[str, float]]:
    """The metrics to report for each evaluation set, by its name; `hook_args` as in `reported_metrics`."""
    scalars = {name: result.metrics() for name, result in results.items()}
    path = rollout.custom_eval_rollout_log_function_path
    if path is None:
        return scalars
    data = {
        name: {
            "rewards": result.rewards,
            "truncated": [sample.status is SampleStatus.TRUNCATED for sample in result.samples],
            "samples": result.samples,
        }
        for name, result in results.items()
    }
    if not scalars:  # a custom function that evaluated nothing
        return {}
    function = resolve(path, EvalRolloutLog)
    after: dict[str, Any] = {}
    builtin = {name: value for part in scalars.values() for name, value in part.items()}
    with naming("--custom-eval-rollout-log-function-path", path):
        replaced = function(rollout_id, hook_args, data, after)
    if replaced:
        scalars = {name: {f"eval/{name}": scalars[name][f"eval/{name}"]} for name in scalars}
    reported = {name: value for part in scalars.values() for name, value in part.items()}
    added = _added(f"--custom-eval-rollout-log-function-path {path}", after, {}, reported, builtin)
    last = next(reversed(scalars))  # added metrics belong to no set: they are reported with the last one
    return {**scalars, last: scalars[last] | added}


def _added(
    function_name: str,
    after: Mapping[str, Any],
    before: Mapping[str, float],
    reported: Mapping[str, float],
    builtin: Mapping[str, float],
) -> dict[str, float]:
    """The metrics that a log function added or changed: the difference from `before` to `after`.

    `builtin` are slimrl's metrics, `reported` those of them that slimrl reports: the function may use the other names.
    Raises HookFailedError for a value that is not a number, and for a name that slimrl reports itself.
    """
    added = {}
    for name, value in after.items():
        if name in before and value is before[name]:
            continue
        try:
            added[name] = plain_number(value)
        except TypeError as error:
            raise HookFailedError(
                f"{function_name} added the metric {name!r} with the value {value!r}: use a number"
            ) from error
        if name not in before and (name in reported or (name not in builtin and is_known(name))):
            raise HookFailedError(
                f"{function_name} added the metric {name!r}, a name that slimrl uses itself (docs/metrics.md): use"
                " another name"
            )
    return added
