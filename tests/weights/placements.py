"""Trainer ranks and engines on numbered GPUs, and a check that every engine receives and serves the ranks' weights.

The same on GPUs and without: GPUs are logical on a CPU machine. Used by the tests of this folder and by tests/gpu.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from slimrl import platform
from slimrl.engines.sglang.server import ServerProcess
from slimrl.weights.update.topology import EngineEndpoint
from tests.megatron.launch import RankPool
from tests.megatron.tiny import tiny_args
from tests.weights import ranks
from tests.weights.test_real_servers import assert_serves


@dataclasses.dataclass(frozen=True)
class Placement:
    """Trainer rank n is on GPU n; `engines` has the GPUs of each. `way` is a constructor of WeightUpdater."""

    way: str
    trainers: int
    tensor_parallel: int  # of the trainer
    engines: tuple[tuple[int, ...], ...]

    @property
    def gpus(self) -> int:
        """The required number of GPUs."""
        return max(self.trainers, 1 + max(gpu for engine in self.engines for gpu in engine))


ONE_ENGINE_COLOCATED = Placement("colocated", 2, 1, ((0, 1),))
TWO_ENGINES_COLOCATED = Placement("colocated", 4, 2, ((0, 1), (2, 3)))
ONE_ENGINE_SPLIT = Placement("split", 2, 2, ((2,),))
TWO_RANK_ENGINE_SPLIT = Placement("split", 2, 1, ((2, 3),))


def check(
    placement: Placement,
    folders: Sequence[Path],
    root: Path,
    *,
    options: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    limit: float = 1e-5,
    start_timeout_s: float = 120,
) -> None:
    """Starts the engines on the first of two models and updates them to the other one, twice.

    Every tensor of every engine must be bit-identical to the trainer's after the first attempt, and its
    log-probabilities within `limit` of transformers' on weights of `dtype`.
    """
    servers = [
        ServerProcess(
            folders[0],
            log_path=root / f"engine{gpus[0]}.log",
            tensor_parallel_size=len(gpus),
            base_gpu_id=0 if platform.is_cpu() else gpus[0],
            options=dict(options),
        )
        for gpus in placement.engines
    ]
    args = tiny_args(tensor_model_parallel_size=placement.tensor_parallel, bf16=dtype == torch.bfloat16)
    try:
        for server in servers:
            server.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.wait_ready(start_timeout_s), servers))
        engines = [EngineEndpoint(one.url, gpus) for one, gpus in zip(servers, placement.engines, strict=True)]
        with RankPool(placement.trainers) as trainers:
            results = trainers.run(
                ranks.weight_updates, args, folders[1], engines, placement.way, ["1", "2"], root, timeout_s=300
            )
        for reports in results:
            assert all(not isinstance(report, str) for report in reports), results
            assert [report.attempts for report in reports] == [1, 1] and reports[0].buckets > 5
        for engine in engines:
            assert_serves(engine.url, folders[1], "2", dtype=dtype, limit=limit)
    finally:
        for server in servers:
            server.stop()
