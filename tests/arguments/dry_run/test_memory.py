"""The estimate of a GPU's memory against numbers worked out by hand."""

import pytest

from slimrl.arguments.dry_run import estimate
from slimrl.arguments.dry_run.memory import EngineSettings, cache_elements_per_token, engine_memory
from slimrl.models.model_size import Setting, layer_bytes, layer_parts, output_bytes, piece_columns, saved_bytes
from slimrl.models.model_spec import ModelSpec
from tests.arguments.dry_run.published import DEEPSEEK_V3, QWEN3_4B, QWEN3_30B_A3B, flags

GPU = 2_011_495_936  # parameters of Qwen3-4B on one of two tensor-parallel GPUs: see test_parameters
TP2 = dict(
    tensor_model_parallel_size=2,
    sequence_parallel=True,
    rollout_num_gpus=8,
    colocate=True,
    use_distributed_optimizer=False,
)


def only_stage(*parts, **changes):
    (stage,) = estimate(flags(*parts, **changes)).stages
    return stage


def test_bf16_state_is_2_byte_weights_4_byte_gradients_and_12_byte_optimizer_state():
    stage = only_stage(QWEN3_4B, TP2, bf16=True)
    assert (stage.parameters, stage.weights) == (GPU, 2 * GPU)
    assert (stage.gradients, stage.optimizer) == (4 * GPU, 12 * GPU)


