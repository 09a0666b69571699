"""Layers of SGLang's models that only work on a GPU, answered with torch: gates, rotary tables, latent attention.

Called by `slimrl.sglang.cpu.mend`, in the process of a server without CUDA. With these, every family of
`docs/families.md` is served with the log-probabilities of transformers.
"""

from __future__ import annotations

from typing import Any


def mend_layers() -> None:
    """Puts torch's answers where SGLang has none for the CPU."""
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
    """`get_rope_cpu`, which only knows DeepSeek's YaRN, with `get_rope`'s answer where nothing is scaled."""

    def either(size: int, rotary_dim: int, positions: int, base: float, neox: bool, scaling: Any, *rest: Any) -> Any:
        if scaling is None:
            *rest, _device = rest
            return get_rope(size, rotary_dim, positions, base, neox, None, *rest)
        return get_rope_cpu(size, rotary_dim, positions, base, neox, scaling, *rest)

    return either


def absorbed_attention(attention: Any, batch: Any) -> Any:
    """Latent attention always on the latent cache, which is all that the attention of this platform reads."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
