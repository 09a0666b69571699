"""A model and layers of one's own, whose weights have the names of the family's table.

--custom-model-provider-path examples.model.frozen_embedding
--spec examples.model watched_layers
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from slimrl.arguments import Arguments
from slimrl.megatron.model.model_builder import own_layers, policy_model

LIMIT = 1e4


def frozen_embedding(
    pre_process: bool, post_process: bool, vp_stage: int | None = None, *, args: Arguments, config: TransformerConfig
) -> GPTModel:
    """slimrl's own model, whose embedding is not trained; a head that is tied to it is the same weight."""
    model = policy_model(args, config, pre_process, post_process, vp_stage)
    if pre_process:
        model.embedding.word_embeddings.weight.requires_grad = False
    if post_process and not args.untie_embeddings_and_output_weights:
        model.shared_embedding_or_output_weight().requires_grad = False
    return model


class Watched(TransformerLayer):
    """Stops where what a layer adds up grows without bound, and says which layer that is.

    The layer's own class comes after this one among the bases.
    """

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        """As the layer's. Raises FloatingPointError for hidden states above `LIMIT`."""
        hidden, *rest = super().forward(*inputs, **settings)
        largest = float(hidden.detach().abs().max())
        if not largest <= LIMIT:
            raise FloatingPointError(f"layer {self.layer_number} has hidden states of {largest:g}, above {LIMIT:g}")
        return hidden, *rest


def watched_layers(args: Arguments, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """slimrl's own layers, each of them watched."""
    block = own_layers(args, config, vp_stage)
    layers = [dataclasses.replace(layer, module=_watched(layer.module)) for layer in block.layer_specs]
    return dataclasses.replace(block, layer_specs=layers)


def _watched(layer: type[TransformerLayer]) -> type[TransformerLayer]:
    """A subclass of `layer`: some families' layers, such as GLM-4's, have more in them than megatron-core's."""
    return Watched if layer is TransformerLayer else type(f"Watched{layer.__name__}", (Watched, layer), {})
