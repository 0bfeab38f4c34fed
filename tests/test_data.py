"""Token shards: llm.c's bytes, what is refused and how, and streams of several shards."""
import hashlib
import struct

import numpy as np
import pytest
import torch

from f16lab import data as data_module
from f16lab.data import (ShardWriter, TokenData, as_uint16, check_shards, entropy_rate, locate, markov_chain, open_shard,
                         read_tokens, shard_count, write_shard)


def shard(tokens, count=None, magic=20240520, version=1) -> bytes:
    """A shard spelled out: 256 little-endian int32, then uint16."""
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens)


# ---------------------------------------------------------------- writing
def test_written_bytes_are_the_layout(tmp_path):
    tokens = [0, 1, 255, 256, 50256, 65535]
    assert write_shard(tmp_path / "a.bin", tokens) == 6
    assert (tmp_path / "a.bin").read_bytes() == shard(tokens)
    with ShardWriter(tmp_path / "b.bin") as writer:
        for piece in ([0, 1], [], np.array([255, 256], np.uint32), torch.tensor([50256, 65535])):
            writer.add(piece)
    assert (tmp_path / "b.bin").read_bytes() == shard(tokens)


@pytest.mark.parametrize("tokens, position, value", [
    ([65535, 65536, 119546], 1, 65536), ([5, -1], 1, -1), ([2**40], 0, 2**40), (np.array([1, 2, 2**63], np.uint64), 2, 2**63)])
