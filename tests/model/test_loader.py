"""What can go wrong with a model's files or flags ends the start with one clear line of the right kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scheduler.config import DTYPES, EngineConfig
from scheduler.errors import ConfigurationError, EmberlineError, StartupError
from scheduler.model.attention.flash import FlashBackend
from scheduler.model.loader import (
    LoadedModel,
    examine,
    load_weights,
    resolve_device,
    resolve_device_type,
    resolve_dtype,
)
from tests.model.tiny import SUPPORTED, VOCAB_SIZE

ModelDir = Callable[[str], str]


def load(directory: Path | str, **flags: object) -> LoadedModel:
    return examine(load_weights(EngineConfig(model=str(directory), **flags)), None)  # type: ignore[arg-type]


def refusal(directory: Path | str, **flags: object) -> EmberlineError:
    with pytest.raises(EmberlineError) as caught:
        load(directory, **flags)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_loaded_model_is_described(model_dir: ModelDir) -> None:
    """Type, sizes and limits are those of the files."""
    loaded = load(model_dir("llama"), max_model_len=99)
    assert (loaded.model_type, loaded.vocab_size, loaded.max_model_len) == ("llama", VOCAB_SIZE, 99)
    assert loaded.num_parameters == sum(p.numel() for p in loaded.model.parameters()) > 60_000
    shape = loaded.attention
    assert (len(shape.modules), shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 4, 2, 16)


def test_missing_files_are_a_failure_to_start(tmp_path: Path) -> None:
    """No directory, or one without a configuration or weights: StartupError, exit code 3."""
    assert "does not exist" in str(refusal(tmp_path / "nowhere"))
    assert "no config.json" in str(refusal(tmp_path))
    SUPPORTED["llama"].save_pretrained(tmp_path)
    missing_weights = refusal(tmp_path)
    assert isinstance(missing_weights, StartupError)
    assert not isinstance(missing_weights, ConfigurationError)


def test_broken_files_are_a_failure_to_start(tmp_path: Path, model_dir: ModelDir) -> None:
    """Weights cut short, or a configuration that is not JSON: StartupError."""
    broken = tmp_path / "broken"
    shutil.copytree(model_dir("llama"), broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert isinstance(refusal(broken), StartupError)
    (broken / "config.json").write_text("{")
    assert isinstance(refusal(broken), StartupError)


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path, model_dir: ModelDir) -> None:
    """A tensor that is missing from the files is never filled with random numbers."""
    broken = tmp_path / "broken"
    shutil.copytree(model_dir("llama"), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    error = refusal(broken)
    assert isinstance(error, StartupError)
    assert "lacks 9 of its weights" in str(error)


def test_code_of_the_models_own_needs_a_flag(tmp_path: Path) -> None:
    """Without --trust-remote-code it does not run, and the message says which flag lets it."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}})
    )
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    error = refusal(tmp_path)
    assert isinstance(error, ConfigurationError)
    assert "--trust-remote-code" in str(error)
    assert not marker.exists()


def test_an_unknown_architecture_is_a_configuration_error(tmp_path: Path) -> None:
    """A model type that transformers does not know cannot be served with any flags."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "from_the_future"}))
    error = refusal(tmp_path)
    assert isinstance(error, ConfigurationError)
    assert "from_the_future" in str(error)


def test_every_device_and_dtype_that_a_flag_may_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is float32 on a CPU, and a device that is not there is a configuration error."""
    assert {resolve_dtype(name, "cuda", None) for name in DTYPES} == {torch.float32, torch.bfloat16, torch.float16}
    assert resolve_dtype("auto", "cpu", torch.bfloat16) == torch.float32
    assert resolve_dtype("bfloat16", "cpu", None) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device_type("auto") == resolve_device_type("cpu") == "cpu"
    with pytest.raises(ConfigurationError, match="no GPU"):
        resolve_device_type("cuda")


def test_an_index_chooses_among_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is the first; one that is not there is a configuration error; on a CPU the index means nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device_type("auto") == "cuda"
    assert [str(resolve_device("cuda", index)) for index in (None, 0, 1)] == ["cuda:0", "cuda:0", "cuda:1"]
    with pytest.raises(ConfigurationError, match="GPU 2 was asked for, but torch finds 2"):
        resolve_device("cuda", 2)
    assert resolve_device("cpu", 1) == torch.device("cpu")


def file_mapping_of(address: int) -> str:
    """The flags and the file of the memory mapping that holds `address`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            return f"{flags} {path[0] if path else ''}"
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_of_the_served_dtype_stay_on_the_mapped_file(model_dir: ModelDir, family: str) -> None:
    """Every parameter is a view on the file, mapped privately: engines share its pages, none can write it. Tied weights
    are one. Another dtype is a copy.
    """
    weights = str(Path(model_dir(family), "model.safetensors").resolve())
    model = load(model_dir(family)).model
    found = {name: file_mapping_of(parameter.data_ptr()) for name, parameter in model.named_parameters()}
    assert found == dict.fromkeys(found, f"rw-p {weights}")
    tied = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied == (family == "qwen2")

    before = Path(weights).read_bytes()
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    assert Path(weights).read_bytes() == before

    copied = next(load(model_dir(family), dtype="bfloat16").model.parameters())
    assert weights not in file_mapping_of(copied.data_ptr())


def test_any_checkpoint_can_start_on_a_gpu_with_default_flags() -> None:
    """`auto` on a GPU keeps a 16-bit checkpoint as it is, and makes of any other one that the flash backend accepts."""
    for own in (torch.float32, torch.float64, torch.bfloat16, torch.float16, None):
        dtype = resolve_dtype("auto", "cuda", own)
        assert FlashBackend._unsupported_shape(dtype, head_dim=64, block_size=None) is None
        assert own not in (torch.float16, torch.bfloat16) or dtype == own
    assert resolve_dtype("float32", "cuda", torch.float32) == torch.float32
