"""The built-in rollout function, and how a function of the user's takes its place (`--rollout-function-path`).

A rollout function is an ordinary one: it runs in a thread of its own while the event loop goes on. One that
takes the keyword argument `generator` may hand it to `generate_rollout` here to build on the built-in rollout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.hooks import HookFailedError, RolloutFunction, accepted, naming, resolve
from slimrl.rollout.data_source import RolloutDataSource
from slimrl.rollout.evaluate import EvalResult
from slimrl.rollout.making import begin_calls
from slimrl.rollout.output import RolloutOutput
from slimrl.rollout.plain_numbers import plain_number


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
