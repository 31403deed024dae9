"""How bytes get to a peer, and which peer sent them: libp2p, streams, admission, DHT records."""

from diloco.errors import ConfigError

try:  # its modules make semaphores when they are imported
    import hivemind.compression  # noqa: F401
except OSError as error:
    raise ConfigError(
        f"hivemind needs /dev/shm, which cannot be written ({error.strerror}); mount it writable:"
        " mount -o remount,rw /dev/shm, or docker run --shm-size=64m"
    ) from error