def test_distributed_optimizer_is_sharded_over_the_data_parallel_gpus():
    stage = only_stage(QWEN3_4B, TP2, bf16=True, use_distributed_optimizer=True)
    assert (stage.weights, stage.gradients) == (2 * GPU, 4 * GPU)
    assert stage.optimizer == 12 * GPU // 4 == 6_034_487_808


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients"), [("optim", 1, 1), ("optim_grads", 1, 4), ("optim_grads_params", 4, 4)]
)
def test_megatron_fsdp_shards_by_strategy_and_gathers_weights_for_a_weight_update(strategy, weights, gradients):
    sharding = dict(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy)
    stage = only_stage(QWEN3_4B, TP2, bf16=True, use_distributed_optimizer=True, **sharding)
    assert (stage.weights, stage.gradients) == (2 * GPU // weights, 4 * GPU // gradients)
    assert stage.optimizer == 12 * GPU // 4
    whole = only_stage(QWEN3_4B, TP2, bf16=True, use_distributed_optimizer=True)
    gathered = whole.weights if weights > 1 else 0  # beside the shards
    assert stage.weight_update == gathered + whole.weight_update


def test_fp32_needs_no_second_copy_of_the_weights():
    stage = only_stage(QWEN3_4B, TP2)
    assert (stage.weights, stage.gradients, stage.optimizer) == (4 * GPU, 4 * GPU, 8 * GPU)


def test_fp16_gradients_are_fp16_by_default():
    assert only_stage(QWEN3_4B, TP2, fp16=True).gradients == 2 * GPU
    assert only_stage(QWEN3_4B, TP2, fp16=True, accumulate_allreduce_grads_in_fp32=True).gradients == 4 * GPU


def test_offloaded_optimizer_is_in_host_memory():
    flags = dict(optimizer_cpu_offload=True, use_precision_aware_optimizer=True, optimizer_offload_fraction=0.75)
    stage = only_stage(QWEN3_4B, TP2, bf16=True, **flags)
    assert (stage.optimizer, stage.host) == (3 * GPU, 9 * GPU + 3 * GPU)  # gradients are copied, too


def test_reference_model_takes_two_copies_of_the_weights_in_host_memory():
    assert only_stage(QWEN3_4B, TP2, bf16=True, use_kl_loss=True).host == 2 * 2 * GPU


def test_teacher_in_the_training_ranks_takes_as_much_as_a_reference_model():
    teacher = {"use_opd": True, "opd_type": "megatron"}
    assert only_stage(QWEN3_4B, TP2, bf16=True, **teacher).host == 2 * 2 * GPU
    assert only_stage(QWEN3_4B, TP2, bf16=True, use_kl_loss=True, **teacher).host == 2 * (2 * 2 * GPU)
    assert only_stage(QWEN3_4B, TP2, bf16=True, use_opd=True, opd_type="sglang").host == 0


def test_sgd_keeps_one_moment_and_state_precision_can_be_reduced():
    assert only_stage(QWEN3_4B, TP2, bf16=True, optimizer="sgd").optimizer == 8 * GPU
    narrow = dict(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    assert only_stage(QWEN3_4B, TP2, bf16=True, **narrow).optimizer == 6 * GPU  # 16 missing bits, two bf16 moments


def test_experts_are_sharded_over_their_own_data_parallel_gpus():
    parallel = dict(expert_model_parallel_size=8, use_distributed_optimizer=True, actor_num_nodes=2)
    stage = only_stage(QWEN3_30B_A3B, bf16=True, **parallel)
    expert = 48 * 16 * 3 * 2048 * 768
    dense = 30_532_122_624 - 8 * expert
    assert stage.weights == 2 * (dense + expert)
    assert stage.optimizer == 12 * (dense // 16 + expert // 2)  # 16 copies of dense weights, 2 of each expert


def test_layer_activations_match_korthikanti_et_al_without_scores_and_dropout():
    # GPT-3's layer: heads * width = hidden, ffn = 4 hidden, no gate, no grouped queries; 16-bit. Their 34 s b h are
    # 2 + 8 + 2 + 2 + 2 (attention: input, QKV, values, ...) + 19 (MLP) + 4 (norms) with masks of dropout and GELU's
    # input and output; here: norms' inputs and outputs 4 x 2, q k v and result 4 x 2, MLP's 4 h twice: 2 x 4 x 2.
    shape = gpt(hidden=1024, heads=16)
    setting = Setting(tokens=10, element=2)
    assert layer_bytes(shape, setting, moe=False) == 10 * (1024 * (8 + 8 + 16) + 4 * 16)


def gpt(hidden, heads):
    return ModelSpec(
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=1000,
        padded_vocab_size=1024,
        tied=True,
        gated=False,
        qk_layernorm=False,
        linear_bias=True,
        qkv_bias=True,
        norm_bias=True,
        norms_per_layer=2,
        moe_layers=(False,) * 4,
    )


def test_tensor_parallelism_shards_all_activations_only_with_sequence_parallelism():
    shape = gpt(hidden=1024, heads=16)
    whole = layer_bytes(shape, Setting(tokens=64, element=2), moe=False)
    assert layer_bytes(shape, Setting(tokens=64, element=2, tensor=4, sequence=4), moe=False) == whole // 4
    norms = 64 * 1024 * 8
    assert layer_bytes(shape, Setting(tokens=64, element=2, tensor=4), moe=False) == norms + (whole - norms) // 4


def test_qwen3_4b_activation_bytes_per_token_and_layer():
    # 16-bit elements: 4 x 2560 around the norms; q and result 2 x 4096, k and v 2 x 1024, q and k before their norm
    # 5120; gate, up and product 3 x 9728; float32 sums of 32 heads
    per_token = 2 * (4 * 2560 + 2 * 4096 + 2 * 1024 + 5120 + 3 * 9728) + 4 * 32
    shape = ModelSpec.from_args(flags(QWEN3_4B))
    assert layer_bytes(shape, Setting(tokens=1, element=2), moe=False) == per_token
    assert layer_bytes(shape, Setting(tokens=1, element=2, fused=False), moe=False) == per_token + 2 * 9728


def test_full_recomputation_keeps_only_the_layer_inputs():
    shape = ModelSpec.from_args(flags(QWEN3_4B))
    one = 100 * 2560 * 2

    def kept(**more):
        return saved_bytes(shape, Setting(tokens=100, element=2, **more), range(36), last=False)

    assert kept(granularity="full", method="uniform", unit=1) == 36 * one
    assert kept(granularity="full", method="uniform", unit=10) == 4 * one
    layer = layer_bytes(shape, Setting(tokens=100, element=2), moe=False)
    assert kept() == 36 * layer
    assert kept(granularity="full", method="block", unit=30) == 30 * one + 6 * layer


def test_selective_recomputation_drops_the_named_modules():
    shape = ModelSpec.from_args(flags(QWEN3_30B_A3B))
    setting = Setting(tokens=8, element=2, granularity="selective", modules=("moe_act", "layernorm"))
    parts = layer_parts(shape, setting, moe=True)
    assert parts["moe_act"] == 8 * 8 * 768 * 2  # 8 tokens, 8 experts each, one product per expert
    assert parts["layernorm"] == 8 * 2 * 2048 * 2
    everything = sum(parts.values())
    assert layer_bytes(shape, setting, moe=True) == everything - parts["moe_act"] - parts["layernorm"]


def test_experts_keep_one_copy_of_a_token_per_routed_expert():
    shape = ModelSpec.from_args(flags(DEEPSEEK_V3))
    parts = layer_parts(shape, Setting(tokens=1, element=2), moe=True)
    assert parts["moe"] == 2 * 4 * 256 + 8 * (7168 + 2 * 2048) * 2
    assert parts["shared_experts"] == 3 * 2048 * 2
    assert parts["mla_up_proj"] == 128 * (2 * 192 + 128) * 2


def test_earlier_pipeline_stages_hold_more_micro_batches():
    stages = estimate(flags(QWEN3_4B, bf16=True, pipeline_model_parallel_size=4)).stages
    assert stages[0].activations == 4 * stages[2].activations // 2  # 4 and 2 in flight
    assert [stage.loss > 0 for stage in stages] == [False, False, False, True]


def test_fewer_micro_batches_than_stages_limit_the_activations_held():
    short = dict(pipeline_model_parallel_size=4, rollout_batch_size=1, n_samples_per_prompt=4, micro_batch_size=2)
    stages = estimate(flags(QWEN3_4B, bf16=True, **short)).stages
    assert stages[0].activations == stages[1].activations  # two data parallel ranks, one micro-batch each


def test_chunked_output_layer_counts_one_chunk_and_its_gradients():
    shape = ModelSpec.from_args(flags(QWEN3_4B, tensor_model_parallel_size=2))
    setting = Setting(tokens=9216, element=2, tensor=2)
    weight_gradient, hidden = 76032 * 2560 * 2, 9216 * 2560 * (4 + 2 + 2)
    # 1/16 x 2 / (2 + 8) of 76,032 columns, down to a multiple of 64
    pieces = 896 * 9216 * (2 + 8)
    assert output_bytes(shape, setting, -1, keep_logits=False) == pieces + hidden + weight_gradient
    pieces = 8448 * 9216 * (2 + 8)  # 1,024 of 9,216 tokens: a ninth of the columns
    assert output_bytes(shape, setting, 1024, keep_logits=False) == pieces + hidden + weight_gradient
    assert output_bytes(shape, setting, 10**6, keep_logits=False) == (76032 * 9216 * (2 + 8) + hidden + weight_gradient)


def test_kept_logits_count_three_copies_and_two_float32_chunk_buffers():
    shape = ModelSpec.from_args(flags(QWEN3_4B, tensor_model_parallel_size=2))
    setting = Setting(tokens=9216, element=2, tensor=2)
    weight_gradient = 76032 * 2560 * 2
    kept = 76032 * 9216 * 3 * 2
    assert output_bytes(shape, setting, -1, keep_logits=True) == kept + 76032 * 144 * 8 + weight_gradient
    assert output_bytes(shape, setting, 1024, keep_logits=True) == kept + 76032 * 1024 * 8 + weight_gradient


@pytest.mark.parametrize("tokens", [1, 100, 9216])
@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("chunk_size", [-1, 1, 77, 1024])
def test_chunk_sizes_match_the_trainer(tokens, element, chunk_size):
    from slimrl.algorithms import log_probs

    for columns in (64, 128, 37984, 151936):
        numbers = (tokens, columns, element, chunk_size)
        assert piece_columns(*numbers) == log_probs.piece_columns(*numbers)


def test_peak_includes_the_loss_or_the_backward_pass_of_a_layer():
    stage = only_stage(QWEN3_4B, TP2, bf16=True)
    assert stage.total == stage.resident + stage.activations + max(stage.loss, stage.backward)


def test_kv_cache_size_follows_the_layers():
    shape = ModelSpec.from_args(flags(QWEN3_4B))
    assert cache_elements_per_token(shape, 1) == 36 * 2 * 8 * 128
    assert cache_elements_per_token(shape, 2) == 36 * 2 * 4 * 128
    assert cache_elements_per_token(shape, 16) == 36 * 2 * 1 * 128  # a head is held twice
    assert cache_elements_per_token(shape, 4, stages=2) == 18 * 2 * 4 * 128
    assert cache_elements_per_token(ModelSpec.from_args(flags(DEEPSEEK_V3)), 8) == 61 * 576


def test_cache_gets_the_engine_share_of_the_gpu_minus_weights():
    shape = ModelSpec.from_args(flags(QWEN3_4B))
    memory = engine_memory(shape, EngineSettings(fraction=0.5), 1, 80 * 2**30)
    assert memory.weights == 2 * 4_022_468_096
    assert memory.cache_per_token == 147_456
    assert memory.tokens == (40 * 2**30 - 8_044_936_192) // 147_456 == 236_712
    assert engine_memory(shape, EngineSettings(max_tokens=1000), 1, 80 * 2**30).tokens == 1000
    assert engine_memory(shape, EngineSettings(), 1, None).tokens is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, EngineSettings(2.0, 2, 0.88, None)),
        ({"mem_fraction_static": 0.6, "kv_cache_dtype": "fp8_e4m3"}, EngineSettings(2.0, 1, 0.6, None)),
        ({"dtype": "float32", "max_total_tokens": 8192}, EngineSettings(4.0, 4, 0.88, 8192)),
    ],
)
def test_server_options_decide_the_dtypes(options, expected):
    assert EngineSettings.from_options(options) == expected


