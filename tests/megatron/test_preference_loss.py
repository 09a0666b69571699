"""Training on pairs gives, in every layout, the loss, metrics and weights of float64 autograd on transformers' model.

The reference here shares no code with slimrl: one pair at a time, the loss written as in its paper.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slimrl.algorithms.preference_losses import PAIR_METRICS, PREFERENCE_LOSSES, PreferenceConfig
from slimrl.megatron.training.loss.preference_loss import preference_loss_sums
from slimrl.observability.metrics import is_known
from tests import accuracy
from tests.megatron import layouts, ranks, reference, tiny
from tests.megatron.layouts import CP2, DYNAMIC, OF_ANSWERS, PACKED_ON_TWO, PAIRS, SETTINGS, Layout

LAYOUTS = OF_ANSWERS | {
    "1 rank, packed": (Layout(1, DYNAMIC), "dense"),
    "CP2": (Layout(2, CP2 | PAIRS), "dense"),
}
SEVERAL = ("CP2, packed", "TP2 SP, packed", PACKED_ON_TWO)  # for several rejected answers of a prompt


@dataclasses.dataclass
class Truth:
    """What float64 autograd makes of a rollout: metrics by step, then the final state."""

    steps: list[dict[str, float]]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclasses.dataclass
class PairValues:
    """Of the preferred and the rejected answer: the policy's log-probabilities, and those less the reference's."""

    sums: list[Tensor]
    means: list[Tensor]
    gaps: list[Tensor]  # of the sums
    mean_gaps: list[Tensor]

    @property
    def margin(self) -> Tensor:
        """Of DPO's implicit rewards with beta 0.5."""
        return 0.5 * (self.gaps[0] - self.gaps[1])


def dpo(pair: PairValues) -> Tensor:
    return -logsigmoid(pair.margin)


def orpo(pair: PairValues) -> Tensor:
    odds = [mean.exp() / (1 - mean.exp()) for mean in pair.means]
    return -pair.means[0] - 0.25 * logsigmoid(odds[0].log() - odds[1].log())


def smoothed(pair: PairValues) -> Tensor:
    return -0.9 * logsigmoid(pair.margin) - 0.1 * logsigmoid(-pair.margin)


def robust(pair: PairValues) -> Tensor:
    return (-0.9 * logsigmoid(pair.margin) + 0.1 * logsigmoid(-pair.margin)) / (1 - 2 * 0.1)


def of_mean_gaps(pair: PairValues) -> Tensor:
    return -logsigmoid(0.5 * (pair.mean_gaps[0] - pair.mean_gaps[1]))


def hinge(pair: PairValues) -> Tensor:
    return torch.relu(1 - pair.margin)


def ipo(pair: PairValues) -> Tensor:
    return (pair.mean_gaps[0] - pair.mean_gaps[1] - 1 / (2 * 0.5)) ** 2


def simpo(pair: PairValues) -> Tensor:
    return -logsigmoid(0.5 * (pair.means[0] - pair.means[1]) - 0.3)


def with_likelihood(pair: PairValues) -> Tensor:
    return dpo(pair) - 0.2 * pair.means[0]


def without_reference(pair: PairValues) -> Tensor:
    return -logsigmoid(0.5 * (pair.sums[0] - pair.sums[1]))


# name: the flags, and the formula of the paper; beta is 0.5 unless it is given
LOSSES: dict[str, tuple[dict[str, Any], Any]] = {
    "cDPO": ({"preference_label_smoothing": 0.1}, smoothed),
    "robust": ({"preference_loss": "robust", "preference_label_smoothing": 0.1}, robust),
    "sigmoid_norm": ({"preference_loss": "sigmoid_norm"}, of_mean_gaps),
    "hinge": ({"preference_loss": "hinge"}, hinge),
    "ipo": ({"preference_loss": "ipo"}, ipo),
    "simpo": ({"preference_loss": "simpo", "simpo_gamma": 0.3}, simpo),
    "RPO": ({"preference_nll_coef": 0.2}, with_likelihood),
    "orpo": ({"preference_loss": "orpo", "preference_beta": 0.25}, orpo),
    "reference-free": ({"preference_reference_free": True}, without_reference),
}


