"""Run in a separate process by the conversion tests: both converters, one model after another."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.families import latent_jobs
from tests.tools.converting import ROOT


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """A model's flags, its folder, and the destinations of its torch_dist and of its second Hugging Face folder."""

    flags: tuple[str, ...]
    hf: Path
    torch_dist: Path
    back: Path


def round_trip(rank: int, world_size: int, init_method: str, trips: list[RoundTrip]) -> None:
    """Runs both tools on each model; raises RuntimeError with the exit code if a tool fails."""
    sys.path.insert(0, str(ROOT / "tools"))
    import convert_hf_to_torch_dist
    import convert_torch_dist_to_hf

    for trip in trips:
        source, target = str(trip.hf), str(trip.torch_dist)
        back = ["--input-dir", target, "--output-dir", str(trip.back), "--origin-hf-dir", source]
        for tool, argv in (
            (convert_hf_to_torch_dist, [*trip.flags, "--hf-checkpoint", source, "--save", target]),
            (convert_torch_dist_to_hf, [*back, "--chunk-size", "100000"]),
        ):
            try:
                code = tool.main(argv)
            except SystemExit as refused:
                code = refused.code
            if code:
                raise RuntimeError(f"{tool.NAME} ended with {code} on {trip.hf.name}")


def logits_from_torch_dist(
    rank: int, world_size: int, init_method: str, flags: tuple[str, ...], folder: Path
) -> Tensor:
    """Packed logits [tokens, vocabulary] of the model loaded from `folder` in the layout of `flags`."""
    from slimrl.arguments import read_args
    from slimrl.megatron import parallel
    from slimrl.megatron.checkpoint import start
    from slimrl.megatron.model import model_builder

    args, _ = read_args(flags, entry="convert_hf_to_torch_dist.py")
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    try:
        built = model_builder.build_model(args, state).eval()
        start.load_model_only(built, folder)
        with torch.no_grad():
            return latent_jobs.logits_of(built, state, args.vocab_size)
    finally:
        parallel.shutdown()
