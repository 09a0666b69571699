"""Without a flag, training uses the model's own number format."""

from __future__ import annotations

import json

import pytest

from slimrl.arguments import read_args


def precision(recipe, more: str = "", **config: str) -> tuple[bool, bool, int]:
    path = recipe.dir / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    args, problems = read_args(recipe.line(more))
    assert problems == []
    return args.bf16, args.fp16, sum("dtype in config.json" in note for note in args.notes)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, (True, False, 1)),
        ({"dtype": "bfloat16"}, (True, False, 1)),
        ({"dtype": "float16"}, (False, True, 1)),
        ({"dtype": "float32"}, (False, False, 0)),
        ({}, (False, False, 0)),
    ],
)
def test_model_dtype_is_the_default(recipe, config: dict[str, str], expected: tuple[bool, bool, int]):
    assert precision(recipe, **config) == expected


def test_flag_overrides_the_model_dtype(recipe):
    assert precision(recipe, "--no-bf16", torch_dtype="bfloat16") == (False, False, 0)
    assert precision(recipe, "--fp16", torch_dtype="bfloat16") == (False, True, 0)
    assert precision(recipe, "--bf16", torch_dtype="float32") == (True, False, 0)


OFFLOADED = "--optimizer-cpu-offload --use-precision-aware-optimizer --overlap-cpu-optimizer-d2h-h2d"


def test_offloaded_optimizer_defaults_to_bf16_weights(recipe):
    args, problems = read_args(recipe.line(OFFLOADED))
    assert problems == []
    assert args.bf16
    assert "--optimizer-cpu-offload needs 16-bit weights" in " ".join(args.notes)


def test_offloaded_optimizer_rejects_explicit_fp32_weights(recipe):
    _, problems = read_args(recipe.line(f"{OFFLOADED} --no-bf16"))
    assert [problem.flag for problem in problems] == ["--optimizer-cpu-offload"]


@pytest.mark.parametrize(("flags", "expected"), [("--optimizer muon", False), ("--optimizer sgd", False), ("", True)])
def test_only_adam_has_the_distributed_optimizer_by_default(recipe, flags: str, expected: bool):
    args, problems = read_args(recipe.line(flags))
    assert args.use_distributed_optimizer is expected
    assert all(problem.flag.startswith("--adam-") for problem in problems)  # the recipe's settings of Adam, with SGD
