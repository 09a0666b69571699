"""Which trainer rank sends to which engine, for every supported placement."""

import pytest

from slimrl.weights.update.topology import (
    EngineEndpoint,
    check_without_stages,
    colocated_senders,
    export_ranks,
    split_senders,
)


def engines(*gpus: list[int], per_node: int | None = None, tensor_parallel: int | None = None) -> list[EngineEndpoint]:
    """Engines on these GPUs; `per_node` GPUs are on each node, None: one machine."""
    return [
        EngineEndpoint(
            f"http://e{number}",
            own,
            nodes=None if per_node is None else [f"node {gpu // per_node}" for gpu in own],
            tensor_parallel_size=tensor_parallel,
        )
        for number, own in enumerate(gpus)
    ]


@pytest.mark.parametrize("host_memory", [True, False])
def test_each_rank_sends_to_the_engine_on_its_gpu(host_memory):
    roles = colocated_senders(engines([0], [1]), 2, host_memory=host_memory)
    assert roles.sharing == {0: (0,), 1: (1,)} and not roles.remote and roles.senders == {0, 1}


def test_every_gpu_of_a_wide_engine_is_sent_to_by_its_own_rank():
    roles = colocated_senders(engines([0, 1], [2, 3]), 4, host_memory=False)
    assert roles.sharing == {0: (0, 1), 1: (2, 3)}


def test_one_rank_sends_to_a_whole_engine_through_host_memory():
    roles = colocated_senders(engines([0, 1], [2, 3]), 4, host_memory=True)
    assert roles.sharing == {0: (0, 0), 1: (2, 2)} and roles.senders == {0, 2}


def test_engine_without_a_trainer_on_its_gpus_is_sent_to_by_rank_0():
    assert colocated_senders(engines([0], [1]), 1, host_memory=True).sharing == {0: (0,), 1: (0,)}
    on_gpu = colocated_senders(engines([0], [1]), 1, host_memory=False)
    assert on_gpu.sharing == {0: (0,)} and on_gpu.remote == (1,) and on_gpu.senders == {0}


def test_gpu_that_would_be_source_and_receiver_of_a_broadcast_is_rejected():
    with pytest.raises(ValueError, match=r"http://e0 has GPUs \[0, 1\] and the trainer has 1"):
        colocated_senders(engines([0, 1]), 1, host_memory=False)


def test_multi_node_engine_is_sent_to_per_gpu_or_by_one_host_memory_rank_per_node():
    over_nodes = engines([0, 1, 2, 3], [4, 5, 6, 7], per_node=2)
    on_gpu = colocated_senders(over_nodes, 8, host_memory=False)
    assert on_gpu.sharing == {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    on_host = colocated_senders(over_nodes, 8, host_memory=True)
    assert on_host.sharing == {0: (0, 0, 2, 2), 1: (4, 4, 6, 6)} and on_host.senders == {0, 2, 4, 6}


def test_host_memory_is_not_opened_on_another_node():
    # 3 training GPUs on nodes of 2: the second engine has rank 2 on its node, the third has no rank there
    roles = colocated_senders(engines([0, 1], [2, 3], [4, 5], per_node=2), 3, host_memory=True)
    assert roles.sharing == {0: (0, 0), 1: (2, 2)} and roles.remote == (2,) and roles.senders == {0, 2}
    # an engine over both nodes of which one has no trainer
    roles = colocated_senders(engines([0, 1, 2, 3], per_node=2), 2, host_memory=True)
    assert not roles.sharing and roles.remote == (0,) and roles.senders == {0}


def test_engine_on_the_node_of_rank_0_is_sent_to_by_it():
    roles = colocated_senders(engines([0], [1], [2], per_node=2), 1, host_memory=True)
    assert roles.sharing == {0: (0,), 1: (0,)} and roles.remote == (2,)


def test_pipeline_stage_ranks_are_sent_to_like_others_and_never_by_broadcast():
    staged = engines([0, 1, 2, 3], tensor_parallel=2)
    assert staged[0].has_stages and not engines([0, 1])[0].has_stages
    assert colocated_senders(staged, 4, host_memory=False).sharing == {0: (0, 1, 2, 3)}
    for refused in (
        lambda: split_senders(staged),
        lambda: colocated_senders(engines([0], [1, 2], tensor_parallel=1), 1, host_memory=False),
        lambda: check_without_stages(staged),
    ):
        with pytest.raises(ValueError, match=r"http://e\d has pipeline stages, which take weights only from trainers"):
            refused()


def test_split_placement_sends_everything_from_rank_0():
    roles = split_senders(engines([2], [3]))
    assert roles.remote == (0, 1) and roles.senders == {0} and not roles.sharing


def test_ranks_export_together_when_groups_connect_them():
    # 8 ranks: tensor parallel 2, pipeline parallel 2, and two replicas of the model
    tensor, pipeline = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert export_ranks(0, tensor + pipeline) == {0, 1, 4, 5}
    assert export_ranks(6, tensor + pipeline) == {2, 3, 6, 7}
    # experts sharded over both replicas connect them
    assert export_ranks(6, tensor + pipeline + [[0, 2], [1, 3], [4, 6], [5, 7]]) == set(range(8))
    assert export_ranks(1, [[0], [1]]) == {1}
