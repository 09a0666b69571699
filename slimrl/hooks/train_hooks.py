"""Contracts of the training hooks, which every training rank calls.

A rank's part of a rollout is one dict, `rollout_data`, of lists with one entry per sample. Tensors are on the rank's
device. Response tensors have [response length] entries, also with context parallelism, and are equal on all ranks of a
data-parallel rank's model-parallel group:

| key | entry of a sample |
| --- | --- |
| `tokens` | int64 [total length]: prompt and response |
| `total_lengths`, `response_lengths` | int |
| `loss_masks` | float32 [response]: 1 where the token is trained on |
| `rewards`, `raw_reward` | float: the reward trained on, and the reward as scored |
| `truncated`, `sample_indices`, `rollout_ids` | bool; int; int, the same for all samples of a prompt |
| `token_rewards` | float32 [response]: rewards of tokens, if the samples have them |
| `rollout_log_probs`, `log_probs` | float32 [response]: the engines', and training's before the first step |
| `ref_log_probs` | float32 [response]: the reference model's, with --use-kl-loss or --kl-coef |
| `teacher_log_probs` | float32 [response]: the teacher's, with --use-opd |
| `kl` | float32 [response]: the KL estimate of --kl-coef, else 0 |
| `values` | float32 [response]: the critic's, before the first step; absent without a critic |
| `advantages`, `returns` | float32 [response]; equal without a critic, unless a custom function sets them |

The last four lines, and `log_probs`, are absent with --disable-compute-advantages-and-returns. A hook may add lists
with an entry per sample; they are passed on, up to the `batch` of a custom loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slimrl.hooks.base import Hook, RunArguments

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class LossBatch(Protocol):
    """One micro-batch: the `rollout_data` of its samples as a dict, with helpers that read the logits.

    It also has `unconcat_tokens` (list: each sample's tokens), `tokens` (int64 [1, tokens of this rank]: the packed
    input of the model, one row of `logits` each), `full_loss_masks` (float32 of that shape: the mask of the token that
    the row predicts) and `packed_seq_params` (the positions of the sequences in the pack).
    """

    def __getitem__(self, key: str) -> Any: ...

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the micro-batch's response tokens, samples end to end, float32 [tokens] each.

        From `logits` / --rollout-temperature. Both are differentiable, and equal on all tensor- and context-parallel
        ranks of the micro-batch.
        """
        ...

    def rows(self, logits: Tensor) -> Tensor:
        """The rows of `logits` that predict this rank's response tokens, [local tokens, local vocabulary]."""
        ...

    def whole(self, values: Tensor) -> Tensor:
        """[tokens] from [local tokens]: gathers all context-parallel ranks, in the order of the response tokens."""
        ...


