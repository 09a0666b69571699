"""Supervised training and its evaluation of held-out conversations equal transformers' in every layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests import accuracy
from tests.megatron import layouts, ranks, reference
from tests.megatron.layouts import CP2, DYNAMIC, EP2, OVERLAP, PP2, SETTINGS, SPREAD, TP2_SP, VIRTUAL, Layout, fsdp

pytestmark = pytest.mark.slow
LAYOUTS = {
    "1 rank": (Layout(1, {}), "dense"),
    "DP2, distributed optimizer, packed": (Layout(2, SPREAD | OVERLAP | DYNAMIC), "dense"),
    "TP2 SP, packed": (Layout(2, TP2_SP | DYNAMIC), "dense"),
    "PP2, packed": (Layout(2, PP2 | DYNAMIC), "dense"),
    "PP2 virtual, packed": (Layout(2, VIRTUAL | DYNAMIC, 4), "dense"),
    "CP2, packed": (Layout(2, CP2 | DYNAMIC), "MLA"),
    "EP2, packed": (Layout(2, EP2 | SPREAD | DYNAMIC), "MoE"),
}


SHARDED = {"DP2, Megatron-FSDP": (Layout(2, fsdp("optim_grads_params")), "dense")}


def evaluate(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> list[dict[str, float]]:
    """The metrics of an evaluation of the samples, of one optimizer step on them, and of an evaluation after it."""
    trainer = ranks.start(rank, world_size, init_method, args)
    share = ranks.share_of(trainer, rollout)
    found = [trainer.held_out.evaluate(share), *trainer.train(0, share), trainer.held_out.evaluate(share)]
    trainer.close()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("held-out"))


@pytest.fixture(scope="module")
def truths() -> dict[Any, Any]:
    return {}


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks}


def likelihoods(folder: Any, rollout: Any) -> list[tuple[float, float]]:
    """Summed log-probability and number of the trained tokens of each sample, from transformers in float64."""
    model = reference.load_model(folder)
    found = []
    with torch.no_grad():
        for sample in reference._split(rollout):
            log_probs, _, _ = reference._log_probs(model, sample, SETTINGS.temperature)
            found.append((float(log_probs @ sample["mask"]), float(sample["mask"].sum())))
    return found


def supervised(models: Any, layout: Layout, kind: str, **changes: Any) -> Any:
    """The flags; the loss is the mean over all tokens of a step, with one rank that of the samples' means."""
    off = {"compute_advantages_and_returns": False, "use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_coef": 0.0}
    own = {"loss_type": "sft_loss", "calculate_per_token_loss": layout.ranks > 1}
    return dataclasses.replace(models.args(layout, kind), **(off | own | changes))


@pytest.mark.parametrize("name", LAYOUTS | SHARDED)
def test_supervised_training_is_that_of_plain_autograd(name: str, models: Any, pools: Any, truths: dict[Any, Any]):
    layout, kind = (LAYOUTS | SHARDED)[name]
    args = supervised(models, layout, kind)
    key = (kind, layout.layers, args.calculate_per_token_loss)
    if key not in truths:
        plain = {"objective": "likelihood", "kl_coef": 0.0, "entropy_coef": 0.0, "per_token": key[-1]}
        folders = [models.folder(kind, layout.layers, role) for role in ("policy", "reference")]
        truths[key] = reference.train(*folders, models.rollout, dataclasses.replace(SETTINGS, **plain))
    found = layouts.differences(args, layouts.train(pools[layout.ranks], args, models.rollout), truths[key])
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5
    assert found.gradients is None or found.gradients < 5e-5


@pytest.mark.parametrize("name", LAYOUTS | SHARDED)
def test_held_out_loss_is_that_of_transformers(name: str, models: Any, pools: Any):
    layout, kind = (LAYOUTS | SHARDED)[name]
    args = supervised(models, layout, kind, num_steps_per_rollout=1)
    per_token = args.calculate_per_token_loss
    found = likelihoods(models.folder(kind, layout.layers, "policy"), models.rollout)
    if per_token:
        expected = -sum(total for total, _ in found) / sum(count for _, count in found)
    else:
        expected = -sum(total / max(count, 1.0) for total, count in found) / len(found)
    for before, trained, after in pools[layout.ranks].run(evaluate, args, models.rollout):
        accuracy.near("loss", [before["loss"]], [expected], rel=1e-5)
        assert before["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert before["loss"] == pytest.approx(trained["loss"], rel=1e-5)
        assert after["loss"] != before["loss"]
