"""Responses to requests of a shared adapter have the version that the request named, not that of the server."""

from __future__ import annotations

from slimrl.engines.sglang.adapters import answer_with_version


def test_every_response_of_a_batch_has_the_version_of_its_request():
    answers = [
        {"text": "a", "meta_info": {"id": "1", "weight_version": "default", "weight_versions": [["default", 1]]}},
        {"text": "b", "meta_info": {"id": "2", "weight_version": "default"}},
        {"text": "c", "meta_info": {"id": "3"}},  # of a server that reports none
    ]
    assert answer_with_version(answers, "7") == [
        {"text": "a", "meta_info": {"id": "1", "weight_version": "7"}},
        {"text": "b", "meta_info": {"id": "2", "weight_version": "7"}},
        {"text": "c", "meta_info": {"id": "3"}},
    ]
    completion = {"choices": [], "metadata": {"weight_version": "default"}}
    assert answer_with_version(completion, "7") == {"choices": [], "metadata": {"weight_version": "7"}}
    assert answer_with_version("plain text", "7") == "plain text"
