"""Buildkite: the run as one annotation of the build, through its agent.

Exit statuses, for `retry: automatic`: 1 is a model that got worse, which no retry mends; 75 is an outage, where the
same job may succeed when run again; 4 is a mistake in a config or an option, and 2 a run that was cancelled.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from urllib.parse import quote

from harness.gates.threshold import Verdict
from harness.reports.documents import RunDocument
from harness.reports.markdown import render_markdown
from harness.reports.untrusted import code, html

LIMIT_BYTES = 1024 * 1024
"""Buildkite takes 1 MiB an annotation."""
AGENT_SECONDS = 30.0
"""A cancelled job has less before it is killed, but then the record is written already."""
STYLES: Mapping[Verdict, str] = {
    Verdict.REGRESSION: "error",
    Verdict.INFRASTRUCTURE: "warning",
    Verdict.PASS: "success",
}


def on_buildkite(env: Mapping[str, str]) -> bool:
    return env.get("BUILDKITE") == "true"


def annotate(run: RunDocument, env: Mapping[str, str]) -> str | None:
    """Annotate the build, replacing what an earlier try of the same lists said; say what went wrong, if anything."""
    text = render_markdown(run, limit_bytes=LIMIT_BYTES, link=_artifact)
    style, context = STYLES[run.verdict], context_of(run.lists, env)
    argv = ["buildkite-agent", "annotate", "--style", style, "--context", context]
    try:
        done = subprocess.run(argv, input=text.encode(), capture_output=True, timeout=AGENT_SECONDS, check=False)
    except FileNotFoundError:
        return "no annotation: there is no buildkite-agent here; run it where the agent runs, or mount it"
    except subprocess.TimeoutExpired:
        return f"no annotation: buildkite-agent did not end within {AGENT_SECONDS:g} s"
    except OSError as error:
        return f"no annotation: buildkite-agent cannot be run: {error.strerror or error}"
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"no annotation: buildkite-agent ended with {done.returncode}: {said}"
    return None


def context_of(lists: Sequence[str], env: Mapping[str, str]) -> str:
    """Name the annotation after the lists; jobs that share one list out among them have one each."""
    names = "+".join(PurePath(path).stem for path in lists)
    job = env.get("BUILDKITE_PARALLEL_JOB")
    share = f"-{job}" if job else ""
    return f"accuracy-gate-{re.sub(r'[^A-Za-z0-9_.+-]', '-', names)[:70]}{share}"


def _artifact(path: str) -> str:
    """Link to an artifact, which is there once the step's `artifact_paths` name it; those lie below the checkout."""
    if PurePath(path).is_absolute():
        return code(path)
    return f'<a href="artifact://{quote(path)}">{html(path)}</a>'
