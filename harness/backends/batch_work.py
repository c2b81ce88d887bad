"""A thread that asks a model in memory batch by batch, and tells each answer as it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Literal

from harness.backends.base import ChatMessage, GenerateRequest, Generation, LoglikelihoodRequest, Request, Response
from harness.backends.batch_generation import GenerationRow, generate_rows
from harness.backends.batch_rows import Rows, failure, rows_of
from harness.backends.batch_search import BatchQueue
from harness.backends.causal_model import CausalModel
from harness.backends.compiled_model import room_for_shapes
from harness.backends.device_memory import is_out_of_memory, release_memory
from harness.backends.forward_scoring import ScoringRow, score_rows
from harness.backends.process_shares import Processes, Round, launched_processes
from harness.errors import AccuracyGateError, ServerDied

ENDED: Literal["ended"] = "ended"
News = tuple[int, Response] | BaseException | Literal["ended"]
"""An answer, the fault that ended the thread, or its last word."""
START_TOKENS: Mapping[str, int] = {"cpu": 2**12}
"""Tokens of the first batch by device. On the CPU memory is not refused but the process killed: it starts small."""
ACCELERATOR_TOKENS = 2**17
MOST_ROWS = 1024

_Row = ScoringRow | GenerationRow
_Queue = BatchQueue[_Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How a model is asked."""

    batch_size: int | None = None
    """The most rows at once; found where None."""
    compile: bool | str = False
    """Whether torch.compile is used, or with which of its backends."""
    seed: int | None = None
    """For requests that have none."""
    across_processes: bool = True
    """Share the work where several processes were launched together."""


