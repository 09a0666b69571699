"""The patches that make megatron-core run where CUDA is not available, and those of --true-on-policy-mode.

Only objects inside `megatron.core` change: in each of its modules the global name `torch` is a stand-in whose CUDA
calls work on the CPU; torch itself and all other packages are unchanged. Patches are idempotent. The table in `patches`
defines when each applies.

With --true-on-policy-mode, which is for CPUs only, the products and the sums over experts are computed in a fixed order
(`fix_order_of_additions`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slimrl.algorithms.batch_invariant import operators

# The strategies are imported lazily by dist_checkpointing: a module that is not loaded cannot be rebound.
_LAZY_MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.common",
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
)
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like", "arange")
_TENSOR_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
# Functions that move a tensor with `.cuda()`: (module, qualified name, the method that leaves it on the CPU). `cpu`
# takes no `non_blocking`, which `to` does; in `torch.cpu` it is the stand-in's `cuda`.
_CUDA_METHOD_CALLERS = (
    (
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
        "cpu",
    ),
    ("megatron.core.models.common.embeddings.rope_utils", "get_pos_emb_on_this_cp_rank", "to"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.get_parameter_state_dp_zero", "cpu"),
    ("megatron.core.optimizer.optimizer", "MegatronOptimizer.restore_from_cpu", "cpu"),
    ("megatron.core.dist_checkpointing.exchange_utils", "exchange_loaded_tensors_gather_rounds", "cpu"),
    ("megatron.core.dist_checkpointing.exchange_utils", "exchange_loaded_tensors_broadcast", "cpu"),
    ("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor", "validate_uneven_dtensor", "cpu"),
)


class Placeholder(types.ModuleType):
    """A module with its own attributes that falls back to those of the wrapped module."""

    def __init__(self, wrapped: types.ModuleType, **overrides: Any):
        super().__init__(wrapped.__name__)
        self.__dict__.update(overrides, _wrapped=wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)


class _NullStream:
    """Replaces a CUDA stream or event: on the CPU all work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def _done(self, *args: Any, **kwargs: Any) -> _NullStream:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _done


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The tensor factory with `device="cuda…"` replaced by the CPU, and without pinning."""

    def build(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return build


class _AdamW(torch.optim.AdamW):
    """AdamW without the marks for `torch.compile`.

    torch excludes these methods from compiled graphs. For that it imports the compiler when they are first called:
    half a second in every process that trains.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


