"""Where files of settings are looked for, and the choices that are found there.

The first place that has a file counts: `--config-dir`, the package, then `configs/` in the working directory. So that
one, which may belong to another program or lie there by chance, adds choices and replaces none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diloco.config.schema import Config
from diloco.errors import ConfigError

__all__ = ["PRIMARY", "SCHEMA", "SECTIONS", "Start", "choices", "search_path"]

PRIMARY = "config"
SCHEMA = "diloco_schema"  # the name under which Hydra finds the defaults of the schema
SECTIONS = tuple(Config.model_fields)
OWN = Path("configs")


@dataclass(frozen=True)
class Start:
    """What a configuration starts from, before its overrides."""

    base: Path | None = None  # --config: a file over the defaults, or the config.yaml of a run instead of them
    folder: Path | None = None  # --config-dir
    name: str = PRIMARY  # --config-name

    def arguments(self) -> list[str]:
        """The same start as options of a command line."""
        name = None if self.name == PRIMARY else self.name
        given = {"--config": self.base, "--config-dir": self.folder, "--config-name": name}
        return [part for key, value in given.items() if value is not None for part in (key, str(value))]


def search_path(start: Start) -> tuple[Path, ...]:
    """The folders in which files are looked for, the first one first.

    Raises ConfigError if `--config-dir` is not there, or the package is damaged.
    """
    if start.folder is not None and not start.folder.is_dir():
        raise ConfigError(f"--config-dir={start.folder} is no directory; make it, or drop the option")
    typed = [] if start.folder is None else [start.folder.resolve()]
    places = [*typed, _package().resolve()]
    own = OWN.resolve()
    if _is_used(own, start):
        places.append(own)
    return tuple(dict.fromkeys(places))


def choices(start: Start | None = None) -> dict[str, tuple[str, ...]]:
    """The groups and the names that can be chosen in each, sorted; groups of the user's own come last."""
    start = start or Start()
    found: dict[str, set[str]] = {}
    package = _package().resolve()
    for place in search_path(start):
        for folder in sorted(path for path in place.iterdir() if path.is_dir()):
            names = {str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml")}
            ours = folder.name in (*SECTIONS, "experiment")
            if names and folder.name != "hydra" and (ours or place != package):
                found.setdefault(folder.name, set()).update(names)
    order = sorted(found, key=lambda name: (name not in (*SECTIONS, "experiment"), name))
    return {name: tuple(sorted(found[name])) for name in order}


def _package() -> Path:
    """`configs/` inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    for place in (package / "_configs", package.parent / "configs"):
        if (place / f"{PRIMARY}.yaml").is_file():
            return place
    raise ConfigError(f"{package}: the configs directory is missing; install diloco again")


def _is_used(own: Path, start: Start) -> bool:
    named = start.name != PRIMARY and (own / f"{start.name}.yaml").is_file()
    return named or any(next((own / name).glob("**/*.yaml"), None) for name in (*SECTIONS, "experiment"))
