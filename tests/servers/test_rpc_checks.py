"""`startup_rpc_checks`: workers that are well, workers that are not, and an endpoint that is not there."""

from __future__ import annotations

import pytest
from loopback import Reply, loopback_server

from harness.errors import ServerError
from harness.gates.threshold import Gate, Verdict
from harness.servers.endpoint import Endpoint


def check(reply: Reply) -> Gate:
    with loopback_server(lambda body, n: Reply(), posts={"/collective_rpc": reply}) as server:
        endpoint = Endpoint(base_url=server.base_url, model="m", api_key="k")
        return endpoint.check_workers(["check_slots"])[0]


WELL = {
    "no body": Reply(),
    "nothing from each worker": Reply(body={"results": [None, None]}),
    "no worker": Reply(body={"results": []}),
}


@pytest.mark.parametrize("reply", WELL.values(), ids=WELL)
def test_workers_with_nothing_to_say_are_well(reply: Reply) -> None:
    """A check passes when no worker names a fault, and is named in the result."""
    gate = check(reply)
    assert (gate.name, gate.verdict) == ("startup check check_slots", Verdict.PASS)


def test_a_worker_that_names_a_fault_is_a_regression() -> None:
    """What the workers say is in the message, once."""
    gate = check(Reply(body={"results": [None, "3 slots differ", "3 slots differ"]}))
    assert gate.verdict is Verdict.REGRESSION
    assert gate.message == "check_slots: 3 slots differ"


FAULTS = {
    "no development mode": (Reply(status=404, body={"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE"),
    "method unknown": (Reply(status=500, body="no method check_slots"), "HTTP 500: no method check_slots"),
    "HTML": (Reply(body="<html>"), "no list of results: <html>"),
}


@pytest.mark.parametrize(("reply", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_check_that_could_not_be_made_is_an_outage(reply: Reply, expected: str) -> None:
    """A check that was not made is never passed; the remedy is named."""
    with pytest.raises(ServerError, match="startup_rpc_checks: ") as caught:
        check(reply)
    assert expected in str(caught.value)


def test_no_checks_ask_nothing() -> None:
    """A config without checks does not need the endpoint."""
    assert Endpoint(base_url="http://127.0.0.1:9", model="m", api_key=None).check_workers([]) == ()
