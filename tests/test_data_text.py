"""Tokenizers, text sources, the built-in corpus, and prepared folders."""
import hashlib
import json
import random
import subprocess
import sys
import sysconfig
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest

from f16lab.corpus import (TextFile, builtin_corpus, clip, encode_corpus, make_corpus, name_noise, open_prepared, prepare,
                           split_files, take, text_blocks, text_corpus)
from f16lab.data import TokenLoader, open_shard
from f16lab.tokenizer import BPETokenizer, ByteTokenizer, TiktokenTokenizer, load_tokenizer, save_tokenizer, train_bpe

EVERYTHING = "plain ASCII\n\ttabs  and   spaces\r\nnaïve Grüße 世界 😀 \u200b <|endoftext|> \x01\n"
SAMPLE = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")


def document(path: Path, content: bytes | str, name: str = "") -> TextFile:
    """A file on disk as a document."""
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(content)
    return TextFile(name or path.name, path, 0, len(content))


def content(file: TextFile) -> bytes:
    return b"".join(text_blocks(file))


# ---------------------------------------------------------------- tokenizers
def test_bytes_are_ids():
    byte = ByteTokenizer()
    assert byte.encode("aé").tolist() == [97, 0xC3, 0xA9] and byte.encode("aé").dtype == np.uint16
    assert (byte.vocab_size, byte.end_of_text) == (257, 256)
    assert byte.decode(byte.encode(EVERYTHING)) == EVERYTHING and 256 not in byte.encode(EVERYTHING)
    assert byte.decode([256, 97, 0xC3]) == "<|endoftext|>a\ufffd" and byte.decode([]) == ""


def test_bpe_round_trip_and_vocabulary():
    pytest.importorskip("tokenizers")
    bpe = train_bpe([SAMPLE], 600)
    assert bpe.vocab_size == 600
    for text in (EVERYTHING, SAMPLE, "", " ", "\n\n\n"):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text and ids.dtype == np.uint16 and bpe.end_of_text not in ids
    assert len(bpe.encode(SAMPLE)) < 0.6 * len(SAMPLE.encode())
    assert bpe.decode([bpe.end_of_text, *bpe.encode("x")]) == "<|endoftext|>x"


def test_bpe_is_the_same_in_every_process():
    pytest.importorskip("tokenizers")
    code = ("import sysconfig, hashlib, pathlib; from f16lab.tokenizer import train_bpe;"
            "text = pathlib.Path(sysconfig.get_path('stdlib'), 'argparse.py').read_text(encoding='utf-8');"
            "print(hashlib.sha256(train_bpe([text[:30000], text[30000:]], 500).rules.encode()).hexdigest())")
    digests = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/",
                              env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1]),
                                   "OMP_NUM_THREADS": "1"}).stdout for seed in ("1", "2")}
    rules = train_bpe([SAMPLE[:30000], SAMPLE[30000:]], 500).rules
    assert digests == {hashlib.sha256(rules.encode()).hexdigest() + "\n"}


def test_bpe_refusals(monkeypatch):
    pytest.importorskip("tokenizers")
    for size in (0, 256, 65537):
        with pytest.raises(ValueError, match=f"257 .*65536.* got {size}"):
            train_bpe([SAMPLE], size)
    with pytest.warns(UserWarning, match="not the 5000 asked for"):
        train_bpe(["abc abc"], 5000)
    foreign = json.loads(train_bpe(["abc"], 257).rules)
    foreign["added_tokens"], foreign["model"]["vocab"] = [], {"a": 0}
    with pytest.raises(ValueError, match="endoftext"):
        BPETokenizer(json.dumps(foreign)).encode("a")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(ImportError, match="tokenizers is not installed: pip install tokenizers, or use the byte tokenizer"):
        train_bpe([SAMPLE], 300)


