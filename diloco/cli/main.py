"""Arguments of every command; the modules that run them (and torch) are imported only when one runs.

1. click parses the arguments; what is no option is an override such as `outer.lr=0.5` or `model=14m`.
2. `diloco.config.compose` turns overrides into a `Config`: a bad one ends here, before anything heavy is imported.
3. `diloco.cli.<command>.run(config, ...)` does the work and returns the exit code.

`main` maps errors to one line and an exit code through `diloco.errors.guard`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from diloco import __version__
from diloco.errors import ConfigError, guard

__all__ = ["cli", "main"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; the console script and `python -m diloco` are this."""
    sys.exit(guard(lambda: _invoke(list(sys.argv[1:] if arguments is None else arguments))))


def _invoke(arguments: list[str]) -> int:
    # Not cli.main(): it turns Ctrl+C into its own Abort and any broken pipe, even a peer's socket, into exit code 1.
    try:
        with cli.make_context("diloco", arguments or ["--help"]) as context:
            return int(cli.invoke(context) or 0)
    except click.exceptions.Exit as finished:
        return finished.exit_code
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "diloco")
        raise ConfigError(f"{error.format_message()} See {command} --help") from None


class _Command(click.Command):
    """A command whose help ends with the choices of every configuration group."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if not any(parameter.name == "overrides" for parameter in self.params):
            return
        from diloco.config import choices

        with formatter.section("Groups (GROUP=CHOICE)"):
            formatter.write_dl([(group, " ".join(names)) for group, names in choices().items()])
        with formatter.section("Settings (KEY=VALUE)"):
            formatter.write_text(f"{ctx.command_path} --cfg help lists them with meaning, range and default")


def _configured(function: _Function) -> _Function:
    """Adds what every command that takes a configuration has."""
    for decorate in (
        click.argument("overrides", nargs=-1, type=click.UNPROCESSED),
        click.option(
            "--config",
            "base",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Start from this config.yaml of a run instead of the defaults.",
        ),
        click.option(
            "--cfg",
            type=click.Choice(["job", "manifest", "help"]),
            help="Print the composed configuration, the manifest and its hash, or every setting; then stop.",
        ),
    ):
        function = decorate(function)
    return function


def _sweepable(function: _Function) -> _Function:
    """Adds --multirun, which makes a command the same as `diloco sweep COMMAND`."""
    return click.option("--multirun", is_flag=True, help="Sweep over KEY=V1,V2 as diloco sweep does.")(function)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="diloco")
def cli() -> None:
    """Serverless DiLoCo: peers anywhere train one model, without a server.

    \b
    diloco local experiment=quickstart       four peers on this machine, in three minutes
    diloco generate runs/quickstart/model    text from the result
    """


@cli.command(cls=_Command)
@_configured
@_sweepable
def local(**arguments: Any) -> int:
    """Train with several peers on this machine.

    \b
    diloco local experiment=quickstart
    diloco local local.peers=2 model=tiny outer.sync_every=50 run.dir=runs/mine
    diloco local experiment=quickstart outer=data_parallel run.dir=runs/baseline
    diloco local data=text data.path=notes/ budget.tokens=5000000 budget.outer_steps=null

    The peers talk over the real network stack. Running it again with the same run.dir resumes the run.
    """
    return _run("local", **arguments)


@cli.command(cls=_Command)
@_configured
@_sweepable
def train(**arguments: Any) -> int:
    """Train as one peer, in a new swarm or joining one.

    \b
    diloco train run.id=mine swarm=network
    diloco train run.id=mine 'swarm.initial_peers=[/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...]'
    torchrun --nproc-per-node=8 -m diloco.train run.id=mine model=150m data=hub

    Without swarm.initial_peers it starts a new swarm and prints the address for the others.
    """
    return _run("train", **arguments)


@cli.command(cls=_Command)
@click.argument("address", required=False)
@_configured
def join(address: str | None, overrides: tuple[str, ...], cfg: str | None, base: Path | None) -> int:
    """Join a swarm as a volunteer.

    \b
    diloco join /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco join @runs/mine/address
    diloco join ADDRESS train.device=cpu train.threads=4 swarm.upload_limit=1e6

    Nothing but the ADDRESS is needed. The run's settings come from the swarm; device, precision, threads and how much
    of a batch is computed at a time from a look at this machine. Ctrl+C leaves cleanly at any time, and the same
    command comes back.
    """
    from diloco.config import compose
    from diloco.config.address import Address

    if cfg is not None:
        return _run("join", overrides, cfg, base)
    if address is None or ("=" in address and not address.startswith(("/", "@", "diloco:"))):
        raise ConfigError("join needs the ADDRESS of a peer, as it prints it")
    found = Address.parse(address)
    typed = [override.lstrip("+").partition("=")[0] for override in overrides]
    _refuse_run_owned(typed)
    config = compose([*overrides, *_admission(found)], base=base)
    _warn("join", config, overrides)
    return _implementation("join")(config, found, frozenset(typed))


def _refuse_run_owned(typed: Sequence[str]) -> None:
    """`ConfigError` for what a volunteer cannot choose."""
    from diloco.config import Manifest
    from diloco.config.describe import leaves

    owned = [key for key, _ in leaves(Manifest)]
    for key in typed:
        chosen = key in ("model", "data", "inner", "outer", "experiment")
        if chosen or any(key == one or key.startswith(f"{one}.") for one in owned):
            raise ConfigError(f"{key} belongs to the run and comes from the swarm; drop it, or start your own swarm")


def _admission(address: Any) -> list[str]:
    """The token of a link, as the setting that carries it."""
    if address.token is None:
        return []
    from diloco.config import SwarmConfig

    if "token" not in SwarmConfig.model_fields:
        raise ConfigError("ADDRESS holds a token, which this diloco does not know; install a newer one")
    return [f"swarm.token='{address.token}'"]


@cli.command(cls=_Command)
@click.option("--new", is_flag=True, help="Start a new swarm instead of joining one.")
@click.argument("address", required=False)
@_configured
def host(new: bool, address: str | None, overrides: tuple[str, ...], **arguments: Any) -> int:
    """Hold fragments, without training.

    \b
    diloco host --new run.id=mine swarm=network 'swarm.listen=[/ip4/0.0.0.0/tcp/4100]'
    diloco host /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...

    For a machine without an accelerator that stays: it keeps the state of the swarm and others can start from it.
    """
    from diloco.config.address import Address

    if address is not None and "=" in address and not address.startswith(("/", "@", "diloco:")):
        overrides, address = (address, *overrides), None  # the first argument was an override already
    if arguments["cfg"] is None and new == (address is not None):
        raise ConfigError("host needs either the ADDRESS of a peer, as it prints it, or --new")
    if address is not None:
        found = Address.parse(address)
        peers = ",".join(f"'{peer}'" for peer in found.peers)
        overrides = (*overrides, f"swarm.initial_peers=[{peers}]", *_admission(found))
    return _run("host", overrides, **arguments)


@cli.command(cls=_Command)
@click.argument("address")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl+C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--csv", "table", type=click.Path(path_type=Path), metavar="FILE", help="Write who gave what to FILE.")
def status(**arguments: Any) -> int:
    """Show what a swarm is doing, without joining it.

    \b
    diloco status /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco status @runs/mine/address --watch
    diloco status @runs/mine/address --json | jq .ledger

    Peers, fragments and who holds them, rounds, tokens, loss and events, as the peer at ADDRESS knows them.
    """
    return _implementation("status")(**arguments)


@cli.command(cls=_Command)
@click.argument("address")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; anyone there may look.")
@click.option("--port", type=click.IntRange(0, 65535), default=8471, show_default=True, help="Port; 0 is any free one.")
def dashboard(**arguments: Any) -> int:
    """Show what a swarm is doing, live in a browser.

    \b
    diloco dashboard @runs/mine/address
    diloco dashboard /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo... --port 9000

    The page is at /, the JSON of diloco status at /api/state, and figures for Prometheus are at /metrics.
    """
    return _implementation("dashboard")(**arguments)


@cli.command()
@click.argument("file", required=False, default="run.key", type=click.Path(path_type=Path))
def keygen(**arguments: Any) -> int:
    """Make the key of a closed run, and print its public half.

    \b
    diloco keygen run.key
    diloco train run.id=mine swarm=network swarm.key_path=run.key

    FILE (run.key by default) is its private half: who has it can invite peers and revoke invitations. Peers of such a
    run admit nobody without one.
    """
    return _keys("keygen", **arguments)


def _owner(function: _Function) -> _Function:
    """Adds what every command of a run's owner has."""
    key = click.option("--key", required=True, type=click.Path(path_type=Path), help="File with the run's private key.")
    return click.option("--run", required=True, metavar="RUN_ID", help="run.id of the run.")(key(function))