def test_engine_bytes_per_weight_come_from_the_checkpoint():
    assert EngineSettings.from_options({}, weight_bytes=1.02).weight_bytes == 1.02
    assert EngineSettings.from_options({"dtype": "bfloat16"}, weight_bytes=4.0).weight_bytes == 2.0


def test_absent_role_needs_no_memory():
    assert estimate(flags(QWEN3_4B, debug_rollout_only=True, rollout_num_gpus=1)).stages == ()
    assert estimate(flags(QWEN3_4B, debug_train_only=True, rollout_num_gpus=1)).engine is None


def test_divergence_keeps_a_teachers_weight_and_hidden_states():
    teacher = dict(use_opd=True, opd_type="megatron", rollout_max_response_len=1000, num_steps_per_rollout=2, bf16=True)
    batch = dict(rollout_batch_size=16, n_samples_per_prompt=2, global_batch_size=16)
    kinds = ("sampled_reverse_kl", "jsd")
    plain, distilled = (only_stage(QWEN3_4B, TP2, **teacher, **batch, opd_divergence=kind).loss for kind in kinds)
    samples = 32 // 4  # of a rank: 8 GPUs, two for each model
    assert distilled - plain == 2 * 2560 * (152_064 // 2 + 1000 * samples)  # the vocabulary is padded to 2 x 128
    served = only_stage(QWEN3_4B, TP2, **{**teacher, "opd_type": "sglang"}, **batch, opd_divergence="jsd", opd_top_k=50)
    assert served.loss - plain == 1000 * samples * 50 * (8 + 4)
