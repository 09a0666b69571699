"""The output layer trains the same with and without kept logits; the layer itself stays megatron-core's."""

from __future__ import annotations

from typing import Any

import pytest

from slimrl.arguments import Arguments
from tests.megatron import ranks, tiny
from tests.megatron.layouts import relative_error

pytestmark = pytest.mark.slow

LAYOUTS = {
    "TP2 with sequence parallelism": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2, in small pieces": {"pipeline_model_parallel_size": 2, "log_probs_chunk_size": 5},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_logits_change_nothing(layout: str, models: Any, two_ranks: Any):
    flags = dict(load=str(models.policy), entropy_coef=0.05, rollout_temperature=0.8, **models.flags, **LAYOUTS[layout])
    rollout = tiny.recorded_rollout(seed=5)
    kept, pieces = (
        two_ranks.run(ranks.train_once, tiny.tiny_args(keep_logits=keep, **flags), rollout)[0] for keep in (True, False)
    )
    for name in ("loss", "grad_norm", "entropy_loss", "train_rollout_logprob_abs_diff_mean"):
        # abs: a loss is a mean of float32 terms near 1 that cancel
        expected = pytest.approx([step[name] for step in kept.metrics], rel=1e-6, abs=3e-7)
        assert [step[name] for step in pieces.metrics] == expected
    assert relative_error(pieces.weights, kept.weights) < 1e-6


def sharded_names(rank: int, world_size: int, init_method: str, args: Arguments) -> tuple[list[str], list[str]]:
    """Checkpoint keys of the model, and of the plain GPTModel."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    built = model_builder.build_model(args, state)
    own = list(built.sharded_state_dict())
    built.output_layer.__class__ = ColumnParallelLinear
    plain = list(built.sharded_state_dict())
    parallel.shutdown()
    return own, plain


@pytest.mark.parametrize("untied", [False, True])
def test_checkpoints_store_the_output_layer_like_megatron_core(untied: bool, one_rank: Any):
    ((own, plain),) = one_rank.run(sharded_names, tiny.tiny_args(untie_embeddings_and_output_weights=untied))
    assert own == plain
    assert ("output_layer.weight" in own) is untied
