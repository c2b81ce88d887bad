"""`accuracy-gate gpus`, with a stand-in for nvidia-smi and real leases."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from harness.commands.gpus_command import add_options, run
from harness.gpus.leases import GpuLeases
from harness.gpus.tickets import VARIABLE
from harness.gpus.tools import discover

ROWS = "0, GPU-aaaa, 143771, 9.0, Disabled, NVIDIA H200\n1, GPU-bbbb, 143771, 9.0, Disabled, NVIDIA H200\n"


def put_tool(folder: Path, body: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose only tool is a stand-in that tells of two GPUs, and a folder of leases."""
    put_tool(tmp_path, f"printf '{ROWS}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "leases"))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert run(parser.parse_args(options)) == 0
    return capsys.readouterr().out


def test_free_gpus_are_held_by_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU has a line with its name and memory; what cannot be read is a question mark."""
    lines = told(capsys).splitlines()
    assert [line.split() for line in lines[1:]] == [
        [n, "NVIDIA", "H200", "?", "of", "140.4", "nobody"] for n in ("0", "1")
    ]


def test_holders_and_shares_stand_beside_their_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Who has a GPU since when and how much of it is told, also to a program."""
    gpus = discover().gpus
    with (
        GpuLeases().lease(gpus[:1], what="half \x1b[31m one", share=0.5),
        GpuLeases().lease(gpus[:1], what="other", share=0.25),
        GpuLeases().lease(gpus, what="whole"),
    ):
        text, document = told(capsys), json.loads(told(capsys, "--format", "json"))
    lines = text.splitlines()
    assert f"pid {os.getpid()}, half \\x1b[31m one, 0.5 of it, for 0 min (since " in lines[1]
    assert f"pid {os.getpid()}, other, 0.25 of it" in lines[2]
    assert f"pid {os.getpid()}, whole, for 0 min" in lines[3]
    held = [[(one["what"], one["share"], one["place"]) for one in gpu["holders"]] for gpu in document["gpus"]]
    assert held == [[("half \x1b[31m one", 0.5, 0), ("other", 0.25, 1)], [("whole", None, 0)]]
    assert document["waiting"] == []


def test_those_in_line_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever waits is listed with what it needs."""
    gpus, seen = discover().gpus, []

    class Enough(Exception):
        pass

    def look(text: str) -> None:
        seen.extend([told(capsys), told(capsys, "--format", "json")])
        raise Enough

    leases = GpuLeases()
    with leases.lease(gpus[:1], what="first"), pytest.raises(Enough):
        leases.lease(gpus, count=2, what="second", waiting=look).__enter__()
    assert f"waiting: pid {os.getpid()}, second, for 0 min" in seen[0]
    assert "2 whole GPUs among 0, 1" in seen[0]
    (waiting,) = json.loads(seen[1])["waiting"]
    assert (waiting["what"], waiting["count"], waiting["candidates"]) == ("second", 2, ["GPU-aaaa", "GPU-bbbb"])


def test_a_lease_on_a_gpu_that_is_not_seen_is_told(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What another container holds is not left out because its GPU is not visible from here."""
    gpus = discover().gpus
    put_tool(machine, f"printf '{ROWS.splitlines()[0]}\\n'")
    with GpuLeases().lease(gpus[1:], what="theirs"):
        assert f"GPU-bbbb, not seen from here: pid {os.getpid()}, theirs" in told(capsys)
        assert [one["uuid"] for one in json.loads(told(capsys, "--format", "json"))["elsewhere"]] == ["GPU-bbbb"]


@pytest.mark.parametrize("body", ["exit 9", None], ids=["a tool that fails", "no tool"])
def test_a_machine_without_gpus_says_why(machine: Path, capsys: pytest.CaptureFixture[str], body: str | None) -> None:
    """Without GPUs the reasons are told, and that is no error."""
    (machine / "nvidia-smi").unlink()
    if body is not None:
        put_tool(machine, body)
    text = told(capsys)
    assert text.startswith("no GPU was found")
    assert ("nvidia-smi failed with exit code 9" in text) == (body is not None)
    assert len(json.loads(told(capsys, "--format", "json"))["faults"]) == (body is not None)