def train_plainly(policy: Any, anchor: Any, rollout: Any, loss_of: Any, steps: int, answers: int = 2) -> Truth:
    """Trains transformers' float64 model: `loss_of` gets the values of a pair.

    The loss of a prompt with several rejected `answers` is the mean over its pairs; metrics are those of the first.
    """
    model, frozen = reference.load_model(policy), reference.load_model(anchor)
    samples = reference._split(rollout)
    masters = dict(model.named_parameters())
    load = reference._ExpertLoad(model)
    adam = reference._adam(masters, SETTINGS)
    truth = Truth([], {}, {})
    size = len(samples) // steps
    for step in range(steps):
        adam.zero_grad()
        notes = []
        for row in range(step * size, (step + 1) * size, answers):
            pair = samples[row : row + answers]
            if not all(float(sample["mask"].sum()) for sample in pair):
                notes.append([0.0] * 5)  # a response without trained tokens
                continue
            masks = [sample["mask"] for sample in pair]
            own = [reference._log_probs(model, sample, SETTINGS.temperature)[0] @ sample["mask"] for sample in pair]
            with torch.no_grad():
                old = [
                    reference._log_probs(frozen, sample, SETTINGS.temperature)[0] @ sample["mask"] for sample in pair
                ]
            gaps = [mine - its for mine, its in zip(own, old, strict=True)]
            means, mean_gaps = ([one / mask.sum() for one, mask in zip(of, masks, strict=True)] for of in (own, gaps))
            values = (own, means, gaps, mean_gaps)
            each = [loss_of(PairValues(*([of[0], of[other]] for of in values))) for other in range(1, answers)]
            loss = torch.stack(each).mean()
            (loss / (size // answers)).backward()
            notes.append([float(value.detach()) for value in (loss, gaps[0] > gaps[1], gaps[0], own[0], own[1])])
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), SETTINGS.clip_grad)
        adam.step()
        load.move_biases(SETTINGS.bias_rate)
        names = ("loss", "pair_accuracy", "chosen_gap", "chosen_log_probs", "rejected_log_probs")
        sums = zip(names, map(sum, zip(*notes, strict=True)), strict=True)
        truth.steps.append({name: value / len(notes) for name, value in sums} | {"grad_norm": float(norm)})
    truth.weights, truth.gradients = reference.final_state(masters, load)
    return truth


