"""--keep-server: the server outlives the run on purpose, can be asked, and is stopped by one command."""

from __future__ import annotations

import re
import shlex
import subprocess
import time

import pytest
import requests
from test_tasks import CONFIG, LIST


def test_a_kept_server_can_be_reached_and_stopped(mini_suite) -> None:
    """The run says where it is, with which key, and how to stop it; a later run's sweep leaves it alone."""
    (mini_suite.path / "configs/A.yaml").write_text(CONFIG)
    result = mini_suite.run(LIST, "--keep-server")
    result.assert_outcomes(passed=3)
    kept = re.search(r"kept: (http://127\.0\.0\.1:\d+) serves stand-in, key (\S+): (kill \d+)", result.stdout.str())
    assert kept, result.stdout.str()
    url, key, how = kept.groups()
    try:
        assert mini_suite.run(LIST, f"--base-url={url}").ret == 0
        assert alive(url)
        log = (mini_suite.records()[0] / "A/server.log").read_text()
        assert key not in log
    finally:
        subprocess.run(shlex.split(how), check=True)
    deadline = time.monotonic() + 15
    while alive(url) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(url)


def alive(url: str) -> bool:
    with requests.Session() as session:
        session.trust_env = False
        try:
            return session.get(url + "/health", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False


def test_keeping_servers_of_several_workers_is_refused(mini_suite) -> None:
    """Workers have no terminal to say it on."""
    result = mini_suite.run(LIST, "--keep-server", "-n2")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--keep-server needs one process: leave out -n"])


@pytest.mark.parametrize("fault", ["wrong-answers", "exits-0"])
def test_a_bad_verdict_keeps_what_runs(mini_suite, fault: str) -> None:
    """A model that got worse is what one wants to ask further; a server that did not start cannot be kept."""
    (mini_suite.path / "configs/A.yaml").write_text(CONFIG.replace(" none ", f" {fault} "))
    result = mini_suite.run(LIST, "--keep-server")
    how = re.search(r"kept: .*: (kill \d+)", result.stdout.str())
    assert (how is not None) is (fault == "wrong-answers")
    if how:
        subprocess.run(shlex.split(how.group(1)), check=True)
