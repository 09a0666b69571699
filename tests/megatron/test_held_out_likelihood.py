"""Supervised training evaluates held-out conversations with the perplexity of transformers, in every layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.megatron import layouts, ranks, reference
from tests.megatron.layouts import CP2, DYNAMIC, EP2, OVERLAP, PP2, SETTINGS, SPREAD, TP2_SP, VIRTUAL, Layout

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


@pytest.mark.parametrize("name", LAYOUTS)
def test_held_out_loss_is_that_of_transformers(name: str, models: Any, pools: Any):
    layout, kind = LAYOUTS[name]
    per_token = layout.ranks > 1  # the mean of all tokens, else of the samples' means
    args = dataclasses.replace(
        models.args(layout, kind),
        loss_type="sft_loss",
        compute_advantages_and_returns=False,
        calculate_per_token_loss=per_token,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        entropy_coef=0.0,
        num_steps_per_rollout=1,
    )
    found = likelihoods(models.folder(kind, layout.layers, "policy"), models.rollout)
    if per_token:
        expected = -sum(total for total, _ in found) / sum(count for _, count in found)
    else:
        expected = -sum(total / max(count, 1.0) for total, count in found) / len(found)
    for before, trained, after in pools[layout.ranks].run(evaluate, args, models.rollout):
        assert before["loss"] == pytest.approx(expected, rel=1e-5)
        assert before["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert before["loss"] == pytest.approx(trained["loss"], rel=1e-5)
        assert after["loss"] != before["loss"]
