"""The arithmetic of inner steps: what is chosen for a device, and the scale of the loss in fp16."""

from pathlib import Path

import pytest

from tests.support.data import chats
from tests.support.peers import command, train_here
from tests.support.slow import slow

RANKS = """
import os, sys, torch
from pathlib import Path
from torch import nn
from diloco.config import compose
from diloco.attach.ranks import RankGroup
from diloco.train.gradients import LossScale, autocast
from diloco.attach.parameters import local_tensor

config = compose(["train.precision=fp16"])
ranks = RankGroup.from_environment("cpu", sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8, bias=False)])[0])
wrapped, scale, found = ranks.wrap(model), LossScale(config, ranks), []
for spoilt in (False, True, False):
    with autocast(config, ranks.device):
        loss = wrapped(torch.ones(2, 8)).float().mean()
    scale.scaled(loss).backward()
    [weight] = model.parameters()
    if spoilt and ranks.rank == 1:
        local_tensor(weight.grad)[-1, -1] = float("inf")
    scale.unscale_(model)
    skips = scale.skips(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    found.append(f"{skips} {scale.scale}")
    model.zero_grad()
Path(f"rank{ranks.rank}").write_text("/".join(found))
ranks.close()
os._exit(0)  # as ranks of `diloco.train` do: the usual end of a process now and then aborts one
"""


@pytest.mark.parametrize("parallel", [slow("ddp"), "fsdp"])
def test_all_ranks_skip_the_step_of_which_one_has_bad_gradients(
    parallel: str, tmp_path: Path
) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    launcher = "-m torch.distributed.run --nproc-per-node=2 --standalone ranks.py"
    with command(launcher, parallel, directory=tmp_path) as started:
        started.done()
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert found == ["False 65536.0/True 32768.0/False 32768.0"] * 2


def test_a_peer_learns_conversations_in_bf16_on_a_base_in_4_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    data = f"data=chat data.path={chats(tmp_path / 'chats.jsonl')} data.sequence_length=64"
    settings = "experiment=smoke adapter=qlora train.precision=bf16 budget.outer_steps=2"
    summary = train_here(tmp_path / "run", settings, data)
    assert summary["outer_steps"] == 2
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
