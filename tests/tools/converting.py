"""Runs the two converters as a user does, on tiny models with the flags that describe them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tools import forked

ROOT = Path(__file__).resolve().parents[2]
SHARED_FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention"
    " --num-query-groups 2 --vocab-size 150 --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 10000"
    " --swiglu --disable-bias-linear"
)
FAMILY_FLAGS = {
    "qwen3": ["--qk-layernorm", "--kv-channels", "16"],
    "qwen2": ["--add-qkv-bias"],
    "llama": [],
}


def model_args(model_type: str, *, tied: bool) -> list[str]:
    """MODEL_ARGS of `tests.weights.models.tiny_hf_model`."""
    return [
        *SHARED_FLAGS.split(),
        *FAMILY_FLAGS[model_type],
        *([] if tied else ["--untie-embeddings-and-output-weights"]),
    ]


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The result of `tools/<name>` with captured output; in a process that has imported most of its packages."""
    return forked.run(ROOT / "tools" / name, list(map(str, arguments)), _environment(), timeout=120)


def run_tool_subprocess(name: str, *arguments: object, python_path: str = "") -> subprocess.CompletedProcess[str]:
    """Like `run_tool`, in a new interpreter, as a user starts it."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=_environment(python_path),
        check=False,
    )


def _environment(python_path: str = "") -> dict[str, str]:
    path = os.pathsep.join(filter(None, [python_path, str(ROOT)]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