@cli.command()
@_owner
@click.option("--expires", default="7d", show_default=True, metavar="TIME", help="30m, 12h, 7d, 2w.")
@click.option(
    "--role",
    type=click.Choice(["worker", "host", "observer"]),
    default="worker",
    show_default=True,
    help="worker: all; host: holds fragments, contributes nothing; observer: looks on.",
)
@click.option("--bind", metavar="PEER_ID", help="Only this peer can use it.  [default: the first that does]")
@click.argument("address", required=False)
def invite(**arguments: Any) -> int:
    """Print an invitation to a closed run.

    \b
    diloco invite --key run.key --run mine /ip4/203.0.113.7/tcp/4100/p2p/Qm...
    diloco invite --key run.key --run mine --role observer --expires 12h

    With ADDRESS it is a link, else a token for swarm.token=@FILE. Either is a secret; its id, on stderr, is what
    diloco revoke takes.
    """
    return _keys("invite", **arguments)


@cli.command()
@_owner
@click.argument("address")
@click.argument("what", nargs=-1, required=True)
def revoke(**arguments: Any) -> int:
    """Put peers out of a closed run, at once and for good.

    \b
    diloco revoke --key run.key --run mine /ip4/203.0.113.7/tcp/4100/p2p/Qm... 7f3a90c2d41be865

    WHAT is the id of a token, a token, a link, or a peer id; ADDRESS any peer of the swarm, which tells the others.
    """
    return _keys("revoke", **arguments)


