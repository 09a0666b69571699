"""What a training rank holds between two rollouts, and where it lies: on the device, or in host memory while it sleeps.

Owns the parking of weights, gradients and optimizer state, and the order of states that a rank may be in. Promises that
waking brings every byte of weights and optimizer state back, that every view of them stays a view of the same memory,
and that nothing is used while it is not there. Called by the trainer.

megatron-core's own calls are not used: they move the optimizer's tensors one by one, so that float32 shards end as
copies of weights which they were views of, and move weights only where the optimizer is distributed.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.megatron.communicators import Communicators, open_communicators
from slimrl.megatron.pinned_memory import HostMemory
from slimrl.megatron.rotary import drop_frequencies

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")  # memory that two parts share belongs to the first


class State(enum.Enum):
    """How much of a rank is on its device."""

    AWAKE = "awake"
    WEIGHTS_ONLY = "awake with its weights alone"
    ASLEEP = "asleep"


class AsleepError(RuntimeError):
    """Something was asked of a rank that is not in the state for it."""


@dataclasses.dataclass
class _Parked:
    """Memory that was given up: its size, and its bytes in host memory (None: they need not come back)."""

    storage: torch.UntypedStorage
    size: int
    chunks: list[Tensor] | None


class TrainingMemory:
    """The memory of one rank. Starts awake; `sleep` and `wake` are collective over the ranks of its communicators."""

    def __init__(
        self,
        holdings: Callable[[], Mapping[Part, Iterable[Tensor]]],
        device: torch.device,
        communicators: Communicators,
        drop_scratch: Callable[[], None] = lambda: None,
    ) -> None:
        """`holdings` names what is held now, by part; tensors that lie elsewhere than on `device` stay there.

        `drop_scratch` lets go of memory that is kept only to be used again.
        """
        self._holdings = holdings
        self._device = device
        self._communicators = communicators
        self._drop_scratch = drop_scratch
        self._parked: dict[Part, list[_Parked]] = {}
        self._host = HostMemory(page_locked=device.type == "cuda")
        self.state = State.AWAKE

    def sleep(self, *, keep_weights: bool = False) -> dict[Part, int]:
        """Gives gradients and optimizer state up, and the weights and communicators too unless `keep_weights`.

        Returns the bytes that are off the device now. Raises AsleepError where nothing is left to give up.
        """
        if self.state is State.ASLEEP or (keep_weights and self.state is not State.AWAKE):
            raise AsleepError(f"the training rank cannot go to sleep: it is {self.state.value} already")
        leaving: tuple[Part, ...] = ("gradients", "optimizer") if keep_weights else PARTS
        self._synchronize()
        self._drop_scratch()
        found = self._storages()
        for part in leaving:
            if part not in self._parked:
                self._parked[part] = [self._park(storage, keep=part != "gradients") for storage in found[part]]
        if not keep_weights:
            self._communicators.suspend()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # memory that torch keeps for itself is of no use to an engine
        self.state = State.WEIGHTS_ONLY if keep_weights else State.ASLEEP
        return {part: sum(one.size for one in self._parked[part]) for part in leaving}

    def wake(self) -> None:
        """Takes everything back; gradients are zero. Raises AsleepError where it is awake."""
        if self.state is State.AWAKE:
            raise AsleepError("the training rank cannot be woken: it is awake already")
        if self.state is State.ASLEEP:
            self._communicators.resume()
        for parked in (one for part in PARTS for one in self._parked.pop(part)):
            self._take_back(parked)
        self._synchronize()
        self._host.free()
        self.state = State.AWAKE

    def close(self) -> None:
        """Lets communicators be closed: those that sleep cannot be."""
        if self.state is State.ASLEEP:
            self._communicators.resume()

    def require(self, action: str, *states: State) -> None:
        """Raises AsleepError unless the rank is in one of `states`."""
        if self.state not in states:
            needed = " or ".join(state.value for state in states)
            raise AsleepError(f"{action} needs a training rank that is {needed}, and it is {self.state.value}")

    def _storages(self) -> dict[Part, list[torch.UntypedStorage]]:
        """What is on the device now, each piece of memory once."""
        seen: set[int] = set()
        holdings = self._holdings()
        found: dict[Part, list[torch.UntypedStorage]] = {}
        for part in PARTS:
            found[part] = []
            for storage in (tensor.untyped_storage() for tensor in holdings[part]):
                if storage.device == self._device and storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[part].append(storage)
        return found

    def _park(self, storage: torch.UntypedStorage, *, keep: bool) -> _Parked:
        chunks = None
        if keep:
            chunks = self._host.take(storage.nbytes())
            for chunk, piece in zip(chunks, self._bytes(storage, chunks), strict=True):
                chunk.copy_(piece)
        parked = _Parked(storage, storage.nbytes(), chunks)
        storage.resize_(0)
        return parked

    def _take_back(self, parked: _Parked) -> None:
        parked.storage.resize_(parked.size)
        if parked.chunks is None:
            self._whole(parked.storage).zero_()
            return
        for chunk, piece in zip(parked.chunks, self._bytes(parked.storage, parked.chunks), strict=True):
            piece.copy_(chunk)
        parked.chunks = None

    def _bytes(self, storage: torch.UntypedStorage, chunks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Views of the storage, uint8 each, as long as `chunks`."""
        return self._whole(storage).split([chunk.numel() for chunk in chunks])

    def _whole(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def memory_of(
    args: Arguments, stages: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, device: torch.device
) -> TrainingMemory:
    """The memory of a rank that has just been built, with the communicators of Megatron's groups."""
    paired = args.overlap_p2p_comm and args.virtual_pipeline_model_parallel_size is not None
    # a rank that is never offloaded has nothing to say about its communicators
    suspended = (
        open_communicators(device, suspends=args.offload_train_nccl, paired_stages=paired)
        if args.offload_train
        else Communicators([])
    )
    # where sequence-parallel layers gather their inputs: as large as the longest micro-batch so far
    gathered = parallel_state.get_global_memory_buffer().buffer

    def drop_scratch() -> None:
        gathered.clear()
        drop_frequencies()

    return TrainingMemory(lambda: holdings(stages, optimizer), device, suspended, drop_scratch)


def holdings(stages: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> dict[Part, list[Tensor]]:
    """Every tensor that is kept from one rollout to the next, by part."""
    buffers = [buffer for stage in stages for buffer in (*stage.buffers, *stage.expert_parallel_buffers)]
    parameters = [parameter for stage in stages for parameter in stage.module.parameters()]
    weights = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    weights += parameters
    weights += [tensor for stage in stages for tensor in stage.module.buffers()]
    main = [parameter for adam in _adams(optimizer) for group in adam.param_groups for parameter in group["params"]]
    gradients = [buffer.grad_data for buffer in buffers if buffer.grad_data is not None]
    # shares of a distributed optimizer are no leaves: their gradients are parts of the buffers
    leaves = [parameter for parameter in (*parameters, *main) if parameter.is_leaf]
    gradients += [parameter.grad for parameter in leaves if parameter.grad is not None]
    states = [value for adam in _adams(optimizer) for state in adam.state.values() for value in state.values()]
    kept = [value for value in states if isinstance(value, Tensor)]
    return {"weights": weights, "gradients": gradients, "optimizer": main + kept}


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers inside, those for a part of the weights included."""
    for part in vars(optimizer).get("chained_optimizers", [optimizer]):
        if part.optimizer is None:  # a rank without weights of that kind
            continue
        yield part.optimizer
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield from part.optimizer.sub_optimizers
