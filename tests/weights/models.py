"""Tiny Hugging Face models of every family, and a stand-in with a GPTModel's parameter names, for the tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def tiny_hf_model(model_type: str, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A randomly initialised model, its biases and norms too, so that no two tensors look alike."""
    torch.manual_seed(7)
    own = {"head_dim": 16} if model_type == "qwen3" else {}
    config = AutoConfig.for_model(model_type, **SIZES, **own, tie_word_embeddings=tied, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def save_tiny(folder: Path, model_type: str = "qwen3", **options: object) -> Path:
    """Writes such a model to `folder`."""
    tiny_hf_model(model_type, **options).save_pretrained(folder)
    return folder


class Layer(nn.Module):
    """A transformer layer's number; its tensors are added by name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number


def named_module(tensors: dict[str, torch.Tensor], num_layers: int, first_layer: int = 0) -> nn.Module:
    """A module whose `named_parameters` are `tensors`, with numbered `decoder.layers` like a GPTModel's."""
    root = nn.Module()
    root.decoder = nn.Module()
    root.decoder.layers = nn.ModuleList(Layer(first_layer + index + 1) for index in range(num_layers))
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if step not in dict(module.named_children()):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(leaf, nn.Parameter(tensor.clone()))
    return root
