"""A toy checkpoint of every model family: one row each, made by transformers' own classes.

Contains the sizes, the random weights, the published form of config.json and the Megatron flags of each toy model. The
same seed gives the same files, no two tensors are alike (norms and biases are random too), and every count divides by
2. Used by the tests of logits, conversion and weight updates into a server.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.families import dense_rows, expert_rows, latent_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# keys that transformers adds to config.json and no published file of the family has
NOT_PUBLISHED = ("qk_head_dim", "layer_types", "dtype", "mlp_layer_types")


@dataclasses.dataclass(frozen=True)
class Toy:
    """One family at toy size.

    `config` are the arguments of `architecture`'s config class; `published` replaces or adds entries of config.json;
    `flags` describe the same model in Megatron's names; `code` is the Python file (file name, text) with the config
    class in a published folder of the family.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    flags: tuple[str, ...]
    published: dict[str, Any] = dataclasses.field(default_factory=dict)
    mtp_layers: int = 0
    code: tuple[str, str] | None = None

    @property
    def model_type(self) -> str:
        """model_type in config.json."""
        return self.published.get("model_type") or self._config_class().model_type

    @property
    def decoder(self) -> dict[str, Any]:
        """The entries of the decoder."""
        return self.config.get("text_config", self.config)

    @property
    def sees(self) -> bool:
        """Whether it has a vision tower."""
        return "vision_config" in self.config

    def save(
        self, folder: Path, *, shards: int = 2, dtype: str = "fp32", seed: int = 0, tokenizer: bool = True
    ) -> Path:
        """Writes the checkpoint in at least `shards` safetensors files, and returns `folder`.

        `dtype` is "fp32" or "bf16"; the router's bias stays float32, as published.
        """
        model = self.build(seed)
        model.to(DTYPES[dtype])
        for name, bias in expert_biases(model):
            bias.data = expert_bias(name, bias.shape, seed)
        size = sum(tensor.nbytes for tensor in model.state_dict().values())
        model.save_pretrained(folder, max_shard_size=size // shards)
        if self.decoder is not self.config:
            from slimrl.tiny.models import publish_experts

            publish_experts(folder)
        if self.mtp_layers:
            self._add_mtp_layers(folder, seed, DTYPES[dtype])
        self._publish_config(folder, dtype)
        if tokenizer or self.sees:  # servers of models with images need both
            from slimrl.tiny.models import build_tokenizer, save_image_processor

            length = self.decoder["max_position_embeddings"]
            build_tokenizer(max_length=length, vision=self.sees).save_pretrained(folder)
            save_image_processor(self.config.get("vision_config"), folder)
        return folder

    def build(self, seed: int) -> nn.Module:
        """transformers' model with random float32 weights; leaves torch's random state alone."""
        import transformers

        config = self._config_class()(**self.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(transformers, self.architecture)(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:  # a norm of exactly 1 or a bias of 0 would hide that it is not applied
                        parameter.add_(0.2 * torch.randn_like(parameter))
                for name, bias in expert_biases(model):
                    bias.copy_(expert_bias(name, bias.shape, seed))
        return model.eval()

    def load(self, folder: Path) -> nn.Module:
        """transformers' float32 model of the weights in `folder`, whatever their dtype."""
        import transformers

        entries = json.loads((Path(folder) / "config.json").read_text())
        for key in ("model_type", "auto_map", "torch_dtype"):
            entries.pop(key, None)
        return (
            getattr(transformers, self.architecture)
            .from_pretrained(folder, config=self._config_class()(**entries), dtype=torch.float32)
            .eval()
        )

    def reference_logits(self, folder: Path, ids: Tensor) -> Tensor:
        """transformers' float32 logits [sequences, tokens, vocabulary] of `ids` [sequences, tokens] int64."""
        with torch.no_grad():
            return self.load(folder)(ids).logits

    def _config_class(self) -> Any:
        import transformers

        return getattr(transformers, self.architecture).config_class

    def _publish_config(self, folder: Path, dtype: str) -> None:
        """Rewrites config.json with the keys that published files of the family have."""
        path = folder / "config.json"
        whole = json.loads(path.read_text())
        nested = "text_config" in self.config
        if not nested:
            whole = whole.pop("text_config", {}) | whole  # published files have the decoder's entries at the top
        entries = whole["text_config"] if nested else whole
        for key in NOT_PUBLISHED:
            entries.pop(key, None)
        if "kv_lora_rank" in entries:
            entries.pop("head_dim", None)
        if nested and "num_local_experts" in entries:
            entries["num_experts"] = entries.pop("num_local_experts")
        rope = entries.pop("rope_parameters")
        entries["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            entries["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if "mrope_section" in rope and not nested:
            rope = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        entries["rope_scaling"] = None if rope.get("rope_type") == "default" and not nested else rope
        whole["torch_dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        path.write_text(json.dumps(whole | self.published, indent=2, sort_keys=True) + "\n")
        if self.code is not None:
            (folder / self.code[0]).write_text(self.code[1])

    def _add_mtp_layers(self, folder: Path, seed: int, dtype: torch.dtype) -> None:
        """Adds a shard with MTP layers: the tensors of a decoder layer, and four more."""
        from safetensors.torch import save_file

        index_path, weights = folder / "model.safetensors.index.json", "model-mtp.safetensors"
        index = json.loads(index_path.read_text())
        generator = torch.Generator().manual_seed(seed + 1)
        hidden = self.decoder["hidden_size"]
        shapes = {name: (hidden,) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
        shapes = {f"{name}.weight": shape for name, shape in shapes.items()} | {
            "input_proj.weight": (hidden, 2 * hidden)
        }
        for name, tensor in self.build(seed).state_dict().items():
            if name.startswith("model.layers.0."):
                shapes[name.removeprefix("model.layers.0.")] = tuple(tensor.shape)
        tensors = {
            f"model.mtp_layers.{layer}.{name}": (0.1 * torch.randn(shape, generator=generator)).to(dtype)
            for layer in range(self.mtp_layers)
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / weights, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, weights)
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
        index_path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def expert_biases(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The routers' correction biases, which are buffers."""
    return ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))


def expert_bias(name: str, shape: torch.Size, seed: int) -> Tensor:
    """As large as the differences between scores, so that it changes the routing."""
    layer = next(int(part) for part in name.split(".") if part.isdecimal())
    return 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + layer))


ROWS = dense_rows.ROWS | expert_rows.ROWS | latent_rows.ROWS
TOYS: dict[str, Toy] = {name: Toy(name=name, **row) for name, row in ROWS.items()}
