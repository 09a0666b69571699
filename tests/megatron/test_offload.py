"""An offloaded training rank holds nothing on its device, and continues after onload as if nothing had happened."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.offload import OffloadedError, State, TrainingMemory
from slimrl.megatron.parallel import Communicators, distinct_backends
from slimrl.weights.update.shared_memory import shared_copies
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool
from tests.megatron.layouts import CP2, EP2, PP2, SPREAD, fsdp
from tests.megatron.layouts import TP2_SP as TP2

CPU = torch.device("cpu")
KIB = 1024


class Listener:
    """A backend that records its calls."""

    def __init__(self, name: str, events: list[str], initialized: bool = True) -> None:
        self.name, self.events, self.initialized = name, events, initialized

    def _is_initialized(self) -> bool:
        return self.initialized

    def suspend(self) -> None:
        self.events.append(f"suspend {self.name}")

    def resume(self) -> None:
        self.events.append(f"resume {self.name}")


def memory(weights: list[Tensor], gradients: list[Tensor], optimizer: list[Tensor], *backends: Any) -> TrainingMemory:
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return TrainingMemory(lambda: parts, CPU, Communicators(backends))


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


# -- offloading ------------------------------------------------------------------------------------------------------


def test_offload_frees_the_memory_and_onload_restores_it_bit_for_bit():
    weight = torch.tensor([1.5, float("nan"), -0.0, 3e38])
    moment = torch.arange(6.0, dtype=torch.bfloat16)
    bits = weight.view(torch.int32).clone(), moment.view(torch.int16).clone()
    gradient = torch.ones(3)
    offloadable = memory([weight], [gradient], [moment])
    assert offloadable.sleep() == {"weights": 16, "gradients": 12, "optimizer": 12}
    assert [size(tensor) for tensor in (weight, gradient, moment)] == [0, 0, 0]
    offloadable.wake()
    assert torch.equal(weight.view(torch.int32), bits[0]) and torch.equal(moment.view(torch.int16), bits[1])
    assert gradient.tolist() == [0, 0, 0]  # a step begins with zeros: nothing needs to be kept


def test_views_still_share_their_memory():
    whole = torch.arange(10.0)
    first, last = whole[:4], whole[6:]
    offloadable = memory([whole, first], [], [last])
    assert offloadable.sleep() == {"weights": 40, "gradients": 0, "optimizer": 0}  # counted once, as weights
    offloadable.wake()
    whole += 1
    assert first.tolist() == [1, 2, 3, 4] and last.tolist() == [7, 8, 9, 10]


def test_memory_larger_than_a_chunk_is_restored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slimrl.megatron.offload.CHUNK_BYTES", KIB)
    values = torch.randn(1000)  # 3 chunks of 1 KiB and one of 928 bytes
    before = values.clone()
    offloadable = memory([values], [], [])
    offloadable.sleep()
    assert [chunk.numel() for chunk in offloadable._offloaded["weights"][0].chunks] == [KIB, KIB, KIB, 928]
    offloadable.wake()
    assert torch.equal(values, before)


def test_weights_stay_for_a_weight_update_and_are_offloaded_later():
    weight, gradient, moment = torch.ones(2), torch.ones(2), torch.ones(2)
    events: list[str] = []
    offloadable = memory([weight], [gradient], [moment], Listener("a", events), Listener("b", events))
    assert offloadable.sleep(keep_weights=True) == {"gradients": 8, "optimizer": 8}
    assert weight.tolist() == [1, 1] and (size(gradient), size(moment)) == (0, 0)
    assert events == []  # a weight update gathers over the ranks
    assert offloadable.sleep() == {"weights": 8, "gradients": 8, "optimizer": 8}
    assert size(weight) == 0
    assert events == ["suspend a", "suspend b"]
    offloadable.wake()
    assert events[2:] == ["resume a", "resume b"]
    assert (weight.tolist(), moment.tolist()) == ([1, 1], [1, 1])


def test_missing_tensor_is_rejected_by_name():
    sleeper = memory([torch.ones(2)], [], [])
    with pytest.raises(OffloadedError, match="cannot be onloaded: it is already onloaded"):
        sleeper.wake()
    sleeper.sleep(keep_weights=True)
    sleeper.require("a weight update", State.AWAKE, State.WEIGHTS_ONLY)
    with pytest.raises(OffloadedError, match="^train needs a training rank that is onloaded, and it is onloaded with"):
        sleeper.require("train", State.AWAKE)
    sleeper.sleep()
    with pytest.raises(OffloadedError, match="a weight update needs .* onloaded or onloaded with its weights only"):
        sleeper.require("a weight update", State.AWAKE, State.WEIGHTS_ONLY)
    for keep_weights in (True, False):
        with pytest.raises(OffloadedError, match="cannot be offloaded: it is already offloaded"):
            sleeper.sleep(keep_weights=keep_weights)


# -- communicators ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Group:
    """A process group of `ranks` ranks with a backend."""

    ranks: int
    backend: object

    def size(self) -> int:
        return self.ranks

    def _get_backend(self, device: torch.device) -> object:
        return self.backend


def test_each_multi_rank_communicator_is_suspended_once():
    shared, own = object(), object()
    groups: Any = [Group(4, shared), Group(1, object()), Group(2, own), Group(4, shared)]
    assert distinct_backends(groups, CPU) == [shared, own]


def test_scratch_memory_is_freed_by_the_first_offload():
    dropped = []
    parts: dict[Any, list[Tensor]] = {"weights": [], "gradients": [], "optimizer": []}
    TrainingMemory(lambda: parts, CPU, Communicators([]), lambda: dropped.append(1)).sleep(keep_weights=True)
    assert dropped == [1]


def test_run_that_ends_offloaded_resumes_communicators_first():
    events: list[str] = []
    offloadable = memory([torch.ones(1)], [], [], Listener("a", events))
    offloadable.close()
    assert events == []
    offloadable.sleep()
    offloadable.close()
    assert events == ["suspend a", "resume a"]


def test_unused_communicators_are_skipped():
    events: list[str] = []
    first, second = Listener("a", events), Listener("b", events, initialized=False)
    communicators = Communicators([first, second])
    communicators.suspend()
    second.initialized = True  # between the two calls, which must affect the same communicators
    communicators.resume()
    assert events == ["suspend a", "resume a"]
    communicators.suspend()
    communicators.resume()
    assert events[2:] == ["suspend a", "suspend b", "resume a", "resume b"]


def test_host_weights_that_engines_can_open_stay_where_they_are():
    (weight,) = shared_copies([torch.arange(4.0)])
    moment, place = torch.ones(2), weight.data_ptr()
    offloadable = memory([weight], [], [moment])
    assert offloadable.sleep() == {"weights": 0, "gradients": 0, "optimizer": 8}
    assert weight.data_ptr() == place and size(moment) == 0
    offloadable.wake()
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0] and moment.tolist() == [1.0, 1.0]


# -- real trainers ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """The final state of a rank."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    left_offloaded: int | None  # bytes of all tensors of this process except the offloaded copies
    offloaded: dict[str, int]
    held: dict[str, float]  # expected sizes of the parts, from the weight count
    refusals: list[str]  # errors of training and saving while offloaded


