"""Names of hivemind, imported so that only what a peer uses of it is loaded. `dht` has the rest."""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec, module_from_spec

from diloco.errors import ConfigError


def _defer(name: str) -> None:
    """Let modules inside a package be imported without its `__init__`, which then runs when a
    missing attribute of the package is first read.

    A program that imports the package itself therefore finds all its names. Nothing happens if the
    package is imported already, or is missing, which the import of its modules reports.
    """
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.loader is None:
        return
    package, loader, lock = module_from_spec(spec), spec.loader, threading.RLock()
    names, loading = vars(package), list[str]()

    def load(attribute: str) -> object:
        with lock:  # other threads wait; `__init__` itself reads submodules that it imports later
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


# Their `__init__` imports scipy and much else that no peer uses, for half the import time of torch.
for _package in ("hivemind", "hivemind.p2p", "hivemind.utils", "hivemind.dht"):
    _defer(_package)

try:  # importing this module makes a semaphore
    import hivemind.utils.asyncio  # noqa: F401
except OSError as error:
    needs = f"hivemind needs /dev/shm, which cannot be written ({error.strerror})"
    raise ConfigError(f"{needs}; mount -o remount,rw /dev/shm") from error

from hivemind.p2p.p2p_daemon import P2P  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID, StreamInfo  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

__all__ = ["P2P", "ControlFailure", "Multiaddr", "P2PDaemonError", "PeerID", "StreamInfo"]
