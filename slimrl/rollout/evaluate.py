"""Evaluation: samples all datasets concurrently, each with its own settings, and computes their metrics.

The same dataset, weights and settings give the same samples in the same order. Called by the rollout generator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from slimrl.arguments.eval_datasets import eval_prompt_format
from slimrl.arguments.namespace import EvalDataset, PromptArguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.engines.protocol import SamplingConfig
from slimrl.rollout.async_utils import gather_or_cancel
from slimrl.rollout.dataset.prompt_dataset import PromptSet, load_prompts
from slimrl.rollout.generation.sample_generator import SampleConfig, SampleError, SampleGenerator
from slimrl.rollout.metrics import PASS_REWARD, ks_of, length_statistics, mean, pass_at_k
from slimrl.rollout.rm_hub import RewardConfig
from slimrl.rollout.rm_hub.scorer import REWARD_FAILURE_KEY


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """The result of one dataset; `samples` and `rewards` are in the order of the rows, repeats adjacent."""

    name: str
    rewards: list[float]
    samples: list[Sample]
    n_samples_per_prompt: int

    @property
    def mean_reward(self) -> float:
        """Mean over all samples; the accuracy if rewards are 0 and 1."""
        return mean(self.rewards)

    @property
    def pass_rate(self) -> float:
        """Fraction of prompts with at least one sample of reward 1 or more."""
        return self.pass_at(self.n_samples_per_prompt)

    @property
    def truncated_ratio(self) -> float:
        """Fraction of samples that reached the length limit."""
        return mean([float(sample.status is SampleStatus.TRUNCATED) for sample in self.samples])

    def pass_at(self, k: int) -> float:
        """Mean over prompts of the probability that k of their samples (without replacement) include a passing one."""
        n = self.n_samples_per_prompt
        groups = [self.rewards[start : start + n] for start in range(0, len(self.rewards), n)]
        return mean([pass_at_k(n, sum(reward >= PASS_REWARD for reward in group), k) for group in groups])

    def metrics(self) -> dict[str, float]:
        """Metrics `eval/<name>...`; pass@k for k = 1, 2, 4, ... and the group size."""
        prefix = f"eval/{self.name}"
        n = self.n_samples_per_prompt
        lengths = length_statistics([sample.response_length for sample in self.samples])
        return {
            prefix: self.mean_reward,
            f"{prefix}-truncated_ratio": self.truncated_ratio,
            f"{prefix}-reward_failures": float(sum(REWARD_FAILURE_KEY in sample.metadata for sample in self.samples)),
            **{f"{prefix}-pass@{k}": self.pass_at(k) for k in ks_of(n)},
            **{f"{prefix}/response_len/{name}": value for name, value in lengths.items()},
        }


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """The metrics of one dataset, without its samples."""

    mean_reward: float
    scalars: dict[str, float]

    @classmethod
    def of_held_out(cls, name: str, metrics: dict[str, float]) -> EvaluationReport:
        """Of a held-out set: the accuracy of preferences, the perplexity of conversations, the mean error of scores.

        `metrics` are those of an optimizer step.
        """
        if "absolute_error" in metrics:
            error = metrics["absolute_error"]
            return cls(error, {f"eval/{name}": error, f"eval/{name}-loss": metrics["loss"]})
        if "perplexity" in metrics:
            perplexity = metrics["perplexity"]
            return cls(perplexity, {f"eval/{name}": perplexity, f"eval/{name}-loss": metrics["loss"]})
        accuracy = metrics["label_accuracy" if "label_accuracy" in metrics else "pair_accuracy"]
        values = {f"eval/{name}-{kind}": metrics[kind] for kind in ("loss", "reward_margin") if kind in metrics}
        return cls(accuracy, {f"eval/{name}": accuracy, **values})

    def metrics(self) -> dict[str, float]:
        """Scalars under their full names, `eval/...`."""
        return self.scalars


@dataclasses.dataclass(frozen=True)
class _Set:
    """A loaded dataset with its sampling and scoring configuration."""

    dataset: EvalDataset
    prompts: PromptSet
    sampling: SamplingConfig
    config: SampleConfig


class Evaluator:
    """Loads all datasets in its constructor, so that a bad file is reported before training starts."""

    def __init__(
        self, datasets: Sequence[EvalDataset], flags: PromptArguments, tokenizer: Any, generator: SampleGenerator
    ) -> None:
        self._generator = generator
        self._skips = flags.skip_failed_samples
        self._sets = [self._load(flags, dataset, tokenizer) for dataset in datasets]

    @property
    def num_samples(self) -> int:
        """Number of samples of one evaluation over all datasets."""
        return sum(len(part.prompts) * part.dataset.n_samples_per_eval_prompt for part in self._sets)

    async def evaluate(self, rollout_id: int) -> dict[str, EvalResult]:
        """Samples and scores every dataset. Raises SampleError at the first failure."""
        results = await gather_or_cancel(self._evaluate(part, rollout_id) for part in self._sets)
        return {result.name: result for result in results}

    def _load(self, flags: PromptArguments, dataset: EvalDataset, tokenizer: Any) -> _Set:
        config = SampleConfig(
            RewardConfig(dataset.custom_rm_path, dataset.rm_type),
            dataset.custom_generate_function_path,
            evaluation=True,
        )
        self._generator.check(config, f"evaluation set {dataset.name!r}")
        prompts = load_prompts(dataset.path, eval_prompt_format(flags, dataset), tokenizer)
        return _Set(dataset, prompts, SamplingConfig.for_evaluation(flags, dataset), config)

    async def _evaluate(self, part: _Set, rollout_id: int) -> EvalResult:
        repeats = part.dataset.n_samples_per_eval_prompt
        work = []
        for row, prompt in enumerate(part.prompts.prompts):
            for repeat in range(repeats):
                sample = prompt.sample(group_index=row, index=row * repeats + repeat)
                sample.metadata.update(part.dataset.metadata_overrides)
                params = part.sampling.params(sample, row, repeat)
                work.append(self._generator.generate_and_score(sample, params, part.config, rollout_id))
        try:
            results = await gather_or_cancel(work)
        except SampleError as error:
            raise self._with_set_name(part.dataset, error) from error
        samples = [_only(samples, part.dataset) for samples in results]
        rewards = [sample.reward_value(part.dataset.reward_key) for sample in samples]
        return EvalResult(part.dataset.name, rewards, samples, repeats)

    def _with_set_name(self, dataset: EvalDataset, error: SampleError) -> SampleError:
        text = f"evaluation set {dataset.name!r}: {error}"
        if self._skips and error.by_hook:
            text += (
                "\n--skip-failed-samples does not apply to evaluations, because skipping would change the result: fix"
                " the function"
            )
        return SampleError(text, by_hook=error.by_hook)


def _only(samples: list[Sample], dataset: EvalDataset) -> Sample:
    if len(samples) != 1:
        raise ValueError(
            f"{dataset.custom_generate_function_path} returned {len(samples)} samples in the evaluation of"
            f" {dataset.name!r}: return one sample if `evaluation` is true"
        )
    return samples[0]
