"""The random number generators of a worker as checkpoint content: one entry per rank."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from slimrl.megatron.parallel import ParallelState


def layout(parallel: ParallelState) -> list[int]:
    """The sizes along the axes; states can only go back to ranks of the same layout."""
    return [parallel.pp_size, parallel.tp_size, parallel.dp_size * parallel.cp_size]


def sharded(parallel: ParallelState) -> ShardedObject:
    """This rank's generators as its own shard of the entry `rng_state`."""
    place = (parallel.pp_rank, parallel.tp_rank, parallel.dp_cp_group.rank())
    return ShardedObject("rng_state", _capture(), tuple(layout(parallel)), place)


def _capture() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put every generator back to where `sharded` found it."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
