"""LoRA adapters train, in every layout, as plain float64 autograd trains A and B of W + alpha / rank * B A."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import accuracy
from tests.megatron import layouts, lora_truth, ranks, test_critic
from tests.megatron.layouts import (
    CP2,
    DYNAMIC,
    EP2,
    ETP2,
    FULL,
    OVERLAP,
    PP2,
    SETTINGS,
    SPREAD,
    TP2,
    TP2_SP,
    VIRTUAL,
    Layout,
    selective,
)

LAYOUTS: dict[str, tuple[Layout, str]] = {
    "1 rank": (Layout(1, {}), "dense"),
    "1 rank, recompute full": (Layout(1, FULL), "dense"),
    "1 rank, recompute layernorm, mlp": (Layout(1, selective("core_attn", "layernorm", "mlp")), "dense"),
    "1 rank, experts": (Layout(1, {}), "MoE"),
    "TP2": (Layout(2, TP2), "dense"),
    "TP2 SP": (Layout(2, TP2_SP), "dense"),
    "TP2 SP, experts": (Layout(2, TP2_SP), "MoE"),
    "TP2 SP, packed, recompute full": (Layout(2, TP2_SP | DYNAMIC | FULL), "dense"),
    "PP2": (Layout(2, PP2), "dense"),
    "CP2": (Layout(2, CP2), "dense"),
    "DP2": (Layout(2, {}), "dense"),
    "DP2, distributed optimizer, overlapped": (Layout(2, OVERLAP), "dense"),
    "EP2": (Layout(2, EP2), "MoE"),
    "EP2, distributed optimizer": (Layout(2, EP2 | SPREAD), "MoE"),
    "ETP2 TP2 SP": (Layout(2, ETP2), "MoE"),
    "ETP2 TP2 SP, distributed optimizer": (Layout(2, ETP2 | SPREAD), "MoE"),
    "PP2 virtual, DP2, overlapped": (Layout(4, VIRTUAL | OVERLAP, 4), "dense"),
    "TP2 SP PP2": (Layout(4, TP2_SP | PP2), "dense"),
    "1 rank, latent attention, recompute mla_up_proj": (Layout(1, selective("mla_up_proj")), "MLA"),
    "TP2 SP, latent attention": (Layout(2, TP2_SP), "MLA"),
    "PP2, latent attention": (Layout(2, PP2), "MLA"),
    "CP2, latent attention, packed": (Layout(2, CP2 | DYNAMIC), "MLA"),
    "DP2, latent attention, distributed optimizer, overlapped": (Layout(2, OVERLAP), "MLA"),
    "EP2 TP2 SP, latent attention": (Layout(2, EP2 | TP2_SP), "MLA"),
}


@dataclasses.dataclass
class Trained:
    """Rank 0's result: metrics by step, adapters and gradients by PEFT name, merged weights by Hugging Face name."""

    metrics: list[dict[str, float]]
    adapters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    merged: dict[str, Tensor]
    base: dict[str, Tensor]
    trained: int  # elements with a gradient on this rank
    optimized: int  # elements in the state of this rank's optimizer


def exported(trainer: Any, adapters: bool, **more: Any) -> dict[str, Tensor]:
    from slimrl.models.adapters import AdapterConfig, AdapterMapping
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.update.export import iter_hf_tensors

    args, parallel = trainer.hook_args, trainer.parallel
    family = ranks.family_of(args)
    config = AdapterConfig.from_args(args)
    assert config is not None
    if adapters:
        family = AdapterMapping.of(family, config)
    groups = {"pp_group": parallel.pp_group, "ep_group": parallel.ep_group, "etp_group": parallel.etp_group}
    pieces = iter_hf_tensors(trainer.stages, ModelSpec.from_args(args), family, parallel.tp_group, **groups, **more)
    return {name: tensor.detach().cpu().clone() for name, tensor in pieces}


