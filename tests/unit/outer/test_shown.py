"""What a syncer shows: every part of a payload opens under its root, and under nothing else."""

from __future__ import annotations

import pytest

from diloco.errors import PayloadError
from diloco.outer.audit import parts
from diloco.outer.codecs import codec
from diloco.outer.fragments import CHUNK, partition
from diloco.outer.merkle import LEAF, payload_root
from diloco.outer.shown import Kept, leaf_count, opens, part_at, part_count
from tests.support.outer import gaussian, outer, payloads_of

NUMELS = [5, LEAF, CHUNK, CHUNK + 3 * LEAF + 5, 2 * CHUNK + LEAF]


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("merge", ["mean", "rda"])
@pytest.mark.parametrize("name", ["int8", "e3m0", "fp16", "stat2", "topk"])
def test_each_part_opens_under_the_root_and_no_other_one_does(name: str, merge: str, numel: int) -> None:
    settings, up = outer(merge=merge), codec(name)
    [fragment] = partition({"w": numel}, 1)
    payloads = payloads_of(up, gaussian(numel, numel))
    root, kept = payload_root(payloads, up, numel), Kept(up, numel, 7, {"a": payloads})
    all_parts = parts(fragment, settings)
    assert len(all_parts) == part_count(fragment, settings) and kept.peers == ["a"]
    assert part_at(fragment, settings, len(all_parts)) is None and part_at(fragment, settings, -1) is None
    assert merge == "rda" or leaf_count(numel) == len(all_parts)
    for at, part in enumerate(all_parts):
        [shown] = kept.show(part)
        assert opens(up, root, part, shown)
        assert not opens(up, bytes(32), part, shown)
        assert not opens(up, root, part, shown._replace(payload=shown.payload ^ 1))
        assert not opens(up, root, part, shown._replace(paths=shown.paths[:-1]))
        other = all_parts[at - 1]
        if other.numel == part.numel and other != part:
            assert not opens(up, root, other, shown)
        with pytest.raises(PayloadError):
            opens(up, root, part, shown._replace(payload=shown.payload[:-1]))
