"""The rules: every check between flags, files and slots, in one table."""

from __future__ import annotations

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules import (
    algorithm,
    batches,
    checkpoints,
    data,
    engines,
    evaluation,
    experts,
    freezing,
    hook_paths,
    latent,
    layout,
    model,
    paths,
    pipeline,
    precision,
    recompute,
    required,
    rewards,
    served,
    sharding,
)
from slimrl.arguments.rules.context import Context, Rule

# what any program needs that reads the model flags, also a converter
MODEL_RULES: tuple[Rule, ...] = (
    required.model_flags_are_given,
    model.shape_is_possible,
    latent.latent_flags_have_latent_attention,
    latent.latent_attention_is_plain_otherwise,
    experts.expert_flags_have_experts,
    experts.experts_can_be_chosen,
    experts.router_is_consistent,
    experts.layers_have_a_kind,
    algorithm.precision_is_single,
    paths.hf_checkpoint_exists,
    model.model_agrees_with_hf_config,
)

TRAINING_RULES: tuple[Rule, ...] = (
    required.training_flags_are_given,
    required.run_has_a_length,
    served.values_are_served,
    data.data_files_exist,
    data.prompts_have_one_source,
    data.epochs_have_an_end,
    paths.outputs_can_be_written,
    paths.dump_templates_name_the_rollout,
    paths.charts_have_their_switch,
    paths.disk_transport_has_a_folder,
    checkpoints.weights_have_a_source,
    checkpoints.ref_load_is_a_checkpoint,
    checkpoints.load_is_a_checkpoint_or_new,
    checkpoints.hf_models_agree,
    checkpoints.saving_is_complete,
    checkpoints.saved_apart_from_a_model,
    checkpoints.retention_fits_saving,
    checkpoints.exports_have_a_place,
    layout.rollout_has_slots,
    layout.training_slots_fit_the_node,
    engines.engines_fill_their_slots,
    engines.engine_sizes_are_counts,
    engines.engines_fill_whole_nodes,
    engines.engine_stages_divide,
    engines.engine_stages_can_be_updated,
    engines.engine_layout_can_be_checked,
    engines.engine_attention_copies_divide,
    engines.engine_experts_divide,
    engines.engine_context_holds_a_sample,
    layout.world_divides_by_model_slots,
    layout.model_divides_by_tensor_parallel,
    pipeline.stages_are_several,
    pipeline.layers_divide_over_stages,
    pipeline.virtual_stages_divide,
    pipeline.virtual_stages_are_fed,
    experts.experts_divide_over_slots,
    precision.few_bits_have_their_kernels,
    precision.formats_have_their_settings,
    precision.optimizer_state_has_a_holder,
    sharding.sharding_has_its_switch,
    sharding.sharding_fits_the_run,
    precision.skipped_steps_are_bounded_where_they_are_skipped,
    layout.async_is_split,
    layout.worker_environment_is_text,
    layout.only_one_side_is_left_out,
    layout.slot_memory_is_planned_with,
    batches.produced_equals_consumed,
    batches.global_batch_divides_over_slots,
    batches.dynamic_batches_have_a_cap,
    batches.over_sampling_reaches_the_batch,
    batches.cut_off_groups_have_one_fate,
    model.kernels_are_installed,
    model.code_of_the_model_is_trusted,
    algorithm.kl_is_counted_once,
    algorithm.groups_can_be_compared,
    algorithm.reward_is_given,
    rewards.reward_service_has_an_address,
    rewards.dict_rewards_have_a_key,
    algorithm.clip_range_is_ordered,
    algorithm.estimator_has_what_it_needs,
    algorithm.off_policy_corrections_are_consistent,
    algorithm.supervised_training_is_consistent,
    algorithm.schedule_is_complete,
    recompute.recomputation_is_complete,
    recompute.recomputed_units_fill_the_stages,
    recompute.recomputed_modules_are_there,
    recompute.saved_activations_have_slots,
    freezing.trained_weights_have_one_list,
    evaluation.evaluation_has_data,
    evaluation.evaluation_sets_are_judged,
    evaluation.lengths_fit_the_context,
    hook_paths.hooks_keep_their_contracts,
)


def check(args: Arguments, context: Context) -> list[Problem]:
    """Every problem that the rules for this program find, in the order of the table."""
    rules = MODEL_RULES + TRAINING_RULES if context.is_training else MODEL_RULES
    return [problem for rule in rules for problem in rule(args, context)]


__all__ = ["MODEL_RULES", "TRAINING_RULES", "Context", "Rule", "check"]
