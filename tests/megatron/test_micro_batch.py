"""Packing preserves every response token, its predicting row and its position in the batch."""

from __future__ import annotations

import pytest
import torch

from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.model.micro_batch import pack_micro_batch


@pytest.fixture
def batch() -> RolloutBatch:
    """Three samples: [10 11 | 12 13], [20 | 21], [30 31 32 | 33 34 35]."""
    lengths, responses = torch.tensor([4, 2, 6]), torch.tensor([2, 1, 3])
    total = int(responses.sum())
    return RolloutBatch(
        tokens=torch.tensor([10, 11, 12, 13, 20, 21, 30, 31, 32, 33, 34, 35]),
        total_lengths=lengths,
        response_lengths=responses,
        loss_mask=torch.ones(total),
        rollout_log_probs=torch.zeros(total),
        raw_rewards=torch.zeros(3),
        rewards=torch.zeros(3),
        group_ids=torch.zeros(3, dtype=torch.int64),
        sample_ids=torch.arange(3),
        truncated=torch.zeros(3, dtype=torch.bool),
    )


def test_logit_rows_predict_the_response_tokens(batch: RolloutBatch):
    packed = pack_micro_batch(batch, [2, 0], length_multiple=1, device=torch.device("cpu"))
    assert packed.tokens.tolist() == [[30, 31, 32, 33, 34, 35, 10, 11, 12, 13]]
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 6, 10]
    assert packed.sequences.cu_seqlens_q.dtype == torch.int32
    assert packed.sequences.max_seqlen_q == 6
    assert packed.targets.tolist() == [33, 34, 35, 12, 13]
    assert packed.logit_rows.tolist() == [2, 3, 4, 7, 8]
    assert packed.response_index.tolist() == [3, 4, 5, 0, 1]
    assert packed.response_lengths.tolist() == [3, 2]


def test_padding_is_a_separate_unread_sequence(batch: RolloutBatch):
    packed = pack_micro_batch(batch, [1, 0], length_multiple=4, device=torch.device("cpu"))
    assert packed.tokens.tolist() == [[20, 21, 10, 11, 12, 13, 0, 0]]
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 2, 6, 8]
    assert int(packed.logit_rows.max()) < 6


def test_padding_can_be_the_longest_sequence(batch: RolloutBatch):
    packed = pack_micro_batch(batch, [1], length_multiple=64, device=torch.device("cpu"))
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 2, 64]
    assert packed.sequences.max_seqlen_q == 62


def test_sample_without_a_response_has_no_rows(batch: RolloutBatch):
    batch.response_lengths = torch.tensor([2, 0, 3])
    batch.loss_mask = torch.ones(5)
    batch.rollout_log_probs = torch.zeros(5)
    packed = pack_micro_batch(batch, [0, 1, 2], length_multiple=1, device=torch.device("cpu"))
    assert packed.targets.tolist() == [12, 13, 33, 34, 35]
    assert packed.response_index.tolist() == [0, 1, 2, 3, 4]


def test_context_parallel_ranks_share_every_sequence_and_its_response(batch: RolloutBatch):
    packs = [
        pack_micro_batch(
            batch, [0, 2], length_multiple=1, device=torch.device("cpu"), context_rank=rank, context_size=2
        )
        for rank in range(2)
    ]
    # 10 11 12 13 in chunks of one; 30 to 35 padded to eight, in chunks of two
    assert packs[0].tokens.tolist() == [[10, 13, 30, 31, 0, 0]]
    assert packs[1].tokens.tolist() == [[11, 12, 32, 33, 34, 35]]
    for pack in packs:  # boundaries and samples are those of the full pack
        assert pack.sequences.cu_seqlens_q.tolist() == [0, 4, 12]
        assert pack.sequences.max_seqlen_q == 8
        assert pack.response_index.tolist() == [0, 1, 3, 4, 5]
        assert pack.response_lengths.tolist() == [2, 3]
    # 12, 13 | 33, 34, 35 are predicted by 11, 12 | 32, 33, 34: all on the second rank
    assert packs[0].own.tolist() == packs[0].logit_rows.tolist() == packs[0].targets.tolist() == []
    assert packs[1].own.tolist() == [0, 1, 2, 3, 4]
    assert packs[1].logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert packs[1].targets.tolist() == [12, 13, 33, 34, 35]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_response_token_is_predicted_on_one_context_parallel_rank(batch: RolloutBatch, ranks: int):
    owners = torch.zeros(6, dtype=torch.int64)
    for rank in range(ranks):
        pack = pack_micro_batch(
            batch, [1, 2, 0], length_multiple=3, device=torch.device("cpu"), context_rank=rank, context_size=ranks
        )
        assert pack.tokens.shape[1] % 3 == 0
        owners[pack.own] += 1
    assert owners.tolist() == [1] * 6
