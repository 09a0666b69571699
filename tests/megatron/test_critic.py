"""The critic in every layout against transformers and autograd in float64, from values to trained weights."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from slimrl.megatron.training.critic import explained_variance
from tests import accuracy
from tests.megatron import layouts, lora_truth, ranks, reference, tiny
from tests.megatron.layouts import CP2, DYNAMIC, EP2, ETP2, FULL, OVERLAP, PP2, SPREAD, TP2_SP, VIRTUAL, Layout, fsdp

pytestmark = pytest.mark.slow

GAMMA, LAMBD, VALUE_CLIP, LR = 0.97, 0.9, 0.05, 2e-3
SETTINGS = dataclasses.replace(layouts.SETTINGS, lr=LR)
LAYOUTS = {
    "1 rank": (Layout(1, {}), "dense"),
    "1 rank, packed, recomputed": (Layout(1, DYNAMIC | FULL), "MLA"),
    "TP2 SP": (Layout(2, TP2_SP), "dense"),
    "TP2 SP, packed": (Layout(2, TP2_SP | DYNAMIC), "MoE"),
    "PP2, packed": (Layout(2, PP2 | DYNAMIC), "dense"),
    "PP2 virtual, packed": (Layout(2, VIRTUAL | DYNAMIC, 4), "dense"),
    "CP2, packed": (Layout(2, CP2 | DYNAMIC), "dense"),
    "DP2, overlapped, packed": (Layout(2, SPREAD | OVERLAP | DYNAMIC), "dense"),
    "EP2, packed": (Layout(2, EP2 | SPREAD | DYNAMIC), "MoE"),
    "ETP2 TP2 SP, packed": (Layout(2, ETP2 | DYNAMIC), "MLA"),
    "DP2, Megatron-FSDP": (Layout(2, fsdp("optim_grads_params")), "dense"),
    "DP2, Megatron-FSDP, packed": (Layout(2, fsdp("optim_grads_params") | DYNAMIC), "dense"),
    "DP2, Megatron-FSDP of the optimizer's state": (Layout(2, fsdp("optim")), "MoE"),
    "TP2 SP PP2, packed": (Layout(4, TP2_SP | PP2 | DYNAMIC), "dense"),
    "EP2 CP2, packed": (Layout(4, EP2 | CP2 | DYNAMIC), "MoE"),
}


@dataclasses.dataclass
class Trained:
    """What one rank has of its samples before and after a rollout, and the metrics of its optimizer steps."""

    samples: list[int]
    values: list[list[Tensor]]  # before and after, by sample
    metrics: list[dict[str, float]]
    report: dict[str, float]


def train(
    rank: int, world_size: int, init_method: str, args: Any, rollout: Any, head: Tensor, adapter: Path | None = None
) -> Trained:
    """Trains policy and critic on one rollout, the critic from a given head, and from a PEFT folder of adapters."""
    trainer = ranks.start(rank, world_size, init_method, args)
    critic = trainer._critic
    set_head(critic, head)
    if adapter is not None:
        set_adapters(trainer, adapter)
    batch = ranks.share_of(trainer, rollout)
    steps = [[trainer._parts.pack(batch, rows) for rows in step] for step in batch.micro_batches]

    def values() -> list[Tensor]:
        return list(critic.values(steps, batch, lambda: None).cpu().split(batch.response_lengths.tolist()))

    before = values()
    metrics = trainer.train(0, batch)
    result = Trained(batch.sample_ids.tolist(), [before, values()], metrics, trainer.rollout_metrics)
    trainer.close()
    return result


def set_adapters(trainer: Any, folder: Path) -> None:
    """Sets the adapters of the critic."""
    from slimrl.models.adapters import AdapterConfig
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.adapters import load_adapters

    args, state = trainer.hook_args, trainer.parallel
    places = {name: getattr(state, name) for name in ("tp_rank", "tp_size", "etp_rank", "etp_size")}
    own = AdapterConfig.of_critic(args), folder
    load_adapters(trainer._critic.model.stages, ModelSpec.from_args(args), ranks.family_of(args), *own, **places)


@torch.no_grad()
def set_head(critic: Any, head: Tensor) -> None:
    """Sets the weights of the value head, also in the optimizer's copies."""
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    for stage, wrapped in zip(critic.model.stages, critic.model.wrapped, strict=True):
        if stage.post_process:
            stage.value_head.weight.copy_(head)
        if isinstance(wrapped, FullyShardedDataParallel):
            buffer = wrapped.param_and_grad_buffer
            for name, parameter in buffer.optimizer_named_parameters:
                if name.endswith("value_head.weight"):
                    local = parameter.to_local()
                    local.copy_(head.flatten()[parameter.megatron_fsdp_slice].view(local.shape))
            buffer.copy_main_weights_to_model_weights()


