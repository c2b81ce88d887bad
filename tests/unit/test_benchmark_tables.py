"""The benchmark page: made from records alone, honest about targets, whole from several calls' records."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.config import load_config_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu_host")]

from benchmark_tables import INTRO, render  # noqa: E402
from host_records import HostRecords  # noqa: E402
from prepare_configs import rehearsed, whole_gpu  # noqa: E402
from start_phases import phases  # noqa: E402
from store_calibration import found_in, in_row, with_baseline  # noqa: E402

KIT = ROOT / "configs" / "gpu-kit"
LOG = """\
(APIServer pid=7) INFO 11-27 10:00:20 [api_server.py:1] non-default args: {}
(EngineCore pid=8) INFO 11-27 10:00:38 [core.py:115] Initializing a V1 LLM engine (v0.24.0) with config: model='m'
(EngineCore pid=8) INFO 11-27 10:00:44 [gpu_model_runner.py:5256] Model loading took 0.93 GiB memory and 3.1 seconds
(EngineCore pid=8) INFO 11-27 10:00:50 [backends.py:293] Directly load the compiled graph(s) for compile range (1, 8)
(EngineCore pid=8) INFO 11-27 10:00:52 [monitor.py:53] torch.compile took 6.50 s in total
(EngineCore pid=8) INFO 11-27 10:00:58 [gpu_model_runner.py:6657] Graph capturing finished in 4 secs, took 0.61 GiB
(EngineCore pid=8) INFO 11-27 10:00:59 [core.py:328] init engine (profile, create kv cache, warmup model) took 14.80 s
(APIServer pid=7) INFO 11-27 10:01:15 [api_server.py:581] Starting vLLM server on http://127.0.0.1:20001
"""


def write(folder: Path, name: str, document: Any) -> None:
    path = folder / "records" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")


def page(folder: Path) -> str:
    return render([HostRecords(folder=folder)])


def run(who: str, concurrency: int, per_second: float) -> dict[str, Any]:
    spent = {"asking": 10.0, "cpu": 4.5, "peak_memory": 120 * 1024**2}
    return {"who": who, "concurrency": concurrency, "per_second": per_second, **spent}


def throughput(harness: Sequence[float], best: float, default: float) -> dict[str, Any]:
    plain = [run("plain", 512, best), run("plain", 100, default), run("plain", 512, best)]
    rounds = [[run("harness", 256, one), *plain, run("harness", 256, one)] for one in harness]
    return {
        "questions": 1319,
        "model": "m",
        "plain_best": 512,
        "plain_default": 100,
        "harness_default": 256,
        "empty": [{**run("harness", 256, 1.0), "cpu": 1.5}],
        "sweep": [run("plain", 512, best), run("harness", 512, harness[0])],
        "rounds": rounds,
    }


def suite(wall: float, verdicts: Mapping[str, str], **more: Any) -> dict[str, Any]:
    configs = [
        {
            "id": name,
            "verdict": verdict,
            "reason": f"because of {name}",
            "accuracy": 0.1,
            "floor": 0.092,
            "acceptance_length": None,
            "startup": 76.0,
            "asking": 9.0,
            "started": "2026-03-02T10:00:00.000+00:00",
            "finished": "2026-03-02T10:01:27.000+00:00",
        }
        for name, verdict in verdicts.items()
    ]
    seen = {"gpu_seconds": wall - 5, "left": [], "memory_is_back": True, "skipped": {}, "exit_code": 0}
    return {"wall_seconds": wall, "configs": configs, **seen, **more}


def test_what_has_no_records_is_left_out(tmp_path: Path) -> None:
    """A page from nothing holds nothing but its introduction."""
    (tmp_path / "records").mkdir()
    assert page(tmp_path).strip() == INTRO.strip()


@pytest.mark.parametrize(
    ("harness", "said", "faster"),
    [
        pytest.param((177.0, 179.0), "meets the target: 0.98 in each", "in 2 of 2 rounds", id="met"),
        pytest.param((170.0, 140.0), "MISSES the target: 0.98 in each", "in 1 of 2 rounds", id="missed"),
        pytest.param((200.0, 170.0), "MISSES the target: 0.98 in each", "in 2 of 2 rounds", id="met on average alone"),
    ],
)
def test_ratios_to_the_plain_loop_are_those_of_each_round(
    tmp_path: Path, harness: tuple[float, ...], said: str, faster: str
) -> None:
    """The page says of the harness' speed what the rounds say, and whether it is enough."""
    write(tmp_path, "throughput.json", throughput(harness, 180.0, 150.0))
    text = page(tmp_path)
    assert said in text
    assert faster in text
    assert f"| 1 | {harness[0]:.1f} | 180.0 | 150.0 | {harness[0] / 180:.3f} | {harness[0] / 150:.3f} |" in text
    # 4.5 s less the 1.5 s of getting going, over 10 s of asking.
    assert "30% of a core" in text


