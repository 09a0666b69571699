"""Runs the real SGLang server on a machine without CUDA: `python -m slimrl.engines.sglang.cpu_patches <flags>`.

The flags are those of `sglang.launch_server`. SGLang supports the CPU, but its modules import triton, torchvision and
sgl_kernel, which exist only next to CUDA. `install` adds one finder, last in `sys.meta_path`, that answers for exactly
those packages where the real one is absent. `patch` replaces the few functions that insist on CUDA, and layers that
work on a GPU alone (gates, rotary tables, latent attention). With these every family of `docs/families.md` is served
with the log-probabilities of transformers.
Both act only where torch sees no GPU, only in the process of the server, and never on torch itself: patching torch's
factory functions silently breaks transformers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import math
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from slimrl.engines.sglang.entry import BATCH_INVARIANT, run_server
from slimrl.engines.sglang.server_args import ADAPTERS, unused_model_modules, with_defaults
from slimrl.engines.sglang.versions import allow_shm_unpickling, module_with
from slimrl.processes.child_process import uncollected

logger = logging.getLogger(__name__)

PAUSED_STEP = "_record_scheduler_state_for_paused_engine"  # what a scheduler calls in a loop while it is paused


def patch_layers() -> None:
    """Replaces layer kernels that SGLang lacks on the CPU by torch functions."""
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common import attention_backend_handler

    elementwise._launch_fused_gate_sigmoid_mul = gate_sigmoid_mul
    factory.get_rope_cpu = with_unscaled_rope(factory.get_rope, factory.get_rope_cpu)
    attention_backend_handler.AttentionBackendRegistry.register("torch_native", absorbed_attention)


def gate_sigmoid_mul(hidden_states: Any, gate_weight: Any, shared_output: Any, output: Any, *, do_add: bool) -> None:
    """Writes `shared_output` [tokens, hidden], gated by sigmoid(hidden_states @ gate_weight), into `output`.

    `gate_weight` [hidden]; with `do_add` it is added to what `output` holds.
    """
    gated = (hidden_states @ gate_weight).sigmoid().unsqueeze(-1) * shared_output
    if do_add:
        output.add_(gated)
    else:
        output.copy_(gated)


def with_unscaled_rope(get_rope: Any, get_rope_cpu: Any) -> Any:
    """`get_rope_cpu`, which only supports DeepSeek's YaRN, with `get_rope` for unscaled rotary embeddings."""

    def either(size: int, rotary_dim: int, positions: int, base: float, neox: bool, scaling: Any, *rest: Any) -> Any:
        if scaling is None:
            *others, _device = rest
            return get_rope(size, rotary_dim, positions, base, neox, None, *others)
        return get_rope_cpu(size, rotary_dim, positions, base, neox, scaling, *rest)

    return either


def absorbed_attention(attention: Any, batch: Any) -> Any:
    """Selects latent attention on the latent cache, the only kind that this platform's attention supports."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def patch_attention() -> None:
    """Replaces the loop over the requests of a batch by batched attention (`cpu_attention`)."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from slimrl.engines.sglang.operators import cpu_attention

    cpu_attention.install(TorchNativeAttnBackend)


def patch_operators() -> None:
    """Replaces the operators whose results depend on the batch (`batch_invariant`), attention included."""
    from slimrl.engines.sglang.operators import batch_invariant

    batch_invariant.install()


# of SGLang's CPU kernels: models that are not served look them up while their modules are imported
KERNELS_OF_OTHER_MODELS = (
    *("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"),
    *("fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_gdn_gating_cpu"),
)


def patch_image_processors() -> None:
    """Makes SGLang's processors of Qwen's images importable: they import every model that they are for."""
    import torch

    for name in KERNELS_OF_OTHER_MODELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            setattr(torch.ops.sgl_kernel, name, _AbsentModule(name))


