"""Prices of machines, and what so many hours and bytes cost there.

A price file is YAML, one entry per kind of machine:

    h100: {usd_per_hour: 2.5, flops_per_s: 4.0e14, egress_usd_per_gb: 0.09}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from diloco.config.base import Settings
from diloco.config.explain import explain, show
from diloco.config.suggest import nearest
from diloco.errors import ConfigError

__all__ = ["Cost", "Machine", "read_machine"]

FLOPS_PER_PARAMETER = 6  # of a token, forward and backward (arXiv 2001.08361, section 2.1)
EXAMPLE = "h100: {usd_per_hour: 2.5, tokens_per_s: 40000}"


def _to_float(value: Any) -> Any:
    """YAML 1.1 reads 4e14, without a point, as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Number = Annotated[float, BeforeValidator(_to_float)]


class Cost(NamedTuple):
    """US dollars for machines and for what they send."""

    compute: float
    traffic: float

    @property
    def total(self) -> float:
        return self.compute + self.traffic


class Machine(Settings):
    """A kind of machine for a peer. At most one of `tokens_per_s` and `flops_per_s` says how fast it is."""

    usd_per_hour: Number = Field(ge=0, le=1e6)
    egress_usd_per_gb: Number = Field(0.0, ge=0, le=1e6)
    """US dollars for 10^9 bytes that leave the machine."""
    tokens_per_s: Number | None = Field(None, gt=0, le=1e15)
    """Tokens on which it trains the model in question in a second, without exchanges."""
    flops_per_s: Number | None = Field(None, gt=0, le=1e24)
    """Floating-point operations that training reaches there in a second, for models of any size."""

    @model_validator(mode="after")
    def _one_speed(self) -> Machine:
        if self.tokens_per_s is not None and self.flops_per_s is not None:
            raise ValueError("tokens_per_s and flops_per_s both say how fast it is; drop one")
        return self

    def step_s(self, parameters: int, tokens: int) -> float | None:
        """Seconds of an inner step with so many tokens of a model of that size; None if its speed is not known."""
        if self.tokens_per_s is not None:
            return tokens / self.tokens_per_s
        if self.flops_per_s is not None:
            return FLOPS_PER_PARAMETER * parameters * tokens / self.flops_per_s
        return None

    def cost(self, machine_s: float, bytes_sent: float) -> Cost:
        """What `machine_s` seconds of such machines, all of them together, and so many sent bytes cost."""
        return Cost(machine_s / 3600 * self.usd_per_hour, bytes_sent / 1e9 * self.egress_usd_per_gb)


def read_machine(path: Path, name: str | None) -> tuple[str, Machine]:
    """The machine of that name in a price file, with its name; without one the only machine of the file.

    Raises ConfigError for a file that is no price file, and for a machine that is not in it.
    """
    machines = _read(path)
    if name is None and len(machines) == 1:
        [name] = machines
    if name is None:
        raise ConfigError(f"--prices={path} has {len(machines)} machines; choose --machine, one of {_names(machines)}")
    if name not in machines:
        guesses = nearest(name, machines)
        hint = f" (did you mean {guesses[0]}?)" if guesses else ""
        raise ConfigError(f"--machine={show(name)} is not in {path}{hint}; expected one of {_names(machines)}")
    return name, machines[name]


def _names(machines: Mapping[str, Machine]) -> str:
    return ", ".join(machines)


def _read(path: Path) -> dict[str, Machine]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--prices={path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"--prices={path} is not YAML: {show(first, limit=200)}; write {EXAMPLE}") from None
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"--prices={path} holds no machines; write {EXAMPLE}")
    machines = {}
    for name, values in content.items():
        if not isinstance(values, dict):
            raise ConfigError(f"--prices={path}: {show(str(name))}={show(str(values))} is no machine; write {EXAMPLE}")
        try:
            machines[str(name)] = Machine.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"--prices={path}: {show(str(name))}: {explain(error, Machine)}") from None
    return machines
