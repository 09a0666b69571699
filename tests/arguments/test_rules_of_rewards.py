"""Rewards that cannot be computed or trained on are rejected at startup."""

import json

import pytest

from slimrl.arguments import read_args
from tests.arguments.conftest import SPLIT

TESTED_APART = ("reward_model_shares_gpus", "process_rewards_have_their_model")


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


@pytest.mark.parametrize("rm_type", ["remote_rm", "boxed_remote_rm"])
def test_reward_service_needs_an_address(recipe, rm_type):
    line = recipe.line(f"--rm-type {rm_type}")
    assert sentences(line) == [
        f"--rm-type {rm_type} needs a reward service: give its address, --rm-url http://host:port/..."
    ]
    assert sentences([*line, "--rm-url", "http://127.0.0.1:5000/judge"]) == []
    assert sentences([*line, "--rm-url", "127.0.0.1:5000"]) == [
        "--rm-url 127.0.0.1:5000 is not an address: begin it with http:// or https://."
    ]


def test_dict_reward_needs_a_key_in_training_and_evaluation(recipe):
    line = recipe.line("--rm-type dapo")
    assert sentences(line) == [
        "--rm-type dapo gives a dict with score, acc and pred: give --reward-key score.",
        "evaluation set aime with rm_type dapo gives a dict with score, acc and pred: give --eval-reward-key score.",
    ]
    assert sentences([*line, "--reward-key", "score"]) == []


@pytest.mark.parametrize(
    "flags", ["--rm-type ifeval", "--group-rm", "--rm-time-limit 0.5 --rm-num-graders 3", "--rm-type boxed_gpqa"]
)
def test_reward_flags_are_supported(recipe, flags):
    assert sentences(recipe.line(flags)) == []


def test_zero_time_limit_is_rejected(recipe):
    assert "--rm-time-limit 0 is too small" in sentences(recipe.line("--rm-time-limit 0"))[0]


# a reward model -------------------------------------------------------------------------------------------------------


@pytest.fixture
def write_reward_model(tmp_path):
    """Writes the config.json of a reward model and an empty tokenizer; returns their folder."""

    def write(**changes):
        config = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "vocab_size": 10}
        folder = tmp_path / "judge"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        (folder / "tokenizer.json").touch()
        return folder

    return write


def test_reward_model_needs_a_folder_and_its_flags_need_a_reward_model(recipe, write_reward_model):
    line = recipe.line("--rm-type reward_model")
    assert sentences(line) == ["--rm-type reward_model needs a reward model: give its folder, --rm-model."]
    assert sentences([*line, "--rm-model", str(write_reward_model())]) == []
    assert sentences(recipe.line("--rm-input text")) == [
        "--rm-input belongs to a reward model, and there is none: give --rm-model, or leave it out."
    ]


def test_reward_model_servers_divide_its_gpus_evenly(recipe, write_reward_model):
    line = [*recipe.line("--rm-type reward_model"), "--rm-model", str(write_reward_model()), "--rm-num-gpus", "3"]
    assert sentences(line) == []
    assert sentences([*line, "--rm-num-gpus-per-engine", "2"]) == [
        "--rm-num-gpus 3 is not a multiple of --rm-num-gpus-per-engine 2: choose a multiple."
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is a Qwen3ForCausalLM, and a reward model is one of Gemma2For"),
        (
            {"architectures": ["Qwen2ForProcessRewardModel"]},
            "is a Qwen2ForProcessRewardModel, which scores steps (--rm-step-separator), and a reward model one",
        ),
        ({"id2label": {"0": "bad", "1": "good"}}, "has 2 labels, and a reward model has one"),
        (
            {"max_position_embeddings": 64},
            "has a context of 64 tokens (max_position_embeddings), and a response may have",
        ),
    ],
)
def test_model_without_a_reward_head_is_rejected(recipe, write_reward_model, changes, message):
    line = [*recipe.line("--rm-type reward_model"), "--rm-model", str(write_reward_model(**changes))]
    (sentence,) = sentences(line)
    assert message in sentence


def test_folder_without_a_config_is_rejected(recipe, tmp_path):
    (sentence,) = sentences([*recipe.line("--rm-type reward_model"), "--rm-model", str(tmp_path)])
    assert "has no readable config.json" in sentence


def test_folder_without_a_tokenizer_is_rejected(recipe, write_reward_model):
    folder = write_reward_model()
    line = [*recipe.line("--rm-type reward_model"), "--rm-model", str(folder)]
    (folder / "tokenizer.json").rename(folder / "tokenizer_config.json")
    assert sentences(line) == []
    (folder / "tokenizer_config.json").unlink()
    assert sentences(line) == [f"--rm-model {folder} has no tokenizer: copy the model's tokenizer there."]


