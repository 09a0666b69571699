"""The reference model: a host copy of its weights, put into the training model for one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


class ReferenceWeights:
    """This rank's reference weights, in host memory (page-locked where there is a GPU)."""

    def __init__(self, stages: Sequence[GPTModel]):
        """Copies the weights that the `stages` of this rank hold now."""
        self._tensors = [tensor for stage in stages for tensor in _state(stage)]
        self._reference = [_host_buffer(tensor) for tensor in self._tensors]
        self._own = [_host_buffer(tensor) for tensor in self._tensors]
        self._save(self._reference)

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> ReferenceWeights:
        """Reference values in host memory, each with the tensor in whose place it is to be computed with."""
        made = cls(())
        made._tensors, made._reference = map(list, zip(*pairs, strict=True))
        made._own = [_host_buffer(tensor) for tensor in made._tensors]
        return made

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor of the model, with its reference value in host memory."""
        return list(zip(self._tensors, self._reference, strict=True))

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model computes with the reference weights; afterwards its own are back, bit for bit."""
        self._save(self._own)
        self._fill(self._reference)
        try:
            yield
        finally:
            self._fill(self._own)

    @torch.no_grad()
    def _save(self, buffers: list[Tensor]) -> None:
        for tensor, buffer in zip(self._tensors, buffers, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @torch.no_grad()
    def _fill(self, buffers: list[Tensor]) -> None:
        for tensor, buffer in zip(self._tensors, buffers, strict=True):
            tensor.copy_(buffer, non_blocking=True)


def _state(stage: GPTModel) -> Iterator[Tensor]:
    """Parameters and buffers: the bias that steers the choice of experts is a buffer."""
    yield from stage.parameters()
    yield from stage.buffers()


def _host_buffer(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
