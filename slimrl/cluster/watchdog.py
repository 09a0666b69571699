"""Patience with a limit: says of a long wait what is awaited, by whom and where each stands, and may end it.

Promises that asking never hangs: who does not answer within seconds is named as that. Used by the supervisor in every
wait of the driver; what to say is told by whoever waits.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError

from slimrl.arguments import Arguments

logger = logging.getLogger("slimrl")

ANSWER_TIMEOUT_S = 5.0


class WaitedTooLongError(RuntimeError):
    """A wait reached --watchdog-limit-seconds; the message says what was awaited and where everybody stood."""


@dataclasses.dataclass(frozen=True)
class Awaited:
    """What a wait is for: "train of rollout 7".

    `describe(places)` says where those stand whose calls, at these places of the list that is waited for, have not
    returned.
    """

    what: str
    describe: Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True)
class Patience:
    """The flags of the watchdog."""

    report_after_s: float
    limit_s: float | None

    @classmethod
    def from_args(cls, args: Arguments) -> Patience:
        """--watchdog-report-seconds and --watchdog-limit-seconds."""
        return cls(args.watchdog_report_seconds, args.watchdog_limit_seconds)


class Wait:
    """One wait: `look` as often as you like, at least when `remaining` seconds have passed."""

    def __init__(self, patience: Patience, awaited: Awaited, bystanders: Callable[[], str] = lambda: "") -> None:
        """`bystanders` says what keeps those waiting that are waited for, as far as others know it, or ""."""
        self._bystanders = bystanders
        self._patience = patience
        self._awaited = awaited
        self._started = time.monotonic()
        self._next_report_s = patience.report_after_s

    def remaining(self) -> float | None:
        """Seconds until `look` has something to do; None for ever."""
        times = [time_s for time_s in (self._next_report_s, self._patience.limit_s) if time_s]
        return max(min(times) - self._waited(), 0.0) if times else None

    def look(self, places: Sequence[int]) -> None:
        """Reports where those at `places` stand when it is time, and again after twice as long.

        Raises WaitedTooLongError with the report when the limit is reached.
        """
        waited, limit = self._waited(), self._patience.limit_s
        too_long = limit is not None and waited >= limit
        if not too_long and (not self._next_report_s or waited < self._next_report_s):
            return
        others = self._bystanders()
        report = f"waiting {waited:.0f} s for {self._awaited.what}: {self._awaited.describe(places)}"
        report += f"; {others}" if others else ""
        if too_long:
            raise WaitedTooLongError(f"{report}; the run ends (--watchdog-limit-seconds {limit:g})")
        logger.warning("%s", report)
        self._next_report_s *= 2

    def _waited(self) -> float:
        return time.monotonic() - self._started


def answers(refs: Sequence[ObjectRef]) -> list[Any | None]:
    """What each call returned; None where it does not return within a few seconds, or the actor is dead."""
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=ANSWER_TIMEOUT_S)
    return [_answer(ref) if ref in ready else None for ref in refs]


def _answer(ref: ObjectRef) -> Any | None:
    try:
        return ray.get(ref)
    except RayActorError:  # the watch over it says so, with the cause
        return None
