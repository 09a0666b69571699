"""The process of one training rank, `python -m slimrl.cluster.training.train_process FD FD`, driven by its actor.

The rank is a separate process, so that its death has an exit code, its log contains all its output, and Megatron runs
in the main thread.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from slimrl.cluster.launch import Rendezvous, create_store, join_store
from slimrl.cluster.training.train_messages import (
    CRITIC,
    TrainInit,
    TrainReady,
    answer_requests,
    receive_call,
    shares_state,
)
from slimrl.hooks import described
from slimrl.observability.terminal import LOG_FORMAT
from slimrl.observability.tracer import Timeline
from slimrl.platform.launch_env import rank_without_gpu
from slimrl.processes import process_info
from slimrl.processes.child_process import uncollected
from slimrl.processes.files import optional_output

if TYPE_CHECKING:
    from torch.distributed import Store

    from slimrl.arguments import Arguments
    from slimrl.data.train_batch import RolloutBatch
    from slimrl.engines.server_protocol import RunningRequests
    from slimrl.megatron.offload import Part, TrainingMemory
    from slimrl.megatron.parallel import ParallelState
    from slimrl.megatron.training.critic import SampleColumns
    from slimrl.megatron.training.critic_trainer import CriticTrainer
    from slimrl.megatron.training.step_state import StepState
    from slimrl.megatron.training.trainer import MegatronTrainer
    from slimrl.weights.update.weight_updater import WeightUpdater


class Trainer(Protocol):
    """What the trainers of policy and critic have in common; see `MegatronTrainer`."""

    @property
    def parallel(self) -> ParallelState: ...

    @property
    def memory(self) -> TrainingMemory: ...

    @property
    def start_rollout_id(self) -> int: ...

    @property
    def data_state(self) -> dict[str, Any] | None: ...

    def finish_saves(self) -> None: ...

    def close(self) -> None: ...


class Rank(abc.ABC):
    """The calls that the actor forwards to every kind of rank; each is collective over all ranks of its group.

    The actor sends the methods of this class, so subclasses override none of them.
    """

    _trainer: Trainer

    def __init__(self, setup: TrainInit, on_progress: Callable[[int, int], None]) -> None:
        self._setup = setup
        self._on_progress = on_progress
        self.timeline = Timeline.open(setup.args, f"{setup.role.rank} {setup.rank}")
        self.timeline.add_process_start()
        self._store: Store | None = None
        self.state: StepState | None = None  # what other ranks take over, if they do
        self._rendezvous_timeout = datetime.timedelta(minutes=setup.args.distributed_timeout_minutes)

    @abc.abstractmethod
    def _import(self) -> None:
        """Imports the modules for training."""

    @abc.abstractmethod
    def _build(self, store: Store, state: pickle.PickleBuffer | None) -> None:
        """Sets the trainer, which joins the ranks of `store`, and begins with a peer's `state` if there is one."""

    def open_store(self, host: str | None) -> Rendezvous:
        """Opens the rendezvous store of all ranks, on rank 0. `host` as in `launch.create_store`."""
        rendezvous, self._store = create_store(host, self._setup.world_size, self._rendezvous_timeout)
        return rendezvous

    def prepare(self) -> None:
        """Imports the modules for training: takes seconds but no device memory, so engines can start concurrently."""
        with uncollected():
            self._import()

    def initialize(self, rendezvous: Rendezvous, state: pickle.PickleBuffer | None) -> TrainReady:
        """Joins rank 0's store, builds and loads the model and the optimizer; the values are a peer's `state` if given.

        Raises RuntimeError if the run uses GPUs and this rank has none.
        """
        import torch

        setup = self._setup
        why = rank_without_gpu(
            expected=setup.cuda,
            found=torch.cuda.is_available(),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            torch_version=torch.__version__,
        )
        if why is not None:
            raise RuntimeError(why)
        if self._store is None:
            self._store = join_store(rendezvous, setup.world_size, self._rendezvous_timeout)
        self._build(self._store, state)
        trainer = self._trainer
        at = trainer.parallel
        return TrainReady(trainer.start_rollout_id, trainer.data_state, at.dp_rank, at.leads_replica, at.part)

    def sleep(self, keep_weights: bool) -> dict[Part, int]:
        """Offloads this rank, with or without its weights; returns the offloaded bytes by part."""
        return self._trainer.memory.sleep(keep_weights=keep_weights)

    def wake(self) -> None:
        """Onloads this rank."""
        self._trainer.memory.wake()

    def device_memory(self) -> dict[str, float]:
        """GiB by name, see `platform.device_memory`; empty without a GPU."""
        from slimrl import platform

        return platform.device_memory()

    def finish_saves(self) -> None:
        """Waits until the checkpoints that are written in the background are complete."""
        self._trainer.finish_saves()

    def close(self) -> None:
        """Leaves the process groups."""
        self._leave_engines()
        self._trainer.close()

    @abc.abstractmethod
    def _leave_engines(self) -> None:
        """Ends the connections for weight updates, if there are any."""

    def _for_the_others(self, columns: SampleColumns) -> bytes | None:
        """Columns pickled; None if another rank returns them for the same samples."""
        return pickle.dumps(columns) if self._trainer.parallel.leads_replica else None

    def _finishing(self, step: Callable[[], list[dict[str, float]]]) -> list[dict[str, float]]:
        """The metrics of training; pending checkpoints become complete if a value is not finite."""
        try:
            return step()
        except FloatingPointError:
            self._trainer.finish_saves()  # raised on every rank; the pending checkpoint must be complete for a restart
            raise


