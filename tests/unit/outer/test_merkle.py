"""Merkle roots: what a path proves, and that it proves nothing else."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import PayloadError
from diloco.outer.codecs import CODECS, codec
from diloco.outer.fragments import CHUNK
from diloco.outer.lossy import LOSSY
from diloco.outer.merkle import LEAF, Tree, leaf, leaves, payload_root, root, verify
from tests.support.outer import encoded, gaussian, payloads_of

NODE, ROOT = b"diloco merkle node".ljust(32, b"\0"), b"diloco merkle root".ljust(32, b"\0")


def hashes(count: int) -> list[bytes]:
    return [leaf(b"block %d" % index) for index in range(count)]


def reference(level: list[bytes]) -> bytes:
    """The top of the tree of RFC 6962, section 2.1."""
    if len(level) == 1:
        return level[0]
    half = 1 << (len(level) - 1).bit_length() - 1
    return blake3(reference(level[:half]) + reference(level[half:]), key=NODE).digest()


@pytest.mark.parametrize("count", range(1, 70))
def test_the_tree_is_that_of_the_rfc_under_a_root_with_its_size(count: int) -> None:
    top = blake3(count.to_bytes(8, "big") + reference(hashes(count)), key=ROOT).digest()
    assert root(hashes(count)) == top


@pytest.mark.parametrize("count", [*range(1, 35), 130])
def test_every_leaf_is_proved_at_its_own_index_only(count: int) -> None:
    all_leaves = hashes(count)
    top, tree = root(all_leaves), Tree(all_leaves)
    for index in range(count):
        proof = tree.path(index)
        assert len(proof) <= (count - 1).bit_length()
        proved = [at for at in range(-1, count + 2) if verify(top, all_leaves[index], at, count, proof)]
        assert proved == [index]


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_a_proof_that_was_tampered_with_proves_nothing(count: int, other: int, data: st.DataObject) -> None:
    all_leaves, index = hashes(count), data.draw(st.integers(0, count - 1))
    top, proof = root(all_leaves), Tree(all_leaves).path(index)
    assert not verify(top, leaf(b"another"), index, count, proof)
    assert not verify(root(hashes(other)), all_leaves[index], index, count, proof) or other == count
    assert not verify(top, all_leaves[index], index, other, proof) or other == count
    assert not verify(top, all_leaves[index], index, count, [*proof, b"\0" * 32])
    if proof:
        at = data.draw(st.integers(0, len(proof) - 1))
        assert not verify(top, all_leaves[index], index, count, proof[:-1])
        assert not verify(top, all_leaves[index], index, count, [*proof[:at], b"\0" * 32, *proof[at + 1 :]])


def test_a_node_does_not_pass_for_a_leaf() -> None:
    left, right = hashes(2)
    assert leaf(left + right) != blake3(left + right, key=NODE).digest()
    # A tree of two leaves and one whose single leaf is their node have different roots.
    assert root([blake3(left + right, key=NODE).digest()]) != root([left, right])


@pytest.mark.parametrize("name", [*CODECS, *LOSSY])
@pytest.mark.parametrize("numel", [1, LEAF + 1, CHUNK + 3 * LEAF + 5])
def test_a_payloads_root_is_over_leaves_as_if_encoded_alone(name: str, numel: int) -> None:
    values, one, alone = gaussian(numel, 7), codec(name), []
    for block in values.split(LEAF):
        pieces = one.pieces(encoded(one, block.clone()), len(block))
        alone.append(leaf(*[piece.numpy().tobytes() for piece in reversed(pieces)]))
    assert payload_root(payloads_of(one, values), one, numel) == root(alone)


def test_a_payload_of_the_wrong_length_has_no_leaves() -> None:
    with pytest.raises(PayloadError, match="int8 payload of 5 elements has 5 bytes, not 6"):
        leaves(codec("int8"), torch.zeros(5, dtype=torch.uint8), 5)


def test_a_root_stays_what_it_is() -> None:
    """Two versions of this package that sign roots must agree about them."""
    payload = torch.arange(LEAF + 5 + 3, dtype=torch.int32).to(torch.uint8)
    known = "bd98c05a272a43684f66ad43d4f358aad14ff2e40cc395ac99621a60bcb3e2fa"
    assert payload_root([payload], codec("int8"), LEAF + 3).hex() == known
