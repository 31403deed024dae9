"""What a simulation came to."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.rundir.summary import Summary

__all__ = ["Simulated"]


@dataclass(frozen=True)
class Simulated:
    """The summary of the run, whose `wall_s` are real seconds and whose phases are virtual ones, and its length."""

    summary: Summary
    virtual_s: float