def test_sharing_is_held_against_one_after_another(tmp_path: Path) -> None:
    """The ways are compared by wall clock and by verdicts, and a verdict that differs is told."""
    same = {"gpu-kit/bf16:gsm8k": "pass", "gpu-kit/fp8": "pass"}
    write(tmp_path, "suites/list.json", suite(440, same))
    write(tmp_path, "suites/shared.json", suite(140, {**same, "gpu-kit/fp8": "regression"}, memory_is_back=False))
    text = page(tmp_path)
    assert "| one after another | 2 | 440 | 1.00 | 435 | yes | nothing | yes |" in text
    assert "| side by side, sharing the GPU | 2 | 140 | 0.32 | 135 | NO | nothing | NO |" in text
    assert "0.32 of the wall clock (meets the target: 0.33)" in text
    assert "gpu-kit/fp8: regression: because of gpu-kit/fp8" in text


def test_a_part_of_the_list_has_no_ratio(tmp_path: Path) -> None:
    """What ran fewer configs is not held against the wall clock of all."""
    write(tmp_path, "suites/list.json", suite(440, {"a": "pass", "b": "pass"}))
    write(tmp_path, "suites/ahead.json", suite(100, {"a": "pass"}))
    assert "started ahead | 1 | 100 | - | 95 | yes |" in page(tmp_path)


def test_a_start_is_taken_apart_by_its_log() -> None:
    """Imports, weights, compile, graphs, engine and server are told apart, from the process's start on."""
    found = phases(LOG, total=75.0)
    assert (found.imports, found.weights, found.server) == (38.0, 6.0, 16.0)
    assert (found.compile, found.graphs, found.engine) == (6.5, 4.0, 14.8)
    assert found.compiled_before


def test_an_eager_start_has_neither_compile_nor_graphs() -> None:
    """What the log does not tell stays unknown instead of zero."""
    eager = "".join(line for line in LOG.splitlines(keepends=True) if "compile" not in line and "Graph" not in line)
    found = phases(eager, total=75.0)
    assert (found.compile, found.graphs, found.compiled_before) == (None, None, False)
    assert found.engine == 14.8


def calibrated(folder: Path, name: str, runs: Sequence[Sequence[bool]]) -> None:
    for number, answers in enumerate(runs, 1):
        lines = [json.dumps({"index": index, "correct": right}) + "\n" for index, right in enumerate(answers)]
        write(folder, f"calibrate/{name}/20260302/run-{number}/samples.jsonl", "".join(lines))


def test_runs_are_judged_against_those_of_bf16(tmp_path: Path) -> None:
    """A config that lost a tenth of its answers is told from bf16, whose own runs are not told from each other."""
    right = [index % 2 == 0 for index in range(1000)]
    worse = [answer and index % 10 != 0 for index, answer in enumerate(right)]

    def noisy(answers: Sequence[bool], run: int) -> list[bool]:
        return [answer if index % 97 != run else not answer for index, answer in enumerate(answers)]

    calibrated(tmp_path, "bf16", [noisy(right, run) for run in range(5)])
    calibrated(tmp_path, "fp8", [noisy(worse, run) for run in range(5)])
    text = page(tmp_path)
    assert "- the paired gate on fp8: lost after 1 of 3 passes" in text
    rows = [line for line in text.splitlines() if line.startswith(("| bf16 |", "| fp8 |"))]
    judged = [line.rstrip(" |").rpartition("| ")[2] for line in rows[2:]]
    assert len(judged) == 10
    assert "lost" not in judged[:5]
    assert judged[5:] == ["lost"] * 5


