"""README and guides: their links, flags, files and modules exist."""

import ast
import asyncio
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from slimrl.arguments import Arguments
from slimrl.arguments.foreign_flags import OTHER_WORDS
from slimrl.arguments.namespace import all_flag_specs
from slimrl.arguments.parser import RETIRED_FLAGS
from slimrl.data.sample import Sample

ROOT = Path(__file__).resolve().parents[2]
GENERATED = (  # generated from the flags: they name flags of other programs
    *("flags.md", "unsupported.md"),
    *("coming-from-aiak-rlhf.md", "coming-from-pai-chatlearn.md"),
)
GUIDES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED)
PAGES = [ROOT / "README.md", *GUIDES]
IDS = [path.name for path in PAGES]
ROW = "Estimator("  # start of a row's code in docs/tutorial-algorithm.md
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*\b(?![-*.<])")
# Flags of other programs in the commands of the pages.
OTHERS = {
    *("--head", "--address", "--num-gpus"),  # ray start
    *("--entrypoint-label-selector", "--runtime-env-json"),  # ray job submit
    *("--node-ip-address", "--object-store-memory"),  # ray start
    *("--logdir", "--local-dir", "--repo-type", "--no-deps", "--no-build-isolation"),  # tensorboard, hf, pip
    *("--extra", "--overrides", "--no-emit-package", "--no-annotate", "--no-header"),  # uv pip compile
    *("--python-version", "--python-platform"),
    *("--rm", "--gpus", "--ipc", "--shm-size", "--ulimit", "--device", "--cap-add", "--network"),  # docker
    *(
        "--model-path",
        "--host",
        "--port",
        "--tp-size",
        "--is-embedding",
        "--api-key",
        "--enable-deterministic-inference",
        "--cuda-graph-backend-prefill",
        "--enable-draft-weights-cpu-backup",
        "--moe-runner-backend",
        "--max-lora-rank",
        "--max-loras-per-batch",
        "--max-loaded-loras",
        "--tokenizer-worker-num",
        "--dp-size",
        "--disable-radix-cache",
    ),  # sglang.launch_server
    *("--pretrain", "--l2", "--vllm", "--critic", "--ipo"),  # OpenRLHF
    "--learning-rate",  # TRL
    "--durations",  # pytest
}


def known_flags() -> set[str]:
    """Flags of train.py and, as found in their sources, of the tools, benchmarks, scripts and the report."""
    sources = [
        path
        for folder in (
            "tools",
            "tools/gpu_check",
            "tools/gpu_check/checks",
            "tools/launchers",
            "scripts/lib",
            "benchmarks",
            "slimrl/observability",
        )
        for path in ROOT.glob(f"{folder}/*.py")
    ]
    sources += ROOT.glob("scripts/*.sh")
    spelt = {flag for path in sources for flag in FLAG.findall(path.read_text())}
    declared = {name for spec in all_flag_specs() for name in spec.on + spec.off}
    return spelt | declared | RETIRED_FLAGS.keys() | OTHERS


def passed_on(flag: str) -> bool:
    """Whether a flag is passed to an engine or the router; tests/scripts/test_recipe.py parses those of the README."""
    return flag.startswith(("--sglang-", "--vllm-", "--router-"))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_page_link_points_to_a_file(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_links_every_guide():
    linked = set(re.findall(r"\]\((docs/[a-z-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_flag_in_a_page_exists(page):
    named = set(FLAG.findall(page.read_text()))
    assert {flag for flag in named - known_flags() if not passed_on(flag)} == set()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_script_and_module_in_a_page_exists(page):
    text = page.read_text()
    for name in re.findall(r"\b(?:scripts|tools|tests|requirements)/[\w./-]+\.(?:sh|py|lock)\b", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for module in re.findall(r"python3? -m (slimrl[\w.]*)", text):
        assert importlib.util.find_spec(module) is not None, f"{page.name} names {module}"


@pytest.mark.parametrize(
    ("page", "owners"),
    [
        ("coming-from-verl.md", ("verl's",)),
        ("coming-from-openrlhf.md", ("OpenRLHF's",)),
        ("coming-from-trl.md", ("TRL's", "transformers'")),
    ],
)
def test_migration_page_has_the_flags_known_to_the_parser(page, owners):
    rows = re.findall(
        r"^\| `([\w.-]+)` \| (?:`(--[\w-]+)`)? ?\| .*\|$", (ROOT / "docs" / page).read_text(), re.MULTILINE
    )
    said = {word.lstrip("-").replace("_", "-"): flag or None for word, flag in rows}
    known = {word: row.flag for word, row in OTHER_WORDS.items() if row.owner in owners}
    assert said == known


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def test_tutorial_reward_behaves_as_described():
    namespace: dict = {}
    (source,) = (block for block in python_blocks("tutorial-reward.md") if "by_digits" in block)
    exec(source, namespace)
    shown = re.findall(r"^(\S.*?) (\{'score'.*\})$", (ROOT / "docs/tutorial-reward.md").read_text(), re.MULTILINE)
    assert len(shown) == 3
    for response, reward in shown:
        sample = Sample(prompt="39+45=", response=response, label="84")
        assert asyncio.run(namespace["by_digits"](None, sample)) == ast.literal_eval(reward)


def test_tutorial_functions_match_the_flags():
    namespace: dict = {}
    for block in python_blocks("tutorial-algorithm.md"):
        if not block.startswith(ROW):
            exec(block, namespace)
    samples = [
        Sample(prompt="", group_index=group, reward=reward)
        for group, reward in ((0, 1.0), (0, 0.0), (0, 0.5), (1, 3.0))
    ]
    raw, trained = namespace["leave_one_out"](Arguments(), samples)
    assert (raw, trained) == ([1.0, 0.0, 0.5, 3.0], [0.75, -0.75, 0.0, 0.0])
    for name in ("discounted", "reinforce"):
        assert callable(namespace[name])


def test_tutorial_row_matches_the_table():
    (row,) = (block for block in python_blocks("tutorial-algorithm.md") if block.startswith(ROW))
    assert textwrap.indent(row, "    ").rstrip() in (ROOT / "slimrl/algorithms/estimators.py").read_text()
