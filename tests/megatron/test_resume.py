"""A killed and resumed run ends bit for bit where an uninterrupted run ends."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import read_manifest
from slimrl.data.train_batch import RolloutBatch
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool
from tests.megatron.layouts import fsdp

pytestmark = pytest.mark.slow

ROLLOUTS = 4
DATA_STATE = {"epoch": 1, "offset": 12, "buffer": [{"prompt": "1 + 1 =", "label": 2}], "rng": (3, (1, 2, 3), None)}


@dataclasses.dataclass
class Outcome:
    """The final report of a rank."""

    first_rollout: int
    data_state: dict | None
    metrics: list[dict[str, float]]
    state: dict[str, Tensor]  # this rank's weights and optimizer state
    step_counts: set[float]
    random_numbers: list[float]
    weights: dict[str, Tensor]  # unsharded, by Hugging Face name


def train(
    rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch], stop: int
) -> Outcome:
    """Trains from the checkpoint up to rollout `stop`, saving after each."""
    from slimrl.megatron.checkpoint.optimizer_state import step_counts

    trainer = ranks.start(rank, world_size, init_method, args)
    metrics = []
    for rollout_id in range(trainer.start_rollout_id, stop):
        steps = trainer.train(rollout_id, ranks.share_of(trainer, rollouts[rollout_id]))
        metrics += steps
        draw()  # like a model with dropout
        if args.save is not None:
            trainer.save(rollout_id, DATA_STATE | {"offset": rollout_id})
    outcome = Outcome(
        first_rollout=trainer.start_rollout_id,
        data_state=trainer.data_state,
        metrics=metrics,
        state=ranks.local_state(trainer) | ranks.critic_state(trainer),
        step_counts=step_counts(trainer.optimizer),
        random_numbers=draw(),
        weights={} if args.trains_reward_model else ranks.export(trainer),
    )
    trainer.close()
    return outcome


def draw() -> list[float]:
    """One number from every random generator."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():  # the generator of the tensor-parallel regions
        regional = float(torch.rand(()))
    return [random.random(), float(numpy.random.rand()), float(torch.rand(())), regional]


def schedule_args(models: Any, **changes: Any) -> Arguments:
    own = dict(
        num_rollout=ROLLOUTS,
        ref_load=str(models.policy),
        lr_decay_style="cosine",
        lr_warmup_iters=3,
        lr_warmup_init=1e-4,
        min_lr=1e-4,
        use_kl_loss=True,
        kl_loss_coef=0.05,
    )
    return tiny.tiny_args(**own | models.flags | changes)


