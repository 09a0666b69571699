"""The state of a training rank after its last complete rollout, which its data-parallel peers can take over.

Between rollouts, and within one until the first optimizer step, the live weights and optimizer state are those after
the last complete rollout. `report` ends that rank's training where it is: from then on whatever would change them
raises StateTakenError. It is called by a thread of its own, since the main thread may wait in a collective for a lost
rank, and `read` then returns the state, also that of an offloaded rank and of one whose model has the reference's
weights at the moment. Nothing is copied in training but what a pass may change: buffers, controllers, and generators,
which the data-parallel peers also exchange, since each may have advanced its own by another number of steps.

`restore` fills a newly built rank, of the same flags and layout, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from slimrl.megatron.checkpoint import state as generators
from slimrl.megatron.offload import TrainingMemory
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import ReferenceWeights
from slimrl.megatron.training.trained_model import TrainedModel

# Replaced by others of other lengths, and with Transformer Engine of another type, where they are used.
_ROTARY_TABLES = frozenset({"cos_cached", "sin_cached"})
_LOCK_S = 2.0  # wait for the lock, beside a copy of the weights that its holder may make
_COPIED_PER_S = 4e9  # bytes per second of such a copy, at least


class StateTakenError(RuntimeError):
    """The rank's state was taken over; the rank is about to be replaced."""


class Saves(Protocol):
    """The saves of the rank's checkpoints."""

    @property
    def completed(self) -> int | None: ...


@dataclasses.dataclass(frozen=True)
class RestoredModel:
    """A model with the numbers that a checkpoint saves with it, which are restored in place."""

    model: TrainedModel
    numbers: dict[str, float]


@dataclasses.dataclass(frozen=True)
class _Boundary:
    """What passes may change, as it was after a rollout."""

    first: int  # the next rollout
    buffers: dict[str, Tensor]
    numbers: list[dict[str, float]]
    random: dict[int, dict[str, Any]]  # by rank, of the data-parallel peers
    ready: torch.cuda.Event | None  # after the last step on the device