class Truth(nn.Module):
    """A transformers model without its output layer, and a row of weights: float64."""

    def __init__(self, folder: Path, head: Tensor, adapter: Path | None = None):
        super().__init__()
        if adapter is None:
            self.body = reference.load_model(folder).model
        else:  # A and B are trained, and the row
            stored = load_file(adapter / "adapter_model.safetensors")
            masters = {name: nn.Parameter(tensor.double()) for name, tensor in stored.items()}
            self.body = lora_truth.adapted_model(folder, masters).model
            self.masters = nn.ParameterList(masters.values())
        self.head = nn.Parameter(head.double())

    def values(self, sample: dict[str, Any]) -> Tensor:
        """The value of each response token, from the position before it."""
        response, seen = sample["mask"].numel(), dict(reference._seen(sample, self.body))
        hidden = self.body(sample["tokens"][None], **seen).last_hidden_state[0, -response - 1 : -1]
        return hidden @ self.head[0]


def advantages_of(reward: float, values: list[float], mask: list[float], lambd: float) -> list[float]:
    """Generalised advantages by their definition: sums of discounted differences over the trained tokens."""
    trained = [position for position, weight in enumerate(mask) if weight]
    differences = []
    for order, position in enumerate(trained):
        last = order == len(trained) - 1
        following = 0.0 if last else values[trained[order + 1]]
        differences.append((reward if last else 0.0) + GAMMA * following - values[position])
    found = [0.0] * len(mask)
    for order, position in enumerate(trained):
        found[position] = sum((GAMMA * lambd) ** k * d for k, d in enumerate(differences[order:]))
    return found


@dataclasses.dataclass
class TrueResult:
    values: list[list[Tensor]]
    losses: list[float]
    norms: list[float]
    clipped: list[float]
    advantages: float  # mean over samples of the mean over trained tokens


