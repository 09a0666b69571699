"""README and guides: their links lead somewhere, and the flags, files and modules that they name exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from slimrl.arguments.namespace import all_flag_specs
from slimrl.arguments.parser import RETIRED_FLAGS

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "flags.md")
PAGES = [ROOT / "README.md", *GUIDES]
IDS = [path.name for path in PAGES]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*\b(?![-*.<])")
# Flags of other programs in the commands that the pages show.
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
        "--cuda-graph-backend-prefill",
        "--enable-draft-weights-cpu-backup",
    ),  # sglang.launch_server
}


def known_flags() -> set[str]:
    """Of train.py and, as far as their sources spell them, of the tools, benchmarks, scripts and the report."""
    sources = [
        path
        for folder in ("tools", "tools/gpu_check", "benchmarks", "slimrl/observability")
        for path in ROOT.glob(f"{folder}/*.py")
    ]
    sources += ROOT.glob("scripts/*.sh")
    spelt = {flag for path in sources for flag in FLAG.findall(path.read_text())}
    declared = {name for spec in all_flag_specs() for name in spec.on + spec.off}
    return spelt | declared | RETIRED_FLAGS.keys() | OTHERS


def passed_on(flag: str) -> bool:
    """Whether a flag goes to SGLang or its router; tests/scripts/test_recipe.py parses those of the README."""
    return flag.startswith(("--sglang-", "--router-"))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_of_a_page_leads_to_a_file(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_leads_to_every_guide():
    linked = set(re.findall(r"\]\((docs/[a-z-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_flag_that_a_page_names_exists(page):
    named = set(FLAG.findall(page.read_text()))
    assert {flag for flag in named - known_flags() if not passed_on(flag)} == set()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_script_and_module_that_a_page_names_exists(page):
    text = page.read_text()
    for name in re.findall(r"\b(?:scripts|tools|tests|requirements)/[\w./-]+\.(?:sh|py|lock)\b", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for module in re.findall(r"python3? -m (slimrl[\w.]*)", text):
        assert importlib.util.find_spec(module) is not None, f"{page.name} names {module}"
