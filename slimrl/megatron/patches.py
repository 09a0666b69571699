"""Table of all patches of megatron-core, with the machines each applies to, and the warning about slow GPU kernels.

No other code in slimrl modifies megatron-core's modules. Whether a patch applies depends on CUDA, Transformer Engine
and Apex. Patches are idempotent. `parallel.initialize` calls `activate` once, after the modules in use are imported.

The warning is logged when training starts and lists the parts that run in slower kernels because Transformer Engine's
layers are not used. Its text is a pure function of the flags and the installed packages.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from slimrl.arguments.derive import (
    apex_installed,
    apex_optimizers_installed,
    flash_attention_installed,
    transformer_engine_installed,
)
from slimrl.arguments.namespace import MegatronArguments
from slimrl.megatron import cpu_patches
from slimrl.megatron.checkpoint import io
from slimrl.platform import is_cpu


@dataclasses.dataclass(frozen=True)
class Patch:
    """One change to megatron-core 0.16.1, or to a torch function that megatron-core calls."""

    name: str
    repairs: str  # the failure without it
    applies: Callable[[bool, bool, bool], bool]  # (cuda, transformer_engine, apex) -> needed
    apply: Callable[[], None]


def patches_for(*, cuda: bool, transformer_engine: bool, apex: bool) -> tuple[Patch, ...]:
    """The patches that a machine needs, in the order of application.

    `cuda`: it has a GPU; `transformer_engine`, `apex`: the library is installed.
    """
    return tuple(patch for patch in PATCHES if patch.applies(cuda, transformer_engine, apex))


def activate(*, batch_invariant: bool = False) -> None:
    """Apply the patches that this machine needs; with `batch_invariant` also those of --true-on-policy-mode."""
    for patch in patches_for(
        cuda=not is_cpu(), transformer_engine=transformer_engine_installed(), apex=apex_installed()
    ):
        patch.apply()
    if batch_invariant:
        cpu_patches.fix_order_of_additions()


def define_router_gemm() -> None:
    """The router then computes its logits with torch's own matrix product."""
    router: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    router.te_general_gemm = None


def define_fp8_state() -> None:
    """Without Transformer Engine there is no fp8 and no fp8 state."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if "FP8GlobalStateManager" not in vars(random):
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()


def patch_te_version_check() -> None:
    """An unusable Transformer Engine satisfies no minimum version."""
    utils = importlib.import_module("megatron.core.utils")
    importlib.import_module("megatron.core.optimizer.optimizer_config")
    original = utils.is_te_min_version

    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return False

    for module in cpu_patches.megatron_modules():
        if vars(module).get("is_te_min_version") is original:
            vars(module)["is_te_min_version"] = is_te_min_version


def know_absent_engine_in_latent_attention() -> None:
    """The module tests whether megatron-core's wrappers can be imported, which always succeeds."""
    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    attention.HAVE_TE = False


def make_engine_linear_a_class() -> None:
    """Then no module counts as one of Transformer Engine's."""
    adapter: Any = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    if not isinstance(adapter.TELinear, type):
        adapter.TELinear = type("NoLinear", (), {})


def shard_frozen_weights() -> None:
    """Weights without a gradient are sharded too; a hook on their gradient never runs, but torch refuses to set it."""
    sharding: Any = importlib.import_module("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp")
    original = sharding.MegatronFSDP._register_fsdp_hooks
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def register(self: Any, root_module: torch.nn.Module) -> None:
        frozen = [weight for weight in root_module.parameters() if not weight.requires_grad]
        for weight in frozen:
            weight.requires_grad_(True)
        original(self, root_module)
        for weight in frozen:
            weight.requires_grad_(False)

    sharding.MegatronFSDP._register_fsdp_hooks = register


def build_own_linears_without_fusion() -> None:
    """megatron-core's parallel linear layers add their weight gradients outside the matrix product.

    They read the setting once, when they are built; the configuration that they keep is unchanged.
    """
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    for linear in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        if not hasattr(linear.__init__, "__wrapped__"):
            linear.__init__ = _without_fusion(linear.__init__)


