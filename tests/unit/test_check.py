"""`accuracy-gate check`: what it finds in lists and configs, where, how grave, and what it leaves alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.check import read_flags
from harness.commands.check_command import add_options, run

BASE = "model_name: org/M\naccuracy_threshold: 0.5\n"
TIGHT = "tolerance: 0.03\n"
"""Wide enough for 1,319 questions, and not noted as wide."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What one run of the command printed and returned."""

    code: int
    lines: list[str]
    """Findings alone, paths relative to the folder."""
    summary: str

    @property
    def grave(self) -> list[str]:
        return [line for line in self.lines if ": note: " not in line]


Check = Callable[..., Checked]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Write files into the working directory and check the lists named, by default all of them."""
    monkeypatch.chdir(tmp_path)

    def write_and_run(files: dict[str, str], *lists: str) -> Checked:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        parser = argparse.ArgumentParser()
        add_options(parser)
        code = run(parser.parse_args(lists or [name for name in files if name.endswith(".txt")]))
        *lines, summary = capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()
        return Checked(code=code, lines=lines, summary=summary)

    return write_and_run


def one(text: str) -> dict[str, str]:
    return {"c.yaml": text, "l.txt": "c.yaml\n"}


FOUND = {
    "floor below 0": (
        "model_name: m\naccuracy_threshold: 0.05\n",
        "c.yaml:2:1: warning: the floor cannot fail: accuracy_threshold 0.05 less tolerance 0.08 is -0.03",
    ),
    "floor of 0": (
        "model_name: m\naccuracy_threshold: 0.08\n",
        "c.yaml:2:1: warning: the floor cannot fail: accuracy_threshold 0.08 less tolerance 0.08 is 0.00",
    ),
    "tolerance within noise": (
        BASE + "tolerance: 0.02\n",
        "c.yaml:3:1: warning: tolerance 0.02 is under the noise: 2 binomial standard errors are 0.028 at 1319",
    ),
    "the default tolerance at few questions": (
        BASE + "num_questions: 100\n",
        "c.yaml:1:1: warning: tolerance 0.08 is under the noise: 2 binomial standard errors are 0.100 at 100",
    ),
    "no speculation": (
        BASE + TIGHT + "min_acceptance_length: 1.5\n",
        "c.yaml:4:1: error: min_acceptance_length needs speculative decoding: server_args hold no",
    ),
    "no room": (
        BASE + TIGHT + "max_tokens: 4096\nserver_args: --max-model-len 4096\n",
        "c.yaml:4:1: error: max_tokens 4096 leaves no room for a prompt in --max-model-len 4096",
    ),
    "no room for the default": (
        BASE + TIGHT + "server_args: --max_model_len=256\n",
        "c.yaml:4:1: error: max_tokens 256 leaves no room for a prompt in --max-model-len 256",
    ),
    "no room in thousands": (
        BASE + TIGHT + "max_tokens: 4000\nserver_args: --max-model-len 4k\n",
        "in --max-model-len 4000",
    ),
    "no room in K": (
        BASE + TIGHT + "max_tokens: 4096\nserver_args: --max-model-len 4K\n",
        "in --max-model-len 4096",
    ),
    "no room in fractions": (
        BASE + TIGHT + "max_tokens: 4096\nserver_args: --max-model 2.5k\n",
        "in --max-model-len 2500",
    ),
    "the last length counts": (
        BASE + TIGHT + "server_args: --max-model-len 4096 --max-model-len 128\n",
        "in --max-model-len 128",
    ),
    "under an override": (
        BASE + TIGHT + "overrides:\n  rocm:\n    tolerance: 0.01\n",
        "c.yaml:6:5: warning: tolerance 0.01 is under the noise",
    ),
    "in the row of a task": (
        BASE + TIGHT + "tasks:\n  - task: gsm8k\n  - {task: smoke, tolerance: 0.1}\n",
        "c.yaml:6:19: warning: tolerance 0.1 is under the noise: 2 binomial standard errors are 0.224 at 20 questions",
    ),
}


@pytest.mark.parametrize(("text", "expected"), FOUND.values(), ids=FOUND)
def test_a_gate_that_cannot_work_is_found(check: Check, text: str, expected: str) -> None:
    """Each is one line with its place, and the exit code is 1 for an error alone."""
    checked = check(one(text))
    assert len(checked.grave) == 1
    assert expected in checked.grave[0]
    assert checked.code == (1 if ": error: " in checked.grave[0] else 0)


SPECULATION = "min_acceptance_length: 1.2\n"
SOUND = {
    "plain": BASE + TIGHT,
    "JSON": BASE + TIGHT + SPECULATION + 'server_args: --speculative-config \'{"method":"mtp"}\'\n',
    "underscores": BASE + TIGHT + SPECULATION + 'server_args: --speculative_config=\'{"method":"mtp"}\'\n',
    "dotted": BASE + TIGHT + SPECULATION + "server_args: --speculative-config.method ngram\n",
    "short": BASE + TIGHT + SPECULATION + "server_args: -sc '{}'\n",
    "short and dotted": BASE + TIGHT + SPECULATION + "server_args: -sc.method ngram\n",
    "one setting alone": BASE + TIGHT + SPECULATION + "server_args: --spec-method ngram\n",
    "in the command": BASE + TIGHT + SPECULATION + "serve_command: s {model} {port} {args} --speculative-config x\n",
    "a checkpoint with its own": f"model_name: org/M-speculator.eagle3\naccuracy_threshold: 0.5\n{TIGHT}{SPECULATION}",
    "in a file not read here": BASE + TIGHT + SPECULATION + "num_gpus: 1\nserver_args: --config x.yaml\n",
    "just room": BASE + TIGHT + "max_tokens: 4095\nserver_args: --max-model-len 4096\n",
    "context left to vLLM": BASE + TIGHT + "max_tokens: 9999\nserver_args: --max-model-len auto\n",
    "context fitted to memory": BASE + TIGHT + "max_tokens: 9999\nserver_args: --max-model-len -1\n",
    "a threshold of 1": "model_name: m\naccuracy_threshold: 1.0\ntolerance: 0.0\n",
    "a measured tolerance": BASE + "tolerance: 0.008\nbaseline: baselines/c.json\n",
    "few questions, wide tolerance": BASE + "task: smoke\ntolerance: 0.25\n",
}


@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
def test_a_sound_config_is_left_alone(check: Check, text: str) -> None:
    """Whatever spelling a flag has, what works is not complained of."""
    checked = check(one(text))
    assert checked.grave == []
    assert checked.code == 0


def test_wide_tolerances_are_one_note_for_a_list(check: Check) -> None:
    """A list of configs with the default tolerance does not drown what matters."""
    files = {f"{n}.yaml": f"model_name: org/{n}\naccuracy_threshold: 0.5\n" for n in range(3)}
    checked = check({**files, "t.yaml": BASE + TIGHT, "l.txt": "0.yaml\n1.yaml\n2.yaml\nt.yaml\n"})
    assert checked.lines == ["l.txt:1:1: note: a tolerance over 0.03 in 3 of 4: a loss of up to 8 points passes"]
    assert checked.summary == "4 configs in 1 list: 0 errors, 0 warnings, 1 note"


def test_what_does_not_load_is_listed_with_all_else(check: Check) -> None:
    """A missing file, a misspelt key and a gate that cannot work come in one go, and the exit code is 4."""
    bad = BASE + "tolerence: 0.1\n"
    checked = check(
        {"bad.yaml": bad, "c.yaml": BASE + TIGHT + SPECULATION, "l.txt": "bad.yaml\nz.yaml\nc.yaml\n"},
    )
    assert checked.code == 4
    assert [line.partition(": ")[0] for line in checked.grave] == ["bad.yaml:3:1", "l.txt:2:1", "c.yaml:4:1"]
    assert all(": error: " in line for line in checked.grave)


def test_a_broken_config_in_two_lists_is_one_line(check: Check) -> None:
    """A fault belongs to the file it is in."""
    checked = check({"bad.yaml": BASE + "x: 1\n", "a.txt": "bad.yaml\n", "b.txt": "bad.yaml\n"})
    assert len(checked.grave) == 1


def test_a_list_that_is_not_there_is_named(check: Check) -> None:
    """The places tried are in the message, and other lists are still checked."""
    checked = check({"c.yaml": BASE, "l.txt": "c.yaml\n"}, "nope.txt", "l.txt")
    assert checked.code == 4
    assert "nope.txt: error: no such file; tried" in checked.lines[0]
    assert checked.summary.startswith("1 config in 1 list: 1 error, ")


def test_configs_may_stand_in_several_lists(check: Check) -> None:
    """Lists are separate runs: what one of them names is free to the others."""
    checked = check({"c.yaml": BASE + TIGHT, "a.txt": "c.yaml\n", "b.txt": "c.yaml\n"})
    assert (checked.grave, checked.code) == ([], 0)
    assert checked.summary.startswith("1 config in 2 lists: ")


DATA = {
    "data that is missing": (BASE + "dataset: d.jsonl\n", "c.yaml:3:1: error: "),
    "too few rows": (BASE + "dataset: q.jsonl\nnum_questions: 5\nnum_fewshot: 0\n", "c.yaml:3:1: error: num_questions"),
    "an unknown model": (
        "model_name: embedded:x\naccuracy_threshold: 0.5\n",
        "c.yaml:1:1: error: model_name embedded:x",
    ),
}


@pytest.mark.parametrize(("text", "expected"), DATA.values(), ids=DATA)
def test_data_and_models_that_come_with_a_config_are_checked(check: Check, text: str, expected: str) -> None:
    """What would stop the suite before it starts is found here, too."""
    checked = check({**one(text), "q.jsonl": '{"question": "2 + 2?", "answer": "4"}\n'})
    assert checked.code == 4
    assert len(checked.grave) == 1
    assert checked.grave[0].startswith(expected)


def test_the_sample_size_is_that_of_ones_own_questions(check: Check) -> None:
    """Noise depends on how many questions the file holds."""
    rows = "".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(25))
    checked = check({**one(BASE + "dataset: q.jsonl\nnum_fewshot: 0\n"), "q.jsonl": rows})
    assert "standard errors are 0.200 at 25 questions" in checked.grave[0]


def orphaned(*names: str) -> list[str]:
    return [f"{name}:1:1: warning: no list names this config" for name in names]


def test_configs_that_no_list_names_are_found(check: Check) -> None:
    """All lists of the folder, below it and above it count, not only those that are checked."""
    files = dict.fromkeys(["a.yaml", "b.yaml", "o.yaml", "sub/a.yaml", "sub/b.yaml", "sub/o.yml", "sub/deep/a.yaml"])
    lists = {"top.txt": "a.yaml\nsub/b.yaml # too\n", "other.txt": "b.yaml  \r\n", "sub/l.txt": "\ufeffa.yaml\n"}
    configs = {name: f"model_name: org/{n}\naccuracy_threshold: 0.5\n{TIGHT}" for n, name in enumerate(files)}
    checked = check({**configs, **lists}, "top.txt")
    assert checked.grave == orphaned("o.yaml", "sub/deep/a.yaml", "sub/o.yml")
    assert checked.code == 0
    assert check({}, "sub/l.txt").grave == orphaned("sub/deep/a.yaml", "sub/o.yml")


def test_an_orphan_that_does_not_load_stops_nothing(check: Check) -> None:
    """A config that was commented out is named with its fault, as warnings: no run meets it."""
    off = "# later\n# model_name: org/M\n# accuracy_threshold: 0.5\n"
    checked = check({**one(BASE + TIGHT), "off.yaml": off})
    assert checked.grave == [
        *orphaned("off.yaml"),
        "off.yaml:1: warning: the file is empty; it must hold `key: value` lines",
    ]
    assert checked.code == 0


NO_CONFIGS = {
    "another program's": {"compose.yaml": "services:\n  a: {image: b}\n"},
    "a hidden folder's": {".cache/c.yaml": BASE},
    "several documents": {"k8s.yml": "kind: A\n---\nkind: B\n"},
}


@pytest.mark.parametrize("files", NO_CONFIGS.values(), ids=NO_CONFIGS)
def test_other_yaml_is_no_orphan(check: Check, files: dict[str, str]) -> None:
    """A folder may hold YAML of other programs."""
    assert check({**one(BASE + TIGHT), **files}).grave == []


def test_a_folder_stands_for_the_lists_in_it(check: Check) -> None:
    """Text files that name no YAML are no lists."""
    files = {"d/c.yaml": BASE + TIGHT, "d/l.txt": "c.yaml\n", "d/sub/m.txt": "x.yaml\n", "d/README.txt": "Read me.\n"}
    checked = check(files, "d")
    assert checked.grave == ["d/sub/m.txt:1:1: error: x.yaml: no such file (looked for d/sub/x.yaml)"]
    assert checked.summary.startswith("1 config in 2 lists: ")


def test_a_folder_without_lists_is_refused(check: Check) -> None:
    """Nothing checked is nothing passed."""
    assert check({"d/README.txt": "Read me.\n"}, "d").code == 4


SERVED = "tolerance: 0.05\nserver_args: --max-model-len 4096 --tensor-parallel-size 2\n"
SAME = {
    "the same text": BASE + SERVED,
    "other spellings": BASE + "tolerance: 0.05\nserver_args: -tp 2 --max_model_len=4096\n",
    "defaults spelled out": "num_fewshot: 5\ntask: gsm8k\nnum_questions: 1319\n" + BASE + SERVED,
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_two_configs_that_say_the_same_are_found(check: Check, text: str) -> None:
    """Order, spelling and defaults make no difference."""
    checked = check({"a.yaml": BASE + SERVED, "b.yaml": text, "l.txt": "a.yaml\nb.yaml\n"})
    assert checked.grave == ["b.yaml:1:1: warning: says the same as a.yaml:1:1: a model is tried twice for one answer"]


def test_json_is_compared_by_what_it_says(check: Check) -> None:
    """Blanks and the order of keys make no difference."""
    one_way, other = '{"method":"mtp","num_speculative_tokens":3}', '{"num_speculative_tokens": 3, "method": "mtp"}'
    texts = (f"{BASE}{TIGHT}server_args: >-\n  --speculative-config '{config}'\n" for config in (one_way, other))
    checked = check({**dict(zip(("a.yaml", "b.yaml"), texts, strict=True)), "l.txt": "a.yaml\nb.yaml\n"})
    assert len(checked.grave) == 1


HIGH, LOW = "accuracy_threshold: 0.88\n", "accuracy_threshold: 0.58\n"
ARGS = "server_args: --max-model-len 4096 --tensor-parallel-size 2"
CONTRADICTING = {
    "parallel sizes and backends": f"{ARGS} --enable-expert-parallel --moe-backend=triton\n",
    "kernels by variable": f'{ARGS}\nenv: {{VLLM_USE_DEEP_GEMM: "1"}}\n',
    "speculative decoding": f"{ARGS} --speculative-config.method ngram\n",
}
DIFFERENT = {
    "quantization": f"{ARGS} --quantization fp8\n",
    "cache format": f"{ARGS} --kv-cache-dtype fp8\n",
    "a flag not known here": f"{ARGS} --reasoning-parser qwen3\n",
    "precision by variable": f'{ARGS}\nenv: {{VLLM_ROCM_QUICK_REDUCE_QUANTIZATION: "INT4"}}\n',
    "the endpoint": f"{ARGS}\nuse_chat_completions: true\n",
    "worked examples": f"{ARGS}\nnum_fewshot: 0\n",
    "the scorer": f"{ARGS}\nscorer: last-number\n",
    "the task": f"{ARGS}\ntask: smoke\ntolerance: 0.25\n",
    "how many questions": f"{ARGS}\nnum_questions: 500\n",
    "the platform": f"{ARGS}\nplatforms: rocm\n",
    "the build": f"{ARGS}\nserve_command: other {{model}} {{port}} {{args}}\n",
}


@pytest.mark.parametrize("text", CONTRADICTING.values(), ids=CONTRADICTING)
def test_thresholds_that_contradict_each_other_are_found(check: Check, text: str) -> None:
    """Served and asked alike, a model cannot be expected at 0.58 here and fail below 0.80 there."""
    files = {"a.yaml": f"model_name: org/M\n{HIGH}{ARGS}\n", "b.yaml": f"model_name: org/M\n{LOW}{text}"}
    checked = check({**files, "l.txt": "a.yaml\n", "m.txt": "b.yaml\n"})
    assert checked.grave == [
        "a.yaml:2:1: warning: accuracy_threshold 0.88 has the floor 0.80, but the same model, served and asked alike, "
        "is expected at 0.58 in b.yaml:2:1"
    ]


@pytest.mark.parametrize("text", DIFFERENT.values(), ids=DIFFERENT)
def test_what_may_move_an_accuracy_may_have_a_threshold_of_its_own(check: Check, text: str) -> None:
    """Another precision or another question is no contradiction."""
    files = {"a.yaml": f"model_name: org/M\n{HIGH}{ARGS}\n", "b.yaml": f"model_name: org/M\n{LOW}{text}"}
    assert check({**files, "l.txt": "a.yaml\nb.yaml\n"}).grave == []


@pytest.mark.parametrize(("threshold", "found"), [("0.80", 0), ("0.799", 1)])
def test_a_contradiction_is_more_than_the_tolerance(check: Check, threshold: str, found: int) -> None:
    """A threshold at the other's floor passes there, exactly compared."""
    low = f"model_name: org/M\naccuracy_threshold: {threshold}\n{ARGS} --enforce-eager\n"
    files = {"a.yaml": f"model_name: org/M\n{HIGH}{ARGS}\n", "b.yaml": low}
    assert len(check({**files, "l.txt": "a.yaml\nb.yaml\n"}).grave) == found


def test_flags_are_read_in_every_spelling() -> None:
    """Dashes, underscores, equals signs, dots, several values and negative numbers."""
    words = ["--a_b=1", "--c", "x", "y", "--n", "-1", "-tp", "2", "--j", '{"b":1,"a":2}', "--k_k.v_v", "3", "--s"]
    assert read_flags(words) == [
        ("--a-b", ("1",)),
        ("--c", ("x", "y")),
        ("--n", ("-1",)),
        ("--tensor-parallel-size", ("2",)),
        ("--j", ('{"a": 2, "b": 1}',)),
        ("--k-k.v_v", ("3",)),
        ("--s", ()),
    ]
