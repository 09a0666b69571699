"""Packs the samples of a micro-batch into one sequence and splits it over context-parallel ranks.

The trainer packs each micro-batch once per rollout. For every response token a `MicroBatch` holds the rank and the row
of logits that predicts it, its id, and its index in the batch's response columns.

Context parallelism splits every sequence into 2 x ranks equal pieces. Rank r holds pieces r and 2 x ranks - 1 - r,
which balances causal attention. This module defines the split for packing and attention.

`PackedSequences` also has the sequence lengths on the host. Reading a length from the device would synchronize host and
device in every layer.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slimrl.arguments.flags.data import TrainBatchArguments
from slimrl.arguments.namespace import MegatronArguments
from slimrl.data.batch_schedule import sequence_multiple
from slimrl.data.images.batch import image_rows, mrope_positions
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.model.routing_replay import Routing, RoutingPlace
from slimrl.megatron.parallel import ParallelState
from slimrl.models.families.vision import VisionTokens


def local_rows(lengths: Tensor, rank: int, ranks: int) -> Tensor:
    """Rows of the whole pack that `rank` holds, in that rank's order; int64 [sum(lengths) / ranks].

    `lengths` int64 [sequences], each a multiple of 2 x `ranks` (any length if there is one rank).
    """
    if ranks == 1:
        return torch.arange(int(lengths.sum()), device=lengths.device)
    starts, piece = lengths.cumsum(0) - lengths, lengths // (2 * ranks)
    numbers = lengths.new_tensor([rank, 2 * ranks - 1 - rank])
    return ranges((starts[:, None] + piece[:, None] * numbers).flatten(), piece.repeat_interleave(2))


def pack_order(lengths: Tensor, ranks: int) -> Tensor:
    """Index of each row of the whole pack in the concatenation of all ranks' rows; int64 [sum(lengths)]."""
    gathered = torch.cat([local_rows(lengths, rank, ranks) for rank in range(ranks)])
    order = torch.empty_like(gathered)
    order[gathered] = torch.arange(gathered.numel(), device=gathered.device)
    return order


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenation of the ranges `starts[i], starts[i] + 1, ...` (`lengths[i]` numbers)."""
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(shift, lengths) + torch.arange(int(lengths.sum()), device=lengths.device)


class TokenFrequencies:
    """The rotary frequencies of one forward pass, gathered by its first layer and reused by the others.

    They are the same for all layers of a model. Activation recomputation reuses them too.
    """

    def __init__(self) -> None:
        self._gathered: tuple[Tensor, float] | None = None

    def of(self, positions: Tensor, make: Callable[[], tuple[Tensor, float]]) -> tuple[Tensor, float]:
        """Rows [tokens, 1, 1, width] at `positions` of the table that `make` returns, and the scale it returns."""
        if self._gathered is None:
            by_position, scale = make()
            self._gathered = by_position.index_select(0, positions), scale
        return self._gathered


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's sequence boundaries, and the extra fields of layers without Transformer Engine."""

    lengths: tuple[int, ...] = ()  # of every sequence of the whole pack
    order: Tensor | None = None  # `pack_order` on the model's device; None if one rank holds the whole pack
    positions: Tensor | None = None  # int64 [tokens of this rank]: the position of each in its sequence
    frequencies: TokenFrequencies | None = None  # of the forward pass that this object was made for
    routing: Routing | None = None  # the experts of the tokens, with routing replay

    def token_frequencies(self, make: Callable[[], tuple[Tensor, float]]) -> tuple[Tensor, float]:
        """The frequencies of this rank's tokens (see `TokenFrequencies.of`); cached only inside `for_one_pass`."""
        assert self.positions is not None  # as `packed_sequences` makes them
        return (self.frequencies or TokenFrequencies()).of(self.positions, make)


def packed_sequences(lengths: Tensor, ranks: int, device: torch.device, *, rank: int) -> PackedSequences:
    """The boundaries of a pack, on `device`; `lengths` int64 [sequences], on the host, of the whole pack.

    `rank` is this rank's index among the `ranks` context-parallel ranks; with more than one, each length must be a
    multiple of 2 x `ranks`.
    """
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    longest = int(lengths.max())
    positions = ranges(torch.zeros_like(lengths), lengths)[local_rows(lengths, rank, ranks)]
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths.tolist()),
        order=None if ranks == 1 else pack_order(lengths, ranks).to(device),
        positions=positions.to(device),
    )


