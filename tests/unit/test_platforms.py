"""What configs say of platforms: where they run, where not, and what differs there."""

from __future__ import annotations

import platform as machine
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import ConfigError
from harness.gpus.inventory import Gpu, GpuKind
from harness.platforms import (
    Overrides,
    Platform,
    PlatformKind,
    PlatformRequirements,
    Requirement,
    SkipRow,
    apply_layers,
    current_platform,
    override_layers,
    skip_reason,
    written_at,
)

ROOT = Path(__file__).resolve().parents[2]
HOPPER = Platform(kind=PlatformKind.CUDA, archs=("9.0",))
BLACKWELL = Platform(kind=PlatformKind.CUDA, archs=("10.0",))
MIXED = Platform(kind=PlatformKind.CUDA, archs=("8.0", "9.0"))
MI300 = Platform(kind=PlatformKind.ROCM, archs=("gfx942",))
TPU = Platform(kind=PlatformKind.TPU, archs=("v6e",))
XPU = Platform(kind=PlatformKind.XPU)
CPU = Platform(kind=PlatformKind.CPU, archs=("x86_64",))

MATCHES = [
    ("cuda", HOPPER, True),
    ("cuda", MI300, False),
    (" cuda ", HOPPER, True),
    ("cuda>=9.0", HOPPER, True),
    ("cuda>=9.0", BLACKWELL, True),
    ("cuda >= 9.0", BLACKWELL, True),
    ("cuda>9.0", HOPPER, False),
    ("cuda<10.0", HOPPER, True),
    ("cuda<10.0", BLACKWELL, False),
    ("cuda<=9.0", HOPPER, True),
    ("cuda==9.0", HOPPER, True),
    ("cuda:9.0", HOPPER, True),
    ("cuda:9.0", BLACKWELL, False),
    ("cuda>=9.0,<10.0", HOPPER, True),
    ("cuda>=9.0, <10.0", BLACKWELL, False),
    ("cuda>=9.0", MIXED, False),
    ("cuda>=8.0", MIXED, True),
    ("cuda>=9.0", MI300, False),
    ("rocm", MI300, True),
    ("rocm:gfx942", MI300, True),
    ("rocm: gfx942", MI300, True),
    ("rocm:gfx90a", MI300, False),
    ("xpu", XPU, True),
    ("tpu", TPU, True),
    ("tpu:v6e", TPU, True),
    ("tpu:v5p", TPU, False),
    ("cpu", CPU, True),
    ("cpu:x86_64", CPU, True),
    ("cpu:aarch64", CPU, False),
]

FAULTS = [
    ("", "must name a platform, cuda, rocm, xpu, tpu, cpu,"),
    ("cude", "did you mean cuda?"),
    ("CUDA", "did you mean cuda?"),
    ("hopper", "must name a platform"),
    ("cuda9.0", "did you mean cuda?"),
    ("cuda:sm90", "must name a compute capability such as 9.0 after cuda:"),
    ("cuda:", "must name a compute capability"),
    ("cuda:90", "must name a compute capability"),
    ("cuda>=90", "must compare with a compute capability, as in cuda>=9.0"),
    ("cuda>=", "must compare with"),
    ("cuda=9.0", "must compare with"),
    ("cuda>=8.0,9.0", "must compare with"),
    ("cuda>=8.0,", "must compare with"),
    ("cuda 9.0", "must compare with"),
    ("rocm:mi300x", "must name a gfx name such as gfx942 after rocm:"),
    ("rocm>=9.0", "must be rocm or rocm:NAME: only cuda has a compute capability"),
    ("xpu:pvc", "must be xpu alone"),
    ("tpu:6", "must name a generation such as v6e"),
    ("cuda,rocm", "must compare with"),
]


@pytest.mark.parametrize(
    ("text", "platform", "expected"), MATCHES, ids=[f"{text} on {platform}" for text, platform, _ in MATCHES]
)
def test_a_requirement_matches_what_it_names(text: str, platform: Platform, expected: bool) -> None:
    """Kinds, gfx names and compute capabilities compare as they are meant: 10.0 is above 9.0."""
    assert Requirement.parse(text).matches(platform) is expected


