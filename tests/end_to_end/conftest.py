"""A tiny model, its Megatron checkpoint and the flags of a small run, made once for all end-to-end tests."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.families.toys import Toy
from tests.tools.converting import run_tool

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Folders of the tiny model."""

    folder: Path
    home: Path
    torch_dist: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def model_args(self) -> list[str]:
        """The MODEL_ARGS array of model_args.sh, as bash reads it."""
        script = f"source '{self.folder}/model_args.sh'; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
        return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()

    def flags(self, **changes: object) -> list[str]:
        """A full command line for a short run; `changes` replace or (None) remove single flags."""
        values: dict[str, object] = {
            "hf-checkpoint": self.model,
            "ref-load": self.torch_dist,
            "prompt-data": self.folder / "train.jsonl",
            "input-key": "prompt",
            "label-key": "label",
            "apply-chat-template": True,
            "rollout-shuffle": True,
            "rm-type": "math",
            "num-rollout": 3,
            "rollout-batch-size": 8,
            "n-samples-per-prompt": 4,
            "num-steps-per-rollout": 1,
            "rollout-max-response-len": 16,
            "rollout-temperature": 1.0,
            "use-dynamic-batch-size": True,
            "max-tokens-per-gpu": 512,
            "balance-data": True,
            "advantage-estimator": "grpo",
            "use-kl-loss": True,
            "kl-loss-coef": 0.01,
            "kl-loss-type": "low_var_kl",
            "eps-clip": 0.2,
            "eps-clip-high": 0.28,
            "optimizer": "adam",
            "lr": 1e-3,
            "lr-decay-style": "constant",
            "sglang-enable-deterministic-inference": True,
            "sglang-disable-radix-cache": True,
        }
        values.update({name.replace("_", "-"): value for name, value in changes.items()})
        line = self.model_args()
        for name, value in values.items():
            if value is True:
                line.append(f"--{name}")
            elif value is not None and value is not False:
                line += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
        return line


@pytest.fixture(scope="session")
def tiny(additions: Path, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    made = Tiny(additions, folder / "home", folder / "torch_dist")
    made.home.mkdir()
    flags = (*made.model_args(), "--hf-checkpoint", made.model, "--save", made.torch_dist)
    done = run_tool("convert_hf_to_torch_dist.py", *flags)
    assert done.returncode == 0, done.stderr
    return made


@dataclasses.dataclass(frozen=True)
class FamilyTiny(Tiny):
    """A toy of `tests.families.toys` with random weights, and the task of the tiny model."""

    toy: Toy

    def model_args(self) -> list[str]:
        return list(self.toy.flags)

    def flags(self, **changes: object) -> list[str]:
        """Rewards are random: no answer of random weights is right."""
        return super().flags(**{"rm_type": "random", "label_key": None, **changes})


def make_family(toy: Toy, tiny: Tiny, folder: Path) -> FamilyTiny:
    """Its checkpoint, and the prompts of `tiny`."""
    folder.mkdir()
    shutil.copy(tiny.folder / "train.jsonl", folder)
    model = toy.save(folder / "model")
    return FamilyTiny(folder, tiny.home, model, toy)


# a published model of each family that sees images, its toy, and the further flags of the latter
SEEING = {
    "Qwen2.5-VL": ("qwen2.5-VL-3B", "qwen2_5_vl", ()),
    "Qwen3-VL": ("qwen3-VL-4B", "qwen3_vl", ()),
    "Qwen3-VL-MoE": ("qwen3-VL-30B-A3B", "qwen3_vl_moe", ("--untie",)),
}


@dataclasses.dataclass(frozen=True)
class SeeingTiny(Tiny):
    """The toy of a family of `SEEING`, with the flags of its recipe."""

    name: str

    def model_args(self) -> list[str]:
        model, toy, _ = SEEING[self.name]
        script = f"source '{ROOT}/scripts/models/{model}.sh'; source '{ROOT}/scripts/lib/tiny/{toy}.sh'"
        script += "; printf '%s\\n' \"${MODEL_ARGS[@]}\""
        return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()


def make_seeing(folder: Path, warm_start_steps: int, name: str) -> Tiny:
    """The toy, random or taught to count squares for so many steps."""
    _, toy, more = SEEING[name]
    flags = ("--output-dir", folder / "toy", "--family", toy, "--warm-start-steps", str(warm_start_steps), *more)
    done = run_tool("make_tiny_model.py", *flags, "--train-size", "64", "--eval-size", "8")
    assert done.returncode == 0, done.stderr
    made = SeeingTiny(folder / "toy", folder / "home", folder / "toy" / "model", name)
    made.home.mkdir()
    return made
