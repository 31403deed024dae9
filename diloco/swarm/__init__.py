"""The swarm over hivemind: the only part that knows it. `node.Node` is what the training loop
holds."""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec, module_from_spec

from diloco.errors import ConfigError


def _defer(name: str) -> None:
    """Let modules inside a package be imported without its `__init__`, which runs as soon as the
    package is asked for a name that it does not have yet.

    So a program that imports the package itself finds all of it. Nothing happens if the package is
    imported already, or is missing, which the import of its modules reports.
    """
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.loader is None:
        return
    package, loader, lock = module_from_spec(spec), spec.loader, threading.RLock()
    names, loading = vars(package), list[str]()

    def load(attribute: str) -> object:
        with lock:  # other threads wait; `__init__` itself asks for modules that come later in it
            if not loading and "__getattr__" in names:
                loading.append(attribute)
                try:
                    loader.exec_module(package)
                    del names["__getattr__"]
                finally:
                    loading.clear()
        if attribute in names:
            return names[attribute]
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    names["__getattr__"], sys.modules[name] = load, package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)


# Their `__init__` imports scipy and all that a peer does not use, half of what torch takes.
for _package in ("hivemind", "hivemind.p2p", "hivemind.utils", "hivemind.dht"):
    _defer(_package)

try:  # this module makes a semaphore when it is imported
    import hivemind.utils.asyncio  # noqa: F401
except OSError as error:
    needs = f"hivemind needs /dev/shm, which cannot be written ({error.strerror})"
    raise ConfigError(f"{needs}; mount -o remount,rw /dev/shm") from error
