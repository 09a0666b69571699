"""Log-probabilities and entropies of tokens, forward and backward: time per token, and memory against the logits'.

    python benchmarks/log_probs.py [--tokens 512 1536 2048] [--hidden 1024] [--vocab 37984] [--rounds 5]

Three tables. From logits: slimrl's `vocab_parallel_log_probs` compared with plain torch (log_softmax, gather, entropy,
with autograd) and megatron-core's `vocab_parallel_cross_entropy`, which has no entropy. From hidden states, including
the output layer's three matrix products: slimrl's `output_log_probs`, which keeps no logits and does a fourth product,
compared with the same layer with logits kept and with plain torch. The Jensen-Shannon divergence from a teacher's
hidden states and weight: slimrl's `output_divergence`, which keeps the logits of neither model, compared with plain
torch as TRL's `generalized_jsd_loss` computes it. The default vocabulary is Qwen3's over four tensor-parallel GPUs.

Targets: from logits less than 0.1 of their bytes in addition to them and their gradient; from hidden states at most
1.35 times the time of the layer that keeps its logits. The methods run in interleaved rounds; times are medians of CPU
time, which other load does not affect. Memory is the peak of live tensors created by the method, measured after every
operation, without the gradients of the inputs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from ratios import add_json_option, write_ratios
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimrl.algorithms.divergence import Divergence, output_divergence
from slimrl.algorithms.log_probs import output_log_probs, vocab_parallel_log_probs

Way = Callable[[list[Tensor], Tensor], Tensor]


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes of live tensors created inside the block, without one of `ignored` bytes."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self._ignored = ignored
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = tree_leaves((args, kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in inputs if isinstance(tensor, Tensor)}
        result = function(*args, **(kwargs or {}))
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self._made:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        sizes = [size for _, size in self._made.values()]
        if self._ignored in sizes:
            sizes.remove(self._ignored)
        self.peak = max(self.peak, sum(sizes))
        return result


def torch_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of log-probabilities and entropies, with torch's own functions."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None]).sum() - (log_p.exp() * log_p).sum()


def own_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """The same by slimrl."""
    log_probs, entropy = vocab_parallel_log_probs(logits, targets, vocab_size=logits.shape[1], group=None)
    return log_probs.sum() + entropy.sum()


def megatron_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities only, by megatron-core; it overwrites the logits, so they are copied first."""
    return -vocab_parallel_cross_entropy(logits.clone()[:, None], targets[:, None]).sum()


def own_output(inputs: list[Tensor], targets: Tensor) -> Tensor:
    """Output layer and scores without logits."""
    hidden, weight = inputs
    log_probs, entropy = output_log_probs(hidden, weight, targets, vocab_size=weight.shape[0], group=None)
    return log_probs.sum() + entropy.sum()


def divergences(tokens: int, vocab: int, hidden: int) -> dict[str, Way]:
    """Ways to the divergence from a random teacher, beside log-probabilities and entropies."""
    states, matrix = torch.randn(tokens, hidden), torch.randn(vocab, hidden) / hidden**0.5

    def by_torch(inputs: list[Tensor], targets: Tensor) -> Tensor:
        logits = inputs[0] @ inputs[1].t()
        student, teacher = logits.log_softmax(-1), (states @ matrix.t()).log_softmax(-1)
        mixture = torch.logsumexp(torch.stack([student, teacher]) - math.log(2), dim=0)
        value = 0.5 * sum((one.exp() * (one - mixture)).sum() for one in (teacher, student))
        return value + student.gather(1, targets[:, None]).sum() - (student.exp() * student).sum()

    def chunked(inputs: list[Tensor], targets: Tensor) -> Tensor:
        found = output_divergence(*inputs, states, matrix, targets, Divergence("jsd"), vocab_size=vocab, group=None)
        return torch.stack(found).sum()

    return {"torch: logits of both models": by_torch, "slimrl": chunked}


FROM_LOGITS: dict[str, Way] = {
    "torch: log_softmax, gather, entropy": lambda inputs, targets: torch_scores(inputs[0], targets),
    "megatron-core: cross entropy only": lambda inputs, targets: megatron_scores(inputs[0], targets),
    "slimrl": lambda inputs, targets: own_scores(inputs[0], targets),
}
FROM_HIDDEN: dict[str, Way] = {
    "torch: matmul, then the same": lambda inputs, targets: torch_scores(inputs[0] @ inputs[1].t(), targets),
    "slimrl, --keep-logits": lambda inputs, targets: own_scores(inputs[0] @ inputs[1].t(), targets),
    "slimrl": own_output,
}


