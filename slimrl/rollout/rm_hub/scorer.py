"""Scores samples: by a custom function, a built-in grader or a reward service, each within a time limit.

A grader that gives no score (time limit, crash) counts as a wrong answer and leaves its reason in
`sample.metadata["reward_failure"]`, which the metrics count. Where too many answers of a rollout have none
(`--rm-failure-limit`), the run ends before it trains on them. A failing custom function or reward service is an error.

The rollout generator owns the scorer. Custom code calls it by `async_rm`. What a custom function returns is checked.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from slimrl.arguments import Arguments
from slimrl.data.reward_table import GradedBy
from slimrl.data.sample import Sample
from slimrl.hooks import CustomReward, GroupReward, resolve
from slimrl.hooks.base import plain_number
from slimrl.rollout.async_utils import gather_or_cancel
from slimrl.rollout.generation.sample_tracker import begin_calls
from slimrl.rollout.rm_hub import registry
from slimrl.rollout.rm_hub.grader_pool import GraderFailure, GraderPool
from slimrl.rollout.rm_hub.registry import Reward

if TYPE_CHECKING:
    from slimrl.rollout.rm_hub.remote import RemoteReward
    from slimrl.rollout.rm_hub.reward_model import RewardModel


async def within(time_limit_s: float, path: str, call: Awaitable[Any]) -> Any:
    """What the call of the function at `path` returns. Raises TimeoutError naming it where it takes longer."""
    try:
        async with asyncio.timeout(time_limit_s) as limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(
            f"the reward function {path} took more than {time_limit_s:g} s: give it a limit of its own"
        ) from error


def as_reward(path: str, returned: Any) -> float | dict[str, Any]:
    """One reward: a dict as it is, any other finite number as a float. Raises ValueError for anything else."""
    if isinstance(returned, dict):
        return returned
    try:
        reward = plain_number(returned)
    except TypeError as error:
        raise ValueError(
            f"the reward function {path} returned {returned!r}: it must return a number or a dict"
        ) from error
    if not math.isfinite(reward):
        raise ValueError(f"the reward function {path} returned {reward}: it must return a finite number")
    return reward


def as_rewards(path: str, returned: Any, count: int) -> list[float | dict[str, Any]]:
    """One reward per sample of a group. Raises ValueError where there are more, fewer or none."""
    many = isinstance(returned, Sequence) and not isinstance(returned, str | bytes) or hasattr(returned, "tolist")
    if not many or len(returned) != count:
        shown = f"{len(returned)} rewards" if many else repr(returned)
        raise ValueError(
            f"the reward function {path} returned {shown} for a group of {count} samples: with --group-rm it must"
            " return a list of one reward per sample"
        )
    return [as_reward(path, reward) for reward in returned]


logger = logging.getLogger(__name__)

REWARD_FAILURE_KEY = "reward_failure"
CUSTOM_TIME_LIMIT_S = 1800.0

_current_scorer: contextvars.ContextVar[RewardScorer] = contextvars.ContextVar("slimrl_scorer")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """How the samples of one data set are judged; what a sample itself names goes first."""

    custom_rm_path: str | None
    rm_type: str | None

    def check(self, source: str) -> None:
        """Raises ValueError where the rule names an unknown built-in type, HookError where its function is no good."""
        if self.custom_rm_path is not None:
            resolve(self.custom_rm_path, CustomReward)
        if self.rm_type is not None and not registry.is_builtin(self.rm_type):
            raise ValueError(f"{source}: {_unknown_type(self.rm_type)}")


class RewardScorer:
    """Judges samples of any data set; owns the processes of the built-in graders and the way to a reward service."""

    def __init__(
        self,
        args: Arguments,
        *,
        graders: GraderPool | None = None,
        custom_time_limit_s: float = CUSTOM_TIME_LIMIT_S,
    ) -> None:
        self._args = args
        self._graders = graders or GraderPool(time_limit_s=args.rm_time_limit, size=args.rm_num_graders)
        # with a reward model --rm-url is its server's address
        self._remote = None if args.rm_url is None or args.rm_model is not None else _remote_reward(args.rm_url)
        self._model = _reward_model(args) if args.rm_model is not None and args.rm_url is not None else None
        self._custom_time_limit_s = custom_time_limit_s
        self._functions: dict[tuple[str, type], Callable[..., Any]] = {}

    async def score(self, sample: Sample, rule: RewardConfig) -> Reward:
        """The reward of a finished sample.

        The order: the sample's custom_rm_path, the rule's, the sample's metadata.rm_type, the rule's rm_type.
        Raises ValueError where none is given or the label is unfit, TimeoutError where a user function is too slow,
        RemoteRewardError where the reward service fails, and whatever a user function raises.
        """
        path = sample.custom_rm_path or rule.custom_rm_path
        if path is None:
            return await self._score_by_rule(sample, rule)
        function = self._function(path, CustomReward)
        return as_reward(path, await self._run(path, function(self._args, sample)))

    async def score_group(self, samples: list[Sample], rule: RewardConfig) -> list[Reward]:
        """The rewards of a group in the samples' order (`--group-rm`): one call of each user function that judges any.

        Raises what `score` raises, and ValueError where a function does not return one reward per sample.
        """
        by_path: dict[str | None, list[int]] = {}
        for place, sample in enumerate(samples):
            by_path.setdefault(sample.custom_rm_path or rule.custom_rm_path, []).append(place)
        rewards: dict[int, Reward] = {}
        for path, places in by_path.items():
            part = [samples[place] for place in places]
            if path is None:
                judged = await gather_or_cancel(self._score_by_rule(sample, rule) for sample in part)
            else:
                function = self._function(path, GroupReward)
                judged = as_rewards(path, await self._run(path, function(self._args, part)), len(part))
            rewards.update(zip(places, judged, strict=True))
        return [rewards[place] for place in range(len(samples))]

    def begin(self) -> None:
        """From now on `async_rm` judges by this scorer in the current task, and in those that it begins."""
        _current_scorer.set(self)
        begin_calls(self._args)

    def close(self) -> None:
        """Ends the graders and the connections."""
        self._graders.close()
        if self._remote is not None:
            self._remote.close()
        if self._model is not None:
            self._model.close()

    def _function(self, path: str, contract: type) -> Callable[..., Any]:
        if (path, contract) not in self._functions:
            self._functions[path, contract] = resolve(path, contract)
        return self._functions[path, contract]

    async def _run(self, path: str, call: Any) -> Any:
        """A user function's answer within the time limit; it may ask `async_rm`."""
        self.begin()
        return await within(self._custom_time_limit_s, path, call)

    async def _score_by_rule(self, sample: Sample, rule: RewardConfig) -> Reward:
        rm_type = sample.metadata.get("rm_type") or rule.rm_type
        if rm_type is None:
            raise ValueError("no reward is chosen: give --rm-type, --custom-rm-path or metadata.rm_type in the data")
        if not registry.is_builtin(rm_type):
            raise ValueError(_unknown_type(rm_type))
        sample.metadata.pop(REWARD_FAILURE_KEY, None)
        by = registry.graded_by(rm_type)
        if by is GradedBy.REWARD_MODEL:
            return await self._score_by_model(sample)
        if by is GradedBy.SERVICE:
            return await self._score_by_service(rm_type, sample)
        try:
            return await registry.grade(rm_type, sample, self._graders)
        except GraderFailure as error:
            logger.warning("sample %s: no score on its answer, scored as wrong: %s", sample.index, error)
            sample.metadata[REWARD_FAILURE_KEY] = str(error)
            return registry.wrong(rm_type)

    async def _score_by_model(self, sample: Sample) -> float:
        if self._model is None:
            raise ValueError(
                "the reward type reward_model asks a server, and there is none: give --rm-model, and --rm-url too where"
                " slimrl starts no servers, as outside a run"
            )
        return await self._model.reward(sample)

    async def _score_by_service(self, rm_type: str, sample: Sample) -> Reward:
        if self._remote is None:
            raise ValueError(f"the reward type {rm_type} asks a service, and --rm-url is not given: give its address")
        return await self._remote.reward(sample, registry.judged_text(rm_type, sample.response))


