"""The bytes of a tensor in host memory, without a copy and without a trace on the tensor.

`Tensor.numpy()` marks the tensor's storage as one that cannot be resized, and offloading resizes the storages of
weights and optimizer state.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor


class _Memory:
    """numpy's array interface to the memory of a tensor, which it keeps alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__: dict[str, Any] = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def byte_array(tensor: Tensor) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """Its values as uint8 [bytes], writable, in the same memory.

    Raises ValueError for a tensor that is not contiguous or not in host memory.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a contiguous tensor in host memory is needed, not {tensor.device}, strides {tensor.stride()}"
        )
    if tensor.numel() == 0:  # its address may be 0
        return numpy.empty(0, dtype=numpy.uint8)
    return numpy.asarray(_Memory(tensor.detach()))


def with_own_storage(tensor: Tensor) -> Tensor:
    """The values of a CPU tensor in a storage that begins and ends with them; not copied if they are contiguous.

    torch.save writes the whole storage of a view.
    """
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.from_numpy(byte_array(tensor)).view(tensor.dtype).view(tensor.shape)
