"""Attention over sequences split over two ranks, against attention on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import tiny

pytestmark = pytest.mark.slow

LENGTHS = [12, 4, 2080, 8]  # a chunk of the long one has more queries than are masked at a time
HEADS, GROUPS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6  # latent attention has values of another width than keys


def attend(rank: int, world_size: int, init_method: str, columns: list[Tensor]) -> tuple[list[Tensor], int]:
    """This rank's rows of the output and of the gradients of query, key and value; the bytes kept in between."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from slimrl.megatron import config, parallel
    from slimrl.megatron.model.attention import PackedCoreAttention
    from slimrl.megatron.model.micro_batch import local_rows, packed_sequences

    args = tiny.tiny_args(context_parallel_size=world_size)
    parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    attention = PackedCoreAttention(
        config.transformer_config(args), 1, AttnMaskType.causal, "self", pg_collection=groups
    )
    rows = local_rows(torch.tensor(LENGTHS), rank, world_size)
    *inputs, weight = (column[rows] for column in columns)
    inputs = [column.requires_grad_() for column in inputs]
    params = packed_sequences(torch.tensor(LENGTHS), world_size, torch.device("cpu"), rank=rank)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = attention(*inputs, None, packed_seq_params=params)
    (output * weight).sum().backward()
    parallel.shutdown()
    return [output.detach(), *(column.grad for column in inputs)], sum(kept.values())


def test_context_parallel_attention_matches_one_rank(one_rank: Any, two_ranks: Any):
    from slimrl.megatron.model.micro_batch import local_rows

    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(sum(LENGTHS), *shape, generator=generator)

    columns = [draw(HEADS, WIDTH), draw(GROUPS, WIDTH), draw(GROUPS, VALUE_WIDTH), draw(HEADS * VALUE_WIDTH)]
    ((expected, _),) = one_rank.run(attend, columns)
    for rank, (actual, kept) in enumerate(two_ranks.run(attend, columns)):
        # half the queries and outputs, all keys and values, in their order and in that of the ranks; no mask
        assert kept < 3 * sum(column.nbytes for column in columns)
        rows = local_rows(torch.tensor(LENGTHS), rank, 2)
        for shared, whole in zip(actual, expected, strict=True):
            torch.testing.assert_close(shared, whole[rows], rtol=1e-5, atol=2e-6)
