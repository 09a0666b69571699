"""Without a flag the model's own number format is trained in."""

from __future__ import annotations

import json

import pytest

from slimrl.arguments import read_args


def precision(recipe, more: str = "", **config: str) -> tuple[bool, bool, int]:
    path = recipe.dir / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    args, problems = read_args(recipe.line(more))
    assert problems == []
    return args.bf16, args.fp16, sum("as config.json" in note for note in args.notes)


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
def test_the_models_format_is_taken(recipe, config: dict[str, str], expected: tuple[bool, bool, int]):
    assert precision(recipe, **config) == expected


def test_a_flag_decides(recipe):
    assert precision(recipe, "--no-bf16", torch_dtype="bfloat16") == (False, False, 0)
    assert precision(recipe, "--fp16", torch_dtype="bfloat16") == (False, True, 0)
    assert precision(recipe, "--bf16", torch_dtype="float32") == (True, False, 0)


OFFLOADED = "--optimizer-cpu-offload --use-precision-aware-optimizer --overlap-cpu-optimizer-d2h-h2d"


def test_an_offloaded_optimizer_has_bf16_weights_where_nobody_says_otherwise(recipe):
    args, problems = read_args(recipe.line(OFFLOADED))
    assert problems == []
    assert args.bf16
    assert "--optimizer-cpu-offload works on 16-bit weights" in " ".join(args.notes)


def test_an_offloaded_optimizer_refuses_weights_that_are_fp32_on_purpose(recipe):
    _, problems = read_args(recipe.line(f"{OFFLOADED} --no-bf16"))
    assert [problem.flag for problem in problems] == ["--optimizer-cpu-offload"]