def train_adapters(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> Any:
    trainer = ranks.start(rank, world_size, init_method, args)
    metrics = trainer.train(0, ranks.share_of(trainer, rollout))
    adapters, merged = exported(trainer, True), exported(trainer, False)
    base = exported(trainer, False, merge_adapters=False)
    trained: list[Any] = [p for stage in trainer.stages for p in stage.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.main_grad.clone()
    gradients = exported(trainer, True)
    optimized = sum(
        tensor.numel()
        for part in trainer.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for name, tensor in state.items()
        if name == "exp_avg"
    )
    result = Trained(metrics, adapters, gradients, merged, base, sum(p.numel() for p in trained), optimized)
    trainer.close()
    return result if rank == 0 else metrics


class Adapted(layouts.Models):
    """The models of the layouts, an adapter for each, and what float64 makes of it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._found: dict[Any, lora_truth.Truth] = {}

    def adapter(self, kind: str, layers: int) -> Path:
        """A PEFT folder."""
        folder = self._folder / f"{kind}-{layers}-adapter"
        base = self.folder(kind, layers, "reference")
        targets = lora_truth.LATENT if kind == "MLA" else lora_truth.ALL
        return folder if folder.exists() else lora_truth.save_adapter(base, folder, targets=targets)

    def of_adapters(self, kind: str, layers: int) -> lora_truth.Truth:
        """The truth, computed once."""
        key = (kind, layers)
        if key not in self._found:
            base, adapter = self.folder(kind, layers, "reference"), self.adapter(kind, layers)
            self._found[key] = lora_truth.train(base, adapter, self.rollout, SETTINGS)
        return self._found[key]

    def flags(self, layout: Layout, kind: str, **changes: Any) -> Any:
        """The flags of a run that trains adapters."""
        own = dict(
            load=None,
            hf_checkpoint=str(self.folder(kind, layout.layers, "reference")),
            lora_rank=lora_truth.RANK,
            lora_alpha=lora_truth.ALPHA,
            lora_load=str(self.adapter(kind, layout.layers)),
            moe_router_bias_update_rate=0.0,  # the bias is the base's
        )
        return dataclasses.replace(self.args(layout, kind), **(own | changes))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any, four_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_like_plain_autograd_in_every_layout(name: str, adapted: Adapted, pools: Any):
    layout, kind = LAYOUTS[name]
    args = adapted.flags(layout, kind)
    result, *others = pools[layout.ranks].run(train_adapters, args, adapted.rollout)
    truth = adapted.of_adapters(kind, layout.layers)
    assert all(other == result.metrics for other in others)
    accuracy.near("loss", [step["loss"] for step in result.metrics], truth.losses, rel=2e-5, abs=1e-6)
    accuracy.near("loss", [step["grad_norm"] for step in result.metrics], truth.gradient_norms, rel=2e-5)
    accuracy.below("weights", layouts.relative_error(result.adapters, truth.adapters), 1e-5)
    if not args.use_distributed_optimizer:
        accuracy.below("gradients", layouts.relative_error(result.gradients, truth.gradients), 5e-5)
    base = lora_truth.published_weights(adapted.folder(kind, layout.layers, "reference"))
    assert all(torch.equal(result.base[name], base[name]) for name in result.base)  # the base is frozen
    changes = lora_truth.changes(truth.adapters)
    merged = {name: value.double() + changes.get(name, 0) for name, value in base.items()}
    assert layouts.relative_error(result.merged, {name: merged[name] for name in result.merged}) < 1e-5
    if not args.use_distributed_optimizer:
        assert result.optimized == result.trained
    if layout.ranks == 1:
        assert result.trained == sum(value.numel() for value in truth.adapters.values())


def test_critic_beside_adapters_is_trained_whole(adapted: Adapted, two_ranks: Any):
    """From the base, as transformers' whole model with a row of weights; the policy has adapters alone."""
    head = 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(11))
    layout = Layout(2, TP2_SP)
    args = test_critic.critic_alone(adapted.flags(layout, "dense", lora_load=None))
    found = two_ranks.run(test_critic.train, args, adapted.rollout, head)
    base = adapted.folder("dense", layout.layers, "reference")
    test_critic.assert_as_truth(found, adapted.rollout, test_critic.truth(base, head, adapted.rollout))


CRITICS = {
    "TP2 SP": (Layout(2, TP2_SP), "dense"),
    "ETP2 TP2 SP, packed, distributed optimizer": (Layout(2, ETP2 | DYNAMIC | SPREAD), "MoE"),
    "PP2, packed": (Layout(2, PP2 | DYNAMIC), "dense"),
}
ADAPTED_CRITIC = {"critic_lora_rank": lora_truth.RANK, "critic_lora_alpha": lora_truth.ALPHA}


@pytest.mark.slow
@pytest.mark.parametrize("name", CRITICS)
def test_critic_of_adapters_is_trained_as_by_plain_autograd(name: str, adapted: Adapted, two_ranks: Any):
    """A, B and the head, as transformers' model with a row of weights; every weight of the policy is trained."""
    head = 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(11))
    layout, kind = CRITICS[name]
    whole = adapted.flags(layout, kind, lora_rank=None, lora_load=None, **ADAPTED_CRITIC)
    adapter, base = adapted.adapter(kind, layout.layers), adapted.folder(kind, layout.layers, "reference")
    found = two_ranks.run(test_critic.train, test_critic.critic_alone(whole), adapted.rollout, head, adapter)
    true = test_critic.truth(base, head, adapted.rollout, adapter=adapter)
    test_critic.assert_as_truth(found, adapted.rollout, true)


def critic_of_a_run(rank: int, world_size: int, init_method: str, args: Any, rollout: Any, train: bool) -> Any:
    """Values of a rollout, after training on it and saving with `train`; and the names in the critic's checkpoint."""
    from slimrl.megatron.checkpoint import io

    trainer = ranks.start(rank, world_size, init_method, args)
    batch = ranks.share_of(trainer, rollout)
    if train:
        trainer.train(0, batch)
        trainer.save(0, {"offset": 0})
        trainer.finish_saves()
    steps = [[trainer._parts.pack(batch, rows) for rows in step] for step in batch.micro_batches]
    values = trainer._critic.values(steps, batch, lambda: None).cpu()
    names = io.stored_names(Path(args.save) / "critic" / "iter_0000000")
    steps_taken = trainer._critic.model.scheduler.num_steps
    trainer.close()
    return values, sorted(names), steps_taken


@pytest.mark.slow
def test_critic_of_adapters_resumes_from_adapters_and_head(adapted: Adapted, one_rank: Any, tmp_path: Path):
    own = {"save": str(tmp_path), "advantage_estimator": "ppo", "critic_lr": 1e-2, "critic_lr_warmup_iters": 0}
    args = adapted.flags(Layout(1, {}), "dense", lora_load=None, num_rollout=3, **own, **ADAPTED_CRITIC)
    ((values, names, taken),) = one_rank.run(critic_of_a_run, args, adapted.rollout, True)
    again = dataclasses.replace(args, load=str(tmp_path))
    ((resumed, _, steps),) = one_rank.run(critic_of_a_run, again, adapted.rollout, False)
    assert torch.equal(values, resumed) and bool(values.any()) and taken == steps > 0
    weights = [name for name in names if not name.startswith(("optimizer", "rng_state"))]
    assert all(".adapters." in name or name == "value_head.weight" for name in weights) and len(weights) > 7
