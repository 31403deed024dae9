"""Checkpoints under crashes, full disks and damaged bytes, and the state that they carry."""

import contextlib
import errno
import json
import os
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from diloco.attach.devices import restore_rng, rng_state
from diloco.attach.saved import flatten_optimizer, restore_optimizer
from diloco.errors import CheckpointError
from diloco.rundir import checkpoint as module
from diloco.rundir.checkpoint import Checkpoint, CheckpointStore
from diloco.rundir.containers import from_json, to_json

# Every operation through which a save changes the disk (shutil.rmtree included).
OPERATIONS = ("mkdir", "open", "write", "fsync", "replace", "unlink", "rmdir")
FILES = ("anchor.safetensors", "inner.safetensors", "state.json")

Groups = dict[str, dict[str, Tensor]]


def groups(step: int) -> Groups:
    return {
        "anchor": {"w": torch.full((3, 5), float(step)), "b": torch.arange(4.0) + step},
        "inner": {"w.exp_avg": torch.full((2,), -float(step))},
    }


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(step, groups(step), {"step": step, "name": "caf\u00e9", "loss": 0.1 * step})


def latest(store: CheckpointStore) -> Checkpoint:
    """Its newest checkpoint, which is whole."""
    loaded = store.load_latest()
    assert loaded is not None and loaded.step == loaded.state["step"]
    assert loaded.state == {"step": loaded.step, "name": "caf\u00e9", "loss": 0.1 * loaded.step}
    assert_same(loaded.tensors, groups(loaded.step))
    return loaded


def assert_same(left: Mapping[str, dict[str, Tensor]], right: Groups) -> None:
    assert left.keys() == right.keys()
    for stem, group in right.items():
        assert left[stem].keys() == group.keys()
        for name, tensor in group.items():
            found = left[stem][name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert raw(found) == raw(tensor)


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Crash(BaseException):
    """The process ends here: nothing after it reaches the disk either."""


@contextlib.contextmanager
def failing(
    position: int, error: Callable[[], BaseException], forever: bool
) -> Iterator[list[str]]:
    """Makes disk operation number `position` fail (`forever`: later ones, too); half is written."""
    calls: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) - 1 == position or (forever and len(calls) > position):
                if name == "write" and len(calls) - 1 == position:
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise error()
            return real(*args, **kwargs)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield calls


def count_operations(action: Callable[[], Any]) -> int:
    with failing(-1, Crash, forever=False) as calls:
        action()
    return len(calls)


@pytest.mark.parametrize(("before", "step", "keep"), [(1, 2, 1), (1, 0, 2), (None, 1, 1)])
def test_a_crash_leaves_a_complete_checkpoint(
    tmp_path: Path, before: int | None, step: int, keep: int
) -> None:

    def prepare(name: str) -> CheckpointStore:
        store = CheckpointStore(tmp_path / name, keep=keep)
        if before is not None:
            save(store, before)
        return store

    counted, found = prepare("count"), []
    operations = count_operations(lambda: save(counted, step))
    assert operations > 15
    for position in range(operations):
        store = prepare(str(position))
        with failing(position, Crash, forever=True), pytest.raises(Crash):
            save(store, step)
        after = CheckpointStore(store.directory, keep=keep)
        if after.load_latest() is None:
            found.append("")
        else:
            loaded = latest(after)
            assert not loaded.skipped
            found.append(loaded.path.name)
        save(after, 3)
        assert latest(after).step == 3
        assert not [name for name in os.listdir(store.directory) if not name.startswith("step-")]
        assert len(os.listdir(store.directory)) <= keep
    renamed, old = found.index(found[-1]), "" if before is None else "step-00000001"
    assert found == [old] * renamed + [found[-1]] * (operations - renamed) and 0 < renamed


