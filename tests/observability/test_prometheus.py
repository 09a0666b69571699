"""The Prometheus endpoint: content of a scrape, its port, and the file with all scrape targets."""

import dataclasses
import json
import math
import socket
import urllib.request

import pytest

from slimrl.arguments import Arguments
from slimrl.observability.metrics.prometheus import PrometheusError, Target, gauge_name, scrape_targets, write_targets
from slimrl.observability.run_log import RunLog
from slimrl.observability.summary import load_summary
from tests.observability.test_run_log import Result, record


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def scrape(port: int) -> dict[str, float]:
    """Values by the exact names of the metrics, as a Prometheus server would read them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge" and family.documentation
        for sample in family.samples:
            assert sample.name == gauge_name(sample.labels["metric"])
            assert sample.labels["run"] == "named"
            found[sample.labels["metric"]] = sample.value
    return found


def test_scrape_shows_the_summary_and_the_port_is_freed_afterwards(tmp_path):
    port = free_port()
    args = Arguments(run_dir=str(tmp_path / "named"), prometheus_port=port, num_steps_per_rollout=1)
    with RunLog.open(args, {}) as log:
        log.begin(0)
        assert scrape(port) == {"train/step": 0, "eval/step": 0, "rollout/step": 0}
        log.step(record(0))
        log.step(record(1, train=[{"loss": math.nan, "tokens": 200.0}], memory={"driver_rss_gib": 0.25}))
        log.evaluation("after", 2, {"addition": Result(0.9)})
        found, step = scrape(port), load_summary(tmp_path / "named")["steps"][1]
    assert found["rollout/raw_reward"] == step["reward"] == 0.51
    assert found["rollout/response_len/mean"] == step["rollout/response_len/mean"]
    assert found["perf/generate_time"] == step["seconds"]["generate"]
    assert found["perf/wait_time_ratio"] == step["perf/wait_time_ratio"]
    assert found["train/tokens"] == step["tokens"] and math.isnan(found["train/loss"]) and step["loss"] is None
    assert found["memory/driver_rss_gib"] == step["memory"]["driver_rss_gib"]
    assert found["eval/addition-truncated_ratio"] == 0.0 and found["eval/addition"] == 0.9
    assert (found["rollout/step"], found["train/step"], found["eval/step"]) == (1, 1, 2)
    socket.create_server(("127.0.0.1", port)).close()


def test_metric_missing_from_a_rollout_is_not_shown_for_it(tmp_path):
    port = free_port()
    args = Arguments(run_dir=str(tmp_path / "named"), prometheus_port=port, num_steps_per_rollout=2)
    first = {"rollout/raw_reward": 0.5, "rollout/zero_std/count_1": 3.0, "perf/save_time": 2.0}
    with RunLog.open(args, {}) as log:
        log.evaluation("before", 0, {"addition": Result(0.4)})
        log.step(record(0, rollout=first, train=[{"loss": 1.0}, {"loss": 2.0, "only_here": 3.0}]))
        log.phase(0, "evaluate", 7.0)
        shown = scrape(port)
        log.step(record(1, rollout={"rollout/raw_reward": 0.75}, train=[{"loss": 4.0}]))
        found = scrape(port)
    assert (shown["rollout/zero_std/count_1"], shown["perf/save_time"], shown["perf/evaluate_time"]) == (3.0, 2.0, 7.0)
    assert shown["train/only_here"] == 3.0
    assert (found["rollout/step"], found["rollout/raw_reward"], found["train/loss"]) == (1, 0.75, 4.0)
    gone = {"rollout/zero_std/count_1", "perf/save_time", "perf/evaluate_time", "train/only_here"}
    assert not gone & found.keys()
    assert found["eval/addition"] == 0.4  # the last evaluation is still shown


def test_exporter_binds_loopback_unless_an_address_is_given(tmp_path):
    port = free_port()
    args = Arguments(run_dir=str(tmp_path / "named"), prometheus_port=port)
    address = socket.gethostbyname(socket.gethostname())
    with RunLog.open(args, {}):
        if not address.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((address, port), timeout=2)
    with RunLog.open(dataclasses.replace(args, prometheus_host="0.0.0.0"), {}):
        socket.create_connection((address, port), timeout=2).close()


def test_port_taken_after_the_check_is_one_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PrometheusError, match=f"--prometheus-port {port} on 127.0.0.1 cannot be opened .* give"):
            RunLog.open(Arguments(run_dir=str(tmp_path), prometheus_port=port), {})


@pytest.mark.parametrize(
    ("name", "gauge"),
    [
        ("rollout/response_len/mean", "slimrl_rollout_response_len_mean"),
        ("eval/aime-2024-pass@16", "slimrl_eval_aime_2024_pass_16"),
        ("train/lr-pg_0", "slimrl_train_lr_pg_0"),
    ],
)
def test_metric_names_are_converted_for_prometheus(name, gauge):
    assert gauge_name(name) == gauge


def test_colliding_names_are_distinguished_by_a_label(tmp_path):
    port = free_port()
    with RunLog.open(Arguments(run_dir=str(tmp_path / "named"), prometheus_port=port), {}) as log:
        log.step(record(0, rollout={"rollout/raw_reward": 0.5, "rollout/a-b": 1.0, "rollout/a_b": 2.0}))
        found = scrape(port)
    assert (found["rollout/a-b"], found["rollout/a_b"]) == (1.0, 2.0)


def test_every_process_with_metrics_is_a_target(tmp_path):
    urls = ["http://10.0.0.2:20001", "http://10.0.0.3:20002/"]
    args = Arguments(run_dir=str(tmp_path), prometheus_port=9400)
    assert scrape_targets(args, urls, "10.0.0.1", "10.0.0.2") == [Target("slimrl", "127.0.0.1:9400")]
    args = Arguments(sglang_options={"enable_metrics": True}, router_options={"prometheus_port": 9401})
    assert scrape_targets(args, urls, "10.0.0.1", "10.0.0.2") == [
        Target("sglang", "10.0.0.2:20001"),
        Target("sglang", "10.0.0.3:20002"),
        Target("router", "127.0.0.1:9401"),
    ]
    args.router_options["prometheus_host"] = "0.0.0.0"
    assert scrape_targets(args, urls, "10.0.0.1", "10.0.0.2")[-1] == Target("router", "10.0.0.2:9401")
    assert scrape_targets(Arguments(), urls, "10.0.0.1", "10.0.0.2") == []
    with RunLog(tmp_path / "run", versions={}) as log:
        log.announce(scrape_targets(args, urls, "10.0.0.1", "10.0.0.2"))
    assert load_summary(tmp_path / "run")["paths"]["prometheus"] == str(tmp_path / "run" / "prometheus.json")


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "10.0.0.1:9400"), ("::", "10.0.0.1:9400"), ("10.9.9.9", "10.9.9.9:9400"), ("::1", "[::1]:9400")],
)
def test_target_has_a_reachable_address(host, address):
    args = Arguments(prometheus_port=9400, prometheus_host=host)
    assert scrape_targets(args, [], "10.0.0.1", "10.0.0.2") == [Target("slimrl", address)]
    options = {"prometheus_port": 9400, "prometheus_host": host}
    (target,) = scrape_targets(Arguments(router_options=options), ["http://s:1"], "10.0.0.2", "10.0.0.1")
    assert target == Target("router", address)


def test_targets_have_the_prometheus_format(tmp_path):
    write_targets(tmp_path / "prometheus.json", "named", [Target("slimrl", "127.0.0.1:9400"), Target("sglang", "h:1")])
    assert json.loads((tmp_path / "prometheus.json").read_text()) == [
        {
            "targets": ["127.0.0.1:9400"],
            "labels": {"job": "slimrl", "run": "named", "__metrics_path__": "/metrics"},
        },
        {"targets": ["h:1"], "labels": {"job": "sglang", "run": "named", "__metrics_path__": "/metrics"}},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus.json"]
