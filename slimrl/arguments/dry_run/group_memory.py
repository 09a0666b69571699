"""The memory of a GPU of each group of --sglang-config: the policy's by the model flags, others by their own files.

A frozen model may be of any family that SGLang serves. Weights are those of its files; the KV cache is known for the
families of slimrl.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimrl.arguments.dry_run.engine_memory import EngineMemory, EngineSettings, engine_memory
from slimrl.arguments.engine_groups.layout import group_flags
from slimrl.arguments.namespace import Arguments
from slimrl.models.hf_folder import HfFiles, bytes_per_weight, read_hf_files
from slimrl.models.model_spec import ModelSpec
from slimrl.models.parameters import total_parameters

_ALL_LAYERS = 10**6


@dataclasses.dataclass(frozen=True)
class GroupMemory:
    """One GPU of one group. `memory` is None if nothing is known of its model, `cache` if its cache is not."""

    model: str
    number: int
    frozen: bool
    gpus: int
    per_server: int
    settings: EngineSettings
    memory: EngineMemory | None
    spec: ModelSpec | None  # None for families that slimrl does not know

    @property
    def name(self) -> str:
        """As in messages."""
        return f"model {self.model}, group {self.number}"

    @property
    def has_cache(self) -> bool:
        """Whether the size of the KV cache is known for its model."""
        return self.memory is not None and self.memory.cache_per_token > 0

    def static(self, gpu_bytes: int) -> int:
        """The part of a GPU that a server takes for weights and cache."""
        return int(gpu_bytes * self.settings.fraction)

    def holds(self, tokens: int, gpu_bytes: int, *, per_server: int, fraction: float) -> bool:
        """Whether a server of `per_server` GPUs with `fraction` of each would have its weights and room for `tokens`.

        Without a known cache the weights decide.
        """
        assert self.memory is not None
        if self.spec is None:
            return self.memory.weights * self.per_server <= gpu_bytes * fraction * per_server
        settings = dataclasses.replace(self.settings, fraction=fraction)
        return (engine_memory(self.spec, settings, per_server, gpu_bytes).tokens or 0) >= tokens


def group_memories(
    args: Arguments, spec: ModelSpec, defaults: Mapping[str, Any], gpu_bytes: int | None
) -> tuple[GroupMemory, ...]:
    """Every group with servers, in the order of the file; none without --sglang-config.

    `spec` is the policy's model; `defaults` are the server's options on this machine. Raises UnreadableFileError if a
    weights file is broken.
    """
    return tuple(_memories(args, spec, defaults, gpu_bytes)) if not args.debug_train_only else ()


def _memories(
    args: Arguments, spec: ModelSpec, defaults: Mapping[str, Any], gpu_bytes: int | None
) -> Iterator[GroupMemory]:
    for model in args.server_models:
        own = _Model.read(Path(model.model_path or args.hf_checkpoint), None if not model.update_weights else spec)
        for number, group in enumerate(model.groups):
            if not group.servers:
                continue
            options = {**defaults, **group_flags(args, model, group).engine_options}
            settings = EngineSettings.from_options(options, own.bytes_per_weight)
            origin = "mem_fraction_static" if "mem_fraction_static" in group.overrides else settings.fraction_from
            settings = dataclasses.replace(settings, fraction_from=origin)
            size = group.num_gpus_per_engine
            memory = own.memory(settings, size, gpu_bytes)
            frozen = not model.update_weights
            yield GroupMemory(model.name, number, frozen, group.servers * size, size, settings, memory, own.spec)


@dataclasses.dataclass(frozen=True)
class _Model:
    """A served model; `spec` is None for families that slimrl does not know."""

    spec: ModelSpec | None
    files: HfFiles | None
    bytes_per_weight: float

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec | None) -> _Model:
        """From its folder; `spec` if it is known already."""
        spec = spec or _spec(folder)
        layers = _ALL_LAYERS if spec is None else spec.num_layers
        files = read_hf_files(folder, layers=layers, tied=spec is not None and spec.tied)
        per_weight = 2.0 if spec is None else bytes_per_weight(folder, files, total_parameters(spec))
        return cls(spec, files, per_weight)

    def memory(self, settings: EngineSettings, size: int, gpu_bytes: int | None) -> EngineMemory | None:
        """That of a GPU of a server of `size` GPUs."""
        if self.spec is not None:
            return engine_memory(self.spec, settings, size, gpu_bytes)
        return None if self.files is None else EngineMemory(self.files.bytes // size, 0, None, None)


def _spec(folder: Path) -> ModelSpec | None:
    try:
        return ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError):  # another family, or a variant that cannot be trained
        return None
