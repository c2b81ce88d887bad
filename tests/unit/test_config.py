"""Strict YAML configs: what loads, and the one error that each fault gets."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from harness.config import ModelConfig, Scorer, load_config, load_config_file, schema
from harness.errors import ConfigError
from harness.platforms import Platform, PlatformKind

ROOT = Path(__file__).resolve().parents[2]
BASE = "model_name: org/M\naccuracy_threshold: 0.5\n"


def load(tmp_path: Path, text: str | bytes) -> ModelConfig:
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path)


FAULTS = {
    "unknown key": (BASE + "tolerence: 0.03\n", "c.yaml:3:1: unknown key tolerence; did you mean tolerance?"),
    "unknown key, nothing near": (BASE + "zzz: 1\n", "unknown key zzz; known: accuracy_threshold,"),
    "duplicate key": (BASE + "model_name: b\n", "c.yaml:3:1: model_name stands twice, first on line 1"),
    "duplicate nested key": (BASE + "env: {A: 1, B: 2, A: 3}\n", "c.yaml:3:19: A stands twice"),
    "percent as text": ("model_name: m\naccuracy_threshold: 54%\n", "input should be a valid number"),
    "percent as number": ("model_name: m\naccuracy_threshold: 54\n", "between 0 and 1; did you mean 0.54?"),
    "tolerance of 8": (BASE + "tolerance: 8\n", "c.yaml:3:1: tolerance: must lie between 0 and 1"),
    "negative tolerance": (BASE + "tolerance: -0.1\n", "tolerance: must lie between 0 and 1"),
    "YAML 1.1 boolean": (BASE + "num_questions: on\n", "`on` is read as bool by some"),
    "YAML 1.1 octal": (BASE + "num_fewshot: 010\n", "c.yaml:3:14: `010` is read as int"),
    "YAML 1.1 sexagesimal": (BASE + "num_questions: 10:30\n", "`10:30` is read as int"),
    "not a number": ("model_name: m\naccuracy_threshold: .nan\n", "`.nan` is read as float"),
    "comment without space": (BASE + "tolerance: 0.08#x\n", 'valid number, got "0.08#x"'),
    "true for an integer": (BASE + "num_questions: true\n", "num_questions: input should be a valid integer, got true"),
    "quoted integer": (BASE + 'num_questions: "8"\n', "num_questions: input should be a valid integer"),
    "float for an integer": (BASE + "num_questions: 8.0\n", "num_questions: input should be a valid integer"),
    "no questions": (BASE + "num_questions: 0\n", "greater than or equal to 1, got 0"),
    "too many questions": (BASE + "num_questions: 1320\n", "c.yaml:3:1: num_questions: gsm8k has 1319 questions"),
    "too many smoke questions": (BASE + "task: smoke\nnum_questions: 21\n", "smoke has 20 questions"),
    "negative temperature": (BASE + "temperature: -1\n", "temperature: input should be greater than or equal to 0"),
    "zero seconds": (BASE + "request_timeout_seconds: 0\n", "greater than 0"),
    "acceptance length below 1": (BASE + "min_acceptance_length: 0.5\n", "greater than or equal to 1"),
    "unknown task": (
        BASE + "task: gsm8\n",
        "task: input should be 'gsm8k', 'smoke', 'checks', 'choice' or 'perplexity', got \"gsm8\"",
    ),
    "missing key": ("model_name: m\n", "accuracy_threshold is missing"),
    "empty model": ("model_name: ''\naccuracy_threshold: 0.5\n", "model_name: string should have at least 1"),
    "open quote in server_args": (BASE + 'server_args: "--x \'y"\n', "be split into arguments: No closing quotation"),
    "JSON that lost its quotes": (
        BASE + 'server_args: \'--speculative-config {"method":"mtp"}\'\n',
        "c.yaml:3:1: server_args: the value after --speculative-config is not JSON",
    ),
    "JSON after an equals sign": (BASE + "server_args: '--hf-overrides={a:1}'\n", "after --hf-overrides is not JSON"),
    "a flag the harness sets": (BASE + "server_args: --port 8000\n", "--port is set by the harness"),
    "boolean in env": (BASE + "env:\n  A: 1\n  B: true\n", "c.yaml:3:1: env B: true has no one spelling"),
    "YAML 1.1 boolean in env": (BASE + "env:\n  A: on\n", "c.yaml:4:6: `on` is read as bool"),
    "nothing in env": (BASE + "env:\n  A:\n", "env A: null has no one spelling"),
    "list in env": (BASE + "env:\n  A: [1]\n", "c.yaml:4:3: env.A: input should be a valid string"),
    "the harness's variable": (BASE + "env:\n  VLLM_API_KEY: x\n", "env VLLM_API_KEY is set by the harness"),
    "chat setting without chat": (BASE + "reasoning_effort: low\n", "c.yaml:3:1: reasoning_effort needs use_chat"),
    "examples without questions": (BASE + "fewshot_dataset: x.jsonl\n", "fewshot_dataset needs a dataset"),
    "empty file": ("", "c.yaml:1: the file is empty"),
    "a list": ("- a\n", "c.yaml:1: the file is no mapping"),
    "two documents": (BASE + "---\n" + BASE, "holds more than one document"),
    "broken YAML": ("model_name: [a\n", "c.yaml:2:1: not YAML:"),
    "a tab": ("model_name: m\n\taccuracy_threshold: 1\n", "not YAML: found character '\\t'"),
    "key that is no text": (BASE + "8: x\n", "c.yaml:3:1: the key 8 is not text"),
    "custom tag": (BASE + "seed: !!python/name:os.system\n", "is not used here"),
    "self-holding alias": (BASE + "env: &a {A: *a}\n", "an alias that holds itself"),
    "not UTF-8": (b"model_name: \xff\n", "is not UTF-8 (byte 12)"),
    "control character": ("model_name: a\x01\n", "not YAML: "),
}


@pytest.mark.parametrize(("text", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_error_with_file_line_and_remedy(tmp_path: Path, text: str | bytes, expected: str) -> None:
    """Whatever is wrong with a YAML, the error names the file, the place and what to do."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert expected in str(caught.value)
    assert all("c.yaml" in line for line in caught.value.faults)
    assert not any("\n" in line for line in caught.value.faults)


