"""Fills the stages of a rank with weights from elsewhere: a torch_dist checkpoint or a Hugging Face folder.

Promises that either kind gives the same weights in every layout. Called by the trainer for the reference and for a
fresh start; resuming is `checkpoint`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoint_files import is_hf_model
from slimrl.megatron import checkpoint
from slimrl.megatron.parallel import ParallelState
from slimrl.weights.families import family_for
from slimrl.weights.hf_files import read_hf_config
from slimrl.weights.load import load_hf_checkpoint
from slimrl.weights.shape import ModelShape


def load_first_weights(
    args: Arguments, stages: Sequence[GPTModel], parallel: ParallelState, folder: Path, step: int | None
) -> None:
    """Load the weights in `folder` (of iteration `step`, None for the newest) into the stages of this rank.

    Each rank reads its own part only. Raises FileNotFoundError for an absent checkpoint and ValueError where its
    tensors are not those of the flags.
    """
    if not is_hf_model(folder):
        checkpoint.load_stages(stages, folder, step)
        return
    load_hf_checkpoint(
        stages,
        ModelShape.from_args(args),
        family_for(read_hf_config(folder)),
        folder,
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
        etp_rank=parallel.etp_rank,
        etp_size=parallel.etp_size,
    )
