"""The training worker: one rank's model, optimizer and schedule, from flags to saved checkpoints.

Promises that a rollout is trained on the same way in every layout, and that a resumed run continues bit for bit.
Needs no Ray: started once per process, with the same calls in the same order on every rank.
"""

from __future__ import annotations

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
from slimrl.arguments.checkpoints import is_hf_model
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron import config, data_parallel, parallel, patches
from slimrl.megatron.checkpoint import state
from slimrl.megatron.checkpoint.saver import CheckpointSaver, ModelExporter
from slimrl.megatron.checkpoint.state import CheckpointFolder, TrainingState, load_first_weights
from slimrl.megatron.model.micro_batch import MicroBatch, pack_micro_batch
from slimrl.megatron.model.model_builder import build_stages
from slimrl.megatron.offload import State, memory_of
from slimrl.megatron.optimizer import build_optimizer
from slimrl.megatron.ref_model import ReferenceWeights
from slimrl.megatron.training.custom_loss import CheckedCustomLoss
from slimrl.megatron.training.forward_step import (
    LogProbConfig,
    TrainTensors,
    compute_scores,
    forward_backward,
    layer_tokens,
)
from slimrl.megatron.training.freeze import freeze_parameters, trained_weights
from slimrl.megatron.training.loss import PolicyLossConfig
from slimrl.megatron.training.loss_metrics import PolicyLossSums
from slimrl.megatron.training.memory_report import MemoryReport
from slimrl.megatron.training.nonfinite_guard import NonFiniteGuard
from slimrl.megatron.training.profiling import ACTOR, LOG_PROBS, OVERALL, MemoryHistory, PartProfiler
from slimrl.megatron.training.train_dump import save_train_data
from slimrl.megatron.training.train_inputs import (
    RolloutData,
    TrainingHooks,
    after_initialization,
    judged,
    token_returns,
)
from slimrl.megatron.training.train_metrics import PhaseTimes, reduce_step, rollout_report
from slimrl.observability.tracer import Timeline

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """One rank of training.

    Public state: `start_rollout_id` (the first rollout to train on), `data_state` (as saved with the checkpoint
    that was resumed, else None), `parallel`, `stages` (the bare GPTModels of this rank: one, but for virtual stages).
    `memory` puts all of it to sleep and wakes it; a trainer that sleeps refuses to train and to save. `memory_report`
    has how much it was. `rollout_report` has means and speeds of the rollout trained on last (`rollout_means`).
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

        `on_progress(done, total)` hears of every micro-batch that `train` begins, in any of its passes.

        Raises FileNotFoundError where neither --load nor --ref-load holds a checkpoint.
        """
        self.args = args
        self._on_progress = on_progress
        self._timeline = timeline if timeline is not None else Timeline.off()
        self._profiler = PartProfiler(args, rank)
        self._memory_history = MemoryHistory(args, rank)
        self.parallel = parallel.initialize(
            args, rank=rank, world_size=world_size, local_rank=local_rank, init_method=init_method
        )
        for flag in config.kernels_without_effect(args) if rank == 0 else ():
            logger.warning("%s asks for what this machine does not have: the plain computation is done instead", flag)
        if rank == 0:
            patches.warn(args, self.parallel.device)
        after_initialization(args)
        self.stages = build_stages(args, self.parallel)
        self._reference: ReferenceWeights | data_parallel.ShardedReference | None = self._load_reference()
        resumed = self._load_weights()
        freeze_parameters(args, self.stages)
        self._wrapped = data_parallel.wrap(args, self.stages, self.parallel.device)
        self._reference = data_parallel.follow(self._reference, self._wrapped)
        data_parallel.connect(self._wrapped)
        self.optimizer = build_optimizer(args, self._wrapped)
        data_parallel.gather(self._wrapped)
        self.stages[0].config.grad_scale_func = self.optimizer.scale_loss
        self.scheduler = config.parameter_scheduler(args, self.optimizer)
        self._times = PhaseTimes(self.parallel.device)
        self.rollout_report: dict[str, float] = {}
        self._guard = NonFiniteGuard(args, self.optimizer, self.stages, self.parallel)
        self.start_rollout_id, self.data_state = self._resume(resumed)
        self.memory_report = MemoryReport(args, self._wrapped, self.optimizer, self.parallel)
        self.memory = memory_of(args, self._wrapped, self.optimizer, self.parallel.device)
        self._log_prob_settings = LogProbConfig.from_args(args, self.parallel)
        self._loss_settings = PolicyLossConfig.from_args(args)
        self._hooks = TrainingHooks(args, self._wrapped, self.optimizer, self.scheduler)
        self._own_loss = CheckedCustomLoss(args, self._log_prob_settings) if self._loss_settings.own else None
        self._saver = CheckpointSaver.from_args(args)
        self._exporter = None if args.save_hf is None else ModelExporter(args, self.stages, self.parallel)

    def _load_reference(self) -> ReferenceWeights | None:
        if not self.args.use_reference or self.args.only_evaluates:
            return None
        self._load_from_ref_load()
        return ReferenceWeights(self.stages)

    def _load_from_ref_load(self) -> None:
        if self.args.ref_load is None:
            raise FileNotFoundError(
                f"--load {self.args.load} holds no checkpoint and --ref-load is not given: convert the model with"
                " tools/convert_hf_to_torch_dist.py and give its folder as --ref-load"
            )
        self._load_first(self.args.ref_load, self.args.ref_ckpt_step)

    def _load_first(self, folder: str, step: int | None) -> None:
        load_first_weights(self.args, self.stages, self.parallel, Path(folder), step)

    def _load_weights(self) -> CheckpointFolder | None:
        """Load the policy's weights; the checkpoint to resume from, None for a fresh start."""
        if self.args.load is not None and is_hf_model(Path(self.args.load)):
            self._load_first(self.args.load, None)
            return None
        found = state.find_checkpoint(self.args.load, self.args.ckpt_step)
        if found is None:
            if self._reference is None:  # with a reference its weights, the same ones, are in place
                self._load_from_ref_load()
            return None
        state.load_stages(self.stages, found.path)
        return None if self.args.finetune or found.iteration is None else found

    def _resume(self, found: CheckpointFolder | None) -> tuple[int, dict[str, Any] | None]:
        first, data_state = 0, None
        if found is not None:
            data_state = state.load_training_state(
                self._training_state(),
                found,
                load_optimizer=not self.args.no_load_optim and not self.args.only_evaluates,
                load_random_state=not self.args.no_load_rng,
            )
            first = found.iteration + 1
        if self.args.start_rollout_id is not None:
            first = self.args.start_rollout_id
        return first, data_state

    def _training_state(self) -> TrainingState:
        chosen = trained_weights(self.args)
        return TrainingState(self.stages, self.optimizer, self.scheduler, self.parallel, chosen)

    def train(self, rollout_id: int, batch: RolloutBatch) -> list[dict[str, float]]:
        """Train on this data-parallel rank's share of one rollout; metrics per optimizer step, equal on every rank.

        `batch` holds the schedule (see `RolloutBatch`). Collective over all ranks. Raises FloatingPointError where
        loss or gradient is not finite, as `NonFiniteGuard` says; weights and optimizer are as before that step then.
        Raises CheckpointError where a save failed in the background.
        """
        with self._profiler.part(OVERALL, rollout_id):
            metrics = self._train(rollout_id, batch)
        self._memory_history.trained()
        return metrics

    def _train(self, rollout_id: int, batch: RolloutBatch) -> list[dict[str, float]]:
        self._saver.poll()
        self.memory.require("training", State.AWAKE)
        with self._times.phase("data_preprocess"):
            steps = [[self._pack(batch, rows) for rows in step] for step in batch.micro_batches]
        everything = [micro_batch for step in steps for micro_batch in step]
        passes = 1 + self.args.compute_advantages_and_returns + (self._reference is not None)
        count = itertools.count(1)

        def advance() -> None:
            self._timeline.mark("micro-batch")
            self._on_progress(next(count), passes * len(everything))

        with self._profiler.part(LOG_PROBS, rollout_id):
            columns, data, entropy = self._columns(rollout_id, batch, everything, advance)
        if self.args.save_debug_train_data is not None:
            save_train_data(self.args, rollout_id, batch, columns, self.parallel)
        metrics = []
        part = self._profiler.part(ACTOR, rollout_id)
        with part, self._times.phase("actor_train"), data_parallel.weights_gathered_late(self._wrapped):
            for number, micro_batches in enumerate(steps):
                samples = batch.samples_per_step[number]
                with self.memory_report.step(), self._timeline.span("forward and backward", optimizer_step=number):
                    self._begin_step(rollout_id, number)
                    sums = self._accumulate(micro_batches, columns, data, samples, advance)
                where = f"rollout {rollout_id}, optimizer step {number}"
                with self._timeline.span("optimizer step", optimizer_step=number):
                    step = self._step(sums, where, lambda: columns.broken_samples(batch))
                metrics.append(step | {"samples": float(samples), "global_batch_size": float(samples)})
                self.memory_report.note(micro_batches)
        self.rollout_report = self._report(batch, columns, entropy)
        return metrics

    def _report(self, batch: RolloutBatch, columns: TrainTensors, entropy: Tensor | None) -> dict[str, float]:
        args, returns = self.args, None
        if args.compute_advantages_and_returns and self._hooks.advantages is None:
            returns = token_returns(args, batch, columns.train_log_probs, columns.ref_log_probs)
        return rollout_report(args, batch, columns, returns, entropy, self._times.take(), self.parallel)

    def _pack(self, batch: RolloutBatch, rows: list[int]) -> MicroBatch:
        multiple = self.args.data_pad_size_multiplier * self.parallel.tp_size
        return pack_micro_batch(
            batch,
            rows,
            length_multiple=multiple,
            device=self.parallel.device,
            context_rank=self.parallel.cp_rank,
            context_size=self.parallel.cp_size,
        )

    def _columns(
        self, rollout_id: int, batch: RolloutBatch, micro_batches: list[MicroBatch], advance: Callable[[], None]
    ) -> tuple[TrainTensors, RolloutData | None, Tensor | None]:
        """Everything the loss needs that does not change during the rollout's optimizer steps (see `judged`).

        And with --use-rollout-entropy the entropy at each response token.
        """

        def scores(store_prefix: str, with_entropy: bool = False) -> list[Tensor]:
            self._hooks.before_log_probs(store_prefix)
            length = batch.loss_mask.numel()
            name = f"{store_prefix}log_probs"
            with self._times.phase(name), self._timeline.span(name):
                return compute_scores(
                    self._wrapped,
                    micro_batches,
                    self._log_prob_settings,
                    length,
                    self.parallel,
                    advance,
                    with_entropy=with_entropy,
                )

        train_log_probs = ref_log_probs = entropy = None
        if self.args.compute_advantages_and_returns:
            if self._reference is not None:
                with self._reference.loaded_weights():
                    (ref_log_probs,) = scores("ref_")
            train_log_probs, *rest = scores("", self.args.use_rollout_entropy)
            entropy = rest[0] if rest else None
        parallel = self.parallel
        columns, data = judged(
            self.args,
            self._hooks,
            rollout_id,
            batch,
            train_log_probs,
            ref_log_probs,
            parallel.dp_group,
            parallel.device,
        )
        return columns, data, entropy

    def _begin_step(self, rollout_id: int, step_id: int) -> None:
        self._guard.begin()
        # Both are needed: the first clears the reduction buffers, the second the parameters' own gradients.
        for stage in self._wrapped:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._hooks.before_step(rollout_id, step_id)

    def _accumulate(
        self,
        micro_batches: list[MicroBatch],
        columns: TrainTensors,
        data: RolloutData | None,
        samples: int,
        advance: Callable[[], None],
    ) -> list[PolicyLossSums]:
        """The gradient of one optimizer step of so many samples, over all ranks."""
        own_loss = None
        if self._own_loss is not None:
            own_loss = functools.partial(self._own_loss.sums, columns=columns, data=data)
        return forward_backward(
            self._wrapped,
            micro_batches,
            columns,
            self._log_prob_settings,
            self._loss_settings,
            advance,
            by_tokens=self._weight_of_loss(micro_batches, columns, samples) if self._layers_add_losses() else None,
            own_loss=own_loss,
        )

    def _step(self, sums: list[PolicyLossSums], where: str, broken_inputs: Callable[[], list[str]]) -> dict[str, float]:
        """The optimizer step, unless something is not finite (see `NonFiniteGuard`); the metrics of the whole step."""
        metrics = reduce_step(sums, self._loss_settings, self.parallel)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        taken, norm = self._guard.step(metrics["loss"], where, broken_inputs)
        if taken:
            self.scheduler.step(1)
        metrics |= {f"lr-pg_{number}": rate for number, rate in enumerate(rates)}
        return metrics | {"grad_norm": norm, "lr": rates[0], "skipped": float(not taken)}

    def _layers_add_losses(self) -> bool:
        """True where routers have losses of their own, for balance or for small logits."""
        args = self.args
        return args.num_experts is not None and (any(args.moe_aux_loss_coeff) or bool(args.moe_z_loss_coeff))

    def _weight_of_loss(self, micro_batches: list[MicroBatch], columns: TrainTensors, samples: int) -> float:
        """Tokens that a layer sees in a step by what the loss is divided by; collective over data-parallel ranks.

        Trained tokens are counted here: a function of the user's may have changed the masks.
        """
        seen = sum(layer_tokens(self.stages[0].config, micro_batch) for micro_batch in micro_batches)
        trained = torch.stack([columns.loss_mask[part.response_index].count_nonzero() for part in micro_batches]).sum()
        totals = torch.stack([torch.full_like(trained, seen), trained])
        dist.all_reduce(totals, group=self.parallel.dp_group)
        seen, trained = totals.tolist()
        return seen / max(trained if self._loss_settings.per_token else samples, 1)

    def save(self, rollout_id: int, data_state: dict[str, Any] | None, save_dir: Path | None = None) -> Path:
        """Write the checkpoint that resumes at `rollout_id + 1` into `save_dir` (--save); returns its folder.

        Collective; `data_state` is rank 0's, others may give None. The checkpoint appears whole or not at all, with
        --async-save while the trainer continues. Raises ValueError where no folder is given, CheckpointError as
        `CheckpointSaver.save`.
        """
        self.memory.require("saving a checkpoint", State.AWAKE)
        root = save_dir if save_dir is not None else self.args.save
        if root is None:
            raise ValueError("there is no folder to save to: give --save")
        return self._saver.save(
            Path(root),
            rollout_id,
            lambda: state.take_snapshot(
                self._training_state(),
                rollout_id,
                data_state,
                with_optimizer=not self.args.no_save_optim,
                copy=self.args.async_save,
            ),
            None if self._exporter is None else lambda: self._exporter.export(rollout_id),
        )

    def finish_saves(self) -> None:
        """Wait for what --async-save writes. Raises CheckpointError, on every rank, where it failed on one."""
        self._saver.finish()

    def close(self) -> None:
        """Finish saving and leave the process groups; the trainer is of no use afterwards."""
        self._saver.close()
        self._memory_history.close()
        self.memory.close()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        parallel.shutdown()
