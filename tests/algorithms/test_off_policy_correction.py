"""Importance weights, masks and rejection at every level: against the papers' formulas in Python floats."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from slimrl.algorithms.off_policy import (
    Correction,
    ImportanceWeighting,
    Rejection,
    effective_share,
    off_policy_correction,
)

LEVELS = ("token", "sequence", "geometric")


@dataclasses.dataclass
class Samples:
    """Log-probabilities of each sample's response tokens and their mask, as Python numbers."""

    train: list[list[float]]
    rollout: list[list[float]]
    mask: list[list[int]]

    def ratios(self, level: str) -> list[list[float]]:
        """pi_train / pi_rollout at each token, of its sample or the geometric mean of its sample."""
        found = []
        for train, rollout, mask in zip(self.train, self.rollout, self.mask, strict=True):
            gaps = [a - b for a, b in zip(train, rollout, strict=True)]
            total = math.fsum(gap for gap, kept in zip(gaps, mask, strict=True) if kept)
            of_sample = {"sequence": total, "geometric": total / max(sum(mask), 1)}
            found.append([math.exp(of_sample.get(level, gap)) for gap in gaps])
        return found

    def corrected(self, weighting: ImportanceWeighting | None = None, rejection: Rejection | None = None) -> Correction:
        """The code under test, in float64."""

        def column(values: list) -> torch.Tensor:
            return torch.tensor([value for sample in values for value in sample], dtype=torch.float64)

        lengths = torch.tensor([len(sample) for sample in self.mask])
        columns = column(self.train), column(self.rollout), column(self.mask)
        return off_policy_correction(*columns, lengths, weighting=weighting, rejection=rejection)


@pytest.fixture(scope="module")
def samples() -> Samples:
    """Thirty samples of up to nine tokens with differences of either sign; some tokens and one sample masked."""
    draw = random.Random(7)
    lengths = [draw.randint(1, 9) for _ in range(30)]
    rollout = [[-draw.expovariate(1.0) for _ in range(length)] for length in lengths]
    train = [[value + draw.gauss(0.0, 0.4) for value in sample] for sample in rollout]
    mask = [[int(draw.random() < 0.8) for _ in range(length)] for length in lengths]
    mask[4] = [0] * lengths[4]
    return Samples(train, rollout, mask)


def flat(values: list[list[float]]) -> list[float]:
    return [value for sample in values for value in sample]


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_weight_is_the_ratio_of_its_level_moved_to_the_bounds(level, samples: Samples):
    found = samples.corrected(ImportanceWeighting(0.7, 1.5, level))
    ratios = samples.ratios(level)
    assert found.weights.tolist() == pytest.approx([min(max(ratio, 0.7), 1.5) for ratio in flat(ratios)], rel=1e-12)
    assert found.values["tis"].tolist() == pytest.approx(flat(ratios), rel=1e-12)
    assert not torch.equal(found.weights, found.values["tis"])  # a bound acts
    assert found.mask.tolist() == flat(samples.mask)  # weights leave nothing out


@pytest.mark.parametrize("level", LEVELS)
def test_masked_weight_is_the_ratio_within_the_bounds_and_zero_elsewhere(level, samples: Samples):
    """IcePop's M(k) at token level; masked importance sampling at sequence level."""
    found = samples.corrected(ImportanceWeighting(0.7, 1.5, level, masks=True))
    expected = [ratio if 0.7 <= ratio <= 1.5 else 0.0 for ratio in flat(samples.ratios(level))]
    assert found.weights.tolist() == pytest.approx(expected, rel=1e-12)
    assert 0 < expected.count(0.0) < len(expected)


@pytest.mark.parametrize("level", LEVELS)
def test_rejection_masks_tokens_or_whole_samples_outside_the_bounds(level, samples: Samples):
    kept = samples.corrected(rejection=Rejection(level, low=0.7, high=1.5))
    pairs = zip(flat(samples.mask), flat(samples.ratios(level)), strict=True)
    expected = [mask if 0.7 <= ratio <= 1.5 else 0 for mask, ratio in pairs]
    assert kept.mask.tolist() == expected
    assert kept.weights is None
    assert 0 < sum(expected) < sum(flat(samples.mask))


@pytest.mark.parametrize(("low", "high"), [(0.7, None), (None, 1.5)])
def test_one_bound_rejects_on_its_side_only(low, high, samples: Samples):
    kept = samples.corrected(rejection=Rejection("geometric", low=low, high=high)).mask.tolist()
    pairs = zip(flat(samples.mask), flat(samples.ratios("geometric")), strict=True)
    assert kept == [mask if (low or 0) <= ratio <= (high or math.inf) else 0 for mask, ratio in pairs]


