"""A run whose weight updates go from trainer shards straight to engine ranks by Mooncake, over TCP."""

import pytest

from tests.end_to_end import harness
from tests.mooncake import mooncake

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_step_samples_from_the_weights_that_mooncake_brought(tiny, tmp_path, tmp_path_factory):
    flags = tiny.flags(
        actor_num_gpus_per_node=2,
        tensor_model_parallel_size=2,
        rollout_num_gpus=2,
        rollout_num_gpus_per_engine=2,
        num_rollout=3,
        update_weight_transfer_mode="p2p",
        update_weight_transport="mooncake",
        check_weight_update_equal=True,
    )
    environment = mooncake(tmp_path_factory)
    done = harness.start("train.py", flags, tmp_path, "peers", tiny.home, environment=environment).finish(300)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert done.steps("weight_version") == ["0", "1", "2"]
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-3
    assert "training sends weights by Mooncake, whose ports listen on all addresses" in done.output