def test_tiktoken_vocabularies(monkeypatch, tmp_path):
    class Encoding:
        eot_token = 50256

        def __init__(self, n_vocab):
            self.n_vocab = n_vocab

        def encode_ordinary(self, text):
            return [len(word) for word in text.split()]

        def decode(self, ids):
            return " ".join("x" * i for i in ids)

    sizes = {"gpt2": 50257, "o200k_base": 200019}
    fake = types.SimpleNamespace(get_encoding=lambda name: Encoding(sizes[name]))
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    gpt2 = TiktokenTokenizer("gpt2")
    assert (gpt2.vocab_size, gpt2.end_of_text, gpt2.encode("xx x").tolist(), gpt2.decode([2, 1])) == (50257, 50256, [2, 1], "xx x")
    assert load_tokenizer(save_tokenizer(gpt2, tmp_path), tmp_path) == gpt2
    with pytest.raises(ValueError, match="200019 ids"):
        TiktokenTokenizer("o200k_base").encode("x")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ImportError, match="tiktoken is not installed"):
        TiktokenTokenizer("gpt2").encode("x")


def test_tokenizers_that_cannot_be_saved_or_loaded(tmp_path):
    with pytest.raises(NotImplementedError, match="object"):
        save_tokenizer(object(), tmp_path)
    with pytest.raises(ValueError, match="'words' is unknown"):
        load_tokenizer({"kind": "words"}, tmp_path)


# ---------------------------------------------------------------- documents
def test_blocks_are_text_and_complete(tmp_path):
    draw = random.Random(0)
    for i in range(60):
        alphabet = "ab\n" if i % 3 else "aé世😀"
        text = "".join(draw.choice(alphabet) for _ in range(draw.randrange(200)))
        file = document(tmp_path / "a.txt", text)
        for size in (4, 5, 7, 64, 1000):
            blocks = [*text_blocks(file, size)]
            assert "".join(block.decode() for block in blocks) == text and all(blocks)
            assert all(block.endswith(b"\n") or b"\n" not in block for block in blocks[:-1])


def test_a_range_of_a_file_is_a_document(tmp_path):
    file = document(tmp_path / "a.txt", "0123456789")
    assert content(TextFile("a", file.path, 3, 7)) == b"3456"
    with pytest.raises(ValueError, match="shorter"):
        content(TextFile("a", file.path, 3, 11))


LONG = b"line\n" * 300_000  # more than one block


@pytest.mark.parametrize("raw, words", [
    (b"", ["empty", "0 bytes"]),
    (b"abc\0def", ["byte 3", "NUL", "binary"]),
    (LONG + b"\0", [f"byte {len(LONG)}", "NUL"]),
    ("Grüße".encode("latin-1"), ["byte 2", "0xfc", "UTF-8"]),
    (LONG + b"\xff\xfe", [f"byte {len(LONG)}", "0xff", "UTF-8"]),
    ("cut 世".encode()[:-1], ["byte 4", "0xe4", "UTF-8"]),
    ("UTF-16".encode("utf-16"), ["byte 0", "0xff"]),
    (b"\x80" * 3_000_000, ["byte 0", "0x80"]),
])
def test_what_is_no_text_is_refused_with_its_name(tmp_path, raw, words):
    if words[0] == "byte 0" and b"\0" in raw:
        words = ["NUL"]
    (tmp_path / "good.txt").write_text("fine\n" * 10)
    (tmp_path / "bad.txt").write_bytes(raw)
    for source in (tmp_path, tmp_path / "bad.txt", [tmp_path / "good.txt", tmp_path / "bad.txt"]):
        with pytest.raises(ValueError) as caught:
            text_corpus(source)
        message = str(caught.value)
        assert message.startswith(str(tmp_path / "bad.txt")) and "\n" not in message
        assert [word for word in words if word not in message] == []