class PolicyRank(Rank):
    """The calls to a rank of the policy."""

    _trainer: MegatronTrainer

    def __init__(self, setup: TrainInit, on_progress: Callable[[int, int], None]) -> None:
        super().__init__(setup, on_progress)
        self._updater: WeightUpdater | None = None
        self._held_out: dict[str, RolloutBatch] | None = None  # this rank's part of each set, from the first evaluation

    def _import(self) -> None:
        import slimrl.megatron.training.trainer
        import slimrl.weights.update.adapter_updater  # noqa: F401

    def _build(self, store: Store, state: pickle.PickleBuffer | None) -> None:
        from slimrl.megatron.training.step_state import StepState
        from slimrl.megatron.training.trainer import MegatronTrainer

        if shares_state(self._setup.args):
            self.state = StepState(state)
        self._trainer = MegatronTrainer(
            self._setup.args,
            rank=self._setup.rank,
            world_size=self._setup.world_size,
            local_rank=0,
            init_method=store,
            on_progress=self._on_progress,
            timeline=self.timeline,
            state=self.state,
        )

    def connect_engines(self, endpoints: list[Any]) -> None:
        """Connects to these engines for weight updates, replacing earlier connections."""
        from slimrl.weights.update.adapter_updater import create_updater

        if self._updater is not None:
            self._updater.close_collective()
        self._updater = create_updater(self._setup.args, self._trainer.parallel, endpoints, timeline=self.timeline)

    def train(self, rollout_id: int, batch: pickle.PickleBuffer) -> list[dict[str, float]]:
        """Trains on a pickled RolloutBatch.

        Returns metrics per optimizer step; the first also has those of the rollout and of memory.
        """
        return self._reported(lambda: self._trainer.train(rollout_id, pickle.loads(batch)))

    def score(self, rollout_id: int, batch: pickle.PickleBuffer) -> None:
        """Beside a critic on GPUs of its own: the log-probability passes over a pickled RolloutBatch."""
        self._trainer.score(rollout_id, pickle.loads(batch))

    def targets(self, values: list[pickle.PickleBuffer]) -> bytes | None:
        """Pickled columns for the critic, from its pickled values; see `MegatronTrainer.prepare`."""
        return self._for_the_others(self._trainer.prepare([pickle.loads(part) for part in values]))

    def train_scored(self) -> list[dict[str, float]]:
        """The optimizer steps after `targets`; returns as `train`."""
        return self._reported(self._trainer.train_scored)

    def _reported(self, step: Callable[[], list[dict[str, float]]]) -> list[dict[str, float]]:
        first, *others = self._finishing(step)
        return [first | self._trainer.rollout_metrics | self._trainer.memory_report.take(), *others]

    def evaluate_held_out(self) -> dict[str, dict[str, float]]:
        """The metrics of every held-out set, by name."""
        from slimrl.megatron.offload import State

        loss = self._trainer.held_out
        assert loss is not None  # `evaluates_held_out` has checked --loss-type
        self._trainer.memory.require("an evaluation", State.AWAKE)
        self._trainer.release_saved()  # the reference's weights are about to take the place of the policy's
        if self._held_out is None:
            self._held_out = held_out_shares(self._setup.args, self._trainer.parallel)
        return {name: loss.evaluate(share) for name, share in self._held_out.items()}

    def update_weights(self, version: str, check_equal: bool) -> dict[str, float]:
        """Sends the weights to every engine."""
        from slimrl.megatron.offload import State

        self._trainer.memory.require("a weight update", State.AWAKE, State.WEIGHTS_ONLY)
        running: RunningRequests = "retract" if self._setup.args.update_weights_in_flight else "abort"
        assert self._updater is not None  # of `connect_engines`
        report = self._updater.update_weights(
            self._trainer.stages, version=version, check_equal=check_equal, running=running
        )
        return dataclasses.asdict(report)

    def save(self, rollout_id: int, data_state: dict[str, Any] | None, saved_with: str | None) -> str:
        """Writes the checkpoint of `rollout_id`; rank 0 has the data state. `saved_with` as `MegatronTrainer.save`."""
        return str(self._trainer.save(rollout_id, data_state, saved_with=saved_with))

    def _leave_engines(self) -> None:
        if self._updater is not None:
            self._updater.close()


