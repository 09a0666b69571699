"""Contracts of the hooks: those of generation, which the rollout manager calls, and those of training, on every rank.

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

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from slimrl.data.sample import Sample


class RunArguments(Protocol):
    """The flags of the run as attributes, `args.num_rollout`. Hooks receive a `slimrl.arguments.Arguments`."""

    def __getattr__(self, name: str) -> Any: ...


class Hook(Protocol):
    """Base of all contracts.

    `offered` are keyword arguments passed to functions that accept them. `either` allows async and ordinary functions.
    """

    offered: ClassVar[tuple[str, ...]] = ()
    either: ClassVar[bool] = False


class DataSource(Protocol):
    """The prompts of a rollout function; the built-in one is in `slimrl.rollout.dataset.data_source`."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups, each of `--n-samples-per-prompt` samples of one prompt."""
        ...

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Returns groups to the source, which samples them again later."""
        ...


class CustomDataSource(DataSource, Protocol):
    """`--data-source-path`: a data source class. `__init__` also receives `tokenizer` if it accepts it.

    Checkpoints keep its position by one of two pairs: `state_dict()` and `load_state_dict(state)`, of plain data, or
    `save(rollout_id)` and `load(rollout_id)`, which keep their own files under `--save`. The first is called once,
    right after the prompts of a rollout with a checkpoint were sampled, the second when a run resumes from that
    checkpoint. If the class has `begin_rollout(rollout_id)`, it is called before prompts of a rollout are sampled.
    """

    def __init__(self, args: RunArguments) -> None: ...

    def __len__(self) -> int:
        """Number of prompts in one epoch, for `--num-epoch`."""
        ...


class CustomReward(Hook, Protocol):
    """`--custom-rm-path`: scores one response."""

    async def __call__(self, args: RunArguments, sample: Sample) -> float | dict[str, Any]:
        """The reward; if it is a dict, `--reward-key` names the entry to train on."""
        ...


class GroupReward(Hook, Protocol):
    """`--custom-rm-path` with `--group-rm`: scores all responses to one prompt; in evaluations one at a time."""

    async def __call__(self, args: RunArguments, samples: list[Sample]) -> list[float] | list[dict[str, Any]]:
        """One reward per sample, in the samples' order."""
        ...


class CustomGenerate(Hook, Protocol):
    """`--custom-generate-function-path`: generates one sample.

    `evaluation` is True for samples of an evaluation, `engine` is the client of the engines
    (`slimrl.engines.protocol.EngineClient`) and `tokenizer` the run's tokenizer. With a vision-language model
    its requests have the sample's images, and `image_processor` is that of multi_turn_generate; else it is None. The
    engine's finish reason "abort" means that the rollout is full: return the sample with status ABORTED. With
    `--partial-rollout` the function is called with it again, to continue it.
    """

    offered: ClassVar[tuple[str, ...]] = ("evaluation", "engine", "tokenizer", "image_processor")

    async def __call__(
        self, args: RunArguments, sample: Sample, sampling_params: dict[str, Any]
    ) -> Sample | list[Sample]:
        """The sample with its tokens, response, log-probabilities and status filled in."""
        ...


class SampleHook(Hook, Protocol):
    """`--rollout-sample-hook-path`: called once with each finished sample, before its reward."""

    offered: ClassVar[tuple[str, ...]] = ("rollout_id", "evaluation")
    either: ClassVar[bool] = True

    def __call__(self, args: RunArguments, sample: Sample) -> Any:
        """The sample to use instead, or None to keep the given one."""
        ...


class RolloutFunction(Hook, Protocol):
    """`--rollout-function-path`, `--eval-function-path`: runs a whole rollout, or a whole evaluation.

    `generator` gives access to the built-in rollout (see `slimrl.rollout.rollout_function`).
    """

    offered: ClassVar[tuple[str, ...]] = ("generator", "tokenizer")

    def __call__(self, args: RunArguments, rollout_id: int, data_source: DataSource, *, evaluation: bool) -> Any:
        """The groups of a rollout with its metrics, or with `evaluation` the results by data set."""
        ...


class DynamicSamplingFilter(Hook, Protocol):
    """`--dynamic-sampling-filter-path`: keeps or drops one finished group."""

    def __call__(self, args: RunArguments, samples: list[Sample]) -> Any:
        """True (or an object with `keep` True and a `reason`) to keep the group."""
        ...


class BufferFilter(Hook, Protocol):
    """`--buffer-filter-path`: chooses which waiting groups are submitted next."""

    def __call__(
        self, args: RunArguments, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
    ) -> list[list[Sample]]:
        """At most `num_samples` groups, which the function removes from `buffer`."""
        ...


class SampleFilter(Hook, Protocol):
    """`--rollout-sample-filter-path`: excludes single samples from training by setting their `remove_sample`."""

    def __call__(self, args: RunArguments, groups: list[list[Sample]]) -> None:
        """Called once per rollout with the groups that are trained on."""
        ...


class AllSamplesProcess(Hook, Protocol):
    """`--rollout-all-samples-process-path`: called with every scored group of a rollout, including dropped ones."""

    def __call__(self, args: RunArguments, all_groups: list[list[Sample]], data_source: DataSource) -> None:
        """Called once per rollout."""
        ...


class RolloutLog(Hook, Protocol):
    """`--custom-rollout-log-function-path`: reports a rollout."""

    def __call__(
        self,
        rollout_id: int,
        args: RunArguments,
        samples: list[Sample],
        extra_metrics: dict[str, float] | None,
        rollout_time: float,
    ) -> Any:
        """True to suppress slimrl's own metrics of the rollout, except the mean reward.

        `extra_metrics` are those that the rollout returned; numbers that the function adds are reported too.
        """
        ...


class EvalRolloutLog(Hook, Protocol):
    """`--custom-eval-rollout-log-function-path`: reports an evaluation."""

    def __call__(
        self,
        rollout_id: int,
        args: RunArguments,
        data: dict[str, dict[str, Any]],
        extra_metrics: dict[str, float] | None,
    ) -> Any:
        """True to suppress slimrl's own metrics, except each set's mean reward.

        `data` has `rewards`, `truncated` and `samples` by name of the set; the function may add to `extra_metrics`.
        """
        ...


class RewardPostProcess(Hook, Protocol):
    """`--custom-reward-post-process-path`: computes the training rewards of a rollout."""

    def __call__(self, args: RunArguments, samples: list[Sample]) -> tuple[list[float], list[float]]:
        """Raw rewards and training rewards, one of each per sample, in the samples' order."""
        ...


class ConvertSamples(Hook, Protocol):
    """`--custom-convert-samples-to-train-data-path`: makes the training data of a rollout."""

    def __call__(self, args: RunArguments, samples: list[Sample]) -> dict[str, Any]:
        """Columns by name, one entry per sample (see `slimrl.rollout.convert_samples`)."""
        ...


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
