"""Which weights are trained: --only-train-params-name-list and --freeze-params-name-list.

Promises that the lists choose the same weights in every parallel layout, and that a pattern which chooses nothing is an
error. What is frozen gets no gradient buffer and no optimizer state, and does not count in the gradient norm; it is
saved and updated the engines like any other weight. Called by the trainer, once, before the stages are wrapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from slimrl.arguments import Arguments
from slimrl.weights.reshard import global_tensors, listed

_ONLY = "--only-train-params-name-list"
_FREEZE = "--freeze-params-name-list"


def freeze_parameters(args: Arguments, stages: Sequence[GPTModel]) -> None:
    """Take the weights that the lists of `args` leave out of training; collective over all ranks.

    A pattern is searched in a weight's name (`re.search`): Megatron's, with the numbers of layers and experts in the
    whole model, as in `decoder.layers.3.mlp.linear_fc1.weight`. A head tied to the embedding is
    `embedding.word_embeddings.weight` on every stage. Raises ValueError, on every rank, for a pattern that is found in
    no name and where nothing is left to train.
    """
    flag, patterns = _list(args)
    if patterns:
        named = list(_named_parameters(args, stages))
        for name, parameter in named:
            found = any(re.search(pattern, name) for pattern in patterns)
            parameter.requires_grad_(found == (flag == _ONLY))
        _check_effect(flag, patterns, named)
    for stage in stages:  # a model of the user's may be frozen without a list
        _keep_the_graph(args, stage)


def trained_weights(args: Arguments) -> str:
    """What chose the trained weights, as typed; for messages and to compare two runs."""
    flag, patterns = _list(args)
    return " ".join((flag, *patterns)) if patterns else "every weight trained"


def _list(args: Arguments) -> tuple[str, list[str]]:
    only = args.only_train_params_name_list
    return (_FREEZE, args.freeze_params_name_list or []) if only is None else (_ONLY, only)


def _named_parameters(args: Arguments, stages: Sequence[GPTModel]) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters by their names in the whole model."""
    tied = not args.untie_embeddings_and_output_weights
    for name, tensor in global_tensors(stages).items():
        if isinstance(tensor, nn.Parameter):
            yield ("embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name), tensor


def _check_effect(flag: str, patterns: Sequence[str], named: Sequence[tuple[str, nn.Parameter]]) -> None:
    own = (
        [any(re.search(pattern, name) for name, _ in named) for pattern in patterns],
        any(parameter.requires_grad for _, parameter in named),
    )
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    for number, pattern in enumerate(patterns):
        if not any(found[number] for found, _ in ranks):
            names = listed(name for name, _ in named)
            raise ValueError(
                f"{flag} {pattern!r} is found in no weight's name, which here are {names}: fix the regular expression"
                " or leave it out"
            )
    if not any(trains for _, trains in ranks):
        raise ValueError(f"{flag} {' '.join(patterns)} leaves no weight to train: choose fewer to freeze")


def _keep_the_graph(args: Arguments, stage: GPTModel) -> None:
    """Recomputed blocks have gradients only where their input has one: a frozen embedding would cut all of them off."""
    embedding_is_frozen = stage.pre_process and not any(p.requires_grad for p in stage.embedding.parameters())
    if embedding_is_frozen and args.recompute_granularity is not None:
        stage.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_()