def test_sources_that_hold_nothing_are_refused(tmp_path):
    (tmp_path / ".hidden").write_text("x")
    for source, word in ((tmp_path, "holds no files"), (tmp_path / "no", "no such file"), ([], "no files were given")):
        with pytest.raises(ValueError, match=word):
            text_corpus(source)


def test_a_folder_is_searched_without_hidden_files(tmp_path):
    for name in ("b.txt", "sub/deep/a.md", ".git/config", "sub/.cache"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n" * 3)
    corpus = text_corpus(tmp_path)
    assert sorted(f.name for f in corpus.train + corpus.val) == ["b.txt", "sub/deep/a.md"]
    elsewhere = tmp_path / "copy"
    (elsewhere / "sub/deep").mkdir(parents=True)
    for name in ("b.txt", "sub/deep/a.md"):
        (elsewhere / name).write_bytes((tmp_path / name).read_bytes())
    assert text_corpus(elsewhere).sha256 == corpus.sha256  # names are relative: no place of the disk is in it


# ---------------------------------------------------------------- the split
def test_the_side_of_a_file_is_its_own(tmp_path):
    files = [document(tmp_path / "a.txt", "x\n", f"dir/{i}.txt") for i in range(3000)]
    train, val = split_files(files)
    assert 0.06 < len(val) / 3000 < 0.11 and sorted(f.name for f in train + val) == sorted(f.name for f in files)
    fewer = split_files(files[1000:])
    assert {f.name for f in fewer[1]} == {f.name for f in val} & {f.name for f in files[1000:]}
    assert split_files(files[::-1]) == (train, val)
    assert max(name_noise(f.name) for f in val) < 2**32 / 12 <= min(name_noise(f.name) for f in train)


def test_two_files_give_both_sides(tmp_path):
    for i in range(20):
        files = [document(tmp_path / f"{i}-{j}.txt", "some text\n") for j in range(2)]
        assert [len(side) for side in split_files(files)] == [1, 1]


def test_one_file_is_cut_at_a_line_end(tmp_path):
    for text in ("line\n" * 1000, "é" * 1000, "a\nb", "long " * 500_000 + "\nend\n" * 100_000):
        file = document(tmp_path / "one.txt", text)
        (train,), (val,) = split_files([file])
        assert content(train) + content(val) == text.encode() and train.stop == val.start
        assert content(train).decode() and content(val).decode()
        if text.startswith("line"):
            assert content(train).endswith(b"\n") and 0.07 < val.size / file.size < 0.1
    with pytest.raises(ValueError, match="too little text"):
        split_files([document(tmp_path / "x.txt", "x")])
    with pytest.raises(ValueError, match="too little text"):
        split_files([])


def test_limits_are_kept(tmp_path):
    file = document(tmp_path / "a.txt", "12345\n" * 10)
    for budget in range(70):
        taken = take([file, file], budget)
        total = sum(f.size for f in taken)
        assert total <= budget and (total == budget or budget - total < 6) and all(f.size for f in taken)
    assert clip(file, 13).size == 12 and clip(file, 3).size == 2 and clip(file, 99) is file
    for limit in (1000, 50_000, 300_000):
        corpus = builtin_corpus(limit)
        assert 0.9 * limit < corpus.size() <= limit and 0.06 * limit < corpus.size("val") < 0.1 * limit
    with pytest.raises(ValueError, match="limit of 2 bytes"):
        builtin_corpus(2)
    with pytest.raises(ValueError, match="limit is an integer of at least 1"):
        builtin_corpus(0)


# ---------------------------------------------------------------- the built-in corpus
@pytest.fixture(scope="module")
def builtin():
    return builtin_corpus()


def test_the_builtin_corpus_is_the_standard_library(builtin):
    root = Path(sysconfig.get_path("stdlib"))
    names = {f.name for f in builtin.train + builtin.val}
    assert {"argparse.py", "json/decoder.py"} <= names and len(names) > 300
    assert not [n for n in names if {"test", "tests", "idlelib", "lib2to3", "site-packages"} & {*n.split("/")}]
    assert all(f.path == root / f.name and f.size == f.path.stat().st_size for f in builtin.train + builtin.val)
    assert 5_000_000 < builtin.size() < 20_000_000 and 0.05 < builtin.size("val") / builtin.size() < 0.1
    assert not {f.name for f in builtin.train} & {f.name for f in builtin.val}


def test_the_digest_is_of_the_text(builtin, tmp_path):
    digest = hashlib.sha256()
    for side, files in (("train", builtin.train), ("val", builtin.val)):
        for file in files:
            raw = file.path.read_bytes()
            digest.update(f"{side}\0{file.name}\0{len(raw)}\0".encode() + raw)
    assert builtin.sha256 == digest.hexdigest() == builtin_corpus().sha256
    files = [document(tmp_path / f"{i}.txt", f"text {i}\n") for i in range(5)]
    before = make_corpus("x", files).sha256
    files[3] = document(tmp_path / "3.txt", "text 4\n")
    assert make_corpus("x", files).sha256 != before


def test_what_is_left_out(tmp_path):
    keep = {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n", "pkg/sub/c.py": "z = 3\n"}
    drop = {"test/d.py": "1", "pkg/tests/e.py": "1", "idlelib/f.py": "1", "site-packages/g.py": "1", "config-3.11-x/h.py": "1",
            "_sysconfigdata_x.py": "1", "pkg/__init__.py": "", "data.txt": "1", "pkg/old.py": "é".encode("latin-1")}
    for name, text in {**keep, **drop}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    corpus = builtin_corpus(root=tmp_path)
    assert {f.name: content(f).decode() for f in corpus.train + corpus.val} == keep
    with pytest.raises(ValueError, match="no library sources"):
        builtin_corpus(root=tmp_path / "nowhere")


# ---------------------------------------------------------------- prepared folders
def decoded(folder, split: str) -> str:
    prepared = open_prepared(folder)
    return "".join(prepared.tokenizer().decode(shard) for shard in prepared.data(split).shards)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"document {i}: {EVERYTHING}" * (i + 1), encoding="utf-8", newline="")
    return folder


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_prepared_shards_hold_the_documents(texts, tmp_path, tokenizer):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    calls = []
    size = 300 if tokenizer == "bpe" else None
    prepared = prepare(texts, tmp_path / "out", tokenizer, size, shard_tokens=10_000,
                       progress=lambda done, total: calls.append((done, total)))
    corpus = text_corpus(texts)
    for split in ("train", "val"):
        want = "".join("<|endoftext|>" + content(f).decode() for f in getattr(corpus, split))
        ids = np.concatenate(prepared.data(split).shards).tolist()
        assert prepared.tokenizer().decode(ids) == want
        assert ids.count(prepared.meta["end_of_text"]) == len(getattr(corpus, split)) and ids[0] == prepared.meta["end_of_text"]
        side = prepared.meta["splits"][split]
        assert [s["tokens"] for s in side["shards"][:-1]] == [10_000] * (len(side["shards"]) - 1)
        assert side["tokens"] == len(ids) == len(prepared.data(split)) and side["sha256"] == prepared.data(split).sha256
    assert prepared.meta["source"]["sha256"] == corpus.sha256 and prepared.meta["source"]["bytes"] == corpus.size()
    assert calls[-1] == (corpus.size(), corpus.size()) and len(calls) >= 30
    assert prepared.meta["vocab_size"] == prepared.tokenizer().vocab_size == (size or 257)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "f16lab-data.json", *(["tokenizer.json"] if size else []),
        *(s["file"] for side in prepared.meta["splits"].values() for s in side["shards"])}


