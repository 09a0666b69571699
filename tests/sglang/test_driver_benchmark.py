"""The benchmarks of the rollout driver run, at a size too small to measure anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_benchmark_runs_its_rounds_through_the_real_router():
    sizes = ["--rounds", "1", "--prompts", "8", "--samples", "4", "--response-tokens", "16", "--concurrency", "4"]
    line = [sys.executable, str(ROOT / "benchmarks" / "rollout_driver.py"), *sizes]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 samples of 16 tokens per rollout, 1 rounds, 2 servers, 8 requests in flight" in done.stdout
    for way in ("slimrl, prompt to batch", "aiohttp, answers", "httpx, answers", "router, nothing read"):
        assert int(re.search(rf"^{way}\D*(\d+)", done.stdout, re.MULTILINE)[1]) > 0
    assert "driver's loop" in done.stdout
    for peer in ("aiohttp", "httpx"):
        assert float(re.search(rf"^event loop, slimrl / {peer}, .*: ([\d.]+)$", done.stdout, re.MULTILINE)[1]) > 0
    # 32 x (tokens int64 + log-probabilities and mask float32) and the columns of one value a sample
    assert 16 * (8 + 4 + 4) < int(re.search(r"(\d+) bytes per sample", done.stdout)[1]) < 4000


@pytest.mark.slow
def test_memory_benchmark_reports_what_samples_add():
    sizes = ["--prompts", "8", "--samples", "4", "--response-tokens", "16", "--concurrency", "4"]
    line = [sys.executable, str(ROOT / "benchmarks" / "driver_memory.py"), *sizes]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 samples of 16 tokens in flight, 8 requests at a time" in done.stdout
    for name in ("all samples generated", "most, with the batches"):
        assert re.search(rf"^{name}: -?\d+ MiB more, -?[\d.]+ KiB per sample$", done.stdout, re.MULTILINE)
