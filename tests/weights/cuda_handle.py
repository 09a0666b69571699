"""A CUDA buffer handed to SGLang's own unpickler, in a process without a GPU: `python -m tests.weights.cuda_handle`.

torch's `reduce_tensor` and everything of SGLang's is the real code. Only the driver's part is simulated: the handle
that `_share_cuda_` returns, the UUIDs of the GPUs, and at the receiver the opening of the handle, which is recorded.
Prints as JSON the opened handles and the tensors that SGLang made of them.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing import reductions

from slimrl.engines.sglang import cpu_patches
from slimrl.weights.update.buckets import iter_buckets
from slimrl.weights.update.shared_memory import CudaSharedBuffer
from slimrl.weights.update.transport_tensor import serialize

# as from the driver: device, handle, bytes, offset, reference counter and its offset, event, whether to wait
SHARED = (3, b"h" * 66, 4096, 256, b"counter", 0, b"event", True)
UUIDS = {3: "sender-0", 0: "other", 1: "sender-0"}  # the sender's GPU 3 is the receiver's GPU 1


class _OnGpu:
    """An untyped storage that reports that it is on a GPU."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def _weak_ref(self) -> int:
        return self._storage._weak_ref()


class _Buffer(CudaSharedBuffer):
    """The real reference to memory on the host."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 3)

    def take(self, num_bytes: int) -> torch.Tensor:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer


def sent(names_and_values: list[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    """The payload of one bucket, and the memory behind its handle."""
    buffer = _Buffer()
    (bucket,) = iter_buckets(iter(names_and_values), 1 << 20, buffer)
    storage = torch.storage.TypedStorage(
        wrap_storage=buffer._buffer.untyped_storage(), dtype=torch.uint8, _internal=True
    )
    storage._untyped_storage = _OnGpu(buffer._buffer.untyped_storage())
    with (
        mock.patch.object(torch.Tensor, "_typed_storage", lambda _: storage),
        mock.patch.object(torch.storage.TypedStorage, "_share_cuda_", lambda _: SHARED),
        mock.patch.object(torch.cuda, "get_device_properties", _properties),
    ):
        payload = serialize(bucket, [buffer.reference()])
    return payload, bucket.flat


def _properties(device: Any) -> SimpleNamespace:
    return SimpleNamespace(uuid=UUIDS[device if isinstance(device, int) else device.index])


def main() -> None:
    values = [
        ("a.weight", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
        ("b", torch.tensor([7], dtype=torch.bfloat16)),
    ]
    payload, flat = sent(values)
    cpu_patches.install()
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    opened: list[tuple[Any, ...]] = []

    def open_handle(*arguments: Any) -> torch.Tensor:
        opened.append(arguments)
        return flat

    reductions._rebuild_cuda_tensor_original = open_handle
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.cuda, "get_device_properties", _properties),
    ):
        received = MultiprocessingSerializer.deserialize(payload)
    tensors = FlattenedTensorBucket(
        flattened_tensor=received["flattened_tensor"], metadata=received["metadata"]
    ).reconstruct_tensors()
    (arguments,) = opened
    print(
        json.dumps(
            {
                "class": arguments[0].__name__,
                "size": list(arguments[1]),
                "dtype": str(arguments[5]),
                "device": arguments[6],
                "handle": [value.decode() if isinstance(value, bytes) else value for value in arguments[7:10]],
                "event": [arguments[13].decode(), arguments[14]],
                "tensors": {name: tensor.float().flatten().tolist() for name, tensor in tensors},
                "shapes": {name: list(tensor.shape) for name, tensor in tensors},
            }
        )
    )


if __name__ == "__main__":
    main()
