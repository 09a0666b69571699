"""A GPTModel with a value head: one number per token instead of logits, for critics and reward models.

The head is a row of `hidden_size` weights without a bias, as the `score` of Hugging Face's classifiers. It is whole on
every tensor-parallel rank and computes in float32. Built by `model_builder`; `forward_step` requests the values.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slimrl.megatron.model.micro_batch import for_one_pass


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
