"""`diloco eval`, `export` and `generate`: what a run has trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco.cli import PATH, Command, Options, configured, guest_arguments
from diloco.config.address import is_mailbox
from diloco.errors import CheckpointError, ConfigError
from diloco.text import human_count

if TYPE_CHECKING:
    from diloco.config import Config
    from diloco.rundir.checkpoint import Checkpoint

SEED = click.IntRange(0, 2**32 - 1)
TOKENS = "How many.  [default: 256, or as many as fit]"
PUSH = "Upload OUT as this model of the Hugging Face hub, too."


@click.command(name="eval", cls=Command)
@click.argument("model", metavar="MODEL_DIR", type=PATH)
@configured
def evaluate(model: Path, options: Options) -> int:
    """Measure the held-out loss of a model.

    \b
    diloco eval runs/quickstart/model
    diloco eval exported/ data=text data.path=notes/ eval.sequences=256

    MODEL_DIR is in Hugging Face format, or a run directory. Inside a run directory the settings of
    that run are the defaults, so its loss is reproduced.
    """
    files = [directory / "config.yaml" for directory in (model, model.parent)]
    base = options.base or next((file for file in files if file.is_file()), None)
    config = replace(options, base=base).compose()
    from diloco import data
    from diloco import model as models
    from diloco.attach.ranks import RankGroup
    from diloco.train import evaluate as evaluation
    from diloco.train.gradients import autocast

    device = RankGroup.from_environment(config.train.device).device
    with _model_of(model) as path:
        loaded = models.load(path, key="MODEL_DIR").to(device)
    dataset = data.load(config.data, config.run.seed)
    tokenizer, holdout = dataset.tokenizer, dataset.holdout(config.eval.sequences)
    models.check_fit(loaded.config, tokenizer, key="MODEL_DIR")
    with autocast(config, device):
        models.prepare_head_(loaded)
        size = config.inner.batch_size
        result = evaluation.evaluate(loaded, holdout, size, device, tokenizer)
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.3f} bits per byte"
    loss = f"loss {result.loss:.6f} nats per token, perplexity {result.perplexity:.4f}{bits}"
    click.echo(f"{loss} ({result.tokens} held-out tokens of {dataset.description})")
    return 0


@click.command(cls=Command)
@click.argument("model", metavar="MODEL_DIR|ADDRESS", type=PATH)
@click.option("--prompt", default="", show_default=False, help="Text to continue.")
@click.option("--chat", is_flag=True, help="The prompt is a user's question.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), help=TOKENS)
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.8, help="0: the likeliest.")
@click.option("--seed", type=SEED, default=0, help="Seed of the sampling.")
def generate(
    model: Path, prompt: str, chat: bool, tokens: int | None, temperature: float, seed: int
) -> int:
    """Print text from a model.

    \b
    diloco generate runs/quickstart/model --prompt 'def main(' --tokens 200
    diloco generate @runs/mine/address --chat --prompt 'Why is the sky blue?'

    MODEL_DIR is in Hugging Face format, or a run directory. Of the swarm at an ADDRESS the newest
    model is fetched; this machine does not train.
    """
    from diloco import data
    from diloco import model as models
    from diloco.train import evaluate as evaluation

    with _model_of(model) as path:
        loaded, tokenizer = models.load(path, key="MODEL_DIR"), data.load_tokenizer(str(path))
    asked = tokenizer.question(prompt) if chat else prompt
    text = evaluation.generate(
        loaded, tokenizer, asked, max_new_tokens=tokens, temperature=temperature, seed=seed
    )
    click.echo(text if chat else prompt + text)
    return 0


def _address_of(source: Path) -> str | None:
    """Return the address that was typed for a directory, or None."""
    text = re.sub("^file:/+", "file:///", str(source))  # a path has no double slashes
    text = re.sub(r"^([a-z][a-z0-9+]+):/(?!/)", r"\1://", text)
    is_address = re.match(r"@|-$|diloco:|/(ip[46]|dns[46]?)/", str(source)) is not None
    return text if is_address or is_mailbox(text) else None


def _fetch(address: str, out: Path, merge: bool) -> tuple[Config, int, int]:
    """Write the model of the swarm at an address, fetched as a host fetches it; it trains nothing
    and is no author. Return configuration, outer step and tokens."""
    from tempfile import TemporaryDirectory

    from diloco import data
    from diloco import model as models
    from diloco.train.host import Host

    options = Options(("train.device=cpu", "swarm.reachable=no"))
    swarm, given = guest_arguments(address, options)
    given += swarm.overrides
    with TemporaryDirectory(prefix="diloco-") as scratch:
        config = options.compose([f"run.dir={scratch}", *given])
        with Host(config, "visitor") as host:
            host.load()
            record = host.node.record()
        if merge:
            models.merge_adapter_(host.model)
        tokenizer = data.load_tokenizer(*host.config.data.tokenizer_place)
        models.save(host.model, out, tokenizer)
    return host.config.adopt(host.manifest), record.version, record.applied_tokens


@contextmanager
def _model_of(path: Path) -> Iterator[Path]:
    """Yield the model directory: of a run its final model, or else its newest checkpoint's; or of
    the swarm at an address."""
    from tempfile import TemporaryDirectory

    from diloco.config import compose
    from diloco.train.start_files import with_origin

    if (address := _address_of(path)) is not None:
        with TemporaryDirectory() as scratch:
            _fetch(address, Path(scratch), merge=True)
            yield Path(scratch)
    elif (path / "model" / "config.json").is_file():
        yield path / "model"
    elif (path / "config.yaml").is_file() and (checkpoint := _newest(path)) is not None:
        config = with_origin(compose([], base=path / "config.yaml"), path)
        with TemporaryDirectory() as scratch:
            _write(config, checkpoint, Path(scratch), merge=True)
            yield Path(scratch)
    else:
        yield path


def _newest(run_dir: Path) -> Checkpoint | None:
    """Load the newest checkpoint of all peers in a run directory."""
    from diloco.rundir.checkpoint import CheckpointStore

    paths = [path for path in sorted((run_dir / "checkpoints").glob("*")) if path.is_dir()]
    checkpoints = [CheckpointStore(path, keep=1).load_latest() for path in paths]
    return max(filter(None, checkpoints), key=lambda checkpoint: checkpoint.step, default=None)


@click.command(cls=Command)
@click.argument("source", metavar="RUN_DIR|ADDRESS", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
@click.option("--push-to-hub", "name", metavar="NAME", help=PUSH)
@click.option("--private", is_flag=True, help="Make a new model of the hub a private one.")
@click.option("--merge", is_flag=True, help="Write the whole model, its adapter merged into it.")
def export(source: Path, out: Path, name: str | None, private: bool, merge: bool) -> int:
    """Write a checkpoint as a Hugging Face model directory.

    \b
    diloco export runs/quickstart exported/
    diloco export runs/quickstart exported/ --push-to-hub me/quickstart --private
    diloco export @runs/mine/address exported/

    OUT holds weights, tokenizer, chat template, generation settings, and a README.md that says what
    was trained. Of a run with an adapter they are the adapter's, as peft reads it, or --merge.
    """
    if private and name is None:
        raise ConfigError("--private has no effect without --push-to-hub; drop it")
    import shutil

    from diloco import hub
    from diloco import model as models
    from diloco.config import compose
    from diloco.rundir.compare import read_json, read_run
    from diloco.rundir.files import write_atomic
    from diloco.train.start_files import with_origin

    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"OUT={out} is not empty; name a directory that does not exist yet")
    if name is not None:
        hub.check_push("--push-to-hub", name)
    if (address := _address_of(source)) is not None:
        with models.replacing(out) as fresh:
            config, step, tokens = _fetch(address, fresh, merge)
            write_atomic(fresh / "README.md", _model_card(config, fresh, step, tokens))
        return _exported(out, f"outer step {step} of run {config.run.id}", name, private)
    places = [path for path in (source, *source.parents) if (path / "config.yaml").is_file()]
    if not places:
        missing = f"{source} is no run directory: there is no config.yaml in it"
        raise CheckpointError(f"{missing}; name the run.dir of a run")
    run_dir = places[0]
    config = compose([], base=run_dir / "config.yaml")
    checkpoint = _newest(run_dir)
    if checkpoint is None and not (run_dir / "model").is_dir():
        remedy = "let the run reach its first outer step"
        raise CheckpointError(f"{run_dir} holds no checkpoint yet; {remedy}")
    title = f"final model of run {config.run.id}"
    with models.replacing(out) as fresh:
        if checkpoint is not None:
            title = f"outer step {checkpoint.step} of run {config.run.id}"
            _write(with_origin(config, run_dir), checkpoint, fresh, merge)
        else:
            shutil.copytree(run_dir / "model", fresh, dirs_exist_ok=True)
        done = read_json(run_dir / "summary.json").get("outer_steps")
        learned = read_run(run_dir).tokens
        if checkpoint is not None:
            done, learned = checkpoint.step, int(checkpoint.state["applied_tokens"])
        write_atomic(fresh / "README.md", _model_card(config, run_dir, done, learned))
    return _exported(out, title, name, private)


def _exported(out: Path, title: str, name: str | None, private: bool) -> int:
    """Say what is there, and push it under that name."""
    from diloco import hub

    click.echo(f"{out}: {title}")
    if name is not None:
        click.echo(hub.push("--push-to-hub", name, out, private, title))
    return 0


def _write(config: Config, checkpoint: Checkpoint, out: Path, merge: bool = False) -> None:
    from diloco import data
    from diloco import model as models
    from diloco.outer.fragments import partition, scatter_

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
            scatter_(parameters, fragment, 0, anchors[str(fragment.index)])
    if merge:
        models.merge_adapter_(model)
    models.save(model, out, tokenizer)


def _model_card(config: Config, run_dir: Path, step: int | None, tokens: int | None) -> str:
    """Return Markdown with the hub's header, for a model after that outer step."""
    from diloco.rundir.compare import read_run

    model, data, run = config.model, config.data, read_run(run_dir)
    header = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [diloco]"]
    rows = {
        "run": config.run.id,
        "manifest": config.manifest().hash(),
        "outer step": "unknown" if step is None else str(step),
        "tokens": "unknown" if tokens is None else human_count(tokens),
        "text": data.source,
    }
    if data.name is not None:
        rows["text"] = f"{data.name} at {data.revision or 'its newest commit'}"
    if model.path is not None and model.revision is not None:
        header.append(f"base_model: {model.path}")
        rows["started from"] = f"{model.path} at {model.revision}"
    known = [point for point in run.curve if step is None or point.version <= step]
    if known:
        at = f"at outer step {known[-1].version}"
        rows["held-out loss"] = f"{known[-1].loss:.4f} nats per token, {at}"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    front = "\n".join(["---", *header, "---"])
    return f"{front}\n\n# {config.run.id}\n\nTrained with diloco.\n\n| | |\n|---|---|\n{table}\n"
