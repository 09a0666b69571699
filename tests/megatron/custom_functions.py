"""Custom functions that the tests of this folder pass to training ranks; each records its calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.losses import kl_estimate


def note(args: Any, *what: Any) -> None:
    with open(Path(args.custom["notes"]) / f"{dist.get_rank()}.jsonl", "a") as file:
        file.write(json.dumps(what) + "\n")


def noted(folder: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]


def init(args: Any) -> None:
    note(args, "init", dist.get_world_size())


def before_log_prob(args: Any, model: list[Any], store_prefix: str) -> None:
    norm = next(weight for name, weight in model[0].named_parameters() if name.endswith("layernorm.weight"))
    note(args, "log_prob", store_prefix, float(norm.detach().double().sum()))


def before_step(args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any) -> None:
    gradients = [weight.main_grad for stage in model for weight in stage.parameters()]
    assert not any(bool(gradient.any()) for gradient in gradients)
    note(args, "step", rollout_id, step_id, optimizer.param_groups[0]["lr"])


def postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    note(args, "data", rollout_id, sorted(rollout_data), rollout_data["sample_indices"])
    rollout_data["mine"] = [float(index) for index in rollout_data["sample_indices"]]


def mask_first_tokens(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    for mask, engine in zip(rollout_data["loss_masks"], rollout_data["rollout_log_probs"], strict=True):
        mask[:2] = 0
        engine[:2] = 0  # unused: these tokens are masked


def drop_a_token(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"][1] = rollout_data["advantages"][1][1:]


def swap_tokens(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["tokens"][0] = rollout_data["tokens"][0].flip(0) + 1


def swap_tokens_in_place(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["tokens"][0] += 1


def shorten(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["response_lengths"][0] -= 1


def loss(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> tuple[Tensor, dict[str, Any]]:
    """The built-in policy loss with KL and entropy, reimplemented."""
    log_probs, entropy = batch.scores(logits)
    ratio = (log_probs - torch.cat(batch["log_probs"])).exp()
    advantages = torch.cat(batch["advantages"])
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    kl = kl_estimate(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type)
    values = -torch.minimum(ratio * advantages, clipped * advantages)
    values = values + args.kl_loss_coef * kl - args.entropy_coef * entropy
    rows = batch.rows(logits)
    index = torch.tensor(batch.get("mine", [0.0] * len(batch["response_lengths"])), device=logits.device)
    per_token = index.repeat_interleave(torch.tensor(batch["response_lengths"], device=logits.device))
    note(args, "batch", sorted(batch), list(logits.shape), list(rows.shape), float(batch["full_loss_masks"].sum()))
    return sum_of_sample_mean(values), {
        "entropy": sum_of_sample_mean(entropy),
        "place": sum_of_sample_mean(per_token),
        "largest_logit": float(batch.whole(rows.detach().float().amax(-1)).max()),
    }


def loss_without_metrics(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> Tensor:
    return logits.sum()


def loss_without_gradient(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> tuple[Tensor, Any]:
    return logits.detach().sum(), {}


def metric_per_token(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> tuple[Tensor, Any]:
    return logits.sum(), {"entropy": batch.rows(logits)[:, 0]}


def without_first_tokens(
    args: Any,
    *,
    pg_loss: Tensor,
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """A correction that masks the first two tokens of every sample."""
    masks = [torch.cat([torch.zeros_like(mask[:2]), mask[2:]]) for mask in loss_masks]
    totals = torch.tensor(total_lengths).repeat_interleave(torch.tensor(response_lengths))
    return pg_loss, masks, {"total_length": totals.to(pg_loss)}


def hides_the_loss(args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> Any:
    return pg_loss, loss_masks, {"pg_loss": torch.zeros_like(pg_loss)}


def mean_per_sample(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Any:
    """The built-in mean, reimplemented."""

    def reduce(values: Tensor) -> Tensor:
        parts = zip(values.split(response_lengths), loss_masks, strict=True)
        return sum((part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts)

    return reduce


def fails(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> Any:
    raise KeyError("no such key")


def half_frozen(pre_process: bool, post_process: bool, *, args: Any, config: Any) -> Any:
    from slimrl.megatron.model.model_builder import policy_model

    model = policy_model(args, config, pre_process, post_process)
    if pre_process:
        model.embedding.word_embeddings.weight.requires_grad = False
    return model


def train_frozen(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> tuple[Any, Any]:
    """Metrics and weights; frozen weights have no gradient to export."""
    from tests.megatron import ranks

    trainer = ranks.start(rank, world_size, init_method, args)
    metrics, weights = trainer.train(0, ranks.share_of(trainer, rollout)), ranks.export(trainer)
    trainer.close()
    return metrics, weights
