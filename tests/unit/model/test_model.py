"""Models and adapters: initial weights, loss, files, presets, and the texts of what goes wrong."""

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.config import ModelConfig
from diloco.config.compose import compose
from diloco.data import load_tokenizer
from diloco.data.tokenizers import ByteTokenizer
from diloco.errors import CheckpointError, ConfigError
from tests.support.errors import error_text
from tests.support.models import SMALL as ONE_LAYER
from tests.support.models import small_model

SMALL = {**ONE_LAYER, "num_hidden_layers": 2}


def settings(model_type: str = "llama", path: str | None = None, **config: Any) -> ModelConfig:
    config = {} if path else {**SMALL, **config}
    return ModelConfig(name="small", model_type=model_type, path=path, config=config)


def equal(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    same = all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    return same and ours.keys() == theirs.keys()


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return models.build(settings(), seed=0)


@pytest.fixture(scope="module")
def saved(small: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "model"
    models.save(small, directory)
    return directory


def test_the_seed_alone_says_the_weights_of_a_model(small: nn.Module) -> None:
    torch.manual_seed(99)
    torch.rand(7)
    before = torch.random.get_rng_state()
    assert equal(small, models.build(settings(), seed=0))
    assert not equal(small, models.build(settings(), seed=1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert small.training
    assert {(one.dtype, one.device.type) for one in small.parameters()} == {(torch.float32, "cpu")}


def test_the_loss_is_the_mean_over_predicted_tokens(small: nn.Module) -> None:
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    before, changed = tokens.clone(), tokens.clone()
    changed[:, -1] += 1
    with torch.no_grad():
        found = small(input_ids=tokens, labels=tokens)
        log_p = found.logits[:, :-1].log_softmax(-1)
        mean = -log_p.gather(2, tokens[:, 1:, None]).mean().item()
        ours = models.loss(small, tokens).item()
        later = small(input_ids=changed).logits
        assert torch.equal(found.logits[:, :-1], later[:, :-1]), "none sees a later token"
    assert torch.equal(tokens, before)
    assert [mean, found.loss.item()] == pytest.approx([ours, ours], rel=1e-6)
    assert ours == pytest.approx(math.log(256), abs=0.1)


SIZES = {"tiny": 869_504, "14m": 14e6, "60m": 60e6, "150m": 150e6, "400m": 400e6, "1b": 1.1e9}


@pytest.mark.parametrize(("preset", "parameters"), SIZES.items())
def test_every_preset_has_the_size_of_its_name(preset: str, parameters: float) -> None:
    with torch.device("meta"):
        model = models.outline(compose([f"model={preset}", "data.sequence_length=1024"]).model)
    assert models.num_parameters(model) == pytest.approx(parameters, rel=0.03)


def test_a_saved_model_loads_in_plain_transformers(
    saved: Path, small: nn.Module, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    assert equal(small, AutoModelForCausalLM.from_pretrained(saved))
    assert equal(small, models.load(saved))
    assert not list(saved.parent.glob(".*"))
    tied = models.build(settings(tie_word_embeddings=True), 0)
    models.save(tied, tmp_path / "tied")
    loaded = models.load(tmp_path / "tied")
    assert equal(tied, loaded)
    counted = models.num_parameters(small) - models.num_parameters(loaded)
    assert counted == 256 * 32, "they are counted once"
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_model_saved_with_bytes_brings_a_plain_tokenizer(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    # as the library has it in some processes
    monkeypatch.setattr("transformers.convert_slow_tokenizer", print)
    models.save(small, tmp_path / "model", load_tokenizer("bytes"))
    text = "héllo Ā \x00 wörld\n\tdef f(x): don't  , . 日本 \U0001f600"
    text += "".join(map(chr, range(0x250)))
    plain = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = plain(text)["input_ids"]
    assert ids == list(text.encode())
    assert plain.decode(ids) == text
    assert plain.eos_token_id == 0
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 0
    own = load_tokenizer(str(tmp_path / "model"))
    assert type(own) is type(load_tokenizer("bytes")), "it is its own tokenizer"


def test_saving_replaces_an_older_model_whole_or_not_at_all(
    small: nn.Module, tmp_path: Path
) -> None:
    place, other = tmp_path / "model", models.build(settings(), 1)
    full = OSError(28, "No space left on device")
    full_disk: Any = SimpleNamespace(begin=[], end=0, save=Mock(side_effect=full))
    models.save(other, place)
    (place / "stale.txt").write_text("from the older model")
    models.save(small, place)
    assert not (place / "stale.txt").exists()
    no_space = r"model: cannot be written \(.*No space left on device\); free space"
    no_folder = r"x: cannot be written \(Not a directory\); choose another directory"
    inside = place / "config.json" / "x"
    for directory, tokenizer, why in ((place, full_disk, no_space), (inside, None, no_folder)):
        with pytest.raises(ConfigError, match=why):
            models.save(other, directory, tokenizer)
        assert equal(small, models.load(place))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_training_goes_on_from_a_directory_in_fp32(tmp_path: Path) -> None:
    half = models.build(settings(), 0).to(torch.bfloat16)
    assert models.loss(half, torch.zeros(2, 8, dtype=torch.int64)).dtype == torch.float32
    models.save(half, tmp_path / "model")
    saved = settings(path=str(tmp_path / "model"))
    continued = models.build(saved, seed=5, tokenizer=ByteTokenizer(), sequence_length=64)
    assert continued.training
    assert {parameter.dtype for parameter in continued.parameters()} == {torch.float32}
    assert equal(continued, half.float())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (settings("lama"), "'lama' is no model type of transformers; did you mean 'llama'?"),
        (settings("t5"), "model.model_type: 't5' has no causal language model; one of "),
        (settings(hidden_size=33), "(33) is not a multiple of the number of attention heads (2)"),
        (
            settings(vocab_size=100),
            "vocab_size: a vocabulary of 100 has no id 255, which the tokenizer gives to the last",
        ),
        (
            settings(max_position_embeddings=16),
            "data.sequence_length: 32 tokens are more than the model's 16 positions",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_an_error_of_one_line(
    given: ModelConfig, message: str
) -> None:
    asked: Any = {"tokenizer": ByteTokenizer(), "sequence_length": 32}
    assert message in error_text(ConfigError, models.build, given, 0, **asked)


def incomplete(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


UNREAD = "has no *.safetensors; other weight formats are not read, convert them"
DAMAGE: list[tuple[Any, str]] = [
    (
        lambda place: (place / "config.json").unlink(),
        "has no config.json; give a directory in Hugging Face format",
    ),
    (lambda place: (place / "model.safetensors").rename(place / "pytorch_model.bin"), UNREAD),
    (lambda place: os.truncate(place / "model.safetensors", 1000), "cannot be loaded: "),
    (incomplete, "lacks 1 of the model's weights, lm_head.weight first; use a complete checkpoint"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_directory_is_refused_in_one_line(
    saved: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    shutil.copytree(saved, tmp_path / "model")
    damage(tmp_path / "model")
    random_state = torch.random.get_rng_state()
    text = error_text(CheckpointError, models.load, tmp_path / "model", key="model.path")
    assert text.startswith(f"model.path: {tmp_path / 'model'} ") and message in text
    # missing weights are drawn before they are noticed
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_numbers_that_no_model_has_are_refused(
    saved: Path, small: nn.Module, tmp_path: Path
) -> None:
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        most = f"^model.config.{name}: 1000000000 is more than 33554432"
        with pytest.raises(ConfigError, match=most):
            models.config_of(settings(**{name: 10**9}))
    shutil.copytree(saved, tmp_path / "model")
    pretrained = ModelConfig(name="pretrained", path=str(tmp_path / "model"))
    assert models.num_parameters(models.outline(pretrained)) == models.num_parameters(small)
    file = tmp_path / "model" / "config.json"
    text = file.read_text()
    file.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1000000000'))
    most = r"model\.path: .*num_hidden_layers: 1000000000 is more than"
    for load in (models.outline, lambda given: models.build(given, 0)):
        with pytest.raises(ConfigError, match=most):
            load(pretrained)


@pytest.mark.parametrize("value", ["org/kernel", {"": "org/kernel@main"}])
def test_a_config_names_no_kernels_of_the_hub(saved: Path, tmp_path: Path, value: Any) -> None:
    """Transformers would fetch and run them; a manifest, or a base, may be somebody else's."""
    names = r"attn_implementation.*: org/kernel.* is code of the hub.*; drop it"
    with pytest.raises(ConfigError, match=names):
        models.config_of(settings(attn_implementation=value))
    shutil.copytree(saved, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    content = {**json.loads(file.read_text()), "attn_implementation": value}
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=names):
        models.build(ModelConfig(name="pretrained", path=str(tmp_path / "model")), 0)


ROWS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def adapted(seed: int = 0, **settings: Any) -> nn.Module:
    values = {"adapter": "lora", "adapter_rank": 2, **settings}
    return models.build(ModelConfig(name="small", config=ONE_LAYER, **values), seed)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def same(ones: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return ones.keys() == others.keys() and all(torch.equal(ones[k], others[k]) for k in ones)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_only_the_adapter_is_trained_and_it_is_that_of_the_seed(kind: str) -> None:
    model = adapted(adapter=kind)
    assert trained(model) and all("lora_" in name for name in trained(model))
    assert same(trained(model), trained(adapted(adapter=kind)))
    assert not same(trained(model), trained(adapted(1, adapter=kind)))
    plain = {name: p.detach() for name, p in small_model().named_parameters()}
    assert same(models.base_parameters(model), plain)
    assert torch.allclose(models.loss(model, ROWS), models.loss(small_model(), ROWS), rtol=1e-6)
    with torch.device("meta"):
        values = {"name": "small", "config": ONE_LAYER, "adapter": kind, "adapter_rank": 2}
        outline = models.outline(ModelConfig(**values))
    assert models.num_trained(outline) == sum(p.numel() for p in trained(model).values())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_merged_or_written_as_peft_reads_it(tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted()
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.05)
    expected = models.loss(model, ROWS)
    assert not torch.allclose(expected, models.loss(small_model(), ROWS), rtol=1e-3)
    models.save(model, tmp_path / "adapter")
    read: Any = PeftModel.from_pretrained(small_model(), str(tmp_path / "adapter"))
    assert torch.allclose(models.loss(read, ROWS), expected, rtol=1e-5)
    models.merge_adapter_(model)
    models.save(model, tmp_path / "merged")
    loaded = models.load(tmp_path / "merged")
    assert torch.allclose(models.loss(loaded, ROWS), expected, rtol=1e-5)
    assert [name for name, _ in loaded.named_parameters()] == list(models.base_parameters(loaded))


def test_layers_that_are_not_there_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"adapter_targets=q_poj: .*'q_poj'.*; name layers"):
        adapted(adapter_targets=("q_poj",))


@pytest.mark.parametrize(
    "target", ["embed_tokens", "lm_head", pytest.param("q_proj", id="not tied itself")]
)
def test_no_adapter_goes_on_a_weight_that_two_layers_share(target: str) -> None:
    """Merged into it, it would change both."""
    tied = ModelConfig(
        name="small",
        config={**ONE_LAYER, "tie_word_embeddings": True},
        adapter="lora",
        adapter_targets=(target, "v_proj"),
    )
    if target == "q_proj":
        assert models.has_adapter(models.build(tied, 0))
        return
    said = error_text(ConfigError, models.build, tied, 0)
    assert f"{target} shares its weight with another layer" in said


EXPERTS = {**ONE_LAYER, "num_local_experts": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("model_type", "targets", "config"),
    [
        ("llama", ("embed_tokens", "lm_head", "q_proj"), ONE_LAYER),
        ("mixtral", ("all-linear",), EXPERTS),
    ],
)
def test_an_adapter_on_any_layer_merges_into_the_model_that_it_was(
    model_type: str, targets: tuple[str, ...], config: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    values: Any = {"adapter": "lora", "adapter_targets": targets, "adapter_rank": 2}
    model = models.build(
        ModelConfig(name="small", model_type=model_type, config=config, **values), 0
    ).eval()
    for number, parameter in enumerate(trained(model).values()):
        generator = torch.Generator().manual_seed(number)
        parameter.data.normal_(0, 0.2, generator=generator)
    with torch.no_grad():
        before: Any = model(ROWS).logits
        models.save(model, tmp_path / "adapter")
        written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        models.merge_adapter_(model)
        assert torch.allclose(model(ROWS).logits, before, rtol=1e-4, atol=1e-5)
    assert all("lora_" in name for name in written), "and no embedding table"
    models.save(model, tmp_path / "merged")
    assert equal(models.load(tmp_path / "merged"), model)


def test_experts_with_dropout_are_refused_with_a_remedy_that_works() -> None:
    values: Any = {"adapter": "lora", "adapter_targets": ("all-linear",), "adapter_dropout": 0.1}
    mixed = ModelConfig(name="small", model_type="mixtral", config=EXPERTS, **values)
    assert "; set model.adapter_dropout=0, or" in error_text(ConfigError, models.build, mixed, 0)
    models.build(mixed.model_copy(update={"adapter_dropout": 0.0}), 0)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with its base's config"])
def test_the_directory_of_an_adapter_is_refused_with_its_base(
    saved: Path, tmp_path: Path, beside: bool
) -> None:
    models.save(adapted(), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "base_model_name_or_path": "org/base\x1b[2J"}))
    if beside:
        shutil.copy(saved / "config.json", tmp_path / "adapter")
    for what in ("none", "lora"):
        chosen = ModelConfig(name="small", path=str(tmp_path / "adapter"), adapter=what)
        said = error_text(CheckpointError, models.build, chosen, 0)
        assert "adapter is an adapter of org/base [2J; merge it into that one (diloco exp" in said


def test_a_multimodal_model_ends_texts_in_its_language_part(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    layers: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {**layers, "vocab_size": 256, "num_attention_heads": 2, "head_dim": 8}
    vision = {**layers, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    marks = {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62}
    config = Gemma3Config(
        text_config={**text, "num_key_value_heads": 1},
        vision_config=vision,
        mm_tokens_per_image=1,
        **marks,
    )
    model: Any = Gemma3ForConditionalGeneration(config)
    models.save(model, tmp_path / "model", ByteTokenizer())
    loaded = models.load(tmp_path / "model")
    assert type(loaded) is type(model) and equal(loaded, model)
    assert loaded.config.text_config.eos_token_id == loaded.generation_config.eos_token_id == 0


def test_what_a_killed_process_left_beside_a_model_goes(small: nn.Module, tmp_path: Path) -> None:
    left, other = tmp_path / ".model-0123abcd", tmp_path / ".model-of-mine"
    for folder in (left, other):
        folder.mkdir()
        (folder / "config.json").touch()
    models.save(small, tmp_path / "model")
    assert other.exists() and not left.exists()


BERT: dict[str, Any] = {**ONE_LAYER, "hidden_dropout_prob": 0.0}


def test_a_model_that_sees_what_it_is_to_predict_is_refused(tmp_path: Path) -> None:
    """An encoder with a head is one of `AutoModelForCausalLM`, and transformers only warns."""
    remedy = "sees the tokens that it is to predict; set is_decoder=true"
    encoder = ModelConfig(name="small", model_type="bert", config=BERT)
    assert remedy in error_text(ConfigError, models.build, encoder, 0)
    decoder = encoder.model_copy(update={"config": {**BERT, "is_decoder": True}})
    models.save(models.build(decoder, 0), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_decoder": False}))
    saved_one = ModelConfig(name="small", path=str(tmp_path / "model"))
    assert remedy in error_text(ConfigError, models.build, saved_one, 0)


def test_a_model_that_counts_positions_from_its_padding_is_saved_as_it_is(tmp_path: Path) -> None:
    config = {**BERT, "is_decoder": True, "type_vocab_size": 1}
    model = models.build(ModelConfig(name="small", model_type="roberta", config=config), 0).eval()
    tokens = ROWS + 5 - (ROWS > 250).long() * 10
    with torch.no_grad():
        before: Any = model(input_ids=tokens).logits
        models.save(model, tmp_path / "model", ByteTokenizer())
        again: Any = models.load(tmp_path / "model")(input_ids=tokens).logits
    assert torch.equal(before, again)


def test_an_infinity_that_is_the_default_of_a_config_need_not_be_said() -> None:
    shape = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8}
    config = {**shape, "head_dim": 8, "state_size": 8, "n_groups": 1}
    model = models.build(ModelConfig(name="small", model_type="mamba2", config=config), 0)
    recipe = models.recipe_of(model)
    json.dumps(recipe, allow_nan=False)
    del recipe["generation"]
    again = models.config_of(ModelConfig(name="small", **recipe))
    assert again.time_step_limit == model.config.time_step_limit
