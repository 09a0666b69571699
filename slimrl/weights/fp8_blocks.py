"""Weights stored as 8-bit floats with one scale per block, as DeepSeek-V3 and Kimi-K2 are published.

A weight `x.weight` then stands beside `x.weight_scale_inv`; a block's values times its scale are the true ones
(arXiv:2412.19437, section 3.3.2). Pure; called where checkpoint files are read, so that training and the way back
see plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALE_SUFFIX = "_scale_inv"
DEFAULT_BLOCK = (128, 128)


def block_size(hf_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block by config.json's quantization_config, None for a model that is not quantised.

    Raises ValueError for any other way of quantising.
    """
    quantisation = hf_config.get("quantization_config")
    if quantisation is None:
        return None
    method, scheme = quantisation.get("quant_method"), quantisation.get("fmt", "e4m3")
    rows, columns = quantisation.get("weight_block_size") or DEFAULT_BLOCK
    if method != "fp8" or scheme != "e4m3":
        raise ValueError(
            f"config.json has quantization_config with quant_method {method!r} (format {scheme!r}), and of the"
            " quantised checkpoints only block-wise fp8 (e4m3) can be read: use the bf16 checkpoint of the model"
        )
    return rows, columns


def dequantised(
    weight: Tensor, scale: Tensor, block: tuple[int, int] = DEFAULT_BLOCK, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`weight` [rows, columns] float8_e4m3fn with each block multiplied by its `scale`, float32; result in `dtype`.

    `scale` is [ceil(rows / block rows), ceil(columns / block columns)]: blocks at the end may be cut off. The
    product is rounded once, from float32. Raises ValueError where the two shapes do not belong together.
    """
    wanted = tuple(-(-length // step) for length, step in zip(weight.shape, block, strict=True))
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"scales of shape {list(scale.shape)} do not fit a weight of shape {list(weight.shape)} in blocks of"
            f" {block[0]} x {block[1]} (they must be {list(wanted)}): check weight_block_size in config.json"
        )
    rows, columns = weight.shape
    factors = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * factors).to(dtype)
