"""The memory of tensors as bytes."""

from __future__ import annotations

import gc

import pytest
import torch

from slimrl.weights.hf_checkpoint_writer import byte_array, with_own_storage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_bytes_are_those_of_the_tensor_and_writable(dtype: torch.dtype):
    tensor = torch.arange(24, dtype=torch.float32).to(dtype).view(4, 6)
    part = tensor[1:3]
    found = byte_array(part)
    assert found.tobytes() == bytes(part.contiguous().view(torch.uint8).flatten().tolist())
    found[:] = 0
    assert not part.view(torch.uint8).any()
    assert tensor.view(torch.uint8)[3].any()


def test_storage_can_still_be_resized():
    tensor = torch.ones(8)
    assert byte_array(tensor).nbytes == 32
    assert with_own_storage(tensor[2:4]).untyped_storage().nbytes() == 8
    tensor.untyped_storage().resize_(0)
    other = torch.ones(8)
    other.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):  # why `Tensor.numpy` is not used
        other.untyped_storage().resize_(0)


def test_memory_lives_as_long_as_its_bytes():
    kept = with_own_storage(torch.full((1000,), 3.0)[10:20])
    gc.collect()
    churn = [torch.zeros(1000) for _ in range(10)]
    assert kept.tolist() == [3.0] * 10
    assert len(churn) == 10


def test_values_are_copied_only_where_they_are_scattered():
    whole = torch.arange(12.0).view(3, 4)
    assert with_own_storage(whole) is whole
    assert with_own_storage(whole[1:]).data_ptr() == whole[1:].data_ptr()
    assert with_own_storage(whole[:, 1:3]).tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    assert byte_array(torch.empty(0, 3)).nbytes == 0
    with pytest.raises(ValueError, match="a contiguous tensor in host memory is needed"):
        byte_array(whole[:, 1:3])
