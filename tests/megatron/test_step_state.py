"""A rank is lost, and new ranks with the states of the surviving ones continue bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.cluster.training.train_group import NoPeerStateError, choose_sources
from slimrl.cluster.training.train_messages import StateReport
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.training import step_state
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool
from tests.megatron.test_resume import ADAPTIVE_KL, EP2, PP2, PPO, TP2, draw, schedule_args

pytestmark = pytest.mark.slow

DONE, ALL = 2, 3  # rollouts before the loss, and of the run
LOST = 1


class LostError(Exception):
    """Stands for the end of a collective in which a peer was lost."""


@dataclasses.dataclass
class Left:
    """What a rank leaves: its part of the model, and its state with the report before."""

    part: tuple[int, ...]
    report: StateReport
    state: bytes | None


@dataclasses.dataclass
class End:
    """What a rank has at the end of the run."""

    first: int
    state: dict[str, Tensor]
    metrics: list[dict[str, float]]  # of the last rollout
    random_numbers: list[float]


def train(trainer: Any, rollouts: list[RolloutBatch], stop: int) -> list[dict[str, float]]:
    """Trains up to rollout `stop`; the metrics of the last one."""
    metrics = []
    for rollout_id in range(trainer.start_rollout_id, stop):
        for _ in range(1 + trainer.parallel.rank):
            draw()  # like a model with dropout, and as many micro-batches on every rank as its samples need
        metrics = trainer.train(rollout_id, ranks.share_of(trainer, rollouts[rollout_id]))
    return metrics


def finish(
    rank: int,
    world_size: int,
    init_method: str,
    args: Arguments,
    rollouts: list[RolloutBatch],
    given: list[bytes | None],
) -> End:
    """Trains to the end, from the state in `given` if there is one."""
    from slimrl.megatron.training.step_state import StepState

    trainer = ranks.start(rank, world_size, init_method, args, state=StepState(given[rank]))
    first = trainer.start_rollout_id
    metrics = train(trainer, rollouts, ALL)
    end = End(first, ranks.local_state(trainer) | ranks.critic_state(trainer), metrics, draw())
    trainer.close()
    return end


def lose(rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch], at: str) -> Left:
    """Trains on the first rollouts, and hands over the state at a place after them."""
    from slimrl.megatron.training.step_state import StateTakenError, StepState

    state = StepState()
    trainer = ranks.start(rank, world_size, init_method, args, state=state)
    train(trainer, rollouts, DONE)
    found: list[Left] = []

    def take() -> None:
        report = StateReport(*state.report())
        found.append(Left(trainer.parallel.part, report, None if report.first is None else bytes(state.read())))
        raise LostError

    with contextlib.suppress(LostError):
        if at.startswith("offloaded"):
            trainer.memory.sleep(keep_weights="weights" in at)
            take()
        begin(trainer, at, take, state.report)
        draw()
        trainer.train(DONE, ranks.share_of(trainer, rollouts[DONE]))
    for change in (state.change, trainer.memory.sleep, trainer.memory.wake):
        with pytest.raises((StateTakenError, RuntimeError)):
            change()
    return found[0]


def begin(trainer: Any, at: str, take: Callable[[], None], report: Callable[[], object]) -> None:
    """Makes the next `train` call `take` at a place."""
    reference, guard = trainer._policy.reference, trainer._policy.guard
    if at == "between rollouts":
        take()
    elif at == "in the pass of the reference":
        swapped = reference.loaded_weights

        @contextlib.contextmanager
        def loaded_weights() -> Iterator[None]:
            with swapped():
                take()
                yield

        reference.loaded_weights = loaded_weights
    elif at == "while the weights of the reference are replaced":
        loaded = reference.loaded_weights

        @contextlib.contextmanager
        def left() -> Iterator[None]:
            with loaded():
                report()
                reference._own.fill = lambda _: None  # a device copies later, after all that it has to do
            take()
            yield

        reference.loaded_weights = left
    elif at == "after the first backward pass":
        guard.step = lambda *_: take()
    elif at == "after the first optimizer step":
        step = guard.step

        def stepped(*arguments: Any) -> None:
            step(*arguments)
            take()

        guard.step = stepped
    else:
        raise ValueError(at)


BACKWARD = "after the first backward pass"
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
# name: ranks, model, flags, place
LOSSES = {
    "DP2 between rollouts": (2, "models", {}, "between rollouts"),
    "DP2 offloaded": (2, "models", {}, "offloaded"),
    "DP2 offloaded but for the weights": (2, "models", {"bf16": True}, "offloaded but for the weights"),
    "DP2 with the weights of the reference": (2, "models", {}, "in the pass of the reference"),
    "DP2 with a reference that changes": (2, "models", {"ref_update_interval": 1}, "in the pass of the reference"),
    "DP2 as the reference is replaced": (2, "models", {}, "while the weights of the reference are replaced"),
    "DP2 in bfloat16": (2, "models", ADAPTIVE_KL | {"bf16": True}, BACKWARD),
    "CP2": (2, "models", {"context_parallel_size": 2}, BACKWARD),
    "DP2 with a critic": (2, "models", PPO | {"normalize_values": True}, "between rollouts"),
    "DP2 with adapters and a critic": (2, "models", PPO | LORA, "offloaded"),
    "DP2 with Muon": (2, "models", {"optimizer": "muon"}, BACKWARD),
    "TP2 x DP2": (4, "models", TP2, BACKWARD),
    "PP2 x DP2": (4, "models", PP2, "between rollouts"),
    "EP2 x DP2": (4, "expert_models", EP2, BACKWARD),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_new_ranks_continue_bit_for_bit_with_the_states_of_their_peers(loss: str, request: pytest.FixtureRequest):
    size, kind, changes, at = LOSSES[loss]
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ALL)]
    args = schedule_args(request.getfixturevalue(kind), **changes)
    with RankPool(size) as pool:
        undisturbed = pool.run(finish, args, rollouts, [None] * size)
        left = pool.run(lose, args, rollouts, at)
        reports = [None if rank == LOST else one.report for rank, one in enumerate(left)]
        sources = choose_sources([one.part for one in left], reports, DONE)
        assert LOST not in sources
        continued = pool.run(finish, args, rollouts, [left[source].state for source in sources])
    for calm, again in zip(undisturbed, continued, strict=True):
        assert (calm.first, again.first) == (0, DONE)
        assert again.metrics == calm.metrics
        assert again.state.keys() == calm.state.keys()
        assert [name for name, value in calm.state.items() if not torch.equal(value, again.state[name])] == []
        assert again.random_numbers == calm.random_numbers


@pytest.mark.parametrize("of_critic", [False, True])
def test_state_within_the_optimizer_steps_of_a_rollout_is_not_handed_over(
    of_critic: bool, models: Any, two_ranks: RankPool
):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ALL)]
    args = schedule_args(models, **(PPO if of_critic else {}))
    # the critic's steps come before the policy's backward pass
    left = two_ranks.run(lose, args, rollouts, BACKWARD if of_critic else "after the first optimizer step")
    with pytest.raises(NoPeerStateError, match=f"^rank 0 was in an optimizer step of rollout {DONE}$"):
        choose_sources([one.part for one in left], [left[0].report, None], DONE)


def test_state_of_another_model_is_rejected(models: Any, two_ranks: RankPool, one_rank: RankPool):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ALL)]
    left = one_rank.run(lose, schedule_args(models), rollouts, "between rollouts")
    other = schedule_args(models, lora_rank=4, lora_alpha=8.0)
    with pytest.raises(RuntimeError, match="the state of the peer has other weights: .*lora"):
        one_rank.run(finish, other, rollouts, [left[0].state])


@pytest.mark.parametrize(
    ("nbytes", "why"), [(0, "was exchanging its weights"), (10 * step_state._COPIED_PER_S, "is not loaded yet")]
)
def test_report_waits_as_long_as_a_copy_of_the_weights_takes(nbytes, why, monkeypatch):
    monkeypatch.setattr(step_state, "_LOCK_S", 0.01)
    state = step_state.StepState()
    state._swapped = [SimpleNamespace(host_bytes=nbytes, loaded=False)]
    copying = threading.Event()

    def copy():
        with state._lock:
            copying.set()
            time.sleep(0.3)

    thread = threading.Thread(target=copy)
    thread.start()
    copying.wait()
    assert state.report() == (None, why, None)
    thread.join()