def test_sample_with_a_catastrophic_trained_token_is_vetoed(samples: Samples):
    found = samples.corrected(rejection=Rejection(veto=0.6))
    expected, vetoed = [], 0
    for ratios, mask in zip(samples.ratios("token"), samples.mask, strict=True):
        bad = any(ratio < 0.6 for ratio, kept in zip(ratios, mask, strict=True) if kept)
        expected += [0 if bad else kept for kept in mask]
        vetoed += bad
    assert found.mask.tolist() == expected
    assert float(found.by_sample["rs_vetoed_samples"]) == vetoed > 0


def test_catastrophic_token_that_is_masked_vetoes_nothing():
    one = Samples([[-9.0, -1.0]], [[-1.0, -1.0]], [[0, 1]])
    assert one.corrected(rejection=Rejection(veto=0.1)).mask.tolist() == [0.0, 1.0]


def test_ratio_exactly_at_a_bound_is_kept():
    two = Samples([[0.0], [math.log(2.0)]], [[math.log(2.0)], [0.0]], [[1], [1]])  # ratios 0.5 and 2
    assert two.corrected(rejection=Rejection("token", low=0.5, high=2.0)).mask.tolist() == [1.0, 1.0]
    masked = two.corrected(ImportanceWeighting(0.5, 2.0, masks=True))
    assert masked.weights.tolist() == [0.5, 2.0] and masked.values["tis_clipfrac"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_sums_give_the_mean_weight_and_the_effective_sample_size(level, samples: Samples):
    """Kish: (sum w)^2 / sum w^2, over tokens at token level and over samples at the others."""
    found = samples.corrected(ImportanceWeighting(0.7, 1.5, level))
    weights, clipped = [], 0
    for ratios, mask in zip(samples.ratios(level), samples.mask, strict=True):
        own = [min(max(ratio, 0.7), 1.5) for ratio, kept in zip(ratios, mask, strict=True) if kept]
        weights += own if level == "token" else own[:1]
        clipped += any(not 0.7 <= ratio <= 1.5 for ratio, kept in zip(ratios, mask, strict=True) if kept)
    sums = found.by_token if level == "token" else found.by_sample
    assert float(sums["tis_weight"]) == pytest.approx(math.fsum(weights), rel=1e-12)
    assert float(sums["tis_weight_square"]) == pytest.approx(math.fsum(w * w for w in weights), rel=1e-12)
    assert float(found.by_sample["tis_clipped_samples"]) == clipped > 0
    assert float(found.trained_samples) == sum(any(mask) for mask in samples.mask) < len(samples.mask)
    share = effective_share(*(float(sums[name]) / len(weights) for name in ("tis_weight", "tis_weight_square")))
    kish = math.fsum(weights) ** 2 / math.fsum(w * w for w in weights)
    assert share == pytest.approx(kish / len(weights), rel=1e-12)


@pytest.mark.parametrize(("weights", "share"), [([1.0] * 5, 1.0), ([3.0, 0.0, 0.0, 0.0], 0.25), ([0.0, 0.0], 0.0)])
def test_effective_share_of_equal_single_and_no_weights(weights, share):
    n = len(weights)
    assert effective_share(sum(weights) / n, sum(w * w for w in weights) / n) == pytest.approx(share)


def test_rejected_tokens_and_samples_are_counted(samples: Samples):
    found = samples.corrected(rejection=Rejection("token", low=0.7, high=1.5))
    left = [
        [kept and 0.7 <= ratio <= 1.5 for ratio, kept in zip(ratios, mask, strict=True)]
        for ratios, mask in zip(samples.ratios("token"), samples.mask, strict=True)
    ]
    assert float(found.by_token["rs_masked_tokens"]) == sum(flat(samples.mask)) - sum(map(sum, left)) > 0
    emptied = sum(any(mask) and not any(kept) for mask, kept in zip(samples.mask, left, strict=True))
    assert float(found.by_sample["rs_masked_samples"]) == emptied > 0


@pytest.mark.parametrize("level", LEVELS)
def test_infinite_log_probabilities_give_finite_weights(level):
    three = Samples([[-math.inf, -1.0], [-1.0], [-1.0]], [[-1.0, -math.inf], [-math.inf], [-1.0]], [[1, 1], [1], [1]])
    weights = three.corrected(ImportanceWeighting(0.5, 2.0, level)).weights.tolist()
    by_level = {"token": [0.5, 2.0, 2.0, 1.0], "sequence": [1.0, 1.0, 2.0, 1.0], "geometric": [1.0, 1.0, 2.0, 1.0]}
    assert weights == by_level[level]


def test_correction_has_no_gradient():
    train = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = train, torch.tensor([-1.5, -1.0]), torch.ones(2), torch.tensor([2])
    kinds = {"weighting": ImportanceWeighting(0.0, 2.0, "sequence"), "rejection": Rejection("geometric", high=1.5)}
    found = off_policy_correction(*columns, **kinds)
    assert not found.weights.requires_grad and not found.mask.requires_grad
