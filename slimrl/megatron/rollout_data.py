"""A rank's share of a rollout as the dict that users' functions see (`slimrl.hooks.of_training`), and back as columns.

Promises that the built-in training reads what such a function left, and refuses what does not fit the samples. Called
by the trainer between the log-probability passes and the first optimizer step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.kl import kl_estimate
from slimrl.arguments import Arguments
from slimrl.data.batch import RolloutBatch
from slimrl.hooks import HookFailedError
from slimrl.megatron.advantages import token_advantages, whitened
from slimrl.megatron.forward import ResponseColumns
from slimrl.megatron.training_hooks import ADVANTAGE, POSTPROCESS, TrainingHooks

RolloutData = dict[str, Any]


def judged(
    args: Arguments,
    hooks: TrainingHooks,
    rollout_id: int,
    batch: RolloutBatch,
    log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[ResponseColumns, RolloutData | None]:
    """What the loss needs beside the model, and the dict that a custom loss sees of it (None where nobody asks).

    `log_probs` [response tokens of the rank] are None for a loss without advantages; `group` are the data-parallel
    ranks. Raises HookFailedError where a user's function raises or leaves what does not fit.
    """
    columns = {"loss_masks": batch.loss_mask.to(device, copy=True)}
    if log_probs is not None:
        columns |= {"log_probs": log_probs, "rollout_log_probs": batch.rollout_log_probs.to(device, copy=True)}
    if ref_log_probs is not None:
        columns["ref_log_probs"] = ref_log_probs
    data = _as_dict(batch, columns, device) if hooks.see_rollout_data else None
    if log_probs is not None:
        if data is not None:
            data["kl"] = _split(_kl(args, log_probs, ref_log_probs), batch)
        columns["advantages"] = _advantages(args, hooks, batch, columns, data, group)
    if hooks.postprocess is not None:
        hooks.postprocess(args, rollout_id, data)
        _check_unchanged(data, batch, f"{POSTPROCESS} {args.rollout_data_postprocess_path}")
    if hooks.advantages is not None or hooks.postprocess is not None:
        flag = POSTPROCESS if hooks.postprocess is not None else ADVANTAGE
        columns = {name: _joined(data, name, batch, flag, device) for name in columns}
    return _as_columns(args, columns), data


def _advantages(
    args: Arguments,
    hooks: TrainingHooks,
    batch: RolloutBatch,
    columns: dict[str, Tensor],
    data: RolloutData | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """By the user's function or the estimator; also put into `data`."""
    if hooks.advantages is None:
        values = token_advantages(args, batch, columns["log_probs"], columns.get("ref_log_probs"), group)
    else:
        hooks.advantages(args, data)
        where = f"{ADVANTAGE} {args.custom_advantage_function_path}"
        _check_unchanged(data, batch, where)
        values = _joined(data, "advantages", batch, where, columns["log_probs"].device)
        data.setdefault("returns", data["advantages"])
        if args.normalize_advantages:
            values = whitened(values, columns["loss_masks"], group)
    if data is not None:
        data["advantages"] = _split(values, batch)
        data.setdefault("returns", data["advantages"])
    return values


def _as_dict(batch: RolloutBatch, columns: dict[str, Tensor], device: torch.device) -> RolloutData:
    """The entries are parts of the columns themselves: what is changed in place is changed there, never in `batch`."""
    return {
        "tokens": list(batch.tokens.to(device, copy=True).split(batch.total_lengths.tolist())),
        "total_lengths": batch.total_lengths.tolist(),
        "response_lengths": batch.response_lengths.tolist(),
        "rewards": batch.rewards.tolist(),
        "raw_reward": batch.raw_rewards.tolist(),
        "truncated": batch.truncated.tolist(),
        "sample_indices": batch.sample_ids.tolist(),
        "rollout_ids": batch.group_ids.tolist(),
        "rollout_log_probs": _split(batch.rollout_log_probs.to(device, copy=True), batch),
        **{name: _split(values, batch) for name, values in columns.items()},
    }


def _split(values: Tensor, batch: RolloutBatch) -> list[Tensor]:
    return list(values.split(batch.response_lengths.tolist()))


def _joined(data: RolloutData, name: str, batch: RolloutBatch, where: str, device: torch.device) -> Tensor:
    """One column again. Raises HookFailedError where an entry is missing or has another length."""
    lengths = batch.response_lengths.tolist()
    if name not in data:
        raise HookFailedError(f'{where} left no rollout_data["{name}"]: set it to a list of one tensor per sample')
    found = [list(entry.shape) if isinstance(entry, Tensor) else type(entry).__name__ for entry in data[name]]
    if found != [[length] for length in lengths]:
        wrong = next((row for row, (shape, n) in enumerate(zip(found, lengths, strict=False)) if shape != [n]), None)
        what = (
            f"has {len(found)} entries for {len(lengths)} samples"
            if wrong is None
            else f"has {found[wrong]} at sample {data['sample_indices'][wrong]}, whose response has {lengths[wrong]}"
        )
        raise HookFailedError(f'{where}: rollout_data["{name}"] {what}: give a tensor [response length] per sample')
    if not lengths:
        return torch.zeros(0, device=device)
    return torch.cat([entry.detach() for entry in data[name]]).to(device, torch.float32)


def _check_unchanged(data: RolloutData, batch: RolloutBatch, where: str) -> None:
    """Micro-batches are packed by now: other tokens would not be trained on."""
    same = (
        data.get("total_lengths") == batch.total_lengths.tolist()
        and data.get("response_lengths") == batch.response_lengths.tolist()
        and torch.equal(torch.cat([*data.get("tokens", []), batch.tokens.new_zeros(0)]).cpu(), batch.tokens)
    )
    if not same:
        raise HookFailedError(
            f"{where} changed tokens or lengths, which are packed already: take tokens out by loss_masks, or make other"
            " samples with --custom-convert-samples-to-train-data-path"
        )


def _kl(args: Arguments, log_probs: Tensor, ref_log_probs: Tensor | None) -> Tensor:
    if args.kl_coef == 0.0 or ref_log_probs is None:
        return torch.zeros_like(log_probs)
    return kl_estimate(log_probs, ref_log_probs, args.kl_loss_type)


def _as_columns(args: Arguments, columns: dict[str, Tensor]) -> ResponseColumns:
    if "log_probs" not in columns:
        return ResponseColumns.without_policy(columns["loss_masks"])
    return ResponseColumns(
        old_log_probs=columns["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"],
        train_log_probs=columns["log_probs"],
        rollout_log_probs=columns["rollout_log_probs"],
        ref_log_probs=columns.get("ref_log_probs"),
        advantages=columns["advantages"],
        loss_mask=columns["loss_masks"],
    )
