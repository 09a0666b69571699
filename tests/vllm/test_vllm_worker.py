"""What a weight update may name in a worker of vLLM."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

from slimrl.engines.vllm.environment.slimrl_vllm_worker import _Unpickler


def loaded(value: Any) -> Any:
    return _Unpickler(io.BytesIO(pickle.dumps(value))).load()


def test_classes_of_a_reference_to_gpu_memory_are_accepted_and_no_other_function():
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    # torch.multiprocessing.reductions.reduce_tensor names these of a tensor on a GPU
    named = (type(tensor), tensor.size(), type(tensor._typed_storage()), tensor.dtype)
    assert loaded(named) == named
    with pytest.raises(pickle.UnpicklingError, match="may not name posix.system"):
        loaded(__import__("os").system)
