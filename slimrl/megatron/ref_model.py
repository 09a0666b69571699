"""The reference model: a host copy of its weights, loaded into the training model for one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slimrl.megatron.offload import HostCopy, HostMemory


class ReferenceWeights:
    """This rank's reference weights, in host memory (pinned if there is a GPU)."""

    def __init__(self, stages: Sequence[GPTModel]):
        """Copies the current weights of this rank's `stages`."""
        self._begin([tensor for stage in stages for tensor in _state(stage)])
        self._save(self._reference, self.tensors)

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> ReferenceWeights:
        """Reference values in host memory, each with the model's tensor that it replaces."""
        tensors, values = map(list, zip(*pairs, strict=True))
        made = cls.__new__(cls)
        made._begin(tensors)
        made._save(made._reference, values)
        return made

    def _begin(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors  # of the model; each has a reference value
        self._on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._memory = HostMemory(page_locked=self._on_gpu)
        self._reference = HostCopy(tensors, self._memory)
        self._own: HostCopy | None = None  # memory for the model's own weights, allocated by the first swap

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory: of the reference, and twice as much once it has been swapped in."""
        return self._memory.nbytes

    def value(self, number: int) -> Tensor:
        """The reference value of `tensors[number]`, in host memory; a copy."""
        made = torch.empty(self.tensors[number].shape, dtype=self.tensors[number].dtype)
        self._reference.read(number, made)
        return made

    @contextlib.contextmanager
    def loaded_weights(self) -> Iterator[None]:
        """Within the block the model has the reference weights; afterwards its own are restored, bit for bit."""
        if self._own is None:
            self._own = HostCopy(self.tensors, self._memory)
        self._save(self._own, self.tensors)
        self._reference.fill(self.tensors)
        try:
            yield
        finally:
            self._own.fill(self.tensors)

    def _save(self, copy: HostCopy, tensors: list[Tensor]) -> None:
        copy.save(tensors)
        if self._on_gpu:
            torch.cuda.synchronize()


def _state(stage: GPTModel) -> Iterator[Tensor]:
    """Parameters and buffers: the router's expert bias is a buffer."""
    yield from stage.parameters()
    yield from stage.buffers()
