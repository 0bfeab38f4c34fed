"""Files of a checkpoint: whole or not there, believed only with their hash, read without guessing."""

import errno
import json
import os
import pickle
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from f16lab import checkpoint
from f16lab.checkpoint import (
    DTYPES,
    FORMAT,
    Refused,
    SaveFailed,
    Tag,
    damage,
    done_steps,
    examine,
    file_name,
    metadata_of,
    newest,
    read_tensors,
    remove,
    settle,
    step_of,
    tensor_chunks,
    victims,
    write_file,
    write_meta,
)
from f16lab.packing import from_json, to_json
from f16lab.precision import Precision


def write(folder, step, value=1.0, world=1):
    """A small checkpoint."""
    tensors = {"w": torch.full((40,), value), "b": torch.full((3,), value).half()}
    tags = {name: Tag("weight", Precision.of(t).tag) for name, t in tensors.items()}
    names = [("model", 0), *(("state", rank) for rank in range(world))]
    files = {
        file_name(kind, step, rank): write_file(
            folder / file_name(kind, step, rank), tensor_chunks(tensors, metadata_of(tags, kind, step=step, rank=rank))
        )
        for kind, rank in names
    }
    write_meta(folder, step, {"world": world}, files)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


# ---------------------------------------------------------------- one file
@pytest.mark.parametrize("at", range(0, 9))
def test_an_error_at_any_piece_leaves_the_old_file_and_nothing_else(tmp_path, at):
    write_file(tmp_path / "f", [b"old"])

    def pieces():
        for i in range(8):
            if i == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield b"new" * 1000
        if at == 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(SaveFailed, match="f could not be written: (No space left on device|Input/output error)"):
        write_file(tmp_path / "f", pieces())
    assert (tmp_path / "f").read_bytes() == b"old" and names(tmp_path) == ["f"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_of_the_system_leaves_the_old_file(tmp_path, monkeypatch, call):
    write_file(tmp_path / "f", [b"old"])

    def fails(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(checkpoint.os, call, fails)
    with pytest.raises(SaveFailed, match="quota"):
        write_file(tmp_path / "f", [b"new"])
    assert (tmp_path / "f").read_bytes() == b"old" and names(tmp_path) == ["f"]


def test_order_of_what_happens_to_a_file(tmp_path, monkeypatch):
    """Write, force to disk, rename, force the folder to disk."""
    said, real_sync, real_replace = [], os.fsync, os.replace

    def sync(handle):
        said.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{handle}'))}")
        real_sync(handle)

    def rename(a, b):
        said.append(f"{os.path.basename(a)} -> {os.path.basename(b)}")
        real_replace(a, b)

    monkeypatch.setattr(checkpoint.os, "fsync", sync)
    monkeypatch.setattr(checkpoint.os, "replace", rename)
    write(tmp_path, 7)
    folder = f"sync {tmp_path.name}"
    order = [file_name(kind, 7) for kind in ("model", "state", "meta", "DONE")]
    assert said == [text for n in order for text in (f"sync {n}.tmp", f"{n}.tmp -> {n}", folder)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error_in_words(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SaveFailed, match="Permission denied"):
            write_file(tmp_path / "f", [b"x"])
    finally:
        tmp_path.chmod(0o700)


def test_a_file_written_in_pieces_is_the_librarys_file(tmp_path):
    noise = torch.Generator().manual_seed(1)
    tensors = {f"t{i}": torch.randn(i, 3, generator=noise).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(2.5), "turned": torch.arange(6.0).view(2, 3).t(), 'ü"': torch.ones(1).half()}
    write_file(tmp_path / "ours", tensor_chunks(tensors, {"format": "pt"}))
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    again = load_file(tmp_path / "ours")
    assert again.keys() == tensors.keys()
    for name, t in tensors.items():
        assert again[name].dtype is t.dtype and again[name].shape == t.shape
        assert torch.equal(
            again[name].contiguous().view(-1).view(torch.uint8), t.contiguous().view(-1).view(torch.uint8)
        )


# ---------------------------------------------------------------- tags
def test_tags_come_back(tmp_path):
    tensors = {"m/w": torch.ones(4).half(), "v/w": torch.ones(4).bfloat16(), "master/w": torch.ones(4)}
    tags = {"m/w": Tag("m", "f16", 1024.0), "v/w": Tag("v", "bf16"), "master/w": Tag("master", "f32")}
    write_file(tmp_path / "s", tensor_chunks(tensors, metadata_of(tags, "state", step=3, rank=1, odd=float("inf"))))
    read = read_tensors(tmp_path / "s")
    assert read.tags == tags and read.about == dict(role="state", step=3, rank=1, odd=float("inf"))
    with safe_open(tmp_path / "s", framework="pt") as f:
        assert f.metadata()["version"] == str(FORMAT)


def test_a_foreign_file_is_what_its_header_says(tmp_path):
    tensors = {
        "a": torch.ones(2).half(),
        "b": torch.ones(2),
        "c": torch.ones(2).bfloat16(),
        "d": torch.ones(2, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    read = read_tensors(tmp_path / "f")
    assert {name: tag.precision for name, tag in read.tags.items()} == {
        "a": "f16",
        "b": "f32",
        "c": "bf16",
        "d": "int64",
    }
    assert read.about == {} and read_tensors(tmp_path / "f").tensors["d"].tolist() == [1, 1]


def test_an_old_file_without_tags_is_all_f32(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "old", metadata={"format": "f16lab"})
    assert read_tensors(tmp_path / "old").tags == {"a": Tag("weight", "f32"), "b": Tag("weight", "f32")}
    save_file({"a": torch.ones(2), "b": torch.zeros(3).half()}, tmp_path / "odd", metadata={"format": "f16lab"})
    with pytest.raises(ValueError, match="no version and so must be all f32, but b is f16") as e:
        read_tensors(tmp_path / "odd")
    assert not isinstance(e.value, Refused)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(version="2"), "format version 2, this f16lab reads version 1: use the f16lab that wrote it"),
        (dict(version="one"), "format version one"),
        (dict(role="weights"), "role 'weights'; known are model, state"),
        (dict(tags={"w": ["weight", "f17", 1.0]}), "tag of w: .*f17"),
        (dict(tags={"w": ["weight", "f16", 1.0]}), "tagged f16 and stored as f32"),
        (dict(tags={}), "w has no tag"),
        (dict(tags={"w": ["weight", "f32", 1.0], "x": ["weight", "f32", 1.0]}), "x has a tag and no tensor"),
    ],
)
def test_what_cannot_be_known_is_an_error_and_no_guess(tmp_path, change, words):
    about = metadata_of({"w": Tag("weight", "f32")}, "model")
    about |= {k: v if isinstance(v, str) else to_json(v) for k, v in change.items()}
    write_file(tmp_path / "f", tensor_chunks({"w": torch.ones(3)}, about))
    with pytest.raises(ValueError, match=words) as e:
        read_tensors(tmp_path / "f")
    assert "\n" not in str(e.value) and not isinstance(e.value, Refused)


def test_nothing_is_ever_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "model_00000001.safetensors").write_bytes(pickle.dumps(Trap()))
    torch.save({"w": Trap()}, tmp_path / "torch.safetensors")
    for name in ("model_00000001.safetensors", "torch.safetensors"):
        with pytest.raises(Refused, match="cannot be read"):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "executed").exists()


