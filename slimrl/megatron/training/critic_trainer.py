"""The training worker of a critic on GPUs of its own: one rank, from flags to saved checkpoints.

For each rollout it makes the two calls `values` and `train`; in between the policy's ranks (`MegatronTrainer.score`,
`prepare`) compute what it is trained on. Both groups have the same samples in the same optimizer steps; their
data-parallel sizes may differ. Does not need Ray: one trainer per process; every rank makes the same calls in the same
order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import start_of
from slimrl.arguments.layout import critic_layout
from slimrl.arguments.memory import critic_memory
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron import parallel
from slimrl.megatron.checkpoint.folder import CheckpointFolder
from slimrl.megatron.data_parallel import GatheredWeights
from slimrl.megatron.model.micro_batch import MicroBatch, MicroBatchPacker
from slimrl.megatron.offload import State, memory_of
from slimrl.megatron.training.advantages import after_initialization
from slimrl.megatron.training.critic import Critic, SampleColumns, ValueColumns
from slimrl.megatron.training.profiling import MemoryReport
from slimrl.megatron.training.train_metrics import PhaseTimes
from slimrl.observability.tracer import Timeline


class CriticTrainer:
    """One rank of the critic.

    Public state: `start_rollout_id` (the first rollout to train on), `parallel`, `critic`, and `memory`, which offloads
    and onloads all of it. `memory_report` measures it.
    """

    data_state: dict[str, Any] | None = None  # the policy's checkpoint has it

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
        """Opens the process groups, builds and loads the critic; collective over `world_size` processes.

        `on_progress(done, total)` is called at the start of every micro-batch, of both calls of a rollout. Raises as
        `Critic`.
        """
        own = critic_layout(args)
        self._on_progress = on_progress
        self._policy_root = None if args.save is None else Path(args.save)
        self.parallel = parallel.initialize(
            own,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            init_method=init_method,
            timeout_minutes=args.distributed_timeout_minutes,
        )
        after_initialization(args.custom_megatron_init_path, args)
        start = start_of(args)
        resumed = None
        if start.resumed and start.weights is not None:
            resumed = CheckpointFolder(start.weights.folder, start.weights.iteration)
        self.start_rollout_id = start.first_rollout
        self._times, self._timeline = PhaseTimes(self.parallel.device), timeline or Timeline.off()
        self.critic = Critic(own, self.parallel, resumed, self._times, self._timeline, own_ranks=True)
        # its routers are not replayed
        self._pack = dataclasses.replace(MicroBatchPacker.of_rank(own, own, self.parallel), routing=None)
        self.memory = memory_of(
            self.critic.model.wrapped,
            [self.critic.model.optimizer],
            self.parallel.device,
            gathered=GatheredWeights(self.critic.model.wrapped),
            release=lambda: self.critic.saver.release(),
            offloads=bool(args.offload_train),
            suspends=args.offload_train_nccl,
            paired_stages=args.overlap_p2p_comm and args.virtual_pipeline_model_parallel_size is not None,
        )
        self.memory_report = MemoryReport(
            lambda tokens: critic_memory(args, tokens=tokens), self.critic.model, self.parallel
        )
        self._batch: RolloutBatch | None = None  # between `values` and `train`
        self._steps: list[list[MicroBatch]] = []
        self._count = itertools.count(1)

    def values(self, rollout_id: int, batch: RolloutBatch) -> SampleColumns:
        """The values of this data-parallel rank's part of a rollout, before it is trained on.

        Raises CheckpointError if a background save failed.
        """
        self.critic.saver.poll()
        self.critic.saver.release()
        self.memory.require("training", State.AWAKE)
        self._batch, self._steps, self._count = batch, self._pack.steps(batch), itertools.count(1)
        return SampleColumns.of_values(batch, self.critic.values(self._steps, batch, self._advance))

    def train(self, rollout_id: int, inputs: Sequence[SampleColumns]) -> list[dict[str, float]]:
        """Takes the optimizer steps on the policy's columns of the batch of `values`; metrics of each.

        Equal on every rank, except the seconds of the first. Raises FloatingPointError as `Critic.train`.
        """
        batch, self._batch = self._batch, None
        assert batch is not None  # of `values`
        columns = ValueColumns(**SampleColumns.of_batch(inputs, batch, self.parallel.device))
        steps = self.critic.train(self._steps, columns, batch, rollout_id, self._advance, self.memory_report)
        first, *others = steps
        self._steps = []
        return [first | {f"perf/{name}_time": seconds for name, seconds in self._times.take().items()}, *others]

    def _advance(self) -> None:
        self._timeline.mark("micro-batch")
        self._on_progress(next(self._count), 2 * sum(map(len, self._steps)))

    def save(self, rollout_id: int, saved_with: str) -> None:
        """Writes the checkpoint of `rollout_id`, that of the policy with the same `saved_with`; see `Critic.save`."""
        self.memory.require("saving a checkpoint", State.AWAKE)
        if self._policy_root is None:
            raise ValueError("no folder to save to: give --save")
        self.critic.saver.finish()
        self.critic.save(self._policy_root, rollout_id, saved_with)

    def finish_saves(self) -> None:
        """Waits for background saves. Raises CheckpointError on every rank if one rank failed."""
        self.critic.saver.finish()

    def close(self) -> None:
        """Finishes saving and destroys the process groups; the trainer cannot be used afterwards."""
        self.critic.saver.close()
        self.memory.close()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        parallel.shutdown()
