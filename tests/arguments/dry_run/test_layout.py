"""GPUs, groups of ranks and pipeline stages, against lists written by hand."""

import pytest

from slimrl.arguments.layout import Place, dense_axes, expert_axes, groups_of, placement, rank_lists, stage_layers
from tests.arguments.dry_run.published import QWEN3_4B, flags


def test_groups_follow_the_order_tensor_context_data_pipeline():
    args = flags(
        QWEN3_4B,
        actor_num_nodes=2,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    groups = groups_of(args)
    assert (groups.world, groups.data, groups.optimizer_shares) == (16, 2, 4)
    lists = {name: rank_lists(dense_axes(groups), name) for name in ("TP", "CP", "DP", "PP")}
    assert lists["TP"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert lists["CP"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert lists["DP"] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert lists["PP"] == [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]


def test_experts_use_their_own_grouping_of_the_same_ranks():
    args = flags(
        QWEN3_4B,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    groups = groups_of(args)
    assert (groups.data, groups.expert_data) == (4, 2)
    assert rank_lists(expert_axes(groups), "EP") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rank_lists(expert_axes(groups), "expert DP") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.slow
def test_groups_match_megatron():
    from megatron.core.parallel_state import RankGenerator

    args = flags(
        QWEN3_4B,
        actor_num_nodes=3,
        tensor_model_parallel_size=2,
        context_parallel_size=3,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=6,
        expert_tensor_parallel_size=2,
    )
    groups = groups_of(args)
    dense = RankGenerator(tp=2, ep=1, dp=groups.data, pp=2, cp=3, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=2, ep=6, dp=groups.expert_data, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    for name, token in (("TP", "tp"), ("CP", "cp"), ("DP", "dp"), ("PP", "pp")):
        assert rank_lists(dense_axes(groups), name) == dense.get_ranks(token)
    for name, token in (("expert TP", "tp"), ("EP", "ep"), ("expert DP", "dp")):
        assert rank_lists(expert_axes(groups), name) == expert.get_ranks(token)


def test_split_roles_use_consecutive_gpus():
    args = flags(QWEN3_4B, actor_num_gpus_per_node=4, rollout_num_gpus=12, rollout_num_gpus_per_engine=4)
    where = placement(args, None)
    assert where.total == 16
    assert where.train == range(4)
    assert where.engines == (range(4, 8), range(8, 12), range(12, 16))
    assert where.places[9] == Place(node=1, gpu=1)
    assert where.nodes_of(where.engines[0]) == [0]


def test_colocated_roles_share_the_same_gpus():
    where = placement(flags(QWEN3_4B, colocate=True, rollout_num_gpus_per_engine=2), None)
    assert (where.total, where.train) == (8, range(8))
    assert where.engines == (range(0, 2), range(2, 4), range(4, 6), range(6, 8))


def test_single_role_takes_only_its_gpus():
    args = flags(QWEN3_4B, rollout_num_gpus=2, debug_rollout_only=True)
    assert (placement(args, None).total, placement(args, None).train) == (2, range(0))
    args = flags(QWEN3_4B, rollout_num_gpus=2, debug_train_only=True)
    assert (placement(args, None).total, placement(args, None).engines) == (8, ())


def test_placement_uses_the_gpus_of_the_running_cluster():
    args = flags(QWEN3_4B, actor_num_gpus_per_node=4, rollout_num_gpus=2)
    assert [place.node for place in placement(args, [4, 2]).places] == [0, 0, 0, 0, 1, 1]
    assert [place.node for place in placement(args, [4, 1]).places] == [0, 0, 0, 0, 1, 2]  # the last one is missing


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        (dict(), [(0, 9), (9, 18), (18, 27), (27, 36)]),
        (dict(decoder_first_pipeline_num_layers=6), [(0, 6), (6, 16), (16, 26), (26, 36)]),
        (
            dict(decoder_first_pipeline_num_layers=8, decoder_last_pipeline_num_layers=4),
            [(0, 8), (8, 20), (20, 32), (32, 36)],
        ),
    ],
)
def test_layers_of_pipeline_stages(changes, layers):
    args = flags(QWEN3_4B, pipeline_model_parallel_size=4, **changes)
    assert stage_layers(args) == [tuple(range(*ends)) for ends in layers]


def test_embedding_and_loss_may_count_as_layers():
    args = flags(
        QWEN3_4B,
        num_layers=6,
        pipeline_model_parallel_size=4,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert stage_layers(args) == [(0,), (1, 2), (3, 4), (5,)]


def test_virtual_stages_cycle_over_the_gpus():
    args = flags(QWEN3_4B, num_layers=8, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    assert stage_layers(args) == [(0, 1, 4, 5), (2, 3, 6, 7)]
