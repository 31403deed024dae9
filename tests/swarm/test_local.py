"""`diloco local` as a user runs it: what it leaves behind, and how it ends, by itself and by
force."""

import csv
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diloco.config import compose
from diloco.rundir.checkpoint import CheckpointStore
from tests.support.command_line import Typed, typed
from tests.support.peers import (
    SMOKE,
    Command,
    command,
    dead_port,
    events,
    eventually,
    json_lines,
    summary_of,
    train_here,
)

__all__ = ["typed"]
ENDLESS = "budget.outer_steps=100000 local.peers=2 local.step_delay_s=[0.02,0.02]"
EACH_BOUNDARY = "checkpoint.background=false"  # gets a checkpoint, however slow the disk is


def local(run_dir: Path, *overrides: str, **options: Any) -> Any:
    """`diloco local`, started."""
    # data parallel training has no heartbeats
    smoke = SMOKE[:1] if "outer=data_parallel" in " ".join(overrides) else SMOKE
    arguments = ("-m diloco local", *smoke, f"run.dir={run_dir}", *overrides)
    return command(*arguments, directory=run_dir.parent, **options)


def newest(run_dir: Path) -> int:
    """The last outer step that was logged, by whomever."""
    return max((line["version"] for line in json_lines(run_dir / "metrics.jsonl")), default=0)


def checkpoints(run_dir: Path, peer: str) -> list[int]:
    """Outer steps of its checkpoints, oldest first."""
    names = sorted(place.name for place in (run_dir / "checkpoints" / peer).glob("step-*"))
    return [int(name.removeprefix("step-")) for name in names]


def logs(run_dir: Path) -> str:
    return "".join(file.read_text() for file in sorted((run_dir / "logs").iterdir()))


# -- a whole run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """A run of two peers to its end."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with local(run_dir, EACH_BOUNDARY) as started:
        started.done()
        assert started.family() == [], "processes are left"
    return started, run_dir


def test_a_run_ends_with_one_anchor_and_says_so(whole: tuple[Command, Path]) -> None:
    started, run_dir = whole
    loss = f"{summary_of(run_dir)['eval']['loss']:.3f} nats per token"
    *_, end, files = started.stdout.splitlines()
    said = f"outer step 3 of 3, held-out loss {loss}, equal anchors on all peers"
    assert end.startswith(said) and files == f"{run_dir}: summary.json, loss.png, model/"
    assert started.stderr == ""


def test_the_summary_accounts_for_every_token(whole: tuple[Command, Path]) -> None:
    summary = summary_of(whole[1])
    rounds, tokens = 3, 3 * 4 * 2 * 32  # rounds x inner steps x sequences x tokens
    counts = {"processed": 2 * tokens, "applied": 2 * tokens, "discarded": 0, "in_flight": 0}
    assert summary["tokens"] == counts
    assert len(summary["peers"]) == len({peer["peer_id"] for peer in summary["peers"]}) == 2
    for peer in summary["peers"]:
        assert (peer["steps"], peer["tokens"]) == (12, tokens)
        assert peer["bytes_sent"] > 10_000 and peer["bytes_received"] > 10_000
        assert 0 < sum(peer["seconds"].values()) < summary["wall_s"]
    [digest] = {peer["anchor_digest"] for peer in summary["peers"]}
    assert len(digest) == 64
    record = {row.pop("name"): row for row in summary["contributions"]}
    ids = {peer["name"]: peer["peer_id"] for peer in summary["peers"]}
    assert {name: row["peer_id"] for name, row in record.items()} == ids
    with (whole[1] / "contributions.csv").open() as file:
        table = {row.pop("name"): row for row in csv.DictReader(file)}
    words = {name: {key: str(one) for key, one in row.items()} for name, row in record.items()}
    assert table == words
    for row in record.values():
        versions = (row["outer_steps"], row["first_version"], row["last_version"])
        assert versions == (rounds, 1, rounds) and row["tokens"] == tokens
        assert 1000 < row["bytes"] < peer["bytes_sent"] + peer["bytes_received"]
    assert summary["manifest_hash"] == compose([], base=whole[1] / "config.yaml").manifest().hash()


