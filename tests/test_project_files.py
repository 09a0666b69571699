"""License, metadata, workflows and the guide for contributors: the names in them exist, and they agree."""

from __future__ import annotations

import email
import hashlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import slimrl

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github/pull_request_template.md")]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
NAMED = re.compile(
    r"(?<![\w/.-])(?:(?:slimrl|tests|tools|scripts|docs|examples|benchmarks|requirements|docker)/[\w./*-]*"
    r"|(?:[A-Z]+\.(?:md|cff)|LICENSE\b|pyproject\.toml|setup\.py))"
)
COPYRIGHT = "Copyright 2026 The slimrl authors"
# of https://www.apache.org/licenses/LICENSE-2.0.txt without its leading empty line
STANDARD_TEXT = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def names(page: Path) -> set[str]:
    """The paths that a page names, without a sentence's full stop."""
    return {found.rstrip(".") for found in NAMED.findall(page.read_text())}


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- licence and package -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The package, built from a copy of its inputs, with the setuptools of this environment."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "slimrl", folder / "slimrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('.')"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_string(wheel.read(name).decode())


def test_license_is_the_standard_text_with_its_holders():
    text = (ROOT / "LICENSE").read_text()
    assert text.count(COPYRIGHT) == 1
    standard = text.replace(COPYRIGHT, "Copyright [yyyy] [name of copyright owner]")
    assert hashlib.sha256(standard.encode()).hexdigest() == STANDARD_TEXT


def test_metadata_citation_and_license_agree(wheel):
    said = metadata(wheel)
    assert (said["Name"], said["Version"]) == ("slimrl", slimrl.__version__)
    assert said["License-Expression"] == PROJECT["license"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE"]
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    assert COPYRIGHT.endswith(said["Author"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [said["Author"]]
    assert "version" not in citation  # only slimrl/__init__.py states it


def test_package_has_the_requirements_of_setup_py(wheel):
    required = metadata(wheel).get_all("Requires-Dist")
    text = (ROOT / "setup.py").read_text()
    listed = re.findall(r'^\s+"([\w-]+)[^"]*[=>]=[^"]*",', text, re.MULTILINE)
    assert len(listed) > 30
    assert {re.match(r"[\w.-]+", line)[0] for line in required} >= set(listed)
    assert {"dev", "wandb", "gpu"} == set(metadata(wheel).get_all("Provides-Extra"))


def test_everything_but_caches_is_packaged(wheel):
    source = {by_name(path) for path in (ROOT / "slimrl").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    assert "slimrl/py.typed" in source
    assert source <= set(wheel.namelist())


def test_image_has_the_build_inputs_of_the_package():
    sent = (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines()
    assert {"!LICENSE", "!README.md", "!pyproject.toml", "!setup.py", "!slimrl"} <= set(sent)


# -- hooks and workflows -------------------------------------------------------------------------------------------


@pytest.fixture
def hooks() -> dict[str, dict]:
    """The hooks of .pre-commit-config.yaml by id, each with the revision of its repository."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    return {hook["id"]: {"rev": repo.get("rev"), **hook} for repo in repositories for hook in repo["hooks"]}


@pytest.mark.parametrize("lock", LOCKS, ids=by_name)
def test_hooks_have_the_ruff_of_the_lock(lock, hooks):
    (pinned,) = re.findall(r"^ruff==(.*)$", lock.read_text(), re.MULTILINE)
    assert hooks["ruff-check"]["rev"] == hooks["ruff-format"]["rev"] == f"v{pinned}"


def test_syntax_hook_reads_every_script_and_finds_errors_in_each(hooks, tmp_path):
    hook = hooks["bash-syntax"]
    scripts = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob(".ci/*")]
    assert scripts and all(re.search(hook["files"], by_name(path)) for path in scripts)
    good, bad = tmp_path / "good.sh", tmp_path / "bad.sh"
    good.write_text("true\n")
    bad.write_text("if true\n")
    for files, fails in (([good, good], False), ([good, bad], True), ([bad, good], True)):
        done = subprocess.run([*shlex.split(hook["entry"]), *files], capture_output=True, timeout=60)
        assert (done.returncode != 0) is fails


@pytest.mark.parametrize("path", WORKFLOWS, ids=by_name)
def test_workflow_is_valid_and_calls_existing_scripts(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"] and workflow[True]  # YAML reads the key `on` as true
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        (script,) = re.findall(r"^bash (\S+)", command)
        assert (ROOT / script).is_file(), command


def test_tests_run_for_every_python_with_a_lock():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    job = workflow["jobs"]["tests"]
    assert {f"cpu-py{version.replace('.', '')}.lock" for version in job["strategy"]["matrix"]["python"]} == {
        path.name for path in LOCKS if path.name.startswith("cpu-")
    }
    by_event = {step["if"]: step["run"] for step in job["steps"] if "if" in step}
    assert by_event == {
        "github.event_name == 'pull_request'": "bash scripts/test.sh -m 'not slow'",
        "github.event_name == 'push'": "bash .ci/run",
        "github.event_name != 'pull_request' && github.event_name != 'push'": "bash scripts/test.sh --all",
    }


@pytest.mark.parametrize("path", FORMS, ids=by_name)
def test_issue_form_is_complete(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in questions}) == len(questions) > 2
    for part in questions:
        assert part["attributes"]["label"]
        # YAML would read a bare yes or no as a boolean, which GitHub rejects
        assert all(isinstance(option, str) for option in part["attributes"].get("options", []))
    for name in names(path):
        assert (ROOT / name).exists(), name


# -- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_page_names_existing_files(page):
    for name in names(page):
        assert list(ROOT.glob(name)) if "*" in name else (ROOT / name).exists(), f"{page.name} names {name}"
    for module in re.findall(r"python3? -m (slimrl[\w.]*)", page.read_text()):
        assert importlib.util.find_spec(module) is not None, f"{page.name} names {module}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_page_links_point_to_a_file_and_its_section(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            name, _, section = target.partition("#")
            assert (page.parent / name).exists(), f"{page.name} links to {target}"
            assert not section or section in anchors(page.parent / name), f"{page.name} links to {target}"


def rows() -> list[tuple[str, str]]:
    """Rows of the tables in CONTRIBUTING.md: the cell with files, and the change described there."""
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    found = [re.fullmatch(r"\| (.*?) \| (.*) \|", line) for line in lines]
    return [(row[1], row[2]) for row in found if row is not None and NAMED.search(row[1])]


def test_names_in_the_change_table_are_in_their_files():
    assert len(rows()) >= 40
    for files, change in rows():
        paths = [ROOT / name for name in NAMED.findall(files)]
        sources = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
        text = "\n".join(file.read_text() for file in sources)
        for name in re.findall(r"`([A-Za-z_]\w*)`", change):
            assert re.search(rf"\b{name}\b", text), f"CONTRIBUTING.md: {name} is not in {files}"
        for name in re.findall(r"`(\w+\.py)`", change):
            assert name in {file.name for file in sources}, f"CONTRIBUTING.md: {name} is not in {files}"