# ---------------------------------------------------------------- which one to believe
def test_every_damage_to_every_file_is_refused_by_name(tmp_path):
    write(tmp_path, 1), write(tmp_path, 2, world=3)
    for path in [
        tmp_path / file_name("state", 2, 2),
        *(tmp_path / file_name(kind, 2) for kind in ("model", "state", "meta", "DONE")),
    ]:
        good = path.read_bytes()
        for how in ("missing", "empty", "cut", "zeros", "bit"):
            damage(path, how)
            found, refused = newest(tmp_path)
            assert found.step == 1, (path.name, how)
            if path.name != file_name("DONE", 2):
                assert len(refused) == 1 and path.name in refused[0] and "checkpoint 2 refused" in refused[0]
            path.write_bytes(good)
    assert newest(tmp_path)[0].step == 2 and newest(tmp_path)[1] == ()


def test_any_single_bit_of_any_file_counts(tmp_path):
    write(tmp_path, 1)
    rng = random.Random(4)
    for kind in ("model", "state", "meta", "DONE"):
        path = tmp_path / file_name(kind, 1)
        good = path.read_bytes()
        for at in {0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(25))}:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :])
            with pytest.raises(Refused):
                examine(tmp_path, 1)
            path.write_bytes(good)
    assert examine(tmp_path, 1).step == 1


def test_files_of_two_checkpoints_mixed_are_refused(tmp_path):
    write(tmp_path, 1), write(tmp_path, 2, value=2.0)
    (tmp_path / file_name("model", 2)).write_bytes((tmp_path / file_name("model", 1)).read_bytes())
    with pytest.raises(Refused, match="model_00000002.safetensors has other bytes than were written"):
        examine(tmp_path, 2)
    os.replace(tmp_path / file_name("meta", 1), tmp_path / file_name("meta", 2))
    with pytest.raises(Refused, match="meta_00000002.json is not the file that DONE_00000002 vouches for"):
        examine(tmp_path, 2)


def test_done_without_files_and_files_without_done(tmp_path):
    (tmp_path / "DONE_00000009").write_text("0" * 64)
    (tmp_path / file_name("model", 8)).write_bytes(b"x")
    assert newest(tmp_path) == (None, ("checkpoint 9 refused: meta_00000009.json is missing",))
    with pytest.raises(Refused, match="DONE_00000008 is missing: it was not finished"):
        examine(tmp_path, 8)


def test_a_later_version_is_an_error_and_nothing_older_is_taken(tmp_path):
    write(tmp_path, 1), write(tmp_path, 2)
    plain = from_json((tmp_path / file_name("meta", 2)).read_text())
    entry = write_file(tmp_path / file_name("meta", 2), [to_json({**plain, "version": 9}).encode()])
    write_file(tmp_path / file_name("DONE", 2), [entry.sha256.encode()])
    with pytest.raises(ValueError, match="meta_00000002.json has format version 9, this f16lab reads version 1") as e:
        newest(tmp_path)
    assert not isinstance(e.value, Refused)


