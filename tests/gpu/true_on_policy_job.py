"""Run as a program: the operators of --true-on-policy-mode on a GPU, as training and as a server's process have them.

Prints the largest difference of each as JSON. Without a GPU it needs TRITON_INTERPRET=1 and Triton: the kernels then
run on the CPU, in float16, because Triton's interpreter has no products in bfloat16.
"""

from __future__ import annotations

import json
import runpy
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor

INTERPRETED = not torch.cuda.is_available()
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
TOKENS, SIZE, HEAD, TEMPERATURE = 200, 96, 16, 0.7


def normal(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)
    return values if INTERPRETED else values.cuda()


def start_as_a_servers_process() -> None:
    """What Python does in a process that SGLang has spawned: it imports the entry point again."""
    if INTERPRETED:
        from slimrl.engines.sglang import cpu_patches

        cpu_patches.install()
        cpu_patches.patch()
    sys.argv = ["entry.py", "server", "--batch-invariant"]
    runpy.run_module("slimrl.engines.sglang.entry", run_name="__mp_main__")


def products() -> tuple[Tensor, Tensor]:
    from megatron.core.tensor_parallel import layers
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    x, weight = normal(TOKENS, SIZE), normal(130, SIZE, seed=1)
    return (
        UnquantizedLinearMethod.apply(None, types.SimpleNamespace(weight=weight), x[:7]),
        layers.torch.matmul(x[:, None], weight.t())[:7, 0],
    )


def norms() -> tuple[Tensor, Tensor]:
    from sglang.srt.layers.layernorm import RMSNorm as ServersNorm

    from slimrl.megatron.model.layers import RMSNorm

    x, residual, weight = normal(TOKENS, SIZE), normal(TOKENS, SIZE, seed=1), normal(SIZE, seed=2)
    servers = types.SimpleNamespace(
        weight=torch.nn.Parameter(weight), variance_epsilon=1e-6, variance_size_override=None
    )
    config = types.SimpleNamespace(batch_invariant_mode=True, params_dtype=DTYPE, sequence_parallel=False)
    trainers = RMSNorm(config, SIZE).to(x.device)
    trainers.weight.data = weight
    return ServersNorm.forward_cuda(servers, x[9:], residual[9:])[0], trainers((residual + x)[:, None])[9:, 0]


def rotations() -> tuple[Tensor, Tensor]:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding as ServersEmbedding

    from slimrl.megatron.model import layers

    query = normal(TOKENS, 4 * HEAD)
    positions = torch.arange(TOKENS, device=query.device).flip(0) // 2
    with torch.device(query.device):
        servers = ServersEmbedding(HEAD, HEAD, 64, 10000, True, DTYPE)
        servers._ensure_cos_sin_cache_length(TOKENS)
    found, _ = ServersEmbedding.forward_cuda(servers, positions, query, query[:, :HEAD])
    angles = RotaryEmbedding(HEAD, 1.0, rotary_base=10000, use_cpu_initialization=INTERPRETED, cp_group=None)
    rows = angles.get_emb(TOKENS).to(query.device)[positions]
    own = layers._rotated(query.view(TOKENS, 1, 4, HEAD), rows, **layers._PLAIN_ROTATION)
    return found, own.reshape(TOKENS, -1)


def activations() -> tuple[Tensor, Tensor]:
    from sglang.srt.layers.activation import SiluAndMul

    from slimrl.algorithms.batch_invariant import operators

    x = normal(TOKENS, 2 * SIZE)
    first, second = x.chunk(2, dim=-1)
    return SiluAndMul.forward_cuda(None, x), operators.silu(first) * second


def log_probs() -> tuple[Tensor, Tensor]:
    from sglang.srt.batch_invariant_ops import batch_invariant_ops
    from sglang.srt.layers.logits_processor import LogitsProcessor

    from slimrl.algorithms.batch_invariant import operators

    hidden, weight = normal(TOKENS, SIZE), normal(640, SIZE, seed=1)
    targets = torch.arange(TOKENS, device=hidden.device)
    servers = []
    # decoding, one token at a time; numpy, the interpreter's, adds in an order that depends on a row's place in a block
    for rows, ids in zip(*(x.split(TOKENS if INTERPRETED else 1) for x in (hidden, targets)), strict=True):
        logits = LogitsProcessor._compute_lm_head(None, rows, types.SimpleNamespace(weight=weight)).float()
        logits.div_(torch.full((len(rows), 1), TEMPERATURE, device=hidden.device))
        servers.append(batch_invariant_ops.log_softmax(logits).gather(1, ids[:, None])[:, 0])
    settings = {"vocab_size": 640, "group": None, "temperature": TEMPERATURE, "chunk_size": 640}
    return torch.cat(servers), operators.scored(hidden, weight, targets, **settings)[0]


def main() -> None:
    start_as_a_servers_process()
    if INTERPRETED:
        from slimrl.algorithms.batch_invariant import triton_kernels

        triton_kernels.DTYPE = DTYPE
    sys.modules.pop("megatron", None)
    from slimrl.megatron import patches

    patches.activate(batch_invariant=True)
    found: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "product": products, "norm": norms, "rotation": rotations, "activation": activations, "log-probs": log_probs
    }  # fmt: skip
    print(json.dumps({name: (a - b).detach().abs().max().item() for name, one in found.items() for a, b in [one()]}))


if __name__ == "__main__":
    main()