def test_every_fault_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    """Two misspelt keys are two lines, so that a file is mended in one go."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, BASE + "tolerence: 0.03\nmin_acceptence_length: 2.0\n")
    assert [line.split("did you mean ")[1] for line in caught.value.faults] == ["tolerance?", "min_acceptance_length?"]


def test_defaults_are_those_of_vllms_suite(tmp_path: Path) -> None:
    """A YAML that says nothing more means what it means to vLLM's own suite."""
    config = load(tmp_path, BASE)
    assert (config.tolerance, config.num_fewshot, config.max_tokens) == (0.08, 5, 256)
    assert (config.temperature, config.seed, config.use_chat_completions) == (0.0, 42, False)
    assert (config.request_timeout_seconds, config.startup_max_wait_seconds) == (600.0, 1200.0)
    assert (config.max_concurrency, config.max_error_rate, config.scorer) == (256, 0.0, Scorer.NUMERIC)


@pytest.mark.parametrize("wrap", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n"), lambda t: t.rstrip("\n")])
def test_files_from_any_editor_load(tmp_path: Path, wrap: object) -> None:
    """A byte order mark, CRLF and a missing final newline change nothing."""
    assert callable(wrap)
    assert load(tmp_path, wrap(BASE)) == load(tmp_path, BASE)


def test_numbers_in_env_reach_the_server_as_they_are_written(tmp_path: Path) -> None:
    """1.10 stays 1.10: a variable is text."""
    config = load(tmp_path, BASE + 'env:\n  A: 1\n  B: 1.10\n  C: "on"\n  D: DEBUG\n')
    assert config.env == {"A": "1", "B": "1.10", "C": "on", "D": "DEBUG"}


def test_server_args_and_env_left_empty_are_none(tmp_path: Path) -> None:
    """vLLM's suite takes a key without a value as left out."""
    assert load(tmp_path, BASE + "server_args:\nenv:\n") == load(tmp_path, BASE)


def test_json_over_several_lines_stays_json(tmp_path: Path) -> None:
    """A folded block keeps JSON in single quotes whole, blanks included."""
    text = BASE + (
        'server_args: >-\n  --max-model-len 8192\n  --speculative-config \'{"method":"dspark",\n'
        '  "model":"org/M",\n  "num_speculative_tokens":7}\'\n'
    )
    expected = '{"method":"dspark", "model":"org/M", "num_speculative_tokens":7}'
    assert load(tmp_path, text).arguments == ("--max-model-len", "8192", "--speculative-config", expected)


def test_an_exponent_is_a_number(tmp_path: Path) -> None:
    """PyYAML alone reads 8e-2 as text."""
    assert load(tmp_path, BASE + "tolerance: 8e-2\n").tolerance == 0.08


def test_the_floor_is_exact(tmp_path: Path) -> None:
    """0.92 - 0.08 is 0.84, which floats deny."""
    config = load(tmp_path, "model_name: m\naccuracy_threshold: 0.92\n")
    assert str(config.floor) == "0.84"


def test_the_schema_file_is_fresh() -> None:
    """configs/schema.json is what the config model says today."""
    assert (ROOT / "configs/schema.json").read_text() == schema()


SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[p.stem for p in SHIPPED])
def test_a_shipped_config_loads_and_fits_the_schema(path: Path) -> None:
    """Every shipped YAML loads, matches the schema and tells editors where that is."""
    load_config(path)
    text = path.read_text()
    jsonschema.validate(yaml.safe_load(text), yaml.safe_load(schema()))
    modeline = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / modeline).resolve() == ROOT / "configs/schema.json"


