"""Loads a Hugging Face checkpoint into this rank's part of a Megatron model.

Promises that every parameter is written exactly once and every stored tensor is used, or a refusal that
names the tensor. Each rank reads only its own slices of the memory-mapped files; no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from slimrl.weights.families import Family, Row
from slimrl.weights.hf_files import HfCheckpoint, read_hf_config
from slimrl.weights.layout import check_tensor_parallel, to_shard
from slimrl.weights.megatron_names import find, global_tensors
from slimrl.weights.names import check_hf_names, check_hf_shapes, listed, redundant_head
from slimrl.weights.shape import ModelShape


@torch.no_grad()
def load_hf_checkpoint(
    model: nn.Module | Sequence[nn.Module],
    shape: ModelShape,
    family: Family,
    hf_dir: Path,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    etp_rank: int = 0,
    etp_size: int = 1,
    progress: Callable[[Sequence[Row]], Iterable[Row]] = iter,
) -> None:
    """Fills the parameters of `model` (a bare GPTModel of any pipeline stage, or its chunks), casting to their dtype.

    `tp_rank` of `tp_size` divides what all tokens pass, `etp_rank` of `etp_size` each expert; which experts this rank
    holds is read off the model. `progress` is handed the rows to load and passes them on, for example tqdm.
    Raises FileNotFoundError for missing files and ValueError for a tensor missing, left over or of another
    shape than the flags describe, naming it.
    """
    check_tensor_parallel(shape, tp_size, etp_size)
    parameters = global_tensors(model)
    with HfCheckpoint(hf_dir) as checkpoint:
        check_checkpoint(checkpoint, shape, family)
        for row in progress(_local_rows(family, shape, parameters)):
            parts = [checkpoint.tensor(part.name) for part in row.hf]
            rank, size = (tp_rank, tp_size) if row.expert is None else (etp_rank, etp_size)
            shard = to_shard(row, parts, shape, rank=rank, size=size)
            _copy(shard, parameters.pop(find(row, parameters)), row)
    if parameters:
        raise ValueError(
            f"the model has {listed(parameters)}, which no tensor of {hf_dir} fills: the model flags describe"
            f" something that the table of {family.model_type} does not name"
        )


def check_checkpoint(checkpoint: HfCheckpoint, shape: ModelShape, family: Family) -> None:
    """Raises ValueError where the stored names, shapes or a redundant head do not fit the family and sizes.

    Layers that predict further tokens are left alone: `Family.carried_prefixes` names them.
    """
    where = str(checkpoint.folder)
    carried = family.carried_prefixes(read_hf_config(checkpoint.folder))
    check_hf_names(checkpoint.names, family, shape, where, carried)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
    check_hf_shapes(shapes, family, shape, where)
    head = redundant_head(checkpoint.names, family, shape)
    if head is not None and not torch.equal(
        checkpoint.tensor(head), checkpoint.tensor(embedding := family.embedding.hf[0].name)
    ):
        raise ValueError(
            f"{where}: config.json ties the output head to the embedding, yet {head} differs from {embedding}:"
            " set tie_word_embeddings to false, or remove that tensor from the checkpoint"
        )


def _local_rows(family: Family, shape: ModelShape, parameters: dict[str, Tensor]) -> list[Row]:
    """The rows whose Megatron tensor this rank has; a tied last pipeline stage has the embedding as its head."""
    rows = [row for row in family.rows(shape) if find(row, parameters) is not None]
    if shape.tied and find(family.head, parameters) is not None:
        rows.append(Row(family.head.megatron, family.embedding.hf, shard_dim=family.head.shard_dim))
    return rows


def _copy(shard: Tensor, parameter: Tensor, row: Row) -> None:
    if shard.shape != parameter.shape:
        raise ValueError(
            f"{row.megatron[0]} has shape {list(parameter.shape)} in the model but its table makes"
            f" {list(shard.shape)}: the model was not built from the same flags"
        )
    parameter.copy_(shard)
