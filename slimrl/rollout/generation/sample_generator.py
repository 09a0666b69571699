"""Generates and scores one sample: token ids in, token ids out, then the reward.

The rollout loop and evaluation run one asyncio task per sample. Every failure becomes one `SampleError` that names the
sample, its prompt and the cause.

With `--skip-failed-samples`, samples in which a custom function raised are skipped, counted and logged, up to
`--max-failed-samples`. Failures of an engine, a grader, a reward service or slimrl itself are never skipped, even if
they surface in a custom function.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
from contextlib import AbstractContextManager
from typing import Any, cast

from slimrl import hooks
from slimrl.arguments import Arguments
from slimrl.arguments.flags.rollout import RolloutArguments
from slimrl.arguments.namespace import PromptArguments
from slimrl.data.sample import Sample, SampleStatus, clip_spans, unserved_field
from slimrl.engines.protocol import EngineClient, ServiceError, StoppableEngine
from slimrl.hooks.contracts import RunArguments
from slimrl.rollout.async_utils import ends_from_outside, gather_or_cancel
from slimrl.rollout.dataset.images import SampleImages
from slimrl.rollout.generation.multi_turn import (
    append_generation,
    complete_if_stopped,
    end_at_stop_string,
    stop_tokens,
)
from slimrl.rollout.generation.sample_tracker import (
    GENERATION,
    CustomGenerateCall,
    RouterAccess,
    SampleTrace,
    SampleTracker,
)
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer

logger = logging.getLogger(__name__)


class SampleError(RuntimeError):
    """Generation or reward of one sample failed; the message names the sample, the prompt and the cause.

    `by_hook` is True if a custom function caused it.
    """

    def __init__(self, text: str, *, by_hook: bool = False) -> None:
        super().__init__(text)
        self.by_hook = by_hook


class FailedSamples:
    """Counts the samples skipped since the previous rollout."""

    def __init__(self, rollout: RolloutArguments) -> None:
        """Reads `--skip-failed-samples` and `--max-failed-samples`."""
        self._skips = rollout.skip_failed_samples
        self._limit = rollout.max_failed_samples
        self.count = 0

    def skip(self, error: SampleError) -> None:
        """Counts a failure. Raises `error` if it may not be skipped, SampleError above `--max-failed-samples`."""
        if not (self._skips and error.by_hook):
            raise error
        self.count += 1
        if self.count > self._limit:
            raise SampleError(
                f"{error}\nthis is failure number {self.count} in this rollout, more than --max-failed-samples"
                f" {self._limit}: fix the function, or raise the limit"
            ) from error
        logger.warning("skipping the group (--skip-failed-samples): %s", error)

    def take_metrics(self) -> dict[str, float]:
        """Returns the count as a metric if failures may be skipped, and resets it."""
        count, self.count = self.count, 0
        return {"rollout/failed_samples": float(count)} if self._skips else {}


def is_infra_error(error: BaseException) -> bool:
    """Whether the error, its causes or its exception groups contain a `ServiceError` or a MemoryError."""
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
_RESPONSE_COLUMNS = ("loss_mask", "rollout_log_probs", "teacher_log_probs", "token_rewards")


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Per-dataset settings of generation and reward."""

    reward_rule: RewardConfig
    custom_generate_path: str | None
    evaluation: bool

    @classmethod
    def for_training(cls, flags: PromptArguments) -> SampleConfig:
        """From the rollout flags."""
        rule = RewardConfig(flags.custom_rm_path, flags.rm_type)
        return cls(rule, flags.custom_generate_function_path, evaluation=False)


