"""Where initial weights come from: a fresh start is never mistaken for a wrong path, nor the reverse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.checkpoints import MANIFEST_NAME, find_corruption, iteration_of, manifest, read_manifest
from tests.arguments.dry_run.test_files import safetensors


def make_checkpoint(folder: Path, *names: str, latest: str) -> None:
    """Makes training checkpoints whose only tensor file has 3 bytes."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__0_0.distcp").write_text("abc")
        (folder / name / MANIFEST_NAME).write_text(manifest(iteration_of(name), {"__0_0.distcp": 3}))
    (folder / "latest_checkpointed_iteration.txt").write_text(latest)


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


def test_absent_or_empty_load_is_a_fresh_start(recipe):
    assert sentences(recipe.line()) == []
    (recipe.dir / "ckpt").mkdir()
    assert sentences(recipe.line()) == []
    (recipe.dir / "ckpt" / "iter_0000001.tmp").mkdir()  # an interrupted first save
    assert sentences(recipe.line()) == []


def test_load_with_a_checkpoint_resumes_without_a_reference(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000019", "iter_0000039", latest="39")
    assert sentences(recipe.line()) == []
    assert sentences(recipe.line("--ckpt-step 19")) == []
    line = recipe.line(without="--ref-load")
    line.remove("--use-kl-loss")
    assert sentences(line) == []


def test_run_whose_reference_changed_finds_it_in_its_checkpoints(recipe):
    folder, update = recipe.dir / "ckpt", "--ref-update-interval 40"
    without = recipe.line(update)
    without.remove("--use-kl-loss")
    assert sentences(without) == [f"{update} has no effect without a reference model: leave it out."]
    make_checkpoint(folder, "iter_0000019", "iter_0000079", "iter_0000099", latest="99")
    assert sentences(recipe.line(update)) == []  # after rollout 79
    assert sentences(recipe.line(f"{update} --ckpt-step 19")) == []  # that of --ref-load
    (folder / "iter_0000079").rename(folder / "iter_0000059")
    lacking = [
        f"--load {folder} continues with the reference in {folder}/iter_0000079, which does not exist (only {folder} of"
        " it does): copy that checkpoint there."
    ]
    assert sentences(recipe.line(update)) == lacking
    assert sentences(recipe.line(f"{update} --finetune")) == []
    assert sentences(recipe.line(f"{update} --num-rollout 0", without="--num-rollout")) == []  # evaluates only
    (folder / "iter_0000059").rename(folder / "iter_0000079.old")  # whole, while another took its place
    assert sentences(recipe.line(update)) == []
    assert sentences(recipe.line(f"{update} --save {recipe.dir}/other")) == [
        f"--load {folder} continues with the reference in {folder}/iter_0000079.old, and later starts look for it in"
        f" --save {recipe.dir}/other: give its folder."
    ]
    (folder / "iter_0000079.old" / "__0_0.distcp").write_text("ab")
    (damaged,) = sentences(recipe.line(update))
    assert damaged.startswith(f"--load {folder} continues with the reference in {folder}/iter_0000079.old, ")
    line = recipe.line(update, without="--save-interval")
    assert f"{update} needs the checkpoints that have the reference: add --save-interval 40." in sentences(line)


def test_checkpoint_with_the_head_of_another_kind_of_model_is_rejected(recipe):
    folder = recipe.dir / "ckpt"
    make_checkpoint(folder, "iter_0000019", latest="19")
    files = {"__0_0.distcp": 3}
    for value_head in (True, False):
        (folder / "iter_0000019" / MANIFEST_NAME).write_text(manifest(19, files, value_head=value_head))
        of_policy = sentences(recipe.line())
        of_reward_model = [one for one in sentences(recipe.line("--loss-type reward_model_loss")) if "--load" in one]
        if value_head:
            assert of_reward_model == []
            assert of_policy == [
                f"--load {folder} is the checkpoint of a critic or a reward model, which has no output layer to sample"
                " tokens: give that of a policy; --critic-load and --rm-model take a reward model."
            ]
        else:
            assert of_policy == []
            (sentence,) = of_reward_model
            assert sentence.startswith(f"--load {folder} is the checkpoint of a policy, which has no reward head to")
            finetuned = sentences(recipe.line("--loss-type reward_model_loss --finetune"))
            assert not any("reward head" in one for one in finetuned)


# flags that take a model, with what makes them read
TEACHER = "--use-opd --opd-type megatron"
READ = {"--critic-load": "--advantage-estimator ppo", "--opd-teacher-load": TEACHER}
OF_A_POLICY = ("--load", "--ref-load", "--opd-teacher-load")


@pytest.mark.parametrize("flag", OF_A_POLICY)
def test_reward_model_as_a_policy_is_rejected(recipe, flag):
    folder = recipe.dir / "rm"
    make_checkpoint(folder, "iter_0000019", latest="19")
    more = f"{flag} {folder} {READ.get(flag, '')}"
    (folder / "iter_0000019" / MANIFEST_NAME).write_text(manifest(19, {"__0_0.distcp": 3}, value_head=True))
    assert sentences(recipe.line(more)) == [
        f"{flag} {folder} is the checkpoint of a critic or a reward model, which has no output layer to sample tokens:"
        " give that of a policy; --critic-load and --rm-model take a reward model."
    ]
    critic = sentences(recipe.line(f"--advantage-estimator ppo --critic-load {folder}"))
    reward_model = sentences(recipe.line(f"--loss-type reward_model_loss --ref-load {folder}"))
    assert critic == [] and not any("output layer" in one for one in reward_model)
    (folder / "iter_0000019" / MANIFEST_NAME).write_text(manifest(19, {"__0_0.distcp": 3}, value_head=False))
    assert sentences(recipe.line(more)) == []


@pytest.mark.parametrize("name", ["Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"])
@pytest.mark.parametrize("flag", [*OF_A_POLICY, "--hf-checkpoint"])
def test_hf_classifier_as_a_policy_is_rejected(recipe, flag, name):
    folder = recipe.dir / "hf" if flag == "--hf-checkpoint" else recipe.dir / "rm"
    folder.mkdir(exist_ok=True)
    safetensors(folder / "model.safetensors", {"a": [2]})
    more = f"{flag} {folder} {'--save {dir}/new' if flag == '--load' else READ.get(flag, '')}"
    config = json.loads((recipe.dir / "hf" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    assert sentences(recipe.line(more)) == [
        f"{flag} {folder} is a {name} (architectures in its config.json), which has no output layer to sample tokens:"
        " give that of a policy; --critic-load and --rm-model take a reward model."
    ]
    reward_model = sentences(recipe.line(f"--loss-type reward_model_loss --ref-load {folder}"))
    assert not any("output layer" in one for one in reward_model)
    (folder / "config.json").write_text(json.dumps(config))
    assert sentences(recipe.line(more)) == []


@pytest.mark.parametrize("flag", ["--load", "--ref-load", "--critic-load", "--opd-teacher-load"])
def test_checkpoint_of_a_model_of_other_sizes_is_rejected(recipe, flag):
    folder = recipe.dir / "other"
    make_checkpoint(folder, "iter_0000019", latest="19")
    line = recipe.line(f"{flag} {folder} {READ.get(flag, '')}")
    assert sentences(line) == []
    sizes = {"num_layers": 12, "hidden_size": 2560}
    (folder / "iter_0000019" / MANIFEST_NAME).write_text(manifest(19, {"__0_0.distcp": 3}, sizes=sizes))
    assert sentences(line) == [
        f"{flag} {folder} is a checkpoint of another model (--num-layers 36 is 12 there): give another folder."
    ]


def test_absent_load_is_rejected_unless_it_is_the_save_folder(recipe):
    for wrong in ("chekpoints/run1", "ckpt2"):
        assert sentences(recipe.line(f"--load {{dir}}/{wrong}")) == [
            f"--load {recipe.dir}/{wrong} does not exist (only {recipe.dir} of it does), and it is not the --save"
            f" folder: fix the path, or create the folder for a fresh start."
        ]
    assert sentences(recipe.line("--load {dir}/new/run1 --save {dir}/new/run1/")) == []


def test_load_folder_without_a_checkpoint_is_rejected(recipe):
    folder = recipe.dir / "ckpt"
    folder.mkdir()
    (folder / "notes.txt").touch()
    assert sentences(recipe.line()) == [
        f"--load {folder} has notes.txt and no checkpoint: give the folder that has latest_checkpointed_iteration.txt."
    ]
    assert sentences(recipe.line("--load {dir}/hf")) == [
        f"--load {recipe.dir}/hf is a Hugging Face model without its weights (*.safetensors): copy them too."
    ]
    assert sentences(recipe.line("--load {dir}/train.jsonl")) == [
        f"--load {recipe.dir}/train.jsonl is a file: give the checkpoint's folder."
    ]


def test_load_one_level_too_high_or_too_deep_reports_the_right_path(recipe):
    make_checkpoint(recipe.dir / "runs" / "a", "iter_0000001", latest="1")
    assert sentences(recipe.line("--load {dir}/runs")) == [
        f"--load {recipe.dir}/runs has no checkpoint, its subfolder a has: give {recipe.dir}/runs/a."
    ]
    assert sentences(recipe.line("--load {dir}/runs/a/iter_0000001")) == [
        f"--load {recipe.dir}/runs/a/iter_0000001 is one iteration of a checkpoint without its metadata.json: give its"
        f" parent folder {recipe.dir}/runs/a."
    ]
    (recipe.dir / "runs" / "a" / "iter_0000001" / "metadata.json").touch()
    assert sentences(recipe.line("--load {dir}/runs/a/iter_0000001")) == []


@pytest.mark.parametrize(
    ("latest", "sentence"),
    [
        (
            "7",
            "--load {dir}/ckpt: latest_checkpointed_iteration.txt names iter_0000007, which does not exist (the"
            " folder has iter_0000001): fix that file, or copy the checkpoint again.",
        ),
        (
            "seven",
            "--load {dir}/ckpt: latest_checkpointed_iteration.txt contains 'seven', neither release nor a number: fix"
            " that file.",
        ),
    ],
)
def test_tracker_naming_a_missing_iteration_is_rejected(recipe, latest, sentence):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest=latest)
    assert sentences(recipe.line()) == [sentence.format(dir=recipe.dir)]


def test_tracker_that_is_not_text_is_rejected(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest="1")
    for content in (b"\xff1", "\u00b2".encode()):
        (recipe.dir / "ckpt" / "latest_checkpointed_iteration.txt").write_bytes(content)
        assert "neither release nor a number" in sentences(recipe.line())[0]


def test_iteration_in_the_path_must_match_the_iteration_flag(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000019", "iter_0000039", latest="39")
    folder = recipe.dir / "ckpt" / "iter_0000019"
    (folder / "metadata.json").touch()
    assert sentences(recipe.line(f"--load {folder} --ckpt-step 39")) == [
        f"--ckpt-step 39 selects an iteration and --load {folder} is one: leave the step out."
    ]
    assert sentences(recipe.line(f"--load {folder} --ckpt-step 19")) == []


def test_iterations_without_a_tracker_are_rejected(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest="1")
    (recipe.dir / "ckpt" / "latest_checkpointed_iteration.txt").unlink()
    assert sentences(recipe.line()) == [
        f"--load {recipe.dir}/ckpt has iter_0000001 but no latest_checkpointed_iteration.txt: give the step, or write"
        f" that file."
    ]
    assert sentences(recipe.line("--ckpt-step 1")) == []


def test_missing_step_is_rejected(recipe):
    assert sentences(recipe.line("--ckpt-step 3")) == [
        f"--ckpt-step 3 is not in --load {recipe.dir}/ckpt, which has no checkpoint: leave it out."
    ]
    assert sentences(recipe.line("--ckpt-step 3", without="--load")) == [
        "--ckpt-step 3 needs --load: add it, or leave the step out."
    ]
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest="1")
    assert sentences(recipe.line("--ckpt-step 3")) == [
        f"--ckpt-step 3 is not in --load {recipe.dir}/ckpt, which has iter_0000001: choose one."
    ]
    assert sentences(recipe.line("--ref-ckpt-step 3")) == [
        f"--ref-ckpt-step 3 is not in --ref-load {recipe.dir}/ref, which has release: choose one."
    ]


def test_reference_must_exist_when_it_is_given_or_needed(recipe):
    assert sentences(recipe.line("--ref-load {dir}/reference")) == [
        f"--ref-load {recipe.dir}/reference does not exist (only {recipe.dir} of it does): make it with"
        " tools/convert_hf_to_torch_dist.py, or give the Hugging Face folder itself."
    ]
    assert sentences(recipe.line(without="--ref-load")) == [
        "--use-kl-loss compares with a reference model and --ref-load is missing: give its checkpoint."
    ]
    line = recipe.line("--kl-coef 0.1", without="--ref-load")
    line.remove("--use-kl-loss")
    assert sentences(line) == [
        "--kl-coef 0.1 compares with a reference model and --ref-load is missing: give its checkpoint."
    ]


def test_run_needs_initial_weights(recipe):
    line = recipe.line(without="--ref-load")
    line.remove("--use-kl-loss")
    assert sentences(line) == [
        f"--load {recipe.dir}/ckpt has no checkpoint yet and --ref-load is missing: give the initial weights."
    ]
    at = line.index("--load")
    del line[at : at + 2]
    assert sentences(line) == ["there are no weights to start from: give --ref-load (or --load to resume)."]
    assert sentences([*line, "--debug-rollout-only"]) == []


def test_hf_folder_gives_initial_weights_when_its_shape_matches_the_flags(recipe):
    safetensors(recipe.dir / "hf" / "model.safetensors", {"a": [2]})
    assert sentences(recipe.line("--ref-load {dir}/hf")) == []
    assert sentences(recipe.line("--load {dir}/hf --save {dir}/new")) == []
    assert sentences(recipe.line("--ref-load {dir}/hf --ref-ckpt-step 3")) == [
        f"--ref-ckpt-step 3 selects an iteration and --ref-load {recipe.dir}/hf is a Hugging Face model: leave the"
        f" step out."
    ]
    assert sentences(recipe.line("--ref-load {dir}/hf --load {dir}/ref --save {dir}/hf")) == [
        f"--save {recipe.dir}/hf is a Hugging Face model: give another folder."
    ]
    other = recipe.dir / "other"
    other.mkdir()
    (other / "model.safetensors").touch()
    config = json.loads((recipe.dir / "hf/config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
    assert sentences(recipe.line("--ref-load {dir}/other")) == [
        f"--ref-load {other}: --num-layers is 36 and config.json says num_hidden_layers 40: give --num-layers 40."
    ]


def test_torn_checkpoint_is_rejected_with_its_damage(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest="1")
    folder = recipe.dir / "ckpt" / "iter_0000001"
    remedy = "; choose another checkpoint, or copy it again."
    (folder / "__0_0.distcp").write_text("a")
    sentence = f"--load: {folder} is not loaded, it is incomplete: __0_0.distcp has 1 bytes of 3{remedy}"
    (folder / "metadata.json").touch()
    assert sentences(recipe.line()) == [sentence]
    assert sentences(recipe.line("--ckpt-step 1")) == [sentence]
    assert sentences(recipe.line(f"--load {folder}")) == [sentence]
    (folder / "__0_0.distcp").unlink()
    assert sentences(recipe.line()) == [
        f"--load: {folder} is not loaded, it is incomplete: __0_0.distcp is missing{remedy}"
    ]


def test_foreign_folder_under_a_checkpoint_name_is_rejected(recipe):
    release = recipe.dir / "ref" / "release"
    (release / ".metadata").unlink()
    assert sentences(recipe.line()) == [
        f"--ref-load: {release} is not loaded, it is no torch_dist checkpoint, or an incomplete one: it has no"
        f" .metadata; choose another checkpoint, or copy it again."
    ]


def test_checkpoint_is_found_after_a_kill_during_its_replacement(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest="1")
    (recipe.dir / "ckpt" / "iter_0000001").rename(recipe.dir / "ckpt" / "iter_0000001.old")
    assert sentences(recipe.line()) == []
    assert sentences(recipe.line("--ckpt-step 1")) == []


def test_manifest_identifies_training_checkpoints(tmp_path):
    (tmp_path / MANIFEST_NAME).write_text('{"program": "other"}')
    assert read_manifest(tmp_path) is None
    assert find_corruption(tmp_path) == f"its {MANIFEST_NAME} is truncated or not slimrl's"
    assert [iteration_of(name) for name in ("iter_0000012", "iter_12", "release")] == [12, None, None]


def test_retention_and_export_intervals_must_fit_the_save_interval(recipe):
    safetensors(recipe.dir / "hf" / "model.safetensors", {"a": [2]})
    fitting = "--save-hf {{dir}}/hf_{rollout_id} --save-retain-interval 40 --save-total-limit 2 --async-save"
    line = recipe.line().copy()
    assert sentences([*line, *fitting.replace("{{dir}}", str(recipe.dir)).split()]) == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "--save-retain-interval 30",
            "--save-retain-interval 30 is not a multiple of --save-interval 20: some checkpoints to keep would not be"
            " written; give 40.",
        ),
        (
            "--save-total-limit 2 --load DIR/ref --save DIR/ref",
            "--ref-load DIR/ref is in --save DIR/ref, where --save-total-limit and --save-retain-interval delete:"
            " copy the reference to another folder.",
        ),
        (
            "--save-hf DIR/export",
            "--save-hf DIR/export must contain {rollout_id} and no other braces: put {rollout_id} into the path.",
        ),
        (
            "--save-hf DIR/{rollout_id}_{step}",
            "--save-hf DIR/{rollout_id}_{step} must contain {rollout_id} and no other braces: put {rollout_id} into"
            " the path.",
        ),
        (
            "--save-hf DIR/iter_{rollout_id}",
            "--save-hf DIR/iter_{rollout_id} has the name of a training checkpoint: choose another name.",
        ),
    ],
)
def test_invalid_retention_or_export_is_one_error(recipe, more, sentence):
    safetensors(recipe.dir / "hf" / "model.safetensors", {"a": [2]})
    line = [*recipe.line(), *more.replace("DIR", str(recipe.dir)).split()]
    assert sentences(line) == [sentence.replace("DIR", str(recipe.dir))]


def test_export_needs_the_weights_of_the_original(recipe):
    line = [*recipe.line(), "--save-hf", f"{recipe.dir}/hf_{{rollout_id}}"]
    assert sentences(line) == [
        f"--save-hf is modelled on --hf-checkpoint {recipe.dir}/hf, which has no weights (*.safetensors): copy them"
        " too, or convert checkpoints with tools/convert_torch_dist_to_hf.py."
    ]


def test_checkpoint_flags_need_a_save_folder(recipe):
    line = recipe.line("--async-save --save-total-limit 3", without="--save")
    at = line.index("--save-interval")
    del line[at : at + 2]
    (recipe.dir / "ckpt").mkdir()
    assert sentences(line) == [
        "--save-total-limit 3 needs --save: give a folder.",
        "--async-save needs --save: give a folder.",
    ]
