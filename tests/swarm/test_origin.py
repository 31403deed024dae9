"""A run that starts from a checkpoint: what of it is in the manifest, and what a peer builds that
has the manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from diloco import model as models
from tests.support.origins import BIAS, lines
from tests.support.peers import command, eventually

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.mark.slow
def test_a_run_from_a_directory_is_joined_where_there_is_none(saved: Path, tmp_path: Path) -> None:
    model, text = shutil.copytree(saved, tmp_path / "model"), lines(tmp_path)
    begin = [
        "-m",
        "diloco",
        "train",
        "model=pretrained",
        f"model.path={model}",
        f"data.tokenizer={model}",
        "data=json",
    ]
    begin += [
        f"data.path={text}",
        "data.sequence_length=32",
        "data.holdout=0.5",
        "inner.batch_size=2",
    ]
    begin += [
        "inner.warmup_steps=0",
        "outer.sync_every=4",
        "outer.fragments=3",
        "budget.outer_steps=3",
    ]
    own = ("train.device=cpu", "train.threads=1", "eval.sequences=2", "swarm.heartbeat_s=0.2")
    with command(
        *begin, *own, "run.dir=starter", "swarm.min_peers=2", directory=tmp_path
    ) as starter:
        eventually(lambda: (tmp_path / "starter" / "address").exists(), "an address")
        shutil.rmtree(model)
        join = ("-m", "diloco", "join", "@starter/address", "--yes", f"data.path={text}")
        with command(*join, *own, directory=tmp_path) as guest:
            guest.done()
        starter.done()
    assert (
        "a tokenizer of whoever started the run, whose files come from the run's peers"
        in guest.stdout
    )
    [place] = (tmp_path / "home" / "diloco" / "peer-0" / "runs").iterdir()
    here, there = (
        json.loads((at / "summary.json").read_text()) for at in (tmp_path / "starter", place)
    )
    assert (here["outer_steps"], there["outer_steps"]) == (3, 3)
    assert here["peers"][0]["anchor_digest"] == there["peers"][0]["anchor_digest"]
    assert (place / "model" / "chat_template.jinja").read_text() == (
        saved / "chat_template.jinja"
    ).read_text()
    assert torch.equal(models.load(place / "model").get_buffer(BIAS), torch.arange(4.0))
