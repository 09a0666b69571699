"""PEFT folders: adapter_config.json and adapter_model.safetensors, loaded into a model and exported from one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slimrl.models.adapters import AdapterConfig, AdapterMapping
from slimrl.models.families import ModelMapping
from slimrl.models.model_spec import ModelSpec
from slimrl.models.peft_config import CONFIG_NAME, WEIGHTS_NAME
from slimrl.processes.files import AtomicDir, listed
from slimrl.weights.reshard import find, global_tensors, hf_shapes, to_shard


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
                    ranks = {"rank": tp_rank, "size": tp_size} if row.expert is None else {"rank": 0, "size": 1}
                    own[name].copy_(to_shard(row, [file.get_tensor(part.name)], spec, **ranks))
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
