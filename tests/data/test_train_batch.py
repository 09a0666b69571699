"""The columnar batch: layout of hand-made samples, selection, files, and errors that name the sample."""

import pickle

import numpy as np
import pytest
import torch

from slimrl.data.sample import Sample, SampleStatus
from slimrl.data.train_batch import RolloutBatch, batch_from_samples


def make_sample(index: int, prompt: list[int], response: list[int], **fields) -> Sample:
    defaults = {
        "prompt": "p",
        "group_index": index // 2,
        "index": index,
        "tokens": prompt + response,
        "response_length": len(response),
        "rollout_log_probs": [-0.5 * token for token in response],
        "status": SampleStatus.COMPLETED,
    }
    return Sample(**{**defaults, **fields})


def three_samples() -> list[Sample]:
    return [
        make_sample(10, [1, 2], [3]),
        make_sample(11, [4], [5, 6, 7], loss_mask=[1, 0, 1], status=SampleStatus.TRUNCATED),
        make_sample(12, [8, 9], [10, 11], remove_sample=True, loss_mask=[1, 1]),
    ]


def three_rows() -> RolloutBatch:
    return batch_from_samples(three_samples(), torch.tensor([10.0, 11.0, 12.0]), torch.tensor([0.1, 0.2, 0.3]))


def test_samples_are_concatenated_in_order():
    batch = three_rows()
    assert len(batch) == 3
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert batch.total_lengths.tolist() == [3, 4, 4]
    assert batch.response_lengths.tolist() == [1, 3, 2]
    assert batch.rollout_log_probs.tolist() == [-1.5, -2.5, -3.0, -3.5, -5.0, -5.5]
    assert batch.raw_rewards.tolist() == [10.0, 11.0, 12.0]
    assert batch.rewards.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert batch.group_ids.tolist() == [5, 5, 6]
    assert batch.sample_ids.tolist() == [10, 11, 12]
    assert batch.truncated.tolist() == [False, True, False]
    assert batch.token_offsets.tolist() == [0, 3, 7, 11]
    assert batch.response_offsets.tolist() == [0, 1, 4, 6]


