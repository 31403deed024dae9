"""`diloco eval`, `export` and `generate`: what a run has trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from diloco import data, hub
from diloco import model as models
from diloco.attach.ranks import RankGroup
from diloco.config import Config, compose
from diloco.errors import CheckpointError, ConfigError
from diloco.outer.fragments import partition, scatter_
from diloco.rundir.checkpoint import Checkpoint, CheckpointStore
from diloco.rundir.compare import read_json, read_run
from diloco.rundir.files import write_atomic
from diloco.text import human_count
from diloco.train import evaluate as evaluation
from diloco.train.precision import autocast
from diloco.train.start_files import with_origin

__all__ = ["evaluate", "export", "generate"]


def evaluate(config: Config, model: Path) -> int:
    """Print the loss of a model on the configured held-out sequences."""
    ranks = RankGroup.from_environment(config.train.device)
    with _model_of(model) as place:
        loaded = models.load(place, key="MODEL_DIR").to(ranks.device)
    dataset = data.load(config.data, config.run.seed)
    models.check_fit(loaded.config, dataset.tokenizer, key="MODEL_DIR")
    holdout = dataset.holdout(config.eval.sequences)
    with autocast(config, ranks.device):
        models.prepare_head_(loaded)
        result = evaluation.evaluate(loaded, holdout, config.inner.batch_size, ranks.device, dataset.tokenizer)
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.3f} bits per byte"
    click.echo(
        f"loss {result.loss:.6f} nats per token, perplexity {result.perplexity:.4f}{bits} "
        f"({result.tokens} held-out tokens of {dataset.description})"
    )
    return 0


def generate(model: Path, prompt: str, tokens: int, temperature: float, seed: int) -> int:
    """Print the prompt and what the model writes after it."""
    with _model_of(model) as place:
        loaded, tokenizer = models.load(place, key="MODEL_DIR"), data.load_tokenizer(str(place))
    text = evaluation.generate(loaded, tokenizer, prompt, max_new_tokens=tokens, temperature=temperature, seed=seed)
    click.echo(prompt + text)
    return 0


@contextmanager
def _model_of(place: Path) -> Iterator[Path]:
    """The model directory that `place` is. Of a run directory its final model, or the newest checkpoint where a run was
    ended within a round.
    """
    if (place / "model" / "config.json").is_file():
        yield place / "model"
    elif (place / "config.yaml").is_file() and (checkpoint := _newest(place)) is not None:
        with TemporaryDirectory() as scratch:
            _write(with_origin(compose([], base=place / "config.yaml"), place), checkpoint, Path(scratch))
            yield Path(scratch)
    else:
        yield place


def _newest(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint of all peers in a run directory."""
    peers = [place for place in sorted((run_dir / "checkpoints").glob("*")) if place.is_dir()]
    newest = [one for place in peers if (one := CheckpointStore(place, keep=1).load_latest()) is not None]
    return max(newest, key=lambda one: one.step, default=None)


def export(source: Path, out: Path, name: str | None = None, private: bool = False) -> int:
    """Write the newest checkpoint of a run directory (or of one peer's checkpoints) to `out`.

    With a `name`, upload it to the hub, which is asked only once all of it is written.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"OUT={out} is not empty; name a directory that does not exist yet")
    if name is not None:
        hub.check_push("--push-to-hub", name)
    run_dir = next((place for place in (source, *source.parents) if (place / "config.yaml").is_file()), None)
    if run_dir is None:
        raise CheckpointError(f"{source} is no run directory: there is no config.yaml in it; name the run.dir of a run")
    config = compose([], base=run_dir / "config.yaml")
    checkpoint = _newest(run_dir)
    if checkpoint is None and not (run_dir / "model").is_dir():
        raise CheckpointError(f"{run_dir} holds no checkpoint yet; let the run reach its first outer step")
    what = f"outer step {checkpoint.step}" if checkpoint is not None else "final model"
    if checkpoint is None:
        shutil.copytree(run_dir / "model", out, dirs_exist_ok=True)
    else:
        _write(with_origin(config, run_dir), checkpoint, out)
    write_atomic(out / "README.md", _model_card(config, run_dir, checkpoint))
    click.echo(f"{out}: {what} of run {config.run.id}")
    if name is not None:
        click.echo(hub.push("--push-to-hub", name, out, private, f"{what} of run {config.run.id}"))
    return 0


def _write(config: Config, checkpoint: Checkpoint, out: Path) -> None:
    tokenizer = data.load_tokenizer(*config.data.tokenizer_place)
    model = models.build(config.model, config.run.seed, tokenizer=tokenizer)
    parameters = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
    anchors = checkpoint.tensors["anchor"]
    if config.outer.method == "data_parallel":
        for name, values in anchors.items():
            parameters[name].copy_(values)
    else:
        numels = {name: parameter.numel() for name, parameter in parameters.items()}
        for fragment in partition(numels, config.outer.fragments, config.outer.pattern):
            scatter_(parameters, fragment, 0, fragment.numel, anchors[str(fragment.index)])
    models.save(model, out, tokenizer)


def _model_card(config: Config, run_dir: Path, checkpoint: Checkpoint | None) -> str:
    """Markdown with the header that the Hugging Face hub reads, of a checkpoint or of a run's final model."""
    model, data = config.model, config.data
    run = read_run(run_dir)
    if checkpoint is not None:
        step, tokens = str(checkpoint.step), human_count(float(checkpoint.state["applied_tokens"]))
    else:
        step = str(read_json(run_dir / "summary.json").get("outer_steps", "unknown"))
        tokens = "unknown" if run.tokens is None else human_count(run.tokens)
    header = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [diloco]"]
    rows = {"run": config.run.id, "manifest": config.manifest().hash(), "outer step": step, "tokens": tokens}
    if model.path is not None and model.revision is not None:
        header.append(f"base_model: {model.path}")
        rows["started from"] = f"{model.path} at {model.revision}"
    rows["text"] = f"{data.name} at {data.revision or 'its newest commit'}" if data.name else data.source
    known = [point for point in run.curve if checkpoint is None or point.version <= checkpoint.step]
    if known:
        rows["held-out loss"] = f"{known[-1].loss:.4f} nats per token, at outer step {known[-1].version}"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    front = "\n".join(["---", *header, "---"])
    return f"{front}\n\n# {config.run.id}\n\nTrained with diloco.\n\n| | |\n|---|---|\n{table}\n"
