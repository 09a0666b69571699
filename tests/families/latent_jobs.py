"""Run inside ranks by the latent-attention tests: one forward and backward pass over packed sequences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimrl.arguments import Arguments

SEQUENCES = (23, 1, 9, 31)  # tokens of each; 64 in all


@dataclasses.dataclass
class PassResult:
    """Summed next-token loss, logits [tokens, vocabulary], and every weight's gradient by Hugging Face name."""

    loss: float
    logits: Tensor
    gradients: dict[str, Tensor]


def tokens(vocab_size: int) -> Tensor:
    """The tokens of all sequences, int64 [tokens]."""
    return torch.randint(0, vocab_size, (sum(SEQUENCES),), generator=torch.Generator().manual_seed(5))


def labels(ids: Tensor) -> Tensor:
    """The target of each token: the next of its sequence, and for the last one the first."""
    return torch.cat([sequence.roll(-1) for sequence in ids.split(SEQUENCES)])


def passes(
    rank: int, world_size: int, init_method: str, cases: dict[str, tuple[Arguments, Path]]
) -> dict[str, PassResult]:
    """One pass over each model, by name; all in the same layout, whose groups are created once."""
    from slimrl.megatron import parallel

    args, _ = next(iter(cases.values()))
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    try:
        return {name: _one_pass(state, *case) for name, case in cases.items()}
    finally:
        parallel.shutdown()


def _one_pass(state: Any, args: Arguments, folder: Path) -> PassResult:
    """Loads `folder` and runs one forward and backward pass, identical on every data-parallel rank."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from slimrl.megatron import config
    from slimrl.megatron.model import model_builder
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint
    from slimrl.weights.hf_checkpoint import read_hf_config

    built = model_builder.build_model(args, state)
    family, shape = family_for(read_hf_config(folder)), ModelSpec.from_args(args)
    own, experts = {"tp_rank": state.tp_rank, "tp_size": state.tp_size}, (state.etp_rank, state.etp_size)
    load_hf_checkpoint(built, shape, family, folder, **own, etp_rank=experts[0], etp_size=experts[1])
    wrapped = DistributedDataParallel(built.config, config.ddp_config(args), built)
    wrapped.zero_grad_buffer()
    ids = tokens(args.vocab_size)
    seen: list[tuple[Tensor, Tensor]] = []

    def step(_: Any, module: torch.nn.Module) -> tuple[Tensor, Any]:
        logits = logits_of(module, state, args.vocab_size)
        loss = torch.nn.functional.cross_entropy(logits, labels(ids), reduction="sum")
        seen.append((loss.detach().clone(), logits.detach()))
        return logits, lambda _: (loss, torch.tensor(ids.numel(), dtype=torch.int), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([None]),
        model=[wrapped],
        num_microbatches=1,
        seq_length=ids.numel(),
        micro_batch_size=1,
        forward_only=False,
    )
    (loss, logits), *_ = seen
    return PassResult(float(loss), logits, _gradients(built, shape, family, state))


def refusal(rank: int, world_size: int, init_method: str, args: Arguments, folder: Path) -> str:
    """The error with which `passes` rejects this one."""
    try:
        passes(rank, world_size, init_method, {"": (args, folder)})
    except ValueError as error:
        return str(error)
    return "it can"


def _packed() -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *SEQUENCES]).cumsum(0).to(torch.int32)
    longest = max(SEQUENCES)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def logits_of(module: torch.nn.Module, state: Any, vocab_size: int) -> Tensor:
    """Logits [tokens, vocabulary] of the packed sequences; a rank's gradient reaches its own columns."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    local = module(tokens(vocab_size)[None], None, None, packed_seq_params=_packed())
    return gather_from_tensor_model_parallel_region(local, group=state.tp_group)[0, :, :vocab_size]


def _gradients(built: Any, shape: Any, family: Any, state: Any) -> dict[str, Tensor]:
    from slimrl.weights.update.export import iter_hf_tensors

    for parameter in built.parameters():
        parameter.data = parameter.main_grad.clone()
    exported = iter_hf_tensors(
        built,
        shape,
        family,
        state.tp_group,
        pp_group=state.pp_group,
        ep_group=state.ep_group,
        etp_group=state.etp_group,
    )
    return {name: tensor.clone() for name, tensor in exported if not name.endswith("e_score_correction_bias")}
