"""The platform package: one answer per machine, reproducible generators."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from slimrl.platform import bind_local_device, device, is_cpu, seed_everything


def test_platform_follows_torch_cuda():
    assert is_cpu() == (not torch.cuda.is_available())
    assert device().type == ("cpu" if is_cpu() else "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_every_local_rank_shares_the_cpu():
    assert device(5) == torch.device("cpu")
    assert bind_local_device(3) == torch.device("cpu")


def test_each_local_rank_has_one_gpu_and_one_beyond_the_last_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device(1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="local rank 2 has no GPU: 2 GPUs are visible"):
        device(2)


def test_same_seed_gives_the_same_numbers_from_all_three_generators():
    draws = []
    for _ in range(2):
        seed_everything(7)
        draws.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1]
    seed_everything(8)
    assert (random.random(), float(numpy.random.rand()), float(torch.rand(()))) != draws[0]


def test_negative_seed_is_rejected():
    with pytest.raises(ValueError, match="--seed -1 is negative"):
        seed_everything(-1)
