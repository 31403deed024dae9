"""Where files of settings are looked for, and the choices that are found there.

The first place that has a file counts: `configs/` in the working directory, `--config-dir`, then the package. A folder
`configs/` without a group of ours is not looked at. Where it has a file of a name of ours with other content, it
belongs to another program: it comes last, so that it adds choices and replaces none. For a guest in somebody's swarm it
comes last, too: nothing that lies in the working directory counts there without being typed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from diloco.config.explain import leaves
from diloco.config.schema import Config
from diloco.errors import ConfigError

__all__ = ["PRIMARY", "SCHEMA", "SECTIONS", "Start", "choices", "search_path", "stamp"]

PRIMARY = "config"
SCHEMA = "diloco_schema"  # the name under which Hydra finds the defaults of the schema
SECTIONS = tuple(Config.model_fields)
OWN = Path("configs")
_KEYS = frozenset(key for key, _ in leaves(Config))


@dataclass(frozen=True)
class Start:
    """What a configuration starts from, before its overrides."""

    base: Path | None = None  # --config: a file over the defaults, or the config.yaml of a run instead of them
    folder: Path | None = None  # --config-dir
    name: str = PRIMARY  # --config-name
    guest: bool = False  # of a swarm whose run is its own

    def arguments(self) -> list[str]:
        """The same start as options of a command line."""
        return [
            *([] if self.base is None else ["--config", str(self.base)]),
            *([] if self.folder is None else ["--config-dir", str(self.folder)]),
            *([] if self.name == PRIMARY else ["--config-name", self.name]),
        ]


def search_path(start: Start) -> tuple[Path, ...]:
    """The folders in which files are looked for, the first one first.

    Raises ConfigError if `--config-dir` is not there, or the package is damaged.
    """
    if start.folder is not None and not start.folder.is_dir():
        raise ConfigError(f"--config-dir={start.folder} is no directory; make it, or drop the option")
    typed = [] if start.folder is None else [start.folder.resolve()]
    places = [*typed, _package().resolve()]
    own = OWN.resolve()
    if own not in places and _is_used(own, start):
        last = start.guest or _is_foreign(own)
        places = [*places, own] if last else [own, *places]
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


def stamp(places: tuple[Path, ...]) -> tuple[tuple[str, int, int], ...]:
    """Changes when a file in one of the folders does; the package's own files stay as they are."""
    package = _package().resolve()
    return tuple(
        (str(file), found.st_mtime_ns, found.st_size)
        for place in places
        if place != package
        for file in sorted(place.rglob("*.yaml"))
        if (found := file.stat())
    )


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


def _is_foreign(own: Path) -> bool:
    """Whether a file in `own` would take the place of one of the package without a setting of ours in it."""
    return any(not _is_ours(own / file, file) for file in _names(_package()) if (own / file).is_file())


def _names(package: Path) -> Iterator[Path]:
    yield Path(f"{PRIMARY}.yaml")
    for group in (*SECTIONS, "experiment"):
        yield from (file.relative_to(package) for file in (package / group).glob("*.yaml"))


def _is_ours(file: Path, name: Path) -> bool:
    try:
        content = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return True  # whoever chooses it is told what is wrong with it
    if not isinstance(content, DictConfig):
        return False
    if len(name.parts) == 1:
        return SCHEMA in content.get("defaults", ())
    prefix = "" if name.parts[0] == "experiment" else f"{name.parts[0]}."
    keys = [f"{prefix}{key}" for key in map(str, content) if key not in ("defaults", "hydra")]
    known = _KEYS if prefix else frozenset(SECTIONS)
    return not keys or any(key in known for key in keys)