def _without_fusion(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def build(self: Any, *args: Any, config: Any, **settings: Any) -> None:
        unfused = copy.copy(config)
        unfused.gradient_accumulation_fusion = False
        init(self, *args, config=unfused, **settings)
        self.config = config

    return build


def take_events_of_deepep() -> None:
    """SGLang's build of DeepEP (sgl-deep-ep) has `EventOverlap` in `deep_ep`; megatron-core imports it from its utils.

    Without any DeepEP this does nothing.
    """
    fused: Any = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    if fused.HAVE_DEEP_EP:
        return
    try:
        deep_ep: Any = importlib.import_module("deep_ep")
        utils: Any = importlib.import_module("deep_ep.utils")
    except ImportError:
        return
    utils.EventOverlap = deep_ep.EventOverlap
    importlib.reload(fused)  # it defines its functions while it is imported
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    for name in ("fused_combine", "fused_dispatch", "set_deepep_num_sms"):
        vars(dispatcher)[name] = vars(fused)[name]


def _everywhere(cuda: bool, transformer_engine: bool, apex: bool) -> bool:
    return True


def _on_cpu(cuda: bool, transformer_engine: bool, apex: bool) -> bool:
    return not cuda


def _on_gpu(cuda: bool, transformer_engine: bool, apex: bool) -> bool:
    return cuda


def _without_engine(cuda: bool, transformer_engine: bool, apex: bool) -> bool:
    # without a GPU the package may be installed but not importable, because it needs CUDA's libraries
    return not (cuda and transformer_engine)


def _with_engine_without_apex(cuda: bool, transformer_engine: bool, apex: bool) -> bool:
    return cuda and transformer_engine and not apex


PATCHES = (
    Patch(
        "torch stand-in",
        "tensors, streams and generators are created on an absent CUDA device",
        _on_cpu,
        cpu_patches.replace_torch,
    ),
    Patch(
        "plain functions",
        "compiling fused element-wise functions costs 3 to 10 s per process",
        _on_cpu,
        cpu_patches.unwrap_compiled_functions,
    ),
    Patch(
        "CPU tensor types",
        "optimizers and gradient clipping reject tensors that are not CUDA tensors",
        _on_cpu,
        cpu_patches.accept_cpu_tensor_types,
    ),
    Patch(
        "sharding on the CPU",
        "Megatron-FSDP hard-codes CUDA devices, and gloo collectives write to freed memory",
        _on_cpu,
        cpu_patches.run_sharding_on_cpu,
    ),
    Patch(
        "optimizer offload on the CPU",
        "the hybrid optimizer identifies state that it moved to the host by the tensor's device",
        _on_cpu,
        cpu_patches.run_optimizer_offload_on_cpu,
    ),
    Patch(
        "tensor.cuda()",
        "methods move tensors to an absent CUDA device",
        _on_cpu,
        cpu_patches.stay_on_cpu_in_cuda_calls,
    ),
    Patch(
        "random state",
        "setting the CUDA generator is deferred to an initialisation that never happens",
        _on_cpu,
        cpu_patches.set_random_state_at_once,
    ),
    Patch(
        "token counts",
        "the token dispatcher expects a numpy array and gets a tensor on the CPU",
        _on_cpu,
        cpu_patches.count_tokens_in_numpy,
    ),
    Patch(
        "router product",
        "NameError: te_general_gemm, in the first call of a router",
        _without_engine,
        define_router_gemm,
    ),
    Patch(
        "fp8 state",
        "NameError: FP8GlobalStateManager, where norms or up-projections of latent attention are recomputed",
        _without_engine,
        define_fp8_state,
    ),
    Patch(
        "engine version",
        "TypeError: the version of an absent Transformer Engine is None, and is compared with a number",
        _without_engine,
        patch_te_version_check,
    ),
    Patch(
        "latent attention",
        "TypeError: isinstance() with a wrapper that is not a class without Transformer Engine",
        _without_engine,
        know_absent_engine_in_latent_attention,
    ),
    Patch(
        "sharded linear layers",
        "TypeError: isinstance() in Megatron-FSDP with a wrapper that is not a class without Transformer Engine",
        _without_engine,
        make_engine_linear_a_class,
    ),
    Patch(
        "linear layers without Apex",
        "RuntimeError: the output layer needs Apex's kernel if Transformer Engine's layers accumulate their weight"
        " gradients themselves",
        _with_engine_without_apex,
        build_own_linears_without_fusion,
    ),
    Patch(
        "events of DeepEP",
        "ImportError: DeepEP is not installed, in the first layer with experts, although SGLang's build of it is",
        _on_gpu,
        take_events_of_deepep,
    ),
    Patch(
        "pickles of checkpoints",
        "opening a checkpoint calls whatever functions its .metadata and its stored objects name",
        _everywhere,
        io.open_pickles_safely,
    ),
    Patch(
        "checksums of checkpoints",
        "corrupted bytes are loaded as weights",
        _everywhere,
        io.verify_what_is_read,
    ),
    Patch(
        "sharded frozen weights",
        "RuntimeError: Megatron-FSDP hooks into the gradient of every weight, also of one that is frozen",
        _everywhere,
        shard_frozen_weights,
    ),
)


logger = logging.getLogger(__name__)


def slower_on_gpu(
    flags: MegatronArguments, *, capability: tuple[int, int] | None, transformer_engine: bool, apex: bool, flash: bool
) -> str | None:
    """One sentence for the log: the parts that run in slower kernels and the fix; None if there are none.

    `capability` is the GPU's that training runs on (None: on a CPU), the others say which packages are installed.
    """
    if capability is None:
        return None
    if transformer_engine and flags.transformer_impl != "local":
        return None if flash or capability >= HOPPER else _without_packed_attention(flags)
    slower = ["attention, norms and rotary positions run in separate kernels"]
    if flags.num_experts is not None:
        slower.append("the experts of a rank run one after another")
    if flags.optimizer == "adam" and not (transformer_engine or apex):
        slower.append("AdamW is torch's own, in several kernels")
    if transformer_engine:
        reason, fix = "--transformer-impl local is given", "leave the flag out"
    else:
        reason = "Transformer Engine or its binding (transformer-engine-torch) is not installed"
        fix = "install it as docs/install.md says"
    return f"GPU training runs in slower kernels, because {reason}: {', '.join(slower)}; {fix}"


HOPPER = (9, 0)  # from it on cuDNN's attention takes packed samples (Transformer Engine's nvte_get_fused_attn_backend)


def _without_packed_attention(flags: MegatronArguments) -> str:
    latent = flags.multi_latent_attention  # FlashAttention 2 does not support it, and 3 needs Hopper
    return (
        "attention stores the scores of whole samples, [length, length] for each head, because Transformer Engine has"
        " no other kernel for packed samples on GPUs before Hopper: "
        + ("give" if latent else "install flash-attn (2.8 or earlier), or give")
        + " --transformer-impl local"
    )


def warn(flags: MegatronArguments, device: torch.device) -> None:
    """Log that sentence for a trainer on `device`."""
    sentence = slower_on_gpu(
        flags,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        transformer_engine=transformer_engine_installed(),
        apex=apex_optimizers_installed(),
        flash=flash_attention_installed(latent=flags.multi_latent_attention),
    )
    if sentence is not None:
        logger.warning("%s", sentence)
