"""`diloco start`, `stop`, `logs`: this user's worker, a peer in the background."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco.cli import Command, Options, guest_arguments, split_address
from diloco.errors import ConfigError, DilocoError

if TYPE_CHECKING:
    from diloco.volunteer.worker import Worker

DISK = "Most bytes in its directory, downloads included; it ends where cleaning does not help."
WHEN = "idle, plugged-in, or hours such as 22-07; it leaves the swarm in between."


@click.command(cls=Command)
@click.argument("address", required=False)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--disk", metavar="SIZE", help=DISK)
@click.option("--when", metavar="WHEN", default="", show_default=False, help=WHEN)
@click.option("--yes", is_flag=True, help="Agree to what the run needs.")
def start(
    address: str | None, overrides: tuple[str, ...], disk: str | None, when: str, yes: bool
) -> int:
    """Join a swarm in the background.

    \b
    diloco start ADDRESS
    diloco start ADDRESS train.device=cpu --disk 20GB --when 22-07
    diloco start

    The worker runs diloco join ADDRESS, again after a crash (in 1, 2, 4 ... 300 s) and a reboot.
    ADDRESS and settings are those of join; without them it is told what it was told last. The
    command ends when the first step is made; Ctrl+C ends only the command.

    idle: for 5 minutes other processes have used less than 25 % of the time of all CPUs (Linux
    only; no GPU, no keyboard is looked at); 15 busy seconds end it. plugged-in: Linux says that
    there is mains power, or no battery.
    """
    from diloco.volunteer.worker import Worker

    if address is None:
        if disk or when or yes:
            raise ConfigError("start needs the ADDRESS of a peer, as it prints it, before settings")
        worker = Worker.read()
    else:
        worker = _told(address, Options(overrides), disk, when, yes)
    since, size = time.time(), worker.log.stat().st_size if worker.log.exists() else 0
    click.echo(f"worker: begun; diloco logs, status, stop; {worker.begin()}")
    try:
        return _follow(worker, since, size)
    except KeyboardInterrupt:
        click.echo("worker: goes on in the background")
        return 0


def _told(address: str, options: Options, disk: str | None, when: str, yes: bool) -> Worker:
    """Write what the worker is told; `ConfigError` for what `join` would refuse, or if it runs."""
    from diloco.atomic import replace_file
    from diloco.rundir.files import data_home
    from diloco.volunteer.machine import PROCESSES, plugged_in
    from diloco.volunteer.rules import MachineFacts, allows
    from diloco.volunteer.worker import KEPT, Worker

    allows(when, MachineFacts())
    known = plugged_in() is not None if when == "plugged-in" else (PROCESSES / "stat").exists()
    if when in ("plugged-in", "idle") and not known:
        raise ConfigError(f"--when={when}: this system does not say so; give hours, such as 22-07")
    if split_address(address, options)[0] is None:
        raise ConfigError("start needs the ADDRESS of a peer, as it prints it, before settings")
    swarm, given = guest_arguments(address, options)
    options.compose(given)
    for key in {"run.dir", "swarm.token=-"} & {*options.keys, *options.overrides}:
        raise ConfigError(f"{key}: a worker has a directory of its own, and no stdin; drop it")
    directory = data_home() / "worker"
    kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    worker = Worker(directory, (), when, _bytes(disk), os.getcwd(), kept)
    if worker.runs:
        raise ConfigError("the worker runs already; diloco logs shows it, diloco stop ends it")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    source = directory / "address"
    if swarm.peers[0].startswith("@"):
        source = Path(swarm.peers[0][1:]).absolute()
    else:
        replace_file(source, f"{swarm}\n".encode(), 0o600)
    words = ["-m", "diloco", "join", f"@{source}", *(["--yes"] if yes else []), *options.overrides]
    worker = replace(worker, command=tuple(words))
    worker.write()
    return worker


def _bytes(disk: str | None) -> int | None:
    from diloco.text import rate_bytes

    try:
        if disk is None or disk.endswith("B"):
            return None if disk is None else int(rate_bytes(disk))
    except ValueError:
        pass
    raise ConfigError(f"--disk={disk} is no size; write it like 20GB")


def _follow(worker: Worker, since: float, size: int) -> int:
    """Show its log until the first step is made, or it waits for its time, or has ended."""
    from diloco.volunteer.machine import has_trained
    from diloco.volunteer.worker import EVERY_S, Worker

    with worker.log.open(errors="replace") as log:
        log.seek(size)
        while True:
            state = Worker.read(worker.directory).state
            click.echo(log.read(), nl=False)
            if state.phase == "ended" and state.code:
                error = DilocoError(f"worker: {state.why}")
                error.exit_code = state.code
                raise error
            if has_trained(worker.directory, since):
                click.echo("worker: trains")
                return 0
            if state.phase == "ended" or state.why.startswith("--when"):
                return 0
            time.sleep(EVERY_S)


@click.command()
def stop() -> int:
    """End the worker: its peer leaves the swarm.

    \b
    diloco stop     diloco start begins it again, as the same peer

    What it has learned is in the swarm.
    """
    from diloco.volunteer.worker import Worker

    click.echo(str(Worker.read().end()))
    return 0


@click.command()
@click.option("-f", "follow", is_flag=True, help="Show new lines as they come, until Ctrl+C.")
def logs(follow: bool) -> int:
    """Show the end of the worker's log, and what it does.

    \b
    diloco logs -f
    """
    from diloco.volunteer.worker import Worker

    worker = Worker.read()
    command = ["tail", "-n", "40", *(["-F"] if follow else []), str(worker.log)]
    try:
        subprocess.run(command, check=False)
    except KeyboardInterrupt:
        return 0
    click.echo(str(worker))
    return 0
