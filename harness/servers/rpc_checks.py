"""`startup_rpc_checks`: methods of the workers, called over vLLM's development endpoint once the server is ready."""

from __future__ import annotations

from collections.abc import Sequence

import requests

from harness.backends.openai_http import error_message
from harness.errors import ServerError
from harness.gates.threshold import Gate, Verdict

TIMEOUT_SECONDS = 600


def run_rpc_checks(methods: Sequence[str], base_url: str, api_key: str | None) -> tuple[Gate, ...]:
    """Call each method on all workers; a worker answers nothing when all is well, else what is wrong.

    Raises ServerError where the endpoint cannot be called.
    """
    return tuple(_check(method, base_url, api_key) for method in methods)


def _check(method: str, base_url: str, api_key: str | None) -> Gate:
    url = base_url + "/collective_rpc"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with requests.Session() as session:
        session.trust_env = False
        try:
            reply = session.post(url, json={"method": method}, headers=headers, timeout=TIMEOUT_SECONDS)
        except requests.RequestException as error:
            raise ServerError(f"startup_rpc_checks: {method}: {error}") from error
    if reply.status_code == 404:
        raise ServerError(f'startup_rpc_checks: {url} is not there: set env VLLM_SERVER_DEV_MODE: "1"')
    if reply.status_code != 200:
        why = error_message(reply.content)
        raise ServerError(f"startup_rpc_checks: {method}: HTTP {reply.status_code}: {why}")
    wrong = [str(result) for result in _results(reply) if result]
    verdict = Verdict.REGRESSION if wrong else Verdict.PASS
    message = f"{method}: {'; '.join(dict.fromkeys(wrong)) or 'all workers are well'}"
    return Gate(name=f"startup check {method}", verdict=verdict, message=message)


def _results(reply: requests.Response) -> Sequence[object]:
    """A body that is empty means that no worker had anything to say."""
    if not reply.content:
        return ()
    try:
        results = reply.json()["results"]
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"startup_rpc_checks: no list of results: {error_message(reply.content)}") from error
    return results if isinstance(results, list) else ()
