"""The tables of pass-through flags of the engine and the router."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from slimrl.engines.sglang.server_args import (
    HISTORICAL,
    RESERVED,
    RESERVED_ROUTER,
    render_options,
    router_flags,
    server_flags,
)
from slimrl.engines.sglang.versions import RETIRED_SWITCHES, read_server_flags

# computed from plug-in registries when sglang's parser is built (in 0.5.17 some of them are still in the source)
RUN_TIME_CHOICES = {"sampling_backend", "reasoning_parser", "tool_call_parser", "kv_canary_real_data"}

REAL_TABLE = """
import argparse, json
from slimrl.engines.sglang import cpu_patches
cpu_patches.install()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
ServerArgs.add_cli_args(parser)
print("TABLE" + json.dumps([
    [a.dest, a.option_strings, type(a).__name__, a.type.__name__ if a.type else "str", a.nargs,
     sorted(map(str, a.choices)) if a.choices is not None else None]
    for a in parser._actions]))
"""


@pytest.fixture(scope="module")
def server_table():
    return server_flags()


@pytest.mark.slow
def test_every_flag_read_from_source_matches_the_real_parser():
    output = subprocess.run([sys.executable, "-c", REAL_TABLE], capture_output=True, text=True, timeout=120)
    real = json.loads(output.stdout.partition("TABLE")[2])
    read = {flag.names: flag for flag in read_server_flags()}
    real = [flag for flag in real if not (flag[2] in RETIRED_SWITCHES and flag[4] == 0)]
    assert len(real) == len(read) > 450
    for dest, option_strings, kind, value_type, nargs, choices in real:
        optional = kind == "BooleanOptionalAction"
        flag = read[tuple(name[2:] for name in (option_strings[:1] if optional else option_strings))]
        switch = kind in ("_StoreTrueAction", "DeprecatedStoreTrueAction")
        assert flag.dest == dest
        assert flag.action == ("optional_switch" if optional else "store_true" if switch else "store"), dest
        if flag.action == "store":
            assert (flag.type, flag.nargs) == (value_type, nargs), dest
            if dest not in RUN_TIME_CHOICES or flag.choices is not None:
                assert (sorted(map(str, flag.choices)) if flag.choices is not None else None) == choices, dest


def test_both_tables_are_read_fast():
    started = time.process_time()
    server_flags()
    router_flags()
    assert time.process_time() - started < 1.0  # 0.1 s on an idle core; importing sglang takes 3 s


def test_reading_the_tables_does_not_import_the_engine():
    program = (
        "import sys, slimrl.engines.sglang.server_args as f; f.server_flags();"
        " print({'sglang', 'torch'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert output.stdout.strip() == "set()"


def test_flags_of_known_recipes_exist(server_table):
    recipe = [
        "mem-fraction-static",
        "cuda-graph-bs",
        "cuda-graph-max-bs",
        "log-level",
        "context-length",
        "enable-metrics",
    ]
    recipe += [
        "enable-dp-attention",
        "dp-size",
        "ep-size",
        "moe-a2a-backend",
        "speculative-algorithm",
        "attention-backend",
    ]
    assert [name for name in recipe if name not in server_table] == []
    assert server_table["cuda-graph-bs"].dest == "cuda_graph_bs_decode" and server_table["cuda-graph-bs"].nargs == "+"


def test_flags_set_by_slimrl_are_marked_under_every_spelling(server_table):
    for name in ("model-path", "model", "tp-size", "tensor-parallel-size", "nccl-init-addr", "random-seed"):
        assert server_table[name].managed_by
    assert server_table["mem-fraction-static"].managed_by is None
    for name in ("admin-api-key", "tokenizer-worker-num", "grpc-port"):  # endpoints without the run's key
        assert server_table[name].managed_by
    assert server_table["host"].managed_by is None
    assert server_table["api-key"].managed_by is None
    assert RESERVED.keys() <= {flag.dest for flag in server_table.values()}
    assert RESERVED_ROUTER.keys() <= {flag.dest for flag in router_flags().values()}
    assert set(HISTORICAL) <= set(server_table)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("context-length", "32k", "32 thousand"),
        ("mem-fraction-static", "0.7", "most"),
        ("default-chat-template-kwargs", '{"a": 1}', "[1]"),
        ("forward-hooks", "[]", "{}"),
        ("dtype", "bfloat16", "bf17"),
    ],
)
def test_values_are_checked_before_startup(server_table, name, good, bad):
    assert str(server_table[name].convert(good)) == good
    with pytest.raises(ValueError):
        server_table[name].convert(bad)


def test_options_round_trip_to_their_command_line(server_table):
    options = {
        "tp_size": 2,
        "mem_fraction_static": 0.5,
        "cuda_graph_bs_decode": [1, 2, 4],
        "disable_radix_cache": True,
        "enable_lora": False,
        "dllm_fdfo": False,
        "fp8_gemm_runner_backend": "auto",
        "model_checksum": None,
        "chat_template": None,
    }
    assert render_options(options, server_table) == [
        "--tp-size=2",
        "--mem-fraction-static=0.5",
        "--cuda-graph-bs-decode",
        "1",
        "2",
        "4",
        "--disable-radix-cache",
        "--no-dllm-fdfo",
        "--fp8-gemm-backend=auto",
        "--model-checksum",
    ]


def test_option_missing_from_the_package_is_an_error(server_table):
    with pytest.raises(ValueError, match="no_such_option"):
        render_options({"no_such_option": 1}, server_table)


def test_router_flags_match_the_installed_router():
    table = router_flags()
    assert table["policy"].choices is not None and "cache_aware" in table["policy"].choices
    assert table["disable-retries"].action == "store_true"
    assert table["request-timeout-secs"].managed_by == "--sglang-router-request-timeout-secs"
