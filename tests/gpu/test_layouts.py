"""On GPUs every layout trains as plain float64 autograd does, with the collectives and kernels that a CPU lacks.

The reference is computed on the CPU by transformers and torch only, as in tests/megatron/test_layouts.py, with the same
catalogue of layouts. A layout is skipped if the machine has fewer GPUs than it has ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from slimrl.arguments.derive import flash_attention_installed
from tests.gpu.conftest import needs
from tests.megatron import layouts
from tests.megatron.launch import RankPool
from tests.megatron.layouts import EP2, ETP2, SPREAD, TP2_SP, Layout, full, selective

pytestmark = [pytest.mark.slow, needs()]

LOCAL = {"transformer_impl": "local"}
ENGINE = {"transformer_impl": "transformer_engine"}
# FlashAttention where it is installed (docs/install.md does not install it), else cuDNN's kernel
FLASH = ENGINE | {"attention_backend": "flash" if flash_attention_installed(latent=False) else "fused"}
GROUPED = ENGINE | {"moe_grouped_gemm": True, "moe_permute_fusion": True}
FP32 = 1e-4  # GPU kernels split sums in any order; measured on CPU below 1e-5
# layouts that gloo, or a machine without the kernels, does not support: the required packages, and the layout
ONLY_ON_GPUS = {
    "EP2 with experts cut in two": (None, Layout(4, EP2 | ETP2, kinds=layouts.EXPERTS)),
    "virtual stages, batched exchange": (
        None,
        Layout(4, {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2,
                   "microbatch_group_size_per_vp_stage": 4, "overlap_p2p_comm": False}, 8),
    ),
    "gradients added in the matrix product": (
        "fused_weight_gradient_mlp_cuda", Layout(1, LOCAL | {"gradient_accumulation_fusion": True}),
    ),
    "gradients added beside the matrix product": (
        "transformer_engine", Layout(1, ENGINE | {"gradient_accumulation_fusion": False}),
    ),
    "CP2 by all-to-all": ("transformer_engine", Layout(2, ENGINE | {"context_parallel_size": 2,
                                                                   "cp_comm_type": ["a2a"]}, kinds=("dense", "MoE"))),
    "experts in one grouped product": ("transformer_engine", Layout(1, GROUPED, kinds=layouts.EXPERTS)),
    "EP2 in one grouped product": ("transformer_engine", Layout(2, GROUPED | EP2, kinds=layouts.EXPERTS)),
    "recompute moe_act": ("transformer_engine", Layout(1, GROUPED | selective("moe_act"), kinds=layouts.EXPERTS)),
    "TP2 SP, whole layers recomputed": ("transformer_engine", Layout(2, ENGINE | TP2_SP | full("uniform", 1))),
    "EP2 by DeepEP": ("deep_ep transformer_engine", Layout(2, GROUPED | EP2 | {"moe_token_dispatcher_type": "flex",
                                                           "moe_enable_deepep": True,
                                                           "moe_router_dtype": "fp32"}, kinds=layouts.EXPERTS)),
    "state in fewer bits": ("transformer_engine", Layout(2, ENGINE | SPREAD | {
        "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"})),
}  # fmt: skip


# experts sequentially and as one grouped product, which only Transformer Engine has: without it the flag
# changes nothing
ROUTED = [
    ("local", False, "1 rank"),
    ("local", True, "1 rank"),
    ("transformer_engine", False, "1 rank"),
    ("transformer_engine", True, "1 rank"),
    ("local", False, "EP2"),
    ("transformer_engine", True, "EP2"),
]


def case(name: str, layout: Layout, kind: str, packages: str | None = None) -> Any:
    """The parameters `name` and `kind` of a test, with their requirements; `packages` are separated by spaces."""
    return pytest.param(name, kind, marks=needs(*(packages or "").split(), gpus=layout.ranks), id=f"{name}, {kind}")


CATALOGUE = [case(name, layout, kind) for name, layout in layouts.LAYOUTS.items() for kind in layout.kinds]
OTHERS = [
    case(name, layout, kind, packages) for name, (packages, layout) in ONLY_ON_GPUS.items() for kind in layout.kinds
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("layouts"))


def measured(models: layouts.Models, layout: Layout, kind: str, settings: Any, **more: Any) -> layouts.Differences:
    """The distance of `kind` in `layout`, with `more` flags, from the reference; prints it."""
    args = models.args(layout, kind, settings)
    for name, value in more.items():
        assert hasattr(args, name)
        setattr(args, name, value)
    with RankPool(layout.ranks) as pool:
        result = layouts.train(pool, args, models.rollout)
    found = layouts.differences(args, result, models.truth(kind, layout.layers, settings))
    print(found)
    return found


@pytest.mark.parametrize(("name", "kind"), CATALOGUE)
def test_every_layout_in_float32_matches_plain_autograd(name: str, kind: str, models: Any):
    found = measured(models, layouts.LAYOUTS[name], kind, layouts.SETTINGS, **LOCAL)
    assert max(found.loss, found.grad_norm, found.weights) < FP32


@needs("transformer_engine")
@pytest.mark.parametrize(("name", "kind"), CATALOGUE)
def test_every_layout_with_transformer_engine_is_within_bf16_error(name: str, kind: str, models: Any):
    # flash attention needs queries and values of one width, which latent attention does not have
    found = measured(models, layouts.LAYOUTS[name], kind, layouts.BF16, **(ENGINE if kind == "MLA" else FLASH))
    assert layouts.within_bf16(found, kind), found


@pytest.mark.parametrize(("name", "kind"), OTHERS)
def test_gpu_only_features_are_within_bf16_error(name: str, kind: str, models: Any):
    _, layout = ONLY_ON_GPUS[name]
    found = measured(models, layout, kind, layouts.BF16)
    assert layouts.within_bf16(found, kind), found


@pytest.mark.parametrize("kind", layouts.EXPERTS)
@pytest.mark.parametrize(
    ("implementation", "grouped", "name"),
    [
        pytest.param(
            implementation,
            grouped,
            name,
            marks=needs(
                *(["transformer_engine"] if implementation != "local" else []), gpus=layouts.LAYOUTS[name].ranks
            ),
        )
        for implementation, grouped, name in ROUTED
    ],
)
def test_experts_train_in_bf16_with_and_without_transformer_engine(
    implementation: str, grouped: bool, name: str, kind: str, models: Any
):
    flags = {"transformer_impl": implementation, "moe_grouped_gemm": grouped}
    found = measured(models, layouts.LAYOUTS[name], kind, layouts.BF16, **flags)
    assert layouts.within_bf16(found, kind), found


@needs("transformer_engine")
@pytest.mark.parametrize("kind", ["dense", "MoE"])  # widths of latent attention do not divide by 16, as fp8 needs
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_training_is_close_to_the_reference(recipe: str, kind: str, models: Any):
    """e4m3 keeps three bits of a fraction: a unit of rounding is 2^-4, and the gradient may be four of these away."""
    fp8 = ENGINE | {"fp8_format": "e4m3", "fp8_recipe": recipe, "data_pad_size_multiplier": 128}
    found = measured(models, Layout(1, {}), kind, layouts.BF16, **fp8)
    assert max(found.loss, found.grad_norm, found.gradients) < 2**-2
