"""A vision-language model trains, tower and decoder, as transformers and plain autograd in float64, in every layout."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.arguments.dry_run.plan import estimate
from slimrl.arguments.memory import training_memory
from slimrl.rollout.convert_samples import BatchSchedule
from tests.arguments.dry_run.held import held_bytes
from tests.megatron import layouts, ranks, reference, test_resume, tiny, vision
from tests.megatron.layouts import CP2, DYNAMIC, FULL, OVERLAP, PP2, SETTINGS, SPREAD, TP2, TP2_SP, Layout

FROZEN = {"freeze_params_name_list": ["vision_model"]}
LORA = {"lora_rank": 4, "load": None}
SOME_BLOCKS = {"freeze_params_name_list": ["vision_model.blocks"]}
LAYOUTS = {
    "1 rank": Layout(1, {}),
    "1 rank, packed, layers recomputed": Layout(1, DYNAMIC | {"max_tokens_per_gpu": 80} | FULL),
    "1 rank, the tower frozen": Layout(1, FROZEN),
    "DP2": Layout(2, {}),
    "DP2, distributed optimizer, overlapped": Layout(2, OVERLAP),
    "TP2": Layout(2, TP2),
    "TP2 SP": Layout(2, TP2_SP),
    "TP2 SP, distributed optimizer, packed": Layout(2, TP2_SP | SPREAD | DYNAMIC | {"max_tokens_per_gpu": 80}),
    "TP2 SP, the tower frozen": Layout(2, TP2_SP | FROZEN),
    "PP2": Layout(2, PP2),
    "CP2, packed": Layout(2, CP2 | SPREAD | DYNAMIC | {"max_tokens_per_gpu": 60}),
    "CP2, the tower frozen": Layout(2, CP2 | SPREAD | FROZEN),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("vision")
    return vision.save_qwen2_5_vl(root / "policy", seed=1), vision.save_qwen2_5_vl(root / "reference", seed=2)


@pytest.fixture(scope="module")
def batch() -> Any:
    return vision.without_sampled_image(vision.rollout(seed=5))


@pytest.fixture(scope="module")
def truths(folders: tuple[Path, Path], batch: Any) -> dict[str | None, reference.ReferenceResult]:
    """By the frozen weights."""
    return {
        frozen: reference.train(*folders, batch, dataclasses.replace(SETTINGS, frozen=frozen))
        for frozen in (None, "visual")
    }


def args_of(folders: tuple[Path, Path], flags: dict[str, Any]) -> Any:
    settings = SETTINGS
    own = {"load": str(folders[0]), "ref_load": str(folders[1])}
    return tiny.tiny_args(
        use_kl_loss=True,
        kl_loss_coef=settings.kl_coef,
        kl_loss_type="k3",
        entropy_coef=settings.entropy_coef,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        rollout_temperature=settings.temperature,
        num_steps_per_rollout=settings.steps,
        **(own | vision.flags_of(folders[0]) | flags),
    )


def trained_like(truth: reference.ReferenceResult, args: Any, batch: Any, pool: Any, *, frozen: bool) -> Any:
    """The result of training in the ranks of `pool`, which is `truth`, without gradients of `frozen` weights."""
    result = layouts.train(pool, args, batch)
    if frozen:
        result.gradients = {name: value for name, value in result.gradients.items() if name in truth.gradients}
    found = layouts.differences(args, result, truth)
    print(found)
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5
    assert found.gradients is None or found.gradients < 2e-5
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_tower_and_decoder_like_plain_autograd(
    name: str, folders: Any, batch: Any, truths: Any, one_rank: Any, two_ranks: Any
):
    frozen = "visual" if "frozen" in name else None
    truth, pool = truths[frozen], {1: one_rank, 2: two_ranks}[LAYOUTS[name].ranks]
    result = trained_like(truth, args_of(folders, LAYOUTS[name].flags), batch, pool, frozen=bool(frozen))
    tower = {weight for weight in truth.weights if weight.startswith("visual.")}
    assert len(tower) == 30 and ({*truth.gradients} & tower == (set() if frozen else tower))
    before = reference.load_model(folders[0]).state_dict()
    for weight in tower:  # each is trained, or as it was
        start = before[weight.replace("visual.", "model.visual.")]
        assert torch.equal(result.weights[weight].double(), start) is bool(frozen), weight


@pytest.fixture(scope="module")
def seen(folders: Any, batch: Any, tmp_path_factory: pytest.TempPathFactory, two_ranks: Any) -> dict[str, list[Any]]:
    """By the images of the batch, its own or others of the same sizes: (trainer's, transformers') log-probabilities."""
    pixels = torch.randn(batch.images.pixel_values.shape, generator=torch.Generator().manual_seed(9))
    other = dataclasses.replace(batch.images, pixel_values=pixels)
    found: dict[str, list[Any]] = {}
    for name, images in (("own", batch.images), ("other", other)):
        shown = dataclasses.replace(batch, images=images)
        template = str(tmp_path_factory.mktemp(name) / "{rollout_id}.pt")
        flags = TP2_SP | {"save_debug_train_data": template, "compute_old_log_probs": "always"}
        two_ranks.run(ranks.train_once, args_of(folders, flags), shown)
        samples = torch.load(template.format(rollout_id=0), weights_only=True)["samples"]
        model = reference.load_model(folders[0])
        with torch.no_grad():
            theirs = [reference._log_probs(model, one, SETTINGS.temperature)[0] for one in reference._split(shown)]
        found[name] = [(sample["train_log_probs"], true) for sample, true in zip(samples, theirs, strict=True)]
    return found


@pytest.mark.slow
def test_other_image_changes_the_log_probs_of_its_samples(seen: Any):
    for name in ("own", "other"):
        for ours, theirs in seen[name]:
            assert (torch.as_tensor(ours).double() - theirs).abs().max() < 1e-5
    changes = [
        float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())
        for (one, _), (other, _) in zip(seen["own"], seen["other"], strict=True)
    ]
    assert min(changes[:6]) > 1e-2 and changes[6:] == [0.0, 0.0]  # the last two samples have no image


@pytest.mark.slow
def test_checkpoint_of_two_ranks_resumes_on_one(folders: Any, batch: Any, one_rank: Any, two_ranks: Any, tmp_path: Any):
    narrow = dataclasses.replace(args_of(folders, {}), num_rollout=2, save_interval=1)
    wide = dataclasses.replace(
        narrow, save=str(tmp_path), load=str(tmp_path), tensor_model_parallel_size=2, sequence_parallel=True
    )
    first = dataclasses.replace(wide, ref_load=str(folders[0]), use_kl_loss=False, kl_loss_coef=0.0)
    two_ranks.run(test_resume.train, first, [batch, batch], 1)
    shutil.copytree(tmp_path, tmp_path / "copy")
    expected = two_ranks.run(test_resume.train, wide, [batch, batch], 2)[0]
    resumed = dataclasses.replace(narrow, load=str(tmp_path / "copy"))
    actual = one_rank.run(test_resume.train, resumed, [batch, batch], 2)[0]
    assert (expected.first_rollout, actual.first_rollout) == (1, 1)
    for name, value in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], value, rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, TP2, PP2, FROZEN, PP2 | FROZEN, SPREAD, SPREAD | SOME_BLOCKS, LORA], ids=str)
def test_planned_memory_has_the_tower(changes: dict[str, Any], folders: Any, two_ranks: Any):
    plan = {"actor_num_gpus_per_node": 2, "debug_train_only": True, "global_batch_size": 4, "bf16": True}
    args = args_of(folders, changes | plan | {"rollout_max_response_len": 16, "rollout_max_prompt_len": 16})
    stages = estimate(args).stages
    held = two_ranks.run(held_bytes, args)
    for rank, one in enumerate(held):
        stage = stages[rank] if len(stages) > 1 else stages[0]
        assert (one.weights, one.gradients) == (stage.weights, stage.gradients)
        # a distributed optimizer has no state for the padding of its buffer: 64 elements a tensor at most
        padding = 12 * 64 * len(one.dense) if args.use_distributed_optimizer else 0
        assert stage.optimizer - padding <= one.optimizer <= stage.optimizer
    if changes == FROZEN:
        tower = sum(size for _, size in args.vision_weights)
        assert tower > 50_000
        trained = estimate(dataclasses.replace(args, freeze_params_name_list=None)).stages[0]
        assert trained.weights == stages[0].weights
        assert trained.gradients - stages[0].gradients == 4 * tower  # float32
        assert trained.optimizer - stages[0].optimizer == 12 * tower  # a copy and two moments


@pytest.mark.slow
def test_planned_memory_of_a_critic_has_a_tower_of_its_own(folders: Any, two_ranks: Any):
    plan = {"actor_num_gpus_per_node": 2, "debug_train_only": True, "global_batch_size": 4, "bf16": True}
    more = {"advantage_estimator": "ppo", "rollout_max_response_len": 16, "rollout_max_prompt_len": 16}
    args = args_of(folders, plan | more | TP2)
    (stage,) = estimate(args).stages
    for held in two_ranks.run(held_bytes, args):
        assert (held.weights + held.optimizer, held.gradients) == (stage.critic, stage.critic_gradients)


def patch_cost(args: Any) -> float:
    return BatchSchedule.from_args(args).patch_cost


def test_cost_of_a_patch_is_the_towers_share_of_transformers_weights(tmp_path: Path):
    vision.save_qwen2_5_vl(tmp_path, seed=1)
    model = reference.load_model(tmp_path)
    tower = sum(weight.numel() for weight in model.model.visual.parameters())
    decoder = sum(weight.numel() for weight in model.parameters()) - tower
    args = tiny.tiny_args(**vision.flags_of(tmp_path))
    assert patch_cost(args) == pytest.approx(tower / decoder)
    assert patch_cost(dataclasses.replace(args, **FROZEN)) == pytest.approx(tower / decoder / 3)
    assert patch_cost(tiny.tiny_args()) == 0


@pytest.mark.parametrize("deep", [False, True], ids=["qwen2.5", "qwen3"])
def test_planned_activations_of_the_tower_are_those_that_it_keeps(deep: bool, tmp_path: Path):
    from slimrl.megatron.model.vision import vision_tower
    from slimrl.megatron.training.profiling import KeptForBackward

    (vision.save_qwen3_vl if deep else vision.save_qwen2_5_vl)(tmp_path, seed=1)
    values = vision.DEEP_PATCH_VALUES if deep else vision.PATCH_VALUES
    images = vision.inputs([(1, 16, 16), (1, 8, 24)], 3, values)
    tower, tokens = vision_tower(str(tmp_path), torch.float32), len(images["pixel_values"]) // vision.MERGE**2
    args = tiny.tiny_args(
        **vision.flags_of(tmp_path), multimodal_keys={"image": "images"}, seq_length=64, rollout_max_response_len=None
    )
    text = dataclasses.replace(args, multimodal_keys=None)
    frozen = dataclasses.replace(args, **FROZEN)
    planned = [training_memory(one, tokens=tokens)[0].activations for one in (text, frozen, args)]
    levels = args.vision_levels * tokens * args.hidden_size * 4
    assert planned[1] - planned[0] == levels
    for trained in (True, False):
        tower.requires_grad_(trained)
        with KeptForBackward({weight.untyped_storage().data_ptr() for weight in tower.parameters()}) as kept:
            tower(images["pixel_values"], grid_thw=images["image_grid_thw"])
        if trained:  # its norms and rotary positions are not fused, and keep more
            assert 1 < kept.peak / (planned[2] - planned[1]) < 1.4
        else:
            assert kept.peak == 0
