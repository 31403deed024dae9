"""All attacks, and which of them are known not to be contained, with the reason.

The numbers of findings: F are those about security, C those about correctness.
"""

from __future__ import annotations

from diloco.testing.attacks import floods, lies, payloads
from diloco.testing.attacks.arena import ATTACKS

__all__ = ["ATTACKS", "OPEN"]

assert all((floods, lies, payloads)), "importing them registers their attacks"

WEIGHTS = "a peer may claim four times the pace of the others"

OPEN = {
    "claims-eightfold": WEIGHTS,
    "free-versions": WEIGHTS,
    "minus-ten-of-three": "fewer than four contributions are judged by earlier ones only",
    "minus-ten-quorum": "with a quorum only norms are judged",
    "a-little": "a lie within the norm and the angle of honest work is not found",
    "slow-word": "a peer that says it pauses is waited for, ten minutes at first",
    "seems-to-get-on": "a version waits 20 s for a peer, once",
    "all-data": "any data may be named as applied or had",
}
