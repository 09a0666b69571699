"""One outcome for all trainer ranks: a step of a push succeeds on every rank or raises the same error on every rank.

So all of them take the same way after a failure, and none waits in a collective call that another has left. Called by
the weight updater.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from slimrl.weights.servers import WeightSyncError

LEAD = 0  # the trainer rank that asks servers for versions and checksums

Result = TypeVar("Result")
Failure = tuple[str, bool]


class Agreement:
    """Runs steps on all trainer ranks; made collectively over all of them."""

    def __init__(self, rank: int) -> None:
        self._leads = rank == LEAD
        self._everyone = dist.new_group(backend="gloo")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._everyone.size()

    def leave(self) -> None:
        """Gives its process group up; no rank may have a call on it under way."""
        dist.destroy_process_group(self._everyone)

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks, in their order; collective."""
        values: list[Result] = [value] * self.size
        dist.all_gather_object(values, value, group=self._everyone)
        return values

    def together(self, step: Callable[[], Result]) -> list[Result]:
        """Runs `step` on every rank and returns what each rank's returned; collective.

        Raises WeightSyncError on every rank where a step raised that, ValueError or OSError on one. It is final unless
        all that failed may be tried again: an error of the trainer itself comes back with the next attempt.
        """
        result: Result | None = None
        failure: Failure | None = None
        cause: Exception | None = None
        try:
            result = step()
        except WeightSyncError as error:
            failure, cause = (str(error), error.final), error
        except (ValueError, OSError) as error:
            failure, cause = (str(error), True), error
        outcomes = self.gather((result, failure))
        failures = [failed for _, failed in outcomes if failed is not None]
        if failures:
            text = failures[0][0] if failure is None else failure[0]
            raise WeightSyncError(text, final=any(final for _, final in failures)) from cause
        return [outcome for outcome, _ in outcomes]

    def on_lead(self, step: Callable[[], Result]) -> Result:
        """Runs `step` on the lead alone; its result on every rank. Collective; raises as `together`."""
        return self.together(lambda: step() if self._leads else None)[LEAD]
