"""What a peer must not forget when it is started again: whom it refuses, and why.

One file for each peer and run, in the run directory. It is replaced as a whole at each change, and read before the
first greeting. Without a file everything lasts as long as the process.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco.admission.keys import Revoked
from diloco.atomic import replace_file
from diloco.errors import ConfigError

__all__ = ["Memory"]

logger = logging.getLogger(__name__)


class Memory:
    """Refusals of one run, by `scope`: its id, and its key or the hash of its manifest.

    Attributes:
        revoked: the newest list of the run's owner.
        users: the first peer that used a token, by the token's id.
        seal: the run key's signature of the manifest (see `RunKey.seal`); "" while nobody has shown it.

    A file that cannot be written is a warning in the log, and the run goes on. Then the next start forgets the change.
    """

    def __init__(self, path: Path | None = None, scope: str = "") -> None:
        """Raises ConfigError if the file is damaged. A file of another scope counts as none."""
        self.revoked = Revoked(0, (), (), b"")
        self.users: dict[str, str] = {}
        self.seal = ""
        self._path, self._scope = path, scope
        if path is not None and path.exists():
            try:
                self._load(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                raise ConfigError(
                    f"{path} keeps whom this peer refuses, and is damaged; restore it, or delete it to refuse nobody"
                ) from None

    def _load(self, content: dict[str, Any]) -> None:
        if content["scope"] != self._scope:
            return
        listed = content["revoked"]
        self.revoked = Revoked(
            int(listed["number"]),
            tuple(map(str, listed["token_ids"])),
            tuple(map(str, listed["peer_ids"])),
            bytes.fromhex(listed["signature"]),
        )
        self.users = {str(token): str(peer) for token, peer in content["users"].items()}
        self.seal = str(content["seal"])

    def keep(self) -> None:
        """Write everything to the file."""
        if self._path is None:
            return
        content = {
            "scope": self._scope,
            "revoked": {**asdict(self.revoked), "signature": self.revoked.signature.hex()},
            "users": self.users,
            "seal": self.seal,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, (json.dumps(content, indent=1) + "\n").encode(), 0o600)
        except OSError as error:
            logger.warning("%s cannot be written (%s): the next start forgets whom it refused", self._path, error)
