"""A figure of a peer is one field, wherever it is shown."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.places import PACKAGE, ROOT

FIELD = '    joules: Annotated[fields.Count, Shown("energy", "J", "Energy used")] = 7\n'
BEFORE = "    rounds: fields.Count = 0\n"
SHOWS = """
import json
from types import SimpleNamespace
from rich.console import Console
from diloco.dashboard.live import LiveView
from diloco.dashboard.server import Dashboard
from diloco.dashboard.tables import render
from diloco.messages.control import Figures
from diloco.rundir.reporting import PeerStatus, swarm_figures
from diloco.rundir.summary import PeerSummary, PhaseTimer, Summary
from diloco.train.reporter import Reporter
from tests.support.fake_swarm import snapshot

seen, shown, lines, logged = snapshot(2), {}, [], []
console = Console(width=200, file=SimpleNamespace(write=lines.append, flush=lambda: None))
console.print(render(seen, console))
with Dashboard("127.0.0.1", 0) as page:
    page.snapshot = seen
    for path in ("/api/state", "/api/page", "/metrics"):
        shown[path] = page.answer("localhost", path)[2].decode()
shown["table"], shown["wandb, swarm"] = "".join(lines), swarm_figures(seen)
shown["summary"] = Summary(peers=[PeerSummary(peer_id="a", **Figures().shared())]).to_json()
lines.clear()
view = LiveView(console, [], None, "")
view.update(PeerStatus("p0", 0.0, "done", 1, figures=Figures()))
shown["line"] = "".join(lines)
console.print(view.render())
shown["live"] = "".join(lines)
count = dict.fromkeys(["version", "steps", "applied_tokens", "tokens"], 0)
sync = SimpleNamespace(figures=Figures, node=None, progress=SimpleNamespace(), **count)
ranks = SimpleNamespace(size=1, is_rank0=True)
config = SimpleNamespace(outer=SimpleNamespace(method="diloco"))
log = SimpleNamespace(metric=lambda **line: logged.append(line))
Reporter(config, ranks, sync, PhaseTimer(), log, print).outer_step()
shown["wandb, peer"] = logged[0]
print(json.dumps(shown))
"""


def test_a_new_figure_is_one_line_of_one_file(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "diloco", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    file = tmp_path / "diloco" / "messages" / "figures.py"
    assert file.read_text().count(BEFORE) == 1
    file.write_text(file.read_text().replace(BEFORE, BEFORE + FIELD))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", SHOWS], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [peer["joules"] for peer in json.loads(shown["/api/state"])["peers"]] == [7, 7]
    tables = {table["name"]: table for table in json.loads(shown["/api/page"])["tables"]}
    at = tables["peers"]["columns"].index("energy")
    assert [row[at]["text"] for row in tables["peers"]["rows"]] == ["7J", "7J"]
    assert shown["/metrics"].count("\ndiloco_peer_joules{") == 2
    assert "# HELP diloco_peer_joules Energy used, by peer\n" in shown["/metrics"]
    assert "energy" in shown["table"] and shown["table"].count("7J") == 2
    assert "energy 7J" in shown["line"] and shown["live"].count("7J") == 2
    assert shown["wandb, swarm"]["swarm/joules"] == 14 and shown["wandb, peer"]["joules"] == 7
    assert shown["summary"]["peers"][0]["joules"] == 7
