"""The documents: generated pages are current, links lead somewhere, recipes can be typed, a wheel has none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from _bench.readme import rows_of
from _docs import reference, site

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "diloco" / "docs"


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_generated_page_is_what_the_code_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no configs/ adds choices
    assert (reference.FOLDER / name).read_text() == reference.PAGES[name](), "run: scripts/docs --write"


def test_every_module_of_the_package_is_in_the_list_of_files() -> None:
    listed = {line.split()[0] for line in reference.files().splitlines() if line.strip()}
    modules = {path.name for path in (ROOT / "diloco").rglob("*.py")} - {"__init__.py"}
    assert modules <= listed
    assert reference.first_sentence(ROOT / "diloco" / "atomic.py") == "Replaces a file as a whole"


def test_a_module_without_a_docstring_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    (tmp_path / "bare.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"^bare.py has no docstring$"):
        reference.first_sentence(tmp_path / "bare.py")


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text('<h2 id="place">x</h2>')
    links = ("there.html", "there.html#place", "there.html#gone", "gone.html", "#here", "https://example.org/x")
    anchors = "".join(f'<a href="{link}">x</a>' for link in links)
    (tmp_path / "page.html").write_text(f'<p id="here">{anchors}<img src="gone.png"></p>')
    assert site.broken(tmp_path) == ["page.html: gone.html", "page.html: gone.png", "page.html: there.html#gone"]


def test_pages_become_html_whose_headings_have_the_names_that_links_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"png")
    (tmp_path / "README.md").write_text("# One\n\n[two](folder/two.md#what-is-it) [files](folder)\n")
    (tmp_path / "folder" / "two.md").write_text("# Two\n\n## What is `it`?\n\n![x](image.png) [no](#nothing)\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    for page in (tmp_path / "README.md", tmp_path / "folder" / "two.md"):
        site._render(page, tmp_path / "site")
    missing = {link for link in site.broken(tmp_path / "site") if "reference.html" not in link and "api/" not in link}
    assert missing == {"folder/two.html: #nothing"}
    assert (tmp_path / "site" / "folder" / "image.png").read_bytes() == b"png"


@pytest.mark.parametrize("name", ["quality", "claims", "faults", "attacks"])
def test_a_table_that_a_script_writes_is_on_one_page(name: str) -> None:
    marks = [page for page in site.pages() if f"<!-- {name} -->" in page.read_text()]
    assert len(marks) == 1 and marks[0].parent.name == "scripts"
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
