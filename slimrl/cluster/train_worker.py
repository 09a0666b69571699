"""The Ray actor around one training rank: it holds a MegatronTrainer and pushes its weights to the engines."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef

from slimrl.arguments import Arguments
from slimrl.cluster import process_log


@dataclasses.dataclass(frozen=True)
class TrainWorkerInfo:
    """Who a train worker is, for messages and for finding its log."""

    rank: int
    node_ip: str
    pid: int
    log_path: Path

    def describe_death(self, error: Exception | None) -> str:
        """The message of this worker's death, from what Ray knows and from its own log."""
        cause = " ".join(str(error).split()) if error else "unknown cause"
        return (
            f"train worker rank {self.rank} (pid {self.pid} on {self.node_ip}) died: {cause}\n"
            f"last lines of {self.log_path}:\n{process_log.last_lines(self.log_path)}"
        )


@ray.remote(concurrency_groups={"watch": 1, "progress": 1})
class TrainWorker:
    """One rank of training. Methods of the default group run one after another; `watch` never returns."""

    def __init__(self, args: Arguments, rank: int, world_size: int, log_path: Path) -> None:
        process_log.redirect_to(log_path, args.log_level)
        self._args = args
        self._rank = rank
        self._world_size = world_size
        self._log_path = log_path

    def info(self) -> TrainWorkerInfo:
        """Where this worker runs."""
        return TrainWorkerInfo(self._rank, ray.util.get_node_ip_address(), os.getpid(), self._log_path)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Stays pending while this process lives."""
        threading.Event().wait()

    def free_address(self) -> str:
        """`tcp://host:port` of this node for torch.distributed's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def initialize(self, init_method: str) -> tuple[int, dict[str, Any] | None]:
        """Joins the process group, builds and loads the model; returns the first rollout id and the data state."""
        from slimrl.megatron.trainer import MegatronTrainer

        self._trainer = MegatronTrainer(
            self._args, rank=self._rank, world_size=self._world_size, local_rank=0, init_method=init_method
        )
        return self._trainer.start_rollout_id, self._trainer.data_state

    def connect_engines(self, endpoints: list[Any]) -> None:
        """Prepares pushing weights to these engines (collective over all train workers)."""
        from slimrl.weights.sync import WeightUpdater

        self._updater = WeightUpdater.create(self._args, self._trainer.parallel, endpoints)

    def train(self, rollout_id: int, batches: list[ObjectRef]) -> list[dict[str, float]]:
        """Trains on this rank's share of a rollout; metrics per optimizer step, equal on every rank."""
        batch = ray.get(batches[self._trainer.parallel.dp_rank])
        return self._trainer.train(rollout_id, batch)

    def update_weights(self, version: str, check_equal: bool) -> dict[str, float]:
        """Pushes the weights to every engine (collective); returns what it took."""
        report = self._updater.push(self._trainer.model, version=version, check_equal=check_equal)
        return dataclasses.asdict(report)

    def save(self, rollout_id: int, data_state: dict[str, Any]) -> str:
        """Writes the checkpoint of `rollout_id` (collective); returns its folder."""
        return str(self._trainer.save(rollout_id, data_state))

    def close(self) -> None:
        """Leaves the process groups."""
        self._trainer.close()
