"""The split of a pack over context-parallel ranks."""

from __future__ import annotations

import pytest
import torch

from slimrl.megatron.model.micro_batch import local_rows, pack_order


def test_rank_holds_one_front_and_one_back_chunk_of_every_sequence():
    lengths = torch.tensor([8, 4])  # chunks of two tokens, then of one
    assert local_rows(lengths, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert local_rows(lengths, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


def test_single_rank_holds_everything_in_order():
    assert local_rows(torch.tensor([3, 1]), 0, 1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_concatenated_rows_of_all_ranks_are_restored_to_order(ranks: int):
    lengths = 2 * ranks * torch.tensor([1, 5, 2])
    pack = torch.arange(int(lengths.sum()))
    gathered = torch.cat([pack[local_rows(lengths, rank, ranks)] for rank in range(ranks)])
    assert gathered[pack_order(lengths, ranks)].tolist() == pack.tolist()


def test_every_rank_has_the_same_number_of_query_key_pairs():
    lengths = torch.tensor([32, 16])
    positions = torch.cat([torch.arange(1, int(length) + 1) for length in lengths])
    work = [int(positions[local_rows(lengths, rank, 4)].sum()) for rank in range(4)]
    assert work == [(32 * 33 + 16 * 17) // 2 // 4] * 4
