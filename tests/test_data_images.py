"""Images: the digits, IDX files and what is refused, and the loader."""
import gzip
import struct

import numpy as np
import pytest
import torch

from f16lab.images import ImageData, ImageLoader, digits, idx_images, mnist, read_idx


def idx(values, code: int = 8, kind: str = ">u1") -> bytes:
    """An IDX file spelled out."""
    values = np.asarray(values)
    return struct.pack(f">BBBB{values.ndim}i", 0, 0, code, values.ndim, *values.shape) + values.astype(kind).tobytes()


def test_digits_are_those_of_scikit_learn():
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    train, test = digits()
    assert train.images.shape == (1500, 1, 8, 8) and test.images.shape == (297, 1, 8, 8) and train.classes == 10
    ours = np.concatenate([np.concatenate([part.images.reshape(len(part), -1) * 16, part.labels[:, None]], 1)
                           for part in (train, test)])
    theirs = np.concatenate([bunch.data, bunch.target[:, None]], 1)
    assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))
    assert train.images.dtype == np.float32 and train.images.min() == 0 and train.images.max() == 1
    again = digits()
    assert (again[0].sha256, again[1].sha256) == (train.sha256, test.sha256) and train.sha256 != test.sha256
    assert np.bincount(test.labels, minlength=10).min() >= 15  # every class is tested


def test_digits_without_scikit_learn(monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn, or use IDX files"):
        digits()


@pytest.mark.parametrize("code, kind", [(8, ">u1"), (9, ">i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")])
def test_idx_types(tmp_path, code, kind):
    values = np.arange(-12, 12).reshape(2, 3, 4) if kind != ">u1" else np.arange(24).reshape(2, 3, 4)
    (tmp_path / "a").write_bytes(idx(values, code, kind))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(values, code, kind)))
    for name in ("a", "a.gz"):
        assert np.array_equal(read_idx(tmp_path / name), values)


WHOLE = idx(np.arange(48).reshape(3, 4, 4))


@pytest.mark.parametrize("content, words", [
    (b"", ["nothing"]), (b"<html>404</html>", ["3c 68 74 6d"]), (b"\0\0\x07\x01" + WHOLE[4:], ["00 00 07 01"]),
    (WHOLE[:-5], ["[3, 4, 4]", "64 bytes", "59"]), (WHOLE + b"x", ["64 bytes", "65"]), (WHOLE[:9], ["16 bytes", "9"]),
    (gzip.compress(WHOLE, mtime=0)[:-9], ["damaged gzip"]), (gzip.compress(WHOLE, mtime=0)[:12] + b"\xff" * 40, ["damaged gzip"]),
    (struct.pack(">BBBB2i", 0, 0, 8, 2, -1, -4) + b"abcd", ["[-1, -4]"]),
], ids=["empty", "text", "type", "cut", "long", "header only", "gzip cut", "gzip damaged", "negative sizes"])
def test_broken_idx_files_are_refused(tmp_path, content, words):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_idx(tmp_path / "bad")
    assert str(caught.value).startswith(str(tmp_path / "bad"))
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_missing_idx_file(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_idx(tmp_path / "none")


def test_mnist_folder(tmp_path):
    pixels, labels = np.arange(2 * 3 * 5).reshape(2, 3, 5) * 8, np.array([3, 9])
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    train, test = mnist(tmp_path)
    assert train.images.shape == (2, 1, 3, 5) and test.labels.tolist() == [3, 9]
    assert np.array_equal(train.images[:, 0], pixels.astype(np.float32) / np.float32(255))
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="train-labels-idx1-ubyte: there is no such file"):
        mnist(tmp_path)


def test_images_and_labels_that_do_not_fit(tmp_path):
    (tmp_path / "images").write_bytes(idx(np.zeros((3, 4, 4))))
    (tmp_path / "labels").write_bytes(idx(np.zeros(2)))
    (tmp_path / "eleven").write_bytes(idx(np.array([0, 1, 11])))
    with pytest.raises(ValueError, match=r"\[3, 4, 4\].*\[2\]"):
        idx_images(tmp_path / "images", tmp_path / "labels")
    with pytest.raises(ValueError, match="bytes"):
        idx_images(tmp_path / "labels", tmp_path / "labels")
    with pytest.raises(ValueError, match=r"label 2 is 11, 10 classes have labels 0\.\.9"):
        idx_images(tmp_path / "images", tmp_path / "eleven")


def numbered(n: int) -> ImageData:
    images = np.arange(n * 4, dtype=np.float32).reshape(n, 1, 2, 2)
    return ImageData.of(images, np.arange(n) % 7, 7, "numbered")


def test_the_loader_gives_rows_in_keyed_order():
    data = numbered(50)
    loader = ImageLoader(data, batch=4, seed=3, step_batches=3)
    assert loader.steps_per_epoch() == 50 // 12 and loader.target_tokens() == 12
    for epoch in range(2):
        first = epoch * loader.batches_per_epoch()
        batches = [loader.batch(first + j) for j in range(loader.batches_per_epoch())]
        seen = torch.cat([b.samples for b in batches])
        assert len(seen) == len(seen.unique()) == 48
        for b in batches:
            assert torch.equal(b.inputs[:, 0, 0, 0], 4.0 * b.samples) and torch.equal(b.targets, b.samples % 7)
    for world in (1, 3):
        ks = [k for rank in range(world) for k in loader.rank_batches(rank, world)]
        assert sorted(ks) == [0, 1, 2]
    with pytest.raises(ValueError, match="numbered: 50 samples, one step takes 60 .*use a smaller batch, or more data"):
        ImageLoader(data, batch=20, step_batches=3)


def test_a_batch_of_images_is_a_copy():
    loader = ImageLoader(numbered(50), batch=4, shuffle=False)
    loader.batch(1).inputs.zero_()
    loader.batch(1).targets.zero_()
    assert loader.batch(1).inputs[0, 0, 0, 1] == 17 and loader.batch(1).targets.tolist() == [4, 5, 6, 0]


def test_a_position_in_other_images_is_refused():
    loader = ImageLoader(numbered(50), batch=4, step_batches=2)
    loader.advance()
    again = ImageLoader(numbered(50), batch=4, step_batches=2)
    again.load_state(loader.state())
    assert again.position == 2
    with pytest.raises(ValueError, match="sha256"):
        ImageLoader(ImageData.of(numbered(50).images + 1, numbered(50).labels, 7), batch=4).load_state(loader.state())
