"""Unsupported Megatron-FSDP options of megatron-core are rejected by name."""

from __future__ import annotations

import pytest

from slimrl.arguments.namespace import Arguments, Context
from slimrl.arguments.validation.parallel import sharding_fits_the_run


@pytest.mark.parametrize(
    ("gpus", "strategy", "refused"), [(4, "optim_grads", 1), (8, "optim_grads", 0), (4, "optim", 0)]
)
def test_sharded_gradients_need_experts_on_several_gpus(gpus: int, strategy: str, refused: int):
    args = Arguments(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        num_experts=8,
        expert_model_parallel_size=4,
        actor_num_nodes=1,
        actor_num_gpus_per_node=gpus,
    )
    sentences = [str(problem) for problem in sharding_fits_the_run(args, Context("train.py"))]
    assert sentences == refused * [
        "--expert-model-parallel-size 4 leaves each expert on one GPU, where --use-megatron-fsdp cannot shard its"
        " gradients: lower it, or use --data-parallel-sharding-strategy optim."
    ]


@pytest.mark.parametrize(("strategy", "refused"), [("optim", 1), ("optim_grads", 0), ("optim_grads_params", 0)])
def test_megatron_fsdp_with_unsharded_gradients_disables_overlapped_reduction(strategy: str, refused: int):
    args = Arguments(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True)
    sentences = [str(problem) for problem in sharding_fits_the_run(args, Context("train.py"))]
    assert sentences == refused * [
        "--use-megatron-fsdp with --data-parallel-sharding-strategy optim adds each GPU's own gradient twice with"
        " --overlap-grad-reduce: leave it out, or also shard gradients (optim_grads)."
    ]
