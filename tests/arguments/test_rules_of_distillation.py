"""Rules about on-policy distillation: each violation is one error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.hf_config import reward_gpus, starts_reward_servers
from tests.arguments.conftest import QWEN3_4B_CONFIG, complete_model, make_checkpoint

MEGATRON = "--use-opd --opd-type megatron --opd-teacher-load {dir}/teacher"
SERVED = "--rollout-temperature 1 --use-opd --opd-type sglang"
URL = f"{SERVED} --rm-url http://10.0.0.1:30000/generate"
SERVED_TEACHERS = f"{SERVED} --opd-teacher-models default={{dir}}/served code={{dir}}/served"
SEVERAL = f"{SERVED} --opd-teacher-urls default=http://10.0.0.1:30000"
MODEL = f"{SERVED} --rm-model {{dir}}/served"
OF_SLIME = [  # the reward function that asks the teacher in slime
    f"{module}.reward_func"
    for module in (
        "slime.rollout.on_policy_distillation",
        "examples.on_policy_distillation.on_policy_distillation",
        "slimrl.compatibility.rollout_helpers",
    )
]

CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "distillation_has_its_switch": (
        [
            MEGATRON,
            f"{MEGATRON} --opd-kl-coef 0.5 --rm-type zero --n-samples-per-prompt 1",
            "--rm-type zero --custom-advantage-function-path examples.advantages.discounted",
            "--rm-type zero --debug-rollout-only",
            *(f"{URL} --custom-rm-path {path}" for path in OF_SLIME),
            "--rm-type zero --overlong-buffer-len 512",
        ],
        [
            *(
                (f"--{flag} {value}", f"--{flag} {value} belongs to --use-opd: add it, or leave --{flag} out.")
                for flag, value in (
                    ("opd-type", "megatron"),
                    ("opd-kl-coef", "0.5"),
                    ("opd-divergence", "jsd"),
                    ("opd-jsd-beta", "0.3"),
                    ("opd-top-k", "8"),
                    ("opd-teacher-load", "{dir}/teacher"),
                    ("opd-teacher-ckpt-step", "3"),
                )
            ),
            (
                "--rm-type zero",
                "--rm-type zero gives every response the same reward and --use-opd is off, so that nothing would be"
                " learned: choose another reward, or add --use-opd.",
            ),
            *(
                (
                    f"--custom-rm-path {path} {given}",
                    f"--custom-rm-path {path} gives every response the reward 0, and without --use-opd no teacher is"
                    f" asked: add --use-opd --opd-type sglang{more}, or choose another reward.",
                )
                for path in OF_SLIME
                for given, more in (
                    ("--rm-url http://10.0.0.1:30000/generate", ""),
                    ("", ", and the address of the teacher, --rm-url"),
                )
            ),
            (
                "--use-opd",
                "--use-opd needs a teacher: give --opd-type megatron with --opd-teacher-load, or --opd-type sglang with"
                " --rm-model or --rm-url.",
            ),
            (f"{MEGATRON} --opd-kl-coef -1", "--opd-kl-coef -1 is too small: it must be at least 0."),
            (
                f"{MEGATRON} --n-samples-per-prompt 1",
                "--n-samples-per-prompt 1 leaves grpo nothing to compare and every advantage would be 0: give at least"
                " 2, or add --disable-rewards-normalization.",
            ),
        ],
    ),
    "several_teachers_are_on_servers": (
        [
            SEVERAL,
            f"{SEVERAL} math=http://h:1,http://h:2 --opd-teacher-key expert --rm-concurrency 8",
            SEVERAL.replace("default", "train"),  # the name of the file
            f"{SERVED_TEACHERS} --opd-teacher-num-gpus 4 1 --opd-teacher-num-gpus-per-engine 2 1 --rm-concurrency 8",
            SERVED_TEACHERS + ' --rm-server-options {{"mem_fraction_static":0.5}} --opd-teacher-key expert',
        ],
        [
            (
                "--opd-teacher-urls a=http://h:1 b=http://h:2",
                "--opd-teacher-urls a=http://h:1 b=http://h:2 belongs to --use-opd: add it, or leave"
                " --opd-teacher-urls out.",
            ),
            (
                f"{URL} --opd-teacher-key expert",
                "--opd-teacher-key expert belongs to --opd-teacher-urls: add it, or leave --opd-teacher-key out.",
            ),
            (
                f"{MEGATRON} --opd-teacher-urls default=http://h:1",
                "--opd-teacher-urls default=http://h:1 belongs to --opd-type sglang: leave it out; the teacher of"
                " --opd-type megatron is --opd-teacher-load.",
            ),
            (
                SEVERAL.replace("default", "math"),
                "--prompt-data {dir}/train.jsonl has a bad row among the 1 looked at; {dir}/train.jsonl:1: no"
                " metadata.teacher (--opd-teacher-key), and --opd-teacher-urls has neither 'train', the name of the"
                " file, nor 'default' but math: fix it, or allow for bad rows with --max-bad-rows.",
            ),
            (
                f"{SEVERAL} --rm-url http://h:1",
                "--rm-url http://h:1 is one teacher, and --opd-teacher-urls has the teachers: name it there, or leave"
                " one out.",
            ),
            (
                f"{SEVERAL} code=h:1",
                "--opd-teacher-urls code=h:1 is not a name and addresses: write name=http://host:port[,http://...].",
            ),
            (
                f"{SEVERAL} default=http://h:1",
                "--opd-teacher-urls names default twice: give each teacher one name, with its addresses after a comma.",
            ),
            (
                f"{SERVED_TEACHERS} math={{dir}}/served".replace("code=", "default="),
                "--opd-teacher-models names default twice: give each teacher one name, with its folder.",
            ),
            (
                f"{SERVED} --opd-teacher-models default={{dir}}/served code",
                "--opd-teacher-models code is not a name and a folder: write name=folder, or name a frozen model of"
                " --sglang-config.",
            ),
            (
                f"{SERVED_TEACHERS} --opd-teacher-num-gpus 4",
                "--opd-teacher-num-gpus has 1 numbers and --opd-teacher-models 2 teachers: give one number each.",
            ),
            (
                f"{SERVED_TEACHERS} --opd-teacher-num-gpus 3 2 --opd-teacher-num-gpus-per-engine 2 2",
                "the teacher default has 3 GPUs, which is not a multiple of the 2 of a server: choose a multiple.",
            ),
            (
                f"{URL} --opd-teacher-num-gpus 2",
                "--opd-teacher-num-gpus belongs to --opd-teacher-models: add it, or leave --opd-teacher-num-gpus out.",
            ),
            (
                f"{SERVED_TEACHERS} --opd-teacher-urls default=http://h:1",
                "--opd-teacher-models are teachers that slimrl serves, and --opd-teacher-urls external ones: give one"
                " of them.",
            ),
            (
                SEVERAL + ' --rm-server-options {{"tp_size":2}}',
                "--rm-server-options belongs to the servers of --rm-model: give that folder, or leave"
                " --rm-server-options out.",
            ),
        ],
    ),
    "divergence_has_its_teacher": (
        [
            f"{MEGATRON} --opd-divergence forward_kl",
            f"{MEGATRON} --opd-divergence jsd --opd-jsd-beta 0.1 --opd-kl-coef 0",
            f"{MEGATRON} --opd-divergence sampled_reverse_kl --keep-logits",
            f"{URL} --opd-divergence reverse_kl",
            f"{SEVERAL} --opd-divergence forward_kl --opd-top-k 8",
        ],
        [
            (
                f"{MEGATRON} --opd-divergence forward_kl --opd-jsd-beta 0.1",
                "--opd-jsd-beta has no effect with --opd-divergence forward_kl: leave it out.",
            ),
            (
                f"{MEGATRON} --opd-jsd-beta 0.1",
                "--opd-jsd-beta has no effect with --opd-divergence sampled_reverse_kl: leave it out.",
            ),
            (
                f"{MEGATRON} --opd-divergence jsd --opd-jsd-beta 1",
                "--opd-jsd-beta 1 is too large: it must be below 1.",
            ),
            (
                f"{MEGATRON} --opd-divergence kl",
                "--opd-divergence kl is not sampled_reverse_kl, forward_kl, reverse_kl or jsd.",
            ),
            *(
                (
                    f"{line} --opd-top-k 8",
                    "--opd-top-k 8 belongs to --opd-type sglang with another --opd-divergence than sampled_reverse_kl:"
                    " leave it out.",
                )
                for line in (URL, f"{MEGATRON} --opd-divergence jsd")
            ),
            (
                f"{MEGATRON} --opd-divergence jsd --keep-logits",
                "--opd-divergence jsd is computed by slimrl's output layer in chunks of the vocabulary, which"
                " --keep-logits replaces: leave one of them out.",
            ),
        ],
    ),
    "teacher_in_training_is_a_checkpoint": (
        [
            f"{MEGATRON} --opd-teacher-ckpt-step 7",
            "--use-opd --opd-type megatron --opd-teacher-load {dir}/like",
            f"{MEGATRON} --use-kl-loss --kl-loss-coef 0.1",
        ],
        [
            (
                "--use-opd --opd-type megatron",
                "--opd-type megatron needs a teacher: give its folder, --opd-teacher-load.",
            ),
            (
                "--use-opd --opd-type megatron --opd-teacher-load {dir}/nowhere",
                "--opd-teacher-load {dir}/nowhere does not exist (only {dir} of it does): make it with"
                " tools/convert_hf_to_torch_dist.py, or give the Hugging Face folder itself.",
            ),
            (
                f"{MEGATRON} --opd-teacher-ckpt-step 3",
                "--opd-teacher-ckpt-step 3 is not in --opd-teacher-load {dir}/teacher, which has iter_0000007: choose"
                " one.",
            ),
            (
                "--use-opd --opd-type megatron --opd-teacher-load {dir}/served",
                "--opd-teacher-load {dir}/served has another architecture than the student (--num-layers is 36 and"
                " config.json says num_hidden_layers 40): use --opd-type sglang, which takes any with the student's"
                " tokenizer.",
            ),
            (
                "--use-opd --opd-type megatron --opd-teacher-load {dir}/other",
                "--opd-teacher-load {dir}/other has another vocabulary than --hf-checkpoint {dir}/hf, so that it would"
                " score other tokens: give a teacher with the student's tokenizer.",
            ),
            (
                "--use-opd --opd-type megatron --opd-teacher-load {dir}/broken",
                "--opd-teacher-load {dir}/broken/config.json is not JSON (Expecting value: line 1 column 1 (char 0)):"
                " copy the model again.",
            ),
            (
                f"{MEGATRON} --save {{dir}}/teacher --load {{dir}}/teacher --save-total-limit 2",
                "--opd-teacher-load {dir}/teacher is in --save {dir}/teacher, where --save-total-limit and"
                " --save-retain-interval delete: copy the teacher to another folder.",
            ),
            (
                f"{URL} --opd-teacher-load {{dir}}/teacher",
                "--opd-teacher-load {dir}/teacher belongs to --opd-type megatron: leave it out; the teacher of"
                " --opd-type sglang is --rm-model or at --rm-url.",
            ),
        ],
    ),
    "teacher_on_servers_is_comparable": (
        [f"{URL} --rm-type zero", f"{URL} --rm-type math"],
        [
            (
                f"{URL} --rm-type remote_rm",
                "--rm-type remote_rm needs --rm-url or --rm-model, which are the teacher of --opd-type sglang: choose"
                " another reward (zero for none), or use --opd-type megatron.",
            ),
            (
                f"{URL} --rollout-temperature 0.8",
                "--rollout-temperature 0.8 scales the student's log-probabilities and not those of a teacher on SGLang"
                " servers: give 1, or use --opd-type megatron.",
            ),
            (
                f"{URL} --rm-input text",
                "--rm-input text is for a reward model, and the teacher of --opd-type sglang reads the student's token"
                " ids: leave it out.",
            ),
        ],
    ),
    "teacher_on_servers_is_reachable": (
        [
            URL,
            f"{URL},https://10.0.0.2:30000",
            URL + ' --rm-server-options {{"api_key":"key"}}',
            MODEL,
            f"{MODEL} --rm-url http://10.0.0.1:30000",
            f"{MODEL} --rm-num-gpus 4 --rm-num-gpus-per-engine 2",
            f"{SERVED} --custom-rm-path examples.reward.judge",
        ],
        [
            (
                SERVED,
                "--opd-type sglang needs a teacher: give its folder, --rm-model, or the address of its server,"
                " --rm-url.",
            ),
            (
                f"{SERVED} --rm-url 10.0.0.1:30000",
                "--rm-url 10.0.0.1:30000 is not an address: begin it with http:// or https://.",
            ),
            (
                f"{URL} --rm-num-gpus 2",
                "--rm-num-gpus belongs to the servers of --rm-model: give that folder, or leave --rm-num-gpus out.",
            ),
            (
                URL + ' --rm-server-options {{"tp_size":2}}',
                "--rm-server-options belongs to the servers of --rm-model: give that folder, or leave"
                " --rm-server-options out.",
            ),
            (
                f"{MODEL} --rm-num-gpus 3 --rm-num-gpus-per-engine 2",
                "--rm-num-gpus 3 is not a multiple of --rm-num-gpus-per-engine 2: choose a multiple.",
            ),
            (
                f"{SERVED} --rm-model {{dir}}/judge",
                "--rm-model {dir}/judge is a Qwen3ForSequenceClassification, and the teacher of --opd-type sglang is a"
                " language model: give another.",
            ),
            (
                f"{SERVED} --rm-model {{dir}}/other",
                "--rm-model {dir}/other has another vocabulary than --hf-checkpoint {dir}/hf, so that it would score"
                " other tokens: give a teacher with the student's tokenizer.",
            ),
            (
                f"{SERVED} --rm-model {{dir}}/short",
                "--rm-model {dir}/short has a context of 4096 tokens (max_position_embeddings), and a response may have"
                " 8192 (--rollout-max-response-len): lower that, or give a teacher with a longer context.",
            ),
            (
                f"{SERVED} --rm-model {{dir}}/bare",
                "--rm-model {dir}/bare has no weights (no .safetensors file), which the engines load: copy them there"
                " too.",
            ),
        ],
    ),
}


def write_model(folder: Path, *, tokens: int = 151669, config: str | None = None, **changes: object) -> None:
    folder.mkdir()
    complete_model(folder, tokens=tokens)
    (folder / "config.json").write_text(config or json.dumps(QWEN3_4B_CONFIG | changes))


@pytest.fixture
def teachers(recipe):
    """Folders of teachers beside the student's."""
    make_checkpoint(recipe.dir / "teacher", "iter_0000007")
    folders = {
        "like": {},
        "served": {"num_hidden_layers": 40},
        "other": {"tokens": 151670},
        "broken": {"config": "?"},
        "judge": {"architectures": ["Qwen3ForSequenceClassification"]},
        "short": {"max_position_embeddings": 4096},
        "bare": {},
    }
    for name, changes in folders.items():
        write_model(recipe.dir / name, **changes)
    (recipe.dir / "bare" / "pytorch_model.bin").unlink()
    for name in ("like", "served", "other", "broken"):  # what makes the folder one with weights
        header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
        (recipe.dir / name / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return recipe


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


@pytest.mark.parametrize("more", [more for good, _ in CASES.values() for more in good])
def test_valid_flags_are_accepted(teachers, more):
    assert sentences(teachers.line(more)) == []


@pytest.mark.parametrize(("more", "sentence"), [case for _, bad in CASES.values() for case in bad])
def test_each_violation_is_one_error(teachers, more, sentence):
    assert sentences(teachers.line(more)) == [sentence.format(dir=teachers.dir)]


def test_supervised_training_has_no_teacher(teachers):
    line = teachers.supervised_line(MEGATRON)
    assert sentences(line) == ["--use-opd changes advantages and --loss-type sft_loss has none: leave one of them out."]
    custom = "--loss-type custom_loss --custom-loss-function-path examples.losses.high_entropy"
    line = teachers.line(f"{MEGATRON} {custom} --disable-compute-advantages-and-returns", without="--use-kl-loss")
    assert (
        "--use-opd changes advantages and --disable-compute-advantages-and-returns has none: leave one of them out."
        in sentences(line)
    )


def test_missing_reward_names_the_one_for_a_teacher_alone(teachers):
    assert sentences(teachers.line(MEGATRON, without="--rm-type"))[0] == (
        "no reward for the responses: give --rm-type or --custom-rm-path (--rm-type zero: train on the teacher alone)."
    )


def test_vocabularies_are_compared_by_the_ids_of_their_tokens(teachers):
    other = teachers.dir / "other"
    line = teachers.line(f"{SERVED} --rm-model {other}")
    content = json.loads((teachers.dir / "hf" / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(content, indent=1))  # other bytes, equal ids
    assert sentences(line) == []
    content["model"]["vocab"] = {"a": 1, "b": 0}
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert "has another vocabulary" in sentences(line)[0]
    (other / "tokenizer.json").unlink()  # another format, which cannot be compared here
    assert sentences(line) == []


def test_evaluation_starts_no_teacher(teachers):
    args, problems = read_args(teachers.line(f"{MODEL} --num-rollout 0"))
    assert problems == []
    assert not starts_reward_servers(args) and len(reward_gpus(args, 8)) == 0
    args, _ = read_args(teachers.line(MODEL))
    assert starts_reward_servers(args) and reward_gpus(args, 8) == (range(8, 9),)


def test_custom_columns_have_no_top_tokens_of_a_teacher(teachers, monkeypatch):
    (teachers.dir / "columns_of_mine.py").write_text("def convert(args, samples):\n    return {}\n")
    monkeypatch.syspath_prepend(teachers.dir)
    line = f"{URL} --opd-divergence jsd --custom-convert-samples-to-train-data-path columns_of_mine.convert"
    assert sentences(teachers.line(line)) == [
        "--opd-divergence jsd reads the teacher's top tokens, which the columns of"
        " --custom-convert-samples-to-train-data-path do not have: leave one of them out."
    ]
