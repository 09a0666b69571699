"""Generates and scores one sample: token ids in, token ids out, then the reward.

The rollout loop and evaluation run one asyncio task per sample. Every failure becomes one `SampleError` that names the
sample, its prompt and the cause.

With `--skip-failed-samples`, samples in which a custom function raised are skipped, counted and logged, up to
`--max-failed-samples`. Failures of an engine, a grader, a reward service or slimrl itself are never skipped, also where
a custom function was the one that met them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
from contextlib import AbstractContextManager
from typing import Any, cast

from slimrl import hooks
from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus, clip_spans, unserved_field
from slimrl.engines.protocol import EngineClient, ServiceError, StoppableEngine
from slimrl.rollout.async_utils import ends_from_outside
from slimrl.rollout.generation.multi_turn import append_generation, end_at_stop_string, stop_tokens
from slimrl.rollout.generation.sample_tracker import (
    GENERATION,
    CustomGenerateCall,
    SampleTrace,
    SampleTracker,
    router_url,
)
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer

logger = logging.getLogger(__name__)


class SampleError(RuntimeError):
    """Generation or reward of one sample failed; the message names the sample, the prompt and the cause.

    `by_hook` tells whether a function of the user's is to blame.
    """

    def __init__(self, text: str, *, by_hook: bool = False) -> None:
        super().__init__(text)
        self.by_hook = by_hook


class FailedSamples:
    """Counts the samples that were skipped since the rollout before."""

    def __init__(self, args: Arguments) -> None:
        """By `--skip-failed-samples` and `--max-failed-samples`."""
        self._skips = args.skip_failed_samples
        self._limit = args.max_failed_samples
        self.count = 0

    def skip(self, error: SampleError) -> None:
        """Counts a failure. Raises it where it may not be skipped, and with the limit where there are too many."""
        if not (self._skips and error.by_hook):
            raise error
        self.count += 1
        if self.count > self._limit:
            raise SampleError(
                f"{error}\nit is failure number {self.count} in this rollout, more than --max-failed-samples"
                f" {self._limit}: fix the function, or allow more"
            ) from error
        logger.warning("its group is left out (--skip-failed-samples): %s", error)

    def take_metrics(self) -> dict[str, float]:
        """The count, where failures may be skipped; the next rollout's begins."""
        count, self.count = self.count, 0
        return {"rollout/failed_samples": float(count)} if self._skips else {}