def packed(folder: Path, call: str, began: float, wall: float, cores: int = 16) -> None:
    """Write what one call of the script packs."""
    unpacked = folder / f"unpacked-{call}"
    step = {"name": f"step of {call}", "began": began, "exit": -1, "seconds": 1.0, "limit": 9, "command": "true"}
    host = {"gpus": [], "driver": "1", "processor": "P", "cores": cores, "memory": 2**30, "python": "3", "versions": {}}
    write(unpacked, f"steps-{call}.jsonl", json.dumps(step) + "\n")
    write(unpacked, "suites/list.json", suite(wall, {"a": "pass"}))
    write(unpacked, "host.json", {**host, "commit": "c"})
    for path in unpacked.rglob("*"):
        os.utime(path, (began, began))
    (folder / call).mkdir()
    with tarfile.open(folder / call / f"records-{call}.tar.gz", "w:gz") as tar:
        tar.add(unpacked / "records", "records")
    shutil.rmtree(unpacked)


def test_records_of_several_calls_make_one_page(tmp_path: Path) -> None:
    """Packed files are put together: what a later call holds again counts, steps are in the order they began."""
    packed(tmp_path, "a-second", 200.0, 400)
    packed(tmp_path, "b-first", 100.0, 500)
    (tmp_path / "scratch").mkdir()
    text = render([HostRecords.of(tmp_path, tmp_path / "scratch")])
    assert text.index("step of b-first") < text.index("step of a-second")
    assert "| one after another | 1 | 400 |" in text
    assert "| left out |" in text
    assert "isit 1" not in text


def test_each_section_tells_of_every_visit_that_has_one(tmp_path: Path) -> None:
    """Hosts and steps of all visits are told, and of every table from which of them it comes."""
    for name, cores in (("one", 16), ("two", 32)):
        (tmp_path / name).mkdir()
        packed(tmp_path / name, "list", 100.0, cores * 10, cores)
        (tmp_path / name / "scratch").mkdir()
    (tmp_path / "two/note.txt").write_text("a busy day\n")
    first, second = (HostRecords.of(tmp_path / name, tmp_path / name / "scratch") for name in ("one", "two"))
    write(tmp_path / "two/scratch", "throughput.json", throughput((177.0,), 180.0, 150.0))
    text = render([first, second])
    assert "| processor | P, 16 cores, 1 GiB | P, 32 cores, 1 GiB |" in text
    assert "Visit 2, as told by who ran it: a busy day\n" in text
    assert "## Asking, against a plain loop of posts\n\n### Visit 2\n" in text
    ways = text[text.index("run in different ways") : text.index("## Steps")]
    assert ways.index("### Visit 1") < ways.index("| one after another | 1 | 160 |") < ways.index("### Visit 2")
    assert ways.index("### Visit 2") < ways.index("| one after another | 1 | 320 |")
    assert "| 1 | step of list |" in text
    assert "| 2 | step of list |" in text


def test_a_list_that_was_cut_off_says_so(tmp_path: Path) -> None:
    """A suite that its limit ended has no whole wall clock, and is held against all the same."""
    write(tmp_path, "suites/cold.json", suite(495, {"a": "pass"}, exit_code=None))
    write(tmp_path, "suites/shared.json", suite(108, {"a": "pass"}))
    text = page(tmp_path)
    assert "nothing compiled before | 1 | 495, then cut off | 1.00 |" in text
    assert "sharing the GPU | 1 | 108 | 0.22 |" in text


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    """A visit that holds nothing is a mistake, not an empty page."""
    with pytest.raises(ValueError, match="holds neither"):
        HostRecords.of(tmp_path, tmp_path)