def truth(
    folder: Path,
    head: Tensor,
    rollout: Any,
    *,
    normalized: bool = False,
    critic_lambd: float = LAMBD,
    alpha: float | None = None,
    make_optimizer: Any = None,
    adapter: Path | None = None,
) -> TrueResult:
    """The same training with transformers: the mean over samples of the means over trained tokens.

    `normalized`: on returns less the mean over all trained tokens, divided by the deviation. The returns are those of
    `critic_lambd`, the advantages those of LAMBD, or with VAPO's `alpha` of a lambda by the number of trained tokens.
    """
    model = Truth(folder, head, adapter)
    samples = reference._split(rollout)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    adam = (make_optimizer or reference._adam)(trained, SETTINGS)

    def values() -> list[Tensor]:
        with torch.no_grad():
            return [model.values(sample) for sample in samples]

    old = values()

    def of_lambda(lambdas: list[float]) -> list[Tensor]:
        rows = [(float(s["reward"]), v.tolist(), s["mask"].tolist()) for s, v in zip(samples, old, strict=True)]
        found = [advantages_of(*row, lambd) for row, lambd in zip(rows, lambdas, strict=True)]
        return [torch.tensor(one, dtype=torch.float64) for one in found]

    lengths = [max(float(sample["mask"].sum()), 1.0) for sample in samples]
    advantages = of_lambda([LAMBD if alpha is None else max(0.0, 1 - 1 / (alpha * length)) for length in lengths])
    result = TrueResult([old], [], [], [], 0.0)
    sums = [((a * s["mask"]).sum(), s["mask"].sum()) for a, s in zip(advantages, samples, strict=True)]
    means = [float(total / trained) for total, trained in sums if trained > 0]
    result.advantages = sum(means) / len(means)
    advantages = of_lambda([critic_lambd] * len(samples))
    targets = torch.cat([(a + v)[s["mask"] != 0] for a, v, s in zip(advantages, old, samples, strict=True)])
    mean, std = (float(targets.mean()), float(targets.std())) if normalized else (0.0, 1.0)
    size = len(samples) // SETTINGS.steps
    for step in range(SETTINGS.steps):
        adam.zero_grad()
        total = clipped = 0.0
        for row in range(step * size, (step + 1) * size):
            mask, returns = samples[row]["mask"], (advantages[row] + old[row] - mean) / std
            now = model.values(samples[row])
            held = torch.minimum(torch.maximum(now, old[row] - VALUE_CLIP), old[row] + VALUE_CLIP)
            loss = torch.maximum((now - returns) ** 2, (held - returns) ** 2)
            divisor = max(float(mask.sum()), 1.0) * size
            ((loss * mask).sum() / divisor).backward()
            total += float((loss * mask).sum() / divisor)
            clipped += float((((now - old[row]).abs() > VALUE_CLIP) * mask).sum() / divisor)
        result.losses.append(total)
        result.clipped.append(clipped)
        result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_grad)))
        adam.step()
    result.values.append([value * std + mean for value in values()])
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def truths(models: Any) -> dict[tuple[Any, ...], TrueResult]:
    return {}


@pytest.fixture(scope="module")
def head() -> Tensor:
    return 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(11))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any, four_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


def critic_alone(args: Any) -> Any:
    """The flags of training the critic of `truth`; the policy does not move."""
    return dataclasses.replace(
        args,
        advantage_estimator="ppo",
        gamma=GAMMA,
        lambd=LAMBD,
        value_clip=VALUE_CLIP,
        critic_lr=LR,
        critic_lr_warmup_iters=0,
        moe_router_bias_update_rate=0.0,
        lr=0.0,
    )


BY_LENGTH = {"length_adaptive_gae_alpha": 0.2, "lambd": 1.0, "critic_lambd": 0.95}
OF_LENGTHS = ("TP2 SP, packed", "CP2, packed", "DP2, overlapped, packed", "PP2 virtual, packed")
CHANGES = {
    "normalized, DP2": ("DP2, overlapped, packed", {"normalize_values": True}),
    "its own lambda, 1 rank": ("1 rank", {"critic_lambd": 1.0}),
    "its own lambda, CP2, normalized": ("CP2, packed", {"critic_lambd": 0.5, "normalize_values": True}),
    **{f"lambda by length, {name}": (name, BY_LENGTH) for name in OF_LENGTHS},
}


@pytest.mark.parametrize(
    ("name", "changes"), [*((name, {}) for name in LAYOUTS), *CHANGES.values()], ids=[*LAYOUTS, *CHANGES]
)
def test_critic_is_trained_as_by_plain_autograd(
    name: str, changes: dict[str, Any], models: Any, truths: Any, head: Tensor, pools: Any
):
    layout, kind = LAYOUTS[name]
    args = dataclasses.replace(critic_alone(models.args(layout, kind, SETTINGS)), **changes)
    found = pools[layout.ranks].run(train, args, models.rollout, head)
    folder = models.folder(kind, layout.layers, "reference")  # a fresh start's --ref-load, unless --load has weights
    folder = models.folder(kind, layout.layers, "policy") if args.load is not None else folder
    key = kind, layout.layers, *changes.items()
    if key not in truths:
        own = {"critic_lambd": changes.get("critic_lambd", LAMBD), "normalized": args.normalize_values}
        own |= {"alpha": args.length_adaptive_gae_alpha}
        truths[key] = truth(folder, head, models.rollout, **own)
    assert_as_truth(found, models.rollout, truths[key])
    assert max(truths[key].clipped) > 0.05  # so that the clip is tested


