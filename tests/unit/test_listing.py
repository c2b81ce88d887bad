"""What a list would run: needs and queues, shards that lose nothing, and the jobs as CI systems read them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.commands import list_command
from harness.config_lists import ListedConfig, load_lists
from harness.durations import Durations, MeasuredRun, key_of
from harness.errors import ConfigError
from harness.listing import (
    Limit,
    Queues,
    check_partition,
    chosen,
    parse_shard,
    plan_configs,
    plan_jobs,
    shard_of,
)

SMALL = "model_name: org/M-1B\naccuracy_threshold: 0.5\n"
CONFIGS = {
    "one": SMALL,
    "big/two": SMALL + 'server_args: "--tensor-parallel-size 2"\n',
    "hopper": SMALL + "platforms: cuda>=9.0\n",
    "either": SMALL + 'platforms: [cuda, "rocm:gfx942"]\n',
    "cpu only": SMALL + "platforms: cpu\n",
    "api": SMALL + "backend: openai\n",
    "tasks": SMALL + "tasks:\n- task: smoke\n- task: gsm8k\n",
}


def load(folder: Path, configs: dict[str, str]) -> tuple[ListedConfig, ...]:
    for name, text in configs.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "list.txt").write_text("".join(f"{name}.yaml\n" for name in configs))
    return load_lists([folder / "list.txt"])


@pytest.fixture
def configs(tmp_path: Path) -> tuple[ListedConfig, ...]:
    return load(tmp_path, CONFIGS)


def run_list(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    parser = argparse.ArgumentParser()
    list_command.add_options(parser)
    assert list_command.run(parser.parse_args([str(argument) for argument in arguments])) == 0
    return capsys.readouterr().out


QUEUES = {
    "one": (1, "gpu-1-any"),
    "big/two": (2, "gpu-2-any"),
    "hopper": (1, "gpu-1-cuda-ge-9-0"),
    "either": (1, "gpu-1-cuda"),
    "cpu only": (0, "cpu"),
    "api": (0, "cpu"),
}


@pytest.mark.parametrize(("config_id", "expected"), QUEUES.items(), ids=list(QUEUES))
def test_queue_follows_gpus_and_platform(
    configs: Sequence[ListedConfig], config_id: str, expected: tuple[int, str]
) -> None:
    """A config's queue is named after the GPUs it needs and the platform it asks for."""
    planned = {one.entry.id: one for one in plan_configs(configs, Queues())}[config_id]
    assert (planned.gpus, planned.queue) == expected


def test_types_are_renamed_and_choose_among_platforms(configs: Sequence[ListedConfig]) -> None:
    """A team names its machines itself; of several platforms the one it has is chosen."""
    queues = Queues(template="{type}x{count}", types={"cuda>=9.0": "h200", "any": "a100", "rocm:gfx942": "mi300"})
    found = {one.entry.id: one.queue for one in plan_configs(configs, queues)}
    assert (found["hopper"], found["one"], found["either"]) == ("h200x1", "a100x1", "mi300x1")


def test_gpus_are_those_of_the_platform_asked_for(tmp_path: Path) -> None:
    """Overrides that hold on the config's own platform count: two GPUs there, one elsewhere."""
    overrides = 'overrides:\n  rocm: {server_args: "-tp 2"}\n'
    listed = load(tmp_path, {"amd": f"{SMALL}platforms: rocm\n{overrides}", "all": SMALL + overrides})
    assert [one.gpus for one in plan_configs(listed, Queues())] == [2, 1]


def test_measured_durations_replace_guesses(configs: Sequence[ListedConfig], tmp_path: Path) -> None:
    """What was measured is taken over what is guessed, and told apart."""
    durations = Durations(tmp_path / "d" / "durations.json")
    durations.record(key_of(configs[0], "cpu"), MeasuredRun(startup=100, asking=50, questions=1319))
    first, second = plan_configs(configs[:2], Queues(), durations)
    assert (first.duration.seconds, first.duration.measured, second.duration.measured) == (150, True, False)


def test_every_config_is_in_one_job_of_its_own_queue(configs: Sequence[ListedConfig]) -> None:
    """Jobs share no config, lose none, keep a server's tasks together and never mix queues."""
    planned = plan_configs(configs, Queues())
    jobs = plan_jobs(planned, 6)
    assert sorted(config_id for job in jobs for config_id in job.ids) == sorted(entry.id for entry in configs)
    assert all(one.queue == job.queue for job in jobs for one in job.configs)
    assert [job.ids for job in jobs if "tasks:smoke" in job.ids] == [("tasks:smoke", "tasks:gsm8k")]
    assert [job.id for job in jobs] == [f"{number}-of-6" for number in range(1, 7)]


