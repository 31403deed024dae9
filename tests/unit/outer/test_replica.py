"""The outer step as peers take it together: capture, merge, apply, with no network between them."""

import itertools
import threading
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.digest import PART, fragment_digest
from diloco.outer.fragments import BLOCK, CHUNK, partition
from diloco.outer.optimizer import OUTER_OPTIMIZERS, OuterState, OuterStep
from diloco.outer.payloads import over_chunks
from diloco.outer.replica import Replica
from tests.support.outer import EXACT, author, gaussian, make, named, outer, payload_of

SHAPES = {"weight": (3, 5), "bias": (5,), "scale": ()}
CODECS = ["fp32", "fp16", "int8", "e3m0"]


def replica(parameters: Mapping[str, Tensor], fragments: int = 1, **settings: object) -> Replica:
    # What is told apart by hand here differs more than honest contributions do.
    fixed = {"lr": 0.7, "momentum": 0.9, "momentum_warmup": 0, "clip_factor": 10, **EXACT}
    pieces = partition({name: value.numel() for name, value in parameters.items()}, fragments)
    return Replica(parameters, pieces, outer(**{**fixed, **settings}))


def exchange(peers: Sequence[Replica], weights: Sequence[float]) -> None:
    """One outer step of all fragments, of which the first peer is author; every peer adopts the
    update."""
    for index in peers[0].aggregates:
        merged, digest = make(
            peers[0], named([peer.capture(index) for peer in peers], weights), index
        )
        for peer in peers[1:]:
            peer.apply_update_(index, merged.update, merged.step)
            assert peer.digest(index) == digest
    for peer in peers:
        peer.load_local_()


def alike(
    count: int,
    value: float = 0.0,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    **options: object,
) -> list[Replica]:
    """Replicas of peers that start with equal parameters; the first is author of everything."""
    starts = [
        {name: torch.full(shape, value) for name, shape in shapes.items()} for _ in range(count)
    ]
    peers = [replica(parameters, **options) for parameters in starts]
    for fragment in peers[0].fragments:
        peers[0].hold(fragment.index)
    return peers


def move(peer: Replica, by: float) -> None:
    """Inner steps with a constant gradient: they subtract it."""
    for parameter in peer.local.tensors.values():
        parameter.sub_(by)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_four_workers_follow_what_was_worked_out_by_hand(codec: str) -> None:
    # Pseudo-gradients of 1/4, 1/2, 1 and 2 tokens-weighted 4 : 2 : 1 : 1 are 5/8 on average.
    # lr 1/2, beta 1/2:  m = 5/8, 15/16, 35/32   and   step = (5/8 + m/2) / 2 = 15/32, 35/64,
    # 75/128.
    codecs = {"codec_up": codec, "codec_down": codec}
    peers = alike(4, 1.0, fragments=2, lr=0.5, momentum=0.5, **codecs)
    master = 1.0
    for momentum, step in ((5 / 8, 15 / 32), (15 / 16, 35 / 64), (35 / 32, 75 / 128)):
        for peer, gradient in zip(peers, (1 / 4, 1 / 2, 1.0, 2.0), strict=True):
            move(peer, gradient)
        exchange(peers, [4.0, 2.0, 1.0, 1.0])
        master -= step
        for fragment, own in peers[0].aggregates.items():
            state = peers[0].states[fragment].momentum
            assert torch.equal(state, torch.full_like(state, momentum))
            assert torch.equal(own.master, torch.full_like(state, master))
            assert torch.equal(peers[3].anchors[fragment], own.master)
        for peer in peers:
            for name, values in peer.local.tensors.items():
                assert torch.equal(values, peers[0].local.tensors[name])


def test_an_invalid_update_leaves_the_anchor_as_it_was() -> None:
    [peer] = alike(1)
    before, nan = peer.digest(0), torch.full((21,), float("nan")).view(torch.uint8)
    for payload in (nan, nan[:-4], torch.zeros(21 * 4 + 1, dtype=torch.uint8)):
        with pytest.raises(PayloadError):
            peer.apply_update_(0, payload, OuterStep(0, 1))
    assert peer.digest(0) == before


def test_an_author_takes_over_a_state_or_starts_at_the_anchor() -> None:
    [peer] = alike(1, 3.0, fragments=2)
    assert torch.equal(peer.aggregates[0].master, peer.anchors[0])
    assert not peer.states[0].momentum.any()
    assert peer.aggregates[0].master is not peer.anchors[0], "the residual is their difference"
    master, momentum = torch.full_like(peer.anchors[0], 4.0), torch.full_like(peer.anchors[0], 5.0)
    peer.hold(0, master, OuterState(7, (momentum,)))
    peer.hold(0)  # again, as the claim after a checkpoint was resumed from does
    assert peer.aggregates[0].master is master and peer.states[0].momentum is momentum
    peer.release(0)
    peer.release(0)
    assert sorted(peer.aggregates) == [1]
    peer.hold(0)
    assert torch.equal(peer.aggregates[0].master, peer.anchors[0])
    assert peer.states[0].momentum is momentum