def test_in_memory_and_prepared_are_the_same_data(texts, tmp_path):
    memory = encode_corpus(text_corpus(texts))
    disk = prepare(texts, tmp_path / "out")
    for split in ("train", "val"):
        assert memory[split].sha256 == disk.data(split).sha256 and memory[split].vocab_size == 257
        assert np.array_equal(memory[split].shards[0], disk.data(split).shards[0])
    loaders = [TokenLoader(data, 2, 32, seed=1) for data in (memory["train"], disk.data("train"))]
    assert loaders[0].state() == loaders[1].state()


def test_preparing_twice_gives_the_same_bytes(texts, tmp_path):
    for name in ("a", "b"):
        prepare(texts, tmp_path / name, shard_tokens=9999)
    files = {p.name for p in (tmp_path / "a").iterdir()}
    assert files == {p.name for p in (tmp_path / "b").iterdir()}
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_old_shards_are_replaced_and_nothing_else(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts, out, shard_tokens=5_000)
    (out / "notes.txt").write_text("mine")
    prepare(texts, out, shard_tokens=10**6)
    assert {p.name for p in out.iterdir()} == {"f16lab-data.json", "notes.txt", "tokens_train_000000.bin", "tokens_val_000000.bin"}
    (out / "f16lab-data.json").write_text("{broken")
    prepare(texts, out)
    assert open_prepared(out).data("val")


