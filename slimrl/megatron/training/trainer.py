"""The training worker: one rank's model, optimizer and schedule, from flags to saved checkpoints.

Guarantees that every parallel layout trains a rollout with the same result, and that a resumed run continues bit for
bit. Does not need Ray: one trainer per process; every rank makes the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from slimrl.arguments import Arguments
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.arguments.flags.checkpoint import CheckpointArguments
from slimrl.arguments.flags.rollout import RolloutArguments
from slimrl.arguments.memory import training_memory
from slimrl.data.train_batch import RolloutBatch
from slimrl.hooks.contracts import RunArguments
from slimrl.megatron import config, parallel, patches
from slimrl.megatron.checkpoint import state
from slimrl.megatron.checkpoint.folder import CheckpointFolder
from slimrl.megatron.checkpoint.saver import AdapterExporter, Awaited, CheckpointSaver, MergedExporter, ModelExporter
from slimrl.megatron.checkpoint.start import PolicyStart
from slimrl.megatron.checkpoint.state import TrainingState
from slimrl.megatron.data_parallel import GatheredWeights
from slimrl.megatron.model.micro_batch import MicroBatchPacker
from slimrl.megatron.model.model_builder import OF_VALUE_MODEL, CustomModel, build_stages, build_value_stages
from slimrl.megatron.offload import State, TrainingMemory, memory_of
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import BaseReference, PrecomputedReference, ReferenceWeights
from slimrl.megatron.training.advantages import TrainingHooks, after_initialization
from slimrl.megatron.training.critic import VALUES, Critic, SampleColumns
from slimrl.megatron.training.forward_step import LogProbConfig, layers_add_losses
from slimrl.megatron.training.log_prob_passes import LogProbPasses, Teacher
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, PolicyLossHooks
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.megatron.training.policy_rollout import EntropyController, KLController, PolicyParts, PolicyRollout
from slimrl.megatron.training.profiling import LOG_PROBS, OVERALL, MemoryHistory, MemoryReport, PartProfiler
from slimrl.megatron.training.step_loss import StepLoss
from slimrl.megatron.training.step_state import RestoredModel, StepState
from slimrl.megatron.training.train_metrics import PhaseTimes
from slimrl.megatron.training.trained_model import TrainedModel, describe_trained_parameters, freeze_parameters
from slimrl.models.adapters import ADAPTERS_BESIDE, AdapterConfig
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

    _precomputed: PrecomputedReference | None = None  # of `_load_weights`
    _rollout: PolicyRollout | None = None  # between `score` and `train_scored`

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
        state: StepState | None = None,
    ):
        """Opens the process groups, builds and loads everything; collective over `world_size` processes.

        `train` calls `on_progress(done, total)` at the start of every micro-batch, in each of its passes. The trainer
        begins with what `state` was given, in place of a checkpoint, and keeps its own state known to it.

        Raises FileNotFoundError if neither --load nor --ref-load contains a checkpoint.
        """
        self.hook_args: RunArguments = args
        self._algorithm: AlgorithmArguments = args
        self._checkpoints: CheckpointArguments = args
        self._rollouts: RolloutArguments = args
        self._spec = ModelSpec.from_args(args)
        self._state = StepState() if state is None else state
        self._on_progress = on_progress
        self._timeline = timeline if timeline is not None else Timeline.off()
        self._memory_history = MemoryHistory(args, rank)
        self.parallel = parallel.initialize(
            args,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            init_method=init_method,
            timeout_minutes=args.distributed_timeout_minutes,
        )
        _warn_of_kernels(args, self.parallel)
        after_initialization(args.custom_megatron_init_path, self.hook_args)
        self.stages = _build_stages(args, self.parallel)
        self._start = PolicyStart.from_args(args, self._spec, self.stages, self.parallel)
        teacher = Teacher.from_args(args, self._spec, self.stages, self.parallel)  # before the weights that stay loaded
        self._policy, resumed = self._load_policy(args)
        teacher = teacher.sharded(self._policy.wrapped)
        self.optimizer, self.scheduler = self._policy.optimizer, self._policy.scheduler
        times = PhaseTimes(self.parallel.device)
        self._kl = KLController(args, self.parallel.device)
        self._entropy = EntropyController(args, self.parallel.device, self._kl.numbers)
        self._critic = self._critic_of_same_ranks(args, resumed, times)
        self.start_rollout_id, self.data_state = self._resume(resumed)
        self.memory_report = self._report_of_memory(args, teacher)
        self.memory = self._memory_of_models(args)
        self._parts = self._parts_of_rollouts(args, teacher, times)
        self.held_out = self._parts.loss.held_out
        self._open = contextlib.ExitStack()  # the profile of a rollout
        self.rollout_metrics: dict[str, float] = {}
        self._checkpoints_of_critic = Path(args.critic_save) if args.critic_save is not None else None
        self._saver, self._exporter = self._open_saver(args), self._open_exporter(args)
        if state is not None:
            swapped = (self._policy.reference, teacher.weights)
            state.follow(self._held, self.parallel, self.memory, swapped, self._saver, self.start_rollout_id)

    def _load_policy(self, args: Arguments) -> tuple[TrainedModel, CheckpointFolder | None]:
        """Loads the weights and makes the stages trainable; also returns the checkpoint to resume from."""
        reference, resumed = self._load_weights()
        freeze_parameters(args, self.stages)
        self._trained_weights = describe_trained_parameters(args, args)
        model = TrainedModel.build(
            _of_model(args), self.stages, self.parallel, reference, args.critic_only_rollouts, updates_engines=True
        )
        return model, resumed

    def _load_weights(self) -> tuple[ReferenceWeights | BaseReference | None, CheckpointFolder | None]:
        """Loads the reference's weights, then the policy's; also returns the checkpoint to resume from."""
        reference: ReferenceWeights | BaseReference | None = None
        if self._algorithm.use_reference and not self._rollouts.eval_only:
            self._start.load_reference(at_resume=self._state.given is None)
            self._precomputed = self._start.precomputed_reference()
            changes, is_base = self._algorithm.ref_update_interval is not None, self._start.adapters is not None
            reference = BaseReference(self.stages) if is_base else ReferenceWeights(self.stages, changes=changes)
        if self._state.given is not None:  # `_resume` replaces the weights
            return reference, None
        return reference, self._start.load_weights(has_reference=reference is not None)

    def _critic_of_same_ranks(
        self, args: Arguments, resumed: CheckpointFolder | None, times: PhaseTimes
    ) -> Critic | None:
        if not args.use_critic or args.eval_only or args.critic_num_gpus:
            return None
        return Critic(args, self.parallel, resumed, times, self._timeline)

    def _report_of_memory(self, args: Arguments, teacher: Teacher) -> MemoryReport:
        return MemoryReport(
            lambda tokens: training_memory(args, tokens=tokens),
            self._policy,
            self.parallel,
            critic=None if self._critic is None else self._critic.model,
            host_models=[model for model in (self._policy.reference, teacher.weights) if model is not None],
        )

    def _memory_of_models(self, args: Arguments) -> TrainingMemory:
        """The memory of the policy and of a critic in this rank."""
        trained = [self._policy, *([] if self._critic is None else [self._critic.model])]
        stages = [stage for model in trained for stage in model.wrapped]
        return memory_of(
            stages,
            [model.optimizer for model in trained],
            self.parallel.device,
            gathered=GatheredWeights(stages),
            release=lambda: self.release_saved(),
            offloads=bool(args.offload_train),
            suspends=args.offload_train_nccl,
            paired_stages=args.overlap_p2p_comm and args.virtual_pipeline_model_parallel_size is not None,
        )

    def _parts_of_rollouts(self, args: Arguments, teacher: Teacher, times: PhaseTimes) -> PolicyParts:
        """The passes, the loss and the functions of the user that every rollout runs."""
        policy = self._policy
        hooks = TrainingHooks(args, policy.wrapped, policy.optimizer, policy.scheduler, self.hook_args)
        passes = LogProbPasses(
            plan=PassPlan.from_args(args),
            stages=policy.wrapped,
            reference=policy.reference,
            teacher=teacher,
            settings=LogProbConfig.from_args(args, self.parallel),
            hooks=hooks,
            parallel=self.parallel,
            times=times,
            timeline=self._timeline,
            with_entropy=args.use_rollout_entropy,
            precomputed=self._precomputed,
        )
        pack = MicroBatchPacker.of_rank(args, args, self.parallel)
        settings = PolicyLossConfig.from_args(args, PolicyLossHooks.from_args(args, self.hook_args))
        return PolicyParts(
            algorithm=args,
            spec=self._spec,
            policy=policy,
            loss=StepLoss.from_args(args, settings, passes, policy.wrapped, pack, self.hook_args),
            passes=passes,
            hooks=hooks,
            kl=self._kl,
            entropy=self._entropy,
            pack=pack,
            parallel=self.parallel,
            times=times,
            timeline=self._timeline,
            profiler=PartProfiler(args, self.parallel.rank, args.run_dir),
            memory_report=self.memory_report,
            critic_only_rollouts=args.critic_only_rollouts,
            layers_add_losses=layers_add_losses(args),
            log_correct_samples=args.log_correct_samples,
            dump_template=args.save_debug_train_data,
        )

    def _open_saver(self, args: Arguments) -> CheckpointSaver:
        beside = [self._checkpoints_of_critic] if args.use_critic and self._checkpoints_of_critic else []
        return CheckpointSaver.from_args(args, beside, args.distributed_timeout_minutes)

    def _open_exporter(self, args: Arguments) -> ModelExporter | AdapterExporter | MergedExporter | None:
        if args.save_hf is None:
            return None
        adapters, folder = AdapterConfig.from_args(args), args.save_hf.rstrip("/")
        peft = folder + ADAPTERS_BESIDE if args.lora_merge else folder
        ours = (Path(args.hf_checkpoint), self._spec, self.stages, self.parallel)
        beside = None if adapters is None else AdapterExporter(peft, adapters, *ours)
        if beside is not None and not args.lora_merge:
            return beside
        model = ModelExporter(folder, *ours, value_head=args.trains_reward_model)
        return model if beside is None else MergedExporter(model, beside)

    def _resume(self, found: CheckpointFolder | None) -> tuple[int, dict[str, Any] | None]:
        if self._state.given is not None:
            return self._state.restore(self._held, self.parallel.rank, self._policy.reference), None
        with_optimizer = not self._rollouts.eval_only
        first, data_state = self._start.resume(self._training_state, found, with_optimizer=with_optimizer)
        return (first if self._rollouts.start_rollout_id is None else self._rollouts.start_rollout_id), data_state

    @property
    def _held(self) -> list[RestoredModel]:
        """What another rank takes over of this one."""
        critic = self._critic
        of_critic = [] if critic is None else [RestoredModel(critic.model, critic.state.numbers)]
        return [RestoredModel(self._policy, self._kl.numbers), *of_critic]

    @functools.cached_property
    def _training_state(self) -> TrainingState:
        state = self._policy.training_state(self.parallel, self._trained_weights)
        return dataclasses.replace(state, numbers=self._kl.numbers)

    def train(self, rollout_id: int, batch: RolloutBatch) -> list[dict[str, float]]:
        """Train on this data-parallel rank's part of one rollout; metrics per optimizer step, equal on every rank.

        `batch` contains the schedule (see `RolloutBatch`). Collective over all ranks. Raises FloatingPointError if
        loss or gradient is not finite (see `NonFiniteGuard`); weights and optimizer are then as before that step.
        Raises CheckpointError if a background save failed.
        """
        with self._parts.profiler.part(OVERALL, rollout_id):
            rollout = self._begin(rollout_id, batch)
            values = None
            with self._parts.profiler.part(LOG_PROBS, rollout_id):
                if self._critic is not None:
                    values = self._critic.values(rollout.steps, batch, rollout.advance)
                rollout.score()
                rollout.prepare(values)
            rollout.dump()
            of_critic: list[dict[str, float]] = []
            if self._critic is not None:
                of_critic = self._critic.train(rollout.steps, rollout.value_columns, batch, rollout_id, rollout.advance)
            metrics = rollout.train(of_critic)
        self._state.complete(rollout_id + 1)
        return self._trained(rollout, metrics)

    def score(self, rollout_id: int, batch: RolloutBatch) -> None:
        """The first of three parts of `train`, beside a critic on GPUs of its own: the log-probability passes."""
        part = self._parts.profiler.part(OVERALL, rollout_id)
        self._open.enter_context(part)
        self._rollout = self._begin(rollout_id, batch)
        with self._parts.profiler.part(LOG_PROBS, rollout_id):
            self._rollout.score()

    def prepare(self, values: Sequence[SampleColumns]) -> SampleColumns:
        """The second part: advantages from the critic's `values`; returns the columns that it is trained on."""
        rollout = self._rollout
        assert rollout is not None  # of `score`
        rollout.prepare(SampleColumns.of_batch(values, rollout.batch, self.parallel.device)[VALUES])
        rollout.dump()
        return SampleColumns.of_critic(rollout.batch, rollout.value_columns)

    def train_scored(self) -> list[dict[str, float]]:
        """The third part: the optimizer steps. Raises as `train`."""
        rollout, self._rollout = self._rollout, None
        assert rollout is not None  # of `score`
        metrics = rollout.train()
        self._open.close()
        return self._trained(rollout, metrics)

    def _begin(self, rollout_id: int, batch: RolloutBatch) -> PolicyRollout:
        self._saver.poll()
        self.release_saved()
        self.memory.require("training", State.AWAKE)
        return PolicyRollout(self._parts, rollout_id, batch, self._on_progress, 0 if self._critic is None else 2)

    def _trained(self, rollout: PolicyRollout, metrics: list[dict[str, float]]) -> list[dict[str, float]]:
        self.rollout_metrics = rollout.metrics
        self._memory_history.trained()
        return metrics

    def save(
        self,
        rollout_id: int,
        data_state: dict[str, Any] | None,
        save_dir: Path | None = None,
        saved_with: str | None = None,
    ) -> Path:
        """Write the checkpoint that resumes at `rollout_id + 1` into `save_dir` (--save); returns its folder.

        Collective; only rank 0's `data_state` is saved, other ranks may pass None. The checkpoint is written completely
        or not at all, with --async-save in the background. `saved_with` is that of the critic's checkpoint, which other
        ranks write into --critic-save: this one becomes complete after it. Raises ValueError if there is no folder, and
        CheckpointError as `CheckpointSaver.save` does.
        """
        self.memory.require("saving a checkpoint", State.AWAKE)
        root = save_dir if save_dir is not None else self._checkpoints.save
        if root is None:
            raise ValueError("no folder to save to: give --save")
        beside: Awaited | None = None
        if saved_with is not None and self._checkpoints_of_critic is not None:
            beside = Awaited(self._checkpoints_of_critic, rollout_id, saved_with)
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
            awaited=beside,
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


def _warn_of_kernels(args: Arguments, parallel_state: ParallelState) -> None:
    """Rank 0 logs which kernels of the flags its machine lacks, and which parts of GPU training are slower for it."""
    if parallel_state.rank != 0:
        return
    for flag in config.kernels_without_effect(args):
        logger.warning("%s is unavailable on this machine: falling back to the reference kernel", flag)
    patches.warn(args, parallel_state.device)


def _of_model(args: Arguments) -> Arguments:
    """The flags of the trained model; those of a reward model are a critic's."""
    return dataclasses.replace(args, **OF_VALUE_MODEL) if args.trains_reward_model else args


def _build_stages(args: Arguments, parallel_state: ParallelState) -> list[GPTModel]:
    if args.trains_reward_model:
        return build_value_stages(_of_model(args), parallel_state)
    return build_stages(args, parallel_state, CustomModel.from_args(args))
