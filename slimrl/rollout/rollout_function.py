"""The rollout function: calling a custom one, what it returns, and custom log functions.

`--rollout-function-path` names an ordinary function, which runs in a thread of its own while the event loop continues.
With the keyword argument `generator` it can call the built-in rollout (`generate_rollout`). `RolloutOutput` is what a
rollout returns: its groups, and the metrics that the samples alone do not give.

Custom log functions run in the rollout manager's process when a rollout or evaluation is complete. Mean rewards are
reported whatever they return, because the run's summary needs them. What they add to `extra_metrics` is reported under
its name, or rejected by name where slimrl reports that name itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import EvalRolloutLog, HookFailedError, RolloutFunction, RolloutLog, accepted, naming, resolve
from slimrl.hooks.base import plain_number
from slimrl.observability.metrics import is_known
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.evaluate import EvalResult
from slimrl.rollout.generation.sample_tracker import begin_calls


@dataclasses.dataclass(frozen=True)
class RolloutOutput:
    """`--rollout-batch-size` groups sorted by index, and flat metrics by name.

    `data_state` is what a checkpoint must know of the data, where more is in flight than the data source knows of;
    None elsewhere, and where nothing is saved.
    `seconds` is how long its generation took, where the groups were in flight before it was asked for.
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
    """The built-in rollout for code that runs in another thread than the event loop."""

    def __init__(self, generator: Generator, loop: asyncio.AbstractEventLoop) -> None:
        self._generator = generator
        self._loop = loop
        self.failure: BaseException | None = None  # of the built-in rollout, which names itself

    def rollout(self, rollout_id: int, data_source: RolloutDataSource) -> RolloutOutput:
        """Generates one rollout and waits for it."""
        return self._wait(self._generator.builtin_rollout(rollout_id, data_source))

    def evaluation(self, rollout_id: int) -> dict[str, EvalResult]:
        """Evaluates every data set and waits for it."""
        return self._wait(self._generator.builtin_evaluation(rollout_id))

    def _wait(self, work: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseException as error:
            self.failure = error
            raise


def generate_rollout(
    args: Arguments,
    rollout_id: int,
    data_source: RolloutDataSource,
    *,
    evaluation: bool = False,
    generator: BlockingGenerator | None = None,
) -> RolloutOutput | dict[str, EvalResult]:
    """The built-in rollout or evaluation; `generator` is what the calling rollout function was given."""
    if generator is None:
        raise ValueError(
            "generate_rollout was called without generator: take the keyword argument `generator` in your rollout"
            " function and pass it on"
        )
    return generator.evaluation(rollout_id) if evaluation else generator.rollout(rollout_id, data_source)


async def call_rollout_function(
    named: tuple[str, str],
    function: Callable[..., Any],
    args: Arguments,
    rollout_id: int,
    data_source: RolloutDataSource | None,
    *,
    evaluation: bool,
    tokenizer: Any,
    generator: Generator | None,
) -> Any:
    """Calls a rollout function in a thread and returns what it returns.

    It is given `generator` (None where there are no engines) and `tokenizer` where it takes them. Raises
    HookFailedError, `named` by its flag and path, where it fails, and what the built-in rollout raises as it is.
    """
    blocking = None if generator is None else BlockingGenerator(generator, asyncio.get_running_loop())
    begin_calls(args)
    told = accepted(function, RolloutFunction, generator=blocking, tokenizer=tokenizer)

    def call() -> Any:
        # in the thread: a StopIteration that leaves it would never reach who waits
        with naming(*named, passes=lambda error: blocking is not None and error is blocking.failure):
            return function(args, rollout_id, data_source, evaluation=evaluation, **told)

    return await asyncio.to_thread(call)


async def rollout_without_engines(
    args: Arguments, rollout_id: int, data_source: RolloutDataSource, tokenizer: Any
) -> RolloutOutput:
    """One rollout by a `--rollout-function-path` that asks no engine (`--debug-train-only`)."""
    function = resolve(args.rollout_function_path, RolloutFunction)
    data_source.begin_rollout(rollout_id)
    named = "--rollout-function-path", args.rollout_function_path
    returned = await call_rollout_function(
        named, function, args, rollout_id, data_source, evaluation=False, tokenizer=tokenizer, generator=None
    )
    return checked_output(returned, args)


def checked_output(returned: Any, args: Arguments) -> RolloutOutput:
    """A training rollout from what `--rollout-function-path` returned, as `rollout_output` reads it.

    Raises HookFailedError, too, where its samples make other optimizer steps than the flags say.
    """
    output = rollout_output(returned, args.rollout_function_path)
    if args.custom_convert_samples_to_train_data_path is None and args.global_batch_size:
        _require_steps(output, args)
    return output


def rollout_output(returned: Any, path: str) -> RolloutOutput:
    """A training rollout from what a function returned: an object with groups (or `samples`) and metrics, or a list.

    Raises TypeError where it is something else, HookFailedError where a metric is no number.
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


def _require_steps(output: RolloutOutput, args: Arguments) -> None:
    samples = sum(map(len, output.groups))
    most = args.rollout_batch_size * args.n_samples_per_prompt
    if samples > most or samples % args.global_batch_size:
        raise HookFailedError(
            f"--rollout-function-path {args.rollout_function_path} returned {samples} samples, and a rollout has at"
            f" most {most} (--rollout-batch-size x --n-samples-per-prompt), in steps of --global-batch-size"
            f" {args.global_batch_size}: return as many, or give --custom-convert-samples-to-train-data-path, a"
            " function that makes the rows to train on"
        )


def eval_results(returned: Any, path: str) -> dict[str, EvalResult]:
    """Evaluation results from what a function returned: by name an EvalResult, or a dict of rewards and samples.

    Raises TypeError where it is something else, HookFailedError where a reward is no finite number.
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
                f"--rollout-function-path {path} returned the metric {name!r} with {value!r}: give it a number"
            ) from error
    return plain