def is_infra_error(error: BaseException) -> bool:
    """Whether a `ServiceError` or a lack of memory is the error, led to it, or is in a group of errors that did."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, ServiceError | MemoryError):
            return True
        seen.add(id(one))
        pending += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return False


_FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """What differs between data sets when their samples are made."""

    reward_rule: RewardConfig
    custom_generate_path: str | None
    evaluation: bool

    @classmethod
    def for_training(cls, args: Arguments) -> SampleConfig:
        """From the rollout flags."""
        rule = RewardConfig(args.custom_rm_path, args.rm_type)
        return cls(rule, args.custom_generate_function_path, evaluation=False)


class SampleGenerator:
    """Generates and judges samples with one engine, one tokenizer and one scorer."""

    def __init__(
        self, args: Arguments, tokenizer: Any, engine: StoppableEngine, scorer: RewardScorer, trace: SampleTrace
    ) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._engine = engine
        self._scorer = scorer
        self._stop_tokens = stop_tokens(args.hf_checkpoint, tokenizer)
        self._trace = trace
        self._functions: dict[str, tuple[hooks.CustomGenerate, tuple[str, ...]]] = {}
        self._sample_hooks = [(path, hooks.resolve(path, hooks.SampleHook)) for path in args.rollout_sample_hook_path]
        self.finished = 0
        self.under_way = SampleTracker(trace.stage)

    def check(self, policy: SampleConfig, source: str) -> None:
        """Raises where a policy's functions or reward type cannot be used."""
        policy.reward_rule.check(source)
        if policy.custom_generate_path is not None:
            self._function(policy.custom_generate_path)

    async def make(self, sample: Sample, params: dict[str, Any], policy: SampleConfig, rollout_id: int) -> list[Sample]:
        """The finished sample with its reward; several where a custom function may fan out. Raises SampleError."""
        samples = await self.generate(sample, params, policy, rollout_id)
        await self.judge(samples, policy)
        return samples

    async def generate(
        self, sample: Sample, params: dict[str, Any], policy: SampleConfig, rollout_id: int
    ) -> list[Sample]:
        """The generated sample, seen by `--rollout-sample-hook-path`; several where a custom function fans out.

        One that is finished already comes back as it is. Once the engine is stopped, samples come back ABORTED with
        what they have. Raises SampleError.
        """
        if sample.status in _FINISHED:
            return [sample]
        engine = self._trace.engine_for(self._engine, sample, rollout_id, policy.evaluation)
        work, path = self._generate(sample, params, policy, engine), policy.custom_generate_path
        made = await self._named(sample, GENERATION, work, path and f"--custom-generate-function-path {path}")
        return [await self._hooked(part, policy, rollout_id) if part.status in _FINISHED else part for part in made]

    async def judge(self, samples: list[Sample], policy: SampleConfig) -> None:
        """Fills in the rewards that finished samples lack; with `--group-rm` in one call. Raises SampleError."""
        if self._args.group_rm:
            await self._judge_together(
                [made for made in samples if made.status in _FINISHED and made.reward is None], policy
            )
            return
        for made in samples:
            if made.status in _FINISHED and made.reward is None:
                judging, path = self._scorer.score(made, policy.reward_rule), _reward_path(made, policy)
                made.reward = await self._named(made, "the reward", judging, path)
        self.finished += all(made.reward is not None for made in samples)

    async def _judge_together(self, samples: list[Sample], policy: SampleConfig) -> None:
        if samples:
            judging = self._scorer.score_group(samples, policy.reward_rule)
            path = _reward_path(samples[0], policy)
            rewards = await self._named(samples[0], "the reward of the group", judging, path)
            for made, reward in zip(samples, rewards, strict=True):
                made.reward = reward
        self.finished += len(samples)

    async def _generate(
        self, sample: Sample, params: dict[str, Any], policy: SampleConfig, engine: EngineClient
    ) -> list[Sample]:
        if policy.custom_generate_path is None:
            await self._continue(sample, params, engine)
            made: Any = [sample]
        else:
            function, names = self._function(policy.custom_generate_path)
            kind = "eval-sample" if policy.evaluation else "sample"
            sample.session_id = sample.session_id or f"{kind}-{sample.index}"  # it may be a conversation
            offers = {"engine": engine, "tokenizer": self._tokenizer, "evaluation": policy.evaluation}
            making = self._making(sample, engine)
            self._scorer.begin()
            with making.going_on():
                made = await function(self._args, sample, params, **{name: offers[name] for name in names})
            made = made if isinstance(made, list) else [made]
            if not made or not all(isinstance(part, Sample) for part in made):
                kinds = sorted({f"{type(part).__module__}.{type(part).__qualname__}" for part in made})
                raise TypeError(
                    f"{policy.custom_generate_path} must return a Sample (slimrl.data.sample.Sample) or a list of them,"
                    f" not {', '.join(kinds) or 'none'}: {made!r}"
                )
            for part in made:
                making.tell_versions(part)
            if len(made) > 1 and not policy.evaluation:
                self._require_rows_of_ones_own(policy.custom_generate_path, len(made))
        for part in made:
            _check(part, may_be_aborted=self._engine.stopped)
        return made

    def _making(self, sample: Sample, engine: EngineClient) -> CustomGenerateCall:
        """What helpers written for slime need to know of the sample."""
        return CustomGenerateCall(
            router_url=router_url(self._args),
            engine=engine,
            stopped=lambda: self._engine.stopped,
            continue_sample=lambda part, params: self._continue(part, params, engine),
            session_id=sample.session_id,
            before=dataclasses.replace(sample, weight_versions=list(sample.weight_versions)),
        )

    def _require_rows_of_ones_own(self, path: str, count: int) -> None:
        """An optimizer step takes --global-batch-size samples, and the run has planned its steps with one for each."""
        if self._args.custom_convert_samples_to_train_data_path is None:
            raise TypeError(
                f"{path} returned {count} samples for one, and a rollout has --rollout-batch-size x"
                " --n-samples-per-prompt of them: return one sample (slimrl.rollout.generation.multi_turn makes one of"
                " several turns), or give --custom-convert-samples-to-train-data-path, a function that makes the rows"
                " to train on"
            )

    async def _continue(self, sample: Sample, params: dict[str, Any], engine: EngineClient) -> None:
        """Lets the engine continue `sample` in place, up to `max_new_tokens` more tokens."""
        if not sample.tokens:
            raise ValueError("the prompt has no tokens: messages need --apply-chat-template")
        sample.loss_mask, sample.rollout_log_probs = sample.loss_mask or [], sample.rollout_log_probs or []
        if params["max_new_tokens"] <= 0:
            sample.status = SampleStatus.TRUNCATED
            return
        continued = sample.response_length > 0
        generation = await engine.generate(sample.tokens, params, session_id=sample.session_id)
        append_generation(sample, generation)
        if not generation.token_ids:
            return
        ends = self._stop_tokens.union(params["stop_token_ids"] or ())
        if sample.status is SampleStatus.ABORTED and generation.token_ids[-1] in ends:
            sample.status = SampleStatus.COMPLETED  # it was cut off in the moment in which it ended
        if continued:  # characters and stop strings may reach over the place where it was cut
            new_tokens = len(generation.token_ids)
            end_at_stop_string(sample, new_tokens, params["stop"], lambda ids: self._decode(ids, params))
        else:
            sample.response = generation.text or self._decode(generation.token_ids, params)

    def _decode(self, token_ids: list[int], params: dict[str, Any]) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=params["skip_special_tokens"],
            spaces_between_special_tokens=params["spaces_between_special_tokens"],
        )

    async def _hooked(self, sample: Sample, policy: SampleConfig, rollout_id: int) -> Sample:
        for path, hook in self._sample_hooks:
            name = f"--rollout-sample-hook-path {path}"
            sample = await self._named(sample, name, self._hook(hook, sample, policy, rollout_id), name)
        return sample

    async def _hook(self, hook: Any, sample: Sample, policy: SampleConfig, rollout_id: int) -> Sample:
        told = hooks.accepted(hook, hooks.SampleHook, rollout_id=rollout_id, evaluation=policy.evaluation)
        returned = hook(self._args, sample, **told)
        if inspect.isawaitable(returned):
            returned = await returned
        if returned is None:
            return sample
        if not isinstance(returned, Sample):
            raise TypeError(f"it must return a Sample or None, not {returned!r}")
        _check(returned, may_be_aborted=False)
        return returned

    async def _named(self, sample: Sample, stage: str, work: Any, function: str | None) -> Any:
        """The result of `work`, whose errors become a SampleError; `function` is the user's own that does the work."""
        task = asyncio.current_task()
        try:
            with self.under_way.at(sample, stage), _of_hook(function):
                return await work
        except SampleError:
            raise
        except BaseException as error:  # user code and engines may raise anything; nothing is swallowed
            if ends_from_outside(error, task):
                raise
            prompt = str(sample.prompt)
            shown = prompt if len(prompt) <= 200 else f"{prompt[:200]}..."
            sample.status = SampleStatus.FAILED
            lines = f"; in {function}{hooks.user_frames(error)}" if function else ""
            raise SampleError(
                f"{stage} of sample {sample.index} (group {sample.group_index}) failed:"
                f" {hooks.described(error)}; its prompt: {shown!r}{lines}",
                by_hook=function is not None and not is_infra_error(error),
            ) from error

    def _function(self, path: str) -> tuple[hooks.CustomGenerate, tuple[str, ...]]:
        if path not in self._functions:
            function = cast("hooks.CustomGenerate", hooks.resolve(path, hooks.CustomGenerate))
            names = hooks.CustomGenerate.offered
            self._functions[path] = function, tuple(name for name in names if hooks.accepts_keyword(function, name))
        return self._functions[path]


