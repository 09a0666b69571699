"""An export over real ranks: exact where it is requested, with no transfer or gather elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron.launch import RankPool
from tests.megatron.tiny import MOE_FLAGS, save_qwen3, save_qwen3_moe, tiny_args
from tests.weights import ranks

pytestmark = pytest.mark.slow
TENSORS = 2 * 11 + 3  # of two dense layers; embedding, norm, head


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def test_pipeline_broadcast_carries_only_what_the_receivers_need(four_ranks, tmp_path):
    folder = save_qwen3(tmp_path / "hf", seed=1, tied=False)
    args = tiny_args(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=True
    )
    results = four_ranks.run(ranks.export_to, args, folder, {0})
    assert [came for came, *_ in results] == [TENSORS, 0, 0, 0]
    assert all(different == [] for _, different, *_ in results)
    held = [rank[2] for rank in results]
    # ranks 0 and 1 are the first stage: each receives what its neighbour of the second stage holds, and no more
    assert [rank[3] for rank in results] == [held[2], held[3], held[2], held[3]]
    # of the tensor-parallel groups only that of rank 0 gathers, each sharded tensor: 4 per layer, 2 tables
    assert [rank[4] for rank in results] == [2 * 4 + 2, 2 * 4 + 2, 0, 0]


def test_experts_reach_exactly_the_rank_that_needs_them(four_ranks, tmp_path):
    folder = save_qwen3_moe(tmp_path / "hf", seed=1)
    args = tiny_args(**MOE_FLAGS, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    to_one = four_ranks.run(ranks.export_to, args, folder, {0})
    to_all = four_ranks.run(ranks.export_to, args, folder, None)
    # 2 norms, 2 head norms, 4 projections, router, 4 experts of 3 tensors per layer; embedding and norm
    tensors = 2 * (9 + 4 * 3) + 2
    assert [came for came, *_ in to_one] == [tensors, 0, 0, 0]
    assert [came for came, *_ in to_all] == [tensors] * 4
    assert all(different == [] for _, different, *_ in (*to_one, *to_all))
    assert all(one[3] < everyone[3] for one, everyone in zip(to_one, to_all, strict=True))
