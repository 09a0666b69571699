"""Loads a Hugging Face tokenizer, without the parts of torch that only the models of transformers need."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

MASKS = "transformers.masking_utils"
OF_COMPILER = "torch._dynamo._trace_wrapped_higher_order_op"  # what they import of torch's compiler


def load_tokenizer(folder: str, *, trust_code: bool) -> Any:
    """The tokenizer of an HF checkpoint folder; runs code from it only with `trust_code`."""
    with without_compiler():
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_code)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """In this block an import of transformers leaves out torch's compiler, which takes a second.

    A tokenizer imports the attention masks of all models, and they import the compiler for one class. Here they get a
    function in its place, which imports the class when a mask is made.
    """
    if MASKS in sys.modules or OF_COMPILER in sys.modules:
        yield
        return
    stands_in = types.ModuleType(OF_COMPILER)
    stands_in.__dict__["TransformGetItemToIndex"] = _transform_get_item_to_index
    sys.modules[OF_COMPILER] = stands_in
    try:
        yield
    finally:
        del sys.modules[OF_COMPILER]


def _transform_get_item_to_index() -> contextlib.AbstractContextManager[None]:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
