"""`diloco plan`: what a link would make of a run, with the arithmetic, and which settings reach a target."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import click

from diloco.config import Config
from diloco.config.prices import Machine
from diloco.errors import ConfigError
from diloco.fit.speed import step_seconds
from diloco.outer.codecs import codec
from diloco.text import human_bytes, human_count, human_seconds
from diloco.train import planning
from diloco.train.forecast import Forecast, forecast
from diloco.train.machine import GIB
from diloco.train.memory import memory_rows, parameters_of, sequence_bytes
from diloco.train.planning import Exchange, Link, Recommendation, arithmetic, needed_bits_per_s, predict

__all__ = ["run"]

GIVEN, MEASURED = "as given", "measured here"


def run(
    config: Config,
    step_s: float | None,
    known_step_s: float | None,
    bits_per_s: float,
    latency_ms: float,
    target: float,
    as_json: bool,
    priced: tuple[str, Machine] | None = None,
) -> int:
    """Print the plan, with the costs on a machine that is priced.

    `step_s` is what the user gave. Otherwise the price file says the seconds of an inner step, then `known_step_s`; if
    nobody knows them, they are measured on this machine. Raises ConfigError if another machine would have to be timed.
    """
    link = Link(bits_per_s, latency_ms / 1000)
    outer = config.outer
    numel = parameters_of(config.model)
    step_s, source = _step(config, numel, step_s, known_step_s, priced)
    parallel = outer.method == "data_parallel"
    codecs = ("fp32", "fp32") if parallel else (str(outer.codec_up), str(outer.codec_down))
    exchange = Exchange.of(outer, numel, config.local.peers)
    advice = None
    if not parallel and predict(exchange, link, step_s).utilization < target:
        advice = planning.recommend(exchange, codecs, lambda name: codec(name).nbytes(numel), link, step_s, target)
    needed = needed_bits_per_s(exchange, link.latency_s, step_s, target)
    rows = memory_rows(config, exchange.peers)
    report: dict[str, Any] = {
        "model": config.model.name, "parameters": numel, "peers": exchange.peers,
        "step_s": step_s, "step_measured": source == MEASURED, "step_source": source,
        "link": asdict(link), "target": target,
        "exchange": asdict(exchange), "predicted": asdict(predict(exchange, link, step_s)),
        "needed_bits_per_s": needed if math.isfinite(needed) else None,
        "memory": [row._asdict() for row in rows], "sequence_bytes": sequence_bytes(config),
        "recommended": None if advice is None else {"settings": _settings(advice), **asdict(advice)},
    }  # fmt: skip
    if priced is not None:
        report["costs"] = _costs(forecast(config, exchange, link, step_s), *priced)
        if advice is not None:
            report["recommended"]["costs"] = _costs(forecast(config, advice.exchange, link, step_s), *priced)
    click.echo(json.dumps(report, indent=2) if as_json else "\n".join(_text(report, codecs, exchange, link)))
    return 0


def _step(
    config: Config, numel: int, typed_s: float | None, known_s: float | None, priced: tuple[str, Machine] | None
) -> tuple[float, str]:
    """Seconds of an inner step, and in words where they are from."""
    if typed_s is not None:
        return typed_s, GIVEN
    if priced is not None:
        name, machine = priced
        found_s = machine.step_s(numel, config.inner.batch_size * config.data.sequence_length)
        if found_s is not None:
            return found_s, f"as the price file says of {name}"
        if known_s is None:
            raise ConfigError(f"--machine={name} has neither tokens_per_s nor flops_per_s; add one, or give --step-s")
    return (step_seconds(config), MEASURED) if known_s is None else (known_s, GIVEN)


def _costs(run: Forecast, name: str, machine: Machine) -> dict[str, Any]:
    cost = run.cost(machine)
    usd = {"compute_usd": cost.compute, "traffic_usd": cost.traffic, "usd": cost.total}
    return {"machine": name, **machine.model_dump(), **run._asdict(), **usd}


def _bill(costs: dict[str, Any]) -> list[tuple[str, str]]:
    """The costs as pairs of a name and a formula with its numbers."""
    peers, per_hour, per_gb = costs["peers"], costs["usd_per_hour"], costs["egress_usd_per_gb"]
    machines = f"{peers} x {costs['wall_s'] / 3600:.4g} h x ${per_hour:g} = ${costs['compute_usd']:,.2f}"
    traffic = f"{peers} x {costs['bytes_sent'] / 1e9:.4g} GB x ${per_gb:g} = ${costs['traffic_usd']:,.2f}"
    return [
        ("the run", f"{human_count(costs['tokens'])} tokens in {human_seconds(costs['wall_s'])} on {costs['machine']}"),
        ("machines", machines),
        ("traffic", f"{human_bytes(costs['bytes_sent'])} sent per peer: {traffic}"),
        ("in all", f"${costs['usd']:,.2f}"),
    ]


def _settings(advice: Recommendation) -> list[str]:
    exchange = advice.exchange
    settings = [f"outer.{name}={getattr(exchange, name)}" for name in ("sync_every", "fragments", "overlap")]
    settings += [f"outer.codec_up={advice.codec_up}", f"outer.codec_down={advice.codec_down}"]
    return [*settings, "outer.staggered=true"] if exchange.staggered else settings


def _memory(report: dict[str, Any]) -> list[str]:
    """The table of what a peer takes, with sums."""
    rows = [(row["what"], row["where"], row["per_parameter"], row["nbytes"]) for row in report["memory"]]
    lines = [f"memory of a peer{'':29}bytes per parameter{'':9}GiB"]
    for where in ("device", "main"):
        name = {"device": "device", "main": "main memory"}[where]
        mine = [row for row in rows if row[1] == where]
        for what, _, each, nbytes in [*mine, ("in all", where, None, sum(row[3] for row in mine))]:
            per = f"{each:.3g}" if each is not None else ""
            lines.append(f"  {name:<12}{what:<45}{per:>5}{nbytes / GIB:>12.3f}")
    for what, where, each, nbytes in rows:
        if where == "spare":
            lines.append(f"  {'if free':<12}{what:<45}{each:>5.3g}{nbytes / GIB:>12.3f}")
    lines.append(
        f"  {'device':<12}{'activations of one sequence, about':<45}{'':>5}{report['sequence_bytes'] / GIB:>12.3f}"
    )
    return lines


def _text(report: dict[str, Any], codecs: tuple[str, str], exchange: Exchange, link: Link) -> list[str]:
    numel, step_s, target = report["parameters"], report["step_s"], report["target"]
    sizes = [(name, codec(name).nbytes(numel)) for name in codecs]
    head = [
        ("model", f"{report['model']}, {numel:,} parameters"),
        ("peers", f"{exchange.peers}, exchanging every {exchange.sync_every} inner steps"),
        ("inner step", f"{step_s:.4g} s, {report['step_source']}"),
        ("up, down", " and ".join(f"{name} {size:,} B ({size / numel:.4g} per parameter)" for name, size in sizes)),
    ]
    if exchange.versions > 1:
        size = exchange.bytes_back
        back = f"{exchange.versions} versions in {size:,} B ({size / numel:.4g} per parameter)"
        head.append(("back", back))
    lines = [*head, *arithmetic(exchange, link, step_s, target)]
    width = max(len(name) for name, _ in lines)
    if "costs" in report:
        lines += _bill(report["costs"])
    text = [f"{name:<{width}}  {value}" for name, value in lines]
    reached = report["predicted"]["utilization"] >= target
    advice = report["recommended"]
    if advice is not None:
        after = advice["prediction"]["utilization"]
        text += ["", f"for {target:.4g} use  {' '.join(advice['settings'])}", f"which predicts {after:.1%}:"]
        chosen = Exchange(**advice["exchange"])
        after_lines = arithmetic(chosen, link, step_s, target)
        after_lines += _bill(advice["costs"]) if "costs" in advice else []
        text += [f"  {name:<{width}}  {value}" for name, value in after_lines]
        if chosen.overlap > exchange.overlap:
            text.append("with overlap, outer.mixing=0.5 and outer.lr=0.4 are what Streaming DiLoCo uses")
        if chosen.sync_every > max(planning.HIGHEST_H, exchange.sync_every):
            text.append(f"so many inner steps between exchanges cost loss: DiLoCo uses {planning.HIGHEST_H}")
    else:
        text += ["", f"reaches {target:.4g}" if reached else f"does not reach {target:.4g}; choose outer=diloco"]
    return [*text, "", *_memory(report)]
