"""The cost of the operators of --true-on-policy-mode: seconds relative to torch's own, on one thread.

    python benchmarks/batch_invariant.py [--hidden 1024] [--repeats 5]

Products and attention of a Qwen3-0.6B by default (16 heads, 8 KV heads of 128), forward alone and with the backward
pass of training, and the log-probabilities of a vocabulary of 32768.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from slimrl.algorithms.batch_invariant import operators
from slimrl.algorithms.log_probs import output_log_probs

HEADS, KV_HEADS, SIZE, VOCABULARY = 16, 8, 128, 32768


def seconds(function: Callable[[], object], repeats: int) -> float:
    """The fastest of `repeats` calls, after one that compiles."""
    function()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """torch's attention, one sequence after another."""
    attended = []
    for pieces in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in pieces)
        attended.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1, enable_gqa=True)[0])
    return torch.cat(attended, dim=1).transpose(0, 1)


def cases(hidden: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name: the operator, and torch's."""
    torch.manual_seed(0)
    found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    weight = torch.randn(3 * hidden, hidden, requires_grad=True)
    for rows in (1, 16, 1024):
        x = torch.randn(rows, hidden, requires_grad=True)
        found[f"product, {rows} rows"] = (
            lambda x=x: operators.linear(x.detach(), weight.detach()),
            lambda x=x: F.linear(x.detach(), weight.detach()),
        )
    found["product, 1024 rows, with backward"] = (
        lambda: operators.product(x, weight).sum().backward(),
        lambda: F.linear(x, weight).sum().backward(),
    )
    lengths = [512, 512]
    query, key, value = (torch.randn(1024, heads, SIZE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inputs = query, key, value
    detached = [x.detach() for x in inputs]
    found["attention, 2 sequences of 512"] = (
        lambda: operators.attend_packed(*detached, lengths, 0.1),
        lambda: plain_attention(*detached, lengths),
    )
    found["attention, with backward"] = (
        lambda: operators.attend_packed(*inputs, lengths, 0.1).sum().backward(),
        lambda: plain_attention(*inputs, lengths).sum().backward(),
    )
    head, targets = torch.randn(VOCABULARY, hidden), torch.arange(256)
    settings = {"vocab_size": VOCABULARY, "group": None, "temperature": 1.0, "chunk_size": -1}
    rows = torch.randn(256, hidden)
    found["log-probabilities, 256 tokens"] = (
        lambda: operators.scored(rows, head, targets, **settings),
        lambda: output_log_probs(rows, head, targets, **settings),
    )
    return found


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the residual stream")
    parser.add_argument("--repeats", type=int, default=5, help="calls of which the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| operator | ms | torch, ms | ratio |\n| --- | --- | --- | --- |")
    for name, (ours, theirs) in cases(options.hidden).items():
        own, other = seconds(ours, options.repeats), seconds(theirs, options.repeats)
        print(f"| {name} | {1e3 * own:.2f} | {1e3 * other:.2f} | {own / other:.1f} |", flush=True)


if __name__ == "__main__":
    main()
