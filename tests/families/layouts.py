"""The parallel layouts in which every toy model is tested, and its flags in each of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slimrl.arguments import Arguments, read_args
from tests.families.toys import TOYS, Toy

WITH_EXPERTS = [name for name, toy in TOYS.items() if "--num-experts" in toy.flags]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Parallel sizes as flags, the number of ranks, and the toy models to test."""

    name: str
    ranks: int
    flags: tuple[str, ...]
    toys: tuple[str, ...]


TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
EXPERT = ("--expert-model-parallel-size", "2")
LAYOUTS = (
    Layout("one rank", 1, (), tuple(TOYS)),
    Layout("tensor 2", 2, TENSOR, tuple(TOYS)),
    Layout("tensor 2, sequence", 2, (*TENSOR, "--sequence-parallel"), tuple(TOYS)),
    Layout("expert 2", 2, EXPERT, tuple(WITH_EXPERTS)),
    Layout(
        "tensor 2, expert tensor 2",
        2,
        (*TENSOR, "--sequence-parallel", "--expert-tensor-parallel-size", "2"),
        tuple(WITH_EXPERTS),
    ),
    Layout("pipeline 2", 2, PIPELINE, tuple(TOYS)),
    Layout("pipeline 2, expert 2", 4, (*PIPELINE, *EXPERT), tuple(WITH_EXPERTS)),
)


def of_folder(folder: Path) -> tuple[str, ...]:
    """The flag with the folder of a model, whose config.json describes a vision tower."""
    return "--hf-checkpoint", str(folder)


def flags(toy: Toy, layout: Layout, *others: str) -> Arguments:
    """The toy model's flags in that layout, with `others`; an odd number of layers is split into 1 and the rest."""
    more, own = [*layout.flags, *others], toy.flags
    layers = int(own[own.index("--num-layers") + 1])
    if "--pipeline-model-parallel-size" in more and layers % 2:
        more += ["--decoder-first-pipeline-num-layers", "1"]
    args, _ = read_args([*own, *more], entry="convert_hf_to_torch_dist.py")
    return args
