"""Flags that move parts of the training state to host memory while training runs."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_LAYERS = "parking whole layers is not served; use --recompute-granularity full or --optimizer-cpu-offload"
_FINE = "parking single modules is not served; use --recompute-granularity selective with --recompute-modules"


@dataclasses.dataclass
class OffloadArguments:
    """Host memory instead of device memory."""

    optimizer_cpu_offload: bool = flag(False, "keep the optimizer's state in host memory and step there")
    optimizer_offload_fraction: float = flag(
        1.0, "part of the optimizer's state that --optimizer-cpu-offload keeps there", at_least=0, at_most=1
    )
    use_torch_optimizer_for_cpu_offload: bool = flag(
        False,
        "torch's own Adam on the device too",
        not_served="the state in host memory has torch's Adam in any case, and megatron-core 0.16.1 reads this for no"
        " other; leave it out",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, "copy gradients and weights while the host steps")
    pin_cpu_grads: bool = flag(
        True, "do not pin the host's copy of gradients", only_off=True, off=("--no-pin-cpu-grads",)
    )
    pin_cpu_params: bool = flag(
        True, "do not pin the host's copy of weights", only_off=True, off=("--no-pin-cpu-params",)
    )
    cpu_offloading: bool = flag(False, "park layers' activations in host memory", not_served=_LAYERS)
    cpu_offloading_num_layers: int = flag(0, "layers that are parked (count)", not_served=_LAYERS)
    cpu_offloading_activations: bool = flag(
        True, "do not park activations", only_off=True, off=("--no-cpu-offloading-activations",), not_served=_LAYERS
    )
    cpu_offloading_weights: bool = flag(False, "park weights too", not_served=_LAYERS)
    cpu_offloading_double_buffering: bool = flag(False, "two buffers for parked layers", not_served=_LAYERS)
    fine_grained_activation_offloading: bool = flag(False, "park activations of single modules", not_served=_FINE)
    offload_modules: list[str] = flag([], "which modules that is", nargs="*", not_served=_FINE)
    min_offloaded_tensor_size: int = flag(1024**2, "smallest tensor that is parked (elements)", not_served=_FINE)
