"""KTO gives, in every layout, the loss, KL estimate and weights of float64 autograd on transformers' model.

The reference here shares no code with slimrl: whole sequences one at a time, the formulas written as TRL's KTOTrainer
has them, the mismatched completions by a rotation of the samples of the optimizer step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import sigmoid

from slimrl.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceConfig
from slimrl.megatron.training.loss.preference_loss import label_loss_sums, mismatched, preference_loss_sums
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.observability.metrics import is_known
from tests import accuracy
from tests.megatron import layouts, ranks, reference, tiny
from tests.megatron.layouts import DYNAMIC, OF_ANSWERS, OVERLAP, PACKED_ON_TWO, SETTINGS, VIRTUAL, Layout
from tests.megatron.test_preference_loss import Truth

BETA, GOOD, BAD = 0.5, 1.25, 0.75
LOSSES = tuple(name for name, row in PREFERENCE_LOSSES.items() if not row.compares)
LAYOUTS = OF_ANSWERS | {
    "DP2": (Layout(2, {"micro_batch_size": 1}), "dense"),  # an answer alone
    "PP2 virtual, DP2, overlapped": (Layout(4, VIRTUAL | OVERLAP | DYNAMIC, 4), "dense"),
}


def log_prob(model: Any, sample: dict[str, Any]) -> Tensor:
    """Sum over the trained tokens of a sample."""
    return reference._log_probs(model, sample, SETTINGS.temperature)[0] @ sample["mask"]


def mismatched_sample(prompt: dict[str, Any], completion: dict[str, Any]) -> dict[str, Any]:
    """The prompt of one sample with the completion, and its mask, of another."""
    length = len(completion["mask"])
    start = prompt["tokens"][: len(prompt["tokens"]) - len(prompt["mask"])]
    tokens = torch.cat([start, completion["tokens"][len(completion["tokens"]) - length :]])
    return {**completion, "tokens": tokens}


def train_plainly(policy: Any, anchor: Any, rollout: Any, steps: int, rotation: int) -> Truth:
    """Trains transformers' float64 model with TRL's formulas; a batch is an optimizer step.

    Without a `rotation` the loss is APO-zero's, which has no KL estimate.
    """
    model, frozen = reference.load_model(policy), reference.load_model(anchor)
    samples, labels = reference._split(rollout), (rollout.raw_rewards == 1).tolist()
    masters = dict(model.named_parameters())
    load = reference._ExpertLoad(model)
    adam = reference._adam(masters, SETTINGS)
    truth = Truth([], {}, {})
    size = len(samples) // steps
    for step in range(steps):
        adam.zero_grad()
        rows = range(step * size, (step + 1) * size)
        batch = [samples[row] for row in rows]
        others = batch[-rotation:] + batch[:-rotation]
        with torch.no_grad():
            pairs = [mismatched_sample(*both) for both in zip(batch, others, strict=True)] if rotation else []
            gaps = [log_prob(model, one) - log_prob(frozen, one) for one in pairs if float(one["mask"].sum())]
            kl = (sum(gaps) / len(gaps)).clamp(min=0) if rotation else torch.tensor(0.0)
        notes: dict[str, list[float]] = {name: [] for name in ("loss", "chosen_reward", "rejected_reward")}
        for row, sample in zip(rows, batch, strict=True):
            with torch.no_grad():
                old = log_prob(frozen, sample)
            gap = log_prob(model, sample) - old
            distance = BETA * (gap - kl)
            loss = GOOD * (1 - sigmoid(distance)) if labels[row] else BAD * (1 - sigmoid(-distance))
            loss = loss if float(sample["mask"].sum()) else 0 * loss  # without trained tokens it only counts
            (loss / size).backward()
            notes["loss"].append(float(loss))
            notes["chosen_reward" if labels[row] else "rejected_reward"].append(BETA * float(gap))
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), SETTINGS.clip_grad)
        adam.step()
        load.move_biases(SETTINGS.bias_rate)
        truth.steps.append({name: sum(values) / len(values) for name, values in notes.items()})
        truth.steps[-1] |= {"grad_norm": float(norm)} | ({"kto_kl": float(kl)} if rotation else {})
    truth.weights, truth.gradients = reference.final_state(masters, load)
    return truth


class Labelled(layouts.Models):
    """The models of the layouts, and a rollout of labelled samples, of which the first has no trained token."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.rollout = tiny.recorded_rollout(seed=9, samples=16)
        self.rollout.raw_rewards = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0], dtype=torch.float32)
        self._found: dict[Any, Truth] = {}
        self._trained: dict[str, dict[str, tuple[Any, ranks.StepResult]]] = {}

    def trained(self, kind: str, layers: int, steps: int, group: int) -> Truth:
        """The truth, computed once."""
        key = (kind, layers, steps, group)
        if key not in self._found:
            folders = [self.folder(kind, layers, role) for role in ("policy", "reference")]
            self._found[key] = train_plainly(*folders, self.grouped(group or 1), steps, group)
        return self._found[key]

    def grouped(self, group: int) -> Any:
        """The rollout in groups; of a pair the first one is desirable."""
        rollout = dataclasses.replace(self.rollout, group_ids=torch.arange(16) // group)
        if group > 1:
            rollout.raw_rewards = (torch.arange(16) % group == 0).float()
        return rollout

    def flags(self, layout: Layout, kind: str, **changes: Any) -> Any:
        """The flags of a run that trains on the samples."""
        own = dict(loss_type="preference_loss", preference_loss="kto", preference_beta=BETA, n_samples_per_prompt=1)
        own |= dict(compute_advantages_and_returns=False, desirable_weight=GOOD, undesirable_weight=BAD)
        own |= dict(use_kl_loss=False, kl_loss_coef=0.0, entropy_coef=0.0)
        return dataclasses.replace(self.args(layout, kind), **(own | changes))

    def in_layout(self, name: str, pools: dict[int, Any]) -> dict[str, tuple[Any, ranks.StepResult]]:
        """The flags and the result of both LOSSES, one after the other in the same ranks; computed once."""
        if name not in self._trained:
            layout, kind = LAYOUTS[name]
            flags = {loss: self.flags(layout, kind, preference_loss=loss) for loss in LOSSES}
            results = layouts.train_each(pools[layout.ranks], [(args, self.rollout) for args in flags.values()])
            self._trained[name] = dict(zip(flags, zip(flags.values(), results, strict=True), strict=True))
        return self._trained[name]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Labelled:
    return Labelled(tmp_path_factory.mktemp("labelled"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any, four_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


def assert_as_truth(args: Any, result: ranks.StepResult, truth: Truth) -> None:
    for found, true in zip(result.metrics, truth.steps, strict=True):
        for name, value in true.items():
            accuracy.near("loss", {name: found[name]}, {name: value}, rel=2e-5, abs=1e-5)
        assert found["reward_margin"] == pytest.approx(found["chosen_reward"] - found["rejected_reward"], rel=1e-9)
        assert "pair_accuracy" not in found and "ratio_mean" not in found and found["skipped"] == 0.0
        assert all(is_known(name) for name in found)
    accuracy.below("weights", layouts.relative_error(result.weights, truth.weights), 1e-5)
    if not args.use_distributed_optimizer:
        accuracy.below("gradients", layouts.relative_error(result.gradients, truth.gradients), 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_kto_trains_like_plain_autograd_in_every_layout(name: str, labelled: Labelled, pools: Any):
    layout, kind = LAYOUTS[name]
    args, result = labelled.in_layout(name, pools)["kto"]
    truth = labelled.trained(kind, layout.layers, 2, 1)
    assert_as_truth(args, result, truth)
    assert max(step["kto_kl"] for step in truth.steps) > 0.01  # the clamp at 0 does not decide everything
    assert result.progress[-1][0] == result.progress[-1][1] == len(result.progress)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_apo_zero_trains_like_plain_autograd(name: str, labelled: Labelled, pools: Any):
    layout, kind = LAYOUTS[name]
    args, result = labelled.in_layout(name, pools)["apo_zero_unpaired"]
    assert_as_truth(args, result, labelled.trained(kind, layout.layers, 2, 0))


@pytest.mark.slow
def test_pairs_are_split_and_take_the_completions_of_the_pair_before(labelled: Labelled, pools: Any):
    layout, kind = LAYOUTS[PACKED_ON_TWO]
    args = labelled.flags(layout, kind, n_samples_per_prompt=2)
    result = layouts.train(pools[2], args, labelled.grouped(2))
    assert_as_truth(args, result, labelled.trained(kind, 2, 2, 2))


@pytest.mark.slow
def test_apo_zero_runs_no_pass_for_a_kl(labelled: Labelled, pools: Any):
    layout, kind = LAYOUTS["1 rank"]
    args = labelled.flags(layout, kind, preference_loss="apo_zero_unpaired")
    found = layouts.train(pools[1], args, labelled.rollout)
    with_kl = layouts.train(pools[1], labelled.flags(layout, kind), labelled.rollout)
    assert "kto_kl" not in found.metrics[0]
    assert found.progress[-1][1] < with_kl.progress[-1][1]
    sums, lengths = found.metrics[0], labelled.rollout
    assert sums["desirable_share"] == float((lengths.raw_rewards[:8] == 1).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [PACKED_ON_TWO, "TP2 SP, packed", "PP2 virtual, packed", "CP2, packed", "DP2, Megatron-FSDP"]
)
def test_evaluation_gives_the_metrics_of_training_on_the_same_samples(name: str, labelled: Labelled, pools: Any):
    layout, kind = LAYOUTS[name]
    args = dataclasses.replace(labelled.flags(layout, kind), num_steps_per_rollout=1)
    (before, trained, after, speeds), *others = pools[layout.ranks].run(
        ranks.evaluate_and_train, args, labelled.rollout
    )
    assert all((before, after) == (other[0], other[2]) for other in others)
    assert before == pytest.approx({name: trained[name] for name in before}, rel=1e-6)
    assert {"label_accuracy", "kto_kl", "reward_margin"} < set(before)
    assert after["loss"] < before["loss"] and after["reward_margin"] > before["reward_margin"]
    assert speeds["perf/kl_log_probs_time"] > 0 and speeds["perf/actor_train_time"] > 0


def train_badly(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> str:
    """The error of training."""
    trainer = ranks.start(rank, world_size, init_method, args)
    try:
        trainer.train(0, ranks.share_of(trainer, rollout))
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


@pytest.mark.slow
def test_reward_that_is_no_label_is_rejected(labelled: Labelled, pools: Any):
    rollout = dataclasses.replace(labelled.rollout, raw_rewards=labelled.rollout.raw_rewards - 0.5)
    (error,) = pools[1].run(train_badly, labelled.flags(*LAYOUTS["1 rank"]), rollout)
    assert "--preference-loss kto needs reward 1 of a desirable response and 0 of an undesirable one" in error


def test_plan_names_the_passes_over_mismatched_responses():
    flags = {"loss_type": "preference_loss", "compute_advantages_and_returns": False}
    assert PassPlan.from_args(tiny.tiny_args(**flags, preference_loss="kto")).sentence() == (
        "a pass of the reference model for every rollout, and one of it for every rollout and of the policy for every"
        " optimizer step over mismatched responses, for the KL estimate of KTO"
    )
    plain = PassPlan.from_args(tiny.tiny_args(**flags, preference_loss="apo_zero_unpaired"))
    assert plain.sentence().endswith("no pass of the policy: no advantages are computed")


def test_prompts_get_the_response_of_the_group_before_whatever_rank_has_it():
    rollout = tiny.recorded_rollout(seed=3, samples=6)
    whole = mismatched([rollout], 2)
    split = mismatched([rollout.select([5, 2]), rollout.select([0, 4, 1, 3])], 2)
    for name in ("tokens", "total_lengths", "response_lengths", "loss_mask", "sample_ids"):
        assert torch.equal(getattr(whole, name), getattr(split, name)), name
    pieces = rollout.tokens.split(rollout.total_lengths.tolist())
    lengths = rollout.response_lengths.tolist()
    expected = [torch.cat([pieces[row][: -lengths[row]], pieces[row - 2][-lengths[row - 2] :]]) for row in range(6)]
    assert torch.equal(whole.tokens, torch.cat(expected))
    assert whole.response_lengths.tolist() == lengths[-2:] + lengths[:-2]


@pytest.mark.parametrize(
    ("rows", "group", "error"),
    [([0, 1], 2, "needs a response to another prompt, and there are 2 samples"), ([0, 1, 1], 1, "the same index")],
)
def test_samples_without_another_response_are_an_error(rows: list[int], group: int, error: str):
    with pytest.raises(ValueError, match=error):
        mismatched([tiny.recorded_rollout(seed=3, samples=6).select(rows)], group)


def test_sums_do_not_depend_on_the_split_into_micro_batches():
    generator = torch.Generator().manual_seed(0)
    lengths, labels = [3, 5, 1, 4], torch.tensor([True, False, True, True])
    scores, anchors = (-torch.rand(13, generator=generator) for _ in range(2))
    kl, settings = torch.tensor(0.25, dtype=torch.float64), PreferenceConfig("kto", 2.0, desirable_weight=0.5)

    def sums(start: int, stop: int) -> Any:
        tokens = slice(sum(lengths[:start]), sum(lengths[:stop]))
        own = scores[tokens].requires_grad_()
        parts = (torch.ones_like(own), lengths[start:stop], labels[start:stop], kl, settings)
        found = label_loss_sums(own, anchors[tokens], *parts)
        return found, torch.autograd.grad(found.loss, own)[0]

    whole, gradient = sums(0, 4)
    parts = [sums(0, 1), sums(1, 3), sums(3, 4)]
    assert torch.allclose(torch.cat([part for _, part in parts]), gradient, rtol=1e-6)
    for name, value in whole.weighted.items():
        assert float(value) == pytest.approx(sum(float(part.weighted[name]) for part, _ in parts), rel=1e-12), name


def test_loss_of_several_rejected_answers_is_the_mean_over_their_pairs():
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 5, 1, 4, 6, 2, 2, 3]
    scores, anchors = (-torch.rand(sum(lengths), generator=generator).double() for _ in range(2))
    mask = torch.ones(sum(lengths))
    mask[8] = 0.0  # the only token of the second rejected answer
    settings = PreferenceConfig("sigmoid", 0.7)
    own = scores.float().requires_grad_()
    found = preference_loss_sums(own, anchors.float(), mask, lengths, settings, 4)
    sums = [
        ((one - other) * part).sum()
        for one, other, part in zip(
            own.double().split(lengths), anchors.split(lengths), mask.double().split(lengths), strict=True
        )
    ]
    pairs = [[1, 3], [5, 6, 7]]  # those with trained tokens
    expected = sum(
        -torch.nn.functional.logsigmoid(0.7 * (sums[first] - sums[other])) / 3
        for first, others in zip((0, 4), pairs, strict=True)
        for other in others
    ) * 4  # fmt: skip
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-6)
    gradients = [torch.autograd.grad(value, own, retain_graph=True)[0] for value in (found.loss, expected)]
    assert torch.allclose(*gradients, rtol=1e-5)
    assert int(found.count) == 8 and float(found.weighted["loss"]) == pytest.approx(float(expected), rel=1e-6)