def patch_pause() -> None:
    """Makes a paused scheduler sleep until the next call, as `--sleep-on-idle` does for one that has no request.

    It would otherwise ask its sockets all the time and take a core from training and from the weight update itself.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record = getattr(Scheduler, PAUSED_STEP, None)
    if record is not None:  # older servers pause in another way

        def record_and_sleep(self: Any) -> None:
            record(self)
            self.maybe_sleep_on_idle()

        setattr(Scheduler, PAUSED_STEP, record_and_sleep)


def patch_broadcast() -> None:
    """Makes the server receive the buckets of a broadcast into memory that it keeps."""
    place = "sglang.srt.model_executor.model_runner_components"  # later than 0.5.17, which keeps its own way
    if importlib.util.find_spec(place) is not None:
        module = importlib.import_module(f"{place}.weight_updater")
        module.WeightUpdater._update_bucketed_weights_from_distributed = bucket_receiver()


def bucket_receiver() -> Callable[..., tuple[bool, str]]:
    """`WeightUpdater._update_bucketed_weights_from_distributed` without new memory for each bucket.

    SGLang allocates every tensor of a bucket and then their concatenation. On the CPU the kernel has to zero that
    memory, at about 1 GB/s, which takes longer than the broadcast itself.
    """
    import torch

    memory = torch.empty(0, dtype=torch.uint8)

    def receive(self: Any, names: Any, dtypes: Any, shapes: Any, group_name: str) -> tuple[bool, str]:
        nonlocal memory
        try:
            dtypes = [dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype) for dtype in dtypes]
            sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
            if memory.numel() < sum(sizes):
                memory = torch.empty(sum(sizes), dtype=torch.uint8)
            flat = memory[: sum(sizes)]
            torch.distributed.broadcast(flat, src=0, group=self._model_update_group[group_name])
            parts = zip(names, flat.split(sizes), dtypes, shapes, strict=True)
            self.get_model().load_weights([(name, part.view(dtype).view(shape)) for name, part, dtype, shape in parts])
        except Exception as error:  # as SGLang: the trainer gets the message, and repeats the update or ends
            message = f"Failed to update parameter online: {error}. The full weights are partially updated."
            logger.exception(message)
            return False, message
        return True, "Succeeded to update parameter online."

    return receive


ABSENT_PACKAGES = ("triton", "torchvision", "sgl_kernel")


class _AbsentName(type):
    """Metaclass of placeholder classes: the value of an attribute is its name, as in an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _AbsentModule(types.ModuleType):
    """A module that has every name; callable as a decorator, any other call raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if full_name in sys.modules:
            return sys.modules[full_name]
        if name[0].isupper():
            value: Any = _AbsentName(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            value = _AbsentModule(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):  # @triton.jit
            return args[0]
        if self.__name__.startswith("triton"):  # @triton.autotune(...)
            return lambda function: function
        raise NotImplementedError(f"{self.__name__} is not available: this machine has no CUDA and no such package")

    def __contains__(self, item: object) -> bool:
        return False


class AbsentPackageFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds placeholders for `ABSENT_PACKAGES`. As the last finder it is used only if the real package is missing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT_PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: Any) -> None:
        """Sets real values for the few names that are used during imports."""
        if module.__name__ == "torchvision":
            module.__version__ = "0.0"
        elif module.__name__ == "triton":
            module.__version__ = "3.0.0"
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
        elif module.__name__ == "triton.language":
            init = {"__init__": lambda self, value=None: setattr(self, "value", value)}
            module.constexpr = type("constexpr", (), init)


def install() -> bool:
    """Prepares this process for importing sglang; returns False, without any change, on a machine with CUDA.

    Must run before transformers is imported, which remembers whether torchvision is there.
    """
    import torch
    from torch.utils._triton import has_triton_package

    if torch.cuda.is_available():
        return False
    if not any(isinstance(finder, AbsentPackageFinder) for finder in sys.meta_path):
        has_triton_package()  # torch caches the true answer before the placeholder exists
        sys.meta_path.append(AbsentPackageFinder())
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # sglang compiles its seeded sampler: 17 s at the first request, and it would need a C++ compiler
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # SGLang's debugging module imports megatron.core if it is installed, which takes 1 s and is not needed
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    return True


def patch() -> None:
    """Replaces the parts of sglang that need CUDA: seeded sampling, NCCL between ranks, the weight checker."""
    import torch
    from sglang.srt import batch_invariant_ops
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.layers import sampler
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.mem_cache.pool_host import common as host_memory
    from sglang.srt.utils import common, weight_checker, weight_checker_comparator

    from slimrl.engines.sglang.operators import seeded_sampling

    choices = module_with("add_deterministic_attention_backend_choices")
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    # it would replace torch's kernels by Triton's; torch's already give equal tokens alone and in a batch (tested)
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    sampler.murmur_hash32 = seeded_sampling.murmur_hash32
    seeded_sampling.install(sampler)
    patch_layers()
    patch_image_processors()
    patch_attention()
    allow_shm_unpickling(common.SafeUnpickler)
    host_memory.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **pinned: torch.empty(dims, dtype=dtype)
    pynccl.NCCLLibrary = _no_nccl  # torch's CUDA build has the library also on machines without a GPU
    weight_checker.torch = weight_updater.torch = _without_cuda(torch)
    weight_checker.WeightChecker._snapshot = _snapshot
    weight_checker._hash_tensor = hash_tensor
    weight_checker_comparator.RawComparable.iter_chunks = _iter_chunks
    patch_pause()
    patch_broadcast()


def _no_nccl(path: str | None = None) -> Any:
    raise OSError("NCCL needs a GPU")


def _copy_of(torch: types.ModuleType) -> Any:
    """A module with the names of torch, some of which can be replaced for one module."""
    view: Any = types.ModuleType("torch")
    view.__getattr__ = lambda name: getattr(torch, name)
    return view


def _without_cuda(torch: types.ModuleType) -> types.ModuleType:
    """A copy of the torch module whose `cuda.synchronize` does nothing, for one module.

    And with the CPU as the device in use: from torch 2.14 on, a build for CUDA says CUDA also where there is no GPU.
    """
    view = _copy_of(torch)
    view.cuda = types.SimpleNamespace(synchronize=lambda: None)
    view.get_device_module = lambda device="cpu": torch.get_device_module(device)
    return view


def patch_adapters() -> None:
    """Makes LoRA layers use plain memory: pinned memory needs a GPU."""
    import torch
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _without_pinning(torch)
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, device=None: self


def _without_pinning(torch: types.ModuleType) -> types.ModuleType:
    """A copy of the torch module whose functions that make tensors ignore `pin_memory`, for one module."""

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    view = _copy_of(torch)
    for name in ("tensor", "empty", "zeros"):
        setattr(view, name, unpinned(getattr(torch, name)))
    return view


def _snapshot(self: Any) -> None:
    """`WeightChecker._snapshot` with a copy: on the CPU its `.cpu()` does not copy, and `compare` would always pass."""
    self._snapshot_tensors = {name: tensor.detach().clone() for name, tensor in self._model_state()}


def hash_tensor(tensor: Any) -> str:
    """XXH3 (128 bits) of the tensor's bytes, in hex, for the SHA-256 of `WeightChecker`, which takes 2 s per gigabyte.

    `weights.update.verify` computes the same for the trainer's weights.
    """
    import torch
    import xxhash

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return str(xxhash.xxh3_128_hexdigest(raw.numpy().data))


def _iter_chunks(self: Any) -> Any:
    """`RawComparable.iter_chunks` without moving the chunks to a GPU."""
    for chunk in self.tensor.reshape(-1).split(64 * 1024 * 1024):
        yield chunk, None


def fork_children() -> None:
    """Makes sglang fork its children: without a CUDA context they can inherit the imports (half the start-up)."""
    set_start_method: Callable[..., None] = multiprocessing.set_start_method

    def fork(method: str | None = None, force: bool = False) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = fork


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `slimrl.engines.sglang.entry server`, with patches and defaults for the CPU if there is no CUDA."""
    words = list(sys.argv[1:] if argv is None else argv)
    if install():
        from slimrl.engines.sglang.operators import speculation

        with uncollected():
            speculation.install(words)
            patch()
            if BATCH_INVARIANT in words:
                patch_operators()
            if ADAPTERS in words:
                patch_adapters()
        fork_children()
        words = with_defaults(words)
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(unused_model_modules(words)))
    run_server(words)


if __name__ == "__main__":
    main()
