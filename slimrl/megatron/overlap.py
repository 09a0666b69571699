"""Communication that goes on while the model computes: reducing gradients, gathering weights.

Promises that gradients are reduced once per optimizer step, and that weights are whole whenever anything but a
training pass looks at them. Called by the trainer; without the flags for it nothing here has an effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from megatron.core.distributed import DistributedDataParallel

from slimrl.megatron import fsdp


def connect(stages: Sequence[fsdp.Stage]) -> None:
    """Tell the schedule, through the model's configuration, how to begin and to put off communication."""
    first = stages[0]
    if first.ddp_config.overlap_grad_reduce:
        # Without it every micro-batch would reduce the gradients anew.
        no_sync = [stage.no_sync for stage in stages]
        first.config.no_sync_func = no_sync if len(stages) > 1 else no_sync[0]
    if isinstance(first, DistributedDataParallel) and first.use_forward_hook:
        if first.ddp_config.align_param_gather:
            first.config.param_sync_func = [stage.start_param_sync for stage in stages]
        for stage in stages:
            stage.disable_forward_pre_hook(param_sync=False)


@contextlib.contextmanager
def weights_gathered_late(stages: Sequence[fsdp.Stage]) -> Iterator[None]:
    """Within the block a forward pass gathers the weights that the last optimizer step left spread over ranks.

    With --overlap-param-gather, and with --use-megatron-fsdp; afterwards they are whole.
    """
    late = [stage for stage in stages if isinstance(stage, DistributedDataParallel) and stage.use_forward_hook]
    for stage in late:
        stage.enable_forward_pre_hook()
    yield
    for stage in late:
        stage.disable_forward_pre_hook(param_sync=True)
    fsdp.gather(stages)
