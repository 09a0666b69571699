"""A divergence from the teacher as the loss: every layout trains like float64 autograd on transformers' models.

The reference here shares no code with slimrl: one sample at a time, whole logits, divergences by their definition. The
rewards are 0, so that the divergence is the whole loss.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.observability.metrics import is_known
from tests import accuracy
from tests.megatron import layouts, ranks, reference, tiny
from tests.megatron.layouts import CP2, DYNAMIC, EP2, PP2, SETTINGS, SPREAD, TP2_SP, Layout, fsdp
from tests.megatron.test_distillation import distilled, teacher_of
from tests.megatron.test_preference_loss import Truth

COEF, BETA = 0.7, 0.3
LAYOUTS = {
    "1 rank, forward": ("forward_kl", Layout(1, {}), "dense"),
    "1 rank, reverse": ("reverse_kl", Layout(1, DYNAMIC), "dense"),
    "1 rank, jsd": ("jsd", Layout(1, {}), "dense"),
    "1 rank, chunks of 3 tokens": ("jsd", Layout(1, {"log_probs_chunk_size": 3}), "dense"),
    "DP2, packed": ("jsd", Layout(2, SPREAD | DYNAMIC), "dense"),
    "TP2 SP, forward": ("forward_kl", Layout(2, TP2_SP), "dense"),
    "TP2, reverse": ("reverse_kl", Layout(2, {"tensor_model_parallel_size": 2}), "dense"),
    "TP2 SP, jsd": ("jsd", Layout(2, TP2_SP | DYNAMIC), "dense"),
    "PP2, packed": ("jsd", Layout(2, PP2 | DYNAMIC), "dense"),
    "CP2": ("jsd", Layout(2, CP2), "dense"),
    "EP2": ("reverse_kl", Layout(2, EP2), "MLA"),
    "DP2, Megatron-FSDP of all": ("jsd", Layout(2, fsdp("optim_grads_params")), "dense"),
    "DP2, Megatron-FSDP of all, packed": ("jsd", Layout(2, fsdp("optim_grads_params") | DYNAMIC), "dense"),
}


def divergence(kind: str, teacher: Tensor, student: Tensor) -> Tensor:
    """From probabilities [tokens, vocabulary], [tokens]."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(dim=1)

    mixture = BETA * teacher + (1 - BETA) * student
    return {
        "forward_kl": lambda: kl(teacher, student),
        "reverse_kl": lambda: kl(student, teacher),
        "jsd": lambda: BETA * kl(teacher, mixture) + (1 - BETA) * kl(student, mixture),
    }[kind]()


def with_rest(chosen: Tensor) -> Tensor:
    """Probabilities and that of all other tokens."""
    return torch.cat([chosen, 1 - chosen.sum(dim=1, keepdim=True)], dim=1)


def probabilities(model: Any, sample: dict[str, Any]) -> Tensor:
    """Of the tokens at the places of the response, [response tokens, vocabulary]."""
    length = len(sample["mask"])
    logits = model(sample["tokens"][None]).logits[0, -length - 1 : -1]
    return (logits / SETTINGS.temperature).softmax(dim=1)


def train_plainly(
    policy: Any, teacher: Any, rollout: Any, kind: str, steps: int, per_token: bool, top: int | None = None
) -> Truth:
    """Trains transformers' float64 model on the divergence alone, with `top` of the teacher's top tokens and a rest."""
    model, frozen = reference.load_model(policy), reference.load_model(teacher)
    samples = reference._split(rollout)
    masters = dict(model.named_parameters())
    load = reference._ExpertLoad(model)
    adam = reference._adam(masters, SETTINGS)
    truth = Truth([], {}, {})
    size = len(samples) // steps
    for step in range(steps):
        adam.zero_grad()
        batch = samples[step * size : (step + 1) * size]
        trained = sum(float(sample["mask"].sum()) for sample in batch)
        total = 0.0
        for sample in batch:
            with torch.no_grad():
                target = probabilities(frozen, sample)
            student = probabilities(model, sample)
            if top is not None:
                ids = target.topk(top, dim=1).indices
                target, student = (with_rest(one.gather(1, ids)) for one in (target, student))
            found = divergence(kind, target, student) @ sample["mask"]
            count = trained if per_token else size * max(float(sample["mask"].sum()), 1.0)
            (COEF * found / count).backward()
            total += float(found) / count
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), SETTINGS.clip_grad)
        adam.step()
        load.move_biases(SETTINGS.bias_rate)
        truth.steps.append({"opd_divergence": total, "loss": COEF * total, "grad_norm": float(norm)})
    truth.weights, truth.gradients = reference.final_state(masters, load)
    return truth


