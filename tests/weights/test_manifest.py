"""The cheap check of every weight update: a bucket that differs from the mapping is found before a server resumes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slimrl.models.families import family_for
from slimrl.weights.reshard import hf_shapes
from slimrl.weights.update.buckets import ReusedBuffer, iter_buckets
from slimrl.weights.update.verify import Manifest
from tests.weights.test_weight_updater import SHAPE

FAMILY = family_for({"model_type": "qwen3"})


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        (part.name, torch.zeros(dims))
        for row in FAMILY.rows(SHAPE)
        for part, dims in zip(row.hf, hf_shapes(row, SHAPE), strict=True)
    ]


def check_off(named: list[tuple[str, torch.Tensor]]) -> None:
    manifest = Manifest(FAMILY, SHAPE)
    for bucket in iter_buckets(iter(named), 4096, ReusedBuffer(torch.device("cpu"))):
        manifest.check_off(bucket)
    manifest.close()


def test_complete_model_is_accepted():
    check_off(tensors())


def test_missing_tensor_is_named_at_any_position():
    with pytest.raises(ValueError, match=r"has \S+\.0\.mlp\.up_proj\.weight.*has \S+\.0\.mlp\.gate_proj"):
        check_off([entry for entry in tensors() if not entry[0].endswith("layers.0.mlp.gate_proj.weight")])
    with pytest.raises(ValueError, match=r"^model\.norm\.weight of the mapping of qwen3 was not sent"):
        check_off(tensors()[:-1])


def test_tensor_sent_twice_or_in_another_shape_is_named():
    named = tensors()
    with pytest.raises(ValueError, match=r"has model\.norm\.weight \[8\].*the mapping of qwen3 has nothing"):
        check_off([*named, named[-1]])
    with pytest.raises(ValueError, match=r"has model\.norm\.weight \[9\].*has model\.norm\.weight \[8\]"):
        check_off([*named[:-1], ("model.norm.weight", torch.zeros(9))])


def test_bytes_that_belong_to_no_tensor_are_found():
    (bucket,) = iter_buckets(iter(tensors()), 1 << 20, ReusedBuffer(torch.device("cpu")))
    longer = dataclasses.replace(bucket, flat=torch.zeros(bucket.flat.numel() + 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="wrongly packed"):
        Manifest(FAMILY, SHAPE).check_off(longer)
