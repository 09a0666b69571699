"""A killed or interrupted converter leaves no folder that looks complete, and the next run succeeds."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slimrl.processes.files import partial_path
from slimrl.weights.hf_checkpoint import HfCheckpoint
from tests.tools.converting import ROOT, run_tool

pytestmark = pytest.mark.slow

LAYERS, HIDDEN, VOCAB = 60, 256, 20000
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size 1024 --num-attention-heads 4"
    f" --group-query-attention --num-query-groups 2 --vocab-size {VOCAB} --normalization RMSNorm --norm-epsilon 1e-6"
    " --rotary-base 10000 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
).split()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 0.26 GB in `hf`, so that converting takes a moment, and its `torch_dist`."""
    root = tmp_path_factory.mktemp("source")
    (root / "hf").mkdir()
    config = {"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 1024}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-6}
    config |= {"rope_theta": 10000, "tie_word_embeddings": False, "max_position_embeddings": 128, "hidden_act": "silu"}
    (root / "hf" / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {prefix + f"self_attn.{name}_proj": (HIDDEN // 2, HIDDEN) for name in "kv"}
        shapes |= {prefix + f"mlp.{name}_proj": (1024, HIDDEN) for name in ("gate", "up")}
        shapes |= {prefix + "mlp.down_proj": (HIDDEN, 1024)}
        shapes |= {prefix + name: (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    draw = torch.Generator().manual_seed(5)
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    save_file(tensors, root / "hf" / "model.safetensors", metadata={"format": "pt"})
    done = run_tool(
        "convert_hf_to_torch_dist.py", *FLAGS, "--hf-checkpoint", root / "hf", "--save", root / "torch_dist"
    )
    assert done.returncode == 0, done.stderr
    return root


def command(direction: str, source: Path, target: Path) -> list[str]:
    if direction == "there":
        words = ["convert_hf_to_torch_dist.py", *FLAGS, "--hf-checkpoint", source / "hf", "--save", target]
    else:
        words = ["convert_torch_dist_to_hf.py", "--input-dir", source / "torch_dist", "--output-dir", target]
        words += ["--origin-hf-dir", source / "hf", "--chunk-size", 20_000_000]
    return [sys.executable, str(ROOT / "tools" / str(words[0])), *map(str, words[1:])]


def start_and_stop(direction: str, source: Path, target: Path, signal_number: int, delay_s: float) -> tuple[int, str]:
    """Sends the signal `delay_s` after the partial folder appeared; returns exit code and stderr."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command(direction, source, target), env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 100
        while process.poll() is None and not partial_path(target).exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(delay_s)
        process.send_signal(signal_number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, errors


def is_whole(direction: str, source: Path, target: Path) -> bool:
    if direction == "there":
        done = run_tool("check_checkpoint.py", "--input-dir", target, "--hf-checkpoint", source / "hf")
        return done.returncode == 0
    with HfCheckpoint(source / "hf") as original, HfCheckpoint(target) as copy:
        return sorted(original.names) == sorted(copy.names) and all(
            torch.equal(copy.tensor(name), original.tensor(name)) for name in original.names
        )


@pytest.mark.parametrize("direction", ["there", "back"])
def test_kill_leaves_either_nothing_or_the_complete_output(direction, source, tmp_path):
    random.seed(11)
    target = tmp_path / "out"
    for delay_s in (0.0, random.uniform(0.02, 0.2), random.uniform(0.2, 0.6)):
        code, _ = start_and_stop(direction, source, target, signal.SIGKILL, delay_s)
        assert code in (-signal.SIGKILL, 0)
        if target.exists():
            assert is_whole(direction, source, target)
            return
        assert code == -signal.SIGKILL
    done = subprocess.run(
        command(direction, source, target), env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120, check=False
    )
    assert done.returncode == 0 and is_whole(direction, source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # leftovers of the killed runs are removed


@pytest.mark.parametrize("direction", ["there", "back"])
def test_ctrl_c_leaves_nothing_behind(direction, source, tmp_path):
    for _ in range(5):
        code, errors = start_and_stop(direction, source, tmp_path / "out", signal.SIGINT, 0.0)
        if code != 0:
            break
        shutil.rmtree(tmp_path / "out")  # on a busy machine it was complete before the signal
    assert code == 130 and "interrupted; nothing was written" in errors, errors
    assert list(tmp_path.iterdir()) == []