def measure(ways: dict[str, Way], inputs: list[Tensor], targets: Tensor, rounds: int) -> dict[str, tuple[float, int]]:
    """Seconds (median) and peak bytes without gradients of each method, forward and backward."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    peaks = {}
    for name, way in ways.items():
        with LiveBytes(inputs[-1].untyped_storage().nbytes()) as live:  # the larger gradient, or the only one
            torch.autograd.grad(way(inputs, targets), inputs)
        peaks[name] = live.peak
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.process_time()
            torch.autograd.grad(way(inputs, targets), inputs)
            taken[name].append(time.process_time() - started)
    return {name: (statistics.median(taken[name]), peaks[name]) for name in ways}


def table(
    title: str, found: dict[int, dict[str, tuple[float, int]]], vocab: int, columns: tuple[str, ...], note: str
) -> None:
    """One line for each way and number of tokens; `columns` are the ways that ratios are to."""
    print(f"\n{title}")
    ratios = "".join(f"{'time / ' + name.split(':')[0]:>30}" for name in columns)
    print(f"{'tokens':>6}  {'way':38}{'ns/token':>10}{'memory / logits':>17}{ratios}")
    for tokens, ways in found.items():
        for name, (seconds, size) in ways.items():
            against = "".join(f"{seconds / ways[peer][0]:30.2f}" for peer in columns)
            share = size / (4 * tokens * vocab)
            print(f"{tokens:6}  {name:38}{1e9 * seconds / tokens:10,.0f}{share:17.3f}{against}")
    print(note)


def ratios_of(tables: dict[str, dict[int, dict[str, tuple[float, int]]]], vocab: int) -> dict[str, float]:
    """Time against each peer and memory against the logits, of slimrl's way in every table."""
    ratios = {}
    for title, found in tables.items():
        for tokens, ways in found.items():
            seconds, size = ways["slimrl"]
            for peer in ways.keys() - {"slimrl"}:
                ratios[f"{title}, {tokens} tokens: time / {peer}"] = seconds / ways[peer][0]
            ratios[f"{title}, {tokens} tokens: memory / logits"] = size / (4 * tokens * vocab)
    return dict(sorted(ratios.items()))


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1536, 2048])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936 // 4)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    from_logits, from_hidden, of_teacher = {}, {}, {}
    for tokens in options.tokens:
        targets = torch.randint(0, options.vocab, (tokens,))
        hidden = torch.randn(tokens, options.hidden, requires_grad=True)
        weight = (torch.randn(options.vocab, options.hidden) / options.hidden**0.5).requires_grad_()
        logits = (hidden @ weight.t()).detach().requires_grad_()
        from_logits[tokens] = measure(FROM_LOGITS, [logits], targets, options.rounds)
        from_hidden[tokens] = measure(FROM_HIDDEN, [hidden, weight], targets, options.rounds)
        ways = divergences(tokens, options.vocab, options.hidden)
        of_teacher[tokens] = measure(ways, [hidden, weight], targets, options.rounds)
    print(
        f"float32, hidden {options.hidden}, vocabulary {options.vocab:,}, one thread, forward and backward, medians of"
        f" {options.rounds} interleaved rounds"
    )
    peers = tuple(name for name in FROM_LOGITS if name != "slimrl")
    table("from logits", from_logits, options.vocab, peers, "memory: beside the logits and their gradient")
    peers = tuple(name for name in FROM_HIDDEN if name != "slimrl")
    table(
        "from hidden states",
        from_hidden,
        options.vocab,
        peers,
        "memory: beside hidden states and weight, and the gradient of the weight",
    )
    peers = tuple(name for name in ways if name != "slimrl")
    table(
        "divergence from a teacher", of_teacher, options.vocab, peers, "memory: beside both models, and that gradient"
    )
    tables = {"from logits": from_logits, "from hidden states": from_hidden, "divergence": of_teacher}
    write_ratios(options.json, ratios_of(tables, options.vocab))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
