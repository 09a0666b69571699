"""From a torch_dist checkpoint back to a Hugging Face folder, by the same table that loads one.

Promises a folder with every tensor of the original exactly once, in the original's dtypes, beside the
original's tokenizer and config; it appears whole or not at all. Needs no process group, no model, no GPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from slimrl.weights.families import Family, Row, family_for
from slimrl.weights.hf_files import MAX_SHARD_BYTES, HfCheckpoint, HfWriter, read_hf_config
from slimrl.weights.layout import from_shards, megatron_shape
from slimrl.weights.names import check_hf_names, listed, redundant_head
from slimrl.weights.shape import ModelShape
from slimrl.weights.torch_dist import StoredTensor, TorchDistCheckpoint

# what the original folder may hold besides the files a loader of the result wants
_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def torch_dist_to_hf(
    input_dir: Path,
    output_dir: Path,
    origin_hf_dir: Path,
    *,
    vocab_size: int | None = None,
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[Sequence[Row]], Iterable[Row]] = iter,
) -> None:
    """Writes the checkpoint `input_dir` as the Hugging Face folder `output_dir`, modelled on `origin_hf_dir`.

    `vocab_size` keeps that many rows of the embedding (default: what the origin's config.json says) and is
    written to the new config.json. Raises FileExistsError for an existing output folder without `force`,
    FileNotFoundError for missing inputs, ValueError naming a tensor that is missing, left over or of a wrong shape.
    """
    config = read_hf_config(origin_hf_dir)
    family = family_for(config)
    shape = ModelShape.from_hf_config(config)
    if vocab_size is not None:
        shape = dataclasses.replace(shape, vocab_size=vocab_size)
        config["vocab_size"] = vocab_size
    checkpoint = TorchDistCheckpoint(input_dir)
    places = _places(checkpoint, family, shape)
    with (
        HfCheckpoint(origin_hf_dir) as origin,
        HfWriter(output_dir, max_shard_bytes=max_shard_bytes, replace=force) as writer,
    ):
        check_hf_names(origin.names, family, shape, str(origin.folder))
        head = redundant_head(origin.names, family, shape)
        for row in progress(list(places)):
            for name, tensor in _hf_tensors(row, checkpoint.read(places[row]), shape):
                writer.add(name, tensor.to(origin.dtype(name)))
                if head is not None and row.hf == family.embedding.hf:
                    writer.add(head, tensor.to(origin.dtype(head)))
        check_hf_names(writer.names, family, shape, str(writer.folder))
        writer.copy_files(_companions(Path(origin_hf_dir)))
        writer.write_text("config.json", json.dumps(config, indent=2) + "\n")


def _places(checkpoint: TorchDistCheckpoint, family: Family, shape: ModelShape) -> dict[Row, StoredTensor]:
    """Where each row lies; refuses a checkpoint of another model before anything is written."""
    places: dict[Row, StoredTensor] = {}
    unused = checkpoint.model_keys
    for row in family.rows(shape):
        found = next((place for name in row.megatron if (place := checkpoint.find(name)) is not None), None)
        if found is None:
            raise ValueError(
                f"{checkpoint.folder} lacks {row.megatron[0]}, which the {family.model_type} model in --origin-hf-dir"
                f" ({shape.num_layers} layers) has: give the origin that the checkpoint was converted from"
            )
        wanted = megatron_shape(row, dataclasses.replace(shape, padded_vocab_size=found.shape[0]))
        too_few = row.padded_vocab and found.shape[0] < shape.vocab_size
        if found.shape != wanted or too_few:
            rows = f"at least {shape.vocab_size} rows" if too_few else f"shape {list(wanted)}"
            raise ValueError(
                f"{checkpoint.folder}: {row.megatron[0]} has shape {list(found.shape)} but --origin-hf-dir"
                f"{' (or --vocab-size)' if row.padded_vocab else ''} asks for {rows}: give the matching origin"
            )
        places[row] = found
        unused.discard(found.key)
    deeper = [key for key in checkpoint.model_keys if (checkpoint.layers_of(key) or 0) > shape.num_layers]
    if left_over := unused.union(deeper):
        raise ValueError(
            f"{checkpoint.folder} holds {listed(left_over)} beyond the {family.model_type} model of {shape.num_layers}"
            " layers in --origin-hf-dir: give the origin that the checkpoint was converted from"
        )
    return places


def _hf_tensors(row: Row, stored: Tensor, shape: ModelShape) -> Iterable[tuple[str, Tensor]]:
    # a checkpoint holds what one tensor-parallel rank of one would have
    return zip([part.name for part in row.hf], from_shards(row, [stored], shape), strict=True)


def _companions(origin: Path) -> list[Path]:
    """Tokenizer, chat template, generation config and the like."""
    return sorted(
        path
        for path in origin.iterdir()
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_SUFFIXES)
    )
