"""Copy the list's configs for a run: `prepare_configs.py SOURCE DEST [--whole-gpu] [--rehearsal MODEL]`.

SOURCE and DEST hold models-gpu-kit.txt and gpu-kit/. With --whole-gpu each has a GPU for itself. A rehearsal serves a
small model on a CPU and asks a few questions: it tries the script, and measures nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

LIST, FOLDER = "models-gpu-kit.txt", "gpu-kit"
CPU_FLAGS = "--dtype float32 --enforce-eager --max-model-len 4096"
QUESTIONS, TOKENS = 6, 16


def whole_gpu(text: str) -> str:
    return re.sub(r"^gpu_share:.*\n", "", text, flags=re.MULTILINE)


def without_baseline(text: str) -> str:
    """Leave a baseline out, which holds for all questions and lies beside the YAML."""
    return re.sub(r"^ *baseline:.*\n", "", text, flags=re.MULTILINE)


def rehearsed(text: str, model: str, damaged: str) -> str:
    """Make a config that a CPU answers in seconds; nothing is asked of its accuracy, but for the damaged copy's."""
    broken = "/damaged" in text
    text = re.sub(r"^model_name:.*$", f"model_name: {damaged if broken else model}", text, flags=re.MULTILINE)
    text = whole_gpu(text)
    text = re.sub(r"--max-model-len 4096", CPU_FLAGS, text)
    text = re.sub(r" --quantization fp8| --kv-cache-dtype fp8| --tensor-parallel-size 2", "", text)
    text = text.replace(f"{CPU_FLAGS} --enforce-eager", CPU_FLAGS)
    text = re.sub(r"^num_questions:.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^accuracy_threshold: .*$", f"accuracy_threshold: {'0.9' if broken else '0.0'}", text, flags=re.M)
    text = re.sub(r"^tolerance: .*$", "tolerance: 0.2", text, flags=re.MULTILINE)
    text = re.sub(r"^    accuracy_threshold: .*$", "    accuracy_threshold: 0.2", text, flags=re.MULTILINE)
    text = re.sub(r"^    max_bits_per_byte: .*$", "    max_bits_per_byte: 4.0", text, flags=re.MULTILINE)
    text = re.sub(r"^min_acceptance_length: .*$", "min_acceptance_length: 1.0", text, flags=re.MULTILINE)
    return text.replace("num_fewshot: 5\n", f"num_fewshot: 5\nnum_questions: {QUESTIONS}\nmax_tokens: {TOKENS}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--whole-gpu", action="store_true", help="leave out gpu_share")
    parser.add_argument("--rehearsal", metavar="MODEL", help="what is served instead")
    parser.add_argument("--damaged", default="", metavar="FOLDER", help="the damaged copy of it")
    arguments = parser.parse_args()
    (arguments.dest / FOLDER).mkdir(parents=True, exist_ok=True)
    shutil.copy2(arguments.source / LIST, arguments.dest / LIST)
    if (arguments.source / FOLDER / "baselines").is_dir():
        shutil.copytree(
            arguments.source / FOLDER / "baselines", arguments.dest / FOLDER / "baselines", dirs_exist_ok=True
        )
    for path in (arguments.source / FOLDER).glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        if arguments.whole_gpu:
            text = whole_gpu(text)
        if arguments.rehearsal:
            text = rehearsed(text, arguments.rehearsal, arguments.damaged)
        (arguments.dest / FOLDER / path.name).write_text(text, encoding="utf-8")
        if path.stem in ("damaged", "two-gpus", "eager", "fp8"):
            (arguments.dest / f"only-{path.stem}.txt").write_text(f"{FOLDER}/{path.name}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
