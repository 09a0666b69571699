"""From prompts to micro-batches, by hand."""

from slimrl.arguments.layout import groups_of
from slimrl.arguments.memory import batches, largest_micro_batch
from tests.arguments.dry_run.published import QWEN3_4B, flags


def numbers(**changes):
    args = flags(QWEN3_4B, **changes)
    groups = groups_of(args)
    return batches(args, groups), largest_micro_batch(args, groups)


def test_prompts_are_divided_into_samples_steps_and_micro_batches():
    one, largest = numbers(tensor_model_parallel_size=2, num_steps_per_rollout=2, micro_batch_size=4)
    assert (one.prompts, one.samples, one.steps, one.samples_per_step) == (32, 256, 2, 128)
    assert (one.samples_per_rank, one.micro_batches) == (32, 8)  # 128 / 4 ranks, / 4 samples
    assert largest.tokens_per_gpu == 4 * (8192 + 1024)


def test_dynamic_batches_are_bounded_by_tokens():
    one, largest = numbers(use_dynamic_batch_size=True, max_tokens_per_gpu=16384)
    assert one.micro_batches is None
    assert (largest.tokens_per_gpu, largest.longest_sample, largest.alone) == (16384, 9216, False)


def test_sample_longer_than_the_cap_gets_its_own_micro_batch():
    _, largest = numbers(use_dynamic_batch_size=True, max_tokens_per_gpu=4096)
    assert (largest.tokens_per_gpu, largest.alone) == (9216, True)


def test_context_parallel_gpus_share_the_tokens():
    _, largest = numbers(use_dynamic_batch_size=True, max_tokens_per_gpu=4096, context_parallel_size=4)
    assert (largest.tokens_per_gpu, largest.alone) == (4096, False)  # 4 x 4096 hold a sample of 9216


def test_tokens_are_padded_to_the_multiple():
    _, largest = numbers(rollout_max_context_len=1000, tensor_model_parallel_size=2)
    assert largest.tokens_per_gpu == 1024  # a multiple of 128 x 2


def test_only_the_response_is_counted_without_a_prompt_limit():
    _, largest = numbers(rollout_max_prompt_len=None)
    assert (largest.longest_sample, largest.basis) == (8192, "the longest response (prompts have no limit)")


def test_sequence_length_is_counted_when_no_flag_bounds_a_sample():
    _, largest = numbers(rollout_max_prompt_len=None, rollout_max_response_len=None, seq_length=2000)
    assert (largest.longest_sample, largest.tokens_per_gpu) == (2000, 2048)
