"""LoRA adapters beside the weights of a model: tensors in a linear layer, merged weights, first values, PEFT folders.

Works on any module built like GPTModel; megatron-core is not imported. `slimrl.megatron.model.lora` has the layers. A
PEFT folder (adapter_config.json and adapter_model.safetensors) is loaded into a model and exported from one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slimrl.models.adapters import CONFIG_NAME, PART_OF_NAME, WEIGHTS_NAME, AdapterConfig, AdapterMapping
from slimrl.models.families import ModelMapping
from slimrl.models.model_spec import ModelSpec
from slimrl.processes.files import AtomicDir, listed
from slimrl.weights.reshard import find, global_name, global_tensors, hf_shapes, to_shard

Stages = nn.Module | Sequence[nn.Module]


class Adapter(nn.Module):
    """A and B of one projection, this rank's part: `lora_A` [rank, inputs], `lora_B` [outputs, rank]."""

    def __init__(self, rank: int, inputs: int, outputs: int, like: Tensor):
        """Both zero, in the dtype and on the device of `like`."""
        super().__init__()
        self.lora_A = nn.Parameter(like.new_zeros(rank, inputs))
        self.lora_B = nn.Parameter(like.new_zeros(outputs, rank))

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and B; megatron-core's hooks of this call wait until both are gathered (--overlap-param-gather)."""
        return self.lora_A, self.lora_B


class AdaptedLinear(nn.Module):
    """A linear layer with a `weight` [outputs, inputs] and the adapters of some of its projections.

    The projections without an adapter have only a width. `join` puts the outputs of all projections, [..., width]
    each, in the order of the weight's rows.
    """

    weight: nn.Parameter
    adapters: nn.ModuleDict
    widths: dict[str, int]  # of all projections in the weight, in order
    scale: float
    enabled = True

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """[..., outputs] from [..., width] of each projection."""
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """`weight` + scale * B A in its dtype, added in float32 or in the weight's dtype if that is wider."""
        weight, found = self.weight, []
        wide = torch.promote_types(weight.dtype, torch.float32)
        for name, width in self.widths.items():
            if name in self.adapters:
                a, b = self.adapters[name]()
                found.append((b.to(wide) @ a.to(wide)).mul_(self.scale))
            else:
                found.append(weight.new_zeros(width, weight.shape[1], dtype=wide))
        change = self.join([one.t() for one in found]).t()
        return weight.detach().to(wide).add(change).to(weight.dtype)


def adapted_layers(model: Stages) -> Iterator[AdaptedLinear]:
    """Every linear layer with adapters of a model, or of all its chunks."""
    for chunk in (model,) if isinstance(model, nn.Module) else model:
        yield from (module for module in chunk.modules() if isinstance(module, AdaptedLinear))


def merged_weights(model: Stages) -> dict[str, Callable[[], Tensor]]:
    """A function that merges each weight with adapters, by the weight's global name."""
    return {
        global_name(chunk, f"{name}.weight"): module.merged_weight
        for chunk in ((model,) if isinstance(model, nn.Module) else model)
        for name, module in chunk.named_modules()
        if isinstance(module, AdaptedLinear)
    }


@contextlib.contextmanager
def without_adapters(model: Stages) -> Iterator[None]:
    """Within the block the model computes as its base."""
    layers = list(adapted_layers(model))
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


@torch.no_grad()
def initialize_adapters(
    model: Stages, seed: int, *, tp_rank: int, tp_size: int, etp_rank: int = 0, etp_size: int = 1
) -> None:
    """A as PEFT draws it, uniform within 1 / sqrt(inputs) of 0, and B zero: the model computes as its base.

    The draw of a tensor depends only on `seed` and its name, so that it is the same in every layout. Those of experts
    are divided by expert tensor parallelism.
    """
    for name, tensor in global_tensors(model, adapters=True).items():
        if name.endswith("lora_B"):
            tensor.zero_()
            continue
        divided = ".linear_proj" + PART_OF_NAME in name or ".linear_fc2" + PART_OF_NAME in name
        place, size = (etp_rank, etp_size) if ".experts." in name else (tp_rank, tp_size)
        size = size if divided else 1
        rank, inputs = tensor.shape[0], tensor.shape[1] * size
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"lora_A {seed} {name}".encode()) >> 1)
        whole = (2 * torch.rand(rank, inputs, generator=generator) - 1) / math.sqrt(inputs)
        first = place * tensor.shape[1] if size > 1 else 0
        tensor.copy_(whole[:, first : first + tensor.shape[1]])


