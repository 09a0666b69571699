"""Host memory for what leaves a device, page-locked where it can be.

Owns the cutting of that memory. Promises that no more of it is taken than was asked for and one chunk: the allocator of
page-locked memory rounds each request up to a power of two, so that a buffer for each tensor takes up to twice its
size. Used by the parking of training memory and by the reference model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 1024**2  # a power of two
_ALIGNMENT = 64  # bytes: any element of any dtype, and a line of the processor's cache


class HostMemory:
    """Memory in chunks of `CHUNK_BYTES`, handed out from front to back; pieces of several tensors share a chunk."""

    def __init__(self, *, page_locked: bool, allocate: Callable[[int], Tensor] | None = None) -> None:
        """`allocate` gives uint8 [bytes]; torch's own allocator without it."""
        self._page_locked = page_locked
        self._allocate = allocate or self._new_chunk
        self._chunks: list[Tensor] = []
        self._taken = 0  # bytes from the begin of the first chunk

    @property
    def nbytes(self) -> int:
        """What is held, in use or not."""
        return sum(chunk.numel() for chunk in self._chunks)

    def take(self, size: int) -> list[Tensor]:
        """Pieces, uint8 each, that have `size` bytes together; none is cut within an element."""
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
        """Every piece may be handed out again. Page-locked chunks take long to get and are kept, others are not."""
        self._taken = 0
        if not self._page_locked:
            self._chunks = []

    def _new_chunk(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._page_locked)


class HostCopy:
    """The values of a list of tensors in host memory; whoever calls gives the same list each time."""

    def __init__(self, tensors: Iterable[Tensor], memory: HostMemory) -> None:
        """Room only; `save` puts values there."""
        self._pieces = [memory.take(tensor.numel() * tensor.element_size()) for tensor in tensors]

    @torch.no_grad()
    def save(self, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors' values here; from a GPU that is done when the device is synchronised."""
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
    """The bytes of `tensor`, uint8 [bytes]: a view where its elements stand one after another."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _cut(flat: Tensor, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return flat.split([piece.numel() for piece in pieces])