def test_meta_is_strict_json(tmp_path):
    write_meta(tmp_path, 3, {"world": 1, "values": {"nan": float("nan")}}, {})

    def no(word):
        raise AssertionError(word)

    json.loads((tmp_path / file_name("meta", 3)).read_text(), parse_constant=no)
    assert str(examine(tmp_path, 3).meta["values"]["nan"]) == "nan"


# ---------------------------------------------------------------- retention and tidying
def test_victims_never_hold_the_newest():
    rng = random.Random(0)
    for _ in range(500):
        steps = sorted(rng.sample(range(1, 200), rng.randrange(1, 12)))
        last, keep, major = rng.choice(steps), rng.randrange(0, 4), rng.choice([0, 7, 10])
        gone = set(victims(steps, last, keep, major))
        stay = [s for s in steps if s <= last and s not in gone]
        assert last in stay and not [s for s in gone if major and s % major == 0] and not [s for s in gone if s > last]
        assert len(stay) >= min(keep or len(stay), len([s for s in steps if s <= last]))
        assert not keep or all(
            s in gone or (major and s % major == 0) for s in [s for s in steps if s <= last][:-keep] if s != last
        )


def test_removal_takes_done_first(tmp_path, monkeypatch):
    write(tmp_path, 1), write(tmp_path, 2)
    gone, real = [], type(tmp_path).unlink
    monkeypatch.setattr(
        type(tmp_path), "unlink", lambda path, missing_ok=False: (gone.append(path.name), real(path, missing_ok))
    )
    remove(tmp_path, 1)
    assert (
        gone[0] == "DONE_00000001"
        and done_steps(tmp_path) == [2]
        and not [n for n in names(tmp_path) if step_of(n) == 1]
    )
    assert examine(tmp_path, 2)


def test_settling_removes_what_was_cut_short_and_moves_what_is_of_another_future(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "DONE_00000003").unlink()
    for name in ("model_00000004.safetensors.tmp", "meta_00000002.json.tmp", "state_00000005_00001.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "run.sqlite").write_bytes(b"log")
    said = settle(tmp_path, step=1)
    assert names(tmp_path) == [
        file_name("DONE", 1),
        "aside_00000002",
        file_name("meta", 1),
        file_name("model", 1),
        "run.sqlite",
        file_name("state", 1),
    ]
    assert newest(tmp_path)[0].step == 1 and newest(tmp_path / "aside_00000002")[0].step == 2
    assert [text.split(" of ")[0] for text in said if "removed" in text] == [
        "removed 1 unfinished files",
        "removed 3 unfinished files",
        "removed 1 unfinished files",
        "removed 1 unfinished files",
    ]
    write(tmp_path, 2, value=5.0)
    settle(tmp_path, step=0)
    assert {n for n in names(tmp_path) if n.startswith("aside")} == {
        "aside_00000001",
        "aside_00000002",
        "aside_00000002-1",
    }


@pytest.mark.parametrize(
    "text, said",
    [
        (b'{"version": 1, "st', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "holds no table"),
        (b'{"version": 1}', "is of step None"),
        (b'{"version": 1, "step": 2, "files": {}}', "has world None"),
        (b'{"version": 1, "step": 2, "world": -1, "files": {}}', "has world -1"),
        (b'{"version": 1, "step": 2, "world": "two", "files": {}}', "has world 'two'"),
        (b'{"version": 1, "step": 2, "world": 1}', "has no list of files"),
        (b'{"version": 1, "step": 2, "world": 1, "files": {"../model_00000002.safetensors": ["0", 1]}}', "no file of"),
        (b'{"version": 1, "step": 2, "world": 1, "files": {"model_00000001.safetensors": ["0", 1]}}', "no file of"),
        (b'{"version": 1, "step": 2, "world": 1, "files": {"model_00000002.safetensors": 5}}', "has no hash and size"),
    ],
)
def test_a_meta_file_with_a_good_hash_and_a_bad_text_is_refused(tmp_path, text, said):
    write(tmp_path, 1), write(tmp_path, 2)
    entry = write_file(tmp_path / file_name("meta", 2), [text])
    write_file(tmp_path / file_name("DONE", 2), [entry.sha256.encode()])
    found, [refused] = newest(tmp_path)
    assert found.step == 1 and refused.startswith("checkpoint 2 refused: meta_00000002.json") and said in refused


def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(tmp_path):
    write(tmp_path, 1)
    for kind in ("model", "meta", "DONE"):
        for make in (os.mkfifo, os.mkdir):
            write(tmp_path, 2)
            path = tmp_path / file_name(kind, 2)
            path.unlink()
            make(path)
            found, [refused] = newest(tmp_path)
            assert found.step == 1 and path.name in refused
            path.unlink() if make is os.mkfifo else path.rmdir()
