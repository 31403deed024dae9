"""All pages of the repository as HTML, the Python API beside them (pdoc), and a check of every link between them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from _docs.reference import ROOT

__all__ = ["broken", "build", "pages"]

API = ("diloco", "!diloco\\.", "diloco.errors", "diloco.train.attachment")
ELSEWHERE = re.compile(r"[a-z]+:", re.I)
FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem }}
pre, table {{ overflow-x: auto; display: block }} pre, code {{ font-size: 14px }}
pre {{ padding: .7rem; border: 1px solid #8886; border-radius: 6px }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #8886; padding: .2rem .5rem; text-align: left }}
img {{ max-width: 100% }}
</style></head><body><nav><a href="{top}README.html">diloco</a> ·
<a href="{top}diloco/docs/reference.html">reference</a> · <a href="{top}api/diloco.html">Python API</a></nav>
{body}</body></html>
"""


def pages() -> list[Path]:
    """The Markdown files of the repository."""
    folders = (ROOT / name for name in ("configs", "diloco", "scripts"))
    return [ROOT / "README.md", *sorted(page for folder in folders for page in folder.rglob("*.md"))]


def build(out: Path) -> None:
    """Writes the site; `out` is made anew."""
    import pdoc

    import diloco

    for name in diloco.__all__:  # pdoc sees only what is in the module already
        setattr(diloco, name, getattr(diloco, name))
    for base in diloco.Swarm.__mro__[1:]:  # nor does it show what a class has from one that is not on its pages
        for name, member in vars(base).items():
            if base.__module__.startswith("diloco.") and not name.startswith("_") and name not in vars(diloco.Swarm):
                setattr(diloco.Swarm, name, member)
    shutil.rmtree(out, ignore_errors=True)
    for page in pages():
        _render(page, out)
    pdoc.render.configure(docformat="markdown", show_source=False)
    pdoc.pdoc(*API, output_directory=out / "api")


def broken(site: Path) -> list[str]:
    """The links of all pages of the site that lead to no file, or to no place in it."""
    found = {path.resolve(): Parsed(path) for path in site.rglob("*.html")}
    return sorted(
        f"{path.relative_to(site.resolve())}: {link}"
        for path, parsed in found.items()
        for link in parsed.links
        if not ELSEWHERE.match(link) and not _leads(path, link, found)
    )


class Parsed(HTMLParser):
    """The places and links of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := named.get(name))}
        self.links += [value for name in ("href", "src") if (value := named.get(name))]


def _leads(path: Path, link: str, found: dict[Path, Parsed]) -> bool:
    file, _, place = link.partition("#")
    target = (path.parent / unquote(file)).resolve() if file else path
    if not target.is_file():
        return False
    return not place or (target in found and unquote(place) in found[target].places)


def _render(page: Path, out: Path) -> None:
    """Writes a page and copies the files to which it links; links to other pages lead to theirs."""
    target = (out / page.relative_to(ROOT)).with_suffix(".html")
    target.parent.mkdir(parents=True, exist_ok=True)
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(page.read_text())
    slugs: dict[str, int] = {}
    for heading, inline in pairwise(tokens):
        if heading.type == "heading_open":
            heading.attrSet("id", _slug(inline.content, slugs))
    for token in _all(tokens):
        name = {"link_open": "href", "image": "src"}.get(token.type)
        if name and not ELSEWHERE.match(link := str(token.attrGet(name))):
            token.attrSet(name, _link(page, link, out))
    title = next((after.content for one, after in pairwise(tokens) if one.tag == "h1"), page.name)
    body = markdown.renderer.render(tokens, markdown.options, {})
    top = "../" * len(page.relative_to(ROOT).parts[:-1])
    target.write_text(FRAME.format(title=title, body=body, top=top))


def _link(page: Path, link: str, out: Path) -> str:
    file, _, place = link.partition("#")
    source = page.parent / unquote(file)
    if file.endswith(".md"):
        file = file.removesuffix(".md") + ".html"
    elif file and source.is_file():
        copy = out / os.path.relpath(source.resolve(), ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    elif source.is_dir() and file:  # a folder has no page; its files are in the repository
        listing = out / os.path.relpath(source.resolve(), ROOT) / "index.html"
        listing.parent.mkdir(parents=True, exist_ok=True)
        names = "".join(f"<li>{one.name}</li>" for one in sorted(source.iterdir()))
        listing.write_text(f"<!doctype html><title>{source.name}</title><ul>{names}</ul>")
        file = f"{file.rstrip('/')}/index.html"
    return f"{file}#{place}" if place else file


def _slug(heading: str, seen: dict[str, int]) -> str:
    """The name that GitHub gives the place of a heading."""
    slug = re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
    number = seen.get(slug, 0)
    seen[slug] = number + 1
    return f"{slug}-{number}" if number else slug


def _all(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _all(token.children or [])
