"""`evaluate_offline`: the questions of a config, asked of a `vllm.LLM` that somebody already has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from harness.backends.offline_engine import given_engine
from harness.config import ModelConfig
from harness.config_lists import unlisted
from harness.errors import ConfigError
from harness.gates.threshold import Counts
from harness.pipeline import evaluate
from harness.records import ConfigRecord, EvalResult
from harness.serving import RunOptions, Serving

SETTINGS = (
    "accuracy_threshold",
    "tolerance",
    "max_tokens",
    "use_chat_completions",
    "temperature",
    "seed",
    "top_p",
    "top_k",
    "gen_prefix",
    "stop",
    "scorer",
    "reasoning_effort",
    "chat_template_kwargs",
    "fewshot_as_multiturn",
    "dataset",
    "fewshot_dataset",
    "max_concurrency",
    "request_timeout_seconds",
    "min_acceptance_length",
    "max_error_rate",
    "choice_score",
    "pairwise_tokenization",
    "move_trailing_spaces",
    "max_window",
    "window_context",
    "max_bits_per_byte",
    "truncate_prompts",
)
"""The keys of a config that say what is asked and what must hold, beside those that the function names itself."""


def evaluate_offline(
    llm: Any,
    *,
    task: str = "gsm8k",
    num_questions: int | None = None,
    num_fewshot: int = 5,
    data_dir: Path | str | None = None,
    record_dir: Path | str | None = None,
    **settings: Any,
) -> EvalResult:
    """Ask an LLM a task, with the prompts and the scoring of the pytest suite; the LLM stays usable.

    `settings` are further keys of a config, with their names and defaults there; without `accuracy_threshold` only
    an outage is no pass. `record_dir` keeps `samples.jsonl` and `result.json`; by default nothing is written. A
    regression or an outage is the result's verdict, not an exception. Raises ConfigError for settings that do not fit,
    DataUnavailable where the questions cannot be had.
    """
    given = {"task": task, "num_questions": num_questions, "num_fewshot": num_fewshot, **settings}
    engine = given_engine(llm)
    config = _config(engine.model, given)
    options = RunOptions(data_dir=Path(data_dir) if data_dir is not None else None)
    with ExitStack() as stack:
        if record_dir is None:
            record_dir = stack.enter_context(TemporaryDirectory(prefix="accuracy-gate-"))
        record = ConfigRecord(Path(record_dir))
        serving = Serving(config, record.server_log, options, given=engine)
        return _beside_a_loop(lambda: evaluate(unlisted(config), record, options, Silent(), serving))


class Silent:
    """A progress that says nothing."""

    def stage(self, text: str) -> None: ...

    def answered(self, counts: Counts, total: int) -> None: ...

    def close(self) -> None: ...


def _config(model: str, given: dict[str, Any]) -> ModelConfig:
    unknown = sorted(set(given) - {"task", "num_questions", "num_fewshot", *SETTINGS})
    if unknown:
        raise ConfigError(f"evaluate_offline takes no {unknown[0]}; known: {', '.join(SETTINGS)}")
    try:
        return ModelConfig.model_validate({"model_name": model, "accuracy_threshold": 0.0, **given})
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors())
        raise ConfigError(*faults) from error


def _beside_a_loop(work: Callable[[], EvalResult]) -> EvalResult:
    """Run to the end, also under the event loop that a notebook has already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(work).result()
