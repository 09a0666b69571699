"""A correction for the mismatch between engine and trainer, written for slime, with settings from its YAML."""

import torch
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp


def bounded_weights(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
):
    shapes = list(zip(total_lengths, response_lengths, strict=True))
    train = [all_gather_with_cp(part, *shape) for part, shape in zip(train_log_probs, shapes, strict=True)]
    rollout = [all_gather_with_cp(part, *shape) for part, shape in zip(rollout_log_probs, shapes, strict=True)]
    weights, masks = [], []
    for one, other, mask in zip(train, rollout, loss_masks, strict=True):
        ratio = torch.exp((one - other).clamp(-20, 20))
        keep = (ratio >= args.bound_low) & (ratio <= args.bound_high)
        weights.append((ratio * mask).detach())
        masks.append((mask * keep.float()).detach())
    weights = torch.cat([slice_log_prob_with_cp(w, *shape) for w, shape in zip(weights, shapes, strict=True)])
    masks = [slice_log_prob_with_cp(mask, *shape) for mask, shape in zip(masks, shapes, strict=True)]
    return pg_loss * weights, masks, {"mis_ratio": weights}