def test_everything_is_on_the_disk_before_the_rename(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    with failing(-1, Crash, forever=False) as calls:
        save(store, 2)
    before, after = calls[: calls.index("replace")], calls[calls.index("replace") + 1 :]
    assert before.count("fsync") == len(FILES) + 1  # each file and their directory
    assert after == ["open", "fsync"]


def test_a_disk_error_is_one_line_and_leaves_nothing_half(tmp_path: Path) -> None:
    counted = CheckpointStore(tmp_path / "count", keep=2)
    save(counted, 1)
    for position in range(count_operations(lambda: save(counted, 2))):
        store = CheckpointStore(tmp_path / str(position), keep=2)
        save(store, 1)
        said = os.strerror(code := (errno.ENOSPC, errno.EROFS, errno.EIO)[position % 3])
        with failing(position, lambda code=code, said=said: OSError(code, said), forever=False):
            line = r"^run\.dir: cannot write the [^\n]* step 2 [^\n]*$"
            with pytest.raises(CheckpointError, match=line) as caught:
                save(store, 2)
        assert said in str(caught.value) and "choose another run.dir" in str(caught.value)
        assert caught.value.exit_code == 2
        assert all(name.startswith("step-") for name in os.listdir(store.directory))
        latest(store)
        save(store, 2)
        assert latest(store).step == 2


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "p0", keep=1)
    with pytest.raises(TypeError):
        store.save(1, groups(1), {"oops": object()})
    assert not store.directory.exists()
    with pytest.raises(CheckpointError, match=r"w: a checkpoint cannot hold torch\.complex128"):
        store.save(1, {"anchor": {"w": torch.zeros(2, dtype=torch.complex128)}}, {})
    assert os.listdir(store.directory) == []
    (tmp_path / "file").write_text("in the way")
    store = CheckpointStore(tmp_path / "file" / "p0", keep=1)
    with pytest.raises(CheckpointError, match=r"^run\.dir: cannot read the .*Not a directory"):
        store.load_latest()


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    path = save(store, 2) / name
    content = path.read_bytes()
    for size in (0, len(content) - 1, None):
        if size is None:
            path.unlink()
        else:
            path.write_bytes(content[:size])
        loaded = latest(store)
        [warning] = loaded.skipped
        assert loaded.step == 1 and warning in caplog.text
        assert warning.startswith(f"step-00000002: {name} ")
        assert warning.endswith("; using step-00000001 instead")
    assert " is missing; " in warning


@settings(max_examples=40)
@given(
    name=st.sampled_from(FILES), position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7)
)
def test_any_flipped_bit_is_noticed(name: str, position: float, bit: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory), keep=2)
        save(store, 1)
        path = save(store, 2) / name
        content = bytearray(path.read_bytes())
        content[int(position * len(content))] ^= 1 << bit
        path.write_bytes(content)
        loaded = latest(store)
        assert loaded.step == (1 if loaded.skipped else 2)
        # harmless is the case of a hexadecimal digit in a JSON escape, such as \\u00e9
        kept = (loaded.path / name).read_bytes()
        assert loaded.skipped or json.loads(content) == json.loads(kept)


def test_damage_to_every_checkpoint_is_one_line(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (save(store, 1) / "inner.safetensors").write_bytes(b"")
    (save(store, 2) / "state.json").write_text("[1]")
    with pytest.raises(CheckpointError) as caught:
        store.load_latest()
    assert str(caught.value) == (
        f"run.dir: no usable checkpoint in {tmp_path} (step-00000002: state.json is corrupt; "
        "step-00000001: inner.safetensors has 0 bytes instead of 88); "
        "put a good copy back, or delete that directory or choose another run.dir to start over"
    )


def test_a_checkpoint_of_another_format_is_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMAT", 2)
        save(CheckpointStore(tmp_path, keep=1), 1)
    with pytest.raises(CheckpointError, match="it has format 2, this version of diloco reads 3"):
        CheckpointStore(tmp_path, keep=1).load_latest()


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ([1, 2, 99_999_999, 100_000_000], ["step-100000000", "step-99999999"]),
        ([1, *[2] * 12], ["step-00000001", "step-00000002.11"]),
        ([7, 8, 5], ["step-00000005"]),  # which leaves the later timeline
    ],
)
def test_the_newest_saves_stay(tmp_path: Path, steps: list[int], left: list[str]) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    paths = [save(store, step) for step in steps]
    assert sorted(os.listdir(tmp_path)) == left
    assert latest(store).step == steps[-1] and latest(store).path == paths[-1]


def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (5, 10, 12):
        path = save(store, step)
    (path / "state.json").unlink()
    resumed = CheckpointStore(tmp_path, keep=2)
    assert latest(resumed).step == 10
    save(resumed, 15)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000015"]


def test_a_reader_survives_a_writer_that_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = CheckpointStore(tmp_path, keep=1), CheckpointStore(tmp_path, keep=1)
    save(writer, 1)
    real = module._read_directory

    def overtaken(path: Path) -> Any:
        monkeypatch.setattr(module, "_read_directory", real)
        save(writer, 2)  # instead of what the reader was about to read
        return real(path)

    monkeypatch.setattr(module, "_read_directory", overtaken)
    loaded = reader.load_latest()
    save(writer, 3)  # prunes what the reader has opened
    assert loaded is not None and (loaded.step, loaded.skipped) == (2, [])
    assert_same(loaded.tensors, groups(2))


