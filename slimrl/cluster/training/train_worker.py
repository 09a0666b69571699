"""The Ray actor of one training rank: starts its process on its GPU, forwards calls, watches."""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import ray
from ray import ObjectRef

from slimrl.cluster.launch import ActorSetup, Launch, RankLocation, Rendezvous
from slimrl.cluster.training.train_messages import StateReport, StateRequests, TrainInit, TrainReady, send_call
from slimrl.cluster.training.train_process import CriticRank, PolicyRank, Rank
from slimrl.cluster.watchdog import RankStatus
from slimrl.platform.launch_env import network_of, rank_environment, usable_cores
from slimrl.processes import ManagedProcess, importable, process_info
from slimrl.processes.process_info import resident_gib
from slimrl.weights.update.topology import EngineEndpoint

if TYPE_CHECKING:
    from slimrl.megatron.offload import Part

POLL_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 10.0

Inputs = TypeVarTuple("Inputs")
Result = TypeVar("Result")
OfRank = TypeVar("OfRank", bound=Rank)


class RankFailedError(RuntimeError):
    """A call failed inside a rank; the text holds the rank's own traceback."""


class NotFiniteError(RankFailedError):
    """A loss or a gradient is not finite: raised on all ranks of its group, which took no optimizer step."""


@ray.remote(concurrency_groups={"watch": 1, "progress": 1, "state": 1})
class TrainWorker:
    """One training rank. Calls run one after another; `watch` stays pending concurrently."""

    def __init__(self, setup: TrainInit, launch: Launch, location: RankLocation, actor: ActorSetup) -> None:
        """Starts the rank's process on the GPU at `location`."""
        actor.enter()
        network = network_of(launch.bind.local_address())
        node = dataclasses.replace(launch.machine, gpus=location.gpus_of_node, cores=usable_cores(), network=network)
        decided = rank_environment(
            node,
            launch.run,
            gpu=location.gpu,
            nccl=launch.nccl,
            given=setup.args.train_env_vars,
            inherited=os.environ | launch.driver,
        )
        self._role, self._rank = setup.role, setup.rank
        self._name = f"{setup.role.worker} rank {setup.rank}"
        self._bind = launch.bind
        self._progress = (0, 0)
        self._device_memory: dict[str, float] = {}
        self._method: str | None = None
        self._last_message = time.monotonic()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        own_requests, requests = socket.socketpair()
        self._requests = StateRequests(Connection(own_requests.detach()))
        ends = (theirs, requests)
        self._process = ManagedProcess(
            [sys.executable, "-m", "slimrl.cluster.training.train_process", *(str(end.fileno()) for end in ends)],
            name=self._name,
            log_path=Path(setup.args.run_dir).absolute() / "logs" / setup.role.log_name(setup.rank),
            environment=decided | importable(os.environ | decided),
            pass_fds=tuple(end.fileno() for end in ends),
        )
        self._process.start()
        for end in ends:
            end.close()
        self._connection.send_bytes(pickle.dumps(setup))

    @ray.method(concurrency_group="watch")
    def watch(self) -> str:
        """Pending while the rank lives; then a message with its exit code and last log lines."""
        while (code := self._process.poll()) is None:
            time.sleep(POLL_INTERVAL_S)
        process = self._process
        return (
            f"{self._name} (pid {process.pid} on {ray.util.get_node_ip_address()}) died with exit"
            f" code {code}; last lines of {process.log_path}:\n{process.last_log_lines(20)}"
        )

    @ray.method(concurrency_group="progress")
    def progress(self) -> tuple[int, int]:
        """(started, total) micro-batches of the running `train`, over all its passes."""
        return self._progress

    @ray.method(concurrency_group="progress")
    def memory(self) -> dict[str, float]:
        """GiB by name: resident memory of the rank and of its actor, and the rank's device memory after its last call.

        See `platform.device_memory`.
        """
        name = self._role.metric(self._rank)
        device = {f"{name}_{kind}": amount for kind, amount in self._device_memory.items()}
        actor = resident_gib(with_children=False)
        return {f"{name}_rss_gib": resident_gib(self._process.pid), f"{name}_actor_rss_gib": actor, **device}

    @ray.method(concurrency_group="progress")
    def status(self) -> RankStatus:
        """The rank's current call and position in the code; also dumps the stacks of its threads to its log."""
        pid = process_info.worker_pid(self._process.pid)
        log = self._process.log_path
        return RankStatus(
            rank=self._rank,
            pid=pid,
            node=ray.util.get_node_ip_address(),
            method=self._method,
            micro_batch=self._progress[0],
            micro_batches=self._progress[1],
            seconds=time.monotonic() - self._last_message,
            state="gone" if pid is None else process_info.state(pid),
            frames=[] if pid is None else process_info.frames_of(pid, log),
            log=os.fspath(log),
        )

    @ray.method(concurrency_group="state")
    def report_state(self) -> StateReport | None:
        """Whether the rank's state can be taken over; it can only be replaced afterwards. None if it has ended."""
        return self._requests.report()

    @ray.method(num_returns=2, concurrency_group="state")
    def read_state(self) -> tuple[bytes, None]:
        """The state after `report_state`, which stays in the object store; the second result is the end of the call."""
        return self._requests.read(), None

    def open_store(self) -> Rendezvous:
        """Opens the rendezvous of all ranks; called on rank 0."""
        return self._call(Rank.open_store, None if self._bind.one_machine else self._bind.local_address())

    def prepare(self) -> None:
        """Imports the modules for training."""
        self._call(Rank.prepare)

    def initialize(self, rendezvous: Rendezvous, state: bytes | None) -> TrainReady:
        """Builds and loads the model in the rank, with the `state` of `read_state` of a peer if given."""
        passed = None if state is None else pickle.PickleBuffer(state)
        return self._call(Rank.initialize, rendezvous, passed)

    def connect_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """Connects to these engines for weight updates, replacing earlier connections."""
        self._call(PolicyRank.connect_engines, endpoints)

    def train(self, rollout_id: int, own: list[ObjectRef]) -> list[dict[str, float]]:
        """Trains on this rank's batch, the one of `own`, which is passed on pickled."""
        return self._call(PolicyRank.train, rollout_id, _batch(own))

    def score(self, rollout_id: int, own: list[ObjectRef]) -> None:
        """`PolicyRank.score` on this rank's batch, as `train`."""
        self._call(PolicyRank.score, rollout_id, _batch(own))

    @ray.method(num_returns=2)
    def targets(self, values: list[ObjectRef]) -> tuple[bytes | None, None]:
        """`PolicyRank.targets` from the critic's `values`.

        The second result tells the driver that the call has ended; the first stays in the object store.
        """
        return self._call(PolicyRank.targets, self._received(values, "the wait for the critic's values")), None

    def train_scored(self) -> list[dict[str, float]]:
        """`PolicyRank.train_scored`."""
        return self._call(PolicyRank.train_scored)

    @ray.method(num_returns=2)
    def values(self, rollout_id: int, own: list[ObjectRef]) -> tuple[bytes | None, None]:
        """`CriticRank.values` on this rank's batch, as `train`; two results as those of `targets`."""
        return self._call(CriticRank.values, rollout_id, _batch(own)), None

    def train_values(self, rollout_id: int, targets: list[ObjectRef]) -> list[dict[str, float]]:
        """`CriticRank.train_values` on the policy's `targets`."""
        columns = self._received(targets, "the wait for the policy's advantages")
        return self._call(CriticRank.train_values, rollout_id, columns)

    def save_critic(self, rollout_id: int, saved_with: str) -> None:
        """`CriticRank.save_critic`."""
        self._call(CriticRank.save_critic, rollout_id, saved_with)

    def evaluate_held_out(self) -> dict[str, dict[str, float]]:
        """The metrics of every set of held-out pairs, by name."""
        return self._call(PolicyRank.evaluate_held_out)

    def sleep(self, keep_weights: bool) -> dict[Part, int]:
        """Offloads the rank, with or without its weights; returns the offloaded bytes by part."""
        return self._call(Rank.sleep, keep_weights)

    def wake(self) -> None:
        """Onloads the rank."""
        self._call(Rank.wake)

    def update_weights(self, version: str, check_equal: bool) -> dict[str, float]:
        """Sends the weights to every engine."""
        return self._call(PolicyRank.update_weights, version, check_equal)

    def save(self, rollout_id: int, data_state: dict[str, Any] | None, saved_with: str | None) -> str:
        """Writes the checkpoint of `rollout_id`, with the data state on rank 0; returns its folder."""
        return self._call(PolicyRank.save, rollout_id, data_state, saved_with)

    def finish_saves(self) -> None:
        """Waits until the checkpoints that are written in the background are complete."""
        self._call(Rank.finish_saves)

    def close(self) -> None:
        """Leaves the process groups."""
        self._call(Rank.close)

    def _call(self, method: Callable[[OfRank, *Inputs], Result], *arguments: *Inputs) -> Result:
        """Calls `method` in the rank's process. Raises RankFailedError with the rank's traceback, or NotFiniteError."""
        name = method.__name__
        self._progress, self._method, self._last_message = (0, 0), name, time.monotonic()
        try:
            send_call(self._connection, method, arguments)
            kind, value = pickle.loads(self._connection.recv_bytes())
            while kind in ("progress", "memory"):
                if kind == "progress":
                    self._progress, self._last_message = value, time.monotonic()
                else:
                    self._device_memory = value
                kind, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RankFailedError(f"{self._name} ended during {name}") from error
        self._method = None
        if kind != "value":
            summary, trace = value
            failed = NotFiniteError if kind == "not finite" else RankFailedError
            raise failed(f"{self._name}, {name}: {summary}\n{trace}")
        return value

    def _received(self, parts: Sequence[ObjectRef], what: str) -> list[pickle.PickleBuffer]:
        """The bytes of each reference, to be passed on as they are; `what` is the wait for them, in a status."""
        self._progress, self._method, self._last_message = (0, 0), what, time.monotonic()
        return [pickle.PickleBuffer(part) for part in ray.get(list(parts))]

    def stop(self) -> None:
        """Ends the rank: its process exits when the connection closes."""
        self._connection.close()
        self._process.stop(timeout_s=STOP_TIMEOUT_S)


def _batch(own: list[ObjectRef]) -> pickle.PickleBuffer:
    """The pickled batch of a reference in a list, which Ray passes on as it is."""
    (reference,) = own
    batch: bytes = ray.get(reference)
    return pickle.PickleBuffer(batch)
