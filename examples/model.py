"""A custom model and custom layers, whose weights have the names of the family's table.

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
    """slimrl's model with a frozen embedding; a tied output layer is the same weight."""
    model = policy_model(args, config, pre_process, post_process, vp_stage)
    if pre_process:
        model.embedding.word_embeddings.weight.requires_grad = False
    if post_process and not args.untie_embeddings_and_output_weights:
        model.shared_embedding_or_output_weight().requires_grad = False
    return model


class Watched(TransformerLayer):
    """Raises an error that names the layer when its hidden states exceed `LIMIT`.

    The layer's own class comes after this one among the bases.
    """

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        """The layer's forward pass. Raises FloatingPointError for hidden states above `LIMIT`."""
        hidden, *rest = super().forward(*inputs, **settings)
        largest = float(hidden.detach().abs().max())
        if not largest <= LIMIT:
            raise FloatingPointError(f"layer {self.layer_number} has hidden states of {largest:g}, above {LIMIT:g}")
        return hidden, *rest


def watched_layers(args: Arguments, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """slimrl's layers, each with this check."""
    block = own_layers(args, config, vp_stage)
    layers = [dataclasses.replace(layer, module=_watched(layer.module)) for layer in block.layer_specs]
    return dataclasses.replace(block, layer_specs=layers)


def _watched(layer: type[TransformerLayer]) -> type[TransformerLayer]:
    """A subclass of `layer`, because some families, such as GLM-4, have their own layer class."""
    return Watched if layer is TransformerLayer else type(f"Watched{layer.__name__}", (Watched, layer), {})
