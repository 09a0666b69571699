"""The environment of Ray before it is imported, and the folder of compiled kernels."""

import logging
import os
import tempfile

import pytest
from ray._private import ray_constants

from slimrl.platform.launch_env import kernel_cache, prepare_ray_environment

NAMES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
METRICS = "RAY_enable_metrics_collection"
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@pytest.fixture
def environment(monkeypatch):
    for name in (*NAMES, METRICS, LOOPBACK):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def prepared() -> dict[str, str]:
    prepare_ray_environment()
    return {name: os.environ[name] for name in (*NAMES, METRICS, LOOPBACK) if name in os.environ}


def test_local_cluster_requires_a_token_and_disables_metrics_without_one(environment):
    found = prepared()
    assert len(found.pop("RAY_AUTH_TOKEN")) == 64
    assert found == {
        "RAY_AUTH_MODE": "token",
        "AUTOSCALER_METRIC_PORT": "-1",
        "DASHBOARD_METRIC_PORT": "-1",
        METRICS: "0",
        LOOPBACK: "0",
    }


def test_existing_cluster_is_left_unchanged(environment):
    environment.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert prepared() == {"RAY_ADDRESS": "10.0.0.1:6379"}


def test_environment_of_the_user_takes_precedence(environment):
    environment.setenv("RAY_AUTH_MODE", "disabled")
    environment.setenv("DASHBOARD_METRIC_PORT", "44227")
    found = prepared()
    assert (found["RAY_AUTH_MODE"], found["DASHBOARD_METRIC_PORT"]) == ("disabled", "44227")
    assert "RAY_AUTH_TOKEN" not in found


def test_ray_still_supports_the_loopback_variable():
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == LOOPBACK


def test_kernels_are_cached_in_a_private_folder_or_not_at_all(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / f"torchinductor_{os.getuid()}"
    assert kernel_cache({"TORCHINDUCTOR_CACHE_DIR": "/mine"}) == {} and not path.exists()
    assert kernel_cache({}) == {"TORCHINDUCTOR_CACHE_DIR": str(path)}
    path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert kernel_cache({}) == {}
    (message,) = caplog.messages
    assert message == (
        f"compiled kernels are not cached: {path} can be written to by others (mode 777); remove it or set"
        " TORCHINDUCTOR_CACHE_DIR"
    )
