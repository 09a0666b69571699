"""What a user's reward function returned, checked; and the time it may take."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from typing import Any

from slimrl.rollout.plain_numbers import plain_number


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
