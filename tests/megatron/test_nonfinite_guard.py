"""A step with a non-finite loss or gradient is skipped without a trace, in every layout and format, or ends the run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.training.trained_model import broken_samples
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool
from tests.megatron.layouts import EP2, PP2, SPREAD, TP2

BROKEN = 5  # the sample with the invalid value
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FP16 = {"fp16": True, "initial_loss_scale": 2.0**10, "hysteresis": 1}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}

# name: ranks, model, flags
LAYOUTS = {
    "one rank": (1, "models", {}),
    "DP2 in bfloat16, distributed optimizer, overlapped": (2, "models", SPREAD | OVERLAP | {"bf16": True}),
    "PP2": (2, "models", PP2),
    "TP2 in float16": (2, "models", TP2 | FP16),
    "EP2 with biased routers": (2, "biased_models", EP2 | SPREAD),
}


@pytest.fixture
def biased_models(expert_models: Any, one_rank: RankPool, tmp_path: Path) -> Any:
    """Models whose router biases change in every step."""
    made = dataclasses.replace(expert_models, policy=tmp_path / "policy", flags=expert_models.flags | BIASED)
    one_rank.run(save_new_model, tiny.tiny_args(**made.flags), made.policy)
    return made


def save_new_model(rank: int, world_size: int, init_method: str, args: Arguments, folder: Path) -> None:
    """A checkpoint of randomly initialised weights."""
    from slimrl.megatron import parallel
    from slimrl.megatron.checkpoint import state as checkpoint
    from slimrl.megatron.model import model_builder

    state = parallel.initialize(args, rank=rank, world_size=world_size, init_method=init_method)
    checkpoint.save_model_only(model_builder.build_model(args, state), folder)
    parallel.shutdown()


def test_invalid_sample_is_named_by_its_trained_tokens_only():
    lengths, ids = torch.tensor([2, 1, 2]), torch.tensor([7, 3, 9])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    first = torch.tensor([0.0, math.nan, math.inf, 0.0, 0.0])  # the NaN is masked
    second = torch.tensor([0.0, 0.0, 0.0, -math.inf, math.nan])
    named = broken_samples({"advantages": first, "ref_log_probs": second}, mask, lengths, ids)
    assert named == ["sample 3 (advantages)", "sample 9 (ref_log_probs)"]


@dataclasses.dataclass
class Seen:
    """Full state of one rank after each rollout, and the metrics."""

    states: list[dict[str, Tensor]]
    metrics: list[dict[str, float]]


def state_of(trainer: Any) -> dict[str, Tensor]:
    """All state that a step may change."""
    state = ranks.local_state(trainer) | {"schedule": torch.tensor(trainer.scheduler.num_steps)}
    scalers = [part.grad_scaler for part in trainer.optimizer.chained_optimizers if hasattr(part, "grad_scaler")]
    return state | {f"loss scale {n}": scaler.scale.clone() for n, scaler in enumerate(scalers) if scaler is not None}


def train(rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch]) -> Seen:
    trainer = ranks.start(rank, world_size, init_method, args)
    seen = Seen([], [])
    for number, rollout in enumerate(rollouts):
        seen.metrics += trainer.train(number, ranks.share_of(trainer, rollout))
        seen.states.append(state_of(trainer))
    trainer.close()
    return seen


def train_with_an_infinite_weight(
    rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch
) -> tuple[str, bool]:
    """The error message, and whether all other state is unchanged."""
    trainer = ranks.start(rank, world_size, init_method, args)
    with torch.no_grad():
        trainer.stages[0].decoder.final_layernorm.weight[3] = math.inf
    before = state_of(trainer)
    try:
        trainer.train(4, ranks.share_of(trainer, rollout))
    except FloatingPointError as error:
        return str(error), equal(state_of(trainer), before)
    finally:
        trainer.close()
    return "", False


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bitwise equality, with NaN equal to itself."""
    same = one.keys() == other.keys()
    return same and all(torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0)) for name in one)


