"""Mutation testing: how many small faults in the code that decides what is trained on are missed by the fast tests.

    OMP_NUM_THREADS=1 python benchmarks/mutations.py [--count 320] [--seed 11] [--only data/bin_packing]

Works on a copy of the repository in a temporary folder. A mutation changes one place of one module (a comparison, a
sign, a constant, a condition, a statement, a returned value); places are sampled with the seed, evenly over all
modules. Each mutation runs in a fork of one process that has the heavy packages loaded. A test run that fails or times
out detects the fault; surviving mutations are printed as diffs for review.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LIMIT_S = 120.0  # for the tests of one mutation
REPOSITORY = Path(__file__).resolve().parents[1]
# modules with a test file of the same name
_NAMESAKES = "algorithms/preference"
# other modules, and the test files that should detect a fault in them, fastest first
_OTHERS = (
    ("algorithms/losses", "algorithms/kl algorithms/reduction algorithms/policy_loss algorithms/value_loss"),
    ("algorithms/off_policy", "algorithms/off_policy algorithms/policy_loss"),
    ("algorithms/returns", "algorithms/returns algorithms/advantages"),
    ("algorithms/log_probs", "algorithms/log_probs algorithms/output_log_probs"),
    ("data/train_batch", "data/train_batch data/packing data/pair_packing rollout/group_reward"),
    ("data/sample", "data/version_spans compatibility/slime_modules"),
    ("data/bin_packing", "data/bin_packing data/packing"),
    ("data/parquet", "data/parquet data/readers"),
    ("data/prompt_format data/readers"
     " rollout/dataset/prompt_dataset rollout/dataset/dataset_mixture",
     "data/readers rollout/prompts rollout/data_source"),
    ("rollout/async_rollout", "rollout/staleness rollout/async_rollout rollout/async_steps"),
    ("rollout/generation/inflight_groups", "rollout/inflight_state rollout/async_rollout rollout/async_steps"),
    ("rollout/metrics rollout/dataset/data_source",
     "rollout/metrics rollout/data_source rollout/buffer rollout/partial rollout/accounting"),
    ("rollout/sft_rollout", "data/loss_mask rollout/sft_rollout"),
    ("data/preference_pairs rollout/preference_rollout", "rollout/preference_rollout"),
    ("weights/update/buckets", "weights/buckets"),
    ("weights/reshard weights/update/verify",
     "weights/layout weights/experts weights/engine_layout weights/hf_export weights/manifest"),
)  # fmt: skip
TESTS = {
    module: [f"tests/{name.replace('/', '/test_')}.py" for name in names.split()]
    for modules, names in [*zip(_NAMESAKES.split(), _NAMESAKES.split(), strict=True), *_OTHERS]
    for module in modules.split()
}

_SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}

Place = tuple[str, int, int]  # module, number of the node in the walk, number of its change


def main() -> None:
    """Runs the sampled mutations; prints the survivors and their fraction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of module names")
    options = parser.parse_args()
    modules = [name for name in TESTS if not options.only or name.startswith(tuple(options.only))]
    places = [place for module in modules for place in _places(module)]
    random.Random(options.seed).shuffle(places)
    drawn = sorted(places[: options.count])
    with tempfile.TemporaryDirectory(prefix="mutations_") as folder:
        root = Path(folder)
        for part in ("slimrl", "tests", "scripts", "tools", "examples"):
            shutil.copytree(REPOSITORY / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "pyproject.toml", root)
        _preload()
        for tests in dict.fromkeys(tuple(TESTS[module]) for module in modules):
            if not _passes(root, tests):
                sys.exit(f"without a mutation one of these fails: {' '.join(tests)}")
        survivors = [place for place in drawn if _survives(root, place)]
    share = len(survivors) / max(len(drawn), 1)
    print(f"{len(drawn)} of {len(places)} mutations (seed {options.seed}): {len(survivors)} survive, {share:.1%}")


def _preload() -> None:
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() not in (REPOSITORY, Path(__file__).parent)]
    for name in ("torch", "numpy", "pytest", "hypothesis.strategies", "transformers", "safetensors.torch", "pyarrow"):
        __import__(name)


def _survives(root: Path, place: Place) -> bool:
    module, node, change = place
    path = root / "slimrl" / f"{module}.py"
    original = path.read_text()
    tree = ast.parse(original)
    before = ast.unparse(tree)
    _changes(list(_nodes(tree))[node])[change]()
    after = ast.unparse(ast.fix_missing_locations(tree))
    path.write_text(after)
    started = time.monotonic()
    passed = _passes(root, TESTS[module])
    path.write_text(original)
    print(
        f"{'SURVIVES' if passed else 'noticed '} {module} {node}.{change} {time.monotonic() - started:.1f} s",
        flush=True,
    )
    if passed:
        difference = difflib.unified_diff(before.splitlines(), after.splitlines(), n=2, lineterm="")
        print("\n".join(list(difference)[2:]), flush=True)
    return passed


def _passes(root: Path, tests: Sequence[str]) -> bool:
    """Whether the tests pass in a fork that works in `root`; a fork that exceeds `LIMIT_S` is killed and fails."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        sys.path.insert(0, str(root))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        import pytest

        code = 2
        try:
            code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests])
        finally:
            os._exit(int(code))
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _places(module: str) -> Iterator[Place]:
    tree = ast.parse((REPOSITORY / "slimrl" / f"{module}.py").read_text())
    for number, node in enumerate(_nodes(tree)):
        for change in range(len(_changes(node))):
            yield module, number, change


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All executed nodes except error messages, log lines, annotations, decorators and `strict=` of a zip."""
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases") or isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_log_line(child):
                yield from _nodes(child)


def _is_log_line(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger.", "log.", "logging.", "'", '"'))


def _changes(node: ast.AST) -> list[Callable[[], None]]:  # noqa: C901
    """Functions that change a node in place."""
    found: list[Callable[[], None]] = []

    def put(**fields: object) -> None:
        found.append(lambda: [setattr(node, name, value) for name, value in fields.items()])

    def become(other: ast.AST) -> None:
        found.append(lambda: (setattr(node, "__class__", type(other)), node.__dict__.update(vars(other))))

    match node:
        case ast.Compare():
            for place, sign in enumerate(node.ops):
                put(ops=[*node.ops[:place], _SWAPS[type(sign)](), *node.ops[place + 1 :]])
        case ast.BinOp(op=sign) | ast.BoolOp(op=sign) | ast.AugAssign(op=sign) if type(sign) in _SWAPS:
            put(op=_SWAPS[type(sign)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            become(copy.deepcopy(operand))
        case ast.Constant(value=bool() as value):
            put(value=not value)
        case ast.Constant(value=int() | float() as value):
            put(value=value + 1)
            put(value=value - 1)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            put(func=ast.Name(_CALLS[name], ast.Load()))
        case ast.If() | ast.IfExp():
            put(test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            put(value=ast.Constant(None))
        case ast.Break():
            become(ast.Continue())
        case ast.Continue():
            become(ast.Break())
        case ast.Raise() | ast.Expr(value=ast.Call()):
            become(ast.Pass())
    if isinstance(node, ast.AugAssign):
        become(ast.Pass())
    return found


if __name__ == "__main__":
    main()
