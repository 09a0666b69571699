"""From one pending sample to a finished, judged one: token ids in, token ids out, then the reward.

Every failure on the way becomes one `SampleError` that names the sample, its prompt and the cause.
Called by the rollout loop and by evaluation, one asyncio task per sample.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import CustomGenerate, accepts_keyword, resolve
from slimrl.rollout.engine import EngineClient
from slimrl.rollout.rm_hub import RewardRule, RewardScorer

_STATUS_OF_FINISH_REASON = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}
_FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


class SampleError(RuntimeError):
    """Generation or reward of one sample failed; the message names the sample, the prompt and the cause."""


@dataclasses.dataclass(frozen=True)
class SamplePolicy:
    """What differs between data sets when their samples are made."""

    reward_rule: RewardRule
    custom_generate_path: str | None
    evaluation: bool

    @classmethod
    def for_training(cls, args: Arguments) -> SamplePolicy:
        """From the rollout flags."""
        rule = RewardRule(args.custom_rm_path, args.rm_type)
        return cls(rule, args.custom_generate_function_path, evaluation=False)


class SampleMaker:
    """Generates and judges samples with one client, one tokenizer and one scorer."""

    def __init__(self, args: Arguments, tokenizer: Any, client: EngineClient, scorer: RewardScorer) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._client = client
        self._scorer = scorer
        self._functions: dict[str, CustomGenerate] = {}
        self.finished = 0

    def check(self, policy: SamplePolicy, source: str) -> None:
        """Raises where a policy's functions or reward type cannot be used."""
        policy.reward_rule.check(source)
        if policy.custom_generate_path is not None:
            self._function(policy.custom_generate_path)

    async def make(self, sample: Sample, params: dict[str, Any], policy: SamplePolicy) -> list[Sample]:
        """The finished sample with its reward; several where a custom function fans out.

        A sample that is finished already only gets the reward it lacks. Raises SampleError.
        """
        samples = [sample]
        if sample.status not in _FINISHED:
            samples = await _named(sample, "generation", self._generate(sample, params, policy))
        for made in samples:
            if made.reward is None:
                made.reward = await _named(made, "the reward", self._scorer.score(made, policy.reward_rule))
        self.finished += 1
        return samples

    async def _generate(self, sample: Sample, params: dict[str, Any], policy: SamplePolicy) -> list[Sample]:
        if policy.custom_generate_path is None:
            await self._continue(sample, params)
            made: Any = [sample]
        else:
            function = self._function(policy.custom_generate_path)
            told = {"evaluation": policy.evaluation} if accepts_keyword(function, "evaluation") else {}
            made = await function(self._args, sample, params, **told)
            made = made if isinstance(made, list) else [made]
            if not made or not all(isinstance(part, Sample) for part in made):
                raise TypeError(f"{policy.custom_generate_path} must return a Sample or a list of them, not {made!r}")
        for part in made:
            _check(part)
        return made

    async def _continue(self, sample: Sample, params: dict[str, Any]) -> None:
        """Lets the engine continue `sample` in place, up to `max_new_tokens` more tokens."""
        if not sample.tokens:
            raise ValueError("the prompt has no tokens: messages need --apply-chat-template")
        if params["max_new_tokens"] <= 0:
            sample.loss_mask, sample.rollout_log_probs = sample.loss_mask or [], sample.rollout_log_probs or []
            sample.status = SampleStatus.TRUNCATED
            return
        generation = await self._client.generate(sample.tokens, params, session_id=sample.session_id)
        if len(generation.token_ids) != len(generation.log_probs):
            raise ValueError(
                f"the engine returned {len(generation.token_ids)} tokens with {len(generation.log_probs)} log-probs"
            )
        if generation.finish_reason not in _STATUS_OF_FINISH_REASON:
            raise ValueError(f"the engine ended with the unknown finish reason {generation.finish_reason!r}")
        new_tokens = len(generation.token_ids)
        sample.tokens = sample.tokens + generation.token_ids
        sample.response_length += new_tokens
        sample.loss_mask = [*(sample.loss_mask or []), *[1] * new_tokens]
        sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *generation.log_probs]
        sample.response += generation.text or self._decode(generation.token_ids, params)
        sample.weight_versions.append(generation.weight_version)
        sample.status = _STATUS_OF_FINISH_REASON[generation.finish_reason]

    def _decode(self, token_ids: list[int], params: dict[str, Any]) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=params["skip_special_tokens"],
            spaces_between_special_tokens=params["spaces_between_special_tokens"],
        )

    def _function(self, path: str) -> Callable[..., Any]:
        if path not in self._functions:
            self._functions[path] = resolve(path, CustomGenerate)
        return self._functions[path]


def _check(sample: Sample) -> None:
    """Raises ValueError where a generated sample breaks an invariant that training relies on."""
    if sample.status not in _FINISHED:
        raise ValueError(f"it came back {sample.status.value}: it must be completed or truncated")
    if not 0 <= sample.response_length < len(sample.tokens):
        raise ValueError(f"response_length {sample.response_length} does not fit its {len(sample.tokens)} tokens")
    for name, column in (("loss_mask", sample.loss_mask), ("rollout_log_probs", sample.rollout_log_probs)):
        if column is not None and len(column) != sample.response_length:
            raise ValueError(f"{name} has {len(column)} entries and the response {sample.response_length} tokens")


async def _named(sample: Sample, stage: str, work: Any) -> Any:
    try:
        return await work
    except (asyncio.CancelledError, SampleError):
        raise
    except Exception as error:  # user code and engines may raise anything; nothing is swallowed
        prompt = str(sample.prompt)
        shown = prompt if len(prompt) <= 200 else f"{prompt[:200]}..."
        raise SampleError(
            f"{stage} of sample {sample.index} (group {sample.group_index}) failed:"
            f" {type(error).__name__}: {error}; its prompt: {shown!r}"
        ) from error