def test_an_id_that_does_not_fit_is_refused_not_wrapped(tmp_path, tokens, position, value):
    with pytest.raises(ValueError, match=rf"ids\.bin: token {position} is {value}, .*0\.\.65535"):
        write_shard(tmp_path / "ids.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_the_position_counts_over_pieces(tmp_path):
    with pytest.raises(ValueError, match="token 1002 is 70000"), ShardWriter(tmp_path / "ids.bin") as writer:
        writer.add(range(1000))
        writer.add([1, 2, 70000])


@pytest.mark.parametrize("tokens", [[1.5], [[1, 2]], ["a"], np.array([True]), [2**70]])
def test_what_is_no_row_of_integers_is_refused(tokens):
    with pytest.raises(ValueError, match="flat row of integers"):
        as_uint16(tokens, "here")


def test_a_failed_write_leaves_the_old_shard(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, [1, 2, 3])
    with pytest.raises(RuntimeError), ShardWriter(path) as writer:
        writer.add([9] * 1000)
        assert path.read_bytes() == shard([1, 2, 3])  # a reader meets the whole old file at any time
        raise RuntimeError
    assert path.read_bytes() == shard([1, 2, 3]) and [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_a_shard_has_at_most_an_int32_of_tokens(tmp_path):
    with pytest.raises(ValueError, match=str(2**31)), ShardWriter(tmp_path / "a.bin") as writer:
        writer.count = 2**31 - 2
        writer.add([1, 2])


# ---------------------------------------------------------------- reading
def test_a_foreign_shard_is_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(shard([7, 50256, 65535]))
    assert open_shard(tmp_path / "a.bin").tolist() == [7, 50256, 65535]
    (tmp_path / "none.bin").write_bytes(shard([]))
    assert open_shard(tmp_path / "none.bin").tolist() == []


WHOLE = shard(range(1000))


@pytest.mark.parametrize("content, words", [
    (b"", ["empty", "0 bytes", "1024"]),
    (b"abc", ["3 bytes", "1024"]),
    (WHOLE[:1023], ["1023 bytes", "1024"]),
    (shard([], count=1) + b"abc", ["1026", "1027", "3 bytes behind the header"]),
    (WHOLE[:-1000], ["3024", "2024", "1000 bytes are missing"]),
    (WHOLE[:-1], ["3024", "3023", "no whole number"]),
    (shard(range(1000), count=5000), ["byte 8", "5000", "11024", "3024"]),
    (WHOLE + b"\0\0", ["3024", "3026", "2 bytes are too many"]),
    (shard([1], count=-5), ["byte 8", "-5"]),
    (shard(range(1000), magic=123456), ["byte 0", "123456", "20240520", "another format"]),
    (shard(range(1000), magic=20240801, version=7), ["20240801", "20240520", "uint32"]),
    (shard(range(1000), version=2), ["byte 4", "version 2", "expected 1"]),
    (b"Once upon a time, there was a text.\n" * 100, ["1701015119", "20240520", "looks like text", "f16lab data"]),
    ("Es wär einmal".encode() * 100, ["looks like text"]),
])
def test_a_broken_or_foreign_file_is_refused_in_one_sentence(tmp_path, content, words):
    path = tmp_path / "broken.bin"
    path.write_bytes(content)
    for refuse in (shard_count, open_shard, lambda path: check_shards(path, 65536), lambda path: TokenData.open(path, 65536)):
        with pytest.raises(ValueError) as caught:
            refuse(path)
        message = str(caught.value)
        assert message.startswith(str(path)) and "\n" not in message
        assert [word for word in words if word not in message] == []


def test_paths_that_name_nothing_are_refused(tmp_path):
    for path in (tmp_path / "no.bin", str(tmp_path / "*.bin"), []):
        with pytest.raises(ValueError, match="no file"):
            check_shards(path, 10)
    with pytest.raises(ValueError, match="no such file"):
        check_shards([tmp_path / "no.bin"], 10)
    with pytest.raises(ValueError, match="no such file"):
        check_shards(tmp_path, 10)


def test_ids_are_compared_with_the_vocabulary(tmp_path):
    good, bad = tmp_path / "good.bin", tmp_path / "val_0.bin"
    write_shard(good, [0, 50256])
    write_shard(bad, [50256] * 2990 + [50257] + [0] * 9)
    assert check_shards(good, 50257) == hashlib.sha256(struct.pack("<2H", 0, 50256)).hexdigest()
    with pytest.raises(ValueError, match=r"val_0\.bin: token 2990 \(byte 7004\) is 50257, .* 0\.\.50256"):
        check_shards([good, bad], 50257)
    with pytest.raises(ValueError, match="token 1 .* is 50256"):
        TokenData.open(good, 50256)
    with pytest.raises(ValueError, match="mine: token 2 .* is 7"):
        TokenData.of([0, 6, 7], 7, "mine")


def test_an_id_is_found_behind_the_first_piece_of_the_scan(tmp_path, monkeypatch):
    monkeypatch.setattr(data_module, "SCAN_TOKENS", 7)
    write_shard(tmp_path / "a.bin", [*range(20), 99, 98])
    with pytest.raises(ValueError, match=r"token 20 \(byte 1064\) is 99"):
        check_shards(tmp_path / "a.bin", 50)
    assert check_shards(tmp_path / "a.bin", 100) == hashlib.sha256(struct.pack("<22H", *range(20), 99, 98)).hexdigest()


# ---------------------------------------------------------------- streams
def test_shards_are_one_stream(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 1000, 400)
    pieces = np.split(tokens, [0, 1, 1, 150, 399])  # two of them empty
    for i, piece in enumerate(pieces):
        write_shard(tmp_path / f"part_{i}.bin", piece)
    stream = TokenData.open(tmp_path / "part_*.bin", 1000)
    assert len(stream) == 400 and stream.sha256 == TokenData.of(tokens, 1000).sha256
    for start, stop in [(0, 400), (0, 0), (400, 400), (0, 1), (1, 2), (149, 152), (398, 400), (0, 151)]:
        assert read_tokens(stream, start, stop).tolist() == tokens[start:stop].tolist()
    for position in range(400):
        number, offset = locate(stream, position)
        assert pieces[number][offset] == tokens[position]
    for start, stop in [(-1, 3), (3, 2), (0, 401)]:
        with pytest.raises(IndexError):
            read_tokens(stream, start, stop)


def test_the_digest_sees_every_token_and_no_file_name(tmp_path):
    one = TokenData.of([1, 2, 3, 4], 10)
    assert one.sha256 == hashlib.sha256(struct.pack("<4H", 1, 2, 3, 4)).hexdigest()
    assert one.sha256 != TokenData.of([1, 2, 3, 5], 10).sha256 != TokenData.of([1, 2, 3], 10).sha256
    write_shard(tmp_path / "x.bin", [1, 2, 3, 4])
    assert TokenData.open(tmp_path / "x.bin", 10).sha256 == one.sha256


def test_offsets_are_64_bits_wide(tmp_path):
    """Two sparse shards of 4 GiB: the last tokens of each lie beyond 2^32 bytes, those of the stream beyond 2^31 tokens."""
    count = 2**31 - 1
    for name, last in (("a.bin", [11, 12, 13]), ("b.bin", [21, 22, 23])):
        with open(tmp_path / name, "wb") as file:
            file.write(shard([], count=count))
            file.seek(1024 + 2 * (count - 3))
            file.write(struct.pack("<3H", *last))
    if (tmp_path / "a.bin").stat().st_blocks * 512 > 2**30:
        pytest.skip("the file system keeps no sparse files")
    shards = tuple(open_shard(tmp_path / name) for name in ("a.bin", "b.bin"))
    stream = TokenData(shards, 100, "not hashed")
    assert len(stream) == 2 * count
    assert read_tokens(stream, count - 3, count + 1).tolist() == [11, 12, 13, 0]
    assert read_tokens(stream, 2 * count - 3, 2 * count).tolist() == [21, 22, 23]
    assert locate(stream, 2 * count - 1) == (1, count - 1)


# ---------------------------------------------------------------- the Markov chain
def squirrel(position: int, seed: int) -> int:
    """The published hash, written out."""
    m = (position * 0xD2A80A3F + seed) % 2**32
    m ^= m >> 9
    m = (m + 0xA884F197) % 2**32
    m ^= m >> 11
    m = m * 0x6C736F4B % 2**32
    m ^= m >> 13
    m = (m + 0xB79F3ABB) % 2**32
    m ^= m >> 15
    m = m * 0x1B56C4F5 % 2**32
    return m ^ m >> 17


def stream(name: str, seed: int, n: int) -> list[int]:
    """Keyed noise (purpose 7, step 0) written out."""
    tensor = 0x811C9DC5
    for byte in name.encode():
        tensor = (tensor ^ byte) * 0x01000193 % 2**32
    a = squirrel(tensor, squirrel(7 << 16, squirrel(0, seed)))
    b = squirrel(0, a)
    return [squirrel(squirrel(i, a), b) for i in range(n)]


@pytest.mark.parametrize("vocab, seed", [(32, 0), (7, 5)])
def test_the_chain_is_its_definition(vocab, seed):
    chain = markov_chain(vocab, 500, seed)
    weights = np.array([1 + ((n >> 16) ** 8 >> 116) for n in stream("markov.transition", seed, vocab**2)], object)
    weights = weights.reshape(vocab, vocab)
    token, tokens = 0, []
    for n in stream("markov.draws", seed, 500):
        draw, row = n * int(weights[token].sum()) >> 32, weights[token]
        token = next(j for j in range(vocab) if draw < row[:j + 1].sum())
        tokens.append(token)
    assert chain.data.shards[0].tolist() == tokens
    assert np.allclose(chain.transition, (weights / weights.sum(1, keepdims=True)).astype(float), rtol=1e-15)


def test_the_chain_has_the_entropy_it_says():
    chain = markov_chain(length=200_000)
    values, vectors = np.linalg.eig(chain.transition.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    rate = -(stationary[:, None] * chain.transition * np.log(chain.transition)).sum()
    assert abs(chain.entropy_rate - rate) < 1e-10
    tokens = chain.data.shards[0]
    losses = -np.log(chain.transition[tokens[:-1], tokens[1:]])
    assert abs(losses.mean() - rate) < 4 * losses.std() / len(losses) ** 0.5 * 2  # correlated draws: twice the plain error
    assert chain.data.vocab_size == 32 and 1.5 < rate < 2.5


def test_entropy_of_chains_known_by_hand():
    assert abs(entropy_rate(np.full((4, 4), 0.25)) - np.log(4)) < 1e-12
    p, q = 0.9, 0.6  # stationary (1 - q, 1 - p) / (2 - p - q) of a two-state chain
    h = lambda x: -x * np.log(x) - (1 - x) * np.log(1 - x)  # noqa: E731
    expected = ((1 - q) * h(p) + (1 - p) * h(q)) / (2 - p - q)
    assert abs(entropy_rate(np.array([[p, 1 - p], [1 - q, q]])) - expected) < 1e-12


def test_chains_of_one_seed_are_prefixes_and_seeds_differ():
    long = markov_chain(length=1000).data.shards[0].tolist()
    assert markov_chain(length=10).data.shards[0].tolist() == long[:10]
    assert markov_chain(length=1000, seed=1).data.shards[0].tolist() != long
    for wrong in (dict(vocab=0), dict(length=0), dict(vocab=5000), dict(seed=-1)):
        with pytest.raises(ValueError):
            markov_chain(**{"length": 10, **wrong})