def poisoned(rollout: RolloutBatch, value: float) -> RolloutBatch:
    """The rollout with a non-finite reward for one sample."""
    rewards = rollout.rewards.clone()
    rewards[BROKEN] = value
    return dataclasses.replace(rollout, rewards=rewards)


def flags(models: Any, **changes: Any) -> Arguments:
    values = models.flags | {
        "ref_load": str(models.policy),
        "num_rollout": 4,
        "num_steps_per_rollout": 1,
        "lr_decay_style": "linear",
        "check_for_nan_in_loss_and_grad": False,
    }
    return tiny.tiny_args(**(values | changes))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipped_step_changes_no_bit(
    layout: str, request: pytest.FixtureRequest, one_rank: RankPool, two_ranks: RankPool
):
    size, kind, changes = LAYOUTS[layout]
    pool = one_rank if size == 1 else two_ranks
    args = flags(request.getfixturevalue(kind), **changes)
    first, second = tiny.recorded_rollout(1), tiny.recorded_rollout(2)
    spoiled = [poisoned(tiny.recorded_rollout(3), value) for value in (math.nan, math.inf)]
    saw = pool.run(train, args, [first, *spoiled, second])
    never_saw = pool.run(train, args, [first, second])
    for rank, (disturbed, undisturbed) in enumerate(zip(saw, never_saw, strict=True)):
        before, after_nan, after_infinity, last = disturbed.states
        assert equal(after_nan, before) and equal(after_infinity, before), (layout, rank)
        assert equal(last, undisturbed.states[-1]), (layout, rank)
        assert not equal(last, before)
        assert [step["skipped"] for step in disturbed.metrics] == [0.0, 1.0, 1.0, 0.0]
        assert disturbed.metrics[-1] == undisturbed.metrics[-1]
        assert int(last["schedule"]) == 2
        biases = [name for name in last if name.endswith("expert_bias")]
        assert bool(biases) == (kind == "biased_models")
        assert all(last[name].abs().max() > 0 for name in biases)  # applied steps do change them


@pytest.mark.slow
def test_non_finite_loss_ends_the_run_before_any_weight_changes(models: Any, one_rank: RankPool):
    args = flags(models, check_for_nan_in_loss_and_grad=True)
    [(message, untouched)] = one_rank.run(train_with_an_infinite_weight, args, tiny.recorded_rollout(1))
    assert message.startswith("rollout 4, optimizer step 0: the loss is nan and the gradient norm is nan")
    assert "--no-check-for-nan-in-loss-and-grad" in message
    assert untouched


@pytest.mark.slow
def test_too_many_consecutive_skipped_steps_end_the_run_with_the_sample(models: Any, two_ranks: RankPool):
    args = flags(models, max_skipped_steps=2)
    good, bad = tiny.recorded_rollout(1), poisoned(tiny.recorded_rollout(2), math.nan)
    [seen, _] = two_ranks.run(train, args, [bad, good, bad, good])  # never two consecutive
    assert [step["skipped"] for step in seen.metrics] == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(RuntimeError, match=rf"rollout 2, .*sample {BROKEN} \(advantages\).*--max-skipped-steps 2"):
        two_ranks.run(train, args, [good, bad, bad, good])


@pytest.mark.slow
def test_float16_overflow_halves_the_loss_scale_without_counting_as_skipped(models: Any, one_rank: RankPool):
    """With a scale of 2^40 every gradient overflows; each step halves the scale, and none counts as skipped."""
    scale = {"fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1}
    args = flags(models, check_for_nan_in_loss_and_grad=True, max_skipped_steps=1, **scale)
    [seen] = one_rank.run(train, args, [tiny.recorded_rollout(1)] * 3)
    assert [step["skipped"] for step in seen.metrics] == [1.0] * 3
    assert [float(state["loss scale 0"]) for state in seen.states] == [2.0**39, 2.0**38, 2.0**37]
    assert all(math.isfinite(step["loss"]) for step in seen.metrics)
