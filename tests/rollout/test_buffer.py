"""Groups are buffered in order, returned once, and survive a checkpoint, with any buffer filter."""

from __future__ import annotations

import json
import sys

import pytest

from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import HookError
from slimrl.rollout.dataset.data_source import GroupBuffer

FILTERS = """
def newest(args, rollout_id, buffer, num_samples):
    args.custom.setdefault("told", []).append((rollout_id, num_samples, len(buffer)))
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]

def only_fresh(args, rollout_id, buffer, num_samples):
    buffer[:] = [group for group in buffer if group[0].metadata["start_rollout_id"] >= rollout_id - 1]
    return [buffer.pop(0) for _ in range(min(num_samples, len(buffer)))]

def keeps_what_it_returns(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]

def returns_everything(args, rollout_id, buffer, num_samples):
    chosen = list(buffer)
    buffer.clear()
    return chosen

def invents(args, rollout_id, buffer, num_samples):
    return [list(buffer.pop(0))]

def too_short(args, buffer, num_samples):
    return []
"""


@pytest.fixture
def filters(tmp_path, monkeypatch):
    (tmp_path / "buffer_filters_under_test.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "buffer_filters_under_test"
    sys.modules.pop("buffer_filters_under_test", None)


def group(number: int, start: int = 0) -> list[Sample]:
    sample = Sample(prompt="q", group_index=number, index=number, tokens=[1, 2], response_length=1)
    sample.status, sample.rollout_log_probs, sample.loss_mask = SampleStatus.ABORTED, [-0.25], [1]
    sample.metadata = {"start_rollout_id": start}
    return [sample]


def numbers(groups):
    return [group[0].group_index for group in groups]


def test_oldest_groups_go_first_without_a_filter(make_args):
    in_slime = ("slime.rollout.filter_hub.buffer_filters.pop_first", "slime.rollout.data_source.pop_first")
    for path in (None, *in_slime):
        buffer = GroupBuffer(path, make_args())
        buffer.put([group(4), group(2)])
        buffer.put([group(3)])
        assert numbers(buffer.take(2, 7)) == [4, 2]
        assert numbers(buffer.take(2, 7)) == [3]
        assert buffer.take(2, 7) == [] and len(buffer) == 0


def test_custom_filter_selects_groups_and_receives_the_rollout_id(make_args, filters):
    args = make_args(buffer_filter_path=f"{filters}.newest")
    buffer = GroupBuffer(args.buffer_filter_path, args)
    assert buffer.take(2, 0) == []
    buffer.put([group(0), group(1), group(2)])
    assert numbers(buffer.take(2, 5)) == [2, 1]
    assert numbers(buffer.take(2, 6)) == [0]
    buffer.put([group(3)])
    assert buffer.take(0, 7) == []
    assert args.custom["told"] == [(5, 2, 3), (6, 2, 1)]  # not called when the buffer is empty or no group is requested


def test_groups_removed_by_a_filter_are_logged(make_args, filters, caplog):
    buffer = GroupBuffer(f"{filters}.only_fresh", make_args())
    buffer.put([group(0, start=1), group(1, start=5), group(2, start=1)])
    assert numbers(buffer.take(1, 6)) == [1]
    assert caplog.messages == [f"--buffer-filter-path {filters}.only_fresh removed 2 groups permanently"]
    assert len(buffer) == 0


@pytest.mark.parametrize("name", ["keeps_what_it_returns", "returns_everything", "invents"])
def test_filter_that_would_lose_or_duplicate_a_group_is_rejected(make_args, filters, name):
    buffer = GroupBuffer(f"{filters}.{name}", make_args())
    buffer.put([group(0), group(1)])
    with pytest.raises(ValueError, match=f"{name} returned . groups when asked for 1: it must return at most that"):
        buffer.take(1, 0)


def test_filter_with_the_wrong_signature_is_rejected_at_startup(make_args, filters):
    with pytest.raises(HookError, match=r"expected f\(args, rollout_id, buffer, num_samples\)"):
        GroupBuffer(f"{filters}.too_short", make_args())


def test_state_is_a_json_serializable_copy(make_args):
    buffer = GroupBuffer()
    buffer.put([group(0), group(1)])
    state = buffer.state_dict()
    text = json.dumps(state)
    taken = buffer.take(1, 0)
    taken[0][0].metadata["changed"] = True
    taken[0][0].tokens.append(3)
    assert json.dumps(state) == text
    restored = GroupBuffer()
    restored.load_state_dict(json.loads(text))
    assert restored.take(2, 0) == [group(0), group(1)]