class StepState:
    """The state of one rank; `given` is what `read` of a peer returned, for a rank that replaces another."""

    def __init__(self, given: Any = None) -> None:
        """`given` is bytes."""
        self.given = given
        self._lock = threading.Lock()
        self._held: Sequence[RestoredModel] = ()
        self._swapped: Sequence[ReferenceWeights] = ()
        self._boundary: _Boundary | None = None
        self._taken = False
        self._covered: Sequence[ReferenceWeights] = ()  # in the model's place when the state was taken
        self._why = "is not loaded yet"  # while the live state is not that of the boundary; "" when it is

    def follow(
        self,
        held: Sequence[RestoredModel],
        parallel: ParallelState,
        memory: TrainingMemory,
        swapped: Sequence[object],
        saves: Saves,
        first: int,
    ) -> None:
        """Begins with the state before rollout `first`; collective over the data-parallel peers.

        `swapped` are the other weights that passes put in place of the model's: of those, `ReferenceWeights` do so.
        """
        self._held, self._parallel, self._memory, self._saves = held, parallel, memory, saves
        self._swapped = [weights for weights in swapped if isinstance(weights, ReferenceWeights)]
        for one in held:
            one.model.guard.before_change = self.change
        for weights in self._swapped:
            weights.exclusive, weights.before_change = self._exclusive, self.change
        memory.moving = self._moving
        self.given = None
        self.complete(first)

    def complete(self, first: int) -> None:
        """The state is now that before rollout `first`; collective over the data-parallel peers."""
        if not self._held:
            return
        ready = None
        if self._parallel.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        boundary = _Boundary(
            first,
            {name: buffer.detach().clone() for name, buffer in _buffers(self._held)},
            [dict(one.numbers) for one in self._held],
            self._exchanged(),
            ready,
        )
        with self._exclusive():
            self._boundary, self._why = boundary, ""

    def _exchanged(self) -> dict[int, dict[str, Any]]:
        own, group = {self._parallel.rank: generators.capture()}, self._parallel.dp_cp_group
        of_peers: list[Any] = [own]
        if group.size() > 1:
            of_peers = [None] * group.size()
            dist.all_gather_object(of_peers, own, group=group)
        return {rank: random for one in of_peers for rank, random in one.items()}

    def change(self) -> None:
        """Before weights or optimizer change. Raises StateTakenError after `report`."""
        with self._exclusive():
            if self._boundary is not None:
                self._why = f"was in an optimizer step of rollout {self._boundary.first}"

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            if self._taken:
                raise StateTakenError("this rank's state was taken over by its replacement")
            yield

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """While memory is moved."""
        with self._exclusive():
            before, self._why = self._why, "was being offloaded or onloaded"
        yield
        with self._exclusive():
            self._why = before

    def report(self) -> tuple[int | None, str, int | None]:
        """Ends the changes of the state, and says whether it is whole; may be called by another thread.

        Returns the rollout that the state is before; None if it is not whole, and then why, which continues a sentence
        that begins with the rank; and the rollout of the newest checkpoint that this process knows to be complete.
        """
        copied = sum(weights.host_bytes for weights in self._swapped)
        if not self._lock.acquire(timeout=_LOCK_S + copied / _COPIED_PER_S):
            return None, "was exchanging its weights", None
        try:
            if not self._taken:
                # their copies of the model's weights stay as they are, also if the main thread puts these back later
                self._covered = [weights for weights in self._swapped if weights.loaded]
            self._taken = True
            first = None if self._why or self._boundary is None else self._boundary.first
            return first, self._why, self._saves.completed if self._held else None
        finally:
            self._lock.release()

    @property
    def nbytes(self) -> int:
        """The size of the state, apart from a few numbers."""
        states = [state for _, part in _parts(self._held) for state in part.optimizer.state.values()]
        values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        known = {id(tensor): tensor for _, tensor in (*_weights(self._held), *_buffers(self._held))}
        for _, part in _parts(self._held):
            known |= {id(parameter): parameter for parameter in _parameters(part)}
        references = sum(tensor.nbytes for weights in self._changing for tensor in weights.tensors)
        return references + sum(tensor.nbytes for tensor in (*known.values(), *values))

    @property
    def _changing(self) -> list[ReferenceWeights]:
        """The reference, if it is not that of the run's start for ever."""
        return [weights for weights in self._swapped if weights.changes]

    @torch.no_grad()
    def read(self) -> memoryview:
        """The state in bytes, for `StepState` of another rank with the same part of the model, after a whole `report`.

        May be called by another thread.
        """
        boundary = self._boundary
        assert self._taken and not self._why and boundary is not None
        with self._own_stream(boundary):
            content = {
                "first": boundary.first,
                "weights": {name: self._value(tensor) for name, tensor in _weights(self._held)},
                "buffers": {name: buffer.cpu() for name, buffer in boundary.buffers.items()},
                "optimizers": {name: self._of_optimizer(part) for name, part in _parts(self._held)},
                "schedulers": [one.model.scheduler.state_dict() for one in self._held],
                "numbers": boundary.numbers,
                "random": boundary.random,
                "reference": [value for weights in self._changing for value in weights.values()],
            }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return buffer.getbuffer()

    @contextlib.contextmanager
    def _own_stream(self, boundary: _Boundary) -> Iterator[None]:
        """The stream of training may never end: it may contain a collective with the lost rank."""
        if boundary.ready is None:
            yield
            return
        with torch.cuda.device(self._parallel.device), torch.cuda.stream(torch.cuda.Stream()) as stream:
            for event in (boundary.ready, *(weights.restored for weights in self._swapped)):
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
            del stream
            yield

    def _value(self, tensor: Tensor) -> Tensor:
        for weights in self._covered:
            if (own := weights.own_value(tensor)) is not None:
                return own
        return self._memory.read(tensor)

    def _of_optimizer(self, part: MegatronOptimizer) -> dict[str, Any]:
        weights = {id(tensor) for _, tensor in _weights(self._held)}
        parameters = []
        for parameter in _parameters(part):
            state = part.optimizer.state.get(parameter, {})
            values = {name: self._plain(value) for name, value in state.items()}
            own = None if id(parameter) in weights else self._value(parameter)  # a copy in higher precision
            parameters.append((own, values))
        groups = [{name: self._plain(value) for name, value in _settings(group)} for group in _groups(part)]
        scaler = {name: self._plain(value) for name, value in _scaler(part).items()}
        return {"parameters": parameters, "groups": groups, "scaler": scaler}

    def _plain(self, value: Any) -> Any:
        return self._memory.read(value) if isinstance(value, Tensor) else value

    @torch.no_grad()
    def restore(self, held: Sequence[RestoredModel], rank: int, reference: object = None) -> int:
        """Fills new models from `given`, and a `reference` that changes; returns the rollout that the state is before.

        Generators continue, too. Raises ValueError if it is the state of other models.
        """
        content = torch.load(io.BytesIO(self.given), map_location="cpu", weights_only=True)
        for name, found in (("weights", dict(_weights(held))), ("buffers", dict(_buffers(held)))):
            if found.keys() != content[name].keys():
                other = ", ".join(sorted(found.keys() ^ content[name].keys())[:5])
                raise ValueError(f"the state of the peer has other {name}: {other}")
            for key, tensor in found.items():
                tensor.copy_(content[name][key])
        for name, part in _parts(held):
            _restore_optimizer(part, content["optimizers"][name])
        for one, scheduler, numbers in zip(held, content["schedulers"], content["numbers"], strict=True):
            one.model.scheduler.load_state_dict(scheduler)
            one.numbers.update(numbers)
        if isinstance(reference, ReferenceWeights) and reference.changes:
            reference.restore(content["reference"])
        generators.restore(content["random"][rank])
        return int(content["first"])


