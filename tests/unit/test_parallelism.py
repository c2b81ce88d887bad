"""How many GPUs a config's server arguments ask for."""

from __future__ import annotations

import shlex

import pytest

from harness.parallelism import gpus_needed, read_parallelism

SPELLINGS = [
    ("--tensor-parallel-size 2", 2),
    ("--tensor-parallel-size=2", 2),
    ("--tensor_parallel_size 2", 2),
    ("--tensor_parallel_size=2", 2),
    ("--tensor-parallel_size 2", 2),
    ("--tensor-parallel 2", 2),
    ("-tp 2", 2),
    ("-tp=2", 2),
    ("-t 2", 2),
    ("--pipeline-parallel-size 4", 4),
    ("--pipeline_parallel_size=4", 4),
    ("-pp 4", 4),
    ("-pp=4", 4),
    ("--data-parallel-size 8", 8),
    ("--data_parallel_size=8", 8),
    ("-dp 8", 8),
    ("-dp=8", 8),
    ("--prefill-context-parallel-size 2", 2),
    ("--prefill_context_parallel_size=2", 2),
    ("-pcp 2", 2),
    ("-dp 8 --data-parallel-size-local 2", 2),
    ("-dp 8 --data_parallel_size_local=2", 2),
    ("-dp 8 --data-parallel-size-l 2", 2),
    ("-dp 8 -dpl 2", 2),
    ("-dp=8 -dpl=2", 2),
    ("-tp 4 --nnodes 2", 2),
    ("-tp 4 --nnodes=2 --node_rank 1", 2),
    ("-tp 4 -n 2 -r 1", 2),
    ("-tp 4 -n=2 -r=1", 2),
    ("-tp 4 -n2 -r1", 2),
]

MEANINGS = [
    ("", 1),
    ("--enforce-eager --max-model-len 4096", 1),
    ("-tp 2 -pp 2 -dp 2 -pcp 2", 16),
    ("-tp 8 --decode-context-parallel-size 4", 8),
    ("-tp 8 -dcp=8", 8),
    ("-tp 2 -pcp 2 -dcp 4", 4),
    ("-tp 2 --tensor-parallel-size 4", 4),
    ("--tensor-parallel-size=4 -tp 1", 1),
    ("-tp 0 -tp 2", 2),
    ("--enable-expert-parallel --data-parallel-size 2", 2),
    ("-tp 2 -dp 4 -dpl 0", 0),
    ("-tp 2 -dp 16 -dpl 8 --data-parallel-address 10.0.0.1", 16),
    ("-tp 2 -dp 16 -dpl 8 --data-parallel-start-rank 8 --headless", 16),
    ("-dp 4 -dpl 2 --data-parallel-hybrid-lb", 2),
    ("-tp 2 -dp 4 --data-parallel-rank 3", 2),
    ("-tp 2 -dp 4 -dpn=0", 2),
    ("-tp 2 -dp 4 -dpe -n 4 -r 2", 2),
    ("-dp 2 --data_parallel_external_lb --no-data-parallel-external-lb", 2),
    ("-dp 4 -dpl 2 --data-parallel-multi-port-external-lb", 2),
    ("-tp 16 -n 2", 8),
    ("-tp 4 -pp 4 -n 4 -r 3", 4),
    ("-tp 4 -dp 4 -n 2", 8),
    ("-tp 8 -dp 2 -n 4", 4),
    ("-tp 4 -dp 4 -dpl 2 -n 2", 8),
    ("-dc '{\"x\": 2}'", 1),
    ("--compilation-config.cudagraph_mode=NONE -tp 2", 2),
    ('--speculative-config \'{"method": "mtp", "draft_tensor_parallel_size": 1}\' -tp 2', 2),
    ("--served-model-name tensor-parallel-size 2", 1),
    ("-tp 2 -- -tp 4", 2),
    ("-tp ' 2 '", 2),
]

FAULTS = [
    ("-tp two", "-tp two", "whole number"),
    ("--tensor-parallel-size=2.0", "--tensor-parallel-size 2.0", "whole number"),
    ("--tensor_parallel_size ''", "--tensor-parallel-size", "whole number"),
    ("-tp two -tp 2", "-tp two", "whole number"),
    ("-tp 0", "-tp 0", "at least 1"),
    ("-tp -1", "-tp -1", "at least 1"),
    ("-dp 2 -dpl -1", "-dpl -1", "at least 0"),
    ("--data-parallel-size", "--data-parallel-size", "nothing"),
    ("-pp --enforce-eager", "-pp", "--enforce-eager"),
    ("-dp 2 -dpl 4", "-dpl 4", "--data-parallel-size"),
    ("-dpl 2", "-dpl 2", "--data-parallel-size"),
    ("-dp 2 -dpn 2", "-dpn 2", "below"),
    ("-tp 2 -dcp 4", "-dcp 4", "divide"),
    ("-tp 3 -n 2", "-n 2", "divide"),
    ("-tp 4 -n 2 -r 2", "-r 2", "below"),
    ("--config server.yaml -tp 2", "--config", "num_gpus"),
    ("--config=server.yaml", "--config", "num_gpus"),
]


@pytest.mark.parametrize(("arguments", "gpus"), SPELLINGS, ids=[text for text, _ in SPELLINGS])
def test_every_spelling_is_read(arguments: str, gpus: int) -> None:
    """A parallel size counts in every spelling that vLLM's parser takes."""
    assert gpus_needed(shlex.split(arguments)) == gpus


@pytest.mark.parametrize(("arguments", "gpus"), MEANINGS, ids=[text or "(none)" for text, _ in MEANINGS])
def test_sizes_become_the_gpus_of_this_machine(arguments: str, gpus: int) -> None:
    """Tensor, pipeline, prefill-context and data ranks multiply, decode-context ranks reuse them, and what runs on
    other machines does not count."""
    assert gpus_needed(shlex.split(arguments)) == gpus


@pytest.mark.parametrize(("arguments", "flag", "why"), FAULTS, ids=[text for text, *_ in FAULTS])
def test_what_cannot_be_served_is_refused(arguments: str, flag: str, why: str) -> None:
    """A size that vLLM would refuse, or that cannot be seen, is an error naming flag and value."""
    with pytest.raises(ValueError, match=why) as fault:
        gpus_needed(shlex.split(arguments))
    assert str(fault.value).startswith(flag)


@pytest.mark.parametrize(
    ("arguments", "elsewhere"),
    [
        ("-tp 8", 0),
        ("-tp 16 -n 2", 8),
        ("-dp 16 -dpl 8", 8),
        ("-dp 4 -dpl 0", 4),
        ("-dp 4 -dpn 0", 3),
        ("-tp 4 -dp 2", 0),
    ],
)
def test_a_deployment_over_several_machines_shows(arguments: str, elsewhere: int) -> None:
    """The GPUs that other machines must bring are told apart from those needed here."""
    assert read_parallelism(shlex.split(arguments)).gpus_elsewhere == elsewhere