FEEDBACK = {"error_feedback": 0.9}
ROUNDS_WITHOUT_TRAINING = {
    "barrier": {},
    "mixing": {"mixing": 0.5, "overlap": 1},
    "overlap": {"overlap": 1},
    "quorum": {"quorum": 1},
}


@pytest.mark.parametrize("mode", ROUNDS_WITHOUT_TRAINING)
@pytest.mark.parametrize("down", CODECS)
def test_the_anchor_stays_where_it_is_while_nobody_trains(down: str, mode: str) -> None:
    """The anchor is fp32, from elsewhere, and the local parameters cannot hold it exactly."""
    for up in (*CODECS, "stat2", "topk"):
        fixed = {"sync_every": 4, "fragments": 2, "codec_up": up, "codec_down": down}
        fixed |= {"lr": 0.7, "momentum": 0.9, "momentum_warmup": 0}
        fixed |= {"stat2": FEEDBACK, "topk": {**FEEDBACK, "momentum": 0.0}}.get(up, {})
        settings, weights = outer(**{**fixed, **ROUNDS_WITHOUT_TRAINING[mode]}), torch.zeros(300)
        peer = Replica({"w": weights.bfloat16()}, partition({"w": 300}, 2), settings)
        for anchor in peer.anchors:
            anchor.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
            if down == "fp16":
                anchor.copy_(anchor.half())  # what such an update can say
        peer.load_local_()
        before = [anchor.clone() for anchor in (*peer.anchors, peer.local.tensors["w"])]
        assert not torch.equal(before[2].float(), torch.cat(before[:2]))
        for version, fragment in itertools.product(range(3), range(2)):
            peer.hold(fragment)
            if settings.quorum:
                peer.keep_base(fragment)
            make(peer, named([peer.capture(fragment)]), fragment, OuterStep(version, 1))
            peer.load_local_([fragment], settings.mixing)
            own = peer.aggregates[fragment]
            assert torch.equal(own.master, own.anchor), "nothing adds up"
            assert not peer.states[fragment].momentum.any()
        for now, then in zip((*peer.anchors, peer.local.tensors["w"]), before, strict=True):
            assert torch.equal(now, then), up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_narrow_parameters_learn_arrives_in_the_anchor(dtype: torch.dtype) -> None:
    """The anchor keeps what is too little for the parameters, and moves by what they moved."""
    peer = replica({"w": torch.zeros(64, dtype=dtype)}, lr=1.0, momentum=0.0)
    peer.anchors[0].copy_(1.0 + torch.arange(64) / 4096)
    peer.load_local_()
    peer.hold(0)
    before, loaded = peer.anchors[0].clone(), peer.local.tensors["w"].clone()
    move(peer, 0.25)
    moved = (loaded - peer.local.tensors["w"]).float()
    exchange([peer], [1.0])
    torch.testing.assert_close(before - peer.anchors[0], moved, rtol=0, atol=2e-7)


FEW = 3 * BLOCK + 500