def test_one_job_a_server_by_default(configs: Sequence[ListedConfig]) -> None:
    """Without --shards every server gets a job."""
    jobs = plan_jobs(plan_configs(configs, Queues()))
    assert len(jobs) == len(CONFIGS)


def test_tasks_of_a_server_count_its_start_once(tmp_path: Path) -> None:
    """A server's tasks share its start, so that it is not counted for each."""
    listed = load(tmp_path, {"tasks": CONFIGS["tasks"]})
    planned = plan_configs(listed, Queues())
    (job,) = plan_jobs(planned)
    assert job.seconds == pytest.approx(planned[0].duration.startup + sum(one.duration.asking for one in planned))


def test_jobs_go_to_the_queue_that_takes_longest(tmp_path: Path) -> None:
    """Further jobs are given to the queue whose jobs would be the longest."""
    long = "model_name: org/M-70B\naccuracy_threshold: 0.5\nserver_args: -tp 4\n"
    listed = load(tmp_path, {**{f"s{i}": SMALL for i in range(4)}, **{f"l{i}": long for i in range(4)}})
    queues = [job.queue for job in plan_jobs(plan_configs(listed, Queues()), 4)]
    assert queues == ["gpu-1-any", "gpu-4-any", "gpu-4-any", "gpu-4-any"]


def test_fewer_jobs_than_queues_are_refused(configs: Sequence[ListedConfig]) -> None:
    """Configs of unlike needs do not share a job; the message says how many jobs there must be."""
    with pytest.raises(ConfigError, match=r"--shards 2: the list needs 5 queues .* ask for 5 or more"):
        plan_jobs(plan_configs(configs, Queues()), 2)


def test_comma_in_an_id_is_refused(tmp_path: Path) -> None:
    """An id that --configs could not tell apart is named before anything is printed."""
    with pytest.raises(ConfigError, match=r"list\.txt:1:1: a job cannot be given a,b"):
        plan_jobs(plan_configs(load(tmp_path, {"a,b": SMALL}), Queues()))


def test_lost_and_doubled_configs_are_noticed(configs: Sequence[ListedConfig]) -> None:
    """The partition is checked, not assumed."""
    planned = plan_configs(configs, Queues())
    jobs = plan_jobs(planned)
    with pytest.raises(RuntimeError, match="one"):
        check_partition(jobs[1:], planned)
    with pytest.raises(RuntimeError, match="one"):
        check_partition((*jobs, jobs[0]), planned)


@pytest.mark.parametrize(("count", "n"), [(1, 1), (7, 3), (12, 5), (12, 12)])
def test_shards_by_number_are_disjoint_and_whole(tmp_path: Path, count: int, n: int) -> None:
    """--shard K/N: the N machines together run every config once, and none of them runs nothing."""
    sizes = {f"c{i}": f"model_name: org/M-{i * i + 1}B\naccuracy_threshold: 0.5\n" for i in range(count)}
    listed = load(tmp_path, sizes)
    dealt = [shard_of(listed, k, n) for k in range(1, n + 1)]
    assert all(dealt)
    assert sorted(entry.id for shard in dealt for entry in shard) == sorted(sizes)


def test_more_shards_than_servers_are_refused(tmp_path: Path) -> None:
    """A shard that would run nothing, and so pass, is a mistake."""
    with pytest.raises(ConfigError, match="--shard 1/2: there are 1 servers"):
        shard_of(load(tmp_path, {"tasks": CONFIGS["tasks"]}), 1, 2)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2", "1/0", ""])
def test_shard_that_is_none_is_refused(text: str) -> None:
    """K/N is checked where it is read."""
    with pytest.raises(ConfigError, match=r"must be K/N"):
        parse_shard(text)
    assert parse_shard("2/8") == (2, 8)


def test_chosen_configs_are_taken_in_the_lists_order(configs: Sequence[ListedConfig]) -> None:
    """--configs takes ids; one without its task takes all tasks of the server."""
    assert [entry.id for entry in chosen(configs, "tasks, one,big/two")] == [
        "one",
        "big/two",
        "tasks:smoke",
        "tasks:gsm8k",
    ]
    assert [entry.id for entry in chosen(configs, "tasks:gsm8k")] == ["tasks:gsm8k"]


@pytest.mark.parametrize(
    ("ids", "message"), [("ones", r"no list names it; did you mean one\?"), ("", "names no config"), (" , ", "names")]
)
def test_unknown_configs_are_refused(configs: Sequence[ListedConfig], ids: str, message: str) -> None:
    """A job that asks for what is not there fails, rather than running less."""
    with pytest.raises(ConfigError, match=message):
        chosen(configs, ids)


