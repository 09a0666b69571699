"""Recorded rollouts are replayed unchanged, fully or partly, and the data position advances."""

from __future__ import annotations

import dataclasses

import pytest

from slimrl.data.sample import Sample, SampleStatus
from slimrl.observability.rollout_dump import save_rollout
from slimrl.rollout.dataset.data_source import recorded_groups


@dataclasses.dataclass
class Flags:
    rollout_batch_size: int = 7
    load_debug_rollout_data_subsample: float | None = None


class Source:
    """Records the calls."""

    def __init__(self):
        self.calls = []

    def begin_rollout(self, rollout_id):
        self.calls.append(rollout_id)

    def get_samples(self, count):
        self.calls.append(count)


@pytest.fixture
def template(tmp_path):
    """Rollout 3: seven groups of two."""
    samples = [
        Sample(
            prompt="q",
            group_index=30 + place // 2,
            index=60 + place,
            tokens=[1, 2, place],
            response_length=1,
            rollout_log_probs=[-1 / (place + 3)],
            reward=float(place),
            status=SampleStatus.COMPLETED,
        )
        for place in range(14)
    ]
    save_rollout(str(tmp_path / "{rollout_id}.jsonl"), 3, samples)
    return str(tmp_path / "{rollout_id}.jsonl"), samples


@pytest.mark.parametrize(
    ("part", "kept"),
    # of 7 groups: int(7 x part), half of them (rounded down) from the front
    [(None, range(7)), (1.0, range(7)), (0.6, [0, 1, 5, 6]), (0.5, [0, 5, 6]), (0.15, [6]), (0.01, [6])],
)
def test_replayed_rollout_has_the_recorded_groups(template, part, kept):
    path, samples = template
    source = Source()
    groups = recorded_groups(Flags(load_debug_rollout_data_subsample=part), path, 3, source)
    assert groups == [samples[2 * group : 2 * group + 2] for group in kept]
    assert source.calls == [3, 7]


def test_missing_recorded_rollout_is_named(template):
    with pytest.raises(FileNotFoundError, match="there is no rollout dump .*4.jsonl"):
        recorded_groups(Flags(), template[0], 4, Source())
