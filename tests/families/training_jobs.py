"""What the training test of families runs inside ranks: a rollout through the real trainer, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.batch import RolloutBatch
from tests.megatron import ranks


def train(
    rank: int, world_size: int, init_method: str, args: Arguments, hf: Path, rollout: RolloutBatch
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of each optimizer step, and every weight by its Hugging Face name."""
    from slimrl.weights.export import iter_hf_tensors
    from slimrl.weights.families import family_for
    from slimrl.weights.hf_files import read_hf_config
    from slimrl.weights.shape import ModelShape

    trainer: Any = ranks.start(rank, world_size, init_method, args)
    metrics = trainer.train(0, ranks.share_of(trainer, rollout))
    parallel = trainer.parallel
    exported = iter_hf_tensors(
        trainer.stages,
        ModelShape.from_args(args),
        family_for(read_hf_config(hf)),
        parallel.tp_group,
        pp_group=parallel.pp_group,
        ep_group=parallel.ep_group,
        etp_group=parallel.etp_group,
    )
    weights = {name: tensor.clone() for name, tensor in exported}
    trainer.close()
    return metrics, weights
