"""Stand-ins for Transformer Engine's modules that run on a CPU, for --spec tests.megatron.engine_layers layers.

Transformer Engine cannot be installed without a GPU's toolkit. These stand-ins share with its modules, as of 2.11:
which modules megatron-core's layers use (a norm is one module with the linear layer after it), the names and order of
their parameters, extra state in each of them (an empty byte tensor without fp8), and that with gradient accumulation
fusion weight gradients are added to `main_grad` while autograd gets a tensor of arbitrary content. megatron-core's own
specification builds the layers around them.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.megatron import patches
from slimrl.megatron.model.attention import PackedCoreAttention, WholeLinear
from slimrl.megatron.model.layers import RMSNorm
from slimrl.megatron.model.model_builder import own_layers


class WithExtraState:
    """Extra state as Transformer Engine's modules have it in bf16."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or (state.dtype == torch.uint8 and state.numel() == 0), state


class EngineNorm(WithExtraState, RMSNorm):
    """TENorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(config, hidden_size, eps)
        _give_memory(self, config)


class DuplicatedLinear(WithExtraState, WholeLinear):
    """TELinear, in the only parallel mode that megatron-core uses directly."""

    def __init__(self, input_size: int, output_size: int, *, parallel_mode: str, config: Any, **_: Any):
        assert (parallel_mode, input_size) == ("duplicated", config.hidden_size)
        super().__init__(config, output_size)


class EngineColumnLinear(WithExtraState, ColumnParallelLinear):
    """TEColumnParallelLinear."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.config.gradient_accumulation_fusion and weight.requires_grad:
            return _FusedProduct.apply(input, weight)
        return super()._forward_impl(input, weight, *args, **kwargs)


class EngineRowLinear(WithExtraState, RowParallelLinear):
    """TERowParallelLinear."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.config.gradient_accumulation_fusion and weight.requires_grad:
            return _FusedProduct.apply(input, weight)
        return super()._forward_impl(input, weight, *args, **kwargs)


class NormAndColumnLinear(EngineColumnLinear):
    """TELayerNormColumnParallelLinear: the norm's epsilon comes from the configuration."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any):
        super().__init__(input_size, output_size, config=config, **settings)
        self.eps = config.layernorm_epsilon
        weight = self._parameters.pop("weight")
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.weight = weight
        _give_memory(self, config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps), *args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _give_memory(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Reallocates what was created without memory, unless the configuration gives a device."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta and not config.init_model_with_meta_device:
            setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device="cpu")))


class _FusedProduct(torch.autograd.Function):
    """x W^T for one tensor-parallel rank, with the weight's gradient accumulated like in Transformer Engine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # a reference to itself: what autograd saves loses its attributes
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        added = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        weight.main_grad.mul_(0 if getattr(weight, "overwrite_main_grad", False) else 1).add_(added)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, float("nan"))


class FusedAdam(torch.optim.Optimizer):
    """AdamW like Transformer Engine's: integer step counters per group; a state has the two moments."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, adam_w_mode: bool):
        assert adam_w_mode
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert all(set(state) <= {"exp_avg", "exp_avg_sq"} for state in state_dict["state"].values())
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = step = group.get("step", 0) + 1
            assert isinstance(step, int) and group["bias_correction"]
            (first, second), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if gradient is None:
                    continue
                if not state:
                    state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                parameter.mul_(1 - lr * group["weight_decay"])
                scale = (state["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"] / (1 - first**step), scale, value=-lr)


class Provider(BackendSpecProvider):
    """The modules for megatron-core's Transformer Engine specification."""

    def linear(self) -> type:
        return DuplicatedLinear

    def column_parallel_linear(self) -> type:
        return EngineColumnLinear

    def row_parallel_linear(self) -> type:
        return EngineRowLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormAndColumnLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return EngineNorm

    def core_attention(self) -> type:
        return PackedCoreAttention

    def grouped_mlp_modules(self, *_: bool) -> tuple[type, MLPSubmodules]:
        return SequentialMLP, MLPSubmodules(linear_fc1=EngineColumnLinear, linear_fc2=EngineRowLinear)

    def activation_func(self) -> None:
        return None


def layers(args: Arguments, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """slimrl's layers of a machine with Transformer Engine, of these modules, and its optimizer.

    For a separate process: nothing is restored.
    """
    optimizers = importlib.import_module("megatron.core.optimizer")
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_TE_OPTIMIZER = FusedAdam, True, True
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    engine.TENorm, engine.TELayerNormColumnParallelLinear = EngineNorm, NormAndColumnLinear
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs").TESpecProvider = Provider
    importlib.import_module("megatron.core.transformer.multi_latent_attention").TELinear = DuplicatedLinear
    with_engine = copy.copy(config)
    with_engine.transformer_impl = "transformer_engine"
    return own_layers(args, with_engine, vp_stage)


def fusing_layers(args: Arguments, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The same with gradient accumulation fusion, as on a GPU with Transformer Engine and without Apex."""
    for patch in patches.patches_for(cuda=True, transformer_engine=True, apex=False):
        patch.apply()
    config.gradient_accumulation_fusion = True
    return layers(args, config, vp_stage)