@pytest.mark.parametrize(("text", "message"), FAULTS, ids=[text or "(empty)" for text, _ in FAULTS])
def test_a_requirement_that_cannot_be_read_says_what_it_must_be(text: str, message: str) -> None:
    """A mistake in a platform's name or form is told with the form that is meant."""
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        Requirement.parse(text)


@pytest.mark.parametrize("text", ["cuda>=9.0", "rocm:gfx942", "tpu:v6e"])
def test_what_is_not_known_decides_nothing(text: str) -> None:
    """Where the architecture is not known a config neither runs nor is skipped by it: that is an error."""
    requirement = Requirement.parse(text)
    with pytest.raises(ConfigError, match="cannot be decided here"):
        requirement.matches(Platform(kind=requirement.kind))


def gpu(kind: GpuKind, arch: str | None) -> Gpu:
    return Gpu(kind=kind, index=0, uuid="GPU-1", name="a GPU", memory_total=None, arch=arch, selector="0")


HOST = Platform(kind=PlatformKind.CPU, archs=(machine.machine(),))
FOUND = [
    ("no GPU", {}, [], [], False, HOST),
    ("a GPU", {}, [gpu("cuda", "9.0")], [], False, HOPPER),
    ("two alike", {}, [gpu("cuda", "9.0")] * 2, [], False, HOPPER),
    ("two unlike", {}, [gpu("cuda", "9.0"), gpu("cuda", "8.0")], [], False, MIXED),
    ("one of two", {}, [gpu("cuda", "9.0"), gpu("cuda", "8.0")], [gpu("cuda", "9.0")], False, HOPPER),
    ("one unknown", {}, [gpu("cuda", "9.0"), gpu("cuda", None)], [], False, Platform(kind=PlatformKind.CUDA)),
    ("AMD", {}, [gpu("rocm", "gfx942")], [], False, MI300),
    ("Intel", {}, [gpu("xpu", None)], [], False, XPU),
    ("vLLM for the CPU", {}, [gpu("cuda", "9.0")], [], True, HOST),
    ("told to take the CPU", {"VLLM_TARGET_DEVICE": "cpu"}, [gpu("cuda", "9.0")], [], False, HOST),
]


@pytest.mark.parametrize(
    ("env", "gpus", "targets", "cpu_build", "expected"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND]
)
def test_the_platform_is_the_one_vllm_finds(
    tmp_path: Path, env: Mapping[str, str], gpus: list[Gpu], targets: list[Gpu], cpu_build: bool, expected: Platform
) -> None:
    """GPUs make the platform unless vLLM is built or told to take the CPU."""
    assert current_platform(env, gpus, targets, cpu_build=cpu_build, devices=tmp_path) == expected


