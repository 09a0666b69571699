"""Offloads a training rank between rollouts: its weights, gradients, optimizer state and NCCL communicators.

Weights and optimizer state come back bit for bit, every view of them stays a view of the same memory, and gradients
come back as zeros. Using an offloaded rank raises OffloadedError. megatron-core's own offloading is not used: it moves
optimizer tensors one by one, which turns views of the weights into copies, and it moves weights only with a distributed
optimizer.

Host memory is pinned if a GPU is used, in chunks of 64 MiB: the allocator rounds each request up to a power of two,
which would take up to twice a tensor's size. The reference model uses the same host memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from slimrl.megatron.model.layers import drop_frequencies
from slimrl.megatron.parallel import Communicators, open_communicators

CHUNK_BYTES = 64 * 1024**2  # a power of two
_ALIGNMENT = 64  # bytes: any element of any dtype, and a line of the processor's cache


class HostMemory:
    """Memory in chunks of `CHUNK_BYTES`, allocated from front to back; pieces of several tensors share a chunk."""

    def __init__(self, *, page_locked: bool, allocate: Callable[[int], Tensor] | None = None) -> None:
        """`allocate` returns uint8 [bytes]; default: torch's allocator."""
        self._page_locked = page_locked
        self._allocate = allocate or self._new_chunk
        self._chunks: list[Tensor] = []
        self._taken = 0  # bytes from the start of the first chunk

    @property
    def nbytes(self) -> int:
        """Allocated bytes, in use or not."""
        return sum(chunk.numel() for chunk in self._chunks)

    def take(self, size: int) -> list[Tensor]:
        """Pieces, uint8 each, of `size` bytes in total; no element is split over two pieces."""
        pieces = []
        while size:
            number, start = divmod(self._taken, CHUNK_BYTES)
            if number == len(self._chunks):
                self._chunks.append(self._allocate(CHUNK_BYTES))
            length = min(size, CHUNK_BYTES - start)
            pieces.append(self._chunks[number][start : start + length])
            self._taken += -(-length // _ALIGNMENT) * _ALIGNMENT
            size -= length
        return pieces

    def free(self) -> None:
        """Makes every piece available again. Keeps pinned chunks, which are slow to allocate, and frees others."""
        self._taken = 0
        if not self._page_locked:
            self._chunks = []

    def _new_chunk(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._page_locked)


class HostCopy:
    """The values of a list of tensors in host memory; callers must pass the same list each time."""

    def __init__(self, tensors: Iterable[Tensor], memory: HostMemory) -> None:
        """Allocates memory only; `save` copies the values."""
        self._pieces = [memory.take(tensor.numel() * tensor.element_size()) for tensor in tensors]

    @torch.no_grad()
    def save(self, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors' values here; from a GPU the copy completes with the next device synchronisation."""
        for tensor, pieces in zip(tensors, self._pieces, strict=True):
            for source, piece in zip(_cut(_flat(tensor), pieces), pieces, strict=True):
                piece.copy_(source, non_blocking=True)

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copies the values into the tensors, which keep their memory."""
        for number, tensor in enumerate(tensors):
            self.read(number, tensor)

    @torch.no_grad()
    def read(self, number: int, tensor: Tensor) -> None:
        """Copies the values of the tensor with this number into `tensor`, of the same shape and dtype."""
        flat = _flat(tensor)
        for target, piece in zip(_cut(flat, self._pieces[number]), self._pieces[number], strict=True):
            target.copy_(piece, non_blocking=True)
        if not tensor.is_contiguous():  # `flat` is a copy then
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`, uint8 [bytes]: a view if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _cut(flat: Tensor, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return flat.split([piece.numel() for piece in pieces])


Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")  # memory shared by two parts counts as the first


class State(enum.Enum):
    """Which memory of a rank is on its device."""

    AWAKE = "onloaded"
    WEIGHTS_ONLY = "onloaded with its weights only"
    ASLEEP = "offloaded"


class OffloadedError(RuntimeError):
    """An operation is not possible in the rank's offload state."""


@dataclasses.dataclass
class _OffloadedStorage:
    """Freed memory: its size, and its bytes in host memory (None: they are not restored)."""

    storage: torch.UntypedStorage
    size: int
    chunks: list[Tensor] | None


class GatheredWeights(Protocol):
    """Whole weights beside the shards that they are gathered from; both calls are collective over the shards' ranks."""

    def drop(self) -> None: ...

    def gather(self) -> None: ...


class TrainingMemory:
    """The memory of one rank. Starts onloaded; `sleep` and `wake` are collective over its communicators' ranks."""

    def __init__(
        self,
        persistent_tensors: Callable[[], Mapping[Part, Iterable[Tensor]]],
        device: torch.device,
        communicators: Communicators,
        drop_scratch: Callable[[], None] = lambda: None,
        gathered: GatheredWeights | None = None,
    ) -> None:
        """`persistent_tensors` returns the current tensors by part; tensors that are not on `device` are not moved.

        `drop_scratch` is called before anything is moved, and frees cached scratch memory. `gathered` are dropped
        before the weights are offloaded, and gathered anew when they are back.
        """
        self._persistent_tensors = persistent_tensors
        self._device = device
        self._communicators = communicators
        self._drop_scratch = drop_scratch
        self._gathered = gathered
        self._offloaded: dict[Part, list[_OffloadedStorage]] = {}
        self._host = HostMemory(page_locked=device.type == "cuda")
        self.moving: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around every move
        self.state = State.AWAKE

    def sleep(self, *, keep_weights: bool = False) -> dict[Part, int]:
        """Offloads gradients and optimizer state, and, unless `keep_weights`, weights and communicators.

        Returns the offloaded bytes. Raises OffloadedError if there is nothing left to offload.
        """
        if self.state is State.ASLEEP or (keep_weights and self.state is not State.AWAKE):
            raise OffloadedError(f"the training rank cannot be offloaded: it is already {self.state.value}")
        leaving: tuple[Part, ...] = ("gradients", "optimizer") if keep_weights else PARTS
        with self.moving():
            self._sleep(leaving, keep_weights=keep_weights)
        self.state = State.WEIGHTS_ONLY if keep_weights else State.ASLEEP
        return {part: sum(one.size for one in self._offloaded[part]) for part in leaving}

    def _sleep(self, leaving: Sequence[Part], *, keep_weights: bool) -> None:
        self._synchronize()
        self._drop_scratch()
        if self._gathered is not None and not keep_weights:
            self._gathered.drop()
        found = self._storages()
        for part in leaving:
            if part not in self._offloaded:
                self._offloaded[part] = [self._offload(storage, keep=part != "gradients") for storage in found[part]]
        if not keep_weights:
            self._communicators.suspend()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # an engine cannot use memory that torch caches

    def wake(self) -> None:
        """Onloads everything; gradients are zero. Raises OffloadedError if the rank is onloaded."""
        if self.state is State.AWAKE:
            raise OffloadedError("the training rank cannot be onloaded: it is already onloaded")
        with self.moving():
            self._wake(weights_are_back=self.state is State.ASLEEP)
        self.state = State.AWAKE

    def _wake(self, *, weights_are_back: bool) -> None:
        if weights_are_back:
            self._communicators.resume()
        for offloaded in (one for part in PARTS for one in self._offloaded.pop(part, [])):
            self._onload(offloaded)
        self._synchronize()
        self._host.free()
        if self._gathered is not None and weights_are_back:
            self._gathered.gather()

    def read(self, tensor: Tensor) -> Tensor:
        """The value of a persistent, contiguous tensor, also of an offloaded one; a copy in host memory."""
        memory = tensor.untyped_storage()._cdata
        found = (one for part in self._offloaded.values() for one in part if one.storage._cdata == memory)
        if (offloaded := next(found, None)) is None:
            return tensor.detach().to("cpu", copy=True)
        assert offloaded.chunks is not None and tensor.is_contiguous()
        start = tensor.storage_offset() * tensor.element_size()
        end, at, pieces = start + tensor.numel() * tensor.element_size(), 0, []
        for chunk in offloaded.chunks:
            pieces.append(chunk[max(start - at, 0) : max(end - at, 0)])
            at += chunk.numel()
        return torch.cat(pieces).view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """Resumes suspended communicators, which otherwise cannot be closed."""
        if self.state is State.ASLEEP:
            self._communicators.resume()

    def require(self, action: str, *states: State) -> None:
        """Raises OffloadedError unless the rank is in one of `states`."""
        if self.state not in states:
            needed = " or ".join(state.value for state in states)
            raise OffloadedError(f"{action} needs a training rank that is {needed}, and it is {self.state.value}")

    def _storages(self) -> dict[Part, list[torch.UntypedStorage]]:
        """Storages on the device, each once; without those that engines can open, which are in host memory anyway."""
        seen: set[int] = set()
        tensors = self._persistent_tensors()
        found: dict[Part, list[torch.UntypedStorage]] = {}
        for part in PARTS:
            found[part] = []
            for storage in (tensor.untyped_storage() for tensor in tensors[part]):
                if storage.device != self._device or (self._device.type == "cpu" and storage.filename is not None):
                    continue
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[part].append(storage)
        return found

    def _offload(self, storage: torch.UntypedStorage, *, keep: bool) -> _OffloadedStorage:
        chunks = None
        if keep:
            chunks = self._host.take(storage.nbytes())
            for chunk, piece in zip(chunks, self._bytes(storage, chunks), strict=True):
                chunk.copy_(piece)
        offloaded = _OffloadedStorage(storage, storage.nbytes(), chunks)
        storage.resize_(0)
        return offloaded

    def _onload(self, offloaded: _OffloadedStorage) -> None:
        offloaded.storage.resize_(offloaded.size)
        if offloaded.chunks is None:
            self._whole(offloaded.storage).zero_()
            return
        for chunk, piece in zip(offloaded.chunks, self._bytes(offloaded.storage, offloaded.chunks), strict=True):
            piece.copy_(chunk)
        offloaded.chunks = None

    def _bytes(self, storage: torch.UntypedStorage, chunks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Views of the storage, uint8 each, as long as `chunks`."""
        return self._whole(storage).split([chunk.numel() for chunk in chunks])

    def _whole(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def memory_of(
    stages: Sequence[DistributedDataParallel | FullyShardedDataParallel],
    optimizers: Sequence[MegatronOptimizer],
    device: torch.device,
    *,
    gathered: GatheredWeights,
    release: Callable[[], object],
    offloads: bool,
    suspends: bool,
    paired_stages: bool,
) -> TrainingMemory:
    """The memory of a newly built rank, with the communicators of Megatron's groups.

    `gathered` are the whole weights that sharded stages have between passes. `release` is called before memory is
    moved, and waits for other threads that read it. `offloads`: whether the rank is ever offloaded; `suspends`: whether
    its communicators are too; `paired_stages`: whether virtual pipeline stages overlap their exchanges.
    """
    # a rank that is never offloaded does not log a warning about its communicators
    suspended = (
        open_communicators(device, suspends=suspends, paired_stages=paired_stages) if offloads else Communicators([])
    )
    # buffer in which sequence-parallel layers gather their inputs, as large as the longest micro-batch so far
    inputs = parallel_state.get_global_memory_buffer().buffer

    def drop_scratch() -> None:
        release()
        inputs.clear()
        drop_frequencies()

    return TrainingMemory(lambda: persistent_tensors(stages, optimizers), device, suspended, drop_scratch, gathered)


def persistent_tensors(
    stages: Sequence[DistributedDataParallel | FullyShardedDataParallel], optimizers: Sequence[MegatronOptimizer]
) -> dict[Part, list[Tensor]]:
    """Every tensor that persists between rollouts, by part; of the stages of Megatron-FSDP the shards."""
    weights: list[Tensor] = []
    gradients: list[Tensor] = []
    main: list[Tensor] = []
    parameters: list[Tensor] = []
    for stage in stages:
        if isinstance(stage, DistributedDataParallel):
            buffers = (*stage.buffers, *stage.expert_parallel_buffers)
            weights += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
            gradients += [buffer.grad_data for buffer in buffers if buffer.grad_data is not None]
            parameters += stage.module.parameters()
        else:
            groups = stage.param_and_grad_buffer.parameter_groups
            weights += [group.model_weight_buffer.data for group in groups]
            gradients += [group.main_grad_buffer.data for group in groups if group.main_grad_buffer is not None]
            main += [group.main_weight_buffer.data for group in groups if group.main_weight_buffer is not None]
        weights += stage.module.buffers()
    adams = [adam for optimizer in optimizers for adam in _adams(optimizer)]
    trained = [parameter for adam in adams for group in adam.param_groups for parameter in group["params"]]
    # shards of a distributed optimizer are not leaves: their gradients are parts of the buffers
    leaves = [parameter for parameter in (*parameters, *trained) if parameter.is_leaf]
    gradients += [parameter.grad for parameter in leaves if parameter.grad is not None]
    states = [value for adam in adams for state in adam.state.values() for value in state.values()]
    kept = [value for value in states if isinstance(value, Tensor)]
    parts = {"weights": weights + parameters, "gradients": gradients, "optimizer": main + trained + kept}
    return {part: [local_part(tensor) for tensor in parts[part]] for part in PARTS}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be divided over ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers inside, including those for a part of the weights."""
    for part in vars(optimizer).get("chained_optimizers", [optimizer]):
        if part.optimizer is None:  # a rank without weights of that kind
            continue
        yield part.optimizer
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield from part.optimizer.sub_optimizers
