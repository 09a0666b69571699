"""--custom-config-path: a file of flags, checked like the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimrl.arguments import PassthroughFlag, read_args
from tests.arguments.conftest import Recipe

SERVER = {
    "mem-fraction-static": PassthroughFlag("mem_fraction_static", type=float),
    "enable-metrics": PassthroughFlag("enable_metrics", action="store_true"),
}
TABLES = {"sglang": lambda: SERVER}


def read(recipe: Recipe, text: str, more: str = "", name: str = "custom.yaml") -> tuple[object, list[str]]:
    path = Path(recipe.dir) / name
    path.write_text(text)
    args, problems = read_args(recipe.line(f"--custom-config-path {path} {more}"), passthrough=TABLES)
    return args, [str(problem).replace(str(path), "FILE") for problem in problems]


def test_file_overrides_the_command_line_and_logs_it(recipe: Recipe):
    args, problems = read(recipe, "lr: 2e-6\neps-clip: 0.1\nrewards_normalization: true\n", "--lr 1e-5")
    assert problems == []
    assert (args.lr, args.eps_clip, args.rewards_normalization) == (2e-6, 0.1, True)
    assert sum("lr is 2e-06 from --custom-config-path" in note for note in args.notes) == 1


def test_every_value_type_is_read(recipe: Recipe):
    text = (
        "rollout_stop: [a, b]\napply_chat_template_kwargs: {enable_thinking: false}\nbalance_data: true\n"
        "rollout_max_context_len: null\nsglang_mem_fraction_static: 0.7\ncustom: {my_weight: 3}\n"
    )
    args, problems = read(recipe, text)
    assert problems == []
    assert args.rollout_stop == ["a", "b"]
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert args.rollout_max_context_len is None
    assert args.sglang_options == {"mem_fraction_static": 0.7}
    assert args.custom == {"my_weight": 3}


def test_switch_may_be_named_by_its_spelling_or_its_destination(recipe: Recipe):
    args, problems = read(recipe, "disable_grpo_std_normalization: true\n--no-offload-train: true\nuse-tis: false\n")
    assert problems == []
    assert (args.grpo_std_normalization, args.offload_train, args.use_tis) == (False, False, False)


def test_file_can_turn_off_an_engine_switch(recipe: Recipe):
    args, problems = read(recipe, "sglang_enable_metrics: false\n", "--sglang-enable-metrics")
    assert problems == []
    assert args.sglang_options == {"enable_metrics": False}


def test_json_file_may_not_name_a_flag_twice(recipe: Recipe):
    _, problems = read(recipe, '{"lr": 1e-6, "lr": 2e-6}', name="custom.json")
    assert problems == ["--custom-config-path FILE: lr is given twice: keep one of them."]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lrr: 1", "lrr is not a flag: put settings of custom hooks under custom; did you mean lr?"),
        ("lr: fast", 'lr: "fast" is not a number.'),
        ("lr: [1, 2]", "lr: [1, 2] is a list, and one value is wanted."),
        ("balance_data: 1", "balance_data: 1 is neither true nor false."),
        ("num_layers: true", "num_layers: true is not what --num-layers takes."),
        ("- 1", "the file must contain a mapping of flags to values."),
        ("a: [", "the file is not YAML"),
        ("rollout_stop: [[a]]", 'rollout_stop: [["a"]] is not what --rollout-stop takes.'),
        ("eval_prompt_data: {a: b}", 'eval_prompt_data: {"a": "b"} is not what --eval-prompt-data takes.'),
        ("eval_prompt_data: []", "eval_prompt_data: [] is empty, and a value is wanted."),
        ("lr: 1e-6\nlr: 2e-6", "lr is given twice: keep one of them."),
        ("custom: {a: 1, a: 2}", "a is given twice: keep one of them."),
        ("lr: 1e-6\n--lr: 2e-6", "--lr is given twice, in two spellings: keep one of them."),
        ("custom: 3", "custom must be a mapping of your own settings, each with a name."),
        (
            "custom: {tis_level: sequence}",
            "tis_level under custom is a flag, and args.tis_level would have the flag's value: move it out of custom,"
            " or rename it.",
        ),
        (
            "tis_upper_bound: 2.0",
            "tis_upper_bound is slime's name: use --tis-clip (settings of custom hooks: under custom).",
        ),
        ("custom_config_path: b.yaml", "custom_config_path cannot name another file from within one"),
        ("sglang_mem_fraction_static: null", "sglang_mem_fraction_static: null is no value: give one"),
        ("sglang_mem_fraction_static: false", "--sglang-mem-fraction-static needs a value and none is given"),
        ("sglang_mem_fraction: 1", "unknown flag --sglang-mem-fraction: did you mean --sglang-mem-fraction-static?"),
    ],
)
def test_values_invalid_on_the_command_line_are_rejected_in_the_file(recipe: Recipe, text: str, sentence: str):
    _, problems = read(recipe, text)
    assert any(problem.startswith(f"--custom-config-path FILE: {sentence}") for problem in problems), problems


def test_validation_rules_apply_to_the_file(recipe: Recipe):
    _, problems = read(recipe, "eps_clip_c: 1.1\nrelease_train: true\n")
    assert any(problem.startswith("--eps-clip-c 1.1 is not above") for problem in problems)
    assert any(problem.startswith("--release-train is unsupported") for problem in problems)


def test_missing_file_is_one_error(recipe: Recipe):
    _, problems = read_args(recipe.line("--custom-config-path /nowhere.yaml"))
    assert [str(problem) for problem in problems] == [
        "--custom-config-path /nowhere.yaml: the file does not exist: check the path."
    ]


# -- roles -----------------------------------------------------------------------------------------------------------


def with_roles(recipe, more="", estimator="ppo", **roles):
    """Arguments and sentences with a file of these overrides by role."""
    entries = [{"name": "default", "role": role, "overrides": overrides} for role, overrides in roles.items()]
    return with_role_file(recipe, {"megatron": entries}, more, estimator)


def with_role_file(recipe, content, more="", estimator="ppo"):
    path = recipe.dir / "roles.yaml"
    path.write_text(json.dumps(content))
    line = recipe.line(f"--advantage-estimator {estimator} --lr 2e-6 --megatron-config-path {path} {more}")
    args, problems = read_args(line)
    prefix = f"--megatron-config-path {path}: "
    return args, [problem.sentence.removeprefix(prefix) for problem in problems]


def test_overrides_of_a_role_are_flags_of_that_role(recipe):
    critic = {"lr": "1e-5", "lr_warmup_iters": 5, "load": str(recipe.dir / "ref"), "save": str(recipe.dir / "value")}
    args, found = with_roles(recipe, critic=critic, actor={"lr": 1e-6, "kl_coef": 0.01})
    assert found == []
    assert (args.lr, args.kl_coef, args.critic_lr, args.critic_lr_warmup_iters) == (1e-6, 0.01, 1e-5, 5)
    assert (args.critic_load, args.critic_save) == (critic["load"], critic["save"])
    assert any(note.startswith("lr is 1e-06 from --megatron-config-path") for note in args.notes)


def test_role_that_is_not_overridden_keeps_the_command_line(recipe):
    args, found = with_roles(recipe, actor={"lr": 1e-6, "weight_decay": 0.2}, more="--weight-decay 0.05")
    assert found == [] and (args.lr, args.critic_lr) == (1e-6, 2e-6)
    assert (args.weight_decay, args.critic_overrides) == (0.2, {"weight_decay": 0.05})
    args, found = with_roles(recipe, critic={"adam_beta2": 0.95, "--clip-grad": 0.5})
    assert found == [] and args.critic_overrides == {"adam_beta2": 0.95, "clip_grad": 0.5}
    assert (args.lr, args.critic_lr, args.clip_grad) == (2e-6, 2e-6, 1.0)


def test_shared_flag_may_repeat_its_value(recipe):
    args, found = with_roles(recipe, critic={"tensor_model_parallel_size": 2, "optimizer": "adam"}, actor={})
    assert found == [] and args.critic_overrides == {}


@pytest.mark.parametrize(
    ("roles", "sentence"),
    [
        (
            {"critic": {"tensor_model_parallel_size": 4}},
            "tensor_model_parallel_size of the critic: the critic has the policy's --tensor-model-parallel-size; leave"
            " it out, or change --tensor-model-parallel-size for both.",
        ),
        (
            {"actor": {"optimizer": "sgd"}},
            "optimizer of the actor: it also applies to the critic or the engines; give --optimizer on the command"
            " line.",
        ),
        ({"critic": {"weight_deca": 1}}, "weight_deca of the critic is not a flag: did you mean --weight-decay?"),
        ({"critic": {"lr": "fast"}}, 'lr of the critic: "fast" is not a number.'),
        ({"critic": {"adam_beta1": 2}}, "adam_beta1 of the critic: 2 is too large: it must be below 1."),
        (
            {"critic": {"load": "${CRITIC}"}},
            'load of the critic: "${CRITIC}" names an environment variable: write its value.',
        ),
        ({"judge": {}}, "the role 'judge' does not exist: give actor or critic."),
        ({"critic": [1]}, "the role critic needs a mapping as overrides."),
    ],
)
def test_override_that_has_no_place_is_one_error(recipe, roles, sentence):
    assert with_roles(recipe, **roles)[1] == [sentence]


@pytest.mark.parametrize(
    ("content", "start"),
    [
        ({"critic": []}, "the file must hold one key, megatron, with a list of roles."),
        ({"megatron": [{"role": "critic", "lr": 1}]}, "{'role': 'critic', 'lr': 1} is no role"),
        ({"megatron": [{"role": "critic", "name": "b"}]}, "the critic 'b': a run has one policy and one critic"),
        ({"megatron": [{"role": "critic"}, {"role": "critic"}]}, "the role critic is given twice"),
    ],
)
def test_file_of_another_form_is_one_error(recipe, content, start):
    (found,) = with_role_file(recipe, content)[1]
    assert found.startswith(start)


@pytest.mark.parametrize("override", [{"lr": 1e-5}, {"weight_decay": 0.3}, {"lr_warmup_iters": 3}])
def test_overrides_of_the_actor_need_no_critic(recipe, override):
    args, found = with_roles(recipe, estimator="grpo", actor=override)
    assert found == []
    assert {name: vars(args)[name] for name in override} == override
    assert args.critic_overrides == {}


def test_override_that_would_have_no_effect_is_an_error(recipe):
    _, found = with_roles(recipe, critic={"sgd_momentum": 0.5})
    assert found == ["sgd_momentum 0.5 of one role belongs to --optimizer sgd and --optimizer is adam: leave it out."]
    scheduled = "--start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear"
    _, found = with_roles(recipe, critic={"weight_decay": 0.5}, more=scheduled)
    assert found == [
        "weight_decay 0.5 of one role has no effect beside --start-weight-decay, which takes the place of"
        " --weight-decay for both: leave one of them out."
    ]
    _, (found,) = with_roles(recipe, actor={"calculate_per_token_loss": True})
    assert found.startswith("calculate_per_token_loss of the actor: it also applies to the critic")


def test_overrides_of_a_critic_need_a_critic_and_a_schedule_of_its_own(recipe):
    _, found = with_roles(recipe, estimator="grpo", critic={"weight_decay": 0.5})
    assert found == [
        "weight_decay differ for a critic and --advantage-estimator is grpo: give --advantage-estimator ppo, or change"
        " them for the policy."
    ]
    _, found = with_roles(recipe, critic={"min_lr": 1e-5})
    assert found == ["--min-lr 1e-05 is above --critic-lr 2e-06: lower it."]