class BatchWork:
    """Answers requests through one model, in a thread of its own."""

    def __init__(
        self,
        causal: CausalModel,
        requests: Sequence[Request],
        *,
        settings: BatchSettings,
        model_lock: threading.Lock,
        tell: Callable[[News], None],
    ) -> None:
        """`tell` is called in the thread; only the main process of several tells answers."""
        self._causal = causal
        self._requests = requests
        self._settings = settings
        self._model_lock = model_lock
        self._tell = tell
        self._stopping = threading.Event()
        self._rows = Rows()
        self._thread = threading.Thread(target=self._run, name="accuracy-gate-batches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let it end after the batch under way; text that is being written ends with its next token."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread, whose last word is known."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._model_lock:
                self._work()
        except BaseException as fault:  # noqa: BLE001 - raised again where the answers are awaited
            self._tell(fault)
        finally:
            self._tell(ENDED)

    def _work(self) -> None:
        import torch

        # Both are this thread's own; a training loop's gradients are not touched.
        with torch.no_grad(), _processes(self._settings.across_processes) as processes:
            with self._faults_shared(processes):
                queues = self._plan(processes)
            compiled = self._settings.compile is not False
            with room_for_shapes(sum(map(len, queues)) if compiled else None):
                going = self._told(processes, self._rows.refused, queues)
                while going:
                    with self._faults_shared(processes):
                        answers = self._next_batch(queues)
                    going = self._told(processes, answers, queues)

    @contextmanager
    def _faults_shared(self, processes: Processes) -> Iterator[None]:
        """Tell the other processes of a fault: they would wait for this one for ever."""
        try:
            yield
        except Exception as error:
            fault = f"the model failed: {type(error).__name__}: {error}"
            died = error if isinstance(error, AccuracyGateError) else ServerDied(fault)
            with suppress(ServerDied):
                processes.exchange(Round(total=len(self._requests), fault=fault))
            raise died from error

    def _plan(self, processes: Processes) -> list[_Queue]:
        ordered = sorted(enumerate(self._requests), key=lambda asked: _characters(asked[1]), reverse=True)
        self._rows = rows_of(self._causal, processes.share(ordered), seed=self._settings.seed)
        scoring: list[_Queue] = [self._queue(self._rows.scoring)] if self._rows.scoring else []
        return scoring + [self._queue(rows) for rows in self._rows.generation.values()]

    def _queue(self, rows: Sequence[_Row]) -> _Queue:
        given = self._settings.batch_size
        budget = START_TOKENS.get(self._causal.device.type, ACCELERATOR_TOKENS)
        fit = max(1, budget // max(row.length for row in rows))
        start = given or 2 ** (fit.bit_length() - 1)
        return BatchQueue(rows, start=start, limit=given or MOST_ROWS)

    def _next_batch(self, queues: Sequence[_Queue]) -> Mapping[int, Response]:
        """Ask the longest batch there is, if any."""
        if self._stopping.is_set() or not any(queues):
            return {}
        return self._batch(max(queues, key=lambda queue: queue.longest))

    def _told(self, processes: Processes, answers: Mapping[int, Response], queues: Sequence[_Queue]) -> bool:
        mine = Round(
            total=len(self._requests),
            answers=answers,
            left=sum(map(len, queues)),
            stopped=self._stopping.is_set(),
        )
        rounds = processes.exchange(mine)
        if processes.is_main:
            for told in rounds:
                for index, response in told.answers.items():
                    self._tell((index, response))
        return any(told.left for told in rounds) and not any(told.stopped for told in rounds)

    def _batch(self, queue: _Queue) -> Mapping[int, Response]:
        """Ask a queue's next batch; one that does not fit goes back, to be tried in halves."""
        batch = queue.take()
        try:
            if isinstance(batch[0], ScoringRow):
                return self._score([row for row in batch if isinstance(row, ScoringRow)])
            return self._generate([row for row in batch if isinstance(row, GenerationRow)])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Out of the except clause, whose traceback holds on to the tensors.
        release_memory()
        if queue.put_back(batch):
            return {}
        return self._too_large(batch[0])

    def _score(self, batch: Sequence[ScoringRow]) -> Mapping[int, Response]:
        began = time.perf_counter()
        results = score_rows(self._causal, batch, compiled=self._settings.compile is not False)
        now = time.perf_counter()
        answers = {}
        for row, scores in zip(batch, results, strict=True):
            for (index, place), score in zip(row.owners, scores, strict=True):
                scored = self._rows.scored.get(index)
                if scored is None:  # Another of its rows was too large.
                    continue
                scored.since = began if scored.since is None else scored.since
                scored.scores[place] = score
                if scored.complete:
                    answers[index] = self._rows.scored.pop(index).answer(now)
        return answers

    def _generate(self, batch: Sequence[GenerationRow]) -> Mapping[int, Response]:
        began = time.perf_counter()
        written = generate_rows(self._causal, batch, stopped=self._stopping.is_set)
        latency = time.perf_counter() - began
        return {
            row.index: Generation(
                text=reply.text,
                finish_reason=reply.finish_reason,
                generated_tokens=reply.tokens,
                prompt_tokens=len(row.tokens),
                latency=latency,
                prompt_tokens_cut=row.cut,
            )
            for row, reply in zip(batch, written or (), strict=written is not None)
        }

    def _too_large(self, row: _Row) -> Mapping[int, Response]:
        fault = failure(
            "aborted", f"{row.length} tokens do not fit into the memory of {self._causal.device}, even alone"
        )
        if isinstance(row, GenerationRow):
            return {row.index: fault}
        # A request that already failed for another of its rows is not there any more.
        return {index: fault for index, _ in row.owners if self._rows.scored.pop(index, None) is not None}


def _processes(across: bool) -> AbstractContextManager[Processes]:
    return launched_processes() if across else nullcontext(Processes())


def _characters(request: Request) -> int:
    """Return a request's length as far as it is known before it is encoded."""
    if isinstance(request, LoglikelihoodRequest):
        return len(request.context) + max(map(len, request.continuations), default=0)
    if isinstance(request, GenerateRequest):
        turns: Sequence[ChatMessage] | str = request.prompt
        return len(turns) if isinstance(turns, str) else sum(len(turn.content) for turn in turns)
    return len(request.text)
