"""A critic in ranks of its own gives the numbers of the critic in the policy's ranks, and resumes bit for bit.

Both worlds run at the same time, and pass the columns through files in the place of Ray's object store.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.training.critic import SampleColumns, critic_arguments
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool
from tests.megatron.layouts import DYNAMIC, fsdp
from tests.megatron.test_resume import EP2, PP2, PPO, SPREAD, TP2, schedule_args

pytestmark = pytest.mark.slow

ROLLOUTS = 4
FLAGS = PPO | {"kl_coef": 0.05, "use_kl_loss": False, "kl_loss_coef": 0.0, "normalize_values": True}
TWO_STEPS = {"num_steps_per_rollout": 2}


@dataclasses.dataclass
class Outcome:
    """What a rank reports: metrics of every optimizer step, and its weights and optimizer state."""

    first: int
    metrics: list[dict[str, float]]
    state: dict[str, Tensor]


def train_together(
    rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch], stop: int
) -> Outcome:
    """Policy and critic in the same ranks."""
    trainer = ranks.start(rank, world_size, init_method, args)
    metrics = []
    for rollout_id in range(trainer.start_rollout_id, stop):
        metrics += trainer.train(rollout_id, ranks.share_of(trainer, rollouts[rollout_id]))
    outcome = Outcome(trainer.start_rollout_id, metrics, ranks.local_state(trainer) | ranks.critic_state(trainer))
    trainer.close()
    return outcome


class Columns:
    """Passes columns through files in `folder`, one for each data-parallel rank."""

    def __init__(self, folder: Path, parallel: Any) -> None:
        self.folder, self.parallel = folder, parallel

    def put(self, name: str, columns: SampleColumns) -> None:
        place = self.parallel
        if place.leads_replica:
            unfinished = self.folder / f"{name}-{place.dp_rank}.tmp"
            unfinished.write_bytes(pickle.dumps(columns))
            os.replace(unfinished, unfinished.with_suffix(""))

    def get(self, name: str, others: int) -> list[SampleColumns]:
        """Of all `others` data-parallel ranks of the other role, or of the one with the same samples."""
        parts = [self.parallel.dp_rank] if others == self.parallel.dp_size else range(others)
        return [self._read(self.folder / f"{name}-{part}") for part in parts]

    def _read(self, path: Path) -> SampleColumns:
        until = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < until, f"no {path.name}"
            time.sleep(0.01)
        return pickle.loads(path.read_bytes())


def train_apart(
    rank: int,
    world_size: int,
    init_method: str,
    args: Arguments,
    rollouts: list[RolloutBatch],
    stop: int,
    folder: Path,
) -> Outcome:
    """The first ranks are the policy's, the others the critic's."""
    from slimrl.megatron.training.critic_trainer import CriticTrainer
    from slimrl.megatron.training.trainer import MegatronTrainer

    of_policy = rank < args.actor_num_gpus
    kind = MegatronTrainer if of_policy else CriticTrainer
    own = rank if of_policy else rank - args.actor_num_gpus
    size = args.actor_num_gpus if of_policy else args.critic_num_gpus
    store = f"{init_method}-{kind.__name__}"
    trainer = kind(args, rank=own, world_size=size, local_rank=rank, init_method=store)
    columns, metrics, copies = Columns(folder, trainer.parallel), [], size // trainer.parallel.dp_size
    others = (args.critic_num_gpus if of_policy else args.actor_num_gpus) // copies
    for rollout_id in range(trainer.start_rollout_id, stop):
        batch = ranks.part_of(args, trainer.parallel, rollouts[rollout_id])
        if of_policy:
            trainer.score(rollout_id, batch)
            columns.put(f"targets-{rollout_id}", trainer.prepare(columns.get(f"values-{rollout_id}", others)))
            metrics += trainer.train_scored()
        else:
            columns.put(f"values-{rollout_id}", trainer.values(rollout_id, batch))
            metrics += trainer.train(rollout_id, columns.get(f"targets-{rollout_id}", others))
        if args.save is not None:
            saved_with = f"of rollout {rollout_id}"
            if of_policy:
                trainer.save(rollout_id, {"offset": rollout_id}, saved_with=saved_with)
            else:
                time.sleep(0.2)  # so that a policy that does not wait would be complete first
                trainer.save(rollout_id, saved_with)
    state = ranks.local_state(trainer if of_policy else trainer.critic.model)
    outcome = Outcome(trainer.start_rollout_id, metrics, state)
    trainer.close()
    return outcome


def apart(args: Arguments, policy: int, critic: int) -> Arguments:
    sizes = {"actor_num_gpus_per_node": policy, "critic_num_gpus_per_node": critic, "critic_num_nodes": 1}
    return dataclasses.replace(args, actor_num_nodes=1, **sizes)


def joined(policy: Outcome, critic: Outcome) -> list[dict[str, float]]:
    """The metrics of both by step, without times."""
    steps = [one | other for one, other in zip(policy.metrics, critic.metrics, strict=True)]
    return [{name: value for name, value in step.items() if not name.startswith("perf/")} for step in steps]


EQUAL = {
    "one rank each": (1, {}),
    "TP2 each": (2, TP2),
    "PP2 each, two steps": (2, PP2 | TWO_STEPS),
    "DP2 each, two steps": (2, SPREAD | TWO_STEPS),
    "TP2 without SP each": (2, {"tensor_model_parallel_size": 2}),
    "CP2 each": (2, SPREAD | {"context_parallel_size": 2}),
    "EP2 each, packed": (2, EP2 | SPREAD | DYNAMIC),
    "DP2 each, Megatron-FSDP": (2, fsdp("optim_grads_params")),
}


@pytest.mark.parametrize("name", EQUAL)
def test_critic_of_the_same_layout_gives_the_same_bits(
    name: str,
    models: Any,
    expert_models: Any,
    one_rank: RankPool,
    two_ranks: RankPool,
    four_ranks: RankPool,
    tmp_path: Path,
):
    size, changes = EQUAL[name]
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ROLLOUTS)]
    args = schedule_args(expert_models if "EP2" in name else models, **FLAGS | changes)
    together = (one_rank if size == 1 else two_ranks).run(train_together, args, rollouts, ROLLOUTS)
    pool = two_ranks if size == 1 else four_ranks
    found = pool.run(train_apart, apart(args, size, size), rollouts, ROLLOUTS, tmp_path)
    for rank, expected in enumerate(together):
        policy, critic = found[rank], found[size + rank]
        assert joined(policy, critic) == expected.metrics
        state = policy.state | {f"critic {name}": value for name, value in critic.state.items()}
        assert state.keys() == expected.state.keys()
        assert [name for name, value in state.items() if not torch.equal(value, expected.state[name])] == []
    losses = [step["critic-value_loss"] for step in together[0].metrics]
    assert len(losses) == ROLLOUTS * args.num_steps_per_rollout and min(losses) > 0
    assert ["grad_norm" in step for step in together[0].metrics].count(False) == args.num_steps_per_rollout


@pytest.mark.parametrize(("policy", "critic"), [(2, 1), (1, 2)], ids=["DP2 and one rank", "one rank and DP2"])
def test_critic_of_another_data_parallel_size_gives_the_same_numbers(
    policy: int, critic: int, models: Any, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ROLLOUTS)]
    args = schedule_args(models, **FLAGS | TWO_STEPS)
    together = one_rank.run(train_together, args, rollouts, ROLLOUTS)[0]
    with RankPool(3) as pool:
        found = pool.run(train_apart, apart(args, policy, critic), rollouts, ROLLOUTS, tmp_path)
    for step, expected in zip(joined(found[0], found[policy]), together.metrics, strict=True):
        assert step == pytest.approx(expected, rel=2e-4, abs=2e-5)
    weights = {name: value for name, value in found[policy].state.items() if name.startswith("weight")}
    for name, value in weights.items():
        torch.testing.assert_close(value, together.state[f"critic {name}"], rtol=0, atol=2e-5)


RESUMED = {
    "one rank each, saved at once": (1, {}),
    "one rank each, saved in the background": (1, {"async_save": True}),
    "TP2 each": (2, TP2),
    "DP2 each, Megatron-FSDP": (2, fsdp("optim_grads_params")),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_continues_bit_for_bit(
    name: str, models: Any, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
):
    size, changes = RESUMED[name]
    pool = two_ranks if size == 1 else four_ranks
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ROLLOUTS)]
    args = apart(schedule_args(models, **FLAGS | changes), size, size)
    for folder in ("whole", "halves"):
        (tmp_path / folder).mkdir()
    whole = pool.run(train_apart, args, rollouts, ROLLOUTS, tmp_path / "whole")
    saved = tmp_path / "saved"
    args = dataclasses.replace(args, save=str(saved), load=str(saved), critic_save=str(saved / "critic"))
    with RankPool(2 * size) as first:
        before = first.run(train_apart, args, rollouts, ROLLOUTS // 2, tmp_path / "halves")
    after = pool.run(train_apart, args, rollouts, ROLLOUTS, tmp_path / "halves")
    assert [outcome.first for outcome in after] == [ROLLOUTS // 2] * 2 * size
    for rank in range(size):  # of the policy, and the critic's with the same place
        halves, complete = ([part[rank], part[size + rank]] for part in (before, whole))
        assert joined(*halves) + joined(after[rank], after[size + rank]) == joined(*complete)
    for complete, resumed in zip(whole, after, strict=True):
        assert [name for name, value in complete.state.items() if not torch.equal(value, resumed.state[name])] == []
    folders = (saved / "iter_0000001", saved / "critic/iter_0000001")
    one, other = (folder / "slimrl_checkpoint.json" for folder in folders)
    assert other.stat().st_mtime_ns < one.stat().st_mtime_ns  # the critic's is complete first
    assert '"saved_with": "of rollout 1"' in one.read_text() and '"saved_with": "of rollout 1"' in other.read_text()


def test_run_resumes_with_the_critic_in_another_place(
    models: Any, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(ROLLOUTS)]
    args = schedule_args(models, **FLAGS)
    whole = one_rank.run(train_together, args, rollouts, ROLLOUTS)[0]
    saved = tmp_path / "saved"
    args = dataclasses.replace(args, save=str(saved), load=str(saved), critic_save=str(saved / "critic"))
    (tmp_path / "columns").mkdir()
    two_ranks.run(train_apart, apart(args, 1, 1), rollouts, 2, tmp_path / "columns")
    together = one_rank.run(train_together, args, rollouts, 3)[0]
    steps = args.num_steps_per_rollout
    assert together.first == 2 and together.metrics == whole.metrics[2 * steps : 3 * steps]
    policy, critic = two_ranks.run(train_apart, apart(args, 1, 1), rollouts, ROLLOUTS, tmp_path / "columns")
    assert joined(policy, critic) == whole.metrics[2 * steps :]  # from the same checkpoint
    state = policy.state | {f"critic {name}": value for name, value in critic.state.items()}
    assert [name for name, value in whole.state.items() if not torch.equal(value, state[name])] == []


def test_policy_is_not_complete_without_the_critic_of_other_ranks(models: Any, one_rank: RankPool, tmp_path: Path):
    args = dataclasses.replace(apart(schedule_args(models, **FLAGS), 1, 1), save=str(tmp_path))
    args = dataclasses.replace(args, critic_save=str(tmp_path / "critic"))
    args = dataclasses.replace(args, async_save=True)
    assert one_rank.run(save_alone, args) == [(False, True)]


def save_alone(rank: int, world_size: int, init_method: str, args: Arguments) -> tuple[bool, bool]:
    """Whether the policy's checkpoint is complete, before and after that of the critic, which other ranks write."""
    from slimrl.megatron.checkpoint.folder import write_manifest

    trainer = ranks.start(rank, world_size, init_method, args)
    folder = trainer.save(0, {"offset": 0}, saved_with="one name")
    time.sleep(1.0)  # its files take less
    before = folder.exists()
    assert args.critic_save is not None
    of_critic = Path(args.critic_save) / folder.name
    of_critic.mkdir(parents=True)
    write_manifest(of_critic, 0, saved_with="one name")
    trainer.finish_saves()
    trainer.close()
    return before, folder.exists()


