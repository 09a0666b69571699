"""A trained checkpoint in use: exported, loaded by transformers, served, queried."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimrl.arguments import Arguments, read_args
from slimrl.engines.http import is_reachable
from slimrl.processes import ManagedProcess
from tests.end_to_end.harness import ROOT
from tests.megatron.launch import RankPool, free_port

SEQUENCES = [[5, 17, 80, 3, 9, 41, 41, 2], [100, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]


def exported(tiny: Any, checkpoint: Path, folder: Path) -> Path:
    """The checkpoint as a Hugging Face folder, by the converter; made once."""
    if not folder.exists():
        command = [sys.executable, ROOT / "tools/convert_torch_dist_to_hf.py", "--input-dir", checkpoint]
        subprocess.run([*command, "--output-dir", folder, "--origin-hf-dir", tiny.model], check=True, timeout=120)
    return folder


def megatron_logits(rank: int, world_size: int, init_method: str, args: Arguments, checkpoint: Path) -> list[Tensor]:
    """Logits [tokens, vocab] of each of SEQUENCES by the checkpoint itself."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from slimrl.megatron import parallel
    from slimrl.megatron.checkpoint import start
    from slimrl.megatron.model import model_builder as model

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    built = model.build_model(args, state).eval()
    start.load_model_only(built, checkpoint)
    results = []
    for sequence in SEQUENCES:
        bounds, size = torch.tensor([0, len(sequence)], dtype=torch.int32), len(sequence)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=size, max_seqlen_kv=size
        )
        with torch.no_grad():
            results.append(built(torch.tensor([sequence]), None, None, packed_seq_params=packed)[0])
    parallel.shutdown()
    return [logits[:, : args.vocab_size] for logits in results]


def largest_logit_gap(tiny: Any, checkpoint: Path, folder: Path) -> float:
    """The largest difference between Megatron's logits and those of transformers."""
    from transformers import AutoModelForCausalLM

    args, _ = read_args(tiny.model_args(), entry="convert_torch_dist_to_hf.py")
    with RankPool(1) as pool:
        ours = pool.run(megatron_logits, args, checkpoint)[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = [model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES]
    assert max(float(logits.abs().max()) for logits in theirs) > 2  # otherwise the comparison would prove nothing
    return max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def served(folder: Path, log_folder: Path, *flags: str, port: int | None = None) -> Iterator[str]:
    """Serves the model with the command of docs/serving.md and further flags; yields the server's URL."""
    port = free_port() if port is None else port
    command = [
        sys.executable,
        "-m",
        "slimrl.engines.sglang.cpu_patches",
        "--model-path",
        str(folder),
        "--port",
        str(port),
        *flags,
    ]
    server = ManagedProcess(
        command,
        name="server",
        log_path=log_folder / "server.log",
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        shared_memory_prefixes=("sglang_", "sgl_", "multi_tokenizer_args_"),
    )
    server.start()
    try:
        server.wait_until(lambda: is_reachable(f"http://127.0.0.1:{port}/health_generate", timeout_s=10), 120)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def chat(url: str, question: str, *, model: str = "default", key: str = "none", **template: bool) -> str:
    """One greedy answer, through OpenAI's client; `template` are the switches of the chat template."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=16,
            extra_body={"chat_template_kwargs": template} if template else None,
        )
    return answer.choices[0].message.content


def greedy(folder: Path, question: str, **template: bool) -> str:
    """What transformers generates greedily for the same chat; `template` as in `chat`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **template
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
