"""Which reward judges a sample, and judging it: the user's function or a built-in grader, each within a time limit.

A grader without a verdict (time limit, crash) gives reward 0 and leaves its reason in
`sample.metadata["reward_failure"]`, which the metrics count; a failing user function is an error.
Created and closed by the rollout generator; `async_rm` is the door for user code.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.hooks import CustomReward, resolve
from slimrl.rollout.rm_hub import builtin
from slimrl.rollout.rm_hub.grader_pool import GraderFailure, GraderPool

logger = logging.getLogger(__name__)

REWARD_FAILURE_KEY = "reward_failure"
CUSTOM_TIME_LIMIT_S = 1800.0

_current_graders: contextvars.ContextVar[GraderPool] = contextvars.ContextVar("slimrl_graders")


@dataclasses.dataclass(frozen=True)
class RewardRule:
    """How the samples of one data set are judged; what a sample itself names goes first."""

    custom_rm_path: str | None
    rm_type: str | None

    def check(self, source: str) -> None:
        """Raises ValueError where the rule names an unknown built-in type, HookError where its function is no good."""
        if self.custom_rm_path is not None:
            resolve(self.custom_rm_path, CustomReward)
        if self.rm_type is not None and not builtin.is_builtin(self.rm_type):
            raise ValueError(f"{source}: {_unknown_type(self.rm_type)}")


class RewardScorer:
    """Judges samples of any data set; owns the processes of the built-in graders."""

    def __init__(
        self,
        args: Arguments,
        *,
        graders: GraderPool | None = None,
        custom_time_limit_s: float = CUSTOM_TIME_LIMIT_S,
    ) -> None:
        self._args = args
        self._graders = graders or GraderPool()
        self._custom_time_limit_s = custom_time_limit_s
        self._functions: dict[str, CustomReward] = {}

    async def score(self, sample: Sample, rule: RewardRule) -> float | dict[str, Any]:
        """The reward of a finished sample.

        The order: the sample's custom_rm_path, the rule's, the sample's metadata.rm_type, the rule's rm_type.
        Raises ValueError where none is given or the label is unfit, TimeoutError where a user function is too slow,
        and whatever a user function raises.
        """
        path = sample.custom_rm_path or rule.custom_rm_path
        if path is not None:
            return await self._score_by_function(path, sample)
        rm_type = sample.metadata.get("rm_type") or rule.rm_type
        if rm_type is None:
            raise ValueError("no reward is chosen: give --rm-type, --custom-rm-path or metadata.rm_type in the data")
        if not builtin.is_builtin(rm_type):
            raise ValueError(_unknown_type(rm_type))
        sample.metadata.pop(REWARD_FAILURE_KEY, None)
        try:
            return await builtin.grade(rm_type, sample, self._graders)
        except GraderFailure as error:
            logger.warning("sample %s: no verdict on its answer, reward 0: %s", sample.index, error)
            sample.metadata[REWARD_FAILURE_KEY] = str(error)
            return 0.0

    def close(self) -> None:
        """Ends the graders."""
        self._graders.close()

    async def _score_by_function(self, path: str, sample: Sample) -> float | dict[str, Any]:
        if path not in self._functions:
            self._functions[path] = resolve(path, CustomReward)
        _current_graders.set(self._graders)
        try:
            async with asyncio.timeout(self._custom_time_limit_s) as limit:
                reward = await self._functions[path](self._args, sample)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"the reward function {path} took more than {self._custom_time_limit_s:g} s: give it a limit of its own"
            ) from error
        if isinstance(reward, bool | int | float | dict):
            return reward if isinstance(reward, dict) else float(reward)
        try:
            return float(reward)  # numpy and torch scalars
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the reward function {path} returned {reward!r}: it must return a number or a dict"
            ) from error


async def async_rm(args: Arguments, sample: Sample) -> float:
    """The built-in reward of `sample`, by its metadata.rm_type or `--rm-type`; for reward functions of users.

    Called during a rollout it uses the rollout's graders; anywhere else it starts graders for this one call.
    """
    graders = _current_graders.get(None)
    scorer = RewardScorer(args, graders=graders)
    try:
        return await scorer.score(dataclasses.replace(sample, custom_rm_path=None), RewardRule(None, args.rm_type))
    finally:
        if graders is None:
            scorer.close()


def _unknown_type(rm_type: str) -> str:
    known = ", ".join(builtin.builtin_types())
    return f"the reward type {rm_type!r} is not known: use {known}, any of them with the prefix boxed_, or a function"
