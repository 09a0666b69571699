"""A vision-language policy: transformers' vision tower in front of megatron-core's decoder.

The tower is on the first pipeline stage, whole on every tensor-parallel rank, and every rank computes all images of a
micro-batch: its inputs and gradients are then equal on these ranks, and its gradients need no reduction over them.
`--freeze-params-name-list vision_model` freezes it. Built by `model_builder`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor, nn

from slimrl.megatron.model.output_layer import PolicyModel, TokensToScore
from slimrl.models.families import family_for

if TYPE_CHECKING:
    from slimrl.megatron.model.micro_batch import ImageTensors


def vision_tower(folder: str, dtype: torch.dtype) -> nn.Module:
    """The tower of the model whose config.json is in `folder`, freshly initialised, its weights in `dtype`."""
    # imported here: slow, and only vision-language models need it
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    tower = family_for(config.to_dict()).tower
    assert tower is not None  # the caller has read it from config.json
    module, _, name = tower.architecture.rpartition(".")
    built: nn.Module = getattr(importlib.import_module(module), name)._from_config(
        config.vision_config, dtype=dtype, attn_implementation="sdpa"
    )
    return built


class VisionLanguageModel(PolicyModel):
    """A `PolicyModel` whose first stage puts the features of images in the place of their tokens' embeddings."""

    def __init__(self, tower: nn.Module | None, **settings: Any):
        """`tower` is None on other stages than the first."""
        super().__init__(**settings, scatter_embedding_sequence_parallel=False)
        if tower is not None:
            self.vision_model = tower

    def forward(
        self,
        *inputs: Any,
        wanted: TokensToScore | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        images: ImageTensors | None = None,
        **settings: Any,
    ) -> Tensor:
        """As PolicyModel's: `inputs` are tokens, positions and mask.

        The positions, int64 [3, 1, tokens], are those of time, height and width.
        """
        if self.pre_process:
            settings["decoder_input"] = self._embedded(inputs[0], inputs[1], images)
        return super().forward(*inputs, wanted=wanted, packed_seq_params=packed_seq_params, **settings)

    def _embedded(self, input_ids: Tensor, position_ids: Tensor, images: ImageTensors | None) -> Tensor:
        """[tokens (of this rank), 1, hidden]."""
        embedded: Tensor = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if images is not None:
            found = self.vision_model(images.pixel_values.to(self.config.params_dtype), grid_thw=images.grids)
            features = found.pooler_output.to(embedded.dtype)
            embedded = embedded.index_copy(0, images.rows, features[:, None])
        elif torch.is_grad_enabled():
            embedded = embedded + self._no_images()
        if self.config.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded, group=self.pg_collection.tp)
        return embedded

    def _no_images(self) -> Tensor | float:
        """0 with a gradient of zeros for each weight of the tower: an overlapped reduction waits for all of them."""
        trained = [weight.flatten()[0] for weight in self.vision_model.parameters() if weight.requires_grad]
        return 0.0 * torch.stack(trained).sum() if trained else 0.0
