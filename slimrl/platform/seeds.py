"""Seeding of every generator a worker draws from: Python, NumPy and torch (CPU and, where present, CUDA)."""

from __future__ import annotations

import random

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed `random`, `numpy.random` and torch with `seed`.

    Raises ValueError for a negative seed, which NumPy does not take.
    """
    if seed < 0:
        raise ValueError(f"--seed {seed} is negative: give a seed of 0 or more")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
