"""Table of the checks, most valuable first, and the selection of those that fit into the remaining minutes.

Pure functions of the table and of a described machine. A new check needs one row here, a function in one of the
files of `checks/`, a toy size in tests/tools/test_gpu_check_checks.py and a line in docs/gpu-check.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu_check.machine import ROOT, Machine, Needs

SUITE = ROOT / "tests/gpu"
CHECKS = "tools.gpu_check.checks."
LIMIT_FACTOR = 4  # a check that takes this many times its estimate counts as hung
LEAST_LIMIT_MINUTES = 3.0  # torch alone may take a minute from a cold network disk

TRAINING = ("torch", "transformers", "megatron.core")
ENGINE = (*TRAINING, "sglang", "torch_memory_saver")
RUN = (*ENGINE, "sglang_router", "ray")


@dataclasses.dataclass(frozen=True)
class Check:
    """`function` ("module:name") is called with a `Record` and `arguments`.

    `minutes` is the estimated time on one H100-class GPU. A check that `stops_in_time` watches its own time limit and
    reports how far it got. One that `judges_machine` also gets the argument `machine`: the path of a JSON file with the
    described machine.
    """

    name: str
    what: str
    function: str
    minutes: float
    needs: Needs = Needs()
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stops_in_time: bool = False
    judges_machine: bool = False

    @property
    def limit_s(self) -> float:
        """Its time limit in seconds."""
        return 60 * max(LIMIT_FACTOR * self.minutes, LEAST_LIMIT_MINUTES)


def skip_reason(check: Check, machine: Machine, minutes_left: float) -> str | None:
    """Why the check is skipped, completing "skipped because ..."; None if it runs."""
    if missing := check.needs.missing(machine):
        return missing
    if check.minutes > minutes_left:
        return f"{minutes_left:.1f} minutes are left and it needs {check.minutes:g}"
    return None


def chosen(checks: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """The named checks in the order of `checks`, or all without names. Raises KeyError for an unknown name."""
    known = {check.name for check in checks}
    for name in names:
        if name not in known:
            raise KeyError(name)
    return [check for check in checks if not names or check.name in names]


def _toy(kind: str, implementation: str) -> Check:
    engine = implementation == "transformer_engine"
    name = f"train-{kind.lower()}" + ("-te" if engine else "")
    layers = "Transformer Engine's layers" if engine else "Megatron's own layers"
    return Check(
        name,
        f"one optimizer step in bf16 of a toy {kind} model with {layers}, against float64 on the CPU",
        CHECKS + "training:toy",
        1.0,
        Needs(1, (*TRAINING, "transformer_engine", "transformer_engine_torch") if engine else TRAINING),
        {"kind": kind, "implementation": implementation, "device": "cuda"},
    )


def _run(name: str, what: str, minutes: float, gpus: int, placement: Sequence[str], model: str = "tiny") -> Check:
    arguments = {"model": model, "placement": list(placement), "bf16": True}
    return Check(name, f"train.py end to end, {what}", CHECKS + "runs:run", minutes, Needs(gpus, RUN), arguments)


COLOCATED = ("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--colocate")
TWO_ENGINES = ("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "4", "--colocate",
               "--tensor-model-parallel-size", "2", "--sequence-parallel",
               "--rollout-num-gpus-per-engine", "2")  # fmt: skip
ONE_ENGINE_OVER_TWO = ("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "2", "--colocate",
                       "--tensor-model-parallel-size", "2", "--sequence-parallel",
                       "--rollout-num-gpus-per-engine", "2")  # fmt: skip
SPLIT = ("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")
SPLIT_TWO_RANKS = ("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1")

OWN_CHECKS = [
    Check("environment", "driver, CUDA, NCCL, GPUs; a bf16 matrix product on each GPU against the CPU",
          CHECKS + "machine:environment", 0.3, Needs(0, ()), {"device": "cuda"}, judges_machine=True),
    Check("packages", "versions of the installed packages against those of setup.py",
          CHECKS + "machine:packages", 0.1, Needs(0, ()), judges_machine=True),
    Check("ipc", "buckets of weights from one process to another on the same GPU by CUDA IPC, bit for bit",
          CHECKS + "memory:shared_buckets", 0.5, Needs(1, ("torch",)),
          {"device": "cuda", "bucket_bytes": 512 * 2**20, "buckets": 8}),
    Check("log-probs", "log-probabilities of 9216 tokens x 2560 x 151936 in bf16, forward and backward, without logits",
          CHECKS + "memory:log_probs", 0.5, Needs(1, ("torch",)),
          {"device": "cuda", "tokens": 9216, "width": 2560, "vocab": 151936, "rounds": 5}),
    *(_toy(kind, "local") for kind in ("dense", "MoE", "MLA")),
    *(_toy(kind, "transformer_engine") for kind in ("dense", "MoE", "MLA")),
    Check("server", "a real SGLang server: weights by IPC, log-probabilities against training's, memory released",
          CHECKS + "engine:server", 3.0, Needs(1, ENGINE),
          {"device": "cuda", "model": "qwen3-0.6B", "changes": ["--init-method-std", "0.04"], "bf16": True}),
    Check("true-on-policy", "server and training with --true-on-policy-mode: log-probabilities equal to the last bit",
          CHECKS + "engine:exact", 3.0, Needs(1, (*ENGINE, "triton", "sgl_kernel")),
          {"device": "cuda", "model": "qwen3-0.6B", "changes": ["--init-method-std", "0.04"], "bf16": True}),
    Check("offload", "40 GB, or what fits, out of the GPU into host memory and back, as between two rollouts",
          CHECKS + "memory:offload", 1.0, Needs(1, ("torch", "megatron.core")), {"device": "cuda", "most_bytes": 40e9}),
    Check("train-step", "one training step of a random Qwen3-4B, or of the largest Qwen3 that fits",
          CHECKS + "training:step", 2.5, Needs(1, TRAINING),
          {"device": "cuda", "models": ["qwen3-4B", "qwen3-1.7B", "qwen3-0.6B"], "samples": 16, "length": 2048}),
    _run("run-tiny", "the tiny model on one GPU, training and engine in turn", 2.5, 1, COLOCATED),
    Check("nccl", "broadcast and all-reduce between all GPUs, bit for bit",
          CHECKS + "collectives:collectives", 0.7, Needs(2, ("torch",)),
          {"device": "cuda", "num_bytes": 2**30, "rounds": 5}),
    _run("run-split", "one training rank, one engine on another GPU, weights by NCCL", 2.5, 2, SPLIT),
    _run("run-2xtp2", "four training ranks, two engines x TP2 on the same four GPUs", 2.5, 4, TWO_ENGINES),
    _run("run-split-2", "two training ranks, one engine on a third GPU, weights by NCCL", 2.5, 3, SPLIT_TWO_RANKS),
    _run("run-tp2", "two training ranks, one engine x TP2 on the same two GPUs", 2.5, 2, ONE_ENGINE_OVER_TWO),
    _run("run-0.6b", "the shape of Qwen3-0.6B on one GPU, training and engine in turn", 4.0, 1, COLOCATED,
         "qwen3-0.6B"),
]  # fmt: skip

# files of tests/gpu that come first, most valuable first, and those that come last; the others are between, by name
FIRST_FILES = (
    "test_colocation.py",
    "test_weight_update.py",
    "test_memory.py",
    "test_checkpoints.py",
    "test_packing.py",
    "test_sharding.py",
)
LAST_FILES = ("test_layouts.py",)  # hundreds of tests, whose essence the toys are


def suite_checks(files: Sequence[str]) -> list[Check]:
    """One check for each file of tests/gpu; it needs at least a minute and uses the remaining time."""
    first = [name for name in FIRST_FILES if name in files]
    last = [name for name in LAST_FILES if name in files]
    ordered = [*first, *sorted(set(files) - {*first, *last}), *last]
    return [
        Check(
            f"tests/{Path(name).stem.removeprefix('test_')}",
            f"every test of tests/gpu/{name}, as far as the time goes",
            CHECKS + "suite:suite",
            1.0,
            Needs(1, (*TRAINING, "pytest")),
            {"paths": [f"tests/gpu/{name}"]},
            stops_in_time=True,
        )
        for name in ordered
    ]


def all_checks() -> list[Check]:
    """Every check, most valuable first."""
    return OWN_CHECKS + suite_checks([path.name for path in SUITE.glob("test_*.py")])
