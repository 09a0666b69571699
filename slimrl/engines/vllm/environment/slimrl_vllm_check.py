"""Prints which names that slimrl's modules take from vllm are absent: `python slimrl_vllm_check.py`.

Runs in vLLM's environment, which may have any version of it. Reads vllm's source and imports nothing, in a tenth of a
second. The line is JSON: {"version", "absent": ["module.name", ...]}.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

MARK = "slimrl_vllm_flags:"  # as in slimrl_vllm_server.py
NEEDED = {
    "vllm.config": ("set_current_vllm_config",),
    "vllm.entrypoints.openai.api_server": ("build_app", "init_app_state", "run_server"),
    "vllm.entrypoints.openai.cli_args": ("make_arg_parser", "validate_parsed_serve_args"),
    "vllm.entrypoints.serve.utils.api_utils": ("cli_env_setup",),
    "vllm.inputs": ("TokensPrompt",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead",),
    "vllm.model_executor.model_loader.reload.layerwise": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
    "vllm.sampling_params": ("RequestOutputKind", "SamplingParams"),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
}


def main() -> None:
    """Raises ModuleNotFoundError without vllm."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'vllm'")
    package = Path(next(iter(spec.submodule_search_locations)))
    absent = [
        f"{module}.{name}"
        for module, names in NEEDED.items()
        for name in names
        if name not in defined(package.joinpath(*module.split(".")[1:]))
    ]
    sys.stdout.write(f"{MARK}{json.dumps({'version': version(), 'absent': absent})}\n")


def defined(path: Path) -> set[str]:
    """The names at the top of a module, without its suffix, or of a package; none if it does not exist."""
    file = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def version() -> str:
    """That of the installed distribution, whatever its name."""
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return importlib.metadata.version(names[0]) if names else "of an unknown version"


if __name__ == "__main__":
    main()
