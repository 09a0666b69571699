"""The bias that balances the experts follows the routing of real tokens, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments, read_args
from slimrl.data.train_batch import RolloutBatch
from tests.families.toys import TOYS
from tests.megatron import ranks, tiny

pytestmark = pytest.mark.slow

TOY = TOYS["glm4-moe"]  # three layers, the last two with eight experts, two per token
STEP = 0.05
TWO_STAGES = ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LAYOUTS = {
    "one rank": (1, ()),
    "much padding": (1, ("--data-pad-size-multiplier", "64")),
    "recomputed": (1, RECOMPUTE),
    "data and expert ranks": (2, ("--expert-model-parallel-size", "2")),
    "context ranks": (2, ("--context-parallel-size", "2")),
    "stages of tensor parallel ranks": (4, (*TWO_STAGES, *TENSOR)),
}


def biases(rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch) -> dict[str, Tensor]:
    """The biases of this rank's routers after one optimizer step, by global name."""
    from slimrl.weights.reshard import global_tensors

    trainer = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, rollout))
    tensors = global_tensors(trainer.stages)
    found = {name: tensor.clone() for name, tensor in tensors.items() if name.endswith("expert_bias")}
    trainer.close()
    return found


def expected_biases(folder: Path, rollout: RolloutBatch) -> dict[str, Tensor]:
    """Each bias one step towards its expert's fair share, from the routing of transformers."""
    model, chosen = TOY.load(folder), {}

    def count(layer: int, router: torch.nn.Module, hidden: Tensor) -> None:
        scores = torch.nn.functional.linear(hidden.flatten(0, 1), router.weight).sigmoid()
        picked = (scores + router.e_score_correction_bias).topk(2).indices
        chosen[layer] = chosen.get(layer, 0) + torch.bincount(picked.flatten(), minlength=8)

    routers = {layer: model.model.layers[layer].mlp.gate for layer in (1, 2)}
    for layer, router in routers.items():
        router.register_forward_pre_hook(lambda module, inputs, layer=layer: count(layer, module, inputs[0]))
    with torch.no_grad():
        for start, length in zip(rollout.token_offsets.tolist(), rollout.total_lengths.tolist(), strict=False):
            model(rollout.tokens[start : start + length][None])
    return {
        f"decoder.layers.{layer}.mlp.router.expert_bias": router.e_score_correction_bias
        + STEP * torch.sign(chosen[layer].float().mean() - chosen[layer])
        for layer, router in routers.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TOY.save(tmp_path_factory.mktemp("toy"), tokenizer=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_follow_the_routing_of_real_tokens(
    layout: str, folder: Path, one_rank: Any, two_ranks: Any, four_ranks: Any
):
    size, layout_flags = LAYOUTS[layout]
    args, _ = read_args([*TOY.flags, *layout_flags], entry="convert_hf_to_torch_dist.py")
    training = {"num_rollout": 1, "num_steps_per_rollout": 1, "micro_batch_size": 2, "lr": 1e-3}
    vars(args).update(training, moe_router_bias_update_rate=STEP, ref_load=str(folder))
    if "--data-pad-size-multiplier" not in layout_flags:
        args.data_pad_size_multiplier = 1
    rollout = tiny.recorded_rollout(seed=7)
    expected = expected_biases(folder, rollout)
    pool = {1: one_rank, 2: two_ranks, 4: four_ranks}[size]
    results = pool.run(biases, args, rollout)
    assert set().union(*results) == set(expected)
    for result in results:
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
