"""The largest step is measured once per combination of all it depends on; a broken memory of it costs nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scheduler.config import EngineConfig
from scheduler.model import memory_profile, startup
from scheduler.model.loader import examine, load_weights
from scheduler.model.memory_profile import FILES_MAX, MemoryProfile, key_of, remembered
from tests.model.tiny import load

ModelDir = Callable[[str], str]
MEASURED = MemoryProfile(step_peak_bytes=1000, step_s_per_token=0.25)


def measure() -> MemoryProfile:
    return MEASURED


def no_measurement() -> MemoryProfile:
    pytest.fail("it was measured again")


def test_the_second_start_does_not_measure(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch, profiles_directory: Path
) -> None:
    """One file is left by the first start, and the next one takes its word; both tell the step's duration."""
    first = load(model_dir("llama"))
    (path,) = profiles_directory.iterdir()
    kept = json.loads(path.read_text())
    assert kept["step_peak_bytes"] >= 0
    assert first.info.step_s_per_token == kept["step_s_per_token"] > 0
    monkeypatch.setattr(startup, "measure_peak_bytes", lambda *_: no_measurement())
    assert load(model_dir("llama")).info == first.info


def test_what_is_remembered_is_the_measurement_and_not_the_decision(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less memory free, a start with the same profile has a smaller pool."""
    peaks: list[int] = []

    def budget(free_bytes: int) -> Callable[[object, object, int], int]:
        return lambda _config, _device, step_peak_bytes: peaks.append(step_peak_bytes) or free_bytes  # type: ignore[func-returns-value]

    monkeypatch.setattr(startup, "pool_budget_bytes", budget(800_000))
    large = load(model_dir("llama"), num_kv_blocks=None).info.num_kv_blocks
    monkeypatch.setattr(startup, "pool_budget_bytes", budget(400_000))
    small = load(model_dir("llama"), num_kv_blocks=None).info.num_kv_blocks
    assert small < large
    assert peaks[0] == peaks[1]


@pytest.fixture
def key_with(model_dir: ModelDir, tmp_path: Path) -> Callable[..., str | None]:
    """The key of a copy of the tiny model under some flags."""
    directory = tmp_path / "model"
    shutil.copytree(model_dir("llama"), directory)

    def key(**flags: object) -> str | None:
        limits: dict[str, object] = {"num_threads": 1, "attention_backend": "reference", "max_model_len": 100}
        config = EngineConfig(model=str(directory), **(limits | flags))  # type: ignore[arg-type]
        loaded = examine(load_weights(config), None)
        return key_of(config, loaded, startup._make_backend(config, loaded, config.num_threads or 1))

    return key


def test_whatever_the_largest_step_depends_on_is_in_the_key(
    key_with: Callable[..., str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags, files, versions, our own code, the device, threads and the environment's settings each change it."""
    changed_flags: list[dict[str, object]] = [
        {},
        {"dtype": "bfloat16"},
        {"max_model_len": 101},
        {"max_num_seqs": 63},
        {"max_num_batched_tokens": 511},
        {"block_size": 32},
        {"attention_backend": "cpu"},
    ]
    keys = [key_with(**flags) for flags in changed_flags]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    keys.append(key_with())
    torch.set_num_threads(num_threads)
    for name, value in (
        ("_version", lambda package: f"{package} of tomorrow"),
        ("_sources_digest", lambda: "other code"),
        ("_device_name", lambda _: "another processor"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(memory_profile, name, value)
            keys.append(key_with())
    with monkeypatch.context() as patch:
        patch.setenv("MALLOC_ARENA_MAX", "1")
        keys.append(key_with())
    weights = tmp_path / "model" / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    keys.append(key_with())
    config = tmp_path / "model" / "config.json"
    times = config.stat()
    config.write_text(config.read_text() + " ")
    os.utime(config, ns=(times.st_atime_ns, times.st_mtime_ns))
    keys.append(key_with())
    assert None not in keys
    assert len(set(keys)) == len(keys) == 14


def test_what_does_not_change_the_step_is_not_in_the_key(key_with: Callable[..., str | None]) -> None:
    """The pool's size, a GPU's number and standing by are decided without a new measurement."""
    assert (
        key_with()
        == key_with(num_kv_blocks=3)
        == key_with(kv_cache_memory_bytes=10**6)
        == key_with(gpu_memory_utilization=0.5)
        == key_with(device_index=1, standby=True)
    )


def test_files_that_cannot_be_told_apart_are_not_remembered(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch, profiles_directory: Path
) -> None:
    """A name from the hub whose files are not found has no key; without a key nothing is read or kept."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = EngineConfig(model=model_dir("llama"), num_threads=1, attention_backend="reference")
    loaded = examine(load_weights(config), None)
    backend = startup._make_backend(config, loaded, 1)
    assert key_of(replace(config, model="nobody/nothing"), loaded, backend) is None
    assert remembered(None, measure) == MEASURED
    assert list(profiles_directory.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"step_peak_bytes": "much", "step_s_per_token": 1}',
        b'{"step_peak_bytes": -1, "step_s_per_token": 1}',
        b'{"step_peak_bytes": Infinity, "step_s_per_token": 1}',
        b'{"step_peak_bytes": 1, "step_s_per_token": NaN}',
        b'{"step_peak_bytes": 1, "step_s_per_token": 0}',
        b'{"step_peak_bytes": 1, "step_s_per_token": null}',
    ],
)
def test_a_broken_file_is_as_if_it_were_not_there(profiles_directory: Path, content: bytes) -> None:
    """It is measured again, and the file replaced by a good one."""
    path = profiles_directory / "key.json"
    path.write_bytes(content)
    assert remembered("key", measure) == MEASURED
    assert remembered("key", no_measurement) == MEASURED
    assert [entry.name for entry in profiles_directory.iterdir()] == ["key.json"]


def test_a_file_that_cannot_be_read_or_written_costs_a_measurement_only(
    profiles_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in its place, a full disk, no cache at all: each start measures, warns and goes on."""
    (profiles_directory / "key.json").mkdir()
    assert remembered("key", measure) == MEASURED
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", no_space)
        assert remembered("other", measure) == MEASURED
    monkeypatch.setattr(memory_profile, "_directory", lambda: None)
    assert remembered("other", measure) == MEASURED
    assert [entry.name for entry in profiles_directory.iterdir()] == ["key.json"]


def test_the_profile_used_longest_ago_gives_way(profiles_directory: Path) -> None:
    """No more than FILES_MAX are kept, and reading one counts as use."""
    for number in range(FILES_MAX):
        remembered(f"{number}", measure)
        os.utime(profiles_directory / f"{number}.json", ns=(number, number))
    remembered("0", no_measurement)
    remembered("new", measure)
    names = {path.stem for path in profiles_directory.iterdir()}
    assert len(names) == FILES_MAX
    assert "1" not in names
    assert {"0", "2", "new"} <= names


def test_a_name_from_the_hub_is_known_by_the_files_it_was_loaded_from(
    model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key follows the snapshot that the revision leads to, as the hub's own cache has it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    for commit, branch in (("a" * 40, "main"), ("b" * 40, "next")):
        shutil.copytree(model_dir("llama"), repository / "snapshots" / commit)
        (repository / "refs" / branch).write_text(commit)
    config = EngineConfig(model=model_dir("llama"), num_threads=1, attention_backend="reference")
    loaded = examine(load_weights(config), None)
    backend = startup._make_backend(config, loaded, 1)
    main = replace(config, model="some/model")
    assert key_of(main, loaded, backend) == key_of(replace(main, revision="main"), loaded, backend) is not None
    assert key_of(replace(main, revision="next"), loaded, backend) != key_of(main, loaded, backend)
