"""A loop in a swarm of one, with outer rate 1 and no momentum, ends as without a swarm: the same
parameters, averages, rates, losses, saved files and number of steps, bit by bit.

The loop without a swarm rounds as an exchange does, `a - (a - p)`. What the libraries' callbacks
have written, averaged and stopped is compared as well.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module

from diloco.errors import ConfigError
from scripts.families import WORKS, Member, refused
from scripts.families._features import LIGHTNING, OWN, TRAINERS, TRIED
from scripts.families._sides import play_both

SOURCES = ("torch", "transformers", "trl", "accelerate", "lightning")
TABLES = {"own": OWN, "trainers": TRAINERS, "lightning": LIGHTNING}
NEEDS = {"own": "lightning", "trainers": "trl", "lightning": "lightning"}
QUICK = {"FSDP2, nothing else", "Lightning, StochasticWeightAveraging"}


def members() -> Iterator[Member]:
    for module, table in TABLES.items():
        for library, features in table.items():
            for feature in features:
                name = f"{library}, {feature}"
                yield Member(name, library, name in QUICK, NEEDS[module])


def play(name: str) -> str:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    library, _, feature = name.partition(", ")
    [module] = (module for module, table in TABLES.items() if library in table)
    train = import_module(f"{__package__}._loops_{module}").train
    try:
        play_both(partial(train, library, feature), TRIED.get(feature, 0))
    except ConfigError as error:
        return refused(error)
    return WORKS