def train(
    rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch], sleeps: bool
) -> Outcome:
    """Trains three rollouts, with or without an offload after each of them."""
    trainer = ranks.start(rank, world_size, init_method, args)
    metrics, left, offloaded, refusals = [], None, {}, []
    for rollout_id, rollout in enumerate(rollouts):
        metrics += trainer.train(rollout_id, ranks.share_of(trainer, rollout))
        if sleeps:
            trainer.memory.sleep(keep_weights=True)
            offloaded = trainer.memory.sleep()
            left = _tensor_bytes(trainer)
            refusals = _refusals(trainer, rollout_id, rollout)
            trainer.memory.wake()
    weights, held = ranks.export(trainer) | ranks.critic_state(trainer), _held(trainer)
    trainer.close()
    return Outcome(metrics, weights, left, offloaded, held, refusals)


def _refusals(trainer: Any, rollout_id: int, rollout: RolloutBatch) -> list[str]:
    said = []
    for action in (
        lambda: trainer.train(rollout_id, ranks.share_of(trainer, rollout)),
        lambda: trainer.save(rollout_id, {}, Path("never-made")),
    ):
        with pytest.raises(OffloadedError) as refused:
            action()
        said.append(str(refused.value))
    return said


def _held(trainer: Any) -> dict[str, float]:
    """Weights as stored, gradients in float32, two float32 moments, and a float32 copy of 16-bit or sharded weights."""
    flags = trainer.hook_args
    element, per_weight = 2 if flags.bf16 else 4, 12 if flags.bf16 or flags.use_megatron_fsdp else 8
    counts = {"dense": 0, "expert": 0}
    for stage in trainer.stages:
        for name, parameter in stage.named_parameters():
            counts["expert" if ".experts." in name else "dense"] += parameter.numel()
    parallel = trainer.parallel
    shares = {"dense": parallel.dp_cp_group.size(), "expert": parallel.world_size // parallel.ep_size}
    if not flags.use_distributed_optimizer:
        shares = dict.fromkeys(counts, 1)
    whole, part = sum(counts.values()), sum(counts[kind] / shares[kind] for kind in counts)
    weights = part if flags.data_parallel_sharding_strategy == "optim_grads_params" else whole
    gradients = part if "grads" in flags.data_parallel_sharding_strategy else whole
    return {"weights": weights * element, "gradients": gradients * 4, "optimizer": part * per_weight}


def _tensor_bytes(trainer: Any) -> int:
    """Bytes of all live tensors, each storage once, without the offloaded copies and the reference."""
    gc.collect()
    aside = {
        chunk.untyped_storage().data_ptr()
        for offloaded in trainer.memory._offloaded.values()
        for one in offloaded
        for chunk in one.chunks or ()
    }
    reference = trainer._policy.reference
    if reference is not None:
        for chunk in getattr(reference, "_weights", reference)._memory._chunks:  # Megatron-FSDP divides it
            aside.add(chunk.untyped_storage().data_ptr())
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for address, size in found.items() if address not in aside)


