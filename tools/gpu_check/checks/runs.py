"""`train.py` end to end, as a user starts it: Ray, engines, training, weight updates, shutdown, on a generated model.

Placement and size are parameters: the same code runs on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tools.gpu_check.machine import ROOT
from tools.gpu_check.record import Record

RUN = "gpu-check"
ROLLOUTS = 3
LOG_LINES = 40
# heads of 64: GPU attention kernels do not support heads as narrow as the quickstart's
TINY_SHAPE = ("--hidden-size", "128", "--num-attention-heads", "4", "--num-query-groups", "2", "--kv-channels", "64")
FLAGS = (
    "--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle", "--rm-type", "math",
    "--num-rollout", str(ROLLOUTS), "--rollout-batch-size", "8", "--n-samples-per-prompt", "8",
    "--num-steps-per-rollout", "1", "--rollout-max-response-len", "32", "--rollout-temperature", "1",
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--advantage-estimator", "grpo",
    "--entropy-coef", "0.001",  # gives a gradient even if every answer is wrong
    "--optimizer", "adam", "--lr", "1e-5", "--lr-decay-style", "constant", "--check-weight-update-equal",
    "--sglang-mem-fraction-static", "0.3", "--run-name", RUN,
)  # fmt: skip


def run(
    record: Record,
    model: str,
    placement: Sequence[str],
    bf16: bool,
    warm_start_steps: int = 200,
    shape: Sequence[str] = (),
    changes: Sequence[str] = (),
) -> None:
    """`model` is "tiny", which learns additions, or one of scripts/models with random weights.

    `shape` are flags that replace those of the latter, `changes` others of train.py.
    """
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        folder = Path(name)
        described = make_tiny(folder, warm_start_steps)
        if model != "tiny":
            described = write_random_model(folder / "model", model, shape, bf16)
        code = train(command_line(described, placement, bf16, changes), folder)
        summary = folder / "runs" / RUN / "summary.json"
        content = json.loads(summary.read_text()) if summary.exists() else {"steps": []}
        figures(record, content, code)
        if record.complaints:
            print_logs(folder / "runs" / RUN / "logs")


def command_line(described: Sequence[str], placement: Sequence[str], bf16: bool, changes: Sequence[str]) -> list[str]:
    """The flags of train.py in the folder with model/ and train.jsonl; `described` are those of the model."""
    precision = ["--bf16", "--sglang-dtype", "bfloat16"] if bf16 else []
    files = ["--hf-checkpoint", "model", "--ref-load", "model", "--prompt-data", "train.jsonl"]
    return [*described, *files, *FLAGS, *precision, *placement, *changes]


def make_tiny(folder: Path, warm_start_steps: int) -> list[str]:
    """model/, train.jsonl and the flags of the model, by tools/make_tiny_model.py."""
    made = folder / "made"
    command = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), "--output-dir", str(made), *TINY_SHAPE]
    subprocess.run([*command, "--warm-start-steps", str(warm_start_steps)], check=True)
    for name in ("model", "train.jsonl"):
        (made / name).rename(folder / name)
    script = f"source '{made}/model_args.sh'; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()


def write_random_model(folder: Path, model: str, shape: Sequence[str], bf16: bool) -> list[str]:
    """Replaces the tiny model's weights by random ones of that shape, and keeps its tokenizer; returns the flags."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tools.gpu_check.models import arguments, hf_config, model_flags

    args = arguments(model, *shape)
    tokens = {name: json.loads((folder / "config.json").read_text())[name] for name in ("eos_token_id", "pad_token_id")}
    wanted = {name: value for name, value in hf_config(args).items() if name not in ("dtype", "torch_dtype")}
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(**(wanted | tokens))).to(torch.bfloat16 if bf16 else torch.float32)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    made.save_pretrained(folder)
    return [*model_flags(model), *shape]


def train(flags: Sequence[str], folder: Path) -> int:
    """The exit code of train.py in a separate Ray cluster; its output goes to the check's log."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "WORLD_SIZE")}
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    return subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL).returncode


def figures(record: Record, summary: dict[str, Any], code: int) -> None:
    """Figures from the run's summary; a failed run fails the check."""
    steps = summary["steps"]
    record.require(code == 0, f"train.py ended with exit code {code}")
    record.figure("rollouts trained on", len(steps), f"of {ROLLOUTS}", at_least=ROLLOUTS)
    if not steps:
        return
    last = steps[-1]
    for name, phase in (("generate", "generate"), ("train", "train"), ("weight update", "update_weights")):
        record.figure(f"{name}, last step", last["seconds"][phase], "s")
    record.figure("the last step in all", last["seconds"]["total"], "s")
    record.figure(
        "log-probability difference, mean",
        max(step["train_rollout_logprob_abs_diff_mean"] for step in steps),
        at_most=mean_bound(),
    )
    record.figure(
        "log-probability difference, largest", max(step["train_rollout_logprob_abs_diff_max"] for step in steps)
    )
    record.figure("gradient norm, last step", last["grad_norm"])
    record.figure("weight version", str(last["weight_version"]))


def mean_bound() -> float:
    """The default of --ci-test for the mean difference of an optimizer step."""
    from slimrl.arguments import Arguments

    return Arguments().ci_train_rollout_logprob_abs_diff_threshold


def print_logs(folder: Path) -> None:
    """The last lines of every process of the run, for the log of the check."""
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print(f"--- {log.name}", *lines, sep="\n", flush=True)