class CustomLoss(Hook, Protocol):
    """`--custom-loss-function-path`: the loss of --loss-type custom_loss for one micro-batch.

    `logits` [1, tokens of this rank, padded vocabulary / tensor parallel] have the model's dtype and are not divided by
    the temperature; `batch.scores(logits)` computes log-probabilities from them in every parallel layout. Called on the
    last pipeline stage, on every tensor- and context-parallel rank, each of which must return the same loss.
    """

    def __call__(
        self, args: RunArguments, batch: LossBatch, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss, a scalar that depends on `logits`, and scalars to log: all of them sums.

        `sum_of_sample_mean(values)`, of [tokens] values, is the sum over samples of the mean over their trained tokens,
        with --calculate-per-token-loss the sum over trained tokens. Sums are added up over micro-batches and ranks and
        divided by the step's samples (trained tokens).
        """
        ...


class CustomAdvantage(Hook, Protocol):
    """`--custom-advantage-function-path`: sets `rollout_data["advantages"]`, and `["returns"]` if they differ.

    Called on every rank with its own samples; samples of one prompt may be on several ranks. --normalize-advantages and
    the penalty of --use-opd are applied to the result, --kl-coef is not: use `kl`.
    """

    def __call__(self, args: RunArguments, rollout_data: dict[str, Any]) -> None:
        """A list of float tensors [response length], one per sample."""
        ...


class CustomTIS(Hook, Protocol):
    """`--custom-tis-function-path`: corrects the policy loss for the sampling policy, in place of built-in --use-tis.

    Called once per micro-batch. `pg_loss` is [tokens], samples end to end; the others are lists with one entry per
    sample: tensors [response length], and ints. The values of masked tokens are 0.
    """

    def __call__(
        self,
        args: RunArguments,
        *,
        pg_loss: Tensor,
        train_log_probs: list[Tensor],
        rollout_log_probs: list[Tensor],
        loss_masks: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """The corrected loss, loss masks to take means with (also of KL and entropy), and [tokens] values to log."""
        ...


class PgLossReducer(Hook, Protocol):
    """`--custom-pg-loss-reducer-function-path`: reduces the policy loss of one micro-batch to a scalar.

    KL and entropy keep their own mean.
    """

    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[Tensor],
        calculate_per_token_loss: bool,
    ) -> Callable[[Tensor], Tensor]:
        """A function from [tokens], samples end to end, to a sum, which is divided by the step's samples (tokens)."""
        ...


class RolloutDataPostprocess(Hook, Protocol):
    """`--rollout-data-postprocess-path`: may change a rank's `rollout_data` before its optimizer steps.

    Training reads loss_masks, advantages, log_probs, rollout_log_probs and ref_log_probs afterwards; a custom loss
    receives everything. Tokens and lengths must not change.
    """

    def __call__(self, args: RunArguments, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        """Called once per rollout and rank."""
        ...


class ModelProvider(Hook, Protocol):
    """`--custom-model-provider-path`: builds this rank's part of the model, or one of its virtual pipeline stages.

    It must return a `GPTModel` whose weights have the names of the family's table (docs/families.md). `config` is the
    TransformerConfig of the flags; `slimrl.megatron.model.policy_model` builds slimrl's own model.
    """

    offered: ClassVar[tuple[str, ...]] = ("vp_stage", "args", "config")

    def __call__(self, pre_process: bool, post_process: bool) -> Any:
        """The model; `pre_process`, `post_process`: whether it has the embedding and the output layer."""
        ...


class LayerSpec(Hook, Protocol):
    """`--spec`: the modules of the transformer layers; the flag takes module and function as two words.

    Weights must have the names of the family's table. `slimrl.megatron.model.own_layers` returns slimrl's layers.
    """

    def __call__(self, args: RunArguments, config: Any, vp_stage: int | None) -> Any:
        """A ModuleSpec of a layer, TransformerBlockSubmodules, or a model provider (`ModelProvider`)."""
        ...


class MegatronInit(Hook, Protocol):
    """`--custom-megatron-init-path`: runs on every rank after the process groups are created, before the model."""

    def __call__(self, args: RunArguments) -> None: ...


class BeforeLogProb(Hook, Protocol):
    """`--custom-megatron-before-log-prob-hook-path`: runs on every rank before each log-probability pass.

    `model` is the list of this rank's wrapped model chunks, `store_prefix` is "ref_" for the reference model's weights,
    "teacher_" for the teacher's and "" for the policy's.
    """

    def __call__(self, args: RunArguments, model: list[Any], store_prefix: str) -> None: ...


class BeforeTrainStep(Hook, Protocol):
    """`--custom-megatron-before-train-step-hook-path`: runs on every rank before each optimizer step's passes.

    Gradients are zero then; `optimizer` and `scheduler` are megatron-core's.
    """

    def __call__(
        self, args: RunArguments, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any
    ) -> None: ...


class UpdateWeightPostWrite(Hook, Protocol):
    """`--custom-update-weight-post-write-path`: runs on every rank after the files of a weight update are written.

    `version_dir` is a Hugging Face folder, which is removed after every engine has loaded it; `rollout_engines` are
    `slimrl.weights.update.topology.EngineEndpoint`s with the engines' addresses in `url`.
    """

    def __call__(self, args: RunArguments, version_dir: Path, rollout_engines: list[Any]) -> None: ...
