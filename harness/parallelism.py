"""How many GPUs the arguments of `vllm serve` ask for, read off its parallel sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_SIZES = {
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "-pp": "pipeline",
    "--prefill-context-parallel-size": "prefill_context",
    "-pcp": "prefill_context",
    "--decode-context-parallel-size": "decode_context",
    "-dcp": "decode_context",
    "--data-parallel-size": "data",
    "-dp": "data",
    "--data-parallel-size-local": "data_local",
    "-dpl": "data_local",
    "--data-parallel-rank": "data_rank",
    "-dpn": "data_rank",
    "--nnodes": "nodes",
    "-n": "nodes",
    "--node-rank": "node_rank",
    "-r": "node_rank",
}
_SWITCHES = {
    "--data-parallel-external-lb": True,
    "-dpe": True,
    "--no-data-parallel-external-lb": False,
}
_FLAGS = (*_SIZES, *_SWITCHES)
_NOT_OURS = frozenset({"-dc"})
"""vLLM's --diffusion-config: a flag of its own that would otherwise read as the start of -dcp."""
_MAY_BE_ZERO = frozenset({"data_local", "data_rank", "node_rank"})
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
_GLUED = re.compile(r"(-[nr])(\d.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The sizes that one `vllm serve` is given; each is 1 where nothing is said."""

    tensor: int = 1
    pipeline: int = 1
    prefill_context: int = 1
    decode_context: int = 1
    """Splits the cache over GPUs that the tensor and prefill-context ranks have already."""
    data: int = 1
    data_local: int | None = None
    """Replicas on this machine; 0 where it only routes requests."""
    data_rank: int | None = None
    external: bool = False
    """One process per replica, balanced from outside."""
    nodes: int = 1
    node_rank: int = 0

    @property
    def gpus(self) -> int:
        """All GPUs of the deployment, on every machine."""
        return self._replica * self.data

    @property
    def gpus_here(self) -> int:
        """The GPUs that this process and its workers use on this machine."""
        replicas = self._replicas_here
        if not replicas:
            return 0
        machines_per_replica = max(self.nodes // (self.data // replicas), 1)
        return replicas * (self._replica // machines_per_replica)

    @property
    def gpus_elsewhere(self) -> int:
        """GPUs that other machines must bring; above 0 this is a deployment over several machines."""
        return self.gpus - self.gpus_here

    @property
    def _replica(self) -> int:
        return self.tensor * self.pipeline * self.prefill_context

    @property
    def _replicas_here(self) -> int:
        if self.external or self.data_rank is not None:
            return 1
        if self.data_local is not None:
            return self.data_local
        return self.data if self.nodes == 1 else max(self.gpus // self.nodes // self._replica, 1)


def gpus_needed(arguments: Sequence[str]) -> int:
    """Count the GPUs this machine must have for a server with these arguments.

    With Ray, which may place workers on any machine, all of them are counted. Raises ValueError as read_parallelism
    does.
    """
    return read_parallelism(arguments).gpus_here


def read_parallelism(arguments: Sequence[str]) -> Parallelism:
    """Read the parallel sizes in every spelling that vLLM's parser takes; the last one of each counts.

    Raises ValueError naming flag and value for a size that is no number or out of range, sizes that do not fit each
    other, and `--config`, whose file can hold sizes that stand nowhere here.
    """
    sizes: dict[str, int] = {}
    said: dict[str, str] = {}
    external = False
    for flag, value in _occurrences(arguments):
        if flag in _SWITCHES:
            external = _SWITCHES[flag]
            continue
        name = _SIZES[flag]
        said[name] = f"{flag} {value}"
        sizes[name] = _size(flag, value)
    for name, size in sizes.items():
        least = 0 if name in _MAY_BE_ZERO else 1
        if size < least:
            raise ValueError(f"{said[name]}: must be at least {least}")
    found = Parallelism(external=external, **sizes)
    _check(found, said)
    return found


def _occurrences(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each of our flags with its value, "" for a switch."""
    words = iter(enumerate(arguments))
    for index, word in words:
        if word == "--":
            return
        if word == "--config" or word.startswith("--config="):
            raise ValueError(f"{word}: its file may set parallel sizes, which cannot be seen from here: say num_gpus")
        written, equals, inline = word.partition("=")
        if glued := _GLUED.fullmatch(word):
            written, equals, inline = glued[1], "=", glued[2]
        flag = _flag(written)
        if flag is None:
            continue
        if flag in _SWITCHES:
            yield flag, ""
        elif equals:
            yield flag, inline
        else:
            yield flag, _next_value(flag, arguments[index + 1 : index + 2])
            next(words)


def _flag(written: str) -> str | None:
    """Find the flag that a word spells: with dashes or underscores, whole or shortened as far as it stays clear."""
    if written.startswith("--"):
        written = written.replace("_", "-")
    if written in _FLAGS:
        return written
    if not written.startswith("-") or written in _NOT_OURS or len(written.strip("-")) == 0:
        return None
    longer = [flag for flag in _FLAGS if flag.startswith(written)]
    return longer[0] if len(longer) == 1 else None


def _next_value(flag: str, following: Sequence[str]) -> str:
    if not following or (following[0].startswith("-") and not _NEGATIVE.fullmatch(following[0])):
        raise ValueError(f"{flag} needs a number after it, got {following[0] if following else 'nothing'}")
    return following[0]


def _size(flag: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{flag} {value}: must be a whole number") from None


def _check(found: Parallelism, said: Mapping[str, str]) -> None:
    """Refuse the sizes that vLLM refuses in every version, before a GPU is taken for them."""
    if found.data_local is not None and found.data_local > found.data:
        raise ValueError(f"{said['data_local']}: more replicas here than --data-parallel-size says, {found.data}")
    if found.data_rank is not None and found.data_rank >= found.data > 1:
        raise ValueError(f"{said['data_rank']}: must be below --data-parallel-size, {found.data}")
    if (found.tensor * found.prefill_context) % found.decode_context:
        ranks = found.tensor * found.prefill_context
        raise ValueError(f"{said['decode_context']}: must divide the {ranks} tensor and prefill-context ranks")
    if found.gpus % found.nodes:
        raise ValueError(f"{said['nodes']}: must divide the {found.gpus} GPUs that the parallel sizes ask for")
    if found.node_rank >= found.nodes > 1:
        raise ValueError(f"{said['node_rank']}: must be below --nnodes, {found.nodes}")


_SGLANG_SIZES = {
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--tp"), "tensor"),
    **dict.fromkeys(("--pp-size", "--pipeline-parallel-size", "--pp"), "pipeline"),
    **dict.fromkeys(("--dp-size", "--data-parallel-size", "--dp"), "data"),
    "--nnodes": "nodes",
}


def sglang_gpus_needed(arguments: Sequence[str]) -> int:
    """Count the GPUs of this machine that arguments of SGLang's `launch_server` ask for.

    Replicas of attention alone (--enable-dp-attention) live on the tensor ranks. Raises ValueError for a size that is
    no whole number of at least 1.
    """
    sizes = dict.fromkeys(("tensor", "pipeline", "data", "nodes"), 1)
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, value = argument.partition("=")
        if flag in _SGLANG_SIZES:
            text = value if equals else following
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"{flag} {text}: must be a whole number of at least 1")
            sizes[_SGLANG_SIZES[flag]] = int(text)
    data = 1 if "--enable-dp-attention" in arguments else sizes["data"]
    return -(-sizes["tensor"] * sizes["pipeline"] * data // sizes["nodes"])
