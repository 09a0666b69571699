"""Recorded rollouts in the place of generated ones (`--load-debug-rollout-data`, `--load-forge-rollout-data`).

Promises the very samples of the dump, in groups, and a data source that moves on as if it had generated them. Called
by the rollout manager.
"""

from __future__ import annotations

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.observability import dump
from slimrl.rollout.data_source import RolloutDataSource


def recorded_groups(
    args: Arguments, template: str, rollout_id: int, data_source: RolloutDataSource
) -> list[list[Sample]]:
    """The recorded groups of this rollout, those of `--load-debug-rollout-data-subsample` where it is given.

    Raises FileNotFoundError where the rollout was not recorded, ValueError where its file is something else.
    """
    data_source.begin_rollout(rollout_id)
    data_source.get_samples(args.rollout_batch_size)
    groups: dict[int, list[Sample]] = {}
    for sample in dump.load_rollout(template, rollout_id).samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return _subsample(list(groups.values()), args.load_debug_rollout_data_subsample)


def _subsample(groups: list[list[Sample]], part: float | None) -> list[list[Sample]]:
    """Whole groups: half of those wanted from the front, the others from the end."""
    if part is None:
        return groups
    wanted = max(1, int(len(groups) * part))
    front = wanted // 2
    return groups[:front] + groups[len(groups) - (wanted - front) :]