async def async_rm(args: Arguments, sample: Sample) -> Reward:
    """The built-in reward of `sample`, by its metadata.rm_type or `--rm-type`; for reward functions of users.

    Called during a rollout it uses the rollout's graders; anywhere else it starts graders for this one call.
    """
    current = _current_scorer.get(None)
    scorer = current or RewardScorer(args)
    try:
        return await scorer.score(dataclasses.replace(sample, custom_rm_path=None), RewardConfig(None, args.rm_type))
    finally:
        if current is None:
            scorer.close()


async def batched_async_rm(args: Arguments, samples: list[Sample]) -> list[Reward]:
    """`async_rm` of several samples at once, in their order."""
    current = _current_scorer.get(None)
    scorer = current or RewardScorer(args)
    rule = RewardConfig(None, args.rm_type)
    plain = [dataclasses.replace(sample, custom_rm_path=None) for sample in samples]
    try:
        return await gather_or_cancel(scorer.score(sample, rule) for sample in plain)
    finally:
        if current is None:
            scorer.close()


def _remote_reward(url: str) -> RemoteReward:
    from slimrl.rollout.rm_hub.remote import RemoteReward  # brings an HTTP client, which few runs need here

    return RemoteReward(url)


def _reward_model(args: Arguments) -> RewardModel:
    from slimrl.rollout.rm_hub.reward_model import RewardModel  # brings a tokenizer and an HTTP client

    return RewardModel.from_args(args)


def _unknown_type(rm_type: str) -> str:
    known = ", ".join(registry.builtin_types())
    return (
        f"the reward type {rm_type!r} is not known: use {known}, any of the rules with the prefix boxed_, or a function"
    )


class TooManyGraderFailuresError(RuntimeError):
    """At least the allowed share of a rollout's answers got no score."""


def require_verdicts(samples: Sequence[Sample], limit: float, what: str) -> None:
    """Raises TooManyGraderFailuresError where at least the share `limit` of the samples of `what` got none, with the
    reasons.
    """
    reasons = [sample.metadata[REWARD_FAILURE_KEY] for sample in samples if REWARD_FAILURE_KEY in sample.metadata]
    if not reasons or len(reasons) < limit * len(samples):
        return
    commonest = "; ".join(f"{count} times: {reason}" for reason, count in Counter(reasons).most_common(3))
    raise TooManyGraderFailuresError(
        f"{what}: the graders came to no score on {len(reasons)} of {len(samples)} answers, and --rm-failure-limit"
        f" {limit:g} ends the run there ({commonest}); fix the grader or the data, raise --rm-time-limit where time"
        " was short, or raise the limit"
    )
