"""Samples in which a function of the user's raised: they end the run, or are skipped up to a limit.

Promises that only functions of the user's are forgiven, never an engine, a grader, a reward service or slimrl itself,
also where such a function met its failure, and that every failure that is skipped is counted and logged.
Used by `Flights`.
"""

from __future__ import annotations

import logging

from slimrl.arguments import Arguments
from slimrl.rollout.errors import ServiceError

logger = logging.getLogger(__name__)


class SampleError(RuntimeError):
    """Generation or reward of one sample failed; the message names the sample, the prompt and the cause.

    `by_hook` tells whether a function of the user's is to blame.
    """

    def __init__(self, text: str, *, by_hook: bool = False) -> None:
        super().__init__(text)
        self.by_hook = by_hook


class FailedSamples:
    """Counts the samples that were skipped since the rollout before."""

    def __init__(self, args: Arguments) -> None:
        """By `--skip-failed-samples` and `--max-failed-samples`."""
        self._skips = args.skip_failed_samples
        self._limit = args.max_failed_samples
        self.count = 0

    def skip(self, error: SampleError) -> None:
        """Counts a failure. Raises it where it may not be skipped, and with the limit where there are too many."""
        if not (self._skips and error.by_hook):
            raise error
        self.count += 1
        if self.count > self._limit:
            raise SampleError(
                f"{error}\nit is failure number {self.count} in this rollout, more than --max-failed-samples"
                f" {self._limit}: mend the function, or allow more"
            ) from error
        logger.warning("its group is left out (--skip-failed-samples): %s", error)

    def take_metrics(self) -> dict[str, float]:
        """The count, where failures may be skipped; the next rollout's begins."""
        count, self.count = self.count, 0
        return {"rollout/failed_samples": float(count)} if self._skips else {}


def is_own_fault(error: BaseException) -> bool:
    """Whether a `ServiceError` or a lack of memory is the error, led to it, or is in a group of errors that did."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, ServiceError | MemoryError):
            return True
        seen.add(id(one))
        pending += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return False