def test_reward_model_sets_the_reward_address(recipe, write_reward_model):
    line = [*recipe.line("--rm-type reward_model"), "--rm-model", str(write_reward_model()), "--rm-url"]
    assert sentences([*line, "http://a:1,http://b:2"]) == []
    assert sentences([*line, "http://a:1,b:2"]) == [
        "--rm-url b:2 is not an address: begin it with http:// or https://."
    ]
    (sentence,) = sentences([*recipe.line("--rm-type remote_rm"), "--rm-model", str(write_reward_model())])
    assert "needs --rm-url, which with --rm-model is the address of that model's server" in sentence


def test_reward_model_shares_the_gpus_of_a_colocated_run(recipe, write_reward_model):
    served = ["--rm-type", "reward_model", "--rm-model", str(write_reward_model()), "--rm-colocate"]
    assert sentences([*recipe.line(), *served, "--rm-num-gpus", "8"]) == []
    assert sentences([*recipe.line(), *served, "--rm-num-gpus", "9"]) == [
        "--rm-num-gpus 9 is more than the 8 GPUs that --rm-colocate shares: lower it."
    ]
    assert sentences([*recipe.line(placement=SPLIT), *served]) == [
        "--rm-colocate needs --colocate: add it, or leave --rm-colocate out.",
        "--rm-colocate needs --offload-rollout: leave --no-offload-rollout out, or leave --rm-colocate out.",
    ]
    assert sentences([*recipe.line("--no-offload-rollout"), *served]) == [
        "--rm-colocate needs --offload-rollout: leave --no-offload-rollout out, or leave --rm-colocate out."
    ]
    assert sentences([*recipe.line(), *served, "--rm-url", "http://a:1"]) == [
        "--rm-colocate needs --rm-model: give it, without --rm-url, or leave --rm-colocate out."
    ]


# rewards of steps -----------------------------------------------------------------------------------------------------


PPO = "--advantage-estimator reinforce_plus_plus --rm-type zero --rm-step-separator ###"


def test_step_rewards_need_a_model_and_returns_over_tokens(recipe, write_reward_model):
    line = recipe.line(PPO)
    assert sentences(line) == [
        "--rm-step-separator '###' needs a process reward model: give its folder, --rm-model.",
    ]
    model = ["--rm-model", str(write_reward_model())]
    assert sentences([*line, *model]) == []
    assert sentences([*recipe.line("--rm-type math --rm-step-separator ###"), *model]) == [
        "--rm-step-separator '###' rewards steps, and --advantage-estimator grpo has one reward per response: use"
        " reinforce_plus_plus or ppo."
    ]
    assert sentences([*recipe.line(PPO.replace("zero", "reward_model")), *model]) == [
        "--rm-step-separator '###' makes --rm-model a process reward model, and --rm-type reward_model would score"
        " whole responses with it: choose another reward; zero for none.",
    ]


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"architectures": ["Qwen2ForTokenClassification"], "id2label": {}}, None),  # transformers' default: 2 labels
        ({"architectures": ["Qwen3ForTokenClassification"], "num_labels": 1}, None),
        ({"id2label": {"0": "bad", "1": "good"}}, None),
        (
            {"architectures": ["Qwen2ForTokenClassification"], "num_labels": 3},
            "has 3 labels, and a process reward model",
        ),
        ({"architectures": ["Qwen2ForProcessRewardModel"], "id2label": {}}, None),  # 2 labels, without an entry
        ({"architectures": ["LlamaForTokenClassification"]}, "is a LlamaForTokenClassification, and a process reward"),
    ],
)
def test_process_reward_model_has_one_or_two_labels_that_sglang_serves(changes, clause, recipe, write_reward_model):
    found = sentences([*recipe.line(PPO), "--rm-model", str(write_reward_model(**changes))])
    assert [clause is not None and clause in one for one in found] == ([] if clause is None else [True])


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["--rm-input-template", "{prompt} {response}"],
            "--rm-input-template is a text with a whole response, and --rm-step-separator reads its steps: use"
            " --rm-input.",
        ),
        (
            ["--rm-input", "tokens", "--rm-step-marker", "<step>"],
            "--rm-step-marker '<step>' is not among the policy's tokens, which --rm-input tokens sends: leave one of"
            " them out.",
        ),
    ],
)
def test_input_of_steps_is_consistent(more, sentence, recipe, write_reward_model):
    assert sentences([*recipe.line(PPO), "--rm-model", str(write_reward_model()), *more]) == [sentence]


def test_flags_of_steps_belong_to_their_separator(recipe):
    assert sentences(recipe.line("--rm-step-coef 0.5 --rm-step-marker x")) == [
        "--rm-step-coef belongs to --rm-step-separator: add it, or leave --rm-step-coef out.",
        "--rm-step-marker belongs to --rm-step-separator: add it, or leave --rm-step-marker out.",
    ]
