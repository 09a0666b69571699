"""The output layer, which gives log-probabilities and entropies instead of logits where it is asked to.

Promises that such a pass never holds the logits of more than a piece of the vocabulary, computes them for the tokens in
question only, and has the gradients of the plain layer in every layout. The weight is used inside the layer's own
forward pass, so that whatever gathers weights before a module runs finds it. Called by the model builder; `forward`
asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from slimrl.algorithms.log_probs import output_log_probs
from slimrl.megatron.model.micro_batch import for_one_pass


@dataclasses.dataclass(frozen=True)
class TokensToScore:
    """Which log-probabilities are wanted, and how logits become them."""

    rows: Tensor  # int64 [tokens]: the positions whose logits predict them
    targets: Tensor  # int64 [tokens]: their ids
    vocab_size: int  # without padding
    temperature: float
    chunk_size: int  # as `output_log_probs` reads it


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer; inside `scoring` its output is [tokens to score, 2] instead of logits.

    The two float32 columns are log-probability and entropy, equal on all tensor-parallel ranks.
    """

    def __init__(self, plain: ColumnParallelLinear):
        """Takes the place of `plain`, with its weight."""
        super().__init__(
            plain.input_size,
            plain.output_size,
            config=plain.config,
            init_method=plain.config.init_method,
            bias=False,
            gather_output=plain.gather_output,
            skip_weight_param_allocation=True,
            tp_group=plain.tp_group,
        )
        self.weight = plain.weight
        self._wanted: TokensToScore | None = None

    @contextlib.contextmanager
    def scoring(self, wanted: TokensToScore) -> Iterator[None]:
        """Within the block the layer scores `wanted`."""
        self._wanted = wanted
        try:
            yield
        finally:
            self._wanted = None

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's: `input_` is [positions (of this rank), 1, hidden], `weight` that of a tied embedding."""
        if self._wanted is None:
            return super().forward(input_, weight, runtime_gather_output)
        scores = self._scores(input_, self.weight if weight is None else weight, self._wanted)
        return torch.stack(scores, dim=1), None

    def _scores(self, hidden: Tensor, weight: Tensor, wanted: TokensToScore) -> tuple[Tensor, Tensor]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        rows = hidden[:, 0].index_select(0, wanted.rows)
        if not self.sequence_parallel:  # backward adds up the ranks' shares of these rows only
            rows = copy_to_tensor_model_parallel_region(rows, group=self.tp_group)
        return output_log_probs(
            rows,
            weight,
            wanted.targets,
            vocab_size=wanted.vocab_size,
            group=self.tp_group,
            temperature=wanted.temperature,
            chunk_size=wanted.chunk_size,
        )


class PolicyModel(GPTModel):
    """megatron-core's GPTModel whose forward pass can be asked for scores of tokens instead of logits."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        if self.post_process:
            self.output_layer: Any = OutputLayer(self.output_layer)

    def forward(
        self,
        *inputs: Any,
        wanted: TokensToScore | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **settings: Any,
    ) -> Tensor:
        """As GPTModel's; with `wanted` the last stage's output is float32 [2, tokens to score].

        The rows are log-probability and entropy. Other stages give their hidden states as ever.
        """
        settings["packed_seq_params"] = for_one_pass(packed_seq_params)
        if wanted is None or not self.post_process:
            return super().forward(*inputs, **settings)
        with self.output_layer.scoring(wanted):
            return super().forward(*inputs, **settings)
