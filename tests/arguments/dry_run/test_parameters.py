"""Parameter counts: against published counts, and against a count that shares no code with slimrl's."""

import subprocess
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from slimrl.models.model_size import (
    Split,
    active_parameters,
    buffer_elements,
    selection_biases,
    stage_weights,
    total_parameters,
)
from slimrl.models.model_spec import ModelSpec
from tests.arguments.dry_run.published import DEEPSEEK_V3, QWEN3_4B, QWEN3_30B_A3B, flags
from tests.scripts.model_size import parameters
from tests.scripts.test_models import SERVED

MODELS = Path(__file__).resolve().parents[3] / "scripts" / "models"


def test_qwen3_4b_parameter_count_matches_its_safetensors_files():
    shape = ModelSpec.from_args(flags(QWEN3_4B))
    assert total_parameters(shape) == 4_022_468_096
    assert active_parameters(shape) == 4_022_468_096


def test_qwen3_30b_a3b_has_30_5_billion_total_and_3_3_billion_active_parameters():
    shape = ModelSpec.from_args(flags(QWEN3_30B_A3B))
    assert total_parameters(shape) == 30_532_122_624
    assert active_parameters(shape) == pytest.approx(3.35e9, rel=0.002)


def test_deepseek_v3_has_671_billion_total_and_37_billion_active_parameters():
    shape = ModelSpec.from_args(flags(DEEPSEEK_V3))
    hidden, experts = 7168, 256
    attention = (
        hidden * 1536 + 1536 + 1536 * 128 * 192 + hidden * 576 + 512 + 512 * 128 * 256 + 128 * 128 * hidden + 2 * hidden
    )
    dense, expert = 3 * hidden * 18432, 3 * hidden * 2048
    by_hand = 61 * attention + 3 * dense + 58 * ((experts + 1) * expert + experts * hidden)
    by_hand += 2 * 129280 * hidden + hidden
    assert total_parameters(shape) == by_hand == 671_026_404_352
    assert active_parameters(shape) == by_hand - 58 * (experts - 8) * expert
    assert active_parameters(shape) == pytest.approx(37.55e9, rel=0.001)
    assert selection_biases(shape) == 58 * 256


@pytest.mark.parametrize("name", SERVED)
def test_parameter_count_of_a_model_script_matches_an_independent_count(name):
    line = subprocess.run(
        ["bash", "-c", f'source "{MODELS}/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    args, _ = read_args(line.stdout.split("\n")[:-1], entry="tools/convert_hf_to_torch_dist.py")
    assert total_parameters(ModelSpec.from_args(args)) == parameters(args)[0]


def test_tensor_parallelism_shards_matrices_and_the_padded_vocabulary_but_no_norm():
    shape = ModelSpec.from_args(flags(QWEN3_4B, tensor_model_parallel_size=2))
    layer = ((32 + 2 * 8) * 128 * 2560 + 32 * 128 * 2560 + 3 * 9728 * 2560) // 2 + 2 * 2560 + 2 * 128
    gpu = stage_weights(shape, Split(tp=2), range(36), first=True, last=True)
    assert gpu.total == 36 * layer + 152064 // 2 * 2560 + 2560 == 2_011_495_936


def test_expert_parallelism_shards_only_the_experts():
    shape = ModelSpec.from_args(flags(QWEN3_30B_A3B))
    whole = stage_weights(shape, Split(), range(48), first=True, last=True)
    part = stage_weights(shape, Split(ep=8), range(48), first=True, last=True)
    finer = stage_weights(shape, Split(ep=8, etp=2), range(48), first=True, last=True)
    assert sum(whole.expert) == 48 * 128 * 3 * 2048 * 768
    assert sum(part.expert) == sum(whole.expert) // 8
    assert sum(finer.expert) == sum(whole.expert) // 16
    assert part.dense == whole.dense == finer.dense


def test_pipeline_stages_hold_every_weight_once_and_a_tied_embedding_twice():
    for tied in (True, False):
        shape = ModelSpec.from_args(flags(QWEN3_4B, untie_embeddings_and_output_weights=not tied))
        stages = [range(0, 10), range(10, 26), range(26, 36)]
        counts = [
            stage_weights(shape, Split(), layers, first=layers[0] == 0, last=layers[-1] == 35).total
            for layers in stages
        ]
        whole = stage_weights(shape, Split(), range(36), first=True, last=True).total
        assert sum(counts) == whole + (151936 * 2560 if tied else 0)


def test_latent_projections_are_replicated_over_tensor_parallel_gpus():
    shape = ModelSpec.from_args(flags(DEEPSEEK_V3))
    one, two = (sum(stage_weights(shape, Split(tp=tp), range(1), first=False, last=False).dense) for tp in (1, 2))
    whole = 7168 * 1536 + 1536 + 7168 * 576 + 512 + 2 * 7168
    assert two - whole == (one - whole) // 2


def test_biases_shared_gates_and_post_norms_are_counted():
    base = flags(QWEN3_30B_A3B, num_layers=1)
    plain = total_parameters(ModelSpec.from_args(base))
    gated = flags(QWEN3_30B_A3B, num_layers=1, moe_shared_expert_intermediate_size=64, moe_shared_expert_gate=True)
    assert total_parameters(ModelSpec.from_args(gated)) - plain == 3 * 2048 * 64 + 2048
    normed = flags(QWEN3_30B_A3B, num_layers=1, post_self_attn_layernorm=True, post_mlp_layernorm=True)
    assert total_parameters(ModelSpec.from_args(normed)) - plain == 2 * 2048
    biased = flags(QWEN3_30B_A3B, num_layers=1, add_qkv_bias=True)
    assert total_parameters(ModelSpec.from_args(biased)) - plain == (32 + 2 * 4) * 128


def test_distributed_optimizer_buffer_is_padded_like_megatron():
    # 100 -> 128 and 64 -> 64 at multiples of 64: 192, and then to a multiple of lcm(3, 128) = 384
    assert buffer_elements((100, 64), 3, distributed=True) == 384
    assert buffer_elements((100, 64), 3, distributed=False) == 164
    assert buffer_elements((), 3, distributed=True) == 0
