"""The documents: links lead somewhere, recipes can be typed, a wheel has none of them."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import diloco
from diloco.cli.main import cli
from diloco.config.explain import setting_fields
from diloco.config.schema import Config
from tests.harness.bench import rows_of
from tests.support.command_line import exit_code
from tests.support.pages import DOCS, code, docs, typed
from tests.support.places import ROOT


def test_the_site_has_a_line_for_every_setting_and_a_heading_for_every_command() -> None:
    settings, commands = docs.settings(), docs.commands()
    assert [key for key, _ in setting_fields(Config) if f"\n- `{key}=" not in settings] == []
    assert [name for name in cli.commands if f"\n## diloco {name}\n" not in commands] == []


def test_pages_become_html_whose_headings_have_the_names_that_links_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"png")
    (tmp_path / "README.md").write_text(
        "# One\n\n[two](folder/two.md#what-is-it) [files](folder)\n"
    )
    (tmp_path / "folder" / "two.md").write_text(
        "# Two\n\n## What is `it`?\n\n![x](image.png) [no](#nothing)\n"
    )
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    for page in (tmp_path / "README.md", tmp_path / "folder" / "two.md"):
        docs._render(page, page.read_text(), tmp_path / "site")
    frame = re.compile(r"(reference|settings|commands|diloco)\.html$")
    assert [link for link in docs.broken(tmp_path / "site") if not frame.search(link)] == [
        "folder/two.html: #nothing"
    ]
    assert (tmp_path / "site" / "folder" / "image.png").read_bytes() == b"png"


@pytest.mark.parametrize("name", ["quality", "claims"])
def test_a_table_that_a_script_writes_is_on_one_page(name: str) -> None:
    [page] = [page for page in docs.pages() if f"<!-- {name} -->" in page.read_text()]
    assert page.parent.name == "scripts"
    assert any(row.startswith("| ") for row in rows_of(name))


def test_the_documents_are_in_a_source_distribution_and_not_in_a_wheel() -> None:
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    wheel, source = (
        {str(file.distribution_path) for file in builder(str(ROOT)).recurse_included_files()}
        for builder in (WheelBuilder, SdistBuilder)
    )
    assert "diloco/errors.py" in wheel and "diloco/_configs/config.yaml" in wheel
    assert not [path for path in wheel if path.startswith("diloco/docs")]
    assert {str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")} <= source


RECIPES = sorted(
    {(page.name, line) for page in (*DOCS.glob("*.md"), ROOT / "README.md") for line in typed(page)}
)


@pytest.mark.parametrize(
    ("page", "line"), RECIPES, ids=[f"{page}: {line}" for page, line in RECIPES]
)
def test_a_command_of_a_page_can_be_typed(
    page: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its options exist, and its settings make a configuration; nothing is started."""
    monkeypatch.chdir(tmp_path)
    if "swarm.key_path=run.key" in line:
        assert exit_code("keygen", "run.key") == 0
    line = line.replace("COMMIT", "0" * 40)
    if line.startswith("torchrun"):
        line = "diloco train " + " ".join(line.split()[4:])
    _, name, *words = shlex.split(line)
    if "-m" in words or name == "sweep":
        members = [name] * (name != "sweep") + [one for one in words if one != "-m"]
        arguments = ["sweep", *members, "--dry-run"]
    elif name in ("train", "local", "simulate") or words[:1] == ["--new"]:
        arguments = [name, *words, "--cfg", "job"]
    else:
        # click's own error for an option that is not there
        cli.commands[name].make_context(name, words)
        return
    assert exit_code(*arguments) == 0, capsys.readouterr().err


def sentences() -> str:
    """Every text of the package's code, a line each, with … for what is filled in."""
    found = []
    for module in (ROOT / "diloco").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "…") for part in node.values)
                found.append("".join(one if isinstance(one, str) else "…" for one in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(one.split()) for one in found)


QUOTED = re.findall(r"^\| `([^`]+)`", (DOCS / "troubleshooting.md").read_text(), re.M)


def test_the_errors_of_the_troubleshooting_page_are_said_by_the_code() -> None:
    said = sentences()
    missing = [text for text in QUOTED if not re.search(_pattern(text), said)]
    assert len(QUOTED) > 30 and not missing


def _pattern(text: str) -> str:
    return "[^\\n]*".join(re.escape(part.strip()) for part in text.split("…") if part.strip())


def test_the_front_page_leads_to_every_page_of_the_documents() -> None:
    front = (ROOT / "README.md").read_text()
    assert not [page for page in DOCS.glob("*.md") if f"](diloco/docs/{page.name}" not in front]
    assert len(front.splitlines()) <= 120


def test_there_is_no_more_to_read_than_somebody_reads() -> None:
    """Tables that scripts write do not count."""
    table = re.compile(r"<!-- (\w+) -->\n\|.*?<!-- end of \1 -->", re.DOTALL)
    words = {
        str(page.relative_to(ROOT)): len(table.sub("", page.read_text()).split())
        for page in docs.pages()
    }
    assert sum(words.values()) <= 15_000, words


def test_a_page_that_starts_another_peer_says_how_its_data_differs() -> None:
    texts = {page: page.read_text() for page in docs.pages()}
    joins, says = (
        r"(?m)^diloco join |[Tt]he next peer",
        r"(?i)(other|different)[\s-]+data|data\s+differs",
    )
    joining = {page for page, text in texts.items() if re.search(joins, text)}
    assert joining and all(re.search(says, texts[page]) for page in joining)


def test_the_reference_names_everything_that_a_user_imports_and_what_a_swarm_has() -> None:
    text = (DOCS / "reference.md").read_text()
    members = {name for name in dir(diloco.Swarm) if not name.startswith("_")} | {"state"}
    named = set(re.findall(r"`(\w+)", text))
    inside = {"of", "options", "network", "run"}  # the command's own ways
    inside |= {"in_trainer", "say"}  # those of the callbacks
    assert set(diloco.__all__) - {"__version__"} <= named
    assert members - inside <= named | {"open", "close"}, members - inside - named


def test_the_merge_rule_of_a_page_can_be_registered_and_chosen() -> None:
    chosen = "compose(['outer.merge=weighted_median']).outer.merge"
    program = f"{code('extend.md')}\nfrom diloco.config import compose\nprint({chosen})"
    said = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120)
    assert said == "weighted_median\n"
