"""What `Swarm` is given, as its caller types it: settings of the outer step, addresses, and what is
said of mistakes.

    preset < outer=dict(...) < keywords -> `OuterConfig`
    address < network=dict(...) < keywords -> `SwarmConfig`

Some settings have other names where they come from: `swarm.initial_peers` is `address` here. So an
error that names one is raised again in the caller's words.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from diloco.config import OuterConfig, SwarmConfig
from diloco.config.compose import outer_preset
from diloco.config.explain import nearest
from diloco.config.files import fragments_of
from diloco.config.manifest import hash_of
from diloco.errors import ConfigError, DivergedError, JoinError, SwarmError
from diloco.swarm.node.options import RunSpec

_TYPED = {
    "swarm.initial_peers": "address",
    "swarm.identity_path": "identity",
    "run.id": "run_id",
    "run.key": "key",
}
_NAMES = re.compile("|".join(map(re.escape, _TYPED)) + r"|\bswarm\.(?=[a-z_]+[=:])")
_NOBODY = "; if it had made all its steps before this peer came, start it with min_peers=2"
# as which arguments of `Swarm` these have names of their own
_OTHERWISE = {"initial_peers", "identity_path"}


class ResolvedOuter(NamedTuple):
    """Settings of the outer step; with `by_size`, into how many fragments follows from the size of
    the model."""

    outer: OuterConfig
    by_size: bool = False

    def of(self, numel: int) -> OuterConfig:
        """Those of a model that trains so many values."""
        return (
            self.outer.model_copy(update={"fragments": fragments_of(numel)})
            if self.by_size
            else self.outer
        )


def outer_of(
    preset: str | None,
    outer: str | Mapping[str, Any] | OuterConfig | None,
    keywords: Mapping[str, Any],
) -> ResolvedOuter:
    """The settings of a file of configs/outer, with others over them; raises `ConfigError`."""
    if isinstance(outer, str):
        preset, outer = outer, None
    if isinstance(outer, OuterConfig):
        outer = outer.model_dump()
    said = {**(outer or {}), **keywords}
    _check_names(said, OuterConfig.model_fields)
    if said.get("method", "diloco") != "diloco":
        raise ConfigError(
            f"method={said['method']}: a Swarm makes outer steps; diloco train has the other"
            " methods"
        )
    laid = {"method": "diloco"} if preset is None else outer_preset(preset)
    laid.pop("rounds", None)  # it follows from a budget, which a loop of one's own does not have
    by_size = "${fragments_for:" in str(laid.get("fragments")) and "fragments" not in said
    if by_size:
        del laid["fragments"]
    return ResolvedOuter(OuterConfig.parse({**laid, **said}), by_size)


def network_of(
    address: str | Sequence[str] | None,
    network: Mapping[str, Any] | SwarmConfig | None,
    keywords: Mapping[str, Any],
) -> SwarmConfig:
    """The settings below `swarm.`; raises `ConfigError` with the names of `Swarm`."""
    if isinstance(network, SwarmConfig):
        if address is None and not keywords:
            return network
        network = network.model_dump()
    said = {**(network or {}), **keywords}
    _check_names(said, SwarmConfig.model_fields)
    if address is not None:
        said["initial_peers"] = address
    for name in ("initial_peers", "listen", "announce"):
        if name in said:
            said[name] = _several(said[name])
    if said.get("key_path") is not None:
        said["key_path"] = str(said["key_path"])
    with as_typed():
        try:
            return SwarmConfig.parse(said)
        except ConfigError as error:
            raise ConfigError(f"swarm.{error}") from None


def check_names(given: Iterable[str], swarm: Callable[..., object]) -> None:
    """Raise `ConfigError` for a name that is neither an argument of `Swarm` nor a setting."""
    arguments = list(inspect.signature(swarm).parameters)[:-1]
    _check_names(
        given,
        [*arguments, *OuterConfig.model_fields, *(SwarmConfig.model_fields.keys() - _OTHERWISE)],
    )


def _check_names(given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            guess = " or ".join(nearest(name, known))
            remedy = (
                f"did you mean {guess}?"
                if guess
                else "help(diloco.Swarm) has the arguments and settings"
            )
            raise ConfigError(
                f"{name} is neither an argument of Swarm nor a setting of the outer step; {remedy}"
            )


def _several(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The texts of one or several, once each and without the empty ones."""
    texts = [value] if isinstance(value, str) else list(value or ())
    return tuple(dict.fromkeys(text for text in texts if text != ""))


@contextmanager
def as_typed(
    typed: bool = True, remedy: str = "lower the optimizer's learning rate"
) -> Iterator[None]:
    """Errors inside name the arguments of `Swarm`, if these were `typed`; `remedy` is for training
    that diverges."""
    try:
        yield
    except (SwarmError, DivergedError, ConfigError) as error:
        text = _NAMES.sub(lambda found: _TYPED.get(found[0], ""), str(error))
        if typed and isinstance(error, SwarmError):
            alone = text.startswith("address=") and "cannot be reached" in text
            raise JoinError(text + _NOBODY if alone else text) from None
        if typed and isinstance(error, DivergedError):
            raise DivergedError(f"{str(error).partition(';')[0]}; {remedy}") from None
        if not typed or text == str(error):
            raise
        raise type(error)(text) from None


def loop_spec(
    run_id: str,
    key: str | None,
    admit: str,
    outer: OuterConfig,
    parameters: Mapping[str, Tensor],
    model: str = "",
    frozen: str | None = None,
) -> RunSpec:
    """The run of a loop of one's own: outer settings, class and shapes of the model, digest of what
    is not trained."""
    content = {
        "run": {"id": run_id, "key": key},
        "swarm": {"admit": admit},
        "outer": outer.model_dump(mode="json"),
        **({"model": {"name": model}} if model else {}),
        "parameters": {name: list(parameter.shape) for name, parameter in parameters.items()},
        "frozen_parameters": frozen,
    }
    text = json.dumps(content, sort_keys=True)
    return RunSpec(run_id, hash_of(text), text)