SPREAD = {"use_distributed_optimizer": True}
ON_HOST = SPREAD | {"bf16": True, "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
PP2 = {"pipeline_model_parallel_size": 2}
VIRTUAL = PP2 | {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
PPO = {
    "advantage_estimator": "ppo",
    "gamma": 0.99,
    "lambd": 0.9,
    "critic_lr": 5e-3,
    "critic_lr_warmup_iters": 2,
    "num_critic_only_steps": 1,
}

ADAPTIVE_KL = {"kl_coef": 0.05, "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_target": 0.1, "kl_horizon": 20}
REWARD_MODEL = {
    "loss_type": "reward_model_loss",
    "n_samples_per_prompt": 2,
    "micro_batch_size": 2,
    "compute_advantages_and_returns": False,
    "use_kl_loss": False,
}

# name: ranks, model, flags
LAYOUTS = {
    "DP2": (2, "models", {}),
    "DP2 with the distributed optimizer": (2, "models", SPREAD),
    "DP2 with the distributed optimizer in bfloat16": (2, "models", SPREAD | {"bf16": True}),
    "one rank in bfloat16": (1, "models", {"bf16": True}),
    "TP2": (2, "models", TP2),
    "PP2 virtual": (2, "deep_models", VIRTUAL),
    "CP2 with the distributed optimizer": (2, "models", SPREAD | {"context_parallel_size": 2}),
    "EP2 with the distributed optimizer": (2, "expert_models", SPREAD | EP2),
    "reward model, TP2": (2, "models", TP2 | REWARD_MODEL),
    "reward model, Megatron-FSDP": (2, "models", fsdp("optim_grads_params") | REWARD_MODEL),
    "a reference that changes, DP2 with the distributed optimizer": (2, "models", SPREAD | {"ref_update_interval": 1}),
    "a reference that changes, Megatron-FSDP": (2, "models", fsdp("optim_grads_params") | {"ref_update_interval": 1}),
    "PPO, Megatron-FSDP": (2, "models", fsdp("optim_grads_params") | PPO),
    "PPO with Muon, TP2": (2, "models", TP2 | PPO | {"optimizer": "muon"}),
    "PPO, normalized values, adaptive KL": (1, "models", PPO | ADAPTIVE_KL | {"normalize_values": True}),
    "PPO, DP2 with the distributed optimizer": (2, "models", SPREAD | PPO),
    "PPO, TP2": (2, "models", TP2 | PPO),
    "PPO, CP2 with the distributed optimizer": (2, "models", SPREAD | {"context_parallel_size": 2} | PPO),
    "PPO, EP2": (2, "expert_models", EP2 | PPO),
    "PPO, EP2 with the distributed optimizer": (2, "expert_models", SPREAD | EP2 | PPO),
    "PPO, state in host memory": (2, "models", ON_HOST | PPO),
    "PPO, LoRA adapters, TP2": (2, "models", TP2 | PPO | LORA),
    "LoRA adapters of latent attention, TP2": (2, "latent_models", TP2 | LORA),
    "PPO, PP2 virtual, saved in the background": (2, "deep_models", VIRTUAL | PPO | {"async_save": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_run_resumes_bit_for_bit(
    layout: str, request: pytest.FixtureRequest, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
):
    size, kind, changes = LAYOUTS[layout]
    models = request.getfixturevalue(kind)
    pool = one_rank if size == 1 else two_ranks
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ROLLOUTS)]
    args = schedule_args(models, **changes)
    if args.samples_together > 1:
        for rollout in rollouts:
            rollout.group_ids = torch.arange(len(rollout)) // args.samples_together
    whole = pool.run(train, args, rollouts, ROLLOUTS)

    args.save = args.load = str(tmp_path)
    with RankPool(size) as doomed:
        first_half = doomed.run(train, args, rollouts, ROLLOUTS // 2)
        doomed.kill()
    second_half = pool.run(train, args, rollouts, ROLLOUTS)

    for complete, before, after in zip(whole, first_half, second_half, strict=True):
        assert (before.first_rollout, after.first_rollout) == (0, ROLLOUTS // 2)
        assert after.data_state == DATA_STATE | {"offset": ROLLOUTS // 2 - 1}
        assert before.metrics + after.metrics == complete.metrics
        assert complete.state.keys() == after.state.keys()
        assert [name for name, value in complete.state.items() if not torch.equal(value, after.state[name])] == []
        assert after.step_counts == complete.step_counts == {2.0 * (ROLLOUTS - args.num_critic_only_steps)}
        assert after.random_numbers == complete.random_numbers
    written = read_manifest(tmp_path / f"iter_{ROLLOUTS - 1:07d}")
    assert written is not None and written["value_head"] is args.trains_reward_model
    if args.use_critic:
        written = read_manifest(tmp_path / f"critic/iter_{ROLLOUTS - 1:07d}")
        assert written is not None and written["value_head"] is True


def test_resumed_run_has_the_reference_of_an_earlier_checkpoint(deep_models: Any, two_ranks: RankPool, tmp_path: Path):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ROLLOUTS)]
    args = schedule_args(deep_models, **VIRTUAL, ref_update_interval=2, save=str(tmp_path), load=str(tmp_path))
    two_ranks.run(train, args, rollouts, 3)
    continued = two_ranks.run(train, args, rollouts, ROLLOUTS)
    whole = two_ranks.run(train, dataclasses.replace(args, save=None, load=None), rollouts, ROLLOUTS)
    for complete, after in zip(whole, continued, strict=True):
        assert after.first_rollout == 3
        assert after.metrics == complete.metrics[-len(after.metrics) :]
        assert all(torch.equal(value, after.state[name]) for name, value in complete.state.items())
    shutil.rmtree(tmp_path / "iter_0000001")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(RuntimeError, match="has no checkpoint after rollout 1, whose weights are the reference"):
        two_ranks.run(train, args, rollouts, ROLLOUTS)


def test_learning_rate_follows_the_schedule(models: Any, one_rank: RankPool):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(2)]
    steps = one_rank.run(train, schedule_args(models), rollouts, 2)[0].metrics
    # linear from 1e-4 to 2e-3 over 3 steps, then a cosine down to 1e-4 over the remaining 5 of 8
    assert [step["lr"] for step in steps] == pytest.approx([1e-4, 1e-4 + 1.9e-3 / 3, 1e-4 + 3.8e-3 / 3, 2e-3])


# name: model, flags of two ranks
WIDE = {
    "TP2": ("models", TP2),
    "TP2 with the distributed optimizer": ("models", TP2 | SPREAD),
    "PP2 with the distributed optimizer": ("models", PP2 | SPREAD),
    "PP2 virtual": ("deep_models", VIRTUAL),
    "CP2 with the distributed optimizer": ("models", SPREAD | {"context_parallel_size": 2}),
    "EP2 with the distributed optimizer": ("expert_models", EP2 | SPREAD),
    "LoRA adapters of latent attention, TP2": ("latent_models", TP2 | LORA),
}


@pytest.mark.parametrize("layout", WIDE)
def test_checkpoint_of_two_ranks_resumes_on_one(
    layout: str, request: pytest.FixtureRequest, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
):
    kind, changes = WIDE[layout]
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ROLLOUTS)]
    narrow = schedule_args(
        request.getfixturevalue(kind), **{name: value for name, value in changes.items() if name in (*SPREAD, *LORA)}
    )
    wide = dataclasses.replace(narrow, save=str(tmp_path), load=str(tmp_path), **changes)
    two_ranks.run(train, wide, rollouts, 2)
    shutil.copytree(tmp_path, tmp_path / "copy")
    expected = two_ranks.run(train, wide, rollouts, ROLLOUTS)[0]
    actual = one_rank.run(train, dataclasses.replace(narrow, load=str(tmp_path / "copy")), rollouts, ROLLOUTS)[0]
    assert actual.first_rollout == 2
    assert actual.step_counts == {2.0 * ROLLOUTS}
    for name, value in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], value, rtol=0, atol=5e-6)


