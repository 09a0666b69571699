"""Counts host reads of device tensors and copies to the device: each makes the host wait on a GPU.

When host and device are one CPU they cannot be distinguished: every operation that needs a value is counted, also on
tensors that the host itself created.
"""

from __future__ import annotations

import collections
import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operators whose result is a Python value, or has a data-dependent length
_READING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal")


class _Watch(TorchDispatchMode):
    """`found` counts by place: "rope_utils.py:_apply_rotary_pos_emb_thd tolist"."""

    methods: tuple[str, ...] = ()  # of tensors; these bypass the operators

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()
        self._replaced = contextlib.ExitStack()

    def __enter__(self) -> _Watch:
        for name in self.methods:
            watched = self._watched(name, getattr(torch.Tensor, name))
            self._replaced.enter_context(mock.patch.object(torch.Tensor, name, watched))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._replaced.close()

    def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), settings: Any = None) -> Any:
        name, settings = function.overloadpacket.__name__, settings or {}
        result = function(*inputs, **settings)
        if self.counts(name, inputs, settings, result):
            self._note(name)
        return result

    def counts(self, name: str, inputs: Any, settings: dict[str, Any], result: Any) -> bool:
        raise NotImplementedError

    def counts_method(self, tensor: torch.Tensor) -> bool:
        raise NotImplementedError

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *inputs: Any, **settings: Any) -> Any:
            if self.counts_method(tensor):
                self._note(name)
            return method(tensor, *inputs, **settings)

        return call

    def _note(self, name: str) -> None:
        """Counts under the innermost caller outside torch and this file."""
        frames = reversed(traceback.extract_stack(limit=60))
        frame = next(one for one in frames if "/torch/" not in one.filename and one.filename != __file__)
        self.found[f"{Path(frame.filename).name}:{frame.name} {name}"] += 1


class HostReads(_Watch):
    """Counts the values that are read, on any device."""

    methods = ("tolist", "numpy", "cpu")

    def counts(self, name: str, inputs: Any, settings: dict[str, Any], result: Any) -> bool:
        if name == "repeat_interleave":  # sums the lengths, unless their sum is given
            return settings.get("output_size") is None
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # counts the entries that are True
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in inputs[1])
        return name in _READING

    def counts_method(self, tensor: torch.Tensor) -> bool:
        return True


class Transfers(_Watch):
    """Counts the copies from host memory to another device."""

    methods = ("new_tensor",)

    def counts(self, name: str, inputs: Any, settings: dict[str, Any], result: Any) -> bool:
        # a kernel takes the value of a single number, unless it becomes a tensor of the device
        copies = name in ("_to_copy", "copy_")
        from_host = any(one.device.type == "cpu" and (one.dim() or copies) for one in _tensors(inputs))
        return from_host and any(one.device.type != "cpu" for one in _tensors((result, *inputs[:1])))

    def counts_method(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
