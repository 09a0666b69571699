"""Which stored names a checkpoint must have: compared with a family's table before any tensor is moved.

Promises that a tensor missing or left over is refused by name, so that nothing is silently dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from slimrl.weights.families import Family
from slimrl.weights.families.table import NON_PARAMETER_SUFFIXES
from slimrl.weights.layout import hf_shapes
from slimrl.weights.shape import ModelShape

LISTED_NAMES = 5  # names spelled out in a message before it turns to counting


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED_NAMES} more" if len(ordered) > LISTED_NAMES else ""
    return ", ".join(ordered[:LISTED_NAMES]) + more


def redundant_head(names: Iterable[str], family: Family, shape: ModelShape) -> str | None:
    """The name of a stored output head that repeats the tied embedding, None where there is none."""
    head = family.head.hf[0].name
    return head if shape.tied and head in set(names) else None


def check_hf_names(
    names: Iterable[str], family: Family, shape: ModelShape, where: str, carried: tuple[str, ...] = ()
) -> None:
    """Raises ValueError naming the tensors of `where` that are missing or left over.

    Buffers that follow from the config are not counted, nor is a redundant head of a tied model, nor names that
    begin with one of `carried` (`Family.carried_prefixes`).
    """
    stored = {name for name in names if not name.endswith(NON_PARAMETER_SUFFIXES) and not name.startswith(carried)}
    expected = set(family.hf_names(shape))
    stored.discard(redundant_head(stored, family, shape) or "")
    if missing := expected - stored:
        raise ValueError(
            f"{where} lacks {listed(missing)}, which a {family.model_type} model of {shape.num_layers} layers has:"
            " the checkpoint is incomplete or --num-layers is wrong"
        )
    if left_over := stored - expected:
        raise ValueError(
            f"{where} holds {listed(left_over)}, for which a {family.model_type} model of {shape.num_layers} layers"
            " has no place: check --num-layers, --untie-embeddings-and-output-weights and the model_type in config.json"
        )


def check_hf_shapes(shapes: dict[str, tuple[int, ...]], family: Family, shape: ModelShape, where: str) -> None:
    """Raises ValueError naming the first tensor whose shape is not what the sizes ask for."""
    for row in family.rows(shape):
        for part, wanted in zip(row.hf, hf_shapes(row, shape), strict=True):
            if shapes[part.name] != wanted:
                raise ValueError(
                    f"{where}: {part.name} has shape {list(shapes[part.name])} but the model flags ask for"
                    f" {list(wanted)} ({' x '.join(part.dims)}): make the flags match config.json"
                )