DTYPES = "float32 bfloat16 float16 float64 int64 int32 int16 int8 uint8 bool".split()
DTYPES = st.sampled_from([getattr(torch, name) for name in DTYPES])
LAYOUTS = st.sampled_from(["plain", "transposed", "expanded", "shared"])
KINDS = st.tuples(DTYPES, st.lists(st.integers(0, 4), max_size=3), LAYOUTS)
GROUP = st.dictionaries(st.text(min_size=1, max_size=6), KINDS, max_size=4)
PLAIN = st.floats() | st.integers() | st.text() | st.none() | st.lists(st.booleans())


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(["anchor", "outer", "inner-1"]), GROUP),
    st.dictionaries(st.text(), PLAIN),
)
def test_what_comes_back_is_bit_equal_for_any_tensors(kinds: Any, state: dict[str, Any]) -> None:
    pool = torch.randint(0, 255, (4096,), dtype=torch.uint8)

    def make(dtype: torch.dtype, shape: list[int], kind: str) -> Tensor:
        tensor = pool if kind == "shared" else pool.clone()
        if dtype is torch.bool:
            tensor = tensor > 99
        numel = torch.Size(shape).numel()
        tensor = tensor.view(dtype)[:numel].view(shape)
        if kind == "transposed":
            return tensor.transpose(0, -1) if shape else tensor
        return tensor.unsqueeze(0).expand(3, *shape) if kind == "expanded" else tensor

    tensors = {
        stem: {name: make(*kind) for name, kind in group.items()} for stem, group in kinds.items()
    }
    with tempfile.TemporaryDirectory() as directory:
        path = CheckpointStore(Path(directory), keep=1).save(3, tensors, state)
        loaded = CheckpointStore(Path(directory), keep=1).load_latest()
        assert loaded is not None and repr(loaded.state) == repr(json.loads(json.dumps(state)))
        assert_same(loaded.tensors, tensors)
        assert_same({stem: load_file(path / f"{stem}.safetensors") for stem in tensors}, tensors)


def test_tensors_larger_than_a_block_are_saved_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    real = os.write
    # short writes
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:50]))
    weight = torch.nn.Parameter(torch.randn(70, 3))
    store = CheckpointStore(tmp_path, keep=1)
    path = store.save(1, {"anchor": {"w": weight}}, {})
    assert torch.equal(load_file(path / "anchor.safetensors")["w"], weight)
    assert store.load_latest() is not None


def test_a_state_that_does_not_fit_is_refused() -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    tensors, saved = flatten_optimizer(optimizer)
    text = "holds the state of AdamW for 8 parameters, this run has "
    with pytest.raises(CheckpointError, match=text + "SGD for 8 "):
        restore_optimizer(torch.optim.SGD(model.parameters()), tensors, saved)
    with pytest.raises(CheckpointError, match=text + "AdamW for 2 .*configuration"):
        restore_optimizer(torch.optim.AdamW([model.bias]), tensors, saved)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["hook"] = print
    text = r"param_groups\.0\.hook: a checkpoint cannot hold builtin"
    with pytest.raises(CheckpointError, match=text):
        flatten_optimizer(optimizer)


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, [2.5, None]), (0, "q"): {3}, 7: {"x"}},
        deque([torch.ones(2), torch.zeros(2)], maxlen=3),
        {"dtype": torch.bfloat16, "schedule": b"\x00\xff"},
    ],
    ids=["keys and sets", "queue", "dtype and bytes"],
)
def test_what_optimizers_keep_is_read_back(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    written = json.loads(json.dumps(to_json(value, "", tensors)))
    back = from_json(written, tensors)
    assert type(back) is type(value) and str(back) == str(value)
    assert not isinstance(value, deque) or back.maxlen == 3


def test_a_matrix_keeps_its_strides(tmp_path: Path) -> None:
    """Of eigenvectors, which lie by columns: a product with others has other last bits."""
    value, tensors = torch.randn(4, 6).T, dict[str, torch.Tensor]()
    state = {"state": to_json({"q": value}, "", tensors)}
    CheckpointStore(tmp_path, keep=1).save(1, {"inner": tensors}, state)
    saved = CheckpointStore(tmp_path, keep=1).load_latest()
    assert saved is not None
    back = from_json(saved.state["state"], saved.tensors["inner"])["q"]
    assert back.equal(value) and back.stride() == value.stride()


def test_a_tensor_is_no_key() -> None:
    with pytest.raises(CheckpointError, match="cannot hold a tensor as a key"):
        to_json({torch.ones(1): 1}, "state", {})


def test_random_numbers_continue(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        own = [random.random(), random.gauss(0, 1)]
        return own + torch.randn(3).tolist() + numpy.random.randn(3).tolist()

    draw()  # an odd number of normal deviates: both generators now hold a cached one
    tensors, state = rng_state()
    CheckpointStore(tmp_path, keep=1).save(3, {"it": tensors}, {"it": state})
    kept = CheckpointStore(tmp_path, keep=1).load_latest()
    assert kept is not None
    expected = [draw(), draw()]
    restore_rng(kept.tensors["it"], kept.state["it"])
    assert [draw(), draw()] == expected
