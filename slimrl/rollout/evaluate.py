"""Evaluation: every data set sampled with its own settings, all at once, and summed up in plain numbers.

The same data set, weights and settings give the same samples in the same order. Called by the rollout generator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.eval_datasets import eval_prompt_format
from slimrl.arguments.namespace import EvalDataset
from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.async_utils import gather_or_cancel
from slimrl.rollout.dataset.prompt_dataset import PromptSet, load_prompts
from slimrl.rollout.generation.sample_generator import SampleConfig, SampleError, SampleGenerator
from slimrl.rollout.metrics import PASS_REWARD, ks_of, length_statistics, mean, pass_at_k
from slimrl.rollout.rm_hub import RewardConfig
from slimrl.rollout.rm_hub.scorer import REWARD_FAILURE_KEY
from slimrl.rollout.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """One data set's outcome; `samples` and `rewards` are in the order of the rows, repeats side by side."""

    name: str
    rewards: list[float]
    samples: list[Sample]
    n_samples_per_prompt: int

    @property
    def mean_reward(self) -> float:
        """Mean over all samples: with rewards 0 and 1 the accuracy."""
        return mean(self.rewards)

    @property
    def pass_rate(self) -> float:
        """Share of prompts with at least one sample of reward 1 or more."""
        return self.pass_at(self.n_samples_per_prompt)

    @property
    def truncated_ratio(self) -> float:
        """Share of samples that ran into the length limit."""
        return mean([float(sample.status is SampleStatus.TRUNCATED) for sample in self.samples])

    def pass_at(self, k: int) -> float:
        """Mean over prompts of the chance that k of its samples, drawn without putting back, hold one that passes."""
        n = self.n_samples_per_prompt
        groups = [self.rewards[start : start + n] for start in range(0, len(self.rewards), n)]
        return mean([pass_at_k(n, sum(reward >= PASS_REWARD for reward in group), k) for group in groups])

    def metrics(self) -> dict[str, float]:
        """Flat numbers for the charts, `eval/<name>...`; pass@k for k = 1, 2, 4, ... and the group size."""
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
class _Set:
    """A loaded data set with the way its samples are made."""

    dataset: EvalDataset
    prompts: PromptSet
    plan: SamplingConfig
    policy: SampleConfig


class Evaluator:
    """Reads every data set of `args.eval_datasets` at once, so that a bad file is known before training starts."""

    def __init__(self, args: Arguments, tokenizer: Any, maker: SampleGenerator) -> None:
        self._maker = maker
        self._skips = args.skip_failed_samples
        self._sets = [self._load(args, dataset, tokenizer) for dataset in args.eval_datasets]

    @property
    def num_samples(self) -> int:
        """Samples of one evaluation, all data sets together."""
        return sum(len(part.prompts) * part.dataset.n_samples_per_eval_prompt for part in self._sets)

    async def evaluate(self, rollout_id: int) -> dict[str, EvalResult]:
        """Samples and judges every data set; raises SampleError at the first failure."""
        results = await gather_or_cancel(self._evaluate(part, rollout_id) for part in self._sets)
        return {result.name: result for result in results}

    def _load(self, args: Arguments, dataset: EvalDataset, tokenizer: Any) -> _Set:
        policy = SampleConfig(
            RewardConfig(dataset.custom_rm_path, dataset.rm_type),
            dataset.custom_generate_function_path,
            evaluation=True,
        )
        self._maker.check(policy, f"evaluation set {dataset.name!r}")
        prompts = load_prompts(dataset.path, eval_prompt_format(args, dataset), tokenizer)
        return _Set(dataset, prompts, SamplingConfig.for_evaluation(args, dataset), policy)

    async def _evaluate(self, part: _Set, rollout_id: int) -> EvalResult:
        repeats = part.dataset.n_samples_per_eval_prompt
        work = []
        for row, prompt in enumerate(part.prompts.prompts):
            for repeat in range(repeats):
                sample = prompt.sample(group_index=row, index=row * repeats + repeat)
                sample.metadata.update(part.dataset.metadata_overrides)
                params = part.plan.params(sample, row, repeat)
                work.append(self._maker.make(sample, params, part.policy, rollout_id))
        try:
            made = await gather_or_cancel(work)
        except SampleError as error:
            raise self._of_set(part.dataset, error) from error
        samples = [_only(samples, part.dataset) for samples in made]
        rewards = [sample.reward_value(part.dataset.reward_key) for sample in samples]
        return EvalResult(part.dataset.name, rewards, samples, repeats)

    def _of_set(self, dataset: EvalDataset, error: SampleError) -> SampleError:
        text = f"evaluation set {dataset.name!r}: {error}"
        if self._skips and error.by_hook:
            text += (
                "\n--skip-failed-samples skips no sample of an evaluation, whose result would be another one: fix the"
                " function"
            )
        return SampleError(text, by_hook=error.by_hook)


def _only(samples: list[Sample], dataset: EvalDataset) -> Sample:
    if len(samples) != 1:
        raise ValueError(
            f"{dataset.custom_generate_function_path} returned {len(samples)} samples in the evaluation of"
            f" {dataset.name!r}: return one where `evaluation` is true"
        )
    return samples[0]
