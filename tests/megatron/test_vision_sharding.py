"""Vision-language models train with Megatron-FSDP as without it, also where a rank has no image."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import layouts, reference, test_critic, test_sharding, vision
from tests.megatron.layouts import CP2, SETTINGS, SPREAD, fsdp
from tests.megatron.test_vision import FROZEN, SOME_BLOCKS, args_of

pytestmark = pytest.mark.slow

WEIGHTS = fsdp("optim_grads_params")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SMALL_BUCKETS = {"ddp_bucket_size": 5000}  # the tower's weights are gathered and reduced in several
SAVE = {
    "Qwen2.5-VL": vision.save_qwen2_5_vl,
    "Qwen3-VL": vision.save_qwen3_vl,
    "Qwen3-VL-MoE": vision.save_qwen3_vl_moe,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "optimizer state": ("Qwen2.5-VL", fsdp("optim")),
    "gradients too": ("Qwen2.5-VL", fsdp("optim_grads") | SMALL_BUCKETS),
    "weights too": ("Qwen2.5-VL", WEIGHTS | SMALL_BUCKETS),
    "weights too, overlapped": ("Qwen2.5-VL", WEIGHTS | OVERLAP | SMALL_BUCKETS),
    "weights too, CP2": ("Qwen2.5-VL", WEIGHTS | CP2),
    "weights too, features for layers": ("Qwen3-VL", WEIGHTS | SMALL_BUCKETS),
    "weights too, experts": ("Qwen3-VL-MoE", WEIGHTS | SMALL_BUCKETS),
    "gradients too, the tower frozen": ("Qwen2.5-VL", fsdp("optim_grads") | FROZEN),
    "weights too, the tower frozen": ("Qwen2.5-VL", WEIGHTS | SMALL_BUCKETS | FROZEN),
    "weights too, the tower frozen, overlapped": ("Qwen3-VL", WEIGHTS | OVERLAP | SMALL_BUCKETS | FROZEN),
    "weights too, the tower frozen, experts": ("Qwen3-VL-MoE", WEIGHTS | SMALL_BUCKETS | FROZEN),
    "weights too, blocks of the tower frozen": ("Qwen2.5-VL", WEIGHTS | SMALL_BUCKETS | SOME_BLOCKS),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("sharded")
    return {name: (save(root / f"{name}-1", seed=1), save(root / f"{name}-2", seed=2)) for name, save in SAVE.items()}


def rollout(name: str, seed: int = 5) -> Any:
    """Its last two samples have no image: in one micro-batch only the first of two ranks has any."""
    values = vision.PATCH_VALUES if name == "Qwen2.5-VL" else vision.DEEP_PATCH_VALUES
    return vision.without_sampled_image(vision.rollout(seed=seed, values=values))


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_trains_like_plain_autograd(case: str, folders: Any, two_ranks: Any):
    name, flags = CASES[case]
    batch = rollout(name)
    assert batch.images.counts.tolist()[-2:] == [0, 0]
    args = args_of(folders[name], flags)
    frozen = {"vision_model": "visual", "vision_model.blocks": r"visual\.blocks"}.get(
        *(args.freeze_params_name_list or [""])
    )
    truth = reference.train(*folders[name], batch, dataclasses.replace(SETTINGS, frozen=frozen))
    result = layouts.train(two_ranks, args, batch)
    found = layouts.differences(args, result, truth)
    print(f"{case}: {found}")
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5


def test_rollout_without_any_image_trains_the_tower_by_nothing_but_decay(folders: Any, two_ranks: Any):
    name = "Qwen2.5-VL"
    batch = dataclasses.replace(rollout(name), images=None)
    tokens = batch.tokens.clone()
    tokens[tokens == vision.IMAGE] = 7
    batch = dataclasses.replace(batch, tokens=tokens)
    args = args_of(folders[name], WEIGHTS)
    result = layouts.train(two_ranks, args, batch)
    before = reference.load_model(folders[name][0]).state_dict()
    decayed = (1 - SETTINGS.lr * SETTINGS.weight_decay) ** SETTINGS.steps
    tower = [weight for weight in result.weights if weight.startswith("visual.")]
    for weight in tower:
        start = before[f"model.{weight}"]
        expected = start * (decayed if start.dim() > 1 else 1)
        assert torch.allclose(result.weights[weight].double(), expected, rtol=1e-6, atol=1e-7), weight
    assert len(tower) == 30


def test_megatron_fsdp_and_distributed_optimizer_load_each_others_checkpoints(
    folders: Any, two_ranks: Any, tmp_path: Path
):
    name = "Qwen3-VL"
    rollouts = [rollout(name), rollout(name, seed=6)]

    def run(saved: str, flags: dict[str, Any], stop: int, load: str | None = None) -> test_sharding.Outcome:
        args = args_of(folders[name], flags | {"save": str(tmp_path / saved)})
        args.load = args.load if load is None else str(tmp_path / load)
        return two_ranks.run(test_sharding.train, args, rollouts, stop)[0]

    whole = run("whole", WEIGHTS, 2)
    run("sharded", WEIGHTS, 1)
    run("spread", SPREAD, 1)
    for saved, flags in (("sharded", SPREAD), ("spread", WEIGHTS)):
        crossed = run(f"{saved} crossed", flags, 2, load=saved)
        assert layouts.relative_error(crossed.weights, whole.weights) < 1e-5
        assert test_sharding.losses_and_norms(crossed) == pytest.approx(
            test_sharding.losses_and_norms(whole)[4:], rel=1e-5
        )


def test_critic_trains_like_plain_autograd(folders: Any, two_ranks: Any):
    folder, batch = folders["Qwen2.5-VL"][1], rollout("Qwen2.5-VL")
    head = 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(11))
    args = test_critic.critic_alone(args_of((folder, folder), WEIGHTS | SMALL_BUCKETS))
    found = two_ranks.run(test_critic.train, args, batch, head)
    test_critic.assert_as_truth(found, batch, test_critic.truth(folder, head, batch))