def test_checks_that_failed_are_shouted(tmp_path: Path) -> None:
    """A check that does not hold is not lost among those that do."""
    seen = [{"what": "no process left", "held": held, "seen": "x | y"} for held in (True, False)]
    write(tmp_path, "suites/leftovers.json", {"checks": seen})
    assert "| no process left | NO | x \\| y |" in page(tmp_path)


def test_what_calibrate_found_goes_into_the_row_it_is_of(tmp_path: Path) -> None:
    """Threshold, tolerance and baseline of one task leave the others' alone, and the YAML stays valid."""
    found = found_in("accuracy 0.75\nthreshold 0.7512 (was 0.5)\ntolerance 0.0312 (was 0.2)\n")
    text = in_row((KIT / "bf16.yaml").read_text(encoding="utf-8"), "choice", found)
    path = tmp_path / "bf16.yaml"
    for _ in range(2):  # once named it is not named again
        text = with_baseline(text, "baselines/bf16-gsm8k.json", "  - name: gsm8k")
        text = with_baseline(text, "baselines/bf16-choice.json", "  - task: choice")
    path.write_text(text, encoding="utf-8")
    file = load_config_file(path)
    gsm8k, choice = file.on(None, "gsm8k"), file.on(None, "choice")
    before = load_config_file(KIT / "bf16.yaml").on(None, "gsm8k")
    assert (choice.accuracy_threshold, choice.tolerance) == (0.7512, 0.0312)
    assert gsm8k.accuracy_threshold == before.accuracy_threshold
    assert (gsm8k.baseline, choice.baseline) == ("baselines/bf16-gsm8k.json", "baselines/bf16-choice.json")
    assert file.on(None, "perplexity").baseline is None


def test_a_tolerance_beyond_everything_stays_a_tolerance() -> None:
    """So few questions that their noise explains anything make no YAML that cannot be read."""
    assert found_in("threshold 0.0 (was 0.1)\ntolerance 1.4289 (was 0.2)\n")["tolerance"] == "1.0"


def test_a_log_without_a_threshold_is_refused() -> None:
    """A calibration that failed changes no YAML."""
    with pytest.raises(ValueError, match="no threshold"):
        found_in("ERROR: nothing can be derived from these runs:\n")


@pytest.mark.parametrize("path", sorted(KIT.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_of_a_run_stay_valid(path: Path, tmp_path: Path) -> None:
    """With a GPU for itself a config differs in its share alone; a rehearsal's needs no GPU at all."""
    text = path.read_text(encoding="utf-8")
    alone, rehearsal = tmp_path / "alone.yaml", tmp_path / "rehearsal.yaml"
    alone.write_text(whole_gpu(text), encoding="utf-8")
    rehearsal.write_text(rehearsed(text, "embedded:smollm2-135m-instruct", "/damaged"), encoding="utf-8")
    task = load_config_file(path).task_names[0]
    config, served_alone = (load_config_file(one).on(None, task) for one in (path, alone))
    assert served_alone == config.model_copy(update={"gpu_share": None})
    tried = load_config_file(rehearsal).on(None, task)
    assert (tried.gpu_share, tried.gpus, tried.num_questions) == (None, 1, 6)
    assert "float32" in tried.server_args


def test_a_damaged_copy_differs_in_one_tensor(tmp_path: Path) -> None:
    """The model that must go red is the model but for one layer's output projection."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    from damage_model import damage

    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (1, 11) for part in ("o", "q")]
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    safetensors.save_file(
        {name: torch.full((2, 2), 0.5, dtype=torch.bfloat16) for name in names},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert damage(model, tmp_path / "copy", layer=1, factor=8.0) == names[0]
    copied = safetensors.load_file(tmp_path / "copy" / "model.safetensors")
    assert {name: tensor.max().item() for name, tensor in copied.items()} == {
        name: 4.0 if name == names[0] else 0.5 for name in names
    }
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"
    with pytest.raises(ValueError, match="choose another --layer"):
        damage(model, tmp_path / "other", layer=2, factor=8.0)