def test_the_run_directory_holds_everything(whole: tuple[Command, Path]) -> None:
    run_dir = whole[1]
    files = "config.yaml manifest.json metrics.jsonl events.jsonl checkpoints model logs"
    assert {place.name for place in run_dir.iterdir()} >= {*files.split()}
    assert not list(run_dir.rglob(".*")), "half-written files"
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoints(run_dir, "p0") == checkpoints(run_dir, "p1") == [2, 3]
    metrics = json_lines(run_dir / "metrics.jsonl")
    assert [line["version"] for line in metrics if "eval_loss" in line] == [0, 1, 2, 3]
    assert {line["peer"] for line in metrics if "loss" in line} == {"p0", "p1"}
    assert metrics[0]["eval_loss"] > metrics[-1]["eval_loss"]
    config = compose([], base=run_dir / "config.yaml")
    assert config == compose([*SMOKE, f"run.dir={run_dir}", EACH_BOUNDARY])
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest == json.loads(config.manifest().to_json())


def test_the_model_loads_in_plain_transformers_and_eval_repeats_the_loss(
    whole: tuple[Command, Path], typed: Typed, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir, exported, weights = whole[1], tmp_path / "exported", []
    typed("export", str(run_dir), str(exported))
    loss = f"loss {summary_of(run_dir)['eval']['loss']:.6f} nats per token"
    for place, settings in ((run_dir / "model", []), (exported, ["experiment=smoke"])):
        assert loss in typed("eval", str(place), *settings)
        tokenizer = AutoTokenizer.from_pretrained(place)
        model = AutoModelForCausalLM.from_pretrained(place)
        tokens = tokenizer("def main():")["input_ids"]
        assert tokenizer.decode(tokens) == "def main():"
        assert model(torch.tensor([tokens])).logits.isfinite().all()
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    text = typed("generate", str(exported), "--prompt", "import ", "--tokens", "20")
    assert text.startswith("import ") and len(text) > len("import \n")


def test_an_exported_checkpoint_is_the_final_model(typed: Typed, tmp_path: Path) -> None:
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    outer = "outer.fragments=2 outer.pattern=strided outer.staggered=true outer.overlap=1"
    train_here(run_dir, *SMOKE, outer)
    typed("export", str(run_dir), str(exported))
    models = (load_file(at / "model.safetensors") for at in (run_dir / "model", exported))
    final, written = models
    assert final.keys() == written.keys()
    assert all(torch.equal(final[name], written[name]) for name in final)
    shown = typed("eval", str(run_dir), *SMOKE[:1])
    (run_dir / "model").rename(tmp_path / "gone")  # as after Ctrl+C within a round
    assert "loss" in shown and typed("eval", str(run_dir), *SMOKE[:1]) == shown


def test_data_parallel_is_a_setting_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    method = "outer=data_parallel outer.sync_every=4"
    with local(tmp_path / "whole", method) as started:
        started.done()
        assert started.family() == []
    halves = tmp_path / "halves"
    with local(halves, method, "local.step_delay_s=[0.2,0.2]") as started:
        started.sees(lambda: newest(halves) >= 1, "outer step 1")
        started.interrupt()
        assert started.family() == []
    assert summary_of(halves)["outer_steps"] in (1, 2)
    with local(halves, method) as started:
        started.done()
    ends = [summary_of(tmp_path / name) for name in ("whole", "halves")]
    assert (ends[0]["mode"], ends[0]["outer_steps"]) == ("data_parallel", 3)
    counts = {"processed": 1536, "applied": 1536, "discarded": 0, "in_flight": 0}
    assert ends[0]["tokens"] == counts and ends[1]["tokens"]["applied"] == 1536
    anchors = [[peer["anchor_digest"] for peer in one["peers"]] for one in ends]
    assert anchors[0] == anchors[1] and ends[0]["eval"] == ends[1]["eval"]


# -- ended by force --------------------------------------------------------------------------------


def test_control_c_once_leaves_cleanly_and_the_same_command_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local(run_dir, ENDLESS) as started:
        started.reaches(2, run_dir, "p0", "p1")
        started.interrupt()
        assert started.family() == []
    summary = summary_of(run_dir)
    assert summary["exit"] == 0 and summary["outer_steps"] >= 2
    tokens = summary["tokens"]
    assert tokens["processed"] == tokens["applied"] + tokens["discarded"] + tokens["in_flight"]
    last = sorted(checkpoints(run_dir, peer)[-1] for peer in ("p0", "p1"))
    assert last[1] == summary["outer_steps"] and last[1] - last[0] <= 1
    assert "run the same command again to go on" in started.stdout
    assert "Traceback" not in started.stdout + started.stderr + logs(run_dir)
    with local(run_dir, ENDLESS) as started:
        started.reaches(last[1] + 1, run_dir, "p0", "p1")
        started.interrupt()
    assert sorted(event["version"] for event in events(run_dir, "resume")) == last


def test_control_c_twice_ends_at_once_whatever_is_under_way(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local(run_dir, ENDLESS, "local.step_delay_s=[0,600]") as started:
        started.sees(lambda: json_lines(run_dir / "metrics.jsonl"), "the first evaluation")
        started.sees(lambda: "p1" in [one["peer"] for one in events(run_dir, "join")], "p1, too")
        started.process.send_signal(signal.SIGINT)
        log = run_dir / "logs" / "p1.log"
        started.sees(lambda: "leaving the swarm" in log.read_text(), "the signal to arrive")
        assert started.process.poll() is None, "one of them sleeps for ten minutes"
        started.process.send_signal(signal.SIGINT)
        started.done(5)
        eventually(lambda: not started.family(), "everything to end")


def test_control_c_while_the_peers_still_start_ends_it(tmp_path: Path) -> None:
    with local(tmp_path / "run", start=subprocess.Popen) as started:
        started.sees(lambda: len(started.family("diloco.train")) == 2, "peers")
        started.interrupt()
        assert started.family() == []
    assert started.stdout.splitlines()[-1] == "stopped before the first outer step", started.stdout
    assert not {"summary.json", "model"} & {one.name for one in (tmp_path / "run").iterdir()}


def test_peers_leave_by_themselves_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local(run_dir, ENDLESS) as started:
        started.reaches(2, run_dir, "p0", "p1")
        os.kill(started.process.pid, signal.SIGKILL)
        eventually(lambda: not started.family(), "the peers to leave")
    assert checkpoints(run_dir, "p0") and checkpoints(run_dir, "p1")
    assert "leaving the swarm" in logs(run_dir) and "Traceback" not in logs(run_dir)


def test_a_run_survives_a_killed_peer_and_then_the_kill_of_everything(tmp_path: Path) -> None:
    run_dir, budget = tmp_path / "run", "budget.outer_steps=16"
    with local(run_dir, budget, "local.peers=2 local.step_delay_s=[0.2,0.2]") as started:
        started.reaches(2, run_dir, "p0", "p1")
        [victim] = started.family("run.name=p1")
        started.sees(lambda: checkpoints(run_dir, "p1"), "a checkpoint of the one that will die")
        os.kill(victim, signal.SIGKILL)
        [lost] = started.sees(lambda: events(run_dir, "lost"), "the other peer to notice")
        assert (lost["peer"], lost["name"]) == ("p0", "p1")
        alone = newest(run_dir) + 2
        started.sees(lambda: newest(run_dir) >= alone, "the other peer to go on")
        started.kill()
    assert not (run_dir / "summary.json").exists()
    behind, ahead = checkpoints(run_dir, "p1")[-1], checkpoints(run_dir, "p0")[-1]
    assert behind < ahead
    with local(run_dir, budget) as started:
        started.done()
        assert started.family() == []
    summary = summary_of(run_dir)
    assert summary["outer_steps"] == 16
    assert len({peer["anchor_digest"] for peer in summary["peers"]}) == 1
    assert sorted(event["version"] for event in events(run_dir, "resume")) == [behind, ahead]


@pytest.mark.slow
def test_control_c_in_the_terminal_of_a_host_leaves_its_daemon_to_the_end(tmp_path: Path) -> None:
    """The terminal sends SIGINT to the whole group: to the command, and to what it started in
    it."""
    place, run_dir = tmp_path / "host", tmp_path / "run"
    host = ("-m diloco host --new", *SMOKE, f"run.dir={place} swarm.min_peers=1")
    with command(*host, directory=tmp_path) as started:
        started.sees((place / "address").exists, "an address")
        join = f"swarm.initial_peers={(place / 'address').read_text().strip()} swarm.min_peers=2"
        summary = train_here(run_dir, *SMOKE, join)
        group = started.process.pid
        assert [one for one in started.family() if os.getpgid(one) == group] == [group]
        os.killpg(group, signal.SIGINT)
        started.done()
        assert started.family() == []
    assert "Traceback" not in started.stdout + started.stderr and summary["outer_steps"] == 3
    assert (place / "contributions.csv").read_text() == (run_dir / "contributions.csv").read_text()
    assert summary["peers"][0]["bytes_sent"] > 25_000, "the host makes versions of one fragment"


@pytest.mark.parametrize("of", ["diloco local local.peers=2", "diloco train", "diloco.train"])
def test_a_terminal_and_a_reader_that_go_away_end_no_run(tmp_path: Path, of: str) -> None:
    run_dir = tmp_path / "run"
    pipe, end = os.pipe()

    def start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, **{**options, "stdout": end, "stderr": end})

    arguments = ("-m", of, *SMOKE, f"run.dir={run_dir} swarm.min_peers=1")
    with command(*arguments, directory=tmp_path, start=start) as started:
        os.close(end)
        os.read(pipe, 1)
        started.sees(lambda: json_lines(run_dir / "metrics.jsonl"), "the first line")
        os.close(pipe)
        started.process.send_signal(signal.SIGHUP)
        assert started.wait() == 0
    assert summary_of(run_dir)["outer_steps"] == 3


# -- bad input -------------------------------------------------------------------------------------


def test_a_peer_that_cannot_start_ends_all_and_leaves_nothing_that_looks_like_a_run(
    tmp_path: Path,
) -> None:
    """The other peer waits for the address of the first one, and is not left to wait until that
    takes too long."""
    with local(tmp_path / "run", f"swarm.listen=/ip4/127.0.0.1/tcp/{dead_port()}") as started:
        started.done(3)
        assert started.family() == []
    [line] = started.stderr.splitlines()
    assert line.startswith("diloco: error: p0: ")
    assert "cannot be listened on: Address already in use" in line
    assert "no address" not in logs(tmp_path / "run")
    left = {place.name for place in (tmp_path / "run").iterdir()}
    assert not left & {"summary.json", "model", "loss.png"}
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_run_that_diverges_ends_with_exit_code_four_and_keeps_its_last_good_checkpoint(
    typed: Typed, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    absurd = "inner.lr=10 outer.lr=10 inner.clip=1e6 inner.warmup_steps=0 budget.outer_steps=50"
    typed("train", *SMOKE, f"run.dir={run_dir}", *absurd.split(), EACH_BOUNDARY, code=4)
    [line] = typed.err.splitlines()
    assert line.startswith("diloco: error: training diverged: ")
    good = CheckpointStore(run_dir / "checkpoints" / "peer", keep=1).load_latest()
    assert good is not None and f"outer step {good.step + 1};" in line
    assert all(values.isfinite().all() for values in good.tensors["anchor"].values())
    assert not {"summary.json", "model"} & {one.name for one in run_dir.iterdir()}