def with_lengths(sequences: PackedSeqParams, ranks: int, rank: int) -> PackedSequences:
    """`sequences` as `PackedSequences`; reads the lengths from the device if a caller made a plain PackedSeqParams."""
    if isinstance(sequences, PackedSequences):
        return sequences
    return packed_sequences(sequences.cu_seqlens_q.diff().long().cpu(), ranks, sequences.cu_seqlens_q.device, rank=rank)


def for_one_pass(sequences: PackedSeqParams | None) -> PackedSeqParams | None:
    """The same sequences for one forward and backward pass, whose layers share rotary frequencies.

    The copy frees them with the pass: the micro-batches themselves live until the end of the rollout's training.
    """
    if not isinstance(sequences, PackedSequences):
        return sequences
    return dataclasses.replace(sequences, frequencies=TokenFrequencies())


def without_boundaries(sequences: PackedSequences) -> PackedSequences:
    """The same sequences without boundaries, for code that would use them to look up rotary frequencies."""
    # mypy does not follow megatron-core's PackedSeqParams, which declares these fields
    return dataclasses.replace(sequences, cu_seqlens_q=None, cu_seqlens_kv=None)  # type: ignore[call-arg]


@dataclasses.dataclass(frozen=True)
class ImageTensors:
    """The images of a pack, on the model's device."""

    pixel_values: Tensor  # float32 [patches, values of a patch]
    grids: Tensor  # int64 [images, 3]: patches in time, height and width
    rows: Tensor  # int64 [image tokens of this context-parallel rank]: their places in its part of the pack
    features: Tensor | None = None  # int64 like rows: their indices among all image tokens; None: this rank has all


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass: sequences end to end; the last one may be padding.

    With context parallelism `tokens`, `padding`, `logit_rows`, `targets`, `own`, `last_rows` and `last_own` are this
    rank's part; the other fields are the same on every rank.
    """

    tokens: Tensor  # int64 [1, padded tokens / context-parallel ranks]
    padding: Tensor  # bool like tokens: which of them are padding
    sequences: PackedSequences  # where each sequence starts in the whole pack
    logit_rows: Tensor  # int64 [this rank's response tokens]: the row of logits that predicts each
    targets: Tensor  # int64 [this rank's response tokens]: their ids
    own: Tensor  # int64 [this rank's response tokens]: their indices among the micro-batch's response tokens
    response_index: Tensor  # int64 [response tokens]: their indices in the rank's response columns
    last_rows: Tensor  # int64 [samples whose last token this rank has]: the position of that token
    last_own: Tensor  # int64 like last_rows: the samples' indices in the micro-batch
    response_lengths: Tensor  # int64 [samples]
    rows: tuple[int, ...]  # the samples' indices in the rank's batch
    lengths: tuple[tuple[int, int], ...]  # of each sample and of its response, on the host
    position_ids: Tensor | None = None  # int64 [3, 1, tokens of this rank], of a vision-language model
    images: ImageTensors | None = None


def pack_micro_batch(
    batch: RolloutBatch,
    rows: Sequence[int],
    *,
    length_multiple: int,
    device: torch.device,
    context_rank: int = 0,
    context_size: int = 1,
    vision: VisionTokens | None = None,
    routing: RoutingPlace | None = None,
) -> MicroBatch:
    """Pack `rows` of `batch`; each rank's part is padded to a multiple of `length_multiple` tokens.

    With `vision`, the tokens of a vision-language model, it has positions and images too, with `routing` the experts of
    the tokens.

    Row t - 1 of the logits predicts the token at position t, so a sample of prompt length p and total length n uses
    the rows p - 1 to n - 2 of its own sequence.
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    totals, responses = batch.total_lengths[index], batch.response_lengths[index]
    multiple = sequence_multiple(context_size)
    lengths = _rounded_up(totals, multiple)
    starts = lengths.cumsum(0) - lengths
    padding = int(-lengths.sum() % (context_size * math.lcm(length_multiple, multiple // context_size)))
    if padding:
        lengths = torch.cat([lengths, lengths.new_full((1,), padding)])

    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    real = ranges(starts, totals)
    chosen = batch.select(index)
    tokens[real] = chosen.tokens
    padded = torch.ones_like(tokens, dtype=torch.bool)
    padded[real] = False
    positions = ranges(starts + totals - responses, responses)
    local = local_rows(lengths, context_rank, context_size)
    local_index = torch.full_like(tokens, -1)
    local_index[local] = torch.arange(local.numel())
    logit_rows = local_index[positions - 1]
    own = (logit_rows >= 0).nonzero().squeeze(1)
    last_rows = local_index[starts + totals - 1]
    last_own = (last_rows >= 0).nonzero().squeeze(1)
    sequences = packed_sequences(lengths, context_size, device, rank=context_rank)
    if routing is not None:
        sequences.routing = routing.of_pack(chosen.routed_experts, real, local, tokens.numel())

    return MicroBatch(
        tokens=tokens[local].unsqueeze(0).to(device),
        padding=padded[local].unsqueeze(0).to(device),
        sequences=sequences,
        logit_rows=logit_rows[own].to(device),
        targets=tokens[positions[own]].to(device),
        own=own.to(device),
        response_index=ranges(batch.response_offsets[index], responses).to(device),
        last_rows=last_rows[last_own].to(device),
        last_own=last_own.to(device),
        response_lengths=responses.to(device),
        rows=tuple(rows),
        lengths=tuple(zip(totals.tolist(), responses.tolist(), strict=True)),
        **({} if vision is None else _of_vision(chosen, real, local, local_index, vision, device)),
    )


def _of_vision(
    chosen: RolloutBatch, real: Tensor, local: Tensor, local_index: Tensor, vision: VisionTokens, device: torch.device
) -> dict[str, Any]:
    """`position_ids` and `images` of this rank's part of a pack.

    `real` are the rows of the pack with tokens of the samples `chosen`, `local` those of this rank, and `local_index`
    the place of each row of the pack there, or -1.
    """
    samples = chosen.tokens.split(chosen.total_lengths.tolist())
    prompts = (chosen.total_lengths - chosen.response_lengths).tolist()
    images = chosen.images
    grids = [None] * len(samples) if images is None else images.grids_of_samples()
    starts: list[list[int]] = [[]] * len(samples) if images is None else images.starts_of_samples()
    seconds: list[list[float]] = [[]] * len(samples) if images is None else images.seconds_of_samples()
    positions = torch.zeros(3, 1, local_index.numel(), dtype=torch.int64)
    positions[:, 0, real] = torch.cat(
        [
            mrope_positions(tokens, prompt, own, vision, places, times)
            for tokens, prompt, own, places, times in zip(samples, prompts, grids, starts, seconds, strict=True)
        ],
        dim=1,
    )
    found: dict[str, Any] = {"position_ids": positions[:, :, local].to(device)}
    if images is not None:
        offsets = chosen.token_offsets.tolist()
        of_samples = zip(samples, prompts, grids, starts, seconds, offsets[:-1], strict=True)
        rows = [
            image_rows(tokens, prompt, vision, own, places, times) + offset
            for tokens, prompt, own, places, times, offset in of_samples
        ]
        places = local_index[real[torch.cat(rows)]]
        own = (places >= 0).nonzero().squeeze(1)
        features = None if own.numel() == places.numel() else own.to(device)
        pixels, of_images = images.in_order()
        found["images"] = ImageTensors(pixels.to(device), of_images.to(device), places[own].to(device), features)
    return found


def _rounded_up(lengths: Tensor, multiple: int) -> Tensor:
    return -(-lengths // multiple) * multiple


def without_routing(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The same for a pass of another model, whose routers choose for themselves."""
    return [
        dataclasses.replace(micro_batch, sequences=dataclasses.replace(micro_batch.sequences, routing=None))
        for micro_batch in micro_batches
    ]


@dataclasses.dataclass(frozen=True)
class MicroBatchPacker:
    """Packs the rows of a rank's batch, as the flags and the rank's place want it."""

    length_multiple: int
    device: torch.device
    context_rank: int
    context_size: int
    vision: VisionTokens | None = None
    routing: RoutingPlace | None = None

    @classmethod
    def of_rank(
        cls, model: MegatronArguments, batches: TrainBatchArguments, parallel: ParallelState
    ) -> MicroBatchPacker:
        """The packer of the rank that `parallel` describes."""
        routing = RoutingPlace.of_rank(model, parallel)
        multiple = batches.data_pad_size_multiplier * model.tensor_model_parallel_size
        folder = model.vision_folder
        vision = None if folder is None else VisionTokens.of(json.loads((Path(folder) / "config.json").read_text()))
        return cls(multiple, parallel.device, parallel.cp_rank, parallel.cp_size, vision, routing)

    def __call__(self, batch: RolloutBatch, rows: Sequence[int]) -> MicroBatch:
        """`pack_micro_batch`."""
        return pack_micro_batch(
            batch,
            rows,
            length_multiple=self.length_multiple,
            device=self.device,
            context_rank=self.context_rank,
            context_size=self.context_size,
            vision=self.vision,
            routing=self.routing,
        )

    def steps(self, batch: RolloutBatch) -> list[list[MicroBatch]]:
        """The micro-batches of each optimizer step of the batch's schedule."""
        return [[self(batch, rows) for rows in step] for step in batch.micro_batches]
