"""Rules about the folder of --hf-checkpoint: a readable tokenizer and complete weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slimrl.arguments import PassthroughFlag, read_args
from slimrl.arguments.dry_run import Machine, PlanContext, make_plan, warnings
from tests.arguments.conftest import write_tokenizer
from tests.arguments.dry_run.test_files import safetensors

TABLES = {"sglang": lambda: {"load-format": PassthroughFlag("load_format")}}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7031645\n"


def _remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names]


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)


def _vocabulary_of_files(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 1}')
    (folder / "added_tokens.json").write_text('{"<|end|>": 151936}')


def _unigram(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 151937}}))


def _shards(*present: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "pytorch_model.bin").unlink()
        files = {
            "a.weight": "model-1.safetensors",
            "b.weight": "model-2.safetensors",
            "c.weight": "model-3.safetensors",
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        for name in present:
            safetensors(folder / name, {"a.weight": (4, 4)})

    return change


def _cut_short(folder: Path) -> None:
    (folder / "pytorch_model.bin").unlink()
    path = folder / "model.safetensors"
    safetensors(path, {"a.weight": (64, 64)})
    path.write_bytes(path.read_bytes()[:-1])


# rule -> changes to the folder that pass, changes that do not with their error
CASES: dict[str, tuple[list[Callable[[Path], object]], list[tuple[Callable[[Path], object], str]]]] = {
    "tokenizer_fits_the_model": (
        [
            lambda folder: write_tokenizer(folder, 151936),
            lambda folder: ((folder / "tokenizer.json").unlink(), (folder / "tokenizer.model").write_bytes(b"\x0a")),
            lambda folder: ((folder / "tokenizer.json").unlink(), (folder / "tokenization_kimi.py").touch()),
            _write("tokenizer_config.json", "{}"),
        ],
        [
            (
                _remove("tokenizer.json"),
                "--hf-checkpoint {hf} has no tokenizer (none of tokenizer.json, tokenizer.model, vocab.json, vocab.txt,"
                " spiece.model): copy its files there too.",
            ),
            (
                _write("tokenizer.json", '{"model": {"vocab": {"a": 0, "b"'),
                "--hf-checkpoint {hf} has a tokenizer.json that is not JSON (Expecting ':' delimiter: line 1 column 33"
                " (char 32)): copy the model again.",
            ),
            (_write("tokenizer.json", ""), "--hf-checkpoint {hf} has an empty tokenizer.json: copy the model again."),
            (
                _write("tokenizer.json", LFS),
                "--hf-checkpoint {hf} has a Git LFS pointer in place of its tokenizer.json: fetch the files (git lfs"
                " pull).",
            ),
            (
                _write("tokenizer.json", "{}"),
                "--hf-checkpoint {hf} has a tokenizer.json without a model: copy the model again.",
            ),
            (
                _write("tokenizer_config.json", "[]"),
                "--hf-checkpoint {hf} has a tokenizer_config.json that is not a JSON object: copy the model again.",
            ),
            (
                lambda folder: write_tokenizer(folder, 151937),
                "--vocab-size 151936 is less than the 151937 tokens of {hf}/tokenizer.json, and the model has no rows"
                " for the last ids: use the tokenizer of this model, or a model with more rows.",
            ),
            (
                _vocabulary_of_files,
                "--vocab-size 151936 is less than the 151937 tokens of {hf}/vocab.json, and the model has no rows for"
                " the last ids: use the tokenizer of this model, or a model with more rows.",
            ),
            (
                _unigram,
                "--vocab-size 151936 is less than the 151937 tokens of {hf}/tokenizer.json, and the model has no rows"
                " for the last ids: use the tokenizer of this model, or a model with more rows.",
            ),
        ],
    ),
    "engines_have_weights_to_load": (
        [
            lambda folder: (
                (folder / "pytorch_model.bin").unlink(),
                safetensors(folder / "m.safetensors", {"a": (2,)}),
            ),
            _shards("model-1.safetensors", "model-2.safetensors", "model-3.safetensors"),
        ],
        [
            (
                _remove("pytorch_model.bin"),
                "--hf-checkpoint {hf} has no weights (no .safetensors file), which the engines load: copy them there"
                " too.",
            ),
            (
                _shards(),
                "--hf-checkpoint {hf} has no weights (no .safetensors file), which the engines load: copy them there"
                " too.",
            ),
            (
                _shards("model-1.safetensors"),
                "--hf-checkpoint {hf} is incomplete, its index names model-2.safetensors and 1 more files that do"
                " not exist: copy the model again.",
            ),
            (
                lambda folder: ((folder / "pytorch_model.bin").unlink(), (folder / "m.safetensors").write_text(LFS)),
                "--hf-checkpoint {hf} is not whole: {hf}/m.safetensors is truncated or not a safetensors file: copy"
                " it again.",
            ),
            (
                _cut_short,
                "--hf-checkpoint {hf} is not whole: {hf}/model.safetensors is truncated, its header declares 8192 bytes"
                " of tensors: copy it again.",
            ),
        ],
    ),
}


@pytest.mark.parametrize("change", [change for good, _ in CASES.values() for change in good], ids=lambda _: "passes")
def test_usable_folder_is_accepted(recipe, change):
    change(recipe.dir / "hf")
    assert [str(problem) for problem in read_args(recipe.line())[1]] == []


@pytest.mark.parametrize(("change", "sentence"), [case for _, bad in CASES.values() for case in bad])
def test_unusable_folder_is_one_error(recipe, change, sentence):
    change(recipe.dir / "hf")
    problems = [str(problem) for problem in read_args(recipe.line())[1]]
    assert problems == [sentence.format(hf=recipe.dir / "hf")]


@pytest.mark.parametrize(
    "more",
    [
        "--debug-train-only --load-debug-rollout-data {rollout_id}.jsonl",
        "--sglang-load-format dummy",
        "--dry-run --gpu-memory-gib 80",
    ],
)
def test_unused_weights_may_be_missing(recipe, more, monkeypatch):
    monkeypatch.chdir(recipe.dir)
    (recipe.dir / "0.jsonl").touch()
    (recipe.dir / "hf" / "pytorch_model.bin").unlink()
    line = [*recipe.line(), *more.split()]
    assert [str(problem) for problem in read_args(line, passthrough=TABLES)[1]] == []


def test_plan_without_weights_reports_that_a_run_would_be_rejected(recipe):
    surroundings = PlanContext(Machine(gpus=(), host=None))
    line = recipe.line("--dry-run --gpu-memory-gib 80")
    assert warnings(make_plan(read_args(line)[0], "train.py", surroundings)) == []
    (recipe.dir / "hf" / "pytorch_model.bin").unlink()
    (said,) = warnings(make_plan(read_args(line)[0], "train.py", surroundings))
    assert said.startswith(f"--hf-checkpoint {recipe.dir}/hf has no weights (no .safetensors file)")


def test_vocabulary_that_contradicts_config_json_is_one_error(recipe):
    problems = read_args(recipe.line("--vocab-size 1000"))[1]
    assert len(problems) == 1
    assert "config.json" in str(problems[0])
