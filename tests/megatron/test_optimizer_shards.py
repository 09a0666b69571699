"""The distributed optimizer's state, stored as each rank has it, and megatron-core's way of storing it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.weights.safe_pickle import read_metadata
from tests.megatron import tiny
from tests.megatron.launch import RankPool
from tests.megatron.test_resharding import Step, flags_of, save_and_step


@pytest.mark.parametrize("shape", [(), (1,), (6,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (4, 1)])
def test_any_range_is_boxes_in_order(shape: tuple[int, ...]):
    from slimrl.megatron.checkpoint.optimizer_state import boxes

    numbers = torch.arange(math.prod(shape)).view(shape)
    for low, high in itertools.combinations_with_replacement(range(numbers.numel() + 1), 2):
        found = list(boxes(shape, low, high))
        parts = [numbers[tuple(map(slice, start, map(sum, zip(start, size, strict=True))))] for start, size in found]
        assert [tuple(part.shape) for part in parts] == [size for _, size in found]
        assert [int(number) for part in parts for number in part.flatten()] == list(range(low, high))
        assert len(found) <= max(1, 2 * len(shape) - 1)


def test_halves_of_a_gated_weight_are_cut_where_they_are_stored():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    from slimrl.megatron.checkpoint.optimizer_state import cut

    weight = torch.empty(4, 3)  # the second of two tensor-parallel shards: two rows of the gate, two of the other half
    layer = (0, 1, 5)  # the second of five layers
    entry = ShardedTensor.from_rank_offsets("fc1", weight, layer, (1, 1, 2), prepend_axis_num=1)
    factory = apply_swiglu_sharded_factory(entry, (layer,))
    flat = torch.arange(8.0)
    whole = torch.full((5, 8, 3), -1.0)
    for piece in cut(factory, "optimizer.state.param.fc1", flat, 2, (0, 0, 0)):
        assert (piece.key, piece.global_shape) == ("optimizer.state.param.fc1", (5, 8, 3))
        assert piece.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        places = zip(piece.global_offset, piece.local_shape, strict=True)
        whole[tuple(slice(first, first + size) for first, size in places)] = piece.data
    # elements 2 to 9 of the shard: the gate's are rows 2 and 3 of the whole, the others' 6 and 7
    assert whole[1, 2:4].tolist() == [[-1.0, -1.0, 0.0], [1.0, 2.0, 3.0]]
    assert whole[1, 6:8].tolist() == [[4.0, 5.0, 6.0], [7.0, -1.0, -1.0]]
    assert int((whole >= 0).sum()) == 8


def test_master_weights_are_whole_from_bf16_weights_and_the_bits_that_these_lack():
    from slimrl.megatron.checkpoint.optimizer_state import joined_master, split_master

    generator = torch.Generator().manual_seed(0)
    master = torch.randn(4096, generator=generator) * 10.0 ** torch.randint(-30, 30, (4096,), generator=generator)
    master = torch.cat([master, torch.tensor([0.0, 1.0, -1.0, 1.00390625, 65280.0, 1e-40])])
    weights, rest = split_master(master)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weights[~ties], master.bfloat16()[~ties])  # rounded to the nearest
    assert int(ties.sum()) == 1 and weights[ties].item() == 1.0078125  # halves away from zero
    assert torch.equal(joined_master(weights, rest), master)
    # a weight of 1.0 and the next float32 numbers above and below
    rounded, missing = torch.ones(2, dtype=torch.bfloat16), torch.tensor([1, -1], dtype=torch.int16)
    assert joined_master(rounded, missing).tolist() == [1 + 2.0**-23, 1 - 2.0**-24]


WAYS = ("as it lies", "gathered", "not ranges")


def step_in(
    rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch], steps: int, way: str
) -> Step:
    """`save_and_step` with one way of storing the optimizer's state."""
    patches = {
        "as it lies": contextlib.nullcontext(),
        "gathered": mock.patch("slimrl.megatron.optimizer.store_without_gathering", lambda part: None),
        "not ranges": mock.patch("slimrl.megatron.checkpoint.optimizer_state._blocks", lambda *_: None),
    }
    patch: Any = patches[way]
    with patch:
        return save_and_step(rank, world_size, init_method, args, rollouts, steps)


def blocks(folder: Path) -> int:
    """The stored blocks of the optimizer's state."""
    entries = read_metadata(folder).state_dict_metadata.items()
    return sum(len(entry.chunks) for key, entry in entries if key.startswith("optimizer.state."))


@pytest.mark.slow
def test_state_as_it_lies_and_megatrons_gathered_state_resume_each_other_bit_for_bit(
    request: pytest.FixtureRequest, two_ranks: RankPool, tmp_path: Path
):
    args = flags_of("models", request)
    rollouts = [tiny.recorded_rollout(seed) for seed in range(3)]
    expected: list[Step] = []
    stored: list[int] = []
    for saves in WAYS:
        folder = tmp_path / saves
        folder.mkdir()
        args = dataclasses.replace(args, save=str(folder), load=str(folder))
        run = two_ranks.run(step_in, args, rollouts, 3, saves)
        expected = expected or run
        stored.append(blocks(folder / "iter_0000001"))
        for loads in WAYS if saves == WAYS[1] else WAYS[:2]:
            for rank, step in enumerate(two_ranks.run(step_in, args, rollouts, 1, loads)):
                assert step.first_rollout == 2
                assert step.metrics == expected[rank].metrics
                weights = expected[rank].weights
                assert [name for name in weights if not torch.equal(weights[name], step.weights[name])] == []
    assert stored[0] > stored[1] == stored[2]  # a parameter is cut between the ranks
