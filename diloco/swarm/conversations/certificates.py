"""What comes from a donor with a certificate, checked as it arrives: nothing is adopted on hearsay.

    is it signed, and does it add up?     else the donor is an offender: no honest peer passes such a thing on
    did its author hold that term?        else it is not believed: `protocol.belief` says what counts
    is it disputed, and is its work proved and more than that of the anchor here?    then it is believed after all

Whether it follows what is here is asked again when it is adopted, because the anchor may move meanwhile.
"""

from __future__ import annotations

from diloco.errors import PayloadError
from diloco.protocol.belief import disputants, unbelieved
from diloco.protocol.forks import proved_heavier
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.heads import does_not_follow, wrong_record, wrong_shares
from diloco.protocol.messages.bulk import PartList, StateHeader
from diloco.protocol.messages.heads import Record
from diloco.protocol.peer import Peer
from diloco.protocol.penalties import Offence

__all__ = ["Unbelieved", "check_anchor", "check_follows", "check_record"]


class Unbelieved(PayloadError):
    """A version with a certificate that is right, and that does not go on for this peer; `version` is its number."""

    def __init__(self, why: str, version: int) -> None:
        super().__init__(why)
        self.version = version


def check_record(protocol: Peer, record: Record, donor: str) -> None:
    """Raises `Offence` for a certificate that is wrong, and `Unbelieved` for one that this peer does not believe."""
    _check_signed(protocol, record, donor)
    if (why := unbelieved(protocol, record, donor)) is not None:
        raise Unbelieved(why, record.version)


def _check_signed(protocol: Peer, record: Record, donor: str) -> None:
    """An author that was invited, but never showed that here, is as good as the donor that names it."""
    if (why := wrong_record(protocol.signer, protocol.run_id, record)) is not None:
        raise Offence(why)
    if not (protocol.may_author(record.head.author) or protocol.may_author(donor)):
        raise Unbelieved(f"version {record.version} is by {record.head.author}, which was not invited", 0)


def check_anchor(protocol: Peer, header: StateHeader | PartList, donor: str) -> None:
    """The same of an anchor. Version 0 has no certificate: the syncer names it, as long as nothing was published."""
    record, fragment = header.record, protocol.fragments[header.fragment]
    if record is None:
        lease = protocol.live_lease(header.fragment)
        named = (
            protocol.may_author(donor)
            if lease is None
            else lease.holder in (donor, protocol.me) or (lease.version, lease.digest) == (0, header.digest)
        )
        if fragment.version > 0 or not named:
            raise PayloadError(f"version 0 of fragment {header.fragment} is not as its syncer published it")
        return
    _check_signed(protocol, record, donor)
    if (why := wrong_shares(record, header.shares, header.fragment == CONTROL_FRAGMENT)) is not None:
        raise Offence(why)
    why = unbelieved(protocol, record, donor)
    disputed = fragment.syncer is not None and donor in disputants(protocol, fragment)
    if why is not None and not (disputed and proved_heavier(protocol, header)):
        raise Unbelieved(why, record.version)
    if (fragment.version + 1, fragment.digest) == (record.version, record.digest_before):
        check_follows(protocol, record)


def check_follows(protocol: Peer, record: Record) -> None:
    """`PayloadError` when a certificate is not that of the version after the one that is here, or comes too late: the
    syncer has been followed by another one, which goes on without that version.
    """
    here, lease = protocol.fragments[record.fragment], protocol.live_lease(record.fragment)
    if lease is not None and lease.holder != protocol.me and lease.term > record.head.term:
        if lease.version < record.version:
            raise PayloadError(f"version {record.version} was made under term {record.head.term}, which is over")
    control = record.fragment == CONTROL_FRAGMENT
    why = does_not_follow(record, here.version, here.digest, here.shares, control, here.skipped)
    if why is not None:
        raise PayloadError(why)
