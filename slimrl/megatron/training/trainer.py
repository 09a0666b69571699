"""The training worker: one rank's model, optimizer and schedule, from flags to saved checkpoints.

Guarantees that every parallel layout trains a rollout with the same result, and that a resumed run continues bit for
bit. Does not need Ray: one trainer per process; every rank makes the same calls in the same order.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.arguments.flags.checkpoint import CheckpointArguments
from slimrl.arguments.flags.rollout import RolloutArguments
from slimrl.arguments.memory import training_memory
from slimrl.data.train_batch import RolloutBatch
from slimrl.hooks.base import RunArguments
from slimrl.megatron import config, data_parallel, parallel, patches
from slimrl.megatron.checkpoint import state
from slimrl.megatron.checkpoint.folder import Retention
from slimrl.megatron.checkpoint.saver import CheckpointSaver, ModelExporter
from slimrl.megatron.checkpoint.start import PolicyStart
from slimrl.megatron.checkpoint.state import CheckpointFolder, TrainingState
from slimrl.megatron.model.micro_batch import MicroBatch, pack_micro_batch
from slimrl.megatron.model.model_builder import OF_VALUE_MODEL, CustomModel, build_stages, build_value_stages
from slimrl.megatron.offload import State, memory_of
from slimrl.megatron.ref_model import ReferenceWeights
from slimrl.megatron.teacher import Teacher
from slimrl.megatron.training.advantages import (
    RolloutData,
    TrainingHooks,
    after_initialization,
    build_train_inputs,
)
from slimrl.megatron.training.critic import Critic, ValueColumns
from slimrl.megatron.training.forward_step import (
    LogProbConfig,
    TrainTensors,
    forward_backward,
    layer_tokens_by_count,
    layers_add_losses,
)
from slimrl.megatron.training.kl_controller import KLController
from slimrl.megatron.training.log_prob_passes import LogProbPasses, RolloutLogProbs
from slimrl.megatron.training.loss.loss_sums import LossSums
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, PolicyLossHooks
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.megatron.training.reporting.diagnostics import (
    ACTOR,
    LOG_PROBS,
    OVERALL,
    MemoryHistory,
    PartProfiler,
    save_train_data,
)
from slimrl.megatron.training.reporting.memory_report import MemoryReport
from slimrl.megatron.training.reporting.train_metrics import PhaseTimes, reduce_step, rollout_metrics, step_counts
from slimrl.megatron.training.step_loss import StepLoss
from slimrl.megatron.training.trained_model import TrainedModel, describe_trained_parameters, freeze_parameters
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.tracer import Timeline

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """One rank of training.

    Public state: `start_rollout_id` (the first rollout to train on), `data_state` (as saved with the checkpoint
    that was resumed, else None), `parallel`, `stages` (the unwrapped GPTModels of this rank: one, or one per virtual
    stage). `memory` offloads and onloads all of it; an offloaded trainer raises on train and save. `memory_report`
    measures it. `rollout_metrics` has means and speeds of the last rollout; `held_out` evaluates held-out data and is
    None with a policy loss.
    """

    def __init__(
        self,
        args: Arguments,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        init_method: str | dist.Store,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        timeline: Timeline | None = None,
    ):
        """Opens the process groups, builds and loads everything; collective over `world_size` processes.

        `train` calls `on_progress(done, total)` at the start of every micro-batch, in each of its passes.

        Raises FileNotFoundError if neither --load nor --ref-load contains a checkpoint.
        """
        self.hook_args: RunArguments = args
        self._algorithm: AlgorithmArguments = args
        self._checkpoints: CheckpointArguments = args
        self._length_multiple = args.data_pad_size_multiplier * args.tensor_model_parallel_size
        self._layers_add_losses = layers_add_losses(args)
        self._rollouts: RolloutArguments = args
        self._log_correct_samples = args.log_correct_samples
        self._dump_template = args.save_debug_train_data
        self._spec = ModelSpec.from_args(args)
        self._on_progress = on_progress
        self._timeline = timeline if timeline is not None else Timeline.off()
        self._profiler = PartProfiler(args, rank, args.run_dir)
        self._memory_history = MemoryHistory(args, rank)
        self.parallel = parallel.initialize(
            args,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            init_method=init_method,
            timeout_minutes=args.distributed_timeout_minutes,
        )
        for flag in config.kernels_without_effect(args) if rank == 0 else ():
            logger.warning("%s is unavailable on this machine: falling back to the reference kernel", flag)
        if rank == 0:
            patches.warn(args, self.parallel.device)
        after_initialization(args.custom_megatron_init_path, self.hook_args)
        built = args
        if args.trains_reward_model:
            built = dataclasses.replace(args, **OF_VALUE_MODEL)
            self.stages = build_value_stages(built, self.parallel)
        else:
            self.stages = build_stages(args, self.parallel, CustomModel.from_args(args))
        self._start = PolicyStart(args, self._spec, self.stages, self.parallel, args.trains_reward_model)
        teacher = Teacher.from_args(args, self._spec, self.stages, self.parallel)  # before the weights that stay loaded
        reference, resumed = self._load_weights()
        freeze_parameters(args, self.stages)
        self._critic_only_rollouts = args.num_critic_only_steps if args.use_critic else 0
        self._policy = TrainedModel.build(built, self.stages, self.parallel, reference, self._critic_only_rollouts)
        self._reference, self._wrapped = self._policy.reference, self._policy.wrapped
        self.optimizer, self.scheduler = self._policy.optimizer, self._policy.scheduler
        self._times = PhaseTimes(self.parallel.device)
        self._kl = KLController(args, self.parallel.device)
        self._critic: Critic | None = None
        if args.use_critic and not args.eval_only:
            self._critic = Critic(args, self.parallel, resumed, self._times, self._timeline)
        self.rollout_metrics: dict[str, float] = {}
        self.start_rollout_id, self.data_state = self._resume(resumed)
        self.memory_report = MemoryReport(
            lambda tokens: training_memory(args, tokens=tokens), self._wrapped, self.optimizer, self.parallel
        )
        trained = [self._policy, *([] if self._critic is None else [self._critic.model])]
        self.memory = memory_of(
            [stage for model in trained for stage in model.wrapped],
            [model.optimizer for model in trained],
            self.parallel.device,
            release=lambda: self.release_saved(),
            offloads=bool(args.offload_train),
            suspends=args.offload_train_nccl,
            paired_stages=args.overlap_p2p_comm and args.virtual_pipeline_model_parallel_size is not None,
        )
        self._log_prob_settings = LogProbConfig.from_args(args, self.parallel)
        self._loss_settings = PolicyLossConfig.from_args(args, PolicyLossHooks.from_args(args, self.hook_args))
        self._hooks = TrainingHooks(args, self._wrapped, self.optimizer, self.scheduler, self.hook_args)
        self._passes = LogProbPasses(
            plan=PassPlan.from_args(args),
            stages=self._wrapped,
            reference=self._reference,
            teacher=teacher.sharded(self._wrapped),
            settings=self._log_prob_settings,
            hooks=self._hooks,
            parallel=self.parallel,
            times=self._times,
            timeline=self._timeline,
            with_entropy=args.use_rollout_entropy,
        )
        self._loss = StepLoss.from_args(
            args, self._loss_settings, self._passes, self._wrapped, self._pack, self.hook_args
        )
        self.held_out = self._loss.held_out
        beside = [] if self._critic is None or args.critic_save is None else [Path(args.critic_save)]
        self._saver = CheckpointSaver(
            background=args.async_save,
            retention=Retention.from_args(args, *beside),
            timeout=datetime.timedelta(minutes=args.distributed_timeout_minutes),
        )
        self._exporter: ModelExporter | None = None
        if args.save_hf is not None:
            parts = (Path(args.hf_checkpoint), self._spec, self.stages, self.parallel)
            self._exporter = ModelExporter(args.save_hf, *parts, value_head=args.trains_reward_model)

    def _load_weights(self) -> tuple[ReferenceWeights | None, CheckpointFolder | None]:
        """Load the reference's weights, then the policy's; also returns the checkpoint to resume from."""
        reference = None
        if self._algorithm.use_reference and not self._rollouts.eval_only:
            self._start.load_reference()
            reference = ReferenceWeights(self.stages)
        return reference, self._start.load_weights(has_reference=reference is not None)

    def _resume(self, found: CheckpointFolder | None) -> tuple[int, dict[str, Any] | None]:
        with_optimizer = not self._rollouts.eval_only
        first, data_state = self._start.resume(self._training_state, found, with_optimizer=with_optimizer)
        return (first if self._rollouts.start_rollout_id is None else self._rollouts.start_rollout_id), data_state

    @functools.cached_property
    def _training_state(self) -> TrainingState:
        state = self._policy.training_state(self.parallel, describe_trained_parameters(self._algorithm))
        return dataclasses.replace(state, numbers=self._kl.numbers)

    def train(self, rollout_id: int, batch: RolloutBatch) -> list[dict[str, float]]:
        """Train on this data-parallel rank's part of one rollout; metrics per optimizer step, equal on every rank.

        `batch` contains the schedule (see `RolloutBatch`). Collective over all ranks. Raises FloatingPointError if
        loss or gradient is not finite (see `NonFiniteGuard`); weights and optimizer are then as before that step.
        Raises CheckpointError if a background save failed.
        """
        with self._profiler.part(OVERALL, rollout_id):
            metrics = self._train(rollout_id, batch)
        self._memory_history.trained()
        return metrics

    def _train(self, rollout_id: int, batch: RolloutBatch) -> list[dict[str, float]]:
        self._saver.poll()
        self.release_saved()
        self.memory.require("training", State.AWAKE)
        with self._times.phase("data_preprocess"):
            steps = [[self._pack(batch, rows) for rows in step] for step in batch.micro_batches]
            mismatched = self._loss.mismatched(batch)
        trains_policy = rollout_id >= self._critic_only_rollouts
        critic_passes = 0 if self._critic is None else 2 * sum(map(len, steps))
        total = (
            critic_passes
            + self._passes.count(rollout_id, steps, mismatched, trains=trains_policy)
            + trains_policy * sum(map(len, steps))
        )
        count = itertools.count(1)

        def advance() -> None:
            self._timeline.mark("micro-batch")
            self._on_progress(next(count), total)

        with self._profiler.part(LOG_PROBS, rollout_id):
            values = None if self._critic is None else self._critic.values(steps, batch, advance)
            scores = self._passes.run(rollout_id, steps, batch, advance, mismatched, trains=trains_policy)
            columns, data = build_train_inputs(
                self._kl.applied_to(self._algorithm),
                self._hooks,
                rollout_id,
                batch,
                scores.train_log_probs,
                scores.ref_log_probs,
                values,
                self.parallel.dp_group,
                self.parallel.device,
                scores.teacher,
            )
        if self._dump_template is not None:
            with_policy = self._algorithm.compute_advantages_and_returns
            save_train_data(self._dump_template, rollout_id, batch, columns, self.parallel, with_policy=with_policy)
        metrics = step_counts(batch)
        if self._critic is not None:
            assert columns.values is not None and columns.returns is not None  # of `build_train_inputs`
            inputs = ValueColumns(columns.values, columns.returns, columns.loss_mask)
            of_critic = self._critic.train(steps, inputs, batch, rollout_id, advance)
            metrics = [counts | own for counts, own in zip(metrics, of_critic, strict=True)]
        if trains_policy:
            of_policy = self._train_policy(rollout_id, steps, batch, columns, data, scores, advance)
            metrics = [other | own for own, other in zip(of_policy, metrics, strict=True)]
        self._passes.teacher.release()
        self.rollout_metrics = self._report(batch, columns, scores)
        if trains_policy:
            self._kl.after_rollout(self.rollout_metrics, sum(batch.samples_per_step))
        return metrics

    def _train_policy(
        self,
        rollout_id: int,
        steps: list[list[MicroBatch]],
        batch: RolloutBatch,
        columns: TrainTensors,
        data: RolloutData | None,
        scores: RolloutLogProbs,
        advance: Callable[[], None],
    ) -> list[dict[str, float]]:
        """The policy's optimizer steps; metrics of each."""
        metrics = []
        part = self._profiler.part(ACTOR, rollout_id)
        with part, self._times.phase("actor_train"), data_parallel.overlapped_param_gather(self._wrapped):
            for number, micro_batches in enumerate(steps):
                samples = batch.samples_per_step[number]
                with self.memory_report.step(), self._timeline.span("forward and backward", optimizer_step=number):
                    self._policy.begin_step()
                    self._hooks.before_step(rollout_id, number)
                    sums_of = self._loss.sums_of(batch, columns, data, scores, number, advance)
                    sums = self._accumulate(micro_batches, columns, sums_of, samples, advance)
                scores.complete(micro_batches, self.parallel)
                where = f"rollout {rollout_id}, optimizer step {number}"
                with self._timeline.span("optimizer step", optimizer_step=number):
                    step = reduce_step(sums, self._loss_settings, self.parallel)
                    step |= self._policy.step(step["loss"], where, lambda: columns.broken_samples(batch))
                if self._reference is not None and columns.ref_log_probs is None:
                    step.pop("kl_loss", None)  # absent, since it was not computed for this rollout
                metrics.append(step)
                self.memory_report.note(micro_batches)
        return metrics

    def _report(self, batch: RolloutBatch, columns: TrainTensors, scores: RolloutLogProbs) -> dict[str, float]:
        returns = columns.returns if self._hooks.advantages is None else None
        return rollout_metrics(
            self._algorithm,
            self._spec,
            batch,
            columns,
            returns,
            scores.entropy,
            self._times.take(),
            self.parallel,
            log_correct_samples=self._log_correct_samples,
            scored_rows=scores.scored_rows,
        )

    def _pack(self, batch: RolloutBatch, rows: list[int]) -> MicroBatch:
        return pack_micro_batch(
            batch,
            rows,
            length_multiple=self._length_multiple,
            device=self.parallel.device,
            context_rank=self.parallel.cp_rank,
            context_size=self.parallel.cp_size,
        )

    def _accumulate(
        self,
        micro_batches: list[MicroBatch],
        columns: TrainTensors,
        sums_of: Callable[[Tensor, MicroBatch], LossSums],
        samples: int,
        advance: Callable[[], None],
    ) -> list[LossSums]:
        """Accumulate the gradient of one optimizer step; `samples` counts those of all ranks."""
        weight = None
        if self._layers_add_losses:
            count = None if self._loss_settings.per_token else samples
            weight = layer_tokens_by_count(
                self.stages[0].config, micro_batches, columns.loss_mask, count, self.parallel
            )
        return forward_backward(self._wrapped, micro_batches, self._loss.scores, sums_of, advance, by_tokens=weight)

    def save(self, rollout_id: int, data_state: dict[str, Any] | None, save_dir: Path | None = None) -> Path:
        """Write the checkpoint that resumes at `rollout_id + 1` into `save_dir` (--save); returns its folder.

        Collective; only rank 0's `data_state` is saved, other ranks may pass None. The checkpoint is written completely
        or not at all, with --async-save in the background. Raises ValueError if there is no folder, and CheckpointError
        as `CheckpointSaver.save` does.
        """
        self.memory.require("saving a checkpoint", State.AWAKE)
        root = save_dir if save_dir is not None else self._checkpoints.save
        if root is None:
            raise ValueError("no folder to save to: give --save")
        saved_with = None
        if self._critic is not None:
            self._saver.finish()  # of both: the critic's next save may not begin before
            saved_with = self._critic.save(Path(root), rollout_id)
        return self._saver.save(
            Path(root),
            rollout_id,
            lambda: state.take_snapshot(
                self._training_state,
                rollout_id,
                data_state,
                with_optimizer=not self._checkpoints.no_save_optim,
                saved_with=saved_with,
            ),
            None if self._exporter is None else functools.partial(self._exporter.export, rollout_id),
            after=(lambda: None) if self._critic is None else self._critic.saver.finish,
        )

    def release_saved(self) -> None:
        """Wait until weights and optimizer states may change."""
        self._saver.release()
        if self._critic is not None:
            self._critic.saver.release()

    def finish_saves(self) -> None:
        """Wait for background saves. Raises CheckpointError on every rank if one rank failed."""
        self._saver.finish()

    def close(self) -> None:
        """Finish saving and destroy the process groups; the trainer cannot be used afterwards."""
        self._saver.close()
        if self._critic is not None:
            self._critic.saver.close()
        self._memory_history.close()
        self.memory.close()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        parallel.shutdown()
