"""`train.py` on GPUs, as a user starts it: a tiny model, in bfloat16, in the placements of docs/colocation.md.

tests/end_to_end covers the same in float32 on the CPU; here the kernels, NCCL, CUDA IPC, the memory saver and Ray's own
GPU count take part.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import harness
from tests.end_to_end.conftest import Tiny, tiny  # noqa: F401 - the fixture
from tests.gpu.conftest import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), needs("ray", "sglang", "sglang_router")]

STEPS = 4
# Two different bfloat16 computations of one log-probability. A unit of rounding is 2^-8 of a logit; the toy's logits
# reach about 20. Measured between trainer and server on a CPU: 1.2e-3 in the mean of a step, 5e-2 at most.
MEAN_LIMIT = 2**-7
LIMIT = 2**-2
COMMON = {
    "bf16": True,
    "num_rollout": STEPS,
    "check_weight_update_equal": True,
    "sglang_dtype": "bfloat16",
    "sglang_mem_fraction_static": 0.3,
    "sglang_attention_backend": "triton",  # the toy's heads of 16 channels are too narrow for others
    "ci_test": True,
    "ci_train_rollout_logprob_abs_diff_threshold": MEAN_LIMIT,
}
COLOCATED = {"colocate": True, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
FOUR_COLOCATED = {
    "colocate": True,
    "actor_num_gpus_per_node": 4,
    "rollout_num_gpus": 4,
    "rollout_num_gpus_per_engine": 2,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
}
SPLIT = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
TWO_RANKS_SPLIT = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1, "tensor_model_parallel_size": 2}
# settings of the machine: CUDA's location, visible GPUs, network interface
OF_THE_MACHINE = ("CUDA_", "NVIDIA_", "NVTE_", "NCCL_", "GLOO_", "LD_LIBRARY_PATH", "PATH")


def machine_environment() -> dict[str, str]:
    """Variables that compilers and GPU libraries need, in addition to the harness's minimal environment."""
    return {name: value for name, value in os.environ.items() if name.startswith(OF_THE_MACHINE)}


def train(tiny: Tiny, folder: Path, **changes: Any) -> harness.Finished:  # noqa: F811
    """A run that must succeed and leave nothing behind."""
    flags = tiny.flags(**COMMON, **changes)
    run = harness.start("train.py", flags, folder, "gpu", tiny.home, environment=machine_environment())
    done = run.finish(1200)
    assert done.code == 0, done.output[-8000:]
    assert done.left == []
    return done


def assert_on_policy(done: harness.Finished) -> None:
    """Asserts that each rollout has the latest weights, and that trainer and servers agree on log-probs."""
    assert done.summary["status"] == "completed"
    assert done.steps("weight_version") == [str(step) for step in range(STEPS)]
    assert max(done.steps("train_rollout_logprob_abs_diff_mean")) < MEAN_LIMIT
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < LIMIT
    assert "equal the trained ones, bit for bit" in done.output
    assert done.steps("ratio_max_abs_diff")[0] < LIMIT and abs(done.steps("kl_loss")[0]) < MEAN_LIMIT
    assert done.steps("kl_loss")[-1] > 1e-5  # the weights moved away from the reference
    assert all(0 <= reward <= 1 for reward in done.steps("reward"))


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(COLOCATED, id="one GPU"),
        pytest.param(FOUR_COLOCATED, marks=needs(gpus=4), id="four GPUs, two engines of TP2"),
    ],
)
def test_colocated_run_is_on_policy(placement: dict[str, Any], tiny: Tiny, tmp_path: Path):  # noqa: F811
    done = train(tiny, tmp_path, **placement)
    assert_on_policy(done)
    phases = ("release_engines", "wake_training", "park_training", "resume_engines")
    assert all(step["seconds"][phase] > 0 for step in done.summary["steps"] for phase in phases)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(SPLIT, marks=needs(gpus=2), id="one GPU each"),
        pytest.param(TWO_RANKS_SPLIT, marks=needs(gpus=3), id="two trainer ranks"),
    ],
)
def test_split_run_is_on_policy(placement: dict[str, Any], tiny: Tiny, tmp_path: Path):  # noqa: F811
    assert_on_policy(train(tiny, tmp_path, **placement))