def _torch_stand_in() -> Placeholder:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    stream = _NullStream()
    generator = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state, "manual_seed": torch.manual_seed}
    cuda = Placeholder(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=nothing,
        set_device=nothing,
        empty_cache=nothing,
        Stream=_NullStream,
        Event=_NullStream,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        random=Placeholder(torch.cuda.random, **generator),
        **generator,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return Placeholder(torch, cuda=cuda, cpu=cuda, optim=Placeholder(torch.optim, AdamW=_AdamW), **factories)


def megatron_modules() -> list[types.ModuleType]:
    """The imported modules of megatron-core."""
    return [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core")]


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Every function defined in `module`, including methods and functions behind decorators with `__wrapped__`."""
    holders: list[Mapping[str, Any]] = [vars(module)]
    holders += [vars(c) for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    for holder in holders:
        for value in holder.values():
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                yield function


def _replace_in_code(code: types.CodeType, constants: dict[str, str], names: dict[str, str]) -> types.CodeType:
    """`code` with string constants (also inside tuples and nested code) and attribute names replaced."""

    def exchange(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _replace_in_code(constant, constants, names)
        if isinstance(constant, tuple):
            return tuple(exchange(item) for item in constant)
        return constants.get(constant, constant) if isinstance(constant, str) else constant

    return code.replace(
        co_consts=tuple(exchange(constant) for constant in code.co_consts),
        co_names=tuple(names.get(name, name) for name in code.co_names),
    )


def accept_cpu_tensor_types() -> None:
    """Optimizers and clipping compare `param.type()` with "torch.cuda.FloatTensor"; replaces it by the CPU type."""
    constants = {f"torch.cuda.{name}": f"torch.{name}" for name in _TENSOR_TYPES}
    for module in megatron_modules():
        if module.__name__.startswith("megatron.core.optimizer"):
            for function in _functions(module):
                function.__code__ = _replace_in_code(function.__code__, constants, {})


def run_sharding_on_cpu() -> None:
    """Megatron-FSDP hard-codes devices ("cuda", and "cuda:" before a number), and relies on streams to order work after
    asynchronous gathers: gloo has none, and memory was written after it had been freed.
    """
    for module in megatron_modules():
        if module.__name__.startswith("megatron.core.distributed.fsdp"):
            for function in _functions(module):
                function.__code__ = _replace_in_code(function.__code__, {"cuda": "cpu", "cuda:": ""}, {})
    buffers = sys.modules["megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"]
    gather = buffers.AllGatherPipeline.all_gather_params
    parameters = inspect.signature(gather).parameters.values()
    defaults = {entry.name: entry.default for entry in parameters if entry.default is not entry.empty}
    gather.__defaults__ = tuple((defaults | {"async_param_gather": False}).values())


def run_optimizer_offload_on_cpu() -> None:
    """An offloading optimizer finds moved parameters by `is_cuda`; on a CPU, recompute which ones it moves."""
    module = importlib.import_module("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    for function in _functions(module):
        function.__code__ = _replace_in_code(function.__code__, {"cuda": "cpu"}, {})

    def divide(
        self: Any, fraction: float
    ) -> tuple[list[Any], list[Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
        most = fraction * sum(parameter.numel() for group in self.param_groups for parameter in group["params"])
        host: list[Any] = []
        device: list[Any] = []
        copies, masters, moved = {}, {}, 0
        for group in self.param_groups:
            parts: tuple[list[Any], list[Any]] = ([], [])
            for parameter in group["params"]:
                moves, inner = moved < most, parameter
                if self.param_update_in_fp32 and parameter.dtype != torch.float32:
                    inner = masters[parameter] = parameter.detach().clone().float()
                if moves:
                    moved += parameter.numel()
                    inner = copies[parameter] = inner if inner is not parameter else parameter.detach().clone()
                parts[moves].append(inner)
            for groups, part in zip((device, host), parts, strict=True):
                if part:
                    groups.append({**group, "params": part})
        return host, device, copies, {copy: parameter for parameter, copy in copies.items()}, masters

    module.HybridDeviceOptimizer._get_sub_optimizer_param_groups = divide


def stay_on_cpu_in_cuda_calls() -> None:
    """Replace `tensor.cuda()` by a method that keeps the tensor on the CPU."""
    for module_name, qualified_name, method in _CUDA_METHOD_CALLERS:
        target: Any = sys.modules[module_name]
        for part in qualified_name.split("."):
            target = getattr(target, part)
        while hasattr(target, "__wrapped__"):
            target = target.__wrapped__
        target.__code__ = _replace_in_code(target.__code__, {}, {"cuda": method})


def unwrap_compiled_functions() -> None:
    """Use the plain Python of `@jit_fuser` functions: compiling costs 3 to 10 s per process and gains nothing."""
    for module in megatron_modules():
        holders = [module] + [
            c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__
        ]
        for holder in holders:
            for name, value in list(vars(holder).items()):
                compiled = value.__func__ if isinstance(value, staticmethod) else value
                if not isinstance(compiled, types.FunctionType):
                    continue
                original = vars(compiled).get("_torchdynamo_orig_callable")
                if original is not None:
                    setattr(holder, name, staticmethod(original) if isinstance(value, staticmethod) else original)


def replace_torch() -> None:
    """Set the stand-in as the global `torch` of every imported megatron-core module."""
    for name in _LAZY_MODULES:
        importlib.import_module(name)
    stand_in = _torch_stand_in()
    for module in megatron_modules():
        if vars(module).get("torch") is torch:
            vars(module)["torch"] = stand_in
    # A default argument is bound when the module is imported, before its `torch` is replaced.
    sharded_tensor = sys.modules["megatron.core.dist_checkpointing.mapping"].ShardedTensor
    sharded_tensor.init_data.__defaults__ = (stand_in.empty,)


def set_random_state_at_once() -> None:
    """The original defers to CUDA's initialisation, which never happens, so the state would not change."""
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def count_tokens_in_numpy() -> None:
    """The token dispatcher uses counts as numpy arrays, but converts only those from a GPU."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_cpu


def fix_order_of_additions() -> None:
    """Apply the changes of --true-on-policy-mode; repeated calls change nothing more."""
    fix_products()
    fix_routing()
    fix_sums_over_experts()


def fix_products() -> None:
    """The forward products of the parallel linear layers, which are their calls of `torch.matmul`.

    Their backward passes use methods of tensors.
    """
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    if layers.torch.matmul is not _product:
        layers.torch = Placeholder(layers.torch, matmul=_product)


def _product(x: Tensor, right: Tensor, **options: Any) -> Tensor:
    if options:  # the gradient of a weight, written to its buffer
        return torch.matmul(x, right, **options)
    return operators.linear(x, right.t())


def fix_routing() -> None:
    """The router's logits, and the weights of the experts of a token."""
    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    router.router_gating_linear = _router_logits
    router.topk_routing_with_score_function = _route


def _router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    logits = operators.product(x, weight)
    return logits if bias is None else logits + bias


def _route(logits: Tensor, topk: int, use_pre_softmax: bool, **_: Any) -> tuple[Tensor, Tensor]:
    """Probabilities and the map of the chosen experts, [tokens, experts] each; a rule rejects other routers."""
    weights, ids = operators.route(logits, topk, over_all=use_pre_softmax)
    nothing = torch.zeros_like(logits)
    return nothing.scatter(1, ids, weights), torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)


def fix_sums_over_experts() -> None:
    """The sum of the outputs of a token's experts, which the dispatcher has in the order of the experts."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.unpermute = _summed


def _summed(tokens: Tensor, places: Tensor, restore_shape: torch.Size, **_: Any) -> Tensor:
    return operators.sum_rows(tokens, places, restore_shape[0])
