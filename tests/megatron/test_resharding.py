"""A checkpoint saved in one parallel layout resumes in another: the next step is the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments, read_args
from slimrl.data.train_batch import RolloutBatch
from tests.families.toys import TOYS
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool

pytestmark = pytest.mark.slow

LATENT = TOYS["deepseek-v3"]  # latent attention, one dense layer, two of experts with a bias in the router
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
PLAIN = {"use_distributed_optimizer": False}
UNEVEN = PP2 | {"decoder_first_pipeline_num_layers": 1}
WAITING = {"prompt": "1 + 1 =", "tokens": [4, 5], "loss_mask": [1], "weight_versions": ["1", "2"], "label": None}
DATA_STATE = {"version": 2, "next_index": 12, "returned": [[WAITING, WAITING]]}


@dataclasses.dataclass
class Step:
    """State of a rank after the step that follows the checkpoint."""

    first_rollout: int
    data_state: dict[str, Any] | None
    metrics: dict[str, float]
    step_counts: set[float]
    saved: dict[str, Tensor]  # the weights of the last checkpoint, by Hugging Face name
    weights: dict[str, Tensor]


def save_and_step(
    rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch], steps: int
) -> Step:
    """`steps` rollouts starting from --load, each saved except the last."""
    from slimrl.megatron.checkpoint.optimizer_state import step_counts
    from slimrl.models.families import family_for
    from slimrl.weights.hf_checkpoint import read_hf_config

    trainer = ranks.start(rank, world_size, init_method, args)
    first = trainer.start_rollout_id
    family = family_for(read_hf_config(Path(args.hf_checkpoint)))
    metrics, saved = [], {}
    for rollout_id in range(first, first + steps):
        metrics = trainer.train(rollout_id, ranks.share_of(trainer, rollouts[rollout_id]))
        if rollout_id < first + steps - 1:
            trainer.save(rollout_id, DATA_STATE)
            saved = ranks.export(trainer, family=family)
    weights = ranks.export(trainer, family=family)
    step = Step(first, trainer.data_state, metrics[-1], step_counts(trainer.optimizer), saved, weights)
    trainer.close()
    return step


def flags_of(kind: str, request: pytest.FixtureRequest) -> Arguments:
    training: dict[str, Any] = {
        "use_distributed_optimizer": True,
        "num_rollout": 3,
        "num_steps_per_rollout": 1,
        "lr": 2e-3,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 2,
        "min_lr": 1e-4,
        "adam_eps": 1e-6,  # far above rounding: a gradient of pure noise must not become a full step
    }
    if kind == "latent":
        folder = request.getfixturevalue("tmp_path") / "toy"
        LATENT.save(folder, tokenizer=False)
        args, _ = read_args([*LATENT.flags], entry="convert_hf_to_torch_dist.py")
        training |= {"micro_batch_size": 2, "eps_clip": 0.02, "moe_router_bias_update_rate": 1e-3}
    else:
        models = request.getfixturevalue(kind)
        folder, args = models.policy_hf, tiny.tiny_args(**models.flags)
    for name, value in training.items():
        setattr(args, name, value)
    args.ref_load = args.hf_checkpoint = str(folder)
    return args


# name: model, flags of the saving ranks, flags of the resuming ranks; ranks of both
CHANGES = {
    "dense, TP2 to PP2": ("models", TP2, PP2, 2, 2),
    "dense, one rank to DP2": ("models", {}, {}, 1, 2),
    "dense, DP2 to one rank": ("models", {}, {}, 2, 1),
    "experts, DP2 to EP2": ("expert_models", {}, EP2, 2, 2),
    "experts, EP2 to TP2": ("expert_models", EP2, TP2, 2, 2),
    "latent attention and experts, PP2 to TP2 with EP2": ("latent", UNEVEN, TP2 | EP2, 2, 2),  # no expert on stage 0
    "the same without the distributed optimizer": ("latent", UNEVEN | PLAIN, TP2 | EP2 | PLAIN, 2, 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_next_step_is_the_same_in_another_layout(
    change: str, request: pytest.FixtureRequest, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
):
    kind, before, after, *sizes = CHANGES[change]
    one, other = (one_rank if size == 1 else two_ranks for size in sizes)
    args = flags_of(kind, request)
    args.save = args.load = str(tmp_path / "save")
    exports = tmp_path / "hf_{rollout_id}"
    (tmp_path / "save").mkdir()
    rollouts = [tiny.recorded_rollout(seed) for seed in range(3)]
    expected = one.run(save_and_step, dataclasses.replace(args, **before, save_hf=str(exports)), rollouts, 3)[0]
    assert expected.data_state is None
    shutil.copytree(tmp_path / "save", tmp_path / "copy")
    moved = dataclasses.replace(args, **after, load=str(tmp_path / "copy"))
    actual = other.run(save_and_step, moved, rollouts, 1)

    manifest = json.loads((tmp_path / "save" / "iter_0000001" / "slimrl_checkpoint.json").read_text())
    assert (manifest["iteration"], manifest["weight_version"]) == (1, "2")
    for step in actual:
        assert (step.first_rollout, step.step_counts, step.data_state) == (2, {3.0}, DATA_STATE)
        assert step.metrics["lr"] == expected.metrics["lr"]
        assert step.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=2e-6)
        assert step.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6, abs=1e-7)
        assert distance(step.weights, expected.weights) < 1e-6
    check_export(Path(str(exports).format(rollout_id=1)), expected.saved)


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Relative distance over all weights."""
    assert some.keys() == others.keys()
    wrong = sum(float((some[name] - value).double().square().sum()) for name, value in others.items())
    return (wrong / sum(float(value.double().square().sum()) for value in others.values())) ** 0.5


def check_export(folder: Path, weights: dict[str, Tensor]) -> None:
    """Asserts that the exported Hugging Face folder has the checkpoint's weights, bit for bit."""
    from slimrl.weights.hf_checkpoint import HfCheckpoint

    with HfCheckpoint(folder) as checkpoint:
        assert set(checkpoint.names) - {"lm_head.weight"} == weights.keys() - {"lm_head.weight"}
        for name, value in weights.items():
            assert torch.equal(checkpoint.tensor(name), value.to(checkpoint.dtype(name))), name
