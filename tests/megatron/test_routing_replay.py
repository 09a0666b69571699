"""Routing replay: training with given experts, or with those of an earlier pass, is that of plain float64 autograd."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.model.routing_replay import RouterReplay, Routing, recording
from tests.megatron import layouts, reference, tiny
from tests.megatron.layouts import CP2, DYNAMIC, EP2, ETP2, FULL, SETTINGS, SPREAD, TP2_SP, VIRTUAL, Layout, selective

LAYOUTS = {
    "1 rank": Layout(1, {}),
    "1 rank, recomputed, packed": Layout(1, FULL | DYNAMIC),
    "1 rank, recompute moe": Layout(1, selective("moe")),
    "TP2 SP, packed": Layout(2, TP2_SP | DYNAMIC),
    "PP2 virtual, recomputed, packed": Layout(2, VIRTUAL | DYNAMIC | FULL, 4),
    "CP2, packed": Layout(2, CP2 | DYNAMIC),
    "EP2, packed": Layout(2, EP2 | SPREAD | DYNAMIC),
    "ETP2 TP2 SP": Layout(2, ETP2),
}
EXPERTS, TOPK = 4, 2


def chosen_at_random(rollout: RolloutBatch, layers: int) -> torch.Tensor:
    """Two different experts for each token and layer; none for the last token of a sample and one token in ten."""
    draw = torch.Generator().manual_seed(7)
    tokens = rollout.tokens.numel()
    order = torch.rand(tokens, layers, EXPERTS, generator=draw).argsort(-1)[..., :TOPK]
    order[torch.rand(tokens, generator=draw) < 0.1] = -1
    order[rollout.token_offsets[1:] - 1] = -1
    return order.to(torch.int16)


class Models(layouts.Models):
    """The rollout with experts chosen at random, and what float64 makes of it."""

    def with_routes(self, layers: int) -> RolloutBatch:
        return dataclasses.replace(self.rollout, routed_experts=chosen_at_random(self.rollout, layers))

    def truth_of(self, rollout: RolloutBatch, layers: int, **changes: Any) -> reference.ReferenceResult:
        folders = [self.folder("MoE", layers, role) for role in ("policy", "reference")]
        return reference.train(*folders, rollout, dataclasses.replace(SETTINGS, **changes))

    def own_routes(self, layers: int) -> RolloutBatch:
        """The rollout with the experts that the policy chooses before it is trained."""
        model = reference.load_model(self.folder("MoE", layers, "policy"))
        routes = []
        for tokens in self.rollout.tokens.split(self.rollout.total_lengths.tolist()):
            with torch.no_grad():
                logits = model(tokens[None], output_router_logits=True).router_logits
            routes.append(torch.stack([layer.topk(TOPK).indices for layer in logits], dim=1))
        return dataclasses.replace(self.rollout, routed_experts=torch.cat(routes).to(torch.int16))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("routing"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_with_given_experts_is_that_of_float64_in_every_layout(name: str, models: Models, pools: Any):
    layout = LAYOUTS[name]
    rollout = models.with_routes(layout.layers)
    args = dataclasses.replace(models.args(layout, "MoE"), use_rollout_routing_replay=True)
    (found,) = layouts.train_each(pools[layout.ranks], [(args, rollout)])
    differences = layouts.differences(args, found, models.truth_of(rollout, layout.layers))
    assert max(differences.grad_norm, differences.weights) < 1e-5, differences
    assert differences.loss < 1e-4, differences


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1 rank", "TP2 SP, packed"])
def test_later_step_takes_the_experts_of_the_pass_before_training(name: str, models: Models, pools: Any):
    layout, lr = LAYOUTS[name], 0.05  # so large that routers choose otherwise after a step
    args = dataclasses.replace(models.args(layout, "MoE"), lr=lr, use_routing_replay=True)
    (found,) = layouts.train_each(pools[layout.ranks], [(args, models.rollout)])
    truth = models.truth_of(models.own_routes(layout.layers), layout.layers, lr=lr)
    differences = layouts.differences(args, found, truth)
    assert max(differences.grad_norm, differences.weights) < 1e-4, differences
    without = models.truth_of(models.rollout, layout.layers, lr=lr)
    assert layouts.furthest(without.gradient_norms, truth.gradient_norms) > 1e-3


def routed(logits: torch.Tensor, routing: Routing | None, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    replay = RouterReplay(0)
    replay.routing = routing
    return topk_routing_with_score_function(logits, TOPK, router_replay=replay, **settings)


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax after the choice": {},
    "softmax before it": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, bias, groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.tensor([0.0, 3.0, -1.0, 0.5]),
        "num_groups": 2,
        "group_topk": 1,
        "scaling_factor": 2.5,
    },
}


@pytest.mark.parametrize("settings", ROUTERS.values(), ids=ROUTERS)
def test_replayed_experts_have_the_weights_of_the_router_without_its_bias(settings: dict[str, Any]):
    logits = torch.tensor([[0.3, -0.2, 1.5, 0.9], [1.0, 2.0, -1.0, 0.0]], requires_grad=True)
    given = torch.tensor([[3, 0], [-1, -1]], dtype=torch.int16)
    weights, chosen = routed(logits, Routing({0: given}), **settings)
    scores = logits.sigmoid() if settings.get("score_function") else logits.softmax(-1)
    picked = scores[0, [3, 0]] if settings.get("use_pre_softmax") else scores[0, [3, 0]] / scores[0, [3, 0]].sum()
    torch.testing.assert_close(weights[0, [3, 0]], picked * settings.get("scaling_factor", 1.0))
    assert chosen[0].tolist() == [True, False, False, True]
    own, own_choice = routed(logits, None, **settings)
    torch.testing.assert_close(weights[1], own[1])
    assert chosen[1].equal(own_choice[1])
    (gradient,) = torch.autograd.grad(weights[0, 3], logits)
    assert gradient[0, 3] != 0 and gradient[1].abs().sum() == 0


def test_only_a_recorded_pass_is_replayed():
    logits, later = torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.tensor([[9.0, 8.0, 0.3, 0.4]])
    routing = Routing(of_pass=True)
    assert routed(later, routing)[1][0].tolist() == [True, True, False, False]
    with recording([routing, None]):
        routed(logits, routing)
    assert routed(later, routing)[1][0].tolist() == [False, False, True, True]


def test_tiny_model_has_the_experts_of_these_tests(tmp_path: Path):
    assert (tiny.MOE_FLAGS["num_experts"], tiny.MOE_FLAGS["moe_router_topk"]) == (EXPERTS, TOPK)