def assert_as_truth(found: list[Trained], rollout: Any, true: TrueResult) -> None:
    ids = rollout.sample_ids.tolist()
    for rank in found:
        for when in (0, 1):
            for sample, values in zip(rank.samples, rank.values[when], strict=True):
                wanted = true.values[when][ids.index(sample)]
                accuracy.near_values(values, wanted, rtol=2e-4, atol=2e-4 if when else 2e-5)
        accuracy.near("loss", [step["critic-value_loss"] for step in rank.metrics], true.losses, rel=1e-4)
        accuracy.near("loss", [step["critic-grad_norm"] for step in rank.metrics], true.norms, rel=1e-4)
        assert [step["critic-value_clipfrac"] for step in rank.metrics] == pytest.approx(true.clipped, abs=0.02)
        assert rank.report["rollout/advantages"] == pytest.approx(true.advantages, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, -2.0, 4.0], [1.0, -2.0, 4.0], 1.0),  # perfect
        ([7.0, 7.0, 7.0], [1.0, -2.0, 4.0], 0.0),  # a constant
        ([3.0, 0.0, 6.0], [1.0, -2.0, 4.0], 1.0),  # a constant error is not counted
        ([-1.0, 2.0, -4.0], [1.0, -2.0, 4.0], -3.0),  # opposite: the errors are twice the returns
        ([1.0, 2.0, 3.0], [5.0, 5.0, 5.0], 0.0),  # nothing to explain
    ],
)
def test_explained_variance(values: list[float], returns: list[float], expected: float):
    errors = [own - value for own, value in zip(returns, values, strict=True)]
    columns = {"returns": returns, "errors": errors}
    means = {name: sum(column) / 3 for name, column in columns.items()}
    means |= {f"{name}_squared": sum(one * one for one in column) / 3 for name, column in columns.items()}
    assert explained_variance(means) == pytest.approx(expected, abs=1e-12)


def saving(models: Any, folder: Path, **changes: Any) -> Any:
    args = models.args(Layout(1, {}), "dense", SETTINGS)
    more = {"save": str(folder), "critic_save": str(folder / "critic"), **changes}
    return dataclasses.replace(
        args, advantage_estimator="ppo", critic_lr=LR, critic_lr_warmup_iters=0, num_rollout=3, **more
    )


