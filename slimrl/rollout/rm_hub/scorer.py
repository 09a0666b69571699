"""Scores samples: by a custom function, a built-in grader or a reward service, each within a time limit.

An answer without a score (time limit, crash of the grader) counts as wrong. The reason is stored in
`sample.metadata["reward_failure"]`, which the metrics count. If too many answers of a rollout have no score
(`--rm-failure-limit`), the run ends before it trains on them. A failing custom function or reward service is an error.

The rollout generator owns the scorer. Custom code calls it through `async_rm`. Results of custom functions are checked.
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
from slimrl.data.reward_registry import GradedBy
from slimrl.data.sample import Sample
from slimrl.hooks import CustomReward, GroupReward, resolve
from slimrl.hooks.contracts import RunArguments
from slimrl.hooks.loader import plain_number
from slimrl.rollout.async_utils import gather_or_cancel
from slimrl.rollout.generation.sample_tracker import RouterAccess
from slimrl.rollout.rm_hub import rule_reward
from slimrl.rollout.rm_hub.grader_pool import GraderFailure, GraderPool
from slimrl.rollout.rm_hub.rule_reward import Reward

if TYPE_CHECKING:
    from slimrl.rollout.rm_hub.process_reward import ProcessRewardModel
    from slimrl.rollout.rm_hub.remote import RemoteReward
    from slimrl.rollout.rm_hub.reward_model import RewardModel
    from slimrl.rollout.rm_hub.teacher import NamedTeachers, ServedTeacher


async def with_timeout(time_limit_s: float, path: str, call: Awaitable[Any]) -> Any:
    """Awaits a call of the function at `path`. Raises TimeoutError naming it after `time_limit_s`."""
    try:
        async with asyncio.timeout(time_limit_s) as limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(
            f"the reward function {path} took more than {time_limit_s:g} s: set a shorter timeout within it"
        ) from error


def as_reward(path: str, returned: Any) -> float | dict[str, Any]:
    """One reward: a dict unchanged, a finite number as a float. Raises ValueError for anything else."""
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
    """One reward per sample of a group. Raises ValueError if their number differs."""
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
    """The reward of one dataset's samples; a sample's own `custom_rm_path` or metadata.rm_type takes precedence."""

    custom_rm_path: str | None
    rm_type: str | None

    def check(self, source: str) -> None:
        """Raises ValueError for an unknown built-in type, HookError if the custom function cannot be used."""
        if self.custom_rm_path is not None:
            resolve(self.custom_rm_path, CustomReward)
        if self.rm_type is not None and not rule_reward.is_builtin(self.rm_type):
            raise ValueError(f"{source}: {_unknown_type(self.rm_type)}")


class RewardScorer:
    """Scores samples of any dataset; owns the grader processes and the connections to reward services."""

    def __init__(
        self,
        graders: GraderPool,
        router: RouterAccess,
        hook_args: RunArguments,
        *,
        remote: RemoteReward | None = None,
        model: RewardModel | None = None,
        of_tokens: ServedTeacher | NamedTeachers | ProcessRewardModel | None = None,
        custom_time_limit_s: float = CUSTOM_TIME_LIMIT_S,
    ) -> None:
        """`router` and `hook_args` are for custom functions: the router that they may call, and their arguments.

        `of_tokens` gives numbers to the tokens of training samples: a teacher on servers, or a process reward model.
        """
        self._graders = graders
        self._router = router
        self._hook_args = hook_args
        self._remote = remote
        self._model = model
        self._of_tokens = of_tokens
        self._custom_time_limit_s = custom_time_limit_s
        self._functions: dict[tuple[str, type], Callable[..., Any]] = {}

    @classmethod
    def from_args(
        cls,
        args: Arguments,
        *,
        graders: GraderPool | None = None,
        custom_time_limit_s: float = CUSTOM_TIME_LIMIT_S,
    ) -> RewardScorer:
        """The scorer for the flags."""
        remote = model = None
        of_tokens: ServedTeacher | NamedTeachers | ProcessRewardModel | None = None
        if args.has_served_teacher:  # --rm-url is its server's address
            from slimrl.rollout.rm_hub.teacher import NamedTeachers, ServedTeacher  # import an HTTP client

            of_tokens = NamedTeachers.from_args(args) or ServedTeacher.from_args(args)
        elif args.rm_url is not None and args.rm_step_separator is not None:
            from slimrl.rollout.rm_hub.process_reward import ProcessRewardModel  # imports tokenizers

            of_tokens = ProcessRewardModel.from_args(args)
        elif args.rm_url is not None and args.rm_model is not None:  # --rm-url is its server's address
            from slimrl.rollout.rm_hub.reward_model import RewardModel  # imports tokenizers and an HTTP client

            model = RewardModel.from_args(args)
        elif args.rm_url is not None:
            from slimrl.rollout.rm_hub.remote import RemoteReward  # imports an HTTP client, which few runs need

            remote = RemoteReward(args.rm_url)
        return cls(
            graders or GraderPool(time_limit_s=args.rm_time_limit, size=args.rm_num_graders),
            RouterAccess.from_args(args),
            args,
            remote=remote,
            model=model,
            of_tokens=of_tokens,
            custom_time_limit_s=custom_time_limit_s,
        )

    async def score(self, sample: Sample, rule: RewardConfig) -> Reward:
        """The reward of a finished sample.

        Precedence: the sample's custom_rm_path, the rule's, the sample's metadata.rm_type, the rule's rm_type.
        Raises ValueError if none is set or the label is invalid, TimeoutError if a custom function is too slow,
        RemoteRewardError if the reward service fails, and any exception of a custom function.
        """
        path = sample.custom_rm_path or rule.custom_rm_path
        if path is None:
            return await self._score_by_rule(sample, rule)
        function = self._function(path, CustomReward)
        return as_reward(path, await self._run(path, function(self._hook_args, sample)))

    async def score_group(self, samples: list[Sample], rule: RewardConfig) -> list[Reward]:
        """The rewards of a group in the samples' order (`--group-rm`), with one call per custom function.

        Raises the same errors as `score`, and ValueError if a function does not return one reward per sample.
        """
        by_path: dict[str | None, list[int]] = {}
        for index, sample in enumerate(samples):
            by_path.setdefault(sample.custom_rm_path or rule.custom_rm_path, []).append(index)
        rewards: dict[int, Reward] = {}
        for path, indices in by_path.items():
            part = [samples[index] for index in indices]
            if path is None:
                scored = await gather_or_cancel(self._score_by_rule(sample, rule) for sample in part)
            else:
                function = self._function(path, GroupReward)
                scored = as_rewards(path, await self._run(path, function(self._hook_args, part)), len(part))
            rewards.update(zip(indices, scored, strict=True))
        return [rewards[index] for index in range(len(samples))]

    @property
    def column_of_tokens(self) -> str | None:
        """The column that a served model sets, of `--opd-type sglang` or `--rm-step-separator`; None without one."""
        return None if self._of_tokens is None else self._of_tokens.column

    async def score_tokens(self, sample: Sample) -> None:
        """Sets that column of a finished sample without it. Raises RemoteRewardError."""
        if self._of_tokens is not None and sample.column(self._of_tokens.column) is None:
            await self._of_tokens.fill(sample)

    def move_server(self, old: str, new: str) -> None:
        """The replacement of a served model's server at `old` is at `new`."""
        for served in (self._model, self._of_tokens):
            if served is not None:
                served.move(old, new)

    def begin(self) -> None:
        """Makes `async_rm` use this scorer in the current task, and in tasks that it starts."""
        _current_scorer.set(self)
        self._router.begin_calls()

    def close(self) -> None:
        """Stops the graders and closes the connections."""
        self._graders.close()
        if self._remote is not None:
            self._remote.close()
        if self._model is not None:
            self._model.close()
        if self._of_tokens is not None:
            self._of_tokens.close()

    def _function(self, path: str, contract: type) -> Callable[..., Any]:
        if (path, contract) not in self._functions:
            self._functions[path, contract] = resolve(path, contract)
        return self._functions[path, contract]

    async def _run(self, path: str, call: Any) -> Any:
        """Awaits a custom function within the time limit; it may call `async_rm`."""
        self.begin()
        return await with_timeout(self._custom_time_limit_s, path, call)

    async def _score_by_rule(self, sample: Sample, rule: RewardConfig) -> Reward:
        rm_type = sample.metadata.get("rm_type") or rule.rm_type
        if rm_type is None:
            raise ValueError("no reward is set: give --rm-type, --custom-rm-path or metadata.rm_type in the data")
        if not rule_reward.is_builtin(rm_type):
            raise ValueError(_unknown_type(rm_type))
        sample.metadata.pop(REWARD_FAILURE_KEY, None)
        by = rule_reward.graded_by(rm_type)
        if by is GradedBy.REWARD_MODEL:
            return await self._score_by_model(sample)
        if by is GradedBy.SERVICE:
            return await self._score_by_service(rm_type, sample)
        try:
            return await rule_reward.grade(rm_type, sample, self._graders)
        except GraderFailure as error:
            logger.warning("sample %s: grading failed, scored as wrong: %s", sample.index, error)
            sample.metadata[REWARD_FAILURE_KEY] = str(error)
            return rule_reward.wrong_answer_reward(rm_type)

    async def _score_by_model(self, sample: Sample) -> float:
        if self._model is None:
            raise ValueError(
                "the reward type reward_model needs a server: give --rm-model, and --rm-url if slimrl does not start"
                " the servers, as outside a run"
            )
        return await self._model.reward(sample)

    async def _score_by_service(self, rm_type: str, sample: Sample) -> Reward:
        if self._remote is None:
            raise ValueError(f"the reward type {rm_type} needs a service: give its address in --rm-url")
        return await self._remote.reward(sample, rule_reward.scored_text(rm_type, sample.response))


