"""A vision-language policy: transformers' vision tower in front of megatron-core's decoder.

The tower is on the first pipeline stage, whole on every tensor-parallel rank, and every rank computes all images of a
micro-batch: its inputs and gradients are then equal on these ranks, and its gradients need no reduction over them.
`--freeze-params-name-list vision_model` freezes it. Built by `model_builder`.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor, nn

from slimrl.megatron.model.output_layer import PolicyModel, TokensToScore
from slimrl.models.families import family_for
from slimrl.models.families.vision import VisionTower
from slimrl.weights.hf_checkpoint import read_hf_config

if TYPE_CHECKING:
    from slimrl.megatron.model.micro_batch import ImageTensors


def tower_of(folder: str) -> VisionTower:
    """The description of the tower of the model in `folder`."""
    tower = family_for(read_hf_config(Path(folder))).tower
    assert tower is not None  # the caller has read it from config.json
    return tower


def vision_tower(folder: str, dtype: torch.dtype) -> nn.Module:
    """The tower of the model whose config.json is in `folder`, freshly initialised, its weights in `dtype`."""
    # imported here: slow, and only vision-language models need it
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    module, _, name = tower_of(folder).architecture.rpartition(".")
    built: nn.Module = getattr(importlib.import_module(module), name)._from_config(
        config.vision_config, dtype=dtype, attn_implementation="sdpa"
    )
    return built


class InterleavedRotaryEmbedding(MultimodalRotaryEmbedding):
    """megatron-core's multimodal positions with alternating channels (Qwen3-VL).

    Of the pairs of channels 0, 1, 2, 3, ... every third belongs to time, height and width in turn, as long as the
    latter two have any left; all others belong to time.
    """

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Tensor:
        """Angles [tokens, batch, 1, channels] of `position_ids` [3, batch, tokens]."""
        angles = position_ids.to(self.inv_freq)[..., None] * self.inv_freq
        mixed = angles[0].clone()
        for axis in (1, 2):
            channels = slice(axis, 3 * mrope_section[axis], 3)
            mixed[..., channels] = angles[axis, ..., channels]
        return torch.cat((mixed, mixed), dim=-1).transpose(0, 1)[:, :, None].contiguous()


class VisionLanguageModel(PolicyModel):
    """A `PolicyModel` whose first stage puts the features of images in the place of their tokens' embeddings.

    Features of further levels (deepstack of Qwen3-VL) are added to the outputs of its first layers.
    """

    def __init__(self, tower: nn.Module | None, *, interleaves_positions: bool = False, **settings: Any):
        """`tower` is None on other stages than the first. Raises ValueError for fewer layers there than levels."""
        super().__init__(**settings, scatter_embedding_sequence_parallel=False)
        if interleaves_positions:
            self.rotary_pos_emb = InterleavedRotaryEmbedding(
                self.config.kv_channels, self.rotary_percent, rotary_base=settings["rotary_base"]
            )
        self._levels: list[Tensor] = []  # of the forward pass
        if tower is None:
            return
        self.vision_model = tower
        levels = len(getattr(tower.config, "deepstack_visual_indexes", ()))
        if levels > len(self.decoder.layers):
            raise ValueError(
                f"the first pipeline stage has {len(self.decoder.layers)} layers, and the vision tower adds to"
                f" {levels}: use fewer stages, or --decoder-first-pipeline-num-layers {levels}"
            )
        for level, layer in enumerate(self.decoder.layers[:levels]):
            layer.register_forward_hook(functools.partial(self._add_level, level))

    def _add_level(self, level: int, layer: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """A layer's outputs, with the features of its level on the tokens of images."""
        hidden, context = outputs
        return (hidden + self._levels[level] if self._levels else hidden), context

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
        self._levels = []
        if images is not None:
            found = self.vision_model(images.pixel_values.to(self.config.params_dtype), grid_thw=images.grids)
            nothing = torch.zeros_like(embedded)
            for features in getattr(found, "deepstack_features", None) or ():
                level = nothing.index_copy(0, images.rows, features.to(embedded.dtype)[:, None])
                self._levels.append(self._of_rank(level))
            embedded = embedded.index_copy(0, images.rows, found.pooler_output.to(embedded.dtype)[:, None])
        elif torch.is_grad_enabled():
            embedded = embedded + self._no_images()
        return self._of_rank(embedded)

    def _of_rank(self, whole: Tensor) -> Tensor:
        """This rank's part of a [tokens, 1, hidden] under sequence parallelism, else all of it."""
        if not self.config.sequence_parallel:
            return whole
        part: Tensor = scatter_to_sequence_parallel_region(whole, group=self.pg_collection.tp)
        return part

    def _no_images(self) -> Tensor | float:
        """0 with a gradient of zeros for each weight of the tower: an overlapped reduction waits for all of them."""
        trained = [weight.flatten()[0] for weight in self.vision_model.parameters() if weight.requires_grad]
        return 0.0 * torch.stack(trained).sum() if trained else 0.0
