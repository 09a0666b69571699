"""Sorts the finished groups of one rollout into those that are trained on and those that the filter drops.

Promises that a filter which never passes ends the run with a sentence. Made by the rollout loop for one rollout.
"""

from __future__ import annotations

from collections import Counter

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.hooks import DynamicSamplingFilter, naming
from slimrl.rollout.filter_hub.base_types import DynamicFilterOutput

HOPELESS_BATCHES = 16  # so many rollouts' groups dropped in a row, or a whole epoch: the filter never passes


class Collector:
    """Groups by the dynamic sampling filter's verdict, in the order they finished."""

    def __init__(self, args: Arguments, keep: DynamicSamplingFilter | None, hopeless: int) -> None:
        """`keep` is None where every group is accepted; `hopeless` drops in a row end the run."""
        self._args = args
        self._keep = keep
        self._hopeless = hopeless
        self._dropped_in_a_row = 0
        self._dropped: list[tuple[str, list[Sample]]] = []
        self._reserve: list[tuple[str, list[Sample]]] = []
        self.accepted: list[list[Sample]] = []

    @property
    def dropped(self) -> list[list[Sample]]:
        """Groups that are not trained on."""
        return [group for _, group in self._dropped + self._reserve]

    @property
    def drops(self) -> dict[str, int]:
        """Number of groups that are not trained on, by reason."""
        return dict(Counter(reason for reason, _ in self._dropped + self._reserve))

    def add(self, group: list[Sample]) -> bool:
        """Accepts (True) or drops a finished group. Raises RuntimeError after `hopeless` drops, no keep between."""
        verdict = DynamicFilterOutput(True) if self._keep is None else self._judge(self._keep, group)
        if verdict.keep:
            self._dropped_in_a_row = 0
            self.accepted.append(group)
            return True
        dropped = self._reserve if verdict.keep_when_insufficient else self._dropped
        dropped.append((verdict.reason or "unnamed", group))
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= self._hopeless:
            raise RuntimeError(
                f"--dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path} dropped"
                f" {self._dropped_in_a_row} groups in a row ({self.drops}): the data is too easy, too hard or wrongly"
                " judged for this model; change the data, the reward or the filter"
            )
        return False

    def fill_from_reserve(self, missing: int) -> bool:
        """Accepts up to `missing` dropped groups that their filter lets pass where there are too few; False for none.

        The first to finish go first.
        """
        chosen, self._reserve = self._reserve[:missing], self._reserve[missing:]
        self.accepted += [group for _, group in chosen]
        return bool(chosen)

    def _judge(self, keep: DynamicSamplingFilter, group: list[Sample]) -> DynamicFilterOutput:
        with naming("--dynamic-sampling-filter-path", self._args.dynamic_sampling_filter_path):
            return DynamicFilterOutput.of(keep(self._args, group))


def in_order(groups: list[list[Sample]]) -> list[list[Sample]]:
    """Groups and the samples within them by index, whatever order they finished in."""
    ordered = [sorted(group, key=lambda sample: sample.index) for group in groups]
    return sorted(ordered, key=lambda group: group[0].index)