def save_without_its_critic(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> str:
    """Saves twice in the background; the critic's second save fails. Returns the error."""
    from slimrl.platform.collective_errors import CheckpointError

    trainer = ranks.start(rank, world_size, init_method, args)
    trainer.save(0, {"offset": 0})
    trainer.finish_saves()

    def fails() -> None:
        raise CheckpointError("the critic's disk is full")

    trainer._critic.saver.finish = fails
    trainer._critic.save = lambda *_: "a save that fails"
    trainer.save(1, {"offset": 1})
    try:
        trainer.finish_saves()
        error = ""
    except CheckpointError as caught:
        error = str(caught)
    del trainer._critic.saver.finish
    trainer.close()
    return error


def test_policy_is_not_saved_without_its_critic(models: Any, one_rank: Any, tmp_path: Path):
    (error,) = one_rank.run(save_without_its_critic, saving(models, tmp_path, async_save=True), models.rollout)
    assert "the critic's disk is full" in error and f"{tmp_path}/iter_0000000 is whole" in error
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert not (tmp_path / "iter_0000001").exists()


def save_once(rank: int, world_size: int, init_method: str, args: Any) -> None:
    trainer = ranks.start(rank, world_size, init_method, args)
    trainer.save(0, {"offset": 0})
    trainer.close()


def test_policy_does_not_resume_with_a_critic_of_another_save(models: Any, one_rank: Any, tmp_path: Path):
    for name in ("one", "other"):
        one_rank.run(save_once, saving(models, tmp_path / name))
    shutil.rmtree(tmp_path / "one/critic")  # the critic of the same save, which is looked for first
    mixed = saving(models, tmp_path / "one", load=str(tmp_path / "one"), critic_load=str(tmp_path / "other/critic"))
    with pytest.raises(RuntimeError, match="other/critic/iter_0000000 was not saved together with .*one/iter_0000000"):
        one_rank.run(save_once, mixed)


def head_of(rank: int, world_size: int, init_method: str, args: Any, head: Tensor | None) -> Tensor:
    """The critic's head at the start of a run; with `head` it is set and saved."""
    trainer = ranks.start(rank, world_size, init_method, args)
    if head is not None:
        set_head(trainer._critic, head)
        trainer.save(0, {"offset": 0})
    found = trainer._critic.model.stages[-1].value_head.weight.detach().clone()
    trainer.close()
    return found


def test_new_run_starts_from_a_critics_checkpoint_or_with_a_new_head(
    models: Any, one_rank: Any, tmp_path: Path, head: Tensor
):
    one_rank.run(head_of, saving(models, tmp_path), head)
    (from_critic,) = one_rank.run(head_of, saving(models, tmp_path / "x", critic_load=str(tmp_path / "critic")), None)
    assert torch.equal(from_critic, head)
    (from_policy,) = one_rank.run(head_of, saving(models, tmp_path / "x", critic_load=str(tmp_path)), None)
    assert from_policy.count_nonzero() == 0


def values_at_start(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> tuple[list[int], Any]:
    """The critic's values before training, by sample."""
    trainer = ranks.start(rank, world_size, init_method, args)
    batch = ranks.share_of(trainer, rollout)
    steps = [[trainer._parts.pack(batch, rows) for rows in step] for step in batch.micro_batches]
    values = trainer._critic.values(steps, batch, lambda: None).cpu().split(batch.response_lengths.tolist())
    trainer.close()
    return batch.sample_ids.tolist(), list(values)


def save_classifier(folder: Path, labels: int) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    config = tiny.config_of_qwen3(layers=2, tied=False)
    config.num_labels = labels
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize("layout", [TP2_SP, PP2], ids=["TP2 SP", "PP2"])
def test_critic_starts_from_a_reward_model(layout: dict[str, Any], models: Any, two_ranks: Any, tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    save_classifier(tmp_path / "reward", labels=1)
    args = dataclasses.replace(saving(models, tmp_path / "saved", critic_load=str(tmp_path / "reward")), **layout)
    ids, found = two_ranks.run(values_at_start, args, models.rollout)[0]
    true = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float64)
    model = Truth.__new__(Truth)
    nn.Module.__init__(model)
    model.body, model.head = true.model, true.score.weight
    samples = dict(zip(models.rollout.sample_ids.tolist(), reference._split(models.rollout), strict=True))
    for sample, values in zip(ids, found, strict=True):
        with torch.no_grad():
            wanted = model.values(samples[sample])
        torch.testing.assert_close(values.double(), wanted, rtol=2e-5, atol=2e-5)


def test_classifier_with_several_outputs_is_no_critic(models: Any, one_rank: Any, tmp_path: Path):
    save_classifier(tmp_path / "classes", labels=3)
    args = saving(models, tmp_path / "saved", critic_load=str(tmp_path / "classes"))
    with pytest.raises(
        RuntimeError, match=r"score.weight has shape \[3, 64\] and a value head \[1, 64\]: give a class"
    ):
        one_rank.run(values_at_start, args, models.rollout)
