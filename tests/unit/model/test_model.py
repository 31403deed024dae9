"""Models: initial weights, loss, files, presets, and the texts of what goes wrong."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco import model as models
from diloco.config import ModelConfig
from diloco.config.compose import compose
from diloco.data import load_tokenizer
from diloco.errors import CheckpointError, ConfigError

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def settings(model_type: str = "llama", path: str | None = None, **config: Any) -> ModelConfig:
    return ModelConfig(name="small", model_type=model_type, path=path, config={} if path else {**SMALL, **config})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def equal(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = weights(left), weights(right)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return models.build(settings(), seed=0)


# --- initial weights


def test_equal_seeds_give_equal_weights_and_other_seeds_others(small: nn.Module) -> None:
    torch.manual_seed(99)
    torch.rand(7)
    assert equal(small, models.build(settings(), seed=0))
    assert not equal(small, models.build(settings(), seed=1))


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    models.build(settings(), seed=3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_model_starts_in_training_mode_with_fp32_parameters_on_the_cpu(small: nn.Module) -> None:
    assert small.training
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in small.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gpt2", {"vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}),
        ("qwen3", {**SMALL, "head_dim": 16, "num_key_value_heads": 1}),
        ("mamba", {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}),
    ],
)
def test_other_causal_models_are_built_from_their_config(model_type: str, config: dict[str, Any]) -> None:
    built = models.build(ModelConfig(name="other", model_type=model_type, path=None, config=config), seed=0)
    assert math.isfinite(models.loss(built, torch.arange(16).reshape(2, 8)).item())


# --- loss


def test_the_loss_of_an_untrained_model_is_near_that_of_guessing(small: nn.Module) -> None:
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    assert models.loss(small, tokens).item() == pytest.approx(math.log(256), abs=0.1)


def test_the_loss_equals_the_mean_over_predicted_tokens_computed_one_by_one(small: nn.Module) -> None:
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = small(input_ids=tokens).logits
        each = [-logits[b, t].log_softmax(-1)[tokens[b, t + 1]].item() for b in range(2) for t in range(8)]
        assert models.loss(small, tokens).item() == pytest.approx(sum(each) / len(each), rel=1e-6)


def test_the_loss_equals_that_of_transformers_and_leaves_the_tokens_alone(small: nn.Module) -> None:
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(2))
    before = tokens.clone()
    ours = models.loss(small, tokens)
    assert ours.item() == pytest.approx(small(input_ids=tokens, labels=tokens).loss.item(), rel=1e-6)
    assert torch.equal(tokens, before)


def test_no_prediction_sees_a_later_token(small: nn.Module) -> None:
    tokens = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(3))
    changed = tokens.clone()
    changed[0, -1] += 1
    with torch.no_grad():
        assert torch.equal(small(input_ids=tokens).logits[:, :-1], small(input_ids=changed).logits[:, :-1])


def test_the_softmax_of_a_bf16_model_is_fp32() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    assert models.loss(models.build(settings(), 0).to(torch.bfloat16), tokens).dtype == torch.float32


# --- parameters


def test_tied_parameters_are_counted_once() -> None:
    untied, tied = models.build(settings(), 0), models.build(settings(tie_word_embeddings=True), 0)
    assert models.num_parameters(untied) - models.num_parameters(tied) == 256 * 32


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("tiny", 869_504),
        ("14m", 13.9e6),
        ("60m", 62e6),
        ("150m", 175e6),
        ("400m", 400e6),
        ("1b", 1.1e9),
    ],
)
def test_every_preset_has_the_size_of_its_name(preset: str, parameters: float) -> None:
    preset_settings = compose([f"model={preset}", "data.sequence_length=1024"]).model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.config_of(preset_settings))
    assert models.num_parameters(model) == pytest.approx(parameters, rel=0 if preset == "tiny" else 0.15)


# --- files


def test_a_saved_model_loads_in_plain_transformers_with_equal_weights(small: nn.Module, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    models.save(small, tmp_path / "model")
    assert equal(small, AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    assert equal(small, models.load(tmp_path / "model"))
    assert not list(tmp_path.glob(".*"))


def test_a_model_of_tied_weights_survives_saving(tmp_path: Path) -> None:
    tied = models.build(settings(tie_word_embeddings=True), 0)
    models.save(tied, tmp_path / "model")
    loaded = models.load(tmp_path / "model")
    assert equal(tied, loaded)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_model_saved_with_bytes_brings_a_tokenizer_for_plain_transformers(small: nn.Module, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    models.save(small, tmp_path / "model", load_tokenizer("bytes"))
    text = "héllo Ā \x00 wörld\n\tdef f(x): don't  , . 日本 \U0001f600" + "".join(map(chr, range(0x250)))
    plain = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = plain(text)["input_ids"]
    assert ids == list(text.encode())
    assert plain.decode(ids) == text
    assert plain.eos_token_id == 0
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 0


def test_a_saved_directory_is_its_own_tokenizer(small: nn.Module, tmp_path: Path) -> None:
    models.save(small, tmp_path / "model", load_tokenizer("bytes"))
    assert type(load_tokenizer(str(tmp_path / "model"))) is type(load_tokenizer("bytes"))


def test_saving_replaces_an_older_model_whole(small: nn.Module, tmp_path: Path) -> None:
    models.save(small, tmp_path / "model")
    (tmp_path / "model" / "stale.txt").write_text("from the older model")
    other = models.build(settings(), 1)
    models.save(other, tmp_path / "model")
    assert equal(other, models.load(tmp_path / "model"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert not (tmp_path / "model" / "stale.txt").exists()


def test_a_failed_save_leaves_the_older_model_and_nothing_else(small: nn.Module, tmp_path: Path) -> None:
    class FullDisk:
        end = 0

        def save(self, directory: Path) -> None:
            raise OSError(28, "No space left on device")

    models.save(small, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model: cannot be written \(.*No space left on device\); free space"):
        models.save(models.build(settings(), 1), tmp_path / "model", FullDisk())
    assert equal(small, models.load(tmp_path / "model"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_directory_that_cannot_be_written_is_an_error_of_one_line(small: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"file/model: cannot be written \(Not a directory\); choose another directory"
    ):
        models.save(small, tmp_path / "file" / "model")


def test_training_goes_on_from_a_directory_in_fp32(small: nn.Module, tmp_path: Path) -> None:
    half = models.build(settings(), 0).to(torch.bfloat16)
    models.save(half, tmp_path / "model")
    continued = models.build(settings(path=str(tmp_path / "model")), seed=5, vocab_size=256, sequence_length=64)
    assert continued.training
    assert {parameter.dtype for parameter in continued.parameters()} == {torch.float32}
    assert torch.equal(weights(continued)["lm_head.weight"], weights(half)["lm_head.weight"].float())


# --- what goes wrong


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (settings("lama"), "model.model_type: 'lama' is no model type of transformers; did you mean 'llama'?"),
        (settings("t5"), "model.model_type: 't5' has no causal language model; one of "),
        (
            settings(hiden_size=1),
            "model.config.hiden_size: LlamaConfig has no such setting; did you mean 'hidden_size'?",
        ),
        (settings(hidden_size="a"), "model.config: Field 'hidden_size' expected int, got str"),
        (settings(hidden_size=33), "The hidden size (33) is not a multiple of the number of attention heads (2)"),
        (settings(hidden_act="nope"), "model.config: cannot build this llama: 'nope'; change it"),
        (settings(num_key_value_heads=3), "model.config: cannot build this llama: "),
        (
            settings(vocab_size=100),
            "model.config.vocab_size: 100 is smaller than the tokenizer's 256; set it to 256 or",
        ),
        (
            settings(max_position_embeddings=16),
            "data.sequence_length: 32 tokens are more than the model's 16 positions; lower it or raise",
        ),
        (settings(path="/nowhere"), "model.path: /nowhere is no directory; give a directory with config.json"),
    ],
)
def test_a_model_that_cannot_be_built_is_an_error_of_one_line(given: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models.build(given, 0, vocab_size=256, sequence_length=32)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_only_rotary_embeddings_read_are_known() -> None:
    assert models.config_of(settings(rope_theta=500_000.0)).rope_parameters["rope_theta"] == 500_000.0


@pytest.fixture(scope="module")
def saved(small: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "model"
    models.save(small, directory)
    return directory


def _without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _without_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _truncated(directory: Path) -> None:
    weights_file = directory / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:1000])


def _bad_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _incomplete(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_config, "has no config.json; give a directory in Hugging Face format"),
        (_without_weights, "has no *.safetensors; other weight formats are not read, convert them"),
        (_truncated, "cannot be loaded: "),
        (_bad_config, "cannot be loaded: "),
        (_incomplete, "lacks 1 of the model's weights, lm_head.weight first; use a complete checkpoint"),
    ],
)
def test_a_damaged_directory_is_refused_in_one_line(saved: Path, tmp_path: Path, damage: Any, message: str) -> None:
    shutil.copytree(saved, tmp_path / "model")
    damage(tmp_path / "model")
    random_state = torch.random.get_rng_state()
    with pytest.raises(CheckpointError) as caught:
        models.load(tmp_path / "model", key="model.path")
    assert str(caught.value).startswith(f"model.path: {tmp_path / 'model'} ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.random.get_rng_state(), random_state)  # missing weights are drawn before they are noticed


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_a_number_that_no_model_has_is_refused_before_a_config_is_made(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.config.{name}: 1000000000 is more than 16777216"):
        models.config_of(settings(**{name: 10**9}))


def test_a_model_of_too_many_layers_is_refused_while_it_is_outlined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["diloco.model.build"], "MAX_PARTS", 100)  # the package has a function of this name
    with torch.device("meta"), pytest.raises(ConfigError, match="it has more than 100 layers and other parts"):
        models.outline(settings(num_hidden_layers=1000))
    with torch.device("meta"):
        assert all(one.is_meta for one in models.outline(settings()).parameters())


def test_the_numbers_of_a_saved_config_have_the_same_limits(tmp_path: Path) -> None:
    models.save(models.build(settings(), 0), tmp_path / "model")
    pretrained = ModelConfig(name="pretrained", path=str(tmp_path / "model"))
    assert models.num_parameters(models.outline(pretrained)) == models.num_parameters(models.build(settings(), 0))
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1000000000'))
    for load in (models.outline, lambda given: models.build(given, 0)):
        with pytest.raises(ConfigError, match=r"model\.path: .*num_hidden_layers: 1000000000 is more than"):
            load(pretrained)