def columns_of(ids: list[int], lengths: list[int]) -> SampleColumns:
    """Token i of sample s has the value 100 s + i."""
    values = [
        float(100 * sample + token) for sample, length in zip(ids, lengths, strict=True) for token in range(length)
    ]
    return SampleColumns(torch.tensor(ids), torch.tensor(lengths), {"values": torch.tensor(values)})


def batch_of(ids: list[int], lengths: list[int]) -> RolloutBatch:
    rollout = tiny.recorded_rollout(0, samples=len(ids))
    return dataclasses.replace(rollout, sample_ids=torch.tensor(ids), response_lengths=torch.tensor(lengths))


def test_columns_are_found_by_sample_in_the_parts_of_several_ranks():
    parts = [columns_of([4, 0, 7], [2, 1, 3]), columns_of([2, 9], [2, 2])]
    found = SampleColumns.of_batch(parts, batch_of([9, 0, 7], [2, 1, 3]), torch.device("cpu"))["values"]
    assert found.tolist() == [900, 901, 0, 700, 701, 702]
    same = SampleColumns.of_batch(parts[:1], batch_of([4, 0, 7], [2, 1, 3]), torch.device("cpu"))["values"]
    assert same.tolist() == [400, 401, 0, 700, 701, 702]


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([4, 5], [2, 1], "different samples"),
        ([4, 0], [2, 2], "different lengths"),
        ([9, 99], [2, 2], "different samples"),
    ],
)
def test_columns_of_other_samples_are_rejected(ids: list[int], lengths: list[int], message: str):
    parts = [columns_of([4, 0], [2, 1]), columns_of([2, 9], [2, 2])]
    with pytest.raises(ValueError, match=message):
        SampleColumns.of_batch(parts, batch_of(ids, lengths), torch.device("cpu"))


def test_optimizer_of_the_critic_has_the_values_of_its_role(models: Any):
    args = schedule_args(models, **FLAGS, weight_decay=0.1)
    args.critic_overrides = {"weight_decay": 0.5, "adam_beta2": 0.9, "min_lr": 2e-4}
    own = critic_arguments(args)
    assert (own.weight_decay, own.adam_beta2, own.min_lr) == (0.5, 0.9, 2e-4)
    assert (own.lr, own.lr_warmup_iters, own.clip_grad) == (FLAGS["critic_lr"], 2, args.clip_grad)
    assert (args.weight_decay, args.adam_beta2) == (0.1, 0.95)