@pytest.mark.parametrize(
    ("node", "library", "env", "expected"),
    [
        ("vfio/0", True, {"TPU_ACCELERATOR_TYPE": "v6e-8"}, TPU),
        ("accel0", True, {}, Platform(kind=PlatformKind.TPU)),
        ("vfio/0", False, {}, HOST),
        ("vfio/vfio", True, {}, HOST),
    ],
    ids=["v6e", "generation not told", "VFIO without libtpu", "libtpu without a device"],
)
def test_a_tpu_is_a_device_and_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, library: bool, env: dict[str, str], expected: Platform
) -> None:
    """A TPU is found by its device and libtpu together, neither of which is enough."""
    (tmp_path / node).parent.mkdir(exist_ok=True)
    (tmp_path / node).touch()
    if library:
        (tmp_path / "libtpu.py").write_text("raise RuntimeError('must not be imported')\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
    assert current_platform(env, [], devices=tmp_path) == expected


def test_the_platform_is_found_without_torch() -> None:
    """Collection stays instant: neither torch nor vLLM is imported."""
    code = (
        "import os, sys; from harness.gpus.tools import discover; from harness.platforms import current_platform\n"
        "current_platform(os.environ, discover().gpus); print({'torch', 'vllm', 'libtpu'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("kind", "counts"), [("cuda", True), ("rocm", True), ("xpu", True), ("tpu", False), ("cpu", False)]
)
def test_only_gpus_are_counted(kind: str, counts: bool) -> None:
    """On a CPU or TPU no config is skipped for want of GPUs."""
    assert PlatformKind(kind).counts_gpus is counts


def row(when: Any, reason: str = "not supported") -> SkipRow:
    return SkipRow.model_validate({"when": when, "reason": reason})


REASONS = [
    ("nothing said", HOPPER, None, [], None),
    ("runs here", HOPPER, ["cuda>=9.0"], [], None),
    ("one of several", MI300, ["cuda>=9.0", "rocm"], [], None),
    ("runs elsewhere", HOPPER, ["cuda>=10.0", "rocm"], [], "runs on cuda>=10.0, rocm only; this is cuda 9.0"),
    ("skipped", MI300, None, [row("rocm")], "not supported (skipped on rocm; this is rocm gfx942)"),
    ("skipped elsewhere", HOPPER, None, [row("rocm"), row(["cpu", "cuda<9.0"])], None),
    (
        "second row",
        CPU,
        ["cuda"],
        [row("rocm"), row(["xpu", "cpu"], "slow")],
        "slow (skipped on xpu, cpu; this is cpu x86_64)",
    ),
]


@pytest.mark.parametrize(
    ("platform", "platforms", "rows", "expected"), [case[1:] for case in REASONS], ids=[case[0] for case in REASONS]
)
def test_a_skip_names_its_reason(
    platform: Platform, platforms: list[str] | None, rows: list[SkipRow], expected: str | None
) -> None:
    """A config runs unless a skip row or its platforms say otherwise, and the row's reason comes first."""
    needed = None if platforms is None else [Requirement.parse(text) for text in platforms]
    assert skip_reason(platform, needed, rows) == expected


class Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    platforms: PlatformRequirements | None = None
    skip: list[SkipRow] = []
    overrides: Overrides = {}


def test_the_keys_are_read_from_yaml_values() -> None:
    """One platform or a list of them is read, and written back as it was."""
    keys = Keys.model_validate(
        {
            "platforms": ["cuda>=9.0", "rocm:gfx942"],
            "skip": [{"when": "cpu", "reason": "slow"}, {"when": ["xpu", "tpu"], "reason": "no kernel"}],
            "overrides": {"rocm": {"max_tokens": 8}},
        }
    )
    assert keys.platforms is not None
    assert [requirement.kind for requirement in keys.platforms] == ["cuda", "rocm"]
    assert keys.model_dump(mode="json")["platforms"] == ["cuda>=9.0", "rocm:gfx942"]
    assert [list(map(str, row.when)) for row in keys.skip] == [["cpu"], ["xpu", "tpu"]]
    assert Keys.model_validate({"platforms": "cuda"}).platforms == [Requirement.parse("cuda")]


KEY_FAULTS = [
    ("platform", {"platforms": ["cuda", "cude"]}, ("platforms", 1), "must name a platform"),
    ("not text", {"platforms": [9.0]}, ("platforms", 0), "must name a platform"),
    ("no platform", {"platforms": []}, ("platforms",), "at least 1 item"),
    ("when", {"skip": [{"when": "rocm:x", "reason": "r"}]}, ("skip", 0, "when", 0), "gfx name"),
    ("no when", {"skip": [{"reason": "r"}]}, ("skip", 0, "when"), "Field required"),
    ("no reason", {"skip": [{"when": "rocm"}]}, ("skip", 0, "reason"), "Field required"),
    ("empty reason", {"skip": [{"when": "rocm", "reason": ""}]}, ("skip", 0, "reason"), "at least 1 character"),
    ("unknown key", {"skip": [{"when": "rocm", "reason": "r", "if": 1}]}, ("skip", 0, "if"), "Extra inputs"),
    ("override", {"overrides": {"rocn": {}}}, ("overrides",), "rocn: must name a platform.*did you mean rocm"),
    ("override of nothing", {"overrides": {"rocm": 3}}, ("overrides", "rocm"), "valid dictionary"),
    ("override of skip", {"overrides": {"rocm": {"skip": []}}}, ("overrides",), "rocm: skip holds for all platforms"),
]


@pytest.mark.parametrize(
    ("raw", "location", "message"), [case[1:] for case in KEY_FAULTS], ids=[case[0] for case in KEY_FAULTS]
)
def test_a_fault_in_a_key_has_its_place(raw: dict[str, Any], location: tuple[str | int, ...], message: str) -> None:
    """Each fault is reported once, at the value it lies in."""
    with pytest.raises(ValidationError, match=message) as fault:
        Keys.model_validate(raw)
    assert [detail["loc"] for detail in fault.value.errors()] == [location]


def test_the_keys_have_a_schema() -> None:
    """Editors are told that a platform is text, alone or in a list."""
    schema = Keys.model_json_schema()
    (one, many), _ = schema["properties"]["platforms"]["anyOf"][:2], None
    assert (one["type"], many["type"], many["items"]["type"]) == ("string", "array", "string")


RAW = {
    "model_name": "m",
    "max_tokens": 256,
    "env": {"A": "1", "B": "2"},
    "rocm_request_timeout_seconds": 1800,
    "overrides": {
        "rocm": {"max_tokens": 512, "env": {"B": "3"}},
        "rocm:gfx942": {"max_tokens": 1024, "env": {"C": "4"}},
        "cuda>=10.0": {"server_args": "--x"},
    },
}


def merged_on(platform: Platform, raw: Mapping[str, Any] = RAW) -> dict[str, Any]:
    return apply_layers(raw, [layer for layer in override_layers(raw) if layer.requirement.matches(platform)])


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        (HOPPER, {"max_tokens": 256, "env": {"A": "1", "B": "2"}}),
        (BLACKWELL, {"max_tokens": 256, "env": {"A": "1", "B": "2"}, "server_args": "--x"}),
        (
            MI300,
            {"max_tokens": 1024, "env": {"A": "1", "B": "3", "C": "4"}, "request_timeout_seconds": 1800},
        ),
        (
            Platform(kind=PlatformKind.ROCM, archs=("gfx950",)),
            {"max_tokens": 512, "env": {"A": "1", "B": "3"}, "request_timeout_seconds": 1800},
        ),
    ],
    ids=str,
)
def test_overrides_hold_where_they_match(platform: Platform, expected: dict[str, Any]) -> None:
    """Overrides replace keys in the file's order, `env` variable by variable, and vLLM's ROCm key is one of them."""
    before = repr(RAW)
    assert merged_on(platform) == {"model_name": "m", **expected}
    assert repr(RAW) == before