def test_columns_have_the_documented_dtypes():
    batch = three_rows()
    for name in ("tokens", "total_lengths", "response_lengths", "group_ids", "sample_ids"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("loss_mask", "rollout_log_probs", "raw_rewards", "rewards"):
        assert getattr(batch, name).dtype == torch.float32, name
    assert batch.truncated.dtype == torch.bool


def test_mask_is_ones_by_default_and_zeros_for_a_removed_sample():
    assert three_rows().loss_mask.tolist() == [1, 1, 0, 1, 0, 0]


def test_removed_sample_is_not_trained_regardless_of_its_mask():
    samples = [
        make_sample(0, [1], [2, 3, 4], remove_sample=True, loss_mask=[1, 0, 1]),
        make_sample(1, [1], [5, 6], loss_mask=[0, 1]),
    ]
    assert batch_from_samples(samples, torch.zeros(2), torch.zeros(2)).loss_mask.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("mask", [[0, 0], [1, 1], [1, 0]])
def test_given_mask_is_used_unchanged(mask):
    batch = batch_from_samples([make_sample(0, [1], [2, 3], loss_mask=mask)], torch.zeros(1), torch.zeros(1))
    assert batch.loss_mask.tolist() == mask


@pytest.mark.parametrize("status", list(SampleStatus))
def test_only_a_sample_at_the_length_limit_counts_as_truncated(status):
    batch = batch_from_samples([make_sample(0, [1], [2], status=status)], torch.zeros(1), torch.zeros(1))
    assert batch.truncated.tolist() == [status.value == "truncated"]


def test_empty_response_is_allowed_and_adds_no_values():
    samples = [make_sample(0, [1, 2], [], rollout_log_probs=None), make_sample(1, [3], [4])]
    batch = batch_from_samples(samples, torch.zeros(2), torch.zeros(2))
    assert batch.tokens.tolist() == [1, 2, 3, 4]
    assert batch.response_offsets.tolist() == [0, 0, 1]
    only_empty = batch_from_samples(samples[:1], torch.zeros(1), torch.zeros(1))
    assert only_empty.loss_mask.shape == (0,)


def test_select_takes_rows_in_the_given_order_with_repeats():
    chosen = three_rows().select([2, 0, 2])
    assert chosen.tokens.tolist() == [8, 9, 10, 11, 1, 2, 3, 8, 9, 10, 11]
    assert chosen.rollout_log_probs.tolist() == [-5.0, -5.5, -1.5, -5.0, -5.5]
    assert chosen.loss_mask.tolist() == [0, 0, 1, 0, 0]
    assert chosen.sample_ids.tolist() == [12, 10, 12]
    assert chosen.micro_batches == []


def test_select_of_no_rows_is_empty_and_of_an_unknown_row_raises():
    nothing = three_rows().select([])
    assert len(nothing) == nothing.tokens.numel() == nothing.loss_mask.numel() == 0
    assert three_rows().select([2]).sample_ids.tolist() == [12]
    for rows in ([0, 3], [-1]):
        with pytest.raises(IndexError, match="the batch has 3"):
            three_rows().select(rows)


def test_saved_batch_round_trips_bit_for_bit_with_its_schedule(tmp_path):
    batch = three_rows()
    batch.micro_batches, batch.samples_per_step, batch.tokens_per_step = [[[0, 2], [1]]], [3], [3]
    path = tmp_path / "batch.safetensors"
    batch.save(path)
    batch.save(path)  # replaces
    loaded = RolloutBatch.load(path)
    for name, value in vars(batch).items():
        other = getattr(loaded, name)
        assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, name
    assert [file.name for file in tmp_path.iterdir()] == ["batch.safetensors"]


def test_pickled_batch_has_the_same_tensors_and_no_pickle_of_torch():
    batch = three_rows()
    batch.micro_batches, batch.samples_per_step, batch.tokens_per_step = [[[0, 2], [1]]], [3], [3]
    written = pickle.dumps(batch, protocol=5)
    assert b"_rebuild_tensor" not in written
    read = pickle.loads(written)
    for name, value in vars(batch).items():
        other = getattr(read, name)
        assert (torch.equal(other, value) and other.dtype == value.dtype) if torch.is_tensor(value) else other == value
    read.tokens[0] = 7  # training may write to it
    assert batch.tokens[0] == 1


def test_foreign_file_is_rejected(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors is not a rollout batch"):
        RolloutBatch.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1, 1]}, "sample 7 .number 1 of the rollout. has 2 loss_mask for 1 response tokens"),
        ({"rollout_log_probs": []}, "sample 7 .* has 0 rollout_log_probs for 1 response tokens"),
        ({"rollout_log_probs": None}, "sample 7 .* has no rollout_log_probs"),
        ({"response_length": 3}, "sample 7 .* has 2 tokens and response_length 3"),
        ({"response_length": -1}, "sample 7 .* has 2 tokens and response_length -1"),
        ({"response_length": 2}, "at least one token"),
        ({"group_index": None}, "has no index or no group_index"),
    ],
)
def test_incomplete_sample_is_rejected_by_name(fields, message):
    samples = [make_sample(6, [1], [2]), make_sample(7, [1], [2], **fields)]
    with pytest.raises(ValueError, match=message):
        batch_from_samples(samples, torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [1, 2.5]}, "sample 7 .number 1 of the rollout. has tokens that are not int64"),
        ({"tokens": [1, 2**63]}, "sample 7 .* has tokens that are not int64"),
        ({"rollout_log_probs": [None]}, "sample 7 .* has rollout_log_probs that are not float32"),
    ],
)
def test_value_of_the_wrong_type_is_rejected_by_name(fields, message):
    samples = [make_sample(6, [1], [2]), make_sample(7, [1], [2], **fields)]
    with pytest.raises(ValueError, match=message):
        batch_from_samples(samples, torch.zeros(2), torch.zeros(2))


def test_log_probs_are_rounded_to_the_nearest_float32():
    values = [-0.1, -1 / 3, -1e-45, -3.4028235e38, 0.0, float("-inf")]
    batch = batch_from_samples([make_sample(0, [1], [2] * 6, rollout_log_probs=values)], torch.zeros(1), torch.zeros(1))
    assert batch.rollout_log_probs.numpy().tobytes() == np.array(values, dtype=np.float32).tobytes()


def test_sample_without_an_index_is_named_by_its_position():
    with pytest.raises(ValueError, match="sample None .number 0 of the rollout. has no index or no group_index"):
        batch_from_samples([Sample(prompt="p", group_index=0)], torch.zeros(1), torch.zeros(1))


def test_rewards_must_match_the_samples():
    with pytest.raises(ValueError, match=r"3 samples came with rewards of shape \[2\]"):
        batch_from_samples(three_samples(), torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"3 samples came with raw_rewards of shape \[3, 1\]"):
        batch_from_samples(three_samples(), torch.zeros(3, 1), torch.zeros(3))


def test_slime_hooks_find_the_status_in_the_sample_class():
    assert Sample.Status.TRUNCATED is SampleStatus.TRUNCATED
    assert "Status" not in Sample("prompt").to_dict()


def test_loss_mask_is_binary():
    sample = make_sample(0, [1, 2], [3, 4], loss_mask=[1, 0.5])
    with pytest.raises(ValueError, match="other values than 0 and 1"):
        batch_from_samples([sample], torch.zeros(1), torch.zeros(1))
