"""`diloco local` as a user runs it: what it leaves behind, and how it ends, by itself and by
force."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diloco.cli.main import main
from diloco.config import compose
from diloco.rundir.checkpoint import CheckpointStore
from diloco.train.run import run
from tests.support.peers import (
    SMOKE,
    Command,
    command,
    dead_port,
    events,
    eventually,
    json_lines,
    summary_of,
)

ENDLESS = ("budget.outer_steps=100000", "local.peers=2", "local.step_delay_s=[0.02,0.02]")

EACH_BOUNDARY = "checkpoint.background=false"  # gets a checkpoint, however slow the disk is


def local(run_dir: Path, *overrides: str, **options: Any) -> Any:
    """`diloco local`, started."""
    smoke = SMOKE[:1] if "outer=data_parallel" in overrides else SMOKE  # which has no heartbeats
    return command(
        "-m",
        "diloco",
        "local",
        *smoke,
        f"run.dir={run_dir}",
        *overrides,
        directory=run_dir.parent,
        **options,
    )


def reach(started: Command, run_dir: Path, version: int) -> None:
    """Waits until every peer has trained on that version."""

    def reached() -> bool:
        assert started.process.poll() is None, f"it ended\n{started.stdout}\n{started.stderr}"
        lines = json_lines(run_dir / "metrics.jsonl")
        return {line["peer"] for line in lines if line["version"] >= version} >= {"p0", "p1"}

    eventually(reached, f"outer step {version}")


def newest(run_dir: Path) -> int:
    """The last outer step that was logged, by whomever."""
    return max((line["version"] for line in json_lines(run_dir / "metrics.jsonl")), default=0)


def checkpoints(run_dir: Path, peer: str) -> list[int]:
    """Outer steps of its checkpoints, oldest first."""
    names = sorted(place.name for place in (run_dir / "checkpoints" / peer).glob("step-*"))
    return [int(name.removeprefix("step-")) for name in names]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command in this process writes; it must succeed."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown.err
    return shown.out


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
    summary = summary_of(run_dir)
    last = started.stdout.splitlines()[-2:]
    assert last[0].startswith(
        f"outer step 3 of 3, held-out loss {summary['eval']['loss']:.3f} nats per token, equal"
        " anchors on all peers"
    )
    assert last[1] == f"{run_dir}: summary.json, loss.png, model/"
    assert started.stderr == ""


def test_the_summary_accounts_for_every_token(whole: tuple[Command, Path]) -> None:
    summary = summary_of(whole[1])
    rounds, peers, per_round = 3, 2, 4 * 2 * 32  # inner steps x sequences x tokens
    total = rounds * peers * per_round
    assert summary["tokens"] == {
        "processed": total,
        "applied": total,
        "discarded": 0,
        "in_flight": 0,
    }
    assert len(summary["peers"]) == len({peer["peer_id"] for peer in summary["peers"]}) == peers
    for peer in summary["peers"]:
        assert (peer["steps"], peer["tokens"]) == (12, rounds * per_round)
        assert peer["bytes_sent"] > 10_000 and peer["bytes_received"] > 10_000
        assert 0 < sum(peer["seconds"].values()) < summary["wall_s"]
    [digest] = {peer["anchor_digest"] for peer in summary["peers"]}
    assert len(digest) == 64
    record = {row.pop("name"): row for row in summary["contributions"]}
    assert {name: row["peer_id"] for name, row in record.items()} == {
        peer["name"]: peer["peer_id"] for peer in summary["peers"]
    }
    with (whole[1] / "contributions.csv").open() as file:
        table = {row.pop("name"): row for row in csv.DictReader(file)}
    assert table == {
        name: {key: str(value) for key, value in row.items()} for name, row in record.items()
    }
    for row in record.values():
        assert (row["outer_steps"], row["first_version"], row["last_version"]) == (
            rounds,
            1,
            rounds,
        )
        assert (
            row["tokens"] == rounds * per_round
            and 1000 < row["bytes"] < peer["bytes_sent"] + peer["bytes_received"]
        )
    assert summary["manifest_hash"] == compose([], base=whole[1] / "config.yaml").manifest().hash()


def test_the_run_directory_holds_everything(whole: tuple[Command, Path]) -> None:
    run_dir = whole[1]
    left = {place.name for place in run_dir.iterdir()}
    assert left >= {
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "events.jsonl",
        "checkpoints",
        "model",
        "logs",
    }
    assert not list(run_dir.rglob(".*")), "half-written files"
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoints(run_dir, "p0") == checkpoints(run_dir, "p1") == [2, 3]
    metrics = json_lines(run_dir / "metrics.jsonl")
    assert [line["version"] for line in metrics if "eval_loss" in line] == [0, 1, 2, 3]
    assert {line["peer"] for line in metrics if "loss" in line} == {"p0", "p1"}
    assert metrics[0]["eval_loss"] > metrics[-1]["eval_loss"]
    config = compose([], base=run_dir / "config.yaml")
    assert config == compose([*SMOKE, f"run.dir={run_dir}", EACH_BOUNDARY])
    assert json.loads((run_dir / "manifest.json").read_text()) == json.loads(
        config.manifest().to_json()
    )


def test_the_model_loads_in_plain_transformers_and_eval_repeats_the_loss(
    whole: tuple[Command, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = whole[1]
    call(capsys, "export", str(run_dir), str(tmp_path / "exported"))
    weights = []
    for place, settings in ((run_dir / "model", []), (tmp_path / "exported", ["experiment=smoke"])):
        loss = summary_of(run_dir)["eval"]["loss"]
        assert f"loss {loss:.6f} nats per token" in call(capsys, "eval", str(place), *settings)
        tokenizer, model = (
            AutoTokenizer.from_pretrained(place),
            AutoModelForCausalLM.from_pretrained(place),
        )
        assert tokenizer.decode(tokenizer("def main():")["input_ids"]) == "def main():"
        tokens = torch.tensor([tokenizer("def main():")["input_ids"]])
        assert model(tokens).logits.isfinite().all()
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    text = call(
        capsys, "generate", str(tmp_path / "exported"), "--prompt", "import ", "--tokens", "20"
    )
    assert text.startswith("import ") and len(text) > len("import \n")


def test_an_exported_checkpoint_is_the_final_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    outer = [
        "outer.fragments=2",
        "outer.pattern=strided",
        "outer.staggered=true",
        "outer.overlap=1",
    ]
    run(compose([*SMOKE, f"run.dir={run_dir}", *outer]), lambda message: None)
    call(capsys, "export", str(run_dir), str(exported))
    final, written = (
        load_file(place / "model.safetensors") for place in (run_dir / "model", exported)
    )
    assert final.keys() == written.keys()
    assert all(torch.equal(final[name], written[name]) for name in final)
    shown = call(capsys, "eval", str(run_dir), *SMOKE[:1])
    shutil.rmtree(run_dir / "model")  # as after Ctrl+C within a round
    assert "loss" in shown and call(capsys, "eval", str(run_dir), *SMOKE[:1]) == shown


def test_data_parallel_is_a_setting_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    method = ("outer=data_parallel", "outer.sync_every=4")
    with local(tmp_path / "whole", *method) as started:
        started.done()
        assert started.family() == []
    with local(tmp_path / "halves", *method, "local.step_delay_s=[0.2,0.2]") as started:
        eventually(lambda: newest(tmp_path / "halves") >= 1, "outer step 1")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 0, started.stderr
        assert started.family() == []
    assert summary_of(tmp_path / "halves")["outer_steps"] in (1, 2)
    with local(tmp_path / "halves", *method) as started:
        started.done()
    whole, halves = summary_of(tmp_path / "whole"), summary_of(tmp_path / "halves")
    assert (whole["mode"], whole["outer_steps"]) == ("data_parallel", 3)
    assert whole["tokens"] == {"processed": 1536, "applied": 1536, "discarded": 0, "in_flight": 0}
    assert [peer["anchor_digest"] for peer in halves["peers"]] == [
        peer["anchor_digest"] for peer in whole["peers"]
    ]
    assert (halves["eval"], halves["tokens"]["applied"]) == (whole["eval"], 1536)


# -- ended by force --------------------------------------------------------------------------------


def test_control_c_once_leaves_cleanly_and_the_same_command_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local(run_dir, *ENDLESS) as started:
        reach(started, run_dir, 2)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 0, started.stderr
        assert started.family() == []
    summary = summary_of(run_dir)
    assert summary["exit"] == 0 and summary["outer_steps"] >= 2
    tokens = summary["tokens"]
    assert tokens["processed"] == tokens["applied"] + tokens["discarded"] + tokens["in_flight"]
    last = {peer: checkpoints(run_dir, peer)[-1] for peer in ("p0", "p1")}
    assert (
        max(last.values()) == summary["outer_steps"]
        and max(last.values()) - min(last.values()) <= 1
    )
    assert "run the same command again to go on" in started.stdout
    assert "Traceback" not in started.stdout + started.stderr + logs(run_dir)
    with local(run_dir, *ENDLESS) as started:
        reach(started, run_dir, max(last.values()) + 1)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 0, started.stderr
    assert sorted(event["version"] for event in events(run_dir, "resume")) == sorted(last.values())


def test_control_c_twice_ends_at_once_whatever_is_under_way(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local(run_dir, *ENDLESS, "local.step_delay_s=[0,600]") as started:
        eventually(
            lambda: json_lines(run_dir / "metrics.jsonl"),
            "training, which begins with an evaluation",
        )
        eventually(
            lambda: any(event["peer"] == "p1" for event in events(run_dir, "join")), "p1, too"
        )
        started.process.send_signal(signal.SIGINT)
        eventually(
            lambda: "leaving the swarm" in (run_dir / "logs" / "p1.log").read_text(),
            "the signal to arrive",
        )
        assert started.process.poll() is None, "one of them sleeps for ten minutes"
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 5
        eventually(lambda: not started.family(), "everything to end")


def test_control_c_while_the_peers_still_start_ends_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local(run_dir, start=subprocess.Popen) as started:
        eventually(lambda: len(started.family("diloco.train")) == 2, "peers")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 0, started.stderr
        assert started.family() == []
    assert started.stdout.splitlines()[-1] == "stopped before the first outer step", started.stdout
    assert not (run_dir / "summary.json").exists() and not (run_dir / "model").exists()


def test_peers_leave_by_themselves_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local(run_dir, *ENDLESS) as started:
        reach(started, run_dir, 2)
        os.kill(started.process.pid, signal.SIGKILL)
        eventually(lambda: not started.family(), "the peers to leave")
    assert checkpoints(run_dir, "p0") and checkpoints(run_dir, "p1")
    assert "leaving the swarm" in logs(run_dir) and "Traceback" not in logs(run_dir)


def test_a_run_survives_a_killed_peer_and_then_the_kill_of_everything(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    budget = "budget.outer_steps=24"
    with local(run_dir, budget, "local.peers=2", "local.step_delay_s=[0.2,0.2]") as started:
        reach(started, run_dir, 2)
        [victim] = started.family("run.name=p1")
        eventually(lambda: checkpoints(run_dir, "p1"), "a checkpoint of the one that will die")
        os.kill(victim, signal.SIGKILL)
        [lost] = eventually(lambda: events(run_dir, "lost"), "the other peer to notice")
        assert (lost["peer"], lost["name"]) == ("p0", "p1")
        alone = newest(run_dir) + 2
        eventually(lambda: newest(run_dir) >= alone, "the other peer to go on")
        started.kill()
    assert not (run_dir / "summary.json").exists()
    behind, ahead = checkpoints(run_dir, "p1")[-1], checkpoints(run_dir, "p0")[-1]
    assert behind < ahead

    with local(run_dir, budget) as started:
        started.done()
        assert started.family() == []
    summary = summary_of(run_dir)
    assert summary["outer_steps"] == 24
    assert len({peer["anchor_digest"] for peer in summary["peers"]}) == 1
    assert sorted(event["version"] for event in events(run_dir, "resume")) == [behind, ahead]


def logs(run_dir: Path) -> str:
    return "".join(file.read_text() for file in sorted((run_dir / "logs").iterdir()))


@pytest.mark.slow
def test_control_c_in_the_terminal_of_a_host_leaves_its_daemon_to_the_end(tmp_path: Path) -> None:
    """The terminal sends SIGINT to the whole group: to the command, and to what it started in
    it."""
    place, run_dir = tmp_path / "host", tmp_path / "run"
    host = ("-m", "diloco", "host", "--new", *SMOKE, f"run.dir={place}", "swarm.min_peers=1")
    with command(*host, directory=tmp_path) as started:
        address = eventually(
            lambda: (place / "address").exists() and (place / "address").read_text().strip(),
            "address",
        )
        join = (f"swarm.initial_peers={address}", "swarm.min_peers=2")
        run(compose([*SMOKE, f"run.dir={run_dir}", *join]), lambda message: None)
        assert [one for one in started.family() if os.getpgid(one) == started.process.pid] == [
            started.process.pid
        ]
        os.killpg(started.process.pid, signal.SIGINT)
        assert started.wait() == 0, started.stderr
        assert started.family() == []
    assert "Traceback" not in started.stdout + started.stderr
    assert summary_of(run_dir)["outer_steps"] == 3
    assert (place / "contributions.csv").read_text() == (run_dir / "contributions.csv").read_text()
    assert summary_of(run_dir)["peers"][0]["bytes_sent"] > 25_000, (
        "the host makes the versions of one fragment"
    )


# -- bad input -------------------------------------------------------------------------------------


def test_a_peer_that_cannot_start_ends_all_and_leaves_nothing_that_looks_like_a_run(
    tmp_path: Path,
) -> None:
    """The other peer waits for the address of the first one, and is not left to wait until that
    takes too long."""
    with local(tmp_path / "run", f"swarm.listen=/ip4/127.0.0.1/tcp/{dead_port()}") as started:
        assert started.wait() == 3
        assert started.family() == []
    [line] = started.stderr.splitlines()
    assert (
        line.startswith("diloco: error: p0: ")
        and "cannot be listened on: Address already in use" in line
    )
    assert "no address" not in logs(tmp_path / "run")
    left = {place.name for place in (tmp_path / "run").iterdir()}
    assert not left & {"summary.json", "model", "loss.png"}
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_run_that_diverges_ends_with_exit_code_four_and_keeps_its_last_good_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    absurd = (
        "inner.lr=10",
        "outer.lr=10",
        "inner.clip=1e6",
        "inner.warmup_steps=0",
        "budget.outer_steps=50",
    )
    with pytest.raises(SystemExit) as ended:
        main(["train", *SMOKE, f"run.dir={tmp_path / 'run'}", *absurd, EACH_BOUNDARY])
    assert ended.value.code == 4
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("diloco: error: training diverged: ")
    good = CheckpointStore(tmp_path / "run" / "checkpoints" / "peer", keep=1).load_latest()
    assert good is not None and f"outer step {good.step + 1};" in line
    assert all(values.isfinite().all() for values in good.tensors["anchor"].values())
    assert (
        not (tmp_path / "run" / "model").exists()
        and not (tmp_path / "run" / "summary.json").exists()
    )