@dataclasses.dataclass(frozen=True)
class GeneratorConfig:
    """Settings shared by all samples of a run."""

    hf_checkpoint: str
    sample_hook_paths: tuple[str, ...]
    scores_groups: bool  # the reward function gets a whole group in one call
    has_custom_sample_conversion: bool  # whether a custom function decides how many training rows a sample becomes
    router: RouterAccess
    vision_folder: str | None  # of a vision-language model
    hook_args: RunArguments  # passed to custom functions

    @classmethod
    def from_args(cls, args: Arguments) -> GeneratorConfig:
        """Reads the flags."""
        return cls(
            hf_checkpoint=args.hf_checkpoint,
            sample_hook_paths=tuple(args.rollout_sample_hook_path),
            scores_groups=args.group_rm,
            has_custom_sample_conversion=args.custom_convert_samples_to_train_data_path is not None,
            router=RouterAccess.from_args(args),
            vision_folder=args.vision_folder,
            hook_args=args,
        )


class SampleGenerator:
    """Generates and scores samples with one engine client, one tokenizer and one scorer."""

    def __init__(
        self,
        config: GeneratorConfig,
        tokenizer: Any,
        engine: StoppableEngine,
        scorer: RewardScorer,
        trace: SampleTrace,
    ) -> None:
        self.scores_groups = config.scores_groups
        self._config = config
        self._hook_args = config.hook_args
        self._tokenizer = tokenizer
        self._engine = engine
        self._scorer = scorer
        self._stop_tokens = stop_tokens(config.hf_checkpoint, tokenizer)
        self._trace = trace
        self._functions: dict[str, tuple[hooks.CustomGenerate, tuple[str, ...]]] = {}
        self._sample_hooks = [(path, hooks.resolve(path, hooks.SampleHook)) for path in config.sample_hook_paths]
        self._images = SampleImages(config.vision_folder)
        self.finished = 0
        self.tracker = SampleTracker(trace.stage)

    def check(self, config: SampleConfig, source: str) -> None:
        """Raises an error if the functions or the reward type of `config` cannot be used."""
        config.reward_rule.check(source)
        if config.custom_generate_path is not None:
            self._function(config.custom_generate_path)

    async def generate_and_score(
        self, sample: Sample, params: dict[str, Any], config: SampleConfig, rollout_id: int
    ) -> list[Sample]:
        """The finished sample with its reward; several if a custom function fans out. Raises SampleError."""
        samples = await self.generate(sample, params, config, rollout_id)
        await self.score(samples, config)
        return samples

    async def generate(
        self, sample: Sample, params: dict[str, Any], config: SampleConfig, rollout_id: int
    ) -> list[Sample]:
        """The generated sample, after `--rollout-sample-hook-path`; several if a custom function fans out.

        A sample that is already finished is returned unchanged. Once the engine is stopped, samples come back ABORTED
        with the tokens they have. Raises SampleError.
        """
        if sample.status in _FINISHED:
            return [sample]
        engine = self._trace.engine_for(self._engine, sample, rollout_id, config.evaluation)
        work, path = self._generate(sample, params, config, engine), config.custom_generate_path
        generated = await self._run(sample, GENERATION, work, path and f"--custom-generate-function-path {path}")
        return [
            await self._run_sample_hooks(part, config, rollout_id) if part.status in _FINISHED else part
            for part in generated
        ]

    async def score(self, samples: list[Sample], config: SampleConfig) -> None:
        """Sets the reward of finished samples without one; with `--group-rm` in one call. Raises SampleError.

        In training also what a served model gives to tokens (`score_tokens`), before the reward.
        """
        if not config.evaluation:
            await self.score_tokens(samples)
        if self.scores_groups:
            await self._score_group(
                [sample for sample in samples if sample.status in _FINISHED and sample.reward is None], config
            )
            return
        for sample in samples:
            if sample.status in _FINISHED and sample.reward is None:
                work, path = self._scorer.score(sample, config.reward_rule), _reward_path(sample, config)
                sample.reward = await self._run(sample, "the reward", work, path)
        self.finished += all(sample.reward is not None for sample in samples)

    async def score_tokens(self, samples: list[Sample]) -> None:
        """Sets a teacher's log-probabilities or the rewards of steps of finished samples. Raises SampleError.

        By the servers of `--opd-type sglang` or `--rm-step-separator`.
        """
        if (column := self._scorer.column_of_tokens) is None:
            return
        stage = "the rewards of steps" if column == "token_rewards" else "the teacher's log-probabilities"
        await gather_or_cancel(
            self._run(sample, stage, self._scorer.score_tokens(sample), None)
            for sample in samples
            if sample.status in _FINISHED
        )

    async def _score_group(self, samples: list[Sample], config: SampleConfig) -> None:
        if samples:
            work = self._scorer.score_group(samples, config.reward_rule)
            path = _reward_path(samples[0], config)
            rewards = await self._run(samples[0], "the reward of the group", work, path)
            for sample, reward in zip(samples, rewards, strict=True):
                sample.reward = reward
        self.finished += len(samples)

    async def _generate(
        self, sample: Sample, params: dict[str, Any], config: SampleConfig, engine: EngineClient
    ) -> list[Sample]:
        if config.custom_generate_path is None:
            await self._continue(sample, params, engine)
            generated: Any = [sample]
        else:
            function, names = self._function(config.custom_generate_path)
            kind = "eval-sample" if config.evaluation else "sample"
            sample.session_id = sample.session_id or f"{kind}-{sample.index}"  # it may be a conversation
            engine = self._images.engine_of(engine, sample)
            offered = {"engine": engine, "tokenizer": self._tokenizer, "evaluation": config.evaluation}
            offered |= {"image_processor": self._images.processor} if "image_processor" in names else {}
            call = self._custom_call(sample, engine)
            self._scorer.begin()
            with call.active():
                generated = await function(self._hook_args, sample, params, **{name: offered[name] for name in names})
            generated = generated if isinstance(generated, list) else [generated]
            if not generated or not all(isinstance(part, Sample) for part in generated):
                kinds = sorted({f"{type(part).__module__}.{type(part).__qualname__}" for part in generated})
                raise TypeError(
                    f"{config.custom_generate_path} must return a Sample (slimrl.data.sample.Sample) or a list of them,"
                    f" not {', '.join(kinds) or 'none'}: {generated!r}"
                )
            for part in generated:
                call.record_versions(part)
            if len(generated) > 1 and not config.evaluation:
                self._require_custom_rows(config.custom_generate_path, len(generated))
        for part in generated:
            _check(part, may_be_aborted=self._engine.stopped)
        return generated

    def _custom_call(self, sample: Sample, engine: EngineClient) -> CustomGenerateCall:
        """The context of this sample for helpers written for slime."""
        return CustomGenerateCall(
            router_url=self._config.router.url,
            engine=engine,
            stopped=lambda: self._engine.stopped,
            continue_sample=lambda part, params: self._continue(part, params, engine),
            session_id=sample.session_id,
            before=dataclasses.replace(sample, weight_versions=list(sample.weight_versions)),
        )

    def _require_custom_rows(self, path: str, count: int) -> None:
        """Raises TypeError without a custom conversion: the optimizer steps are planned with one row per sample."""
        if not self._config.has_custom_sample_conversion:
            raise TypeError(
                f"{path} returned {count} samples for one, but a rollout has --rollout-batch-size x"
                " --n-samples-per-prompt samples: return one sample (slimrl.rollout.generation.multi_turn puts several"
                " turns into one), or set --custom-convert-samples-to-train-data-path to a function that makes the rows"
                " to train on"
            )

    async def _continue(self, sample: Sample, params: dict[str, Any], engine: EngineClient) -> None:
        """Continues `sample` in place with the engine, by up to `max_new_tokens` tokens."""
        if not sample.tokens:
            raise ValueError("the prompt has no tokens: messages need --apply-chat-template")
        sample.loss_mask, sample.rollout_log_probs = sample.loss_mask or [], sample.rollout_log_probs or []
        if params["max_new_tokens"] <= 0:
            sample.status = SampleStatus.TRUNCATED
            return
        continued = sample.response_length > 0
        images = self._images.of(sample)
        generation = await engine.generate(sample.tokens, params, session_id=sample.session_id, **images)
        append_generation(sample, generation)
        if not generation.new_tokens:
            return
        decode = functools.partial(self._decode, params=params)
        end_tokens = self._stop_tokens.union(params["stop_token_ids"] or ())
        complete_if_stopped(sample, generation, params["stop"], end_tokens, decode)
        if continued:  # a character or a stop string may span the abort
            end_at_stop_string(sample, generation.new_tokens, params["stop"], decode)
        else:
            sample.response = generation.text or self._decode(generation.token_ids, params)

    def _decode(self, token_ids: list[int], params: dict[str, Any]) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=params["skip_special_tokens"],
            spaces_between_special_tokens=params["spaces_between_special_tokens"],
        )

    async def _run_sample_hooks(self, sample: Sample, config: SampleConfig, rollout_id: int) -> Sample:
        for path, hook in self._sample_hooks:
            name = f"--rollout-sample-hook-path {path}"
            sample = await self._run(sample, name, self._call_sample_hook(hook, sample, config, rollout_id), name)
        return sample

    async def _call_sample_hook(self, hook: Any, sample: Sample, config: SampleConfig, rollout_id: int) -> Sample:
        keywords = hooks.accepted(hook, hooks.SampleHook, rollout_id=rollout_id, evaluation=config.evaluation)
        returned = hook(self._hook_args, sample, **keywords)
        if inspect.isawaitable(returned):
            returned = await returned
        if returned is None:
            return sample
        if not isinstance(returned, Sample):
            raise TypeError(f"the hook must return a Sample or None, not {returned!r}")
        _check(returned, may_be_aborted=False)
        return returned

    async def _run(self, sample: Sample, stage: str, work: Any, function: str | None) -> Any:
        """Awaits `work` and turns its errors into a SampleError; `function` is the custom function, if any."""
        task = asyncio.current_task()
        try:
            with self.tracker.at(sample, stage, task), _hook_context(function):
                return await work
        except SampleError:
            raise
        except BaseException as error:  # custom code and engines may raise anything; nothing is swallowed
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


