"""`diloco train`, `host`, `simulate`: a peer that trains, one that only hosts, many simulated."""

from __future__ import annotations

import click

from diloco.cli import Command, Options, configured, guest_arguments, split_address
from diloco.cli.sweep import sweepable
from diloco.errors import ConfigError


@click.command(cls=Command)
@configured
@sweepable
def train(options: Options) -> int:
    """Train as one peer, in a new swarm or joining one.

    \b
    diloco train run.id=mine swarm=network
    diloco train run.id=mine 'swarm.initial_peers=[/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...]'
    torchrun --nproc-per-node=8 -m diloco.train run.id=mine model=150m data=hub

    Without swarm.initial_peers it starts a new swarm and prints the address for the others.
    """
    config = options.compose(starts=True)
    from rich.console import Console

    from diloco.dashboard.live import LiveView, print_warnings, print_who_can_join
    from diloco.rundir.reporting import Ready, Report
    from diloco.train.run import run

    print_warnings()
    console = Console()
    title = f"{config.run.id}: {config.model.name} on {config.data.source}, {config.outer.method}"
    with LiveView(console, [config.run.name or "peer"], config.budget.outer_steps, title) as view:

        def show(message: Report) -> None:
            if isinstance(message, Ready):  # an error before that stands alone, in one line
                print_who_can_join(console, config)
            view.update(message)

        summary = run(config, show)
    if summary.peers:  # rank 0 speaks for all ranks
        console.print(f"{config.run.dir}: {summary.result()}", highlight=False)
        if summary.outer_steps:
            after = f"model/, loss.png; diloco generate or export {config.run.dir}"
            console.print(f"{config.run.dir}: {after}", highlight=False)
    return summary.exit


DONE = "End when the budget is used up and the peers that train have left."


@click.command(cls=Command)
@click.option("--new", is_flag=True, help="Start a new swarm instead of joining one.")
@click.option("--until-done", is_flag=True, help=DONE)
@click.argument("address", required=False)
@configured
def host(new: bool, until_done: bool, address: str | None, options: Options) -> int:
    """Hold fragments, without training.

    \b
    diloco host --new run.id=mine swarm=network 'swarm.listen=[/ip4/0.0.0.0/tcp/4100]'
    diloco host /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...

    For a machine without an accelerator that stays: it keeps the state of the swarm and others can
    start from it.
    """
    address, options = split_address(address, options)
    if not options.cfg and new == (address is not None):
        raise ConfigError("host needs either the ADDRESS of a peer, as it prints it, or --new")
    given: list[str] = []
    if address is not None:
        # run.id may be typed: in a closed run the invitation has it, too
        swarm, given = guest_arguments(address, options, ["run.id"])
        given = [*swarm.overrides, *given]
    config = options.compose(given, starts=True)
    import threading
    import time

    from rich.console import Console

    from diloco.dashboard.live import LiveView, print_warnings, print_who_can_join
    from diloco.rundir.reporting import Ready
    from diloco.signals import on_signals
    from diloco.train.host import Host

    print_warnings()
    console, stop, name = Console(), threading.Event(), config.run.name or "host"
    view = LiveView(console, [name], None, "")
    with on_signals(lambda *_: stop.set()), Host(config, name, view.update) as host:
        node, view.title = host.node, f"{host.manifest.run.id}: host"
        with view:
            print_who_can_join(console, config)
            ready = Ready(
                name,
                time.time(),
                host.address,
                tuple(node.addresses),
                first=not config.swarm.initial_peers,
                command=config.joining_command,
                advice=node.advice or "",
            )
            view.update(ready)
            while not stop.wait(0.5) and not (until_done and host.is_over()):
                view.update(host.status())
    return 0


@click.command(cls=Command)
@configured
@sweepable
def simulate(options: Options) -> int:
    """Train with many peers in virtual time, in this process.

    \b
    diloco simulate experiment=quickstart run.dir=runs/sim
    diloco simulate experiment=smoke local.peers=4 sim.bandwidth=8Mbit sim.latency_s=0.05
    diloco simulate experiment=smoke local.peers=4 'sim.events=[crash:3@120,join:4@60]'

    Compute is real. An inner step takes sim.step_s virtual seconds, and sim.bandwidth and
    sim.latency_s say how long a transfer takes. The same settings give the same run.
    """
    config = options.compose(starts=True, together=True)
    import time

    from rich.console import Console

    from diloco.dashboard.live import LiveView, is_screen, print_warnings
    from diloco.rundir.reporting import Report
    from diloco.sim.run import simulate

    print_warnings()
    console, at_s, steps = Console(), 0.0, config.budget.outer_steps
    names = [f"p{index}" for index in range(config.local.peers)]
    title = f"{config.run.id}: {len(names)} simulated peers, {config.outer.method}"

    def listen(message: Report) -> None:
        nonlocal at_s
        at_s = message.time
        view.update(message)

    # Lines are a record and carry virtual time; a progress bar tells when the command ends.
    clock = time.monotonic if is_screen(console) else lambda: at_s
    with LiveView(console, names, steps, title, clock) as view:
        outcome = simulate(config, listen)
    summary = outcome.summary
    busy = sum(peer.utilization for peer in summary.peers) / max(1, len(summary.peers))
    spent = f"{outcome.virtual_s:.0f} virtual seconds at {busy:.0%} utilization"
    console.print(f"{summary.result(steps)}, {spent}, {summary.wall_s:.0f} s", highlight=False)
    files = "summary.json, metrics.jsonl, events.jsonl, loss.png"
    console.print(f"{config.run.dir}: {files}", highlight=False)
    return summary.exit