def test_a_stop_in_the_middle_leaves_the_old_data(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts, out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        prepare(texts, out, shard_tokens=1000, progress=stop)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    with pytest.raises(KeyboardInterrupt):
        prepare(texts, tmp_path / "new", progress=stop)
    with pytest.raises(ValueError, match="not prepared to the end"):
        open_prepared(tmp_path / "new")


def test_changed_shards_are_noticed(texts, tmp_path):
    prepare(texts, tmp_path)
    path = tmp_path / "tokens_val_000000.bin"
    raw = bytearray(path.read_bytes())
    raw[1024 + 2 * 7] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="SHA-256 of the val tokens"):
        open_prepared(tmp_path).data("val")
    raw[1024 + 2 * 7 + 1] = 2
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"000000\.bin: token 7 .* 0\.\.256"):
        open_prepared(tmp_path).data("val")
    path.write_bytes(raw[:-1000])
    with pytest.raises(ValueError, match="1000 bytes are missing"):
        open_prepared(tmp_path).data("val")
    path.unlink()
    with pytest.raises(ValueError, match="no such file"):
        open_prepared(tmp_path).data("val")
    assert open_prepared(tmp_path).data("train")
    for text, word in (("[]", "no meta file"), ('{"format": "f16lab-data", "version": 2}', "version 1"), ("{", "no JSON")):
        (tmp_path / "f16lab-data.json").write_text(text)
        with pytest.raises(ValueError, match=word):
            open_prepared(tmp_path)


def test_settings_without_effect_warn_and_unknown_ones_are_refused(texts, tmp_path):
    with pytest.warns(UserWarning, match="vocab_size has an effect on the bpe tokenizer only"):
        prepare(texts, tmp_path / "a", vocab_size=1000)
    with pytest.warns(UserWarning, match="limit has no effect"):
        prepare(text_corpus(texts), tmp_path / "b", limit=1000)
    for tokenizer in ("words", "tiktoken", "tiktoken:"):
        with pytest.raises(ValueError, match="byte, bpe or tiktoken:NAME"):
            prepare(texts, tmp_path / "c", tokenizer)
    with pytest.raises(ValueError, match="shard_tokens"):
        prepare(texts, tmp_path / "c", shard_tokens=0)
    assert not (tmp_path / "c").exists()


def test_a_large_file_is_never_in_memory(tmp_path):
    size = 24 * 2**20
    (tmp_path / "large.txt").write_bytes(b"all work and no play makes a dull text\n" * (size // 39))
    tracemalloc.start()
    try:
        prepare(tmp_path / "large.txt", tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20 < size
    assert len(open_shard(tmp_path / "out" / "tokens_train_000000.bin")) > 20 * 2**20