class CriticRank(Rank):
    """The calls to a rank of a critic on GPUs of its own."""

    _trainer: CriticTrainer

    def _import(self) -> None:
        import slimrl.megatron.training.critic_trainer  # noqa: F401

    def _build(self, store: Store, state: pickle.PickleBuffer | None) -> None:
        from slimrl.megatron.training.critic_trainer import CriticTrainer

        self._trainer = CriticTrainer(
            self._setup.args,
            rank=self._setup.rank,
            world_size=self._setup.world_size,
            local_rank=0,
            init_method=store,
            on_progress=self._on_progress,
            timeline=self.timeline,
        )

    def values(self, rollout_id: int, batch: pickle.PickleBuffer) -> bytes | None:
        """The pickled values of a pickled RolloutBatch; see `CriticTrainer.values`."""
        return self._for_the_others(self._trainer.values(rollout_id, pickle.loads(batch)))

    def train_values(self, rollout_id: int, targets: list[pickle.PickleBuffer]) -> list[dict[str, float]]:
        """The optimizer steps on the policy's pickled columns; metrics of each, the first also with those of memory."""
        from slimrl.megatron.training.critic import PREFIX

        columns = [pickle.loads(part) for part in targets]
        first, *others = self._finishing(lambda: self._trainer.train(rollout_id, columns))
        return [first | {PREFIX + name: size for name, size in self._trainer.memory_report.take().items()}, *others]

    def _leave_engines(self) -> None:
        pass  # only the policy's ranks update engines

    def save_critic(self, rollout_id: int, saved_with: str) -> None:
        """Writes the checkpoint of `rollout_id`; see `CriticTrainer.save`."""
        self._trainer.save(rollout_id, saved_with)


def rank_of(setup: TrainInit, on_progress: Callable[[int, int], None]) -> Rank:
    """The rank of a role."""
    return (CriticRank if setup.role == CRITIC else PolicyRank)(setup, on_progress)


def held_out_shares(args: Arguments, parallel: ParallelState) -> dict[str, RolloutBatch]:
    """A data-parallel rank's part of each held-out set, with a schedule; every rank reads the whole files.

    Micro-batches have at most `--max-tokens-per-gpu` tokens, without it as many as the longest of a training batch may.
    Raises ValueError if a row is no pair, or if there are fewer pairs than micro-batches.
    """
    from slimrl.rollout.convert_samples import BatchSchedule
    from slimrl.rollout.dataset.tokenizer import load_tokenizer
    from slimrl.rollout.preference_rollout import held_out_pairs
    from slimrl.rollout.sft_rollout import held_out_conversations

    tokenizer = load_tokenizer(args.hf_checkpoint, trust_code=args.trusts_remote_code)
    training, shares = BatchSchedule.from_args(args), {}
    for dataset in args.eval_datasets:
        batch = (held_out_pairs if args.reads_pairs else held_out_conversations)(args, dataset, tokenizer)
        longest = -(-int(batch.total_lengths.max()) * args.micro_batch_size // parallel.cp_size)
        most = training.max_tokens_per_micro_batch if args.use_dynamic_batch_size else longest
        own = dataclasses.replace(training, global_batch_size=len(batch), max_tokens_per_micro_batch=most)
        shares[dataset.name] = own.divide(batch, parallel.dp_size)[parallel.dp_rank]
    return shares


def serve(connection: Connection, requests: Connection | None = None) -> None:
    """Answers calls `(method of the rank, arguments)` until the end, that the actor closes.

    The answer is `("value", result)`, `("error", texts)`, or `("not finite", texts)` for a loss or gradient.

    Before the answer it may send any number of `("progress", (done, total))`, and on a GPU `("memory", {name: GiB})`.
    `requests` are those of `train_messages`.
    """

    def send_progress(done: int, total: int) -> None:
        connection.send_bytes(pickle.dumps(("progress", (done, total))))

    rank = rank_of(pickle.loads(connection.recv_bytes()), send_progress)
    if requests is not None:
        answer_requests(requests, lambda: rank.state)
    while True:
        try:
            method, arguments = receive_call(connection)
        except EOFError:
            return
        try:
            with rank.timeline.span(method.__name__, **_span_attributes(arguments)):
                answer = ("value", method(rank, *arguments))
            # not after an error: on a failed device every further call raises, and the error would be lost
            if device_memory := rank.device_memory():
                connection.send_bytes(pickle.dumps(("memory", device_memory)))
        except BaseException as error:  # custom code, such as a model's layers, may call sys.exit
            kind = "not finite" if isinstance(error, FloatingPointError) else "error"
            answer = (kind, (described(error), traceback.format_exc()))
        # Plain pickle: multiprocessing's pickler would send tensors as shared-memory handles.
        connection.send_bytes(pickle.dumps(answer))


def _span_attributes(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The timeline attributes of a call: its rollout id or weight version."""
    return {"about": arguments[0]} if arguments and isinstance(arguments[0], int | str) else {}


def main() -> None:
    """Serves the actor at the other end of the sockets whose file descriptors are the arguments."""
    process_info.enable_stack_dump()
    sys.stdout, sys.stderr = optional_output(1), optional_output(2)  # a custom loss function may print
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT)
    serve(*(Connection(int(number)) for number in sys.argv[1:]))


if __name__ == "__main__":
    # the actor's calls pickle methods of this module's classes, not of those of `__main__`
    from slimrl.cluster.training import train_process

    train_process.main()
