"""Models by their output: log-probabilities and entropies instead of logits, or values.

The policy's output layer never holds the logits of more than a chunk of the vocabulary, and computes them only for the
tokens to score; its gradients equal those of the plain layer in every parallel layout. The weight is used inside the
layer's own forward pass, so that pre-forward hooks that gather weights (FSDP) apply. Built by `model_builder`;
`forward_step` requests the scores.

A critic or a reward model has a value head: a row of `hidden_size` weights without a bias, as the `score` of Hugging
Face's classifiers. It is whole on every tensor-parallel rank and computes in float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slimrl.algorithms.batch_invariant import operators
from slimrl.algorithms.divergence import Divergence, output_divergence, output_top_divergence
from slimrl.algorithms.log_probs import output_log_probs
from slimrl.megatron.model.micro_batch import for_one_pass


@dataclasses.dataclass(frozen=True)
class TokensToScore:
    """Which tokens to score, and how their log-probabilities are computed from logits."""

    rows: Tensor  # int64 [tokens]: the positions whose logits predict them
    targets: Tensor  # int64 [tokens]: their ids
    vocab_size: int  # without padding
    temperature: float
    chunk_size: int  # see `output_log_probs`
    distils: TeacherStates | TeacherTop | None = None  # also the divergence from a teacher
    records: TeacherStates | None = None  # the model is that teacher: store what the divergence needs
    key: tuple[int, ...] = ()  # of the micro-batch in these
    index: Tensor | None = None  # int64 [tokens]: their places in the columns of `TeacherTop`

    def divergence(self, rows: Tensor, weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        """`output_divergence` of the positions' hidden states [tokens, width], or that over a teacher's top tokens."""
        settings = _Chunked(
            vocab_size=self.vocab_size, group=group, temperature=self.temperature, chunk_size=self.chunk_size
        )
        if isinstance(self.distils, TeacherTop):
            assert self.index is not None  # with this teacher
            top = self.distils.of(self.index)
            return output_top_divergence(rows, weight, self.targets, *top, self.distils.divergence, **settings)
        assert self.distils is not None and self.distils.weight is not None  # of the teacher's pass
        teacher = self.distils.hidden[self.key], self.distils.weight
        return output_divergence(rows, weight, *teacher, self.targets, self.distils.divergence, **settings)


class _Chunked(TypedDict):
    """Keywords of the divergences."""

    vocab_size: int
    group: dist.ProcessGroup
    temperature: float
    chunk_size: int


@dataclasses.dataclass
class TeacherTop:
    """The teacher's most probable tokens at each response token of the rank, from servers; see `output_top_divergence`.

    `ids` int64 and `log_probs` float32 [response tokens, k] on the model's device; `clear` frees them.
    """

    divergence: Divergence
    ids: Tensor | None = None
    log_probs: Tensor | None = None

    def of(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the tokens at these places."""
        assert self.ids is not None and self.log_probs is not None  # of the rollout, which `training_batch` has checked
        return self.ids.index_select(0, index), self.log_probs.index_select(0, index)

    def clear(self) -> None:
        """Free everything."""
        self.ids = self.log_probs = None


