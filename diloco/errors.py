"""The errors that a user can meet, with the exit code of each.

    DilocoError            1   base; never raised itself
    ├── ConfigError        2   bad configuration, arguments, or an unusable directory
    │   ├── DataError      2   no data, unreadable data, no tokens in it
    │   └── CheckpointError 2  a checkpoint or model directory that cannot be used
    ├── SwarmError         3   the swarm cannot be reached or does not admit this peer
    │   └── JoinError      3   the same in somebody's own program
    ├── DivergedError      4   training produced non-finite or absurd values
    ├── UnsavedError       5   interrupted with work that is in no checkpoint
    ├── DeviceError        6   the accelerator failed, as torch found some time later
    └── PayloadError       1   something from the network is invalid; its receiver catches this

Every text is one line: the key as typed, the value, the remedy. Any other exception that escapes is
a bug of ours (exit code 1, with its traceback). Exit code 0 means that the run is done or that the
peer left cleanly.
"""

from __future__ import annotations

from diloco.text import masked


class DilocoError(Exception):
    """A problem that the user can mend; its text is one line, without secrets that were typed."""

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(masked(text))


class ConfigError(DilocoError):
    """A setting, an argument or a directory cannot be used."""

    exit_code = 2


class DataError(ConfigError):
    """The training data is missing, unreadable or empty."""


class TermsError(DataError):
    """A gated repository on the hub: its terms have to be accepted first."""


class CheckpointError(ConfigError):
    """A checkpoint or a model directory is missing, truncated, corrupt or of another run."""


class SwarmError(DilocoError):
    """The swarm cannot be reached, or it refuses this peer."""

    exit_code = 3


class JoinError(SwarmError):
    """A user's own program could not join."""


class DivergedError(DilocoError):
    """Training diverged; going on would waste every peer's compute."""

    exit_code = 4


class UnsavedError(DilocoError):
    """The run was interrupted, and no checkpoint has all of its work."""

    exit_code = 5


class DeviceError(DilocoError):
    """The accelerator failed (`cudaErrorLaunchFailure` and the like); no process recovers."""

    exit_code = 6


class PayloadError(DilocoError):
    """Bytes or a header from another peer are invalid; the receiver refuses them."""