class Pairs(layouts.Models):
    """The models of the layouts, and a rollout of pairs of uneven lengths, of which the first has no trained token."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.rollout = tiny.recorded_rollout(seed=5, samples=16)
        self.rollout.group_ids = torch.arange(16) // 2
        self.several = tiny.recorded_rollout(seed=5, samples=16)  # of three rejected answers
        self.several.group_ids = torch.arange(16) // 4
        self._found: dict[Any, Truth] = {}
        self._of_losses: dict[str, dict[str, tuple[Any, ranks.StepResult]]] = {}

    def trained(self, kind: str, layers: int, loss_of: Any, steps: int, answers: int = 2) -> Truth:
        """The truth, computed once."""
        key = (kind, layers, loss_of, steps, answers)
        if key not in self._found:
            folders = [self.folder(kind, layers, role) for role in ("policy", "reference")]
            rollout = self.rollout if answers == 2 else self.several
            self._found[key] = train_plainly(*folders, rollout, loss_of, steps, answers)
        return self._found[key]

    def flags(self, layout: Layout, kind: str, **changes: Any) -> Any:
        """The flags of a run that trains on the pairs."""
        args = self.args(layout, kind)
        own = dict(loss_type="preference_loss", n_samples_per_prompt=2, preference_beta=0.5)
        own["compute_advantages_and_returns"] = False
        off = dict(use_kl_loss=False, kl_loss_coef=0.0, entropy_coef=0.0)
        return dataclasses.replace(args, **(own | off | changes))

    def of_losses(self, name: str, pools: dict[int, Any]) -> dict[str, tuple[Any, ranks.StepResult]]:
        """The flags and the result of all LOSSES in a layout, one after the other in the same ranks; computed once."""
        if name not in self._of_losses:
            layout, kind = LAYOUTS[name]
            flags = [self.flags(layout, kind, **changes) for changes, _ in LOSSES.values()]
            results = layouts.train_each(pools[layout.ranks], [(args, self.rollout) for args in flags])
            self._of_losses[name] = dict(zip(LOSSES, zip(flags, results, strict=True), strict=True))
        return self._of_losses[name]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks}


def assert_as_truth(args: Any, result: ranks.StepResult, truth: Truth, *, apart: set[str] | None = None) -> None:
    """Without the metrics `apart`."""
    for found, true in zip(result.metrics, truth.steps, strict=True):
        for name in (set(true) & set(found)) - (apart or set()):
            accuracy.near("loss", {name: found[name]}, {name: true[name]}, rel=2e-5, abs=1e-5)
        if "chosen_reward" in found and args.preference_loss == "sigmoid" and not args.preference_reference_free:
            assert found["chosen_reward"] == pytest.approx(0.5 * true["chosen_gap"], rel=2e-5, abs=1e-5)
            assert found["reward_margin"] == pytest.approx(found["chosen_reward"] - found["rejected_reward"], rel=1e-9)
        assert "entropy_loss" not in found and "ratio_mean" not in found and found["skipped"] == 0.0
    accuracy.below("weights", layouts.relative_error(result.weights, truth.weights), 1e-5)
    if not args.use_distributed_optimizer:
        accuracy.below("gradients", layouts.relative_error(result.gradients, truth.gradients), 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_dpo_trains_like_plain_autograd_in_every_layout(name: str, pairs: Pairs, pools: Any):
    layout, kind = LAYOUTS[name]
    args = pairs.flags(layout, kind)
    result = layouts.train(pools[layout.ranks], args, pairs.rollout)
    assert_as_truth(args, result, pairs.trained(kind, layout.layers, dpo, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss"), list(itertools.product(LAYOUTS, LOSSES)))
def test_losses_of_pairs_train_like_plain_autograd(name: str, loss: str, pairs: Pairs, pools: Any):
    layout, kind = LAYOUTS[name]
    _, formula = LOSSES[loss]
    args, result = pairs.of_losses(name, pools)[loss]
    # the accuracy of the truth is that of DPO's implicit rewards
    apart = {"pair_accuracy"} if formula in (of_mean_gaps, ipo, orpo, simpo, without_reference) else set()
    assert_as_truth(args, result, pairs.trained(kind, layout.layers, formula, 2), apart=apart)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_several_rejected_answers_train_like_plain_autograd(name: str, pairs: Pairs, pools: Any):
    layout, kind = LAYOUTS[name]
    args = pairs.flags(layout, kind, n_samples_per_prompt=4)
    if not args.use_dynamic_batch_size:
        args = dataclasses.replace(args, micro_batch_size=4)
    result = layouts.train(pools[layout.ranks], args, pairs.several)
    of_first_pair = {"pair_accuracy", "rejected_log_probs"}
    assert_as_truth(args, result, pairs.trained(kind, layout.layers, dpo, 2, answers=4), apart=of_first_pair)


@pytest.mark.slow
def test_loss_without_a_reference_runs_no_pass_of_one(pairs: Pairs, pools: Any):
    args = pairs.flags(Layout(2, CP2 | DYNAMIC), "dense", preference_loss="orpo", preference_beta=0.25)
    result = layouts.train(pools[2], args, pairs.rollout)
    assert_as_truth(args, result, pairs.trained("dense", 2, orpo, 2))
    with_reference = layouts.train(pools[2], pairs.flags(Layout(2, CP2 | DYNAMIC), "dense"), pairs.rollout)
    assert with_reference.progress[-1][1] == 2 * result.progress[-1][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["1 rank", PACKED_ON_TWO, "TP2 SP, packed", "PP2 virtual, packed", "CP2, packed", "DP2, Megatron-FSDP"],
)
def test_evaluation_gives_the_metrics_of_training_on_the_same_pairs(name: str, pairs: Pairs, pools: Any):
    layout, kind = LAYOUTS[name]
    args = dataclasses.replace(pairs.flags(layout, kind), num_steps_per_rollout=1)
    (before, trained, after, speeds), *others = pools[layout.ranks].run(ranks.evaluate_and_train, args, pairs.rollout)
    assert all((before, after) == (other[0], other[2]) for other in others)
    assert before == pytest.approx({name: trained[name] for name in before}, rel=1e-6)
    assert set(before) == {"loss", "tokens", *PAIR_METRICS}
    assert after["loss"] < before["loss"] and after["reward_margin"] > before["reward_margin"]
    assert "perf/log_probs_time" not in speeds


def test_every_loss_of_pairs_is_trained_in_every_layout():
    trained = {changes.get("preference_loss", "sigmoid") for changes, _ in LOSSES.values()}
    assert trained == {name for name, row in PREFERENCE_LOSSES.items() if row.compares}


def test_sums_do_not_depend_on_the_split_into_micro_batches():
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 5, 1, 4, 6, 2]
    scores, anchors = (-torch.rand(sum(lengths), generator=generator) for _ in range(2))
    mask = torch.ones(sum(lengths))
    mask[4] = 0.0
    settings = PreferenceConfig("simpo", 2.0, gamma=0.5, nll_coef=0.1)

    def sums(samples: slice) -> Any:
        ends = [sum(lengths[:place]) for place in range(7)]
        tokens = slice(ends[samples.start], ends[samples.stop])
        chosen = scores[tokens].requires_grad_()
        found = preference_loss_sums(chosen, anchors[tokens], mask[tokens], lengths[samples], settings)
        return found, torch.autograd.grad(found.loss, chosen)[0]

    whole, gradient = sums(slice(0, 6))
    parts = [sums(slice(start, start + 2)) for start in (0, 2, 4)]
    assert torch.allclose(torch.cat([part for _, part in parts]), gradient, rtol=1e-6)
    assert gradient[4] == 0.0 and gradient.count_nonzero() == sum(lengths) - 1
    for name, value in whole.weighted.items():
        added = sum(float(part.weighted[name]) for part, _ in parts)
        assert float(value) == pytest.approx(added, rel=1e-12)
        assert is_known(name)
    assert int(whole.count) == 6 and float(whole.trained_tokens) == sum(lengths) - 1