@torch.no_grad()
def load_adapters(
    model: nn.Module | Sequence[nn.Module],
    spec: ModelSpec,
    family: ModelMapping,
    adapters: AdapterConfig,
    folder: Path,
    *,
    tp_rank: int,
    tp_size: int,
    etp_rank: int = 0,
    etp_size: int = 1,
) -> None:
    """Fills this rank's adapters from a PEFT folder, in their dtype.

    Raises ValueError for a damaged file, and for tensors that are missing, unexpected or of another shape.
    """
    path, own = folder / WEIGHTS_NAME, global_tensors(model, adapters=True)
    rows = list(AdapterMapping.of(family, adapters).rows(spec))
    try:
        with safe_open(path, framework="pt") as file:
            _check_names(set(file.keys()), [row.hf[0].name for row in rows], path)
            for row in rows:
                (part,), (shape,) = row.hf, hf_shapes(row, spec)
                stored = tuple(file.get_slice(part.name).get_shape())
                if stored != shape:
                    raise ValueError(
                        f"{path}: {part.name} has shape {list(stored)} but the flags require {list(shape)}"
                        f" ({' x '.join(part.dims)}): give the adapter of this model"
                    )
                if name := find(row, own):
                    rank, size = (tp_rank, tp_size) if row.expert is None else (etp_rank, etp_size)
                    own[name].copy_(to_shard(row, [file.get_tensor(part.name)], spec, rank=rank, size=size))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error}): copy or download it again") from error


class PeftExport:
    """One export of adapters, with the calls of `weights.convert.megatron_to_hf.HfExport`; rank 0 writes both files."""

    def __init__(
        self, folder: Path, config: dict[str, Any], rank: int, tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """`tensors` gathers all adapters on rank 0, each valid until the next, and nothing elsewhere; collective.

        An existing export of the same rollout is replaced. Raises FileExistsError, NotADirectoryError or ValueError if
        something else exists at `folder`.
        """
        self._folder = AtomicDir(folder, replace=(CONFIG_NAME, WEIGHTS_NAME))
        self._config, self._rank, self._tensors = config, rank, tensors
        self._copies: dict[str, Tensor] = {}

    @property
    def path(self) -> Path:
        """The final folder."""
        return self._folder.folder

    def begin(self) -> None:
        """Create the partial folder."""
        self._folder.open()

    def collect(self, *, copy: bool) -> None:
        """Gathers the current adapters into host memory; collective over all ranks."""
        self._copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in self._tensors()}

    def write(self) -> None:
        """Writes both files and flushes them to disk."""
        copies, self._copies = self._copies, {}
        if self._rank != 0:
            return
        save_file(copies, self._folder.partial / WEIGHTS_NAME, metadata={"format": "pt"})
        (self._folder.partial / CONFIG_NAME).write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")
        for name in (WEIGHTS_NAME, CONFIG_NAME):
            with (self._folder.partial / name).open("rb") as file:
                os.fsync(file.fileno())

    def commit(self) -> None:
        """Rename the folder to its final name."""
        self._folder.commit()

    def discard(self) -> None:
        """Remove what was written."""
        self._folder.discard()


def _check_names(stored: set[str], expected: Sequence[str], path: Path) -> None:
    if missing := set(expected) - stored:
        raise ValueError(f"{path} lacks {listed(missing)}: it is the adapter of another model")
    if left_over := stored - set(expected):
        raise ValueError(f"{path} has {listed(left_over)}, which the flags do not describe: adapt the flags")
