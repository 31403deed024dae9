"""`diloco plan`: what a link would make of a run, and what a peer takes of the memory, with the
arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from diloco.cli.options import Command, Options, configured

if TYPE_CHECKING:
    from diloco.cli.exchange_cost import ExchangeSize, NetworkLink

GIB = 2**30


@click.command(cls=Command)
@configured
@click.option(
    "--step-s",
    type=click.FloatRange(0, min_open=True),
    help="Seconds of an inner step; else measured here.",
)
@click.option("--bandwidth", default="100Mbit", help="Of each peer's link, each way.")
@click.option(
    "--latency-ms", type=click.FloatRange(0, 60_000), default=50.0, help="From peer to peer."
)
@click.option(
    "--target",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    help="Utilization to plan for.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def plan(
    options: Options,
    step_s: float | None,
    bandwidth: str,
    latency_ms: float,
    target: float,
    as_json: bool,
) -> int:
    """Predict utilization, bytes and bandwidth, with the arithmetic.

    \b
    diloco plan model=150m local.peers=8 --step-s 1 --bandwidth 100Mbit
    diloco plan experiment=quickstart --target 0.99

    local.peers is the size of the swarm, and diloco doctor measures a link. The bandwidth and the
    inner steps that reach the target are printed, too.
    """
    config = options.compose()
    from diloco.cli.exchange_cost import (
        ExchangeSize,
        NetworkLink,
        needed_bits_per_s,
        needed_sync_every,
        parse_bandwidth,
        predict,
    )
    from diloco.train.machine import memory_rows, parameters_of, sequence_bytes, step_seconds

    link = NetworkLink(parse_bandwidth(bandwidth), latency_ms / 1000)
    outer = config.outer
    numel = parameters_of(config.model)
    measured = step_s is None
    step_s = step_seconds(config) if step_s is None else step_s
    parallel = outer.method == "data_parallel"
    codecs = ("fp32", "fp32") if parallel else (str(outer.codec_up), str(outer.codec_down))
    exchange = ExchangeSize.of(outer, numel, config.local.peers)
    needed = needed_bits_per_s(exchange, link.latency_s, step_s, target)
    rows = memory_rows(config, exchange.peers)
    report: dict[str, Any] = {
        "model": config.model.name,
        "parameters": numel,
        "peers": exchange.peers,
        "step_s": step_s,
        "step_measured": measured,
        "link": asdict(link),
        "target": target,
        "exchange": asdict(exchange),
        "predicted": asdict(predict(exchange, link, step_s)),
        "needed_bits_per_s": needed if math.isfinite(needed) else None,
        "needed_sync_every": needed_sync_every(exchange, link, step_s, target),
        "memory": [row._asdict() for row in rows],
        "sequence_bytes": sequence_bytes(config),
    }
    click.echo(
        json.dumps(report, indent=2)
        if as_json
        else "\n".join(_text(report, codecs, exchange, link))
    )
    return 0


def _memory(report: dict[str, Any]) -> list[str]:
    """The table of what a peer takes, with sums."""
    rows = [
        (row["what"], row["where"], row["per_parameter"], row["nbytes"]) for row in report["memory"]
    ]
    lines = [f"memory of a peer{'':29}bytes per parameter{'':9}GiB"]
    for where, name in (("device", "device"), ("main", "main memory")):
        mine = [row for row in rows if row[1] == where]
        for what, _, each, nbytes in [*mine, ("in all", where, None, sum(row[3] for row in mine))]:
            per = f"{each:.3g}" if each is not None else ""
            lines.append(f"  {name:<12}{what:<45}{per:>5}{nbytes / GIB:>12.3f}")
    for what, where, each, nbytes in rows:
        if where == "spare":
            lines.append(f"  {'if free':<12}{what:<45}{each:>5.3g}{nbytes / GIB:>12.3f}")
    sequence = report["sequence_bytes"] / GIB
    lines.append(f"  {'device':<12}{'activations of one sequence, about':<50}{sequence:>12.3f}")
    return lines


def _text(
    report: dict[str, Any], codecs: tuple[str, str], exchange: ExchangeSize, link: NetworkLink
) -> list[str]:
    from diloco.cli.exchange_cost import arithmetic
    from diloco.outer.codecs import codec

    numel, step_s, target = report["parameters"], report["step_s"], report["target"]
    sizes = [(name, codec(name).nbytes(numel)) for name in codecs]
    head = [
        ("model", f"{report['model']}, {numel:,} parameters"),
        ("peers", f"{exchange.peers}, exchanging every {exchange.sync_every} inner steps"),
        (
            "inner step",
            f"{step_s:.4g} s, {'measured here' if report['step_measured'] else 'as given'}",
        ),
        (
            "up, down",
            " and ".join(
                f"{name} {size:,} B ({size / numel:.4g} per parameter)" for name, size in sizes
            ),
        ),
    ]
    if exchange.versions > 1:
        size = exchange.bytes_back
        head.append(
            (
                "back",
                f"{exchange.versions} versions in {size:,} B ({size / numel:.4g} per parameter)",
            )
        )
    lines = [*head, *arithmetic(exchange, link, step_s, target)]
    width = max(len(name) for name, _ in lines)
    text = [f"{name:<{width}}  {value}" for name, value in lines]
    return [*text, "", *_memory(report)]
