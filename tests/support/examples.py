"""The examples, and how one is run."""

from __future__ import annotations

import re

from tests.support.places import ROOT

FOLDER = ROOT / "scripts" / "examples"


NAMES = sorted(file.stem for file in FOLDER.glob("*.py"))


ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+(?=['\n])")