def test_github_matrix_is_one_line_whose_jobs_run_everything(
    configs: Sequence[ListedConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What GitHub reads is JSON on one line; its jobs' ids, handed to --configs, are the whole list."""
    printed = run_list(capsys, tmp_path / "list.txt", "--format=github", "--shards=5", "--durations", tmp_path / "no")
    assert printed.count("\n") == 1
    include = json.loads(printed)["include"]
    ran = [entry.id for job in include for entry in chosen(configs, job["configs"])]
    assert sorted(ran) == sorted(entry.id for entry in configs)
    assert all(job["job_timeout_minutes"] > 2 * job["timeout_minutes"] > 60 for job in include)


def test_buildkite_steps_retry_outages_alone(
    configs: Sequence[ListedConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step runs its own configs on its queue, keeps its record, and is retried for exit code 75 alone."""
    command = "cd $HOME && pytest"
    printed = run_list(
        capsys, tmp_path / "list.txt", "--format=buildkite", "--command", command, "--durations", tmp_path / "no"
    )
    steps = yaml.safe_load(printed)["steps"]
    ran: list[str] = []
    for step in steps:
        line = step["command"].replace("$$", "$")
        assert line.startswith(command)
        options = dict(word.split("=", 1) for word in shlex.split(line.removeprefix(command)))
        assert options["--config-list-file"] == str(tmp_path / "list.txt")
        ran += [entry.id for entry in chosen(configs, options["--configs"])]
        assert step["retry"] == {"automatic": [{"exit_status": 75, "limit": 2}]}
        assert "$HOME" not in step["command"].replace("$$", "")
    assert sorted(ran) == sorted(entry.id for entry in configs)
    assert len({step["key"] for step in steps}) == len(steps)
    assert {step["agents"]["queue"] for step in steps} == {
        "cpu",
        "gpu-1-any",
        "gpu-2-any",
        "gpu-1-cuda",
        QUEUES["hopper"][1],
    }


LIMITS = [("github", 256), ("buildkite", 500)]


@pytest.mark.parametrize(("form", "most"), LIMITS, ids=[form for form, _ in LIMITS])
def test_more_jobs_than_ci_takes_are_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, most: int
) -> None:
    """One job too many prints nothing; --shards, as the message says, makes it fit."""
    entry = load(tmp_path, {"c": SMALL})[0]
    names = [f"c{number:03}" for number in range(most + 1)]
    planned = plan_configs([_named(entry, name) for name in names], Queues())
    render: dict[str, Any] = {
        "github": list_command.render_github,
        "buildkite": lambda plan: list_command.render_buildkite(plan, "pytest"),
    }
    plan = list_command.Plan(lists=("l",), configs=planned, jobs=plan_jobs(planned), limit=Limit())
    with pytest.raises(ConfigError, match=f"{most + 1} jobs: .* holds {most}: .*--shards {most}"):
        render[form](plan)
    fitting = list_command.Plan(lists=("l",), configs=planned, jobs=plan_jobs(planned, most), limit=Limit())
    rendered = render[form](fitting)
    assert all(name in rendered for name in names)


def _named(entry: ListedConfig, name: str) -> ListedConfig:
    return replace(entry, id=name)


def test_plan_file_says_what_text_and_json_say(
    configs: Sequence[ListedConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--plan keeps the JSON beside any other format, and the text names every config with guesses marked."""
    common = [tmp_path / "list.txt", "--durations", tmp_path / "no", "--shards", 6]
    document = run_list(capsys, *common, "--format=json")
    text = run_list(capsys, *common, "--plan", tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == document
    jobs = {job["id"]: job["configs"] for job in json.loads(document)["jobs"]}
    for config in json.loads(document)["configs"]:
        assert config["id"] in jobs[config["job"]]
        assert config["id"] in text
    assert "is a guess" in text
    assert "limit 30m and 3 times as long" in text


@pytest.mark.parametrize(
    "option",
    [
        "--shards=0",
        "--queue=gpu-{n}",
        "--queue={count.real}",
        "--queue={",
        "--gpu-type=cuda",
        "--gpu-type=nvidia=h200",
        "--timeout-factor=-1",
        "--timeout-minimum=nan",
    ],
)
def test_options_that_make_no_sense_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in an option ends before any list is read."""
    parser = argparse.ArgumentParser()
    list_command.add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["list.txt", option])
    assert option.partition("=")[0] in capsys.readouterr().err


def test_missing_list_is_named(tmp_path: Path) -> None:
    """A list that is not there ends the command before anything is printed."""
    parser = argparse.ArgumentParser()
    list_command.add_options(parser)
    with pytest.raises(ConfigError, match=r"^nowhere\.txt: no such file"):
        list_command.run(parser.parse_args(["nowhere.txt"]))
