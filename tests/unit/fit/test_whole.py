"""How a machine with several accelerators takes part, by what it has."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from diloco.cli.local import _shared_device
from diloco.config import Config, compose
from diloco.errors import ConfigError
from diloco.fit.whole import BUSY, Layout, lay_out, layout_of, utilization_of
from diloco.train import devices as accelerators
from diloco.train.devices import Accelerator, Precision
from diloco.train.machine import GIB
from diloco.train.memory import MemoryNeed, Split
from diloco.train.planning import Exchange, Link


def devices(*free_gib: float) -> list[Accelerator]:
    return [Accelerator("cuda", index, "A100", free * GIB) for index, free in enumerate(free_gib)]


def need(split: Split) -> MemoryNeed:
    """16 GiB to train, 1 more of a gathered layer when sharded; 1 GiB a sequence; 10 GiB to take part."""
    device = 16 / split.ranks + 1 if split.sharded else 16
    return MemoryNeed(10**9, device * GIB, 10 * GIB, GIB)


def laid_out(*free_gib: float, main_gib: float = 1000, batch_size: int = 8, **options: Any) -> Layout:
    return lay_out(devices(*free_gib), need, main_gib * GIB, batch_size, **options)


def test_a_model_has_a_peer_on_each_device_or_is_cut_over_all() -> None:
    found = laid_out(17, 80, 80)
    assert (found.peers, found.split, len(found.devices)) == (3, Split(), 3)
    assert found.text == "3 x A100: one peer on each, because the model fits one, and each contributes by itself"
    found = laid_out(16.9, 16.9)
    assert (found.peers, found.split) == (1, Split(2, sharded=True))
    said = "one peer on all of them, each has some rows of all parameters, because the model needs 17.0 GiB, and one of"
    assert found.text.endswith(f"{said} them has 16.9")
    with pytest.raises(ConfigError, match=r"on 2 devices it needs 10\.0 GiB of each, and 9\.9 GiB are free"):
        laid_out(9.9, 80)
    found = laid_out(40, 80, 60, batch_size=8, parallel="ddp")  # so many ranks as can share the batch
    assert [device.index for device in found.devices] == [1, 2] and found.split == Split(2)
    assert laid_out(40, 80, 60, batch_size=9, parallel="fsdp").split == Split(3, sharded=True)


def test_what_there_is_once_makes_one_peer_of_all_devices() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"parallel": "ddp"}, "train.parallel=ddp asks for it"),
        ({"single": "an invitation admits one peer"}, "an invitation admits one peer"),
        ({"main_gib": 39}, "39.0 GiB of main memory are free, which is enough for 3 of 4 peers"),
        ({"utilization": BUSY - 0.01}, "4 peers would share the link, and train 89% of the time"),
    ]
    for options, why in cases:
        found = laid_out(80, 80, 80, 80, **options)
        assert (found.peers, found.split, found.why) == (1, Split(4), why)
    assert laid_out(80, 80, 80, 80, main_gib=40, utilization=BUSY).peers == 4
    # 1500 bytes there and back in a second; nine inner steps of a second each.
    exchange, link = Exchange(1000, 1000, peers=4, sync_every=9, fragments=4), Link(12_000, latency_s=5.0)
    assert utilization_of(exchange, link, 1.0, peers=1) == pytest.approx(9 / 10)
    assert utilization_of(exchange, link, 1.0, peers=3) == pytest.approx(9 / 12)


def stubs(monkeypatch: pytest.MonkeyPatch, *free_gib: float, precision: Precision = "bf16") -> None:
    """This machine has these accelerators."""
    found = [replace(device, precision=precision) for device in devices(*free_gib)]
    monkeypatch.setattr(accelerators, "counted", lambda: ("cuda", len(found)))
    monkeypatch.setattr(accelerators, "survey", lambda: found)


def test_a_machine_is_used_whole_unless_one_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stubs(monkeypatch, 8, 8)
    config = compose()
    found = layout_of(config, (), 1, None, ())
    assert found is not None and found.peers == 2
    fitted = found.fit(config, ())
    assert fitted.train.precision == "bf16" and fitted.train.parallel == "auto"
    assert found.fit(config, {"train.precision", "train.threads"}) == config
    for device in ("cpu", "cuda:1", "xpu"):
        assert layout_of(compose([f"train.device={device}"]), (), 1, None, ()) is None
    stubs(monkeypatch, 8)
    assert layout_of(config, (), 1, None, ()) is None


@pytest.mark.slow
def test_model_invitation_and_link_decide_on_an_island(monkeypatch: pytest.MonkeyPatch) -> None:
    def laid(config: Config, typed: Collection[str] = (), link: Link | None = None) -> Layout:
        found = layout_of(config, typed, 1, link, [10.0] if link else ())
        assert found is not None
        return found

    config = compose()
    stubs(monkeypatch, 12, 12, precision="fp32")
    need = laid(config).need
    stubs(monkeypatch, *[0.99 * (need.device_bytes + need.sequence_bytes) / GIB] * 2, precision="fp32")
    large = laid(config)
    assert large.split == Split(2, sharded=True) and large.fit(config, ()).train.parallel == "fsdp"
    stubs(monkeypatch, 12, 12, precision="fp32")
    invited = laid(compose([f"run.key={'0' * 64}"]))
    assert (invited.peers, invited.why) == (1, "an invitation admits one peer")
    assert laid(config, {"swarm.identity_path"}).why == "swarm.identity_path is that of one peer"
    thin = laid(config, link=Link(1e4))
    assert thin.peers == 1 and thin.why.startswith("2 peers would share the link")
    assert laid(config, link=Link(1e12)).peers == 2


def test_processes_share_devices_where_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["outer=data_parallel"])
    stubs(monkeypatch, 8, 8)
    assert [_shared_device(config, index, 2) for index in range(2)] == [[], []], "NCCL, and each its own"
    shared = [_shared_device(config, index, 3) for index in range(3)]
    assert shared == [["train.device=cuda:0"], ["train.device=cuda:1"], ["train.device=cuda:0"]]
    assert _shared_device(compose(["train.device=cuda:1"]), 0, 3) == []
    stubs(monkeypatch)
    assert _shared_device(config, 0, 3) == []
