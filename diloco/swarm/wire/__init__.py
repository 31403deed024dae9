"""How bytes get to a peer, and which peer sent them: libp2p, streams, admission, DHT records."""

from diloco.errors import ConfigError

try:  # its modules make semaphores when they are imported
    import hivemind.compression  # noqa: F401
except OSError as error:
    needs = f"hivemind needs /dev/shm, which cannot be written ({error.strerror})"
    raise ConfigError(f"{needs}; mount -o remount,rw /dev/shm") from error
