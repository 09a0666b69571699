"""Invalid results of a custom loss, and metric names reserved by slimrl."""

from __future__ import annotations

import pytest
import torch

from slimrl.hooks import HookFailedError
from slimrl.megatron.model.micro_batch import pack_micro_batch
from slimrl.megatron.training.advantages import TrainingHooks, build_train_inputs
from slimrl.megatron.training.loss.loss_sums import _check_names
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, PolicyLossHooks
from slimrl.megatron.training.step_loss import CheckedCustomLoss
from tests.megatron import tiny


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("loss_without_metrics", "returned a value of type Tensor: return \\(loss, dict of metrics\\)"),
        ("loss_without_gradient", "returned a loss that is not a scalar tensor with a gradient"),
        ("metric_per_token", "returned a metric entropy of shape \\[5\\]: return numbers"),
    ],
)
def test_invalid_loss_result_is_rejected(function: str, sentence: str):
    args = tiny.tiny_args(
        loss_type="custom_loss", custom_loss_function_path=f"tests.megatron.custom_functions.{function}"
    )
    rollout, device = tiny.recorded_rollout(seed=5), torch.device("cpu")
    columns, data = build_train_inputs(
        args, TrainingHooks(args, [], None, None, args), 0, rollout, None, None, None, None, device
    )
    micro_batch = pack_micro_batch(rollout, [1], length_multiple=1, device=device)
    logits = torch.zeros(*micro_batch.tokens.shape, 128, requires_grad=True)
    with pytest.raises(
        HookFailedError, match=f"--custom-loss-function-path tests.megatron.custom_functions.{function} {sentence}"
    ):
        CheckedCustomLoss(args, None, args).sums(logits, micro_batch, columns, data)


LOGGED = ("loss", "train_rollout_logprob_abs_diff_mean", "train_rollout_logprob_abs_diff_max")


@pytest.mark.parametrize(
    "name", [*LOGGED, "tokens", "grad_norm", "lr", "lr-pg_0", "global_batch_size", "memory_gradients"]
)
def test_metric_name_used_by_slimrl_is_rejected(name: str):
    settings = PolicyLossConfig.from_args(tiny.tiny_args(loss_type="custom_loss"))
    _check_names(["entropy", "pg_loss", "ratio_max_abs_diff"], LOGGED, settings)  # not logged with a custom loss
    with pytest.raises(
        HookFailedError, match=f"--custom-loss-function-path returned a metric {name}, which slimrl logs"
    ):
        _check_names(["entropy", name], LOGGED, settings)


def test_metric_name_in_another_section_is_rejected():
    parts = PolicyLossHooks(correction=print, correction_name="--custom-tis-function-path mine.tis")
    settings = PolicyLossConfig(0.2, 0.2, None, 0.0, 0.0, "k3", False, loss_hooks=parts)
    with pytest.raises(HookFailedError, match="tis-function-path mine.tis returned a metric rollout/kept, which names"):
        _check_names(["rollout/kept"], LOGGED, settings)