@pytest.mark.parametrize("outlier", [1.0, 64.0])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("optimizer", OUTER_OPTIMIZERS)
def test_an_update_is_no_longer_than_its_contributions_allow(
    optimizer: str, codec: str, outlier: float
) -> None:
    quorum = {"quorum": 1} if OUTER_OPTIMIZERS[optimizer].windowed else {}
    codecs = {"codec_up": "fp32", "codec_down": codec}
    settings = outer(optimizer=optimizer, momentum_warmup=0, robust="none", **codecs, **quorum)
    peer, reach = author({"w": torch.zeros(FEW)}, settings), (0.0, 0.0, 0.0)
    drift = gaussian(FEW, 1)
    own, state = peer.aggregates[0], peer.states[0]
    for version in range(24):
        scale = (1e-3, 1e-3, -1e-3, 1e-6)[version // 3 % 4]
        deltas = [scale * (drift + gaussian(FEW, 100 * version + one)) for one in range(3)]
        for delta in deltas:
            delta[::BLOCK] *= outlier
        before = peer.anchors[0].clone()
        merged, _ = make(peer, named(delta.view(torch.uint8) for delta in deltas), delay=4)
        longest = max(float(delta.norm()) for delta in deltas)
        limit, reach = peer.optimizer.reach(merged.step, longest, reach)
        moved = float((peer.anchors[0] - before).norm())
        behind = author({"w": before}, settings)
        norm, parts = behind.foresee(0, merged.update)
        assert norm == pytest.approx(moved, rel=1e-3, abs=1e-5) and moved <= limit
        assert fragment_digest(parts) == peer.digest(0) and torch.equal(behind.anchors[0], before)
        assert float(state.momentum.norm()) <= 2 * reach[0]
        assert float((own.master - own.anchor).norm()) <= 2 * reach[2]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
@pytest.mark.parametrize("codec", ["fp32", "int8", "e3m0", "stat2", "topk"])
def test_the_norm_of_a_payload_is_that_of_its_values(codec: str, scale: float) -> None:
    feedback = {"error_feedback": 0.9, "momentum": 0.0} if codec in ("stat2", "topk") else {}
    peer = author({"w": torch.zeros(CHUNK + 5000)}, outer(codec_up=codec, **feedback))
    whole = payload_of(peer.up, scale * gaussian(CHUNK + 5000))
    parts = peer.payloads[0].split(whole)
    values = [peer.up.values(part, stop - start).double() for part, (start, stop) in parts]
    assert peer.payload_norm(0, whole) == pytest.approx(float(torch.cat(values).norm()), rel=1e-3)
    with pytest.raises(PayloadError):
        peer.payload_norm(0, whole[:-1])
    with pytest.raises(PayloadError):
        peer.payload_norm(0, torch.full_like(whole, 0x7F))


def test_an_author_restarts_with_the_momentum_there_is() -> None:
    """From its new anchor."""
    [peer], fetched = alike(1, momentum=0.5), torch.arange(21.0)
    move(peer, 1.0)
    exchange([peer], [1.0])
    peer.anchors[0].copy_(fetched)
    own = peer.aggregates[0]
    own.restart()
    assert torch.equal(own.master, fetched) and own.master.data_ptr() != peer.anchors[0].data_ptr()
    torch.testing.assert_close(peer.states[0].momentum, torch.ones(21))


@pytest.mark.parametrize("codec", ["fp32", "int8", "e3m0"])
def test_threads_that_share_out_the_chunks_make_the_same_bits(codec: str) -> None:
    numel = 2 * PART + CHUNK + 5  # the last part has two chunks

    def version(threads: int) -> list[object]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            weight = gaussian(numel)
            settings = outer(codec_up=codec, codec_down=codec, momentum=0.5)
            peer = author({"w": weight}, settings)
            payloads = []
            for seed in range(1, 5):
                weight.add_(gaussian(numel, seed, 0.01))
                payloads.append(peer.capture(0))
            merged, digest = make(peer, named(payloads))
            follower = author({"w": gaussian(numel)}, settings)
            moved, parts = follower.foresee(0, merged.update)
            assert digest == fragment_digest(parts) and moved == pytest.approx(
                float((peer.anchors[0] - follower.anchors[0]).double().norm()), rel=1e-4
            )
            return [digest, *payloads, merged.update, peer.states[0].momentum]
        finally:
            torch.set_num_threads(before)

    serial, shared = version(1), version(2)
    assert serial[0] == shared[0]
    assert all(map(torch.equal, serial[1:], shared[1:]))  # type: ignore[arg-type]


def test_threads_of_the_pool_compute_alone_and_all_end_before_an_error_is_raised() -> None:
    before, done = torch.get_num_threads(), threading.Event()
    torch.set_num_threads(2)
    try:
        told = over_chunks(
            lambda chunk: (threading.current_thread().name, torch.get_num_threads(), chunk),
            range(4),
        )
        assert [chunk for *_, chunk in told] == [0, 1, 2, 3]
        assert {threads for _, threads, _ in told} == {1} and torch.get_num_threads() == 2
        assert threading.current_thread().name not in {name for name, *_ in told}
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2], "threads of somebody else are as they were"

        begun = threading.Event()

        def work(chunk: int) -> None:
            if chunk == 0:
                assert begun.wait(60)
                raise ValueError("chunk 0")
            begun.set()
            assert not torch.is_grad_enabled()
            done.set()

        with pytest.raises(ValueError, match="chunk 0"):
            over_chunks(work, [0, 1])
        assert done.is_set()
        torch.set_num_threads(1)
        assert (
            over_chunks(lambda _: threading.current_thread(), [0, 1])
            == [threading.current_thread()] * 2
        )
    finally:
        torch.set_num_threads(before)
