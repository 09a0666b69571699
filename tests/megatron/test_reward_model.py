"""A reward model in every layout against transformers and autograd in float64, from rewards to trained weights."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification

from slimrl.algorithms.preference_losses import REWARD_MODEL_LOSSES
from slimrl.observability.metrics import is_known
from tests import accuracy
from tests.megatron import layouts, ranks, reference, tiny
from tests.megatron.layouts import CP2, DYNAMIC, EP2, ETP2, FULL, OVERLAP, PP2, SPREAD, TP2_SP, VIRTUAL, Layout, fsdp
from tests.megatron.test_critic import Truth, set_head

LR = 2e-3
SETTINGS = dataclasses.replace(layouts.SETTINGS, lr=LR)
WHOLE = {"micro_batch_size": 4}
# layout, model, loss, responses of a group
CASES = {
    "1 rank": (Layout(1, WHOLE), "dense", "bradley_terry", 2),
    "1 rank, four responses": (Layout(1, WHOLE), "dense", "bradley_terry", 4),
    "1 rank, packed, recomputed": (Layout(1, DYNAMIC | FULL), "MLA", "bradley_terry", 2),
    "TP2 SP": (Layout(2, TP2_SP | WHOLE), "dense", "bradley_terry", 4),
    "TP2 SP, packed": (Layout(2, TP2_SP | DYNAMIC), "MoE", "mse", 1),
    "PP2, packed": (Layout(2, PP2 | DYNAMIC), "dense", "bradley_terry", 2),
    "PP2 virtual, packed": (Layout(2, VIRTUAL | DYNAMIC, 4), "dense", "mse", 1),
    "CP2, packed": (Layout(2, CP2 | DYNAMIC), "dense", "bradley_terry", 2),
    "CP2": (Layout(2, CP2 | WHOLE), "dense", "mse", 1),
    "DP2, overlapped, packed": (Layout(2, SPREAD | OVERLAP | DYNAMIC), "dense", "bradley_terry", 4),
    "EP2, packed": (Layout(2, EP2 | SPREAD | DYNAMIC), "MoE", "bradley_terry", 2),
    "ETP2 TP2 SP, packed": (Layout(2, ETP2 | DYNAMIC), "MLA", "bradley_terry", 2),
    "DP2, Megatron-FSDP": (Layout(2, fsdp("optim_grads_params") | WHOLE), "dense", "bradley_terry", 2),
    "DP2, Megatron-FSDP, packed": (Layout(2, fsdp("optim_grads_params") | DYNAMIC), "dense", "bradley_terry", 2),
    "DP2, Megatron-FSDP of the optimizer's state": (Layout(2, fsdp("optim") | WHOLE), "MoE", "mse", 1),
    "TP2 SP PP2, packed": (Layout(4, TP2_SP | PP2 | DYNAMIC), "dense", "bradley_terry", 2),
}


def test_several_comparisons_of_a_prompt_have_the_mean_of_their_losses():
    rewards = torch.tensor([[1.0, 0.5, -2.0], [0.0, 0.25, 0.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0.25, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    found = REWARD_MODEL_LOSSES["bradley_terry"].formula(rewards, targets)
    # -log sigmoid(x) = log(1 + exp(-x))
    expected = [
        (softplus(torch.tensor([-0.25, -2.75]).double())).mean(),
        softplus(torch.tensor([0.25, 0.0]).double()).mean(),
    ]
    torch.testing.assert_close(found["loss"].detach(), torch.stack(expected))
    assert found["pair_accuracy"].tolist() == [1.0, 0.0]  # equal rewards are no correct order
    assert found["reward_margin"].tolist() == [1.75, -0.125]
    found["loss"].sum().backward()
    # d/dr(c) = -mean sigmoid(-(gap - margin))
    torch.testing.assert_close(rewards.grad[0, 0], -torch.sigmoid(torch.tensor([-0.25, -2.75]).double()).mean())


def test_pointwise_loss_is_the_squared_error():
    rewards = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    found = REWARD_MODEL_LOSSES["mse"].formula(rewards, torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    assert found["loss"].tolist() == [0.25, 9.0] and found["absolute_error"].tolist() == [0.5, 3.0]


@pytest.mark.parametrize("name", REWARD_MODEL_LOSSES)
def test_every_metric_is_in_the_table_of_metrics(name: str):
    row = REWARD_MODEL_LOSSES[name]
    values = row.formula(torch.zeros(1, 2 if row.compares else 1).double(), torch.zeros(1, 1).double())
    assert tuple(values) == ("loss", *row.metrics)
    assert all(is_known(f"train/{metric}") for metric in values)


@dataclasses.dataclass
class Trained:
    """The metrics of the optimizer steps on one rank, and of evaluations before and after them."""

    metrics: list[dict[str, float]]
    held_out: list[dict[str, float]]


def train(rank: int, world_size: int, init_method: str, args: Any, rollout: Any, head: Tensor) -> Trained:
    """Trains a reward model from a given head on one rollout."""
    trainer = ranks.start(rank, world_size, init_method, args)
    set_head(types.SimpleNamespace(model=trainer._policy), head)
    batch = ranks.share_of(trainer, rollout)
    before = trainer.held_out.evaluate(batch)
    metrics = trainer.train(0, batch)
    result = Trained(metrics, [before, trainer.held_out.evaluate(batch)])
    trainer.close()
    return result


def rollout_of(responses: int) -> Any:
    """Recorded samples whose targets are margins of the preferred response, or scores."""
    rollout = tiny.recorded_rollout(seed=5, samples=16)
    rollout.group_ids = torch.arange(16) // responses
    targets = torch.rand(16, generator=torch.Generator().manual_seed(3))
    if responses > 1:
        targets[torch.arange(16) % responses != 0] = 0.0
    rollout.raw_rewards = targets
    return rollout


def true_metrics(rewards: list[Tensor], targets: Tensor, responses: int) -> dict[str, Tensor]:
    """The mean over groups, each written out."""
    notes = []
    for start in range(0, len(rewards), responses):
        group, target = rewards[start : start + responses], float(targets[start])
        if responses == 1:
            error = group[0] - target
            notes.append({"loss": error * error, "absolute_error": error.abs(), "predicted_reward": group[0]})
            continue
        gaps = [group[0] - other for other in group[1:]]
        losses = [torch.log1p(torch.exp(-(gap - target))) for gap in gaps]
        notes.append(
            {
                "loss": sum(losses) / len(losses),
                "pair_accuracy": torch.tensor([float(gap > 0) for gap in gaps]).double().mean(),
                "reward_margin": sum(gaps) / len(gaps),
                "chosen_reward": group[0],
            }
        )
    return {name: sum(note[name] for note in notes) / len(notes) for name in notes[0]}


def truth(
    folder: Any, head: Tensor, rollout: Any, responses: int, make_optimizer: Any = None
) -> tuple[list[dict[str, float]], list[float]]:
    """The metrics of both steps with the gradient norm, and the losses of everything before and after training."""
    model = Truth(folder, head)
    samples = reference._split(rollout)
    adam = (make_optimizer or reference._adam)(dict(model.named_parameters()), SETTINGS)

    def rewards(rows: range) -> list[Tensor]:
        return [model.body(samples[row]["tokens"][None]).last_hidden_state[0, -1] @ model.head[0] for row in rows]

    def loss_of_all() -> float:
        with torch.no_grad():
            return float(true_metrics(rewards(range(len(samples))), rollout.raw_rewards, responses)["loss"])

    steps, losses = [], [loss_of_all()]
    size = len(samples) // SETTINGS.steps
    for step in range(SETTINGS.steps):
        adam.zero_grad()
        rows = range(step * size, (step + 1) * size)
        found = true_metrics(rewards(rows), rollout.raw_rewards[rows.start : rows.stop], responses)
        found["loss"].backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_grad)
        steps.append({name: float(value.detach()) for name, value in found.items()} | {"grad_norm": float(norm)})
        adam.step()
    return steps, [*losses, loss_of_all()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("reward-model"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any, four_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


def flags(models: Any, layout: Layout, kind: str, loss: str, responses: int) -> Any:
    args = dataclasses.replace(
        models.args(layout, kind, SETTINGS),
        loss_type="reward_model_loss",
        reward_model_loss=loss,
        n_samples_per_prompt=responses,
        compute_advantages_and_returns=False,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        entropy_coef=0.0,
        moe_router_bias_update_rate=0.0,
    )
    return args


EXPORTED = ("1 rank", "TP2 SP", "PP2, packed", "EP2, packed")


def train_and_export(rank: int, world_size: int, init_method: str, args: Any, rollout: Any, head: Tensor) -> float:
    """Trains from a given head and saves; the loss of everything under the saved weights."""
    trainer = ranks.start(rank, world_size, init_method, args)
    set_head(types.SimpleNamespace(model=trainer._policy), head)
    batch = ranks.share_of(trainer, rollout)
    trainer.train(0, batch)
    trainer.save(0, {})
    loss = trainer.held_out.evaluate(batch)["loss"]
    trainer.close()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_export_at_a_save_is_the_classifier_that_was_trained(name: str, models: Any, pools: Any, tmp_path: Any):
    """Its rewards by transformers' own classifier, in float64, give the trainer's loss."""
    layout, kind, loss, responses = CASES[name]
    head = 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(11))
    rollout = rollout_of(responses)
    args = flags(models, layout, kind, loss, responses)
    args.save, args.save_hf = str(tmp_path / "save"), str(tmp_path / "hf_{rollout_id}")
    args.hf_checkpoint = str(models.folder(kind, layout.layers, "policy"))
    (trained, *_) = pools[layout.ranks].run(train_and_export, args, rollout, head)
    folder = tmp_path / "hf_0"
    config = json.loads((folder / "config.json").read_text())
    name_of = {"dense": "Qwen3", "MoE": "Qwen3Moe"}[kind]
    assert config["architectures"] == [f"{name_of}ForSequenceClassification"] and config["num_labels"] == 1
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, **plain)
    with torch.no_grad():
        rewards = [model(sample["tokens"][None]).logits[0, 0] for sample in reference._split(rollout)]
    true = float(true_metrics(rewards, rollout.raw_rewards, responses)["loss"])
    accuracy.near("loss", [trained], [true], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_reward_model_is_trained_as_by_plain_autograd(name: str, models: Any, pools: Any):
    layout, kind, loss, responses = CASES[name]
    head = 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(11))
    rollout = rollout_of(responses)
    args = flags(models, layout, kind, loss, responses)
    found = pools[layout.ranks].run(train, args, rollout, head)
    folder = models.folder(kind, layout.layers, "reference" if args.load is None else "policy")
    steps, losses = truth(folder, head, rollout, responses)
    for rank in found:
        for step, true in zip(rank.metrics, steps, strict=True):
            for metric, value in true.items():
                accuracy.near("loss", {metric: step[metric]}, {metric: value}, rel=1e-4, abs=1e-5)
            assert "perplexity" not in step and "pg_loss" not in step
        evaluated = [held_out["loss"] for held_out in rank.held_out]
        accuracy.near("weights", evaluated, losses, rel=2e-4, abs=1e-5)
    assert abs(losses[1] - losses[0]) > 1e-3  # the weights have moved
