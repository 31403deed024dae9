"""What of a process others share: `changes` says what code leaves changed in it."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from omegaconf.basecontainer import BaseContainer
from torch.optim.optimizer import _global_optimizer_post_hooks

LIBRARIES = "torch transformers hivemind omegaconf hydra asyncio click datasets huggingface_hub"
OWN = "diloco"
LATE = ("logging", "patched")  # libraries load parts of themselves late


def changes(work: Callable[[], object]) -> list[str]:
    """Names of what has another value after `work` than before; what is new is named where it is
    of a table that libraries read."""
    before = _tables()
    work()
    after = _tables()
    changed = []
    for table, values in before.items():
        for name in values.keys() | after[table].keys():
            if values.get(name) != after[table].get(name) and not name.startswith(OWN):
                if name in values or table not in LATE:
                    changed.append(f"{table}: {name}")
    return sorted(changed)


def _tables() -> dict[str, dict[str, Any]]:
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    loggers = [one for one in known if isinstance(one, logging.Logger)]
    return {
        "hooks": {
            "sys.excepthook": sys.excepthook,
            "threading.excepthook": threading.excepthook,
            "sys.unraisablehook": sys.unraisablehook,
            "stdout": sys.stdout,
            "stderr": sys.stderr,
        },
        "signals": {str(number): signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": {"filters": list(warnings.filters)},
        "logging": {one.name: (one.level, *one.handlers, *one.filters) for one in loggers},
        "environment": dict(os.environ),
        "resolvers": dict(BaseContainer._resolvers),
        "torch": {
            "dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "matmul": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "gradients": torch.is_grad_enabled(),
            "hooks": list(_global_optimizer_post_hooks),
        },
        "patched": dict(_code()),
    }


def _code() -> list[tuple[str, Any]]:
    """Functions, classes and their attributes in the libraries that are imported."""
    libraries, found = {*LIBRARIES.split()}, list[tuple[str, Any]]()
    for place, module in sorted(sys.modules.items()):
        if place.partition(".")[0] not in libraries or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType | type):
                found.append((f"{place}.{name}", id(value)))
            if isinstance(value, type) and value.__module__ == place:
                own = list(vars(value).items())
                plain = [pair for pair in own if isinstance(pair[1], FunctionType | str)]
                found += [(f"{place}.{name}.{key}", one) for key, one in plain]
    return found