def _hook_context(function: str | None) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if function is None else hooks.in_hook()


def _reward_path(sample: Sample, config: SampleConfig) -> str | None:
    """Flag and path of the custom reward function that scores the sample; None if built in."""
    path = sample.custom_rm_path or config.reward_rule.custom_rm_path
    return path and f"--custom-rm-path {path}"


def _check(sample: Sample, *, may_be_aborted: bool) -> None:
    """Raises ValueError if a generated sample breaks an invariant that training relies on."""
    if not isinstance(sample.status, SampleStatus):  # custom functions may set it as text
        sample.status = SampleStatus(sample.status)
    if unsupported := unserved_field(sample):
        raise ValueError(unsupported)
    if sample.status not in _FINISHED and not (may_be_aborted and sample.status is SampleStatus.ABORTED):
        raise ValueError(f"the sample's status is {sample.status.value}: it must be completed or truncated")
    tokens, *columns = sample.columns(("tokens", *_RESPONSE_COLUMNS))
    if not 0 <= sample.response_length < len(tokens):
        raise ValueError(f"response_length {sample.response_length} does not fit {len(tokens)} tokens")
    for name, column in zip(_RESPONSE_COLUMNS, columns, strict=True):
        if column is not None and len(column) != sample.response_length:
            raise ValueError(f"{name} has {len(column)} entries but the response has {sample.response_length} tokens")
    if sample.version_spans:  # custom functions may shorten or lengthen a response without updating them
        sample.version_spans = clip_spans(sample.version_spans, sample.response_length)