def _of_hook(function: str | None) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if function is None else hooks.in_hook()


def _reward_path(sample: Sample, policy: SampleConfig) -> str | None:
    """The user's function that judges the sample, with its flag."""
    path = sample.custom_rm_path or policy.reward_rule.custom_rm_path
    return path and f"--custom-rm-path {path}"


def _check(sample: Sample, *, may_be_aborted: bool) -> None:
    """Raises ValueError where a generated sample breaks an invariant that training relies on."""
    sample.status = SampleStatus(sample.status)  # functions of the user's may write it as text
    if unserved := unserved_field(sample):
        raise ValueError(unserved)
    if sample.status not in _FINISHED and not (may_be_aborted and sample.status is SampleStatus.ABORTED):
        raise ValueError(f"it came back {sample.status.value}: it must be completed or truncated")
    if not 0 <= sample.response_length < len(sample.tokens):
        raise ValueError(f"response_length {sample.response_length} does not fit its {len(sample.tokens)} tokens")
    for name, column in (("loss_mask", sample.loss_mask), ("rollout_log_probs", sample.rollout_log_probs)):
        if column is not None and len(column) != sample.response_length:
            raise ValueError(f"{name} has {len(column)} entries and the response {sample.response_length} tokens")
    if sample.version_spans:  # functions that cut or lengthen a response need not know of them
        sample.version_spans = clip_spans(sample.version_spans, sample.response_length)
