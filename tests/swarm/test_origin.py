"""A run that starts from a checkpoint: what of it is in the manifest, and what a peer builds that
has the manifest."""

import shutil
from pathlib import Path

import pytest
import torch

from diloco import model as models
from tests.support.origins import BIAS, lines
from tests.support.peers import command, summary_of


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("adapter", ["none", "lora model.adapter_targets=q_proj"])
def test_a_run_from_a_directory_is_joined_where_there_is_none(
    adapter: str, saved: Path, tmp_path: Path
) -> None:
    model, text = shutil.copytree(saved, tmp_path / "model"), lines(tmp_path)
    run = (
        f"model=pretrained model.path={model} data.tokenizer={model} data=json data.path={text}"
        " data.sequence_length=32 data.holdout=0.5 inner.batch_size=2 inner.warmup_steps=0"
        " outer.sync_every=4 outer.fragments=3 budget.outer_steps=3 run.dir=starter"
        f" swarm.min_peers=2 adapter={adapter}"
    )
    own = "train.device=cpu train.threads=1 eval.sequences=2 swarm.heartbeat_s=0.2"
    with command("-m diloco train", run, own, directory=tmp_path) as starter:
        starter.sees((tmp_path / "starter" / "address").exists, "an address")
        if adapter == "none":
            shutil.rmtree(model)
        join = f"-m diloco join @starter/address --yes data.path={text}"
        with command(join, own, directory=tmp_path) as guest:
            guest.done()
        starter.done()
    said = "a tokenizer of whoever started the run, whose files come from the run's peers"
    assert said in guest.stdout
    [place] = (tmp_path / "home" / "diloco" / "peer-0" / "runs").iterdir()
    here, there = (summary_of(at) for at in (tmp_path / "starter", place))
    assert (here["outer_steps"], there["outer_steps"]) == (3, 3)
    assert here["peers"][0]["anchor_digest"] == there["peers"][0]["anchor_digest"]
    if adapter != "none":
        assert ", with a base of " in guest.stdout and "base: " in guest.stdout
        files = [at / "model.safetensors" for at in (saved, place / "origin" / "base")]
        assert files[0].read_bytes() == files[1].read_bytes()
    templates = [(at / "chat_template.jinja").read_text() for at in (place / "model", saved)]
    assert templates[0] == templates[1]
    whole = place / ("model" if adapter == "none" else "origin/base")
    assert torch.equal(models.load(whole).get_buffer(BIAS), torch.arange(4.0))
