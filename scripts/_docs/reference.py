"""The pages of the reference that are made from the code: settings, commands, the Python API, files.

They are committed, so that nobody has to build them to read them; `tests/test_docs.py` compares them with the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

__all__ = ["FOLDER", "PAGES", "ROOT", "write"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "diloco" / "docs" / "reference"
INSIDE = {"of", "options", "runtime"}  # of `Swarm`: the command's own ways
MADE = "*Made from the code by `scripts/docs --write`; edit nothing here.*"


def write() -> None:
    """Writes each page anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


def settings() -> str:
    """Every setting: meaning, what it expects, default, and whether it defines the run."""
    from diloco.config.shown import help_text

    groups, _, listed = help_text().partition("\n\n")
    lines = ["# Settings", "", MADE, ""]
    lines += ["A line begins with the default. Settings marked \\* define the run, and are equal on all its peers; the"]
    lines += ["others are each peer's own. `diloco train --cfg help` prints the same.", "", "## Groups", ""]
    lines += ["`GROUP=CHOICE` takes a file of settings.", "", "| group | choices |", "|---|---|"]
    for line in groups.splitlines()[1:]:
        group, _, choices = line.strip().partition(": ")
        lines.append(f"| `{group}` | {' '.join(f'`{choice}`' for choice in choices.split())} |")
    section = ""
    rows = listed.splitlines()[1:]
    for setting, meaning in zip(rows[::2], rows[1::2], strict=True):
        group = setting.strip().partition(".")[0]
        if group != section:
            section = group
            lines += ["", f"## {group}", ""]
        shown, mark, _ = setting.strip().partition(" *")
        star = r" \*" if mark else ""
        lines.append(f"- `{shown}`{star}: {_plain(meaning.strip())}")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command as its --help shows it."""
    from diloco.cli.main import SECTIONS, cli

    lines = ["# Commands", "", MADE, ""]
    lines += ["`diloco COMMAND --help` prints the same. OVERRIDES are [settings](settings.md) such as `outer.lr=0.5`."]
    for section, members in SECTIONS.items():
        lines += ["", f"**{section}**: " + ", ".join(f"[`{one.name}`](#diloco-{one.name})" for one in members)]
    for command in (one for members in SECTIONS.values() for one in members):
        context = click.Context(command, info_name=str(command.name), parent=click.Context(cli, info_name="diloco"))
        context.terminal_width = context.max_content_width = 100
        context.help_option_names, context.show_default = ["-h", "--help"], True
        text, _, _ = command.get_help(context).partition("\nGroups (")  # of settings, which have a page of their own
        text = "\n".join(line.rstrip() for line in text.rstrip().splitlines())
        lines += ["", f"## diloco {command.name}", "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def python() -> str:
    """What `from diloco import ...` gives: signatures and docstrings, with the methods of classes."""
    import diloco

    lines = ["# Python API", "", MADE, "", "`python -m pydoc diloco.Swarm` prints the same."]
    for name in sorted(set(diloco.__all__) - {"__version__"}):
        value = getattr(diloco, name)
        lines += ["", f"## {name}", "", "```text", _signature(name, value), *_docstring(value)]
        for method, function in sorted(_methods(value).items()):
            lines += ["", _signature(f"{name}.{method}", function), *_docstring(function)]
        lines.append("```")
    return "\n".join(lines) + "\n"


def files() -> str:
    """Every module of the package as a tree, with the first sentence of its docstring."""
    lines = ["# Files of the package", "", MADE, ""]
    lines += ["What each module says of itself first. [The design](../../README.md) says how they work together.", ""]
    return "\n".join([*lines, "```", *_branch(ROOT / "diloco", ""), "```"]) + "\n"


PAGES = {"commands.md": commands, "files.md": files, "python.md": python, "settings.md": settings}


def _methods(value: Any) -> dict[str, Any]:
    """What a user calls of a class, and of its bases that have no section of their own."""
    import diloco

    sections = {getattr(diloco, name) for name in diloco.__all__} - {value}
    found: dict[str, Any] = {}
    for base in reversed(getattr(value, "__mro__", ())):
        if base.__module__.startswith("diloco") and base not in sections:
            found |= {name: one for name, one in vars(base).items() if not name.startswith(("_", "on_"))}
    shown = {name: one for name, one in found.items() if _function(one) is not None and inspect.getdoc(one)}
    return {name: one for name, one in shown.items() if name not in INSIDE}


def _function(value: Any) -> Any:
    value = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
    return value if inspect.isfunction(value) else None


def _signature(name: str, value: Any) -> str:
    """As it stands in the source, so that all versions of Python print the same."""
    init = vars(value).get("__init__") if inspect.isclass(value) else None
    function = _function(init if init is not None else value)
    if function is None or isinstance(value, property):
        return name
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(defined, ast.FunctionDef), f"{name} is no function"
    arguments = ast.unparse(defined.args)
    shown = f"{name}({re.sub(r'^(self|cls)(, )?', '', arguments)})".replace(": ", ":~").replace("[str, ", "[str,~")
    wrapped = textwrap.wrap(shown, 116, subsequent_indent="    ", break_long_words=False)
    return "\n".join(wrapped).replace("~", " ")


def _docstring(value: Any) -> Iterator[str]:
    for line in (inspect.getdoc(value) or "").splitlines():
        yield f"    {line}".rstrip()


def _branch(folder: Path, indent: str) -> Iterator[str]:
    modules = [one for one in folder.iterdir() if one.suffix == ".py" and one.name != "__init__.py"]
    folders = [one for one in folder.iterdir() if (one / "__init__.py").is_file()]
    for one in (*sorted(modules), *sorted(folders)):
        is_folder = one in folders
        role = first_sentence(one / "__init__.py" if is_folder else one)
        name = f"{indent}{one.name}{'/' if is_folder else ''}"
        yield f"{name:<32} {role}"
        if is_folder:
            yield from _branch(one, f"{indent}    ")


def first_sentence(module: Path) -> str:
    """Of the docstring; `ValueError` if there is none."""
    text = ast.get_docstring(ast.parse(module.read_text()))
    if not text:
        raise ValueError(f"{module.relative_to(ROOT)} has no docstring")
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].rstrip(":.")


def _plain(text: str) -> str:
    """Text in which nothing is a mark of Markdown."""
    return re.sub(r"([<>*_|])", r"\\\1", text)