def _plain_rewards(name: str, rewards: Sequence[Any], path: str) -> list[float]:
    plain = []
    for place, value in enumerate(rewards):
        try:
            plain.append(plain_number(value))
        except TypeError:
            plain.append(math.nan)
        if not math.isfinite(plain[-1]):
            raise HookFailedError(
                f"the evaluation function {path} returned {value!r} as reward {place} of {name!r}: give finite numbers"
            )
    return plain


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and all(isinstance(sample, Sample) for sample in group)


_REWARD = "rollout/raw_reward"


def reported_metrics(
    args: Arguments,
    rollout_id: int,
    samples: list[Sample],
    metrics: dict[str, float],
    extra_metrics: dict[str, float],
    seconds: float,
) -> dict[str, float]:
    """What slimrl reports of `metrics`; `extra_metrics` are those among them that the rollout itself brought."""
    path = args.custom_rollout_log_function_path
    if path is None:
        return metrics
    function = resolve(path, RolloutLog)
    told = dict(extra_metrics)
    with naming("--custom-rollout-log-function-path", path):
        replaced = function(rollout_id, args, samples, told, seconds)
    own = {_REWARD: metrics[_REWARD]} if replaced else metrics
    return own | _added(f"--custom-rollout-log-function-path {path}", told, extra_metrics, own, metrics)


def reported_scalars(args: Arguments, rollout_id: int, results: dict[str, EvalResult]) -> dict[str, dict[str, float]]:
    """What slimrl reports of each evaluation set, by its name."""
    scalars = {name: result.metrics() for name, result in results.items()}
    path = args.custom_eval_rollout_log_function_path
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
    if not scalars:  # a function of the user's that evaluated nothing
        return {}
    function = resolve(path, EvalRolloutLog)
    told: dict[str, Any] = {}
    everything = {name: value for part in scalars.values() for name, value in part.items()}
    with naming("--custom-eval-rollout-log-function-path", path):
        replaced = function(rollout_id, args, data, told)
    if replaced:
        scalars = {name: {f"eval/{name}": scalars[name][f"eval/{name}"]} for name in scalars}
    own = {name: value for part in scalars.values() for name, value in part.items()}
    added = _added(f"--custom-eval-rollout-log-function-path {path}", told, {}, own, everything)
    last = next(reversed(scalars))  # they belong to no set of their own
    return {**scalars, last: scalars[last] | added}


def _added(
    named: str,
    told: Mapping[str, Any],
    before: Mapping[str, float],
    own: Mapping[str, float],
    everything: Mapping[str, float],
) -> dict[str, float]:
    """What a function added to, or changed in, the metrics that it was told, which were `before`.

    `own` is what slimrl reports itself of `everything` that it could: names of the others are free.
    Raises HookFailedError for a value that is no number, and for a name under which slimrl reports something itself.
    """
    added = {}
    for name, value in told.items():
        if name in before and value is before[name]:
            continue
        try:
            added[name] = plain_number(value)
        except TypeError as error:
            raise HookFailedError(f"{named} added the metric {name!r} with {value!r}: give it a number") from error
        if name not in before and (name in own or (name not in everything and is_known(name))):
            raise HookFailedError(
                f"{named} added the metric {name!r}, which is a name of slimrl's own (docs/metrics.md): give it another"
            )
    return added