TASKS = BASE + "tasks:\n"
TASK_FAULTS = {
    "no name": (TASKS + "  - num_fewshot: 0\n", "c.yaml:3:1: tasks: each row needs a task, a dataset or a plain name"),
    "one name twice": (TASKS + "  - task: gsm8k\n  - task: gsm8k\n", "two rows are named gsm8k: give each a name"),
    "a server's key": (TASKS + "  - task: gsm8k\n    env: {A: 1}\n", "env holds for the server: move it out"),
    "unknown key in a row": (TASKS + "  - task: gsm8k\n    num_shots: 5\n", "c.yaml:5:5: unknown key num_shots"),
    "wrong value in a row": (TASKS + "  - task: gsm8k\n    num_fewshot: -1\n", "c.yaml:5:5: num_fewshot: input should"),
    "skip row without reason": (BASE + "skip:\n  - when: rocm\n", "skip.0.reason is missing: every row needs it"),
    "unknown platform": (BASE + "platforms: [gpu]\n", "must name a platform"),
    "override that is wrong": (BASE + "overrides:\n  rocm:\n    tolerence: 1\n", "c.yaml:5:5: unknown key tolerence"),
    "two time-outs for ROCm": (
        BASE + "rocm_request_timeout_seconds: 9\noverrides: {rocm: {request_timeout_seconds: 8}}\n",
        "says it too: remove one",
    ),
    "parallel size that is none": (
        BASE + "server_args: --tensor-parallel-size two\n",
        "server_args: --tensor-parallel",
    ),
    "GPUs chosen behind our back": (BASE + "env: {CUDA_VISIBLE_DEVICES: 0}\n", "CUDA_VISIBLE_DEVICES is set by the"),
}


@pytest.mark.parametrize(("text", "expected"), TASK_FAULTS.values(), ids=TASK_FAULTS)
def test_a_fault_in_a_row_is_named_where_it_stands(tmp_path: Path, text: str, expected: str) -> None:
    """Rows of tasks, skips and overrides are checked like the rest, on whatever machine."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert expected in str(caught.value)


def test_a_row_replaces_what_it_names(tmp_path: Path) -> None:
    """Each task is the file's keys with its own on top, named by its name, dataset or task."""
    path = tmp_path / "c.yaml"
    path.write_text(
        BASE
        + "num_fewshot: 3\ntasks:\n  - task: smoke\n    accuracy_threshold: 0.9\n  - name: zero\n    num_fewshot: 0\n"
    )
    file = load_config_file(path)
    assert file.task_names == ("smoke", "zero")
    smoke, zero = (file.on(None, name) for name in file.task_names)
    assert (smoke.task, smoke.accuracy_threshold, smoke.num_fewshot) == ("smoke", 0.9, 3)
    assert (zero.task, zero.accuracy_threshold, zero.num_fewshot) == ("gsm8k", 0.5, 0)


def test_overrides_hold_on_their_platform_alone(tmp_path: Path) -> None:
    """vLLM's ROCm time-out and the general form replace keys there; env is merged by variable."""
    path = tmp_path / "c.yaml"
    path.write_text(
        BASE
        + "env: {A: 1, B: 2}\nrocm_request_timeout_seconds: 1800\nrequest_timeout_seconds: 900\n"
        + "overrides: {rocm: {env: {B: 3.0}, accuracy_threshold: 0.4}}\n"
    )
    file = load_config_file(path)
    rocm = file.on(Platform(kind=PlatformKind.ROCM, archs=("gfx942",)))
    cuda = file.on(Platform(kind=PlatformKind.CUDA, archs=("9.0",)))
    assert (rocm.request_timeout_seconds, rocm.env, rocm.accuracy_threshold) == (1800.0, {"A": "1", "B": "3.0"}, 0.4)
    assert (cuda.request_timeout_seconds, cuda.env, cuda.accuracy_threshold) == (900.0, {"A": "1", "B": "2"}, 0.5)