def _keys(command: str, **arguments: Any) -> int:
    done: int = getattr(import_module("diloco.cli.keys"), command)(**arguments)
    return done


@cli.command(name="eval", cls=_Command)
@click.argument("model", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@_configured
def evaluate(model: Path, base: Path | None, **arguments: Any) -> int:
    """Measure the held-out loss of a model.

    \b
    diloco eval runs/quickstart/model
    diloco eval exported/ data=text data.path=notes/ eval.sequences=256

    MODEL_DIR is in Hugging Face format, or a run directory. Inside a run directory the settings of that run are the
    defaults, so its loss is reproduced.
    """
    beside = (directory / "config.yaml" for directory in (model, model.parent))
    base = base or next((file for file in beside if file.is_file()), None)
    return _run("eval", base=base, model=model, **arguments)


@cli.command(cls=_Command)
@click.argument("source", metavar="CHECKPOINT_OR_RUN_DIR", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
def export(source: Path, out: Path) -> int:
    """Write a checkpoint as a Hugging Face model directory.

    \b
    diloco export runs/quickstart exported/
    """
    return _implementation("export")(source=source, out=out)


@cli.command(cls=_Command)
@click.argument("model", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=256, show_default=True, help="Tokens to generate.")
@click.option(
    "--temperature", type=click.FloatRange(0, 100), default=0.8, show_default=True, help="0 takes the likeliest token."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the sampling.")
def generate(**arguments: Any) -> int:
    """Print text from a model.

    \b
    diloco generate runs/quickstart/model --prompt 'def main(' --tokens 200

    MODEL_DIR is in Hugging Face format, or a run directory.
    """
    return _implementation("generate")(**arguments)


@cli.command(cls=_Command)
@_configured
@_sweepable
def simulate(**arguments: Any) -> int:
    """Train with many peers in virtual time, in this process.

    \b
    diloco simulate experiment=quickstart run.dir=runs/sim
    diloco simulate experiment=smoke 'sim.step_s=[1,1.5,2,3]' local.peers=4 sim.bandwidth=1e6 sim.latency_s=0.05
    diloco simulate experiment=smoke 'sim.events=[crash:3@120,join:4@60]' local.peers=4
    diloco simulate sim.mode=toy local.peers=1000

    Compute is real, but an inner step takes sim.step_s virtual seconds and a transfer what sim.bandwidth and
    sim.latency_s make of it. The same settings give the same run.
    """
    return _run("simulate", **arguments)


@cli.command(cls=_Command)
@click.argument("command", type=click.Choice(["local", "train", "simulate"]))
@_configured
@click.option("--jobs", type=click.IntRange(1, 1024), default=1, show_default=True, help="Members at a time.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="Where the members go.  [default: runs/RUN_ID-sweep]"
)
@click.option("--sweeper", default="grid", show_default=True, help="grid, or a Hydra sweeper such as optuna.")
@click.option("--launcher", help="A Hydra launcher such as submitit_slurm, instead of processes here.")
@click.option("--dry-run", is_flag=True, help="Check and list the members, and stop.")
def sweep(command: str, overrides: tuple[str, ...], cfg: str | None, **arguments: Any) -> int:
    """Run every combination of several values.

    \b
    diloco sweep simulate experiment=smoke outer.lr=0.5,0.7,1.0 outer.sync_every=10,20
    diloco sweep local experiment=quickstart 'run.seed=range(0,3)' --jobs 2 --dir runs/seeds
    diloco sweep local 'inner.lr=interval(1e-4,1e-2)' --sweeper optuna hydra.sweeper.n_trials=20

    Each member is a run directory of its own; the same command again goes on with those that are missing. At the end
    there are sweep.json, the table of diloco compare and its curves. A member that fails does not stop the others.
    """
    if cfg is not None:
        raise ConfigError(f"--cfg={cfg} shows one configuration; use --dry-run to see the members of a sweep")
    return _implementation("sweep")(command=command, overrides=overrides, **arguments)


@cli.command(cls=_Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--loss", type=float, help="Held-out loss to reach.  [default: the worst final loss of all]")
@click.option("--out", type=click.Path(path_type=Path), help="Directory of the curves.  [default: that of a sweep]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(**arguments: Any) -> int:
    """Compare runs: a table, and curves by tokens, time and bytes.

    \b
    diloco compare runs/quickstart runs/baseline
    diloco compare runs/seeds --loss 2.1 --json

    RUN is a run directory or the directory of a sweep. Without --out, several RUNs leave no curves.
    """
    return _implementation("compare")(**arguments)


@cli.command(cls=_Command)
@click.argument("address", required=False)
@_configured
@click.option("--json", "as_json", is_flag=True, help="Print JSON, which diloco plan --doctor reads.")
def doctor(address: str | None, overrides: tuple[str, ...], cfg: str | None, base: Path | None, as_json: bool) -> int:
    """Check this machine and the way to a swarm.

    \b
    diloco doctor
    diloco doctor /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo... --json > doctor.json
    diloco doctor model=150m data.sequence_length=1024

    One line per check: ok, warning, or failed with the remedy. Exit code 2 says that something here has to change, 3
    that the swarm cannot be joined. Nothing takes part in the run. An ADDRESS brings the run's own settings.
    """
    from diloco.config import compose
    from diloco.config.address import Address

    if address is not None and "=" in address and not address.startswith(("/", "@", "diloco:")):
        overrides, address = (address, *overrides), None
    if cfg is not None:
        return _run("doctor", overrides, cfg, base)
    found = None if address is None else Address.parse(address)
    config = compose([*overrides, *([] if found is None else _admission(found))], base=base)
    typed = frozenset(override.lstrip("+").partition("=")[0] for override in overrides)
    return _implementation("doctor")(config, found, as_json, typed)


@cli.command(cls=_Command)
@_configured
@click.option("--step-s", type=click.FloatRange(0, min_open=True), help="Seconds of an inner step; else measured here.")
@click.option("--bandwidth", help="Of each peer's link, each way.  [default: 100Mbit]")
@click.option("--latency-ms", type=click.FloatRange(0, 60_000), help="From peer to peer.  [default: 50]")
@click.option(
    "--doctor",
    "figures",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take what of these three is not given from diloco doctor ADDRESS --json > FILE.",
)
@click.option(
    "--target",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Utilization to plan for.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def plan(
    bandwidth: str | None, latency_ms: float | None, step_s: float | None, figures: Path | None, **arguments: Any
) -> int:
    """Predict utilization, bytes and bandwidth, with the arithmetic.

    \b
    diloco plan model=150m local.peers=8 --step-s 1 --bandwidth 100Mbit
    diloco plan experiment=quickstart --target 0.99

    local.peers is the size of the swarm. Where the target is missed, the mildest settings that reach it are printed.
    """
    from diloco.train.planning import Figures, parse_bandwidth, read_figures

    known = Figures() if figures is None else read_figures(figures)
    bits_per_s = known.bits_per_s if bandwidth is None else parse_bandwidth(bandwidth)
    latency_ms = known.latency_ms if latency_ms is None else latency_ms
    return _run("plan", step_s=step_s or known.step_s, bits_per_s=bits_per_s, latency_ms=latency_ms, **arguments)


def _run(command: str, overrides: tuple[str, ...], cfg: str | None, base: Path | None, **options: Any) -> int:
    """Composes the configuration, and prints it or runs the command with it."""
    from diloco.config import compose, help_text

    if options.pop("multirun", False):
        if cfg is not None:
            raise ConfigError(f"--cfg={cfg} shows one configuration; drop --multirun")
        return _implementation("sweep")(command=command, overrides=overrides, base=base)
    if cfg == "help":
        return _write(help_text())
    config = compose(overrides, base=base)
    if cfg == "job":
        return _write(config.to_yaml())
    if cfg == "manifest":
        manifest = config.manifest()
        click.echo(f"manifest hash {manifest.hash()}", err=True)  # apart, so that stdout is the JSON itself
        return _write(manifest.to_json(indent=2))
    _warn(command, config, overrides)
    return _implementation(command)(config, **options)


def _warn(command: str, config: Any, overrides: Sequence[str]) -> None:
    warnings = [] if config.run.report else config.warnings(overrides)  # a supervisor has said them already
    if command not in ("local", "simulate", "plan"):
        typed = [override.partition("=")[0] for override in overrides]
        warnings += [f"{key} has no effect with diloco {command}" for key in typed if key.startswith("local.")]
    for warning in warnings:
        click.echo(f"diloco: warning: {warning}", err=True)


def _implementation(command: str) -> Callable[..., int]:
    run: Callable[..., int] = import_module(f"diloco.cli.{command}").run
    return run


def _write(text: str) -> int:
    try:
        click.echo(text.rstrip("\n"))
        sys.stdout.flush()
    except BrokenPipeError:  # `diloco train --cfg job | head` has seen enough; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