def _weights(held: Sequence[RestoredModel]) -> Iterator[tuple[str, Tensor]]:
    return _named(held, lambda stage: stage.named_parameters())


def _buffers(held: Sequence[RestoredModel]) -> Iterator[tuple[str, Tensor]]:
    """All but latent attention's rotary tables: each rank computes them, as long as its samples need."""
    for name, tensor in _named(held, lambda stage: stage.named_buffers()):
        if name.rpartition(".")[2] not in _ROTARY_TABLES:
            yield name, tensor


def _named(
    held: Sequence[RestoredModel], of: Callable[[Any], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    for model, one in enumerate(held):
        for number, stage in enumerate(one.model.stages):
            for name, tensor in of(stage):
                yield f"{model}.{number}.{name}", tensor


def _parts(held: Sequence[RestoredModel]) -> Iterator[tuple[str, Any]]:
    """The optimizers with parameters on this rank."""
    for model, one in enumerate(held):
        parts = getattr(one.model.optimizer, "chained_optimizers", [one.model.optimizer])
        for number, part in enumerate(parts):
            if part.optimizer is not None:
                yield f"{model}.{number}", part


def _groups(part: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = part.optimizer.param_groups
    return groups


def _parameters(part: Any) -> Iterator[Tensor]:
    for group in _groups(part):
        yield from group["params"]


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those that are state: rates, and the step count of a fused Adam."""
    for name, value in group.items():
        if name != "params" and isinstance(value, int | float | Tensor):
            yield name, value


def _scaler(part: Any) -> dict[str, Any]:
    scaler = getattr(part, "grad_scaler", None)
    return {} if scaler is None else scaler.state_dict()


def _restore_optimizer(part: Any, content: dict[str, Any]) -> None:
    parameters = list(_parameters(part))
    for parameter, (own, values) in zip(parameters, content["parameters"], strict=True):
        if own is not None:
            parameter.copy_(own)
        state = part.optimizer.state[parameter]
        for name, value in values.items():
            _set(state, name, value, parameter.device)
    for group, settings in zip(_groups(part), content["groups"], strict=True):
        for name, value in settings.items():
            _set(group, name, value, None)
    if content["scaler"]:
        part.grad_scaler.load_state_dict(content["scaler"])


def _set(state: dict[str, Any], name: str, value: Any, device: torch.device | None) -> None:
    """In place; what an optimizer creates in its first step is created here."""
    if isinstance(state.get(name), Tensor):
        state[name].copy_(value)
    else:
        state[name] = value.to(device) if isinstance(value, Tensor) and device is not None else value