async def async_rm(args: Arguments, sample: Sample) -> Reward:
    """The built-in reward of `sample`, by its metadata.rm_type or `--rm-type`; for custom reward functions.

    During a rollout it uses the rollout's graders; otherwise it starts graders for this call.
    """
    current = _current_scorer.get(None)
    scorer = current or RewardScorer.from_args(args)
    try:
        return await scorer.score(dataclasses.replace(sample, custom_rm_path=None), RewardConfig(None, args.rm_type))
    finally:
        if current is None:
            scorer.close()


async def batched_async_rm(args: Arguments, samples: list[Sample]) -> list[Reward]:
    """`async_rm` of several samples concurrently, in their order."""
    current = _current_scorer.get(None)
    scorer = current or RewardScorer.from_args(args)
    rule = RewardConfig(None, args.rm_type)
    plain = [dataclasses.replace(sample, custom_rm_path=None) for sample in samples]
    try:
        return await gather_or_cancel(scorer.score(sample, rule) for sample in plain)
    finally:
        if current is None:
            scorer.close()


def _unknown_type(rm_type: str) -> str:
    known = ", ".join(rule_reward.builtin_types())
    return (
        f"the reward type {rm_type!r} is unknown: use {known}, any of the rules with the prefix boxed_, or a function"
    )


class TooManyGraderFailuresError(RuntimeError):
    """At least the fraction `--rm-failure-limit` of a rollout's answers has no score."""


def check_failure_rate(samples: Sequence[Sample], limit: float, what: str) -> None:
    """Raises TooManyGraderFailuresError if at least the fraction `limit` of the samples of `what` has no score."""
    reasons = [sample.metadata[REWARD_FAILURE_KEY] for sample in samples if REWARD_FAILURE_KEY in sample.metadata]
    if not reasons or len(reasons) < limit * len(samples):
        return
    most_common = "; ".join(f"{count} times: {reason}" for reason, count in Counter(reasons).most_common(3))
    raise TooManyGraderFailuresError(
        f"{what}: grading failed on {len(reasons)} of {len(samples)} responses, and --rm-failure-limit"
        f" {limit:g} ends the run ({most_common}); fix the grader or the data, raise --rm-time-limit for timeouts, or"
        " raise the limit"
    )