def test_an_override_counts_before_vllms_key() -> None:
    """Where both say how long a request may take on ROCm, the general form holds."""
    raw = {"rocm_request_timeout_seconds": 1800, "overrides": {"rocm": {"request_timeout_seconds": 60}}}
    assert merged_on(MI300, raw) == {"request_timeout_seconds": 60}


def test_an_override_may_bring_the_first_env() -> None:
    """A config without `env` takes that of an override as it is."""
    assert merged_on(MI300, {"overrides": {"rocm": {"env": {"A": "1"}}}}) == {"env": {"A": "1"}}


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (("max_tokens",), ("overrides", "rocm:gfx942", "max_tokens")),
        (("env", "B"), ("overrides", "rocm", "env", "B")),
        (("env", "A"), ("env", "A")),
        (("request_timeout_seconds",), ("rocm_request_timeout_seconds",)),
        (("model_name",), ("model_name",)),
        (("fewshot_dataset",), ("fewshot_dataset",)),
    ],
    ids=lambda location: ".".join(location),
)
def test_a_merged_key_is_found_where_it_is_written(key: tuple[str, ...], place: tuple[str, ...]) -> None:
    """A fault that only shows on a platform points at the line of the override, not at the key it replaces."""
    assert written_at(key, [layer for layer in override_layers(RAW) if layer.requirement.matches(MI300)]) == place
