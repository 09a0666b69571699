"""Where weights come from: a fresh start is never mistaken for a wrong path, nor the other way round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimrl.arguments import read_args


def make_checkpoint(folder: Path, *names: str, latest: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(latest)


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


def test_an_absent_or_empty_load_is_a_fresh_start(recipe):
    assert sentences(recipe.line()) == []
    (recipe.dir / "ckpt").mkdir()
    assert sentences(recipe.line()) == []
    (recipe.dir / "ckpt" / "iter_0000001.tmp").mkdir()  # a first save that was cut off
    assert sentences(recipe.line()) == []


def test_a_load_with_a_checkpoint_resumes_and_needs_no_reference(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000019", "iter_0000039", latest="39")
    assert sentences(recipe.line()) == []
    assert sentences(recipe.line("--ckpt-step 19")) == []
    line = recipe.line(without="--ref-load")
    line.remove("--use-kl-loss")
    assert sentences(line) == []


def test_a_load_whose_parent_is_absent_is_a_misspelt_path_unless_it_is_where_the_run_saves(recipe):
    assert sentences(recipe.line("--load {dir}/chekpoints/run1")) == [
        f"--load {recipe.dir}/chekpoints/run1 does not exist (only {recipe.dir} of it does), so it looks misspelt and"
        " not new: mend it, or make its parent folder for a fresh start."
    ]
    assert sentences(recipe.line("--load {dir}/new/run1 --save {dir}/new/run1")) == []


def test_a_load_with_other_things_is_an_error(recipe):
    folder = recipe.dir / "ckpt"
    folder.mkdir()
    (folder / "notes.txt").touch()
    assert sentences(recipe.line()) == [
        f"--load {folder} holds notes.txt and no checkpoint: give the folder that has"
        " latest_checkpointed_iteration.txt."
    ]
    assert sentences(recipe.line("--load {dir}/hf")) == [
        f"--load {recipe.dir}/hf is a Hugging Face model without its weights (*.safetensors): copy them too."
    ]
    assert sentences(recipe.line("--load {dir}/train.jsonl")) == [
        f"--load {recipe.dir}/train.jsonl is a file: give the checkpoint's folder."
    ]


def test_a_load_one_level_too_high_or_too_deep_says_which_to_give(recipe):
    make_checkpoint(recipe.dir / "runs" / "a", "iter_0000001", latest="1")
    (recipe.dir / "runs" / "a" / "iter_0000001" / "common.pt").touch()
    assert sentences(recipe.line("--load {dir}/runs")) == [
        f"--load {recipe.dir}/runs holds no checkpoint itself, its folder a does: give {recipe.dir}/runs/a."
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
            "--load {dir}/ckpt: latest_checkpointed_iteration.txt names iter_0000007, which is not there (there is"
            " iter_0000001): mend that file, or copy the checkpoint again.",
        ),
        (
            "seven",
            "--load {dir}/ckpt: latest_checkpointed_iteration.txt says 'seven', neither release nor a number: mend"
            " that file.",
        ),
    ],
)
def test_a_tracker_that_names_nothing_is_an_error(recipe, latest, sentence):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest=latest)
    assert sentences(recipe.line()) == [sentence.format(dir=recipe.dir)]


def test_a_tracker_that_is_not_text_is_an_error(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest="1")
    for content in (b"\xff1", "\u00b2".encode()):
        (recipe.dir / "ckpt" / "latest_checkpointed_iteration.txt").write_bytes(content)
        assert "neither release nor a number" in sentences(recipe.line())[0]


def test_one_iteration_by_its_path_and_another_by_its_number_contradict(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000019", "iter_0000039", latest="39")
    folder = recipe.dir / "ckpt" / "iter_0000019"
    (folder / "metadata.json").touch()
    assert sentences(recipe.line(f"--load {folder} --ckpt-step 39")) == [
        f"--ckpt-step 39 chooses an iteration and --load {folder} is one already: drop it."
    ]
    assert sentences(recipe.line(f"--load {folder} --ckpt-step 19")) == []


def test_iterations_without_a_tracker_are_an_error(recipe):
    (recipe.dir / "ckpt" / "iter_0000001").mkdir(parents=True)
    assert sentences(recipe.line()) == [
        f"--load {recipe.dir}/ckpt holds iter_0000001 but no latest_checkpointed_iteration.txt that names one: give"
        " the step, or write that file."
    ]
    assert sentences(recipe.line("--ckpt-step 1")) == []


def test_a_step_that_is_not_there_is_an_error(recipe):
    assert sentences(recipe.line("--ckpt-step 3")) == [
        f"--ckpt-step 3 is not in --load {recipe.dir}/ckpt, which holds no checkpoint: drop it."
    ]
    assert sentences(recipe.line("--ckpt-step 3", without="--load")) == [
        "--ckpt-step 3 chooses from --load: give it, or leave it out."
    ]
    make_checkpoint(recipe.dir / "ckpt", "iter_0000001", latest="1")
    assert sentences(recipe.line("--ckpt-step 3")) == [
        f"--ckpt-step 3 is not in --load {recipe.dir}/ckpt, which holds iter_0000001: choose one."
    ]
    assert sentences(recipe.line("--ref-ckpt-step 3")) == [
        f"--ref-ckpt-step 3 is not in --ref-load {recipe.dir}/ref, which holds release: choose one."
    ]


def test_a_reference_must_be_there_where_it_is_named_or_needed(recipe):
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


def test_a_run_needs_weights_to_start_from(recipe):
    line = recipe.line(without="--ref-load")
    line.remove("--use-kl-loss")
    assert sentences(line) == [
        f"--load {recipe.dir}/ckpt holds no checkpoint yet and --ref-load is missing: give the first weights."
    ]
    at = line.index("--load")
    del line[at : at + 2]
    assert sentences(line) == ["there are no weights to start from: give --ref-load (or --load to resume)."]
    assert sentences([*line, "--debug-rollout-only"]) == []


def test_a_hugging_face_folder_gives_first_weights_where_its_shape_is_that_of_the_flags(recipe):
    (recipe.dir / "hf" / "model.safetensors").touch()
    assert sentences(recipe.line("--ref-load {dir}/hf")) == []
    assert sentences(recipe.line("--load {dir}/hf --save {dir}/new")) == []
    assert sentences(recipe.line("--ref-load {dir}/hf --ref-ckpt-step 3")) == [
        f"--ref-ckpt-step 3 chooses an iteration and --ref-load {recipe.dir}/hf is a Hugging Face model: drop it."
    ]
    assert sentences(recipe.line("--ref-load {dir}/hf --save {dir}/hf")) == [
        f"--save {recipe.dir}/hf is a Hugging Face model: give a folder of its own."
    ]
    other = recipe.dir / "other"
    other.mkdir()
    (other / "model.safetensors").touch()
    config = json.loads((recipe.dir / "hf/config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
    assert sentences(recipe.line("--ref-load {dir}/other")) == [
        f"--ref-load {other}: --num-layers is 36 and config.json says num_hidden_layers 40: give --num-layers 40."
    ]