# name: ranks, model, flags
LAYOUTS = {
    "one rank": (1, "models", {}),
    "TP2 with the distributed optimizer": (2, "models", TP2 | SPREAD),
    "DP2 with the distributed optimizer in bfloat16": (2, "models", SPREAD | {"bf16": True}),
    "EP2 with the distributed optimizer": (2, "expert_models", SPREAD | {"expert_model_parallel_size": 2}),
    "DP2, Megatron-FSDP in bfloat16": (2, "models", fsdp("optim_grads_params") | {"bf16": True}),
    "DP2, Megatron-FSDP of gradients": (2, "models", fsdp("optim_grads")),
    "EP2, Megatron-FSDP of the optimizer's state": (2, "expert_models", EP2 | fsdp("optim")),
}
CRITIC = {"advantage_estimator": "ppo", "gamma": 0.99, "lambd": 0.9, "critic_lr": 5e-3}
OF_CRITIC = {
    "DP2 with the distributed optimizer": ("models", SPREAD),
    "TP2": ("models", TP2),
    "PP2": ("models", PP2),
    "CP2": ("models", SPREAD | CP2),
    "EP2": ("expert_models", SPREAD | EP2),
    "DP2, Megatron-FSDP": ("models", fsdp("optim_grads_params")),
    "DP2 in bfloat16": ("models", SPREAD | {"bf16": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "DP2 with the distributed optimizer in bfloat16"])
def test_weights_that_engines_can_open_are_trained_like_private_ones(
    layout: str, models: Any, one_rank: RankPool, two_ranks: RankPool
):
    count, _, changes = LAYOUTS[layout]
    rollouts = [tiny.recorded_rollout(seed) for seed in range(2)]
    shared, private = (
        (one_rank if count == 1 else two_ranks).run(
            train, tiny.tiny_args(load=str(models.policy), colocate=colocate, **models.flags, **changes), rollouts, True
        )
        for colocate in (True, False)
    )
    for one, other in zip(shared, private, strict=True):
        assert one.metrics == other.metrics
        assert [name for name, value in other.weights.items() if not torch.equal(value, one.weights[name])] == []
        assert one.offloaded == other.offloaded | {"weights": 0} and other.offloaded["weights"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", OF_CRITIC)
def test_offloading_policy_and_critic_changes_nothing(layout: str, request: pytest.FixtureRequest, two_ranks: RankPool):
    kind, changes = OF_CRITIC[layout]
    models = request.getfixturevalue(kind)
    rollouts = [tiny.recorded_rollout(seed) for seed in range(3)]
    args = tiny.tiny_args(load=str(models.policy), **models.flags, **changes, **CRITIC)
    slept, awake = (two_ranks.run(train, args, rollouts, sleeps) for sleeps in (True, False))
    for one, other in zip(slept, awake, strict=True):
        assert one.metrics == other.metrics and any("value_loss" in name for name in one.metrics[0])
        assert [name for name, value in other.weights.items() if not torch.equal(value, one.weights[name])] == []
        assert one.left_offloaded < 40_000


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloading_after_every_step_changes_and_leaks_nothing(
    layout: str, request: pytest.FixtureRequest, one_rank: RankPool, two_ranks: RankPool
):
    count, kind, changes = LAYOUTS[layout]
    models = request.getfixturevalue(kind)
    pool = one_rank if count == 1 else two_ranks
    rollouts = [tiny.recorded_rollout(seed) for seed in range(3)]
    args = tiny.tiny_args(
        load=str(models.policy), ref_load=str(models.reference), use_kl_loss=True, kl_loss_coef=0.05,
        **models.flags, **changes,
    )  # fmt: skip
    slept, awake = (pool.run(train, args, rollouts, sleeps) for sleeps in (True, False))
    for one, other in zip(slept, awake, strict=True):
        assert one.metrics == other.metrics
        assert [name for name, value in other.weights.items() if not torch.equal(value, one.weights[name])] == []
        assert one.offloaded == pytest.approx(one.held, rel=0.02)  # optimizer shards are rounded up
        assert one.refusals == [
            "training needs a training rank that is onloaded, and it is offloaded",
            "saving a checkpoint needs a training rank that is onloaded, and it is offloaded",
        ]
        assert one.left_offloaded < 40_000  # the states of random generators, 5 kB each
