"""`--save-hf` of a training worker: which folder an export goes to, and its tensors out of the live model.

Called by the trainer when it saves; `slimrl.weights.hf_export` does the writing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.megatron.parallel import ParallelState
from slimrl.weights.export import iter_hf_tensors
from slimrl.weights.families import family_for
from slimrl.weights.hf_export import HfExport, HfPlan
from slimrl.weights.hf_files import read_hf_config
from slimrl.weights.shape import ModelShape


class ModelExporter:
    """Makes the exports of a run; every rank of any layout holds the whole model's tensors once while it gathers."""

    def __init__(self, args: Arguments, stages: Sequence[GPTModel], parallel: ParallelState) -> None:
        """Raises FileNotFoundError or ValueError where --hf-checkpoint lacks weights or holds another model's."""
        origin = Path(args.hf_checkpoint)
        self._stages, self._parallel = stages, parallel
        self._shape, self._family = ModelShape.from_args(args), family_for(read_hf_config(origin))
        self._plan = HfPlan(origin, self._shape, self._family, rank=parallel.rank, world_size=parallel.world_size)
        self._template = args.save_hf

    def export(self, rollout_id: int) -> HfExport:
        """The export of the weights after `rollout_id`. Raises as `HfExport` where its folder cannot be written."""
        return HfExport(self._plan, Path(self._template.replace("{rollout_id}", str(rollout_id))), self._tensors)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        parallel = self._parallel
        return iter_hf_tensors(
            self._stages,
            self._shape,
            self._family,
            parallel.tp_group,
            pp_group=parallel.pp_group,
            ep_group=parallel.ep_group,
            etp_group=parallel.etp_group,
        )
