"""Replaces lost training ranks: new processes take over the state of the survivors, or load the newest checkpoint.

With --use-fault-tolerance the driver holds the batches of the rollouts that no complete checkpoint contains, in Ray's
object store. When the process of a rank ends, all ranks are replaced, since their process groups cannot continue
without it. The new ones begin with the state of their data-parallel peers (`PeerState`); where these do not have it,
with the newest checkpoint, and repeat the training since then. The servers keep running, with the rollouts in flight,
and get the weights by the next weight update. Where training on a batch is deterministic, the run ends as one without
the loss.

A rank that is lost while it is offloaded is replaced when the ranks are needed next: until then the servers hold the
memory of its GPU. A lost node is replaced by a spare one (`SpareNodes`), with its servers if it had any: the rollout
manager, which starts these, finds the same GPUs, and training waits for a server that is starting before it begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ray import ObjectRef
from ray.exceptions import RayError

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import start_of
from slimrl.cluster.launch import Launch
from slimrl.cluster.nodes.comparison import NodesDifferError
from slimrl.cluster.nodes.watch import SpareNodes
from slimrl.cluster.placement import GpuBundles
from slimrl.cluster.ray_session import InsufficientGpusError
from slimrl.cluster.supervisor import ProcessDiedError, Supervisor, TrainNodeLostError, TrainWorkerDiedError
from slimrl.cluster.training.policy_and_critic import PolicyAndCritic
from slimrl.cluster.training.train_group import NoPeerStateError, PeerState, TrainGroup, take_over
from slimrl.cluster.training.train_worker import NotFiniteError, RankFailedError
from slimrl.weights.update.topology import EngineEndpoint

logger = logging.getLogger("slimrl")

Result = TypeVar("Result")
LOSSES_PER_ROLLOUT = 3  # a rank that is lost more often without a new rollout trained would be lost again
RANKS_LOST, RECOVERY_TIME = "rollout/faults/ranks_lost", "perf/rank_recovery_time"


class _Trained(NamedTuple):
    """A rollout that was trained on: its number, and the batches of each group of ranks."""

    rollout_id: int
    batches: Sequence[list[ObjectRef]]


class TrainRecovery:
    """A `TrainGroup` that survives the loss of ranks: its methods are the group's, after a recovery where needed."""

    def __init__(
        self, group: TrainGroup, args: Arguments, supervisor: Supervisor, spares: SpareNodes | None = None
    ) -> None:
        """Handles the losses of `supervisor` from the end of `initialize` on; without `spares` not those of nodes."""
        self._group = group
        self._spares = spares
        self._args = args
        self._supervisor = supervisor
        self._held: list[_Trained] = []  # in no complete checkpoint of this run
        self._first = 0  # the rollout that the run began with
        self._next = 0  # the first rollout that the ranks have not trained on
        self._peers: PeerState | None = None  # taken over for a replacement that was lost, too
        self._complete: int | None = None  # the rollout of this run's newest complete checkpoint
        self._pending: tuple[int, dict[str, Any] | None] | None = None  # the arguments of the save in the background
        self._endpoints: list[EngineEndpoint] = []
        self._connected = True
        self._keeps_weights: bool | None = None  # of the last `sleep`; None: onloaded
        self._lost: TrainWorkerDiedError | None = None
        self._node_is_lost = False  # and not yet replaced by a spare one
        self._losses = 0  # since the last new rollout that was trained on
        self._restored = 0
        self._metrics = dict.fromkeys((RANKS_LOST, RECOVERY_TIME), 0.0)

    @property
    def updating_weights(self) -> int | None:
        """As in `TrainGroup`."""
        return self._group.updating_weights

    @property
    def last_weight_update(self) -> dict[str, float]:
        """As in `TrainGroup`."""
        return self._group.last_weight_update

    def initialize(self) -> tuple[int, dict[str, Any] | None]:
        """As in `TrainGroup`; a loss before its end ends the run."""
        first, data_state = self._group.initialize()
        self._first = self._next = first
        self._supervisor.set_loss_handler(self._handle)
        if self._spares is not None:
            self._spares.allow()
        return first, data_state

    def connect_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """As in `TrainGroup`."""
        self._endpoints = endpoints
        self._retried(lambda: self._group.connect_engines(endpoints))
        self._connected = True

    def train(
        self, rollout_id: int, batches: Sequence[list[ObjectRef]], progress: Callable[[], None] | None = None
    ) -> list[dict[str, float]]:
        """As in `TrainGroup`; holds the batches until a complete checkpoint contains the rollout."""
        metrics = self._retried(lambda: self._group.train(rollout_id, batches, progress))
        self._held.append(_Trained(rollout_id, batches))
        self._next, self._losses, self._peers = rollout_id + 1, 0, None
        return metrics

    def evaluate_held_out(self) -> dict[str, dict[str, float]]:
        """As in `TrainGroup`."""
        return self._retried(self._group.evaluate_held_out)

    def sleep(self, *, keep_weights: bool) -> None:
        """As in `TrainGroup`; lost ranks are not replaced to be offloaded as a whole."""
        if keep_weights:
            self._retried(lambda: self._group.sleep(keep_weights=True))
        self._keeps_weights = keep_weights
        if not keep_weights and self._lost is None:
            try:
                with self._supervisor.raising_losses():
                    self._group.sleep(keep_weights=False)
            except TrainWorkerDiedError as error:
                self._handle(error)

    def wake(self) -> None:
        """As in `TrainGroup`; new ranks are onloaded already."""
        self._keeps_weights, before = None, self._restored

        def wake() -> None:
            if self._restored == before:
                self._group.wake()

        self._retried(wake)

    def update_weights(self, version: int) -> None:
        """As in `TrainGroup`."""

        def update() -> None:
            if not self._connected:
                self._group.connect_engines(self._endpoints)
                self._connected = True
            self._group.update_weights(version)

        self._retried(update)

    def save(self, rollout_id: int, data_state: dict[str, Any] | None) -> str:
        """As in `TrainGroup`; drops the batches that a complete checkpoint contains."""
        folder = self._retried(lambda: self._group.save(rollout_id, data_state))
        if self._args.async_save:  # a save begins when the one before it is complete
            self._complete = self._complete if self._pending is None else self._pending[0]
            self._pending = rollout_id, data_state
        else:
            self._complete = rollout_id
        self._drop_complete()
        return folder

    def _drop_complete(self) -> None:
        self._held = [trained for trained in self._held if trained.rollout_id >= self._resumes_with]

    @property
    def _resumes_with(self) -> int:
        """The first rollout that no complete checkpoint of this run contains."""
        return self._first if self._complete is None else self._complete + 1

    def memory(self) -> list[ObjectRef]:
        """As in `TrainGroup`."""
        return self._group.memory()

    def progress(self) -> ObjectRef:
        """As in `TrainGroup`."""
        return self._group.progress()

    def close(self) -> None:
        """As in `TrainGroup`. Ranks that are lost now are not replaced: only a save in the background needs them."""
        try:
            if self._lost is not None:
                raise self._lost
            with self._supervisor.raising_losses():
                self._group.leave()
        except TrainWorkerDiedError as error:
            if self._pending is not None:
                raise
            logger.warning("%s; the run is over and saved", _without_log(error))
            self._supervisor.stop_watching()  # the other ranks may wait for the lost one
            self._group.kill()
        else:
            self._group.end()

    def kill(self) -> None:
        """As in `TrainGroup`."""
        self._group.kill()

    def take_metrics(self) -> dict[str, float]:
        """Lost ranks and the time of recoveries since the last call, by full name."""
        found, self._metrics = self._metrics, dict.fromkeys(self._metrics, 0.0)
        return found

    def _handle(self, error: TrainWorkerDiedError) -> None:
        """A loss while the driver waits for something else: offloaded ranks are replaced when they are needed next.

        A lost node is replaced now: its servers start there while the ranks are offloaded.
        """
        self._note(error)
        if self._keeps_weights is None:
            self._retried(lambda: None)
        elif self._node_is_lost:
            with self._naming_failure(error):
                self._take_over_spares()

    def _note(self, error: TrainWorkerDiedError) -> None:
        """The next `_retried` replaces the ranks. Raises ProcessDiedError if ranks are lost again and again."""
        if self._losses == LOSSES_PER_ROLLOUT:
            raise ProcessDiedError(f"ranks were lost {self._losses + 1} times in one rollout: {error}") from error
        logger.warning("%s; new training processes take over", _without_log(error))
        self._losses += 1
        self._metrics[RANKS_LOST] += 1
        self._group.forget()
        self._lost, self._connected = error, False
        self._node_is_lost |= isinstance(error, TrainNodeLostError)

    def _retried(self, action: Callable[[], Result]) -> Result:
        while True:
            try:
                with self._supervisor.raising_losses():
                    if self._lost is not None:
                        self._replace(self._lost)
                    return action()
            except NotFiniteError:
                raise
            except RankFailedError as error:  # perhaps a collective with a lost rank, whose end is not reported yet
                if (lost := self._group.find_lost()) is None:
                    raise
                self._note(lost)
                logger.info("what another rank reported: %s", str(error).split("\n", 1)[0])
            except TrainWorkerDiedError as error:
                self._note(error)

    def _replace(self, error: TrainWorkerDiedError) -> None:
        """Starts all ranks anew, with the state of their peers, or with a checkpoint and the training since.

        Raises ProcessDiedError if they cannot take over.
        """
        started = time.monotonic()
        with self._naming_failure(error):
            why = self._take_over_peers()
            self._take_over_spares()
            source = self._continue_from_peers() if self._peers is not None else None
            if source is None:
                source = self._continue_from_checkpoint(error, why)
            if self._keeps_weights is not None:
                self._group.sleep(keep_weights=self._keeps_weights)
        self._lost = self._peers = None
        self._restored += 1
        seconds = time.monotonic() - started
        self._metrics[RECOVERY_TIME] += seconds
        logger.warning("new training processes continue from %s; %.1f s", source, seconds)

    @contextlib.contextmanager
    def _naming_failure(self, error: TrainWorkerDiedError) -> Iterator[None]:
        """A failure in this block ends the run with the loss `error` before it, unless more ranks are lost."""
        try:
            yield
        except (RankFailedError, InsufficientGpusError, NodesDifferError, RayError) as failure:
            if isinstance(failure, RankFailedError) and (lost := self._group.find_lost()) is not None:
                raise lost from failure
            what = str(failure).split("\n", 1)[0]
            raise ProcessDiedError(f"{_without_log(error)}; its replacement failed: {what}") from failure

    def _take_over_spares(self) -> None:
        if self._spares is not None:
            self._spares.take_over(node_is_lost=self._node_is_lost)
        self._node_is_lost = False

    def _take_over_peers(self) -> str:
        """Takes over the state of the surviving ranks; "" or why it cannot be used."""
        if self._peers is not None:  # and the ranks that it was for are lost
            return ""
        try:
            peers = take_over(self._group, self._args, self._next)
        except NoPeerStateError as error:
            return str(error)
        if self._pending is not None and peers.saved == self._pending[0]:
            self._complete, self._pending = self._pending[0], None
            self._drop_complete()
        if self._pending is not None and self._pending[0] + 1 != self._next:
            return f"the checkpoint after rollout {self._pending[0]} was not complete"
        self._peers = peers
        return ""

    def _continue_from_peers(self) -> str | None:
        """Starts the ranks with the state of the peers; returns what to log, None if that fails."""
        assert self._peers is not None
        try:
            first = self._group.restart(self._args, self._peers.states)
        except RankFailedError as error:
            logger.warning("the state of the peers is not usable: %s", str(error).split("\n", 1)[0])
            return None
        assert first == self._next == self._peers.first
        if self._pending is not None:  # the survivors do not know it to be complete
            self._group.save(*self._pending)
        return f"{self._peers.sentence}; no training had to be repeated"

    def _continue_from_checkpoint(self, error: TrainWorkerDiedError, why: str) -> str:
        """Starts the ranks with the newest checkpoint and repeats the training since; returns what to log."""
        first = self._group.restart(self._newest())
        if self._pending is not None and first == self._pending[0] + 1:  # it is in --load, and was complete
            self._complete, self._pending = self._pending[0], None
            self._drop_complete()
        if first != self._resumes_with:
            raise ProcessDiedError(
                f"{_without_log(error)}; new ranks begin with rollout {first}, the run needs {self._resumes_with}"
            )
        for trained in self._held:
            self._group.train(trained.rollout_id, trained.batches)
            if self._pending is not None and self._pending[0] == trained.rollout_id:
                self._group.save(*self._pending)  # it may have been lost with the ranks
        again = len(self._held)
        repeated = f"{again} rollouts were trained on again" if again else "no training had to be repeated"
        return f"the checkpoint ({why or 'that of the peers failed'}); {repeated}"

    def _newest(self) -> Arguments:
        """The flags with which new ranks load what the run has: its newest checkpoint, or what it started from."""
        if self._complete is None:
            return self._args
        return dataclasses.replace(
            self._args,
            load=self._args.save,
            ckpt_step=self._complete,
            start_rollout_id=None,
            finetune=False,
            no_load_optim=False,
            no_load_rng=False,
        )


Trainers = TrainGroup | TrainRecovery


def start_training(
    args: Arguments, gpus: GpuBundles, supervisor: Supervisor, launch: Launch, spares: SpareNodes
) -> Trainers:
    """The training group of a run, with the critic's ranks if it has GPUs of its own.

    With recovery if --use-fault-tolerance asks for it and the run saves what new ranks need.
    """
    logger.info("%s", start_of(args).sentence)
    kind = PolicyAndCritic if args.critic_num_gpus else TrainGroup
    group = kind(args, gpus, supervisor, launch)
    if not args.use_fault_tolerance or args.eval_only:
        return group
    if args.save is None or not args.save_interval or args.no_save_optim or args.no_save_rng:
        logger.info("a lost training rank ends this run: its recovery needs --save and --save-interval, with all state")
        return group
    return TrainRecovery(group, args, supervisor, spares)


def _without_log(error: Exception) -> str:
    """The message of a death without the last lines of the process's log, which has them too."""
    return str(error).split("; last lines of ", 1)[0]
