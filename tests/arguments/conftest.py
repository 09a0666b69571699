"""The Qwen3-4B recipe as data, over files that exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimrl.arguments.validation.numerics import fused

QWEN3_4B_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

MODEL = """--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
 --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
 --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128
 --qk-layernorm"""
CKPT = "--hf-checkpoint {dir}/hf --ref-load {dir}/ref --load {dir}/ckpt --save {dir}/ckpt --save-interval 20"
ROLLOUT = """--prompt-data {dir}/train.jsonl --input-key prompt --label-key label --apply-chat-template
 --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
 --rollout-max-response-len 8192 --rollout-temperature 0.8 --num-steps-per-rollout 1 --balance-data"""
EVAL = """--eval-interval 5 --eval-prompt-data aime {dir}/aime-2024.jsonl --n-samples-per-eval-prompt 16
 --eval-max-response-len 16384 --eval-top-p 0.7"""
PERF = """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full
 --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216"""
GRPO = """--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00
 --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28"""
OPTIMIZER = """--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
 --adam-beta2 0.98"""
SGLANG = "--rollout-num-gpus-per-engine 2 --sglang-server-concurrency 160"
MISC = """--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
 --attention-softmax-in-fp32 --attention-backend flash"""
COLOCATED = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate"
SPLIT = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


class Recipe:
    """A valid command line; `line(more)` appends to it, since the last occurrence of a flag wins."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder

    def line(self, more: str = "", *, placement: str = COLOCATED, without: str = "") -> list[str]:
        arrays = (placement, MODEL, CKPT, ROLLOUT, EVAL, PERF, GRPO, OPTIMIZER, SGLANG, MISC, more)
        line = " ".join(arrays).format(dir=self.dir).split()
        if without:
            start = line.index(without)
            end = next((i for i in range(start + 1, len(line)) if line[i].startswith("--")), len(line))
            del line[start:end]
        return line

    def supervised_line(self, more: str = "") -> list[str]:
        """The recipe without the flags that supervised training does not read."""
        line = self.line("--loss-type sft_loss")
        return [
            *without(
                line, "--advantage-estimator", "--eps-clip", "--use-kl-loss", "--kl-loss-type", "--rollout-temperature"
            ),
            *more.format(dir=self.dir).split(),
        ]

    def model_line(self) -> list[str]:
        return f"{MODEL} --hf-checkpoint {self.dir}/hf".split()

    def write_config(self, **changes: object) -> None:
        config = {key: value for key, value in {**QWEN3_4B_CONFIG, **changes}.items() if value != "absent"}
        (self.dir / "hf" / "config.json").write_text(json.dumps(config))


def without(line: list[str], *beginnings: str) -> list[str]:
    """The line without the flags that begin so, and their values."""
    kept, leaving = [], False
    for word in line:
        if word.startswith("--"):
            leaving = word.startswith(beginnings)
        kept += [] if leaving else [word]
    return kept


@pytest.fixture(autouse=True)
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of Transformer Engine's kernels see none, also on a machine that has it; their tests describe machines."""
    monkeypatch.setattr(fused, "transformer_engine_installed", lambda: False)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """The recipe over a Hugging Face folder, a reference checkpoint and data in `tmp_path`."""
    (tmp_path / "hf").mkdir()
    complete_model(tmp_path / "hf", tokens=151669)
    make_checkpoint(tmp_path / "ref", "release")
    row = json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "label": "2"})
    for name in ("train", "aime-2024"):
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")
    made = Recipe(tmp_path)
    made.write_config()
    return made


def complete_model(folder: Path, *, tokens: int = 2) -> None:
    """Writes what the command line checks of a model folder, besides config.json."""
    write_tokenizer(folder, tokens)
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "pytorch_model.bin").write_bytes(b"weights")


def write_tokenizer(folder: Path, tokens: int) -> None:
    """Writes a tokenizer with what the command line checks; the last id is that of an added token."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    added = [{"id": tokens - 1, "content": "<|end|>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))


def make_checkpoint(folder: Path, *names: str) -> None:
    """Makes a torch_dist folder with what the command line checks; the last name is the latest."""
    for name in names:
        (folder / name).mkdir(parents=True)
        for file in ("metadata.json", ".metadata"):
            (folder / name / file).touch()
    latest = names[-1].removeprefix("iter_").lstrip("0") or "0"
    (folder / "latest_checkpointed_iteration.txt").write_text(latest)
