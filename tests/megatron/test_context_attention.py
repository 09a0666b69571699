"""Attention over sequences that two ranks share, against attention on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import tiny

pytestmark = pytest.mark.slow

LENGTHS = [12, 4, 8]
HEADS, GROUPS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6  # latent attention has values of another width than keys


def attend(rank: int, world_size: int, init_method: str, columns: list[Tensor]) -> list[Tensor]:
    """This rank's rows of the output and of the gradients of query, key and value."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from slimrl.megatron import config, parallel
    from slimrl.megatron.attention import PackedCoreAttention
    from slimrl.megatron.zigzag import held_rows

    args = tiny.tiny_args(context_parallel_size=world_size)
    parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    attention = PackedCoreAttention(
        config.transformer_config(args), 1, AttnMaskType.causal, "self", pg_collection=groups
    )
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    rows = held_rows(torch.tensor(LENGTHS), rank, world_size)
    *inputs, weight = (column[rows] for column in columns)
    inputs = [column.requires_grad_() for column in inputs]
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    output = attention(*inputs, None, packed_seq_params=params)
    (output * weight).sum().backward()
    parallel.shutdown()
    return [output.detach(), *(column.grad for column in inputs)]


def test_ranks_that_share_sequences_attend_as_one_rank_does(one_rank: Any, two_ranks: Any):
    from slimrl.megatron.zigzag import held_rows

    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(sum(LENGTHS), *shape, generator=generator)

    columns = [draw(HEADS, WIDTH), draw(GROUPS, WIDTH), draw(GROUPS, VALUE_WIDTH), draw(HEADS * VALUE_WIDTH)]
    (expected,) = one_rank.run(attend, columns)
    for rank, actual in enumerate(two_ranks.run(attend, columns)):
        rows = held_rows(torch.tensor(LENGTHS), rank, 2)
        for shared, whole in zip(actual, expected, strict=True):
            torch.testing.assert_close(shared, whole[rows], rtol=0, atol=2e-6)
