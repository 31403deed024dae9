"""Audits: no honest syncer is accused, whatever the settings; and what a syncer alters is found."""

from __future__ import annotations

from audit_helpers import Syncer
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.config import OuterConfig
from diloco.outer.audit import audit, obstacle, parts
from diloco.outer.fragments import BLOCK
from diloco.outer.merkle import LEAF

NUMELS = {"embed.weight": 700, "layer.weight": LEAF + 3 * BLOCK, "layer.bias": 77}
MODES = {
    "barrier": {},
    "rda": {"merge": "rda"},
    "trimmed": {"robust": "trimmed_mean"},
    "centered": {"robust": "centered_clip"},
    "quorum": {"quorum": 1, "staleness_limit": 5},
    "quorum rda": {"quorum": 1, "staleness_limit": 5, "merge": "rda"},
    "delayed": {"quorum": 1, "staleness_limit": 5, "optimizer": "delayed_nesterov"},
    "delayed c": {"quorum": 1, "staleness_limit": 5, "optimizer": "delayed_nesterov", "delay_c": 0.1},
    "fedbuff": {"quorum": 1, "staleness_limit": 5, "optimizer": "fedbuff"},
    "fedbuff barrier": {"optimizer": "fedbuff"},
    "no momentum": {"momentum": 0.0},
}


def settings_of(mode: str, up: str = "int8", down: str = "int8", **others: object) -> OuterConfig:
    return OuterConfig(
        **{"method": "diloco", "sync_every": 1, "codec_up": up, "codec_down": down, **MODES[mode], **others}
    )


@settings(max_examples=100, deadline=None)
@given(
    mode=st.sampled_from(list(MODES)),
    up=st.sampled_from(["int8", "e3m0", "stat2"]),
    down=st.sampled_from(["int8", "e3m0", "fp16", "fp32"]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_an_honest_syncer_is_never_accused(mode: str, up: str, down: str, seed: int, data: st.DataObject) -> None:
    outer = settings_of(mode, up, down)
    assert obstacle(outer) is None
    syncer = Syncer(outer, NUMELS, parts, seed)
    for _ in range(data.draw(st.integers(1, 12))):
        syncer.version(
            data.draw(st.integers(1, 6)), delay=data.draw(st.integers(1, 4)), reverse=data.draw(st.booleans())
        )
    begin = data.draw(st.integers(0, len(syncer.logs[0]) - 1))
    for part, log in zip(syncer.places, syncer.logs, strict=True):
        assert audit(part, outer, syncer.anchor[part.start : part.stop], log[begin:]) is None
