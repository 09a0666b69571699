"""When too many answers of a rollout got no verdict for their rewards to mean anything (`--rm-failure-limit`).

One answer without a verdict counts as wrong and is counted; this ends the run where the graders themselves are broken.
Called by the rollout manager on every rollout before it is trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub.scorer import REWARD_FAILURE_KEY


class NoVerdictsError(RuntimeError):
    """At least the allowed share of a rollout's answers got no verdict."""


def require_verdicts(samples: Sequence[Sample], limit: float, what: str) -> None:
    """Raises NoVerdictsError where at least the share `limit` of the samples of `what` got none, with the reasons."""
    reasons = [sample.metadata[REWARD_FAILURE_KEY] for sample in samples if REWARD_FAILURE_KEY in sample.metadata]
    if not reasons or len(reasons) < limit * len(samples):
        return
    commonest = "; ".join(f"{count} times: {reason}" for reason, count in Counter(reasons).most_common(3))
    raise NoVerdictsError(
        f"{what}: the graders came to no verdict on {len(reasons)} of {len(samples)} answers, and --rm-failure-limit"
        f" {limit:g} ends the run there ({commonest}); mend the grader or the data, raise --rm-time-limit where time"
        " was short, or raise the limit"
    )