@dataclasses.dataclass
class TeacherStates:
    """What a teacher's pass over a rollout leaves for a divergence over the vocabulary, on the last stage's device.

    `hidden` has the hidden states [tokens, width] that predict the tokens to score of each micro-batch, `weight` is
    this rank's part of the output weight. In the model's dtype; `clear` frees them.
    """

    divergence: Divergence
    hidden: dict[tuple[int, ...], Tensor] = dataclasses.field(default_factory=dict)
    weight: Tensor | None = None

    def record(self, key: tuple[int, ...], rows: Tensor, weight: Tensor) -> None:
        """Store the states of one micro-batch."""
        self.hidden[key] = rows.detach().clone()
        if self.weight is None:
            self.weight = weight.detach().clone()  # the student's takes its place after the pass

    def clear(self) -> None:
        """Free everything."""
        self.hidden.clear()
        self.weight = None


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer; inside `scoring` its output is [tokens to score, 2] instead of logits.

    The two float32 columns are log-probability and entropy, equal on all tensor-parallel ranks; with a teacher
    (`TokensToScore.distils`) a third one is the divergence from it.
    """

    def __init__(self, plain: ColumnParallelLinear):
        """Replaces `plain` and takes over its weight."""
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
        self._to_score: TokensToScore | None = None

    @contextlib.contextmanager
    def scoring(self, to_score: TokensToScore) -> Iterator[None]:
        """Within the block the layer scores `to_score`."""
        self._to_score = to_score
        try:
            yield
        finally:
            self._to_score = None

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's: `input_` is [positions (of this rank), 1, hidden], `weight` that of a tied embedding."""
        if self._to_score is None:
            return super().forward(input_, weight, runtime_gather_output)
        scores = self._scores(input_, self.weight if weight is None else weight, self._to_score)
        return torch.stack(scores, dim=1), None

    def _scores(self, hidden: Tensor, weight: Tensor, to_score: TokensToScore) -> tuple[Tensor, ...]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        rows = hidden[:, 0].index_select(0, to_score.rows)
        if not self.sequence_parallel:  # backward then all-reduces the gradients of these rows only
            rows = copy_to_tensor_model_parallel_region(rows, group=self.tp_group)
        if to_score.records is not None:
            to_score.records.record(to_score.key, rows, weight)
        if to_score.distils is not None:
            return to_score.divergence(rows, weight, self.tp_group)
        score = operators.scored if self.config.batch_invariant_mode else output_log_probs
        return score(
            rows,
            weight,
            to_score.targets,
            vocab_size=to_score.vocab_size,
            group=self.tp_group,
            temperature=to_score.temperature,
            chunk_size=to_score.chunk_size,
        )


class PolicyModel(GPTModel):
    """megatron-core's GPTModel whose forward pass can return scores of tokens instead of logits."""

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

        The rows are log-probability and entropy, and a third one the divergence from a teacher, if wanted. Other stages
        return hidden states as usual.
        """
        settings["packed_seq_params"] = for_one_pass(packed_seq_params)
        if wanted is None or not self.post_process:
            return super().forward(*inputs, **settings)
        with self.output_layer.scoring(wanted):
            return super().forward(*inputs, **settings)


class ValueHead(nn.Module):
    """[positions (of this rank), 1, hidden] -> float32 [rows]."""

    def __init__(self, output_layer: ColumnParallelLinear):
        """A head of zeros in the place of `output_layer`: an untrained critic predicts 0 everywhere."""
        super().__init__()
        self._gathers = output_layer.sequence_parallel
        self._group = output_layer.tp_group
        self.weight = nn.Parameter(torch.zeros(1, output_layer.input_size, dtype=output_layer.weight.dtype))

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        if self._gathers:  # every rank has the whole gradient, so that backward takes its part and adds nothing
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._group)
        return (hidden[:, 0].index_select(0, rows).float() @ self.weight.float().t())[:, 0]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """As megatron-core's modules: every rank has the whole weight."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)


class ValueModel(GPTModel):
    """megatron-core's GPTModel with a `ValueHead` in place of its output layer."""

    def __init__(self, **settings: Any):
        super().__init__(**settings | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            self.value_head = ValueHead(self.output_layer)
            del self.output_layer
        self._rows: Tensor | None = None

    def forward(
        self, *inputs: Any, wanted: Tensor, packed_seq_params: PackedSeqParams | None = None, **settings: Any
    ) -> Tensor:
        """The last stage's values of the positions `wanted`, float32 [positions]; hidden states of other stages."""
        self._rows = wanted
        output: Tensor = super().forward(*inputs, packed_seq_params=for_one_pass(packed_seq_params), **settings)
        self._rows = None
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """The modules' own; GPTModel's and LanguageModule's would look for an output layer."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: ShardedStateDict = super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)
        return state

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Replaces megatron-core's, which computes logits."""
        if not self.post_process:
            return hidden_states
        assert self._rows is not None  # set by `forward`
        values: Tensor = self.value_head(hidden_states, self._rows)
        return values