class Models(layouts.Models):
    """The models of the layouts, a rollout without rewards, and what plain autograd makes of it."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.rollout = dataclasses.replace(self.rollout, rewards=torch.zeros(len(self.rollout)))
        self._plain: dict[Any, Truth] = {}

    def flags(self, kind: str, layout: Layout, model: str, **changes: Any) -> Any:
        own = dict(opd_divergence=kind, opd_jsd_beta=BETA, opd_kl_coef=COEF)
        own |= dict(use_kl_loss=False, kl_loss_coef=0.0, entropy_coef=0.0)
        return distilled(self, layout, model, **(own | changes))

    def served(self, model: str, top: int) -> Any:
        """The rollout with the columns of a teacher on servers."""
        found = [probabilities(self.frozen(model), one).topk(top, dim=1) for one in reference._split(self.rollout)]
        sampled = torch.zeros(len(self.rollout.loss_mask))  # the divergence does not read it
        return dataclasses.replace(
            self.rollout,
            teacher_log_probs=sampled,
            teacher_top_ids=torch.cat([one.indices for one in found]),
            teacher_top_log_probs=torch.cat([one.values for one in found]).log().float(),
        )

    @torch.no_grad()
    def frozen(self, model: str) -> Any:
        """The teacher, without gradient."""
        return reference.load_model(teacher_of(self, model)).requires_grad_(False)

    def trained(self, kind: str, model: str, per_token: bool = False, top: int | None = None) -> Truth:
        """The truth, computed once."""
        key = (kind, model, per_token, top)
        if key not in self._plain:
            folders = self.folder(model, 2, "policy"), teacher_of(self, model)
            self._plain[key] = train_plainly(*folders, self.rollout, kind, 2, per_token, top)
        return self._plain[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("divergence"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks}


def train(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> Any:
    """The result of a rollout, and what the trainer keeps of the teacher after it."""
    trainer = ranks.start(rank, world_size, init_method, args)
    metrics = trainer.train(0, ranks.share_of(trainer, rollout))
    result = ranks.StepResult(metrics, ranks.export(trainer), ranks.gradients(trainer), [], None)
    states = trainer._parts.passes.teacher.states
    kept = None if states is None else (len(states.hidden), states.weight)
    report = trainer.rollout_metrics
    trainer.close()
    return result, report, kept


def assert_as_truth(args: Any, result: ranks.StepResult, truth: Truth) -> None:
    for found, true in zip(result.metrics, truth.steps, strict=True):
        for name, value in true.items():
            accuracy.near("loss", {name: found[name]}, {name: value}, rel=2e-5, abs=1e-6)
        assert all(is_known(f"train/{name}") for name in found)
    accuracy.below("weights", layouts.relative_error(result.weights, truth.weights), 1e-5)
    if result.gradients and not args.use_distributed_optimizer:
        accuracy.below("gradients", layouts.relative_error(result.gradients, truth.gradients), 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_on_the_divergence_like_plain_autograd(name: str, models: Models, pools: Any):
    kind, layout, model = LAYOUTS[name]
    args = models.flags(kind, layout, model)
    (result, report, kept), *others = pools[layout.ranks].run(train, args, models.rollout)
    assert all(other[0].metrics == result.metrics for other in others)
    assert_as_truth(args, result, models.trained(kind, model))
    assert kept == (0, None)  # freed after the steps
    assert {"rollout/opd_reverse_kl", "rollout/teacher_log_probs"} < set(report)


@pytest.mark.slow
def test_loss_per_token_weighs_every_token_alike(models: Models, pools: Any):
    args = models.flags("jsd", Layout(2, CP2 | DYNAMIC), "dense", calculate_per_token_loss=True)
    (result, *_), *_ = pools[2].run(train, args, models.rollout)
    assert_as_truth(args, result, models.trained("jsd", "dense", per_token=True))


@pytest.mark.slow
def test_divergence_with_weight_zero_is_only_measured(models: Models, pools: Any):
    args = models.flags("forward_kl", Layout(1, {}), "dense", opd_kl_coef=0.0, num_steps_per_rollout=1)
    ((result, *_),) = pools[1].run(train, args, models.rollout)
    assert result.metrics[0]["opd_divergence"] > 0.01 and result.metrics[0]["loss"] == pytest.approx(0.0, abs=1e-7)
    assert result.metrics[0]["grad_norm"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_reward_and_divergence_are_added(models: Models, pools: Any):
    rewarded = dataclasses.replace(models.rollout, rewards=models.rollout.raw_rewards)
    layout = Layout(2, TP2_SP)
    args = models.flags("jsd", layout, "dense", num_steps_per_rollout=1)
    both, plain, alone = (
        pools[2].run(train, one, data)[0][0]
        for one, data in (
            (args, rewarded),
            (dataclasses.replace(args, opd_kl_coef=0.0), rewarded),
            (args, models.rollout),
        )
    )
    names = ("loss", "pg_loss")
    assert both.metrics[0]["pg_loss"] == pytest.approx(plain.metrics[0]["pg_loss"], rel=1e-6)
    sums = [plain.metrics[0][name] + alone.metrics[0][name] for name in names]
    assert [both.metrics[0][name] for name in names] == pytest.approx(sums, rel=1e-5, abs=1e-6)


def test_divergence_needs_no_pass_of_the_policy_before_the_first_step():
    flags = {"use_opd": True, "opd_type": "megatron", "num_steps_per_rollout": 1, "opd_divergence": "jsd"}
    plan = PassPlan.from_args(tiny.tiny_args(**flags))
    assert plan.reuses_first_step and plan.has_teacher


TOP = 6
TOP_LAYOUTS = {
    "1 rank, forward": ("forward_kl", Layout(1, DYNAMIC), "dense"),
    "TP2 SP, jsd": ("jsd", Layout(2, TP2_SP | DYNAMIC), "dense"),
    "PP2, reverse": ("reverse_kl", Layout(2, PP2 | DYNAMIC), "dense"),
    "CP2, jsd": ("jsd", Layout(2, CP2), "dense"),
    "DP2, forward": ("forward_kl", Layout(2, SPREAD | DYNAMIC), "dense"),
    "EP2, reverse": ("reverse_kl", Layout(2, EP2), "MLA"),
    "DP2, Megatron-FSDP, jsd": ("jsd", Layout(2, fsdp("optim_grads_params")), "dense"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOP_LAYOUTS)
def test_every_layout_trains_on_the_top_tokens_of_a_served_teacher(name: str, models: Models, pools: Any):
    kind, layout, model = TOP_LAYOUTS[name]
    args = models.flags(kind, layout, model, opd_type="sglang", opd_top_k=TOP, opd_teacher_load=None)
    (result, _, kept), *_ = pools[layout.ranks].run(train_served, args, models.served(model, TOP))
    assert_as_truth(args, result, models.trained(kind, model, top=TOP))
    assert kept is None


def train_served(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> Any:
    """As `train`, with what the trainer keeps of the top tokens."""
    trainer = ranks.start(rank, world_size, init_method, args)
    metrics = trainer.train(0, ranks.share_of(trainer, rollout))
    result = ranks.StepResult(metrics, ranks.export(trainer), ranks.gradients(trainer), [], None)
    kept = trainer._parts.passes.teacher.states.ids
    trainer.close()
    return result, None, kept