def test_torn_checkpoint_is_ignored_and_overwritten(models: Any, one_rank: RankPool, tmp_path: Path):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(2)]
    args = schedule_args(models)
    args.save = args.load = str(tmp_path)
    one_rank.run(train, args, rollouts, 1)
    torn = tmp_path / "iter_0000001.tmp"
    shutil.copytree(tmp_path / "iter_0000000", torn)
    (torn / ".metadata").unlink()
    resumed = one_rank.run(train, args, rollouts, 2)[0]
    assert resumed.first_rollout == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000000",
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]


def test_flags_select_what_is_loaded_from_a_checkpoint(models: Any, one_rank: RankPool, tmp_path: Path):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ROLLOUTS)]
    args = schedule_args(models)
    args.save = str(tmp_path)
    one_rank.run(train, args, rollouts, 2)

    def loaded(**changes: Any) -> Outcome:
        flags = dataclasses.replace(args, save=None, load=str(tmp_path), **changes)
        return one_rank.run(train, flags, rollouts, 0)[0]

    assert (loaded().first_rollout, loaded().step_counts) == (2, {4.0})
    assert loaded(ckpt_step=0).first_rollout == 1
    finetuned = loaded(finetune=True)
    assert (finetuned.first_rollout, finetuned.step_counts, finetuned.data_state) == (0, {0.0}, None)
    without_optimizer = loaded(no_load_optim=True)
    assert (without_optimizer.first_rollout, without_optimizer.step_counts) == (2, {0.0})
    for name, value in loaded().weights.items():
        assert torch.equal(value, finetuned.weights[name]) and torch.equal(value, without_optimizer.weights[name])
    assert loaded(no_load_rng=True).random_numbers != loaded().random_numbers
    assert loaded(start_rollout_id=7).first_rollout == 7


def failing_load(rank: int, world_size: int, init_method: str, args: Arguments) -> str:
    """The error of starting a trainer."""
    from slimrl.megatron import parallel

    try:
        ranks.start(rank, world_size, init_method, args)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    finally:
        parallel.shutdown()
    return ""


def test_unloadable_state_is_rejected_by_name(models: Any, one_rank: RankPool, tmp_path: Path):
    def message(**changes: Any) -> str:
        return one_rank.run(failing_load, tiny.tiny_args(**changes))[0]

    policy = str(models.policy)
    assert "--ref-load is not given" in message(load=str(tmp_path))
    assert "has no checkpoint" in message(ref_load=str(tmp_path))
    assert "iter_0000009 does not exist" in message(load=policy, ckpt_step=9)
    assert "output_layer.weight" in message(load=policy, untie_embeddings_and_output_weights=True)
    assert "q_layernorm" in message(load=policy, qk_layernorm=False)
    args = schedule_args(models, save=str(tmp_path), no_save_optim=True)
    one_rank.run(train, args, [tiny.recorded_rollout(0)], 1)
    assert "has no optimizer state: add --no-load-optim" in message(load=str(tmp_path))


def first_weights(rank: int, world_size: int, init_method: str, args: Arguments) -> dict[str, Tensor]:
    """The policy's weights before any training, and the reference's under `ref.`."""
    trainer = ranks.start(rank, world_size, init_method, args)
    weights = ranks.export(trainer)
    with trainer._policy.reference.loaded_weights():
        weights |= {f"ref.{name}": tensor for name, tensor in ranks.export(trainer).items()}
    trainer.close()
    return weights


def test_hf_folder_gives_the_same_weights_as_its_conversion(models: Any, two_ranks: RankPool):
    args = schedule_args(models, tensor_model_parallel_size=2)
    converted = dataclasses.replace(args, ref_load=str(models.reference), load=str(models.policy))
    direct = dataclasses.replace(args, ref_load=str(models.reference_hf), load=str(models.policy_hf))
    expected = two_ranks.run(first_weights, converted)[0]
    weights = two_ranks.run(first_weights, direct)[0]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    norm = "model.norm.weight"
    assert not torch.equal(weights[norm], weights[f"ref.{norm}"])  # the two models differ
