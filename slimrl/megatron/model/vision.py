"""Vision-language policies and critics: transformers' vision tower in front of megatron-core's decoder.

The tower is on the first pipeline stage, whole on every tensor-parallel rank, and every rank computes all images of a
micro-batch: its inputs and gradients are then equal on these ranks, but for rounding on GPUs, so that its gradients are
averaged over them there. A
context-parallel rank takes the features of its own tokens; the reduction over these ranks adds up their gradients.
`--freeze-params-name-list vision_model` freezes it. Built by `model_builder`.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor, nn

from slimrl.megatron.model.micro_batch import ImageTensors
from slimrl.megatron.model.output_layer import PolicyModel, ValueModel
from slimrl.models.families import family_for
from slimrl.models.families.vision import VisionTower
from slimrl.platform import is_cpu
from slimrl.weights.hf_checkpoint import read_hf_config


def tower_of(folder: str) -> VisionTower:
    """The description of the tower of the model in `folder`."""
    tower = family_for(read_hf_config(Path(folder))).tower
    assert tower is not None  # the caller has read it from config.json
    return tower


def vision_arguments(folder: str, dtype: torch.dtype, *, first_stage: bool, sharded: bool) -> dict[str, Any]:
    """The arguments with which a stage of the model in `folder` sees images, beside those of its decoder.

    `sharded`: with Megatron-FSDP.
    """
    tower = vision_tower(folder, dtype) if first_stage else None
    return {
        "tower": tower,
        "interleaves_positions": tower_of(folder).interleaves_positions,
        "tower_is_sharded": sharded,
    }


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


class _VisionMixin(GPTModel):
    """A model whose first stage puts the features of images in the place of their tokens' embeddings.

    Features of further levels (deepstack of Qwen3-VL) are added to the outputs of its first layers.
    """

    def __init__(
        self, *, tower: nn.Module | None, interleaves_positions: bool, tower_is_sharded: bool, **settings: Any
    ):
        """`tower` is None on other stages than the first. Raises ValueError for fewer layers there than levels."""
        super().__init__(**settings, scatter_embedding_sequence_parallel=False)
        if interleaves_positions:
            self.rotary_pos_emb = InterleavedRotaryEmbedding(
                self.config.kv_channels, self.rotary_percent, rotary_base=settings["rotary_base"]
            )
        self.rotary_pos_emb.cp_group = None  # it would divide positions, which are those of this rank's tokens
        self._levels: list[Tensor] = []  # of the forward pass
        self._tower_is_sharded = tower_is_sharded
        if tower is None:
            return
        self.vision_model = tower
        weights: Any = tower.parameters()
        for weight in weights:  # attention's backward pass rounds differently on each GPU; gloo has no average
            weight.average_gradients_across_tp_domain = not is_cpu()
        if tower_is_sharded:
            # Megatron-FSDP takes the backward pass of the last module for the beginning of the whole one: that must be
            # the model's output
            for name in [name for name in self._modules if name != "vision_model"]:
                self._modules[name] = self._modules.pop(name)
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

    def forward(self, *inputs: Any, images: ImageTensors | None = None, **settings: Any) -> Tensor:
        """As the model's without images: `inputs` are tokens, positions and mask.

        The positions, int64 [3, 1, tokens], are those of time, height and width.
        """
        if self.pre_process:
            settings["decoder_input"] = self._embedded(inputs[0], inputs[1], images)
        output: Tensor = super().forward(*inputs, **settings)
        return output

    def _embedded(self, input_ids: Tensor, position_ids: Tensor, images: ImageTensors | None) -> Tensor:
        """[tokens (of this rank), 1, hidden]."""
        embedded: Tensor = self.embedding(input_ids=input_ids, position_ids=position_ids)
        self._levels = []
        if images is None and self._tower_is_sharded:
            images = self._placeholder_image(embedded.device)
        if images is not None:
            found = self.vision_model(images.pixel_values.to(self.config.params_dtype), grid_thw=images.grids)
            nothing = torch.zeros_like(embedded)
            for features in getattr(found, "deepstack_features", None) or ():
                self._levels.append(self._of_rank(_placed(nothing, images, features)))
            embedded = _placed(embedded, images, found.pooler_output)
        elif torch.is_grad_enabled():
            embedded = embedded + self._no_images()
        return self._of_rank(embedded)

    def _of_rank(self, whole: Tensor) -> Tensor:
        """This rank's part of a [tokens, 1, hidden] under sequence parallelism, else all of it."""
        if not self.config.sequence_parallel:
            return whole
        part: Tensor = scatter_to_sequence_parallel_region(whole, group=self.pg_collection.tp)
        return part

    def _placeholder_image(self, device: torch.device) -> ImageTensors:
        """The smallest image, whose features no token takes.

        Megatron-FSDP gathers the weights of a module when it runs and reduces its gradients after it: a rank without
        images must run the tower too, in the same order, because the others wait for it there.
        """
        tower: Any = self.vision_model
        merge, patch = tower.config.spatial_merge_size, tower.patch_embed.proj.weight.shape[1:].numel()
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return ImageTensors(
            pixel_values=torch.zeros(merge**2, patch, device=device),
            grids=torch.tensor([[1, merge, merge]], device=device),
            rows=nothing,
            features=nothing,
        )

    def _no_images(self) -> Tensor | float:
        """0 with a gradient of zeros for each weight of the tower: an overlapped reduction waits for all of them."""
        trained = [weight.flatten()[0] for weight in self.vision_model.parameters() if weight.requires_grad]
        return 0.0 * torch.stack(trained).sum() if trained else 0.0


class VisionLanguageModel(_VisionMixin, PolicyModel):
    """A policy that sees images."""


class VisionValueModel(_VisionMixin, ValueModel):
    """A critic that sees images."""


def _placed(embedded: Tensor, images: ImageTensors, features: Tensor) -> Tensor:
    """`embedded` [tokens, 1, hidden] with the `features` [image tokens, hidden] of its image tokens in their place."""
    own = features if images.features is None else features.index_select(0, images.features)
    return embedded.index_copy(0, images.rows, own.to(embedded.dtype)[:, None])
