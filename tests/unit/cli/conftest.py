"""What tests of commands share."""

from tests.support.command_line import typed

__all__ = ["typed"]
