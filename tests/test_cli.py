"""The command line: every option of every verb, and one sentence for everything that is wrong."""
import json
import tomllib
from dataclasses import fields

import pytest
from click.testing import CliRunner

from f16lab import __version__
from f16lab.cli import VERBS, command
from f16lab.config import SECTIONS, TrainConfig, from_dict, settings_of
from f16lab.data import write_shard
from f16lab.profile import PRESETS, SLOTS, PrecisionProfile
from f16lab.runlog import RunLog, RunReader

SHAPE = "--layers 1 --heads 2 --channels 16 --context 16 --batch 4 --eval-batches 1 --steps 4"


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A small text file."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of a text that a byte model can learn\n" for i in range(400)))
    return path


@pytest.fixture
def shell(tmp_path, monkeypatch, text):
    """Run a command line in a folder of its own; TEXT stands for a text file, SMALL for a tiny run on it."""
    monkeypatch.chdir(tmp_path)

    def call(line: str):
        line = line.replace("SMALL", f"--data TEXT {SHAPE}").replace("TEXT", str(text))
        done = CliRunner().invoke(command(), line.split())
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done
    return call


def config_of(shell, line: str) -> TrainConfig:
    """The run that `f16lab train LINE` would do."""
    done = shell(f"train {line} --print-config")
    assert done.exit_code == 0, done.stderr
    return from_dict(tomllib.loads(done.stdout))


def complaint(done, code: int = 2) -> str:
    """The one line on standard error (besides warnings) of a call that ended with `code`."""
    assert done.exit_code == code, (done.exit_code, done.stdout, done.stderr)
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert line.startswith("f16lab: ") and "Traceback" not in done.stderr
    return line


# ---------------------------------------------------------------- help
def test_help_lists_every_verb_with_and_without_asking(shell):
    page = shell("--help")
    assert page.exit_code == 0 and shell("").stdout == shell("-h").stdout == page.stdout
    assert all(f"\n  {verb} " in page.stdout for verb in VERBS)


def test_version(shell):
    assert shell("--version").stdout == f"f16lab {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(shell, verb):
    page = shell(f"{verb} --help")
    assert page.exit_code == 0 and page.stdout.startswith(f"Usage: f16lab {verb}")
    assert all(len(line) <= 112 for line in page.stdout.splitlines())


def test_help_of_train_shows_settings_defaults_presets_and_slots(shell):
    page = " ".join(shell("train --help").stdout.split())
    for name, section, field in settings_of():
        assert f"--{name.replace('_', '-')}" in page
    for default in ("[default: 0.001]", "[default: 200]", "[default: builtin]", "[default: true]"):
        assert default in page
    for preset, profile in PRESETS.items():
        assert f"--{preset.replace('_', '-')}" in page and str(profile).replace(",", ", ") in page
    for slot in SLOTS:
        assert f"--precision-{slot.replace('_', '-')} " in page


# ---------------------------------------------------------------- options and recipes
OTHER = {"model": "d4", "norm": "peri", "kind": "rms", "activation": "swiglu", "position": "rope", "data": "markov",
         "tokenizer": "bpe", "schedule": "wsd", "device": "cpu", "compile": "aot_eager", "beta1": 0.5, "beta2": 0.5,
         "eps": 1e-6, "dropout": 0.25, "final_fraction": 0.5,
         "zero_stage": 1, "rendezvous": "fs:///tmp", "probe_kinds": "grad,v"}


def other(name: str, default):
    """A value of a setting that is not its default."""
    if isinstance(default, bool):
        return not default
    return OTHER[name] if name in OTHER else default + 3


@pytest.mark.parametrize("name, section, field", [s for s in settings_of() if s[0] != "profile"], ids=lambda v: v if isinstance(v, str) else "")
def test_each_option_changes_its_setting_and_nothing_else(shell, name, section, field):
    value = other(name, field.default)
    dashed = name.replace("_", "-")
    given = f"--{'' if value else 'no-'}{dashed}" if isinstance(value, bool) else f"--{dashed} {value}"
    extra = " --schedule wsd" if name in ("warmup", "final_fraction") else ""
    before, after = config_of(shell, extra), config_of(shell, given + extra)
    changed = {(part, f.name) for part in SECTIONS for f in fields(SECTIONS[part])
               if getattr(getattr(before, part), f.name) != getattr(getattr(after, part), f.name)}
    assert changed == {(section, field.name)} and getattr(getattr(after, section), field.name) == value
    assert after.profile == before.profile


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_flags(shell, preset):
    assert config_of(shell, f"--{preset.replace('_', '-')}").profile == PRESETS[preset]
    assert config_of(shell, f"--profile {preset}").profile == PRESETS[preset]


@pytest.mark.parametrize("flag, preset", [("--f16-all", "all_f16"), ("--t1_58", "t1_58")])
def test_other_spellings_of_presets(shell, flag, preset):
    assert config_of(shell, flag).profile == PRESETS[preset]


@pytest.mark.parametrize("line, text", [
    ("--f16 --precision-master f32", "f16,master=f32"),
    ("--bf16 --precision-rounding kahan --precision-master none", "bf16,rounding=kahan,master=none"),
    ("--precision-param f16 --precision-loss-scale 2^10 --precision-compute f16", "param=f16,compute=f16,loss_scale=2^10"),
    ("--all-f16 --precision-state-scale 4096", "all_f16,state_scale=2^12"),
    ("--profile f16;lm_head:compute=f32", "f16;lm_head:compute=f32"),
    ("--profile t1_58 --precision-stable f16", "t1_58,stable=f16"),
])
def test_slots_on_top_of_a_profile(shell, line, text):
    assert config_of(shell, line).profile == PrecisionProfile.parse(text)


def test_without_options_there_are_only_defaults(shell):
    assert config_of(shell, "") == TrainConfig()


@pytest.mark.parametrize("line", ["--f16 --steps 7", "--profile bf16_sr;blocks.*.attn:stable=f32 --model d6 --lr 1e-4",
                                  "--t1_58 --no-shuffle --schedule cosine --warmup 3", "--all-f16 --eps 1e-07 --data a/path"])
def test_recipe_goes_round(shell, tmp_path, line):
    first = shell(f"train {line} --print-config").stdout
    (tmp_path / "recipe.toml").write_text(first)
    assert shell("train recipe.toml --print-config").stdout == first


def test_options_override_a_recipe_and_defaults_do_not(shell, tmp_path):
    (tmp_path / "recipe.toml").write_text(shell("train --f16 --steps 7 --lr 0.5 --print-config").stdout)
    mixed = config_of(shell, "recipe.toml --lr 0.25 --precision-stable f16")
    assert (mixed.run.steps, mixed.optimizer.lr) == (7, 0.25)
    assert mixed.profile == PrecisionProfile.parse("f16,stable=f16")


def test_a_recipe_may_be_short(shell, tmp_path):
    (tmp_path / "short.toml").write_text('profile = "f16"\n[run]\nsteps = 3\n')
    assert config_of(shell, "short.toml") == TrainConfig().with_(profile="f16", steps=3)


def test_printing_a_recipe_writes_nothing(shell, tmp_path):
    shell("train --f16 --print-config")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- what is wrong before the start
WRONG = {
    "no such command": ("trian", ["'trian'", "train, resume, compare", "Did you mean 'train'"]),
    "no such option": ("train --stepz 3", ["--stepz", "--steps", "train --help"]),
    "no such preset flag": ("train --f17", ["--f17", "--f16"]),
    "two presets": ("train --f16 --bf16", ["--f16 and --bf16", "give one"]),
    "preset and profile": ("train --f16 --profile bf16", ["--profile and --f16"]),
    "preset": ("train --profile f61 SMALL", ["'f61'", "f16, master_weights", "Did you mean 'f16'"]),
    "profile text": ("train --profile f16,stable SMALL", ["'stable'", "slot=value"]),
    "profile slot": ("train --profile f16,computte=f32 SMALL", ["'computte'", "Did you mean 'compute'"]),
    "slot twice": ("train --profile param=f16,param=f32 SMALL", ["param is given twice"]),
    "glob": ("train --profile f16;a..b:compute=f32 SMALL", ["'a..b'"]),
    "precision": ("train --precision-param f61 SMALL", ["param=f61", "f16, bf16, f32"]),
    "weight format as number": ("train --precision-compute t1_58 SMALL", ["compute=t1_58", "not a storage type"]),
    "8 bits where the range is too short": ("train --precision-optimizer e4m3 SMALL", ["optimizer=e4m3", "f16, bf16, f32"]),
    "contradiction": ("train --f16 --precision-rounding kahan --precision-master f32 SMALL", ["rounding=kahan", "master"]),
    "slot name": ("train --precision-parm f16", ["--precision-parm", "--precision-param"]),
    "schedule": ("train SMALL --schedule cosin", ["'cosin'", "cosine, linear", "Did you mean 'cosine'"]),
    "device": ("train SMALL --device gpu", ["'gpu'", "'cpu', 'cuda'"]),
    "device number": ("train SMALL --device cuda:x", ["'cuda:x'"]),
    "device that is not there": ("train SMALL --device cuda:99", ["cuda:99"]),
    "model": ("train SMALL --model d5", ["'d5'", "tiny"]),
    "model for other data": ("train SMALL --model mlp", ["'mlp'", "tokens"]),
    "images for a transformer": ("train --data digits", ["tiny", "mlp or cnn"]),
    "compiler": ("train SMALL --compile fast", ["'fast'", "inductor"]),
    "norm": ("train SMALL --norm post", ["post", "pre", "peri"]),
    "activation": ("train SMALL --activation relu6", ["relu6", "gelu", "swiglu"]),
    "heads": ("train SMALL --channels 30 --heads 4", ["30", "4"]),
    "rope with odd heads": ("train SMALL --channels 6 --heads 2 --position rope", ["rope"]),
    "context beyond the data": ("train SMALL --context 1000000", ["1000001", "use a shorter context"]),
    "steps 0": ("train SMALL --steps 0", ["steps=0", "at least 1"]),
    "steps -3": ("train SMALL --steps -3", ["steps=-3", "at least 1"]),
    "steps as text": ("train SMALL --steps many", ["'many'", "--steps"]),
    "steps with a fraction": ("train SMALL --steps 1.5", ["'1.5'", "--steps"]),
    "no value": ("train SMALL --steps", ["--steps", "argument"]),
    "batch 0": ("train SMALL --batch 0", ["batch=0", "at least 1"]),
    "batch beyond the data": ("train SMALL --batch 100000", ["100000", "use a smaller batch"]),
    "accumulation beyond the data": ("train SMALL --accumulate 100000", ["400000", "use a smaller batch"]),
    "accumulate 0": ("train SMALL --accumulate 0", ["accumulate=0"]),
    "lr nan": ("train SMALL --lr nan", ["lr=nan", "number"]),
    "lr below 0": ("train SMALL --lr -1", ["lr=-1", "at least 0"]),
    "beta 1": ("train SMALL --beta1 1", ["beta1=1", "below 1"]),
    "dropout 1": ("train SMALL --dropout 1", ["dropout"]),
    "seed": ("train SMALL --seed 4294967296", ["seed=4294967296", "2^32"]),
    "negative seed": ("train SMALL --seed -1", ["seed=-1"]),
    "outlier threshold": ("train SMALL --skip-loss-z 100", ["100", "never"]),
    "tokenizer": ("train SMALL --tokenizer word", ["'word'", "byte, bpe"]),
    "limit": ("train SMALL --limit 3", ["3 bytes", "1000"]),
    "two recipes": ("train a.toml b.toml", ["b.toml"]),
    "missing data": ("train --data nothing/here", ["nothing/here", "no such file or folder"]),
    "missing recipe": ("train missing.toml", ["missing.toml", "no such recipe", "--print-config"]),
    "no profile": ("compare SMALL --profiles ,", ["at least one profile"]),
    "profile twice": ("compare SMALL --profiles f32,f32", ["'f32' takes part twice"]),
    "unknown contender": ("compare SMALL --profiles f32,f61", ["'f61'", "Did you mean 'f16'"]),
    "amp format": ("compare SMALL --profiles f32,torch_amp:f64", ["torch_amp:f64", "torch_amp:f16"]),
    "bands": ("compare SMALL --bands -1", ["--bands", "-1"]),
    "demo steps": ("demo --steps 0", ["steps=0"]),
    "demo device": ("demo --device tpu", ["'tpu'"]),
    "data without names": ("data", ["SOURCE and OUT", "--check"]),
    "data without OUT": ("data TEXT", ["SOURCE and OUT"]),
    "data that is not there": ("data nothing out", ["nothing", "no such file or folder"]),
    "data tokenizer": ("data TEXT out --tokenizer word", ["'word'", "byte, bpe"]),
    "bpe too small": ("data TEXT out --tokenizer bpe --vocab-size 10", ["257", "10"]),
    "data limit": ("data TEXT out --limit 0", ["limit", "at least 1", "0"]),
    "check of nothing": ("data --check nothing.bin --vocab-size 10", ["nothing.bin", "no file"]),
    "check without vocabulary": ("data --check TEXT", ["--vocab-size"]),
    "check and make": ("data TEXT out --check x", ["--check takes no SOURCE"]),
    "check of a text": ("data --check TEXT --vocab-size 10", ["text.txt", "magic", "looks like text"]),
    "report of nothing": ("report nothing", ["nothing", "no run log"]),
    "report of a text": ("report TEXT", ["text.txt", "not a run log"]),
    "report without name": ("report", ["RUN"]),
}


@pytest.mark.parametrize("line, words", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(shell, tmp_path, line, words):
    said = complaint(shell(line))
    assert all(word in said for word in words), said
    assert list(tmp_path.iterdir()) == [], "something was written"


RECIPES = {
    "typo": ("[run]\nstepz = 3\n", ["'stepz'", "Did you mean 'steps'"]),
    "section": ("[rum]\nsteps = 3\n", ["'rum'", "Did you mean 'run'"]),
    "type": ('[run]\nsteps = "3"\n', ["steps='3'", "int"]),
    "bool": ("[run]\nsteps = true\n", ["steps=True", "int"]),
    "not a table": ("run = 3\n", ["[run]", "table"]),
    "value": ("[run]\nsteps = 0\n", ["steps=0", "at least 1"]),
    "profile": ('profile = "f61"\n', ["'f61'"]),
    "profile slot": ('[profile]\ncomputte = "f16"\n', ["'computte'"]),
    "profile type": ("profile = 3\n", ["profile", "3"]),
    "not TOML": ("steps: 3\n", ["not TOML"]),
    "binary": ("\0\1\2", ["not TOML"]),
}


@pytest.mark.parametrize("content, words", RECIPES.values(), ids=RECIPES)
def test_wrong_recipes_are_named(shell, tmp_path, content, words):
    (tmp_path / "recipe.toml").write_text(content)
    said = complaint(shell("train recipe.toml"))
    assert "recipe.toml" in said and all(word in said for word in words), said
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.toml"]


def test_a_folder_or_bytes_are_no_recipe(shell, tmp_path):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    assert "folder.toml" in complaint(shell("train folder.toml"))
    assert "not TOML" in complaint(shell("train latin.toml"))


def make_bad_texts(folder):
    """Files and folders that hold no text."""
    (folder / "empty.txt").write_bytes(b"")
    (folder / "binary.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "latin.txt").write_bytes("é\n".encode("latin-1") * 3000)
    (folder / "short.txt").write_text("a\n")
    (folder / "nothing").mkdir()
    (folder / "hidden").mkdir()
    (folder / "hidden" / ".git").write_text("text\n" * 1000)


@pytest.mark.parametrize("name, words", [("empty.txt", ["empty (0 bytes)"]), ("binary.bin", ["byte 0", "NUL"]),
                                         ("latin.txt", ["byte 0", "0xe9", "UTF-8"]), ("short.txt", ["too little text"]),
                                         ("nothing", ["holds no files"]), ("hidden", ["holds no files"])])
@pytest.mark.parametrize("line", ["train {} --limit 0 --out run", "data {} run"], ids=["train", "data"])
def test_what_is_no_text_is_named(shell, tmp_path, line, name, words):
    make_bad_texts(tmp_path)
    said = complaint(shell(line.format(f"--data {name}" if line.startswith("train") else name)))
    assert name in said and all(word in said for word in words), said
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- data
def test_data_makes_what_train_reads(shell, tmp_path):
    made = shell("data TEXT shards")
    assert made.exit_code == 0 and "encoding 100 %" in made.stdout and "257" in made.stdout
    assert shell("data --check shards").stdout.count("every id is good") == 2
    assert shell(f"train --data shards {SHAPE} --out run").exit_code == 0


def test_data_with_a_trained_vocabulary(shell, tmp_path):
    assert "300" in shell("data TEXT shards --tokenizer bpe --vocab-size 300").stdout
    assert shell("data --check shards/*train*.bin --vocab-size 300").exit_code == 0
    assert "vocabulary" in complaint(shell("data --check shards/*train*.bin --vocab-size 250"))


def damaged(folder, how):
    """The training shard of a prepared folder, with a fault."""
    [shard] = sorted(folder.glob("*train*.bin"))
    content = bytearray(shard.read_bytes())
    if how == "cut": content = content[:-1000]
    if how == "odd": content = content[:-1]
    if how == "magic": content[0] ^= 1
    if how == "empty": content = content[:0]
    if how == "header": content = content[:100]
    if how == "id": content[1024 + 2 * 77: 1024 + 2 * 77 + 2] = (257).to_bytes(2, "little")
    if how == "other": content[1024 + 2 * 77] ^= 1
    shard.write_bytes(content)
    return shard.name


@pytest.mark.parametrize("how, words", [("cut", ["bytes", "missing"]), ("odd", ["bytes"]), ("magic", ["magic", "20240520"]),
                                        ("empty", ["0 bytes"]), ("header", ["100 bytes", "1024"]),
                                        ("id", ["token 77", "257", "0..256"]), ("other", ["SHA-256"])])
def test_damaged_shards_are_named_before_the_start(shell, tmp_path, how, words):
    shell("data TEXT shards")
    name = damaged(tmp_path / "shards", how)
    for line in (f"train --data shards {SHAPE} --out run", "data --check shards"):
        said = complaint(shell(line))
        assert all(word in said for word in words) and (name in said or how == "other"), said
    assert not (tmp_path / "run").exists()


def test_ids_at_the_edge_of_the_vocabulary(shell, tmp_path):
    write_shard(tmp_path / "good.bin", [0, 50256, 1])
    write_shard(tmp_path / "bad.bin", [0, 1, 50257])
    assert shell("data --check good.bin --vocab-size 50257").exit_code == 0
    said = complaint(shell("data --check bad.bin --vocab-size 50257"))
    assert "bad.bin" in said and "token 2" in said and "50257" in said


def test_data_into_a_file_is_refused(shell, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file" in complaint(shell("data TEXT file"))
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------- a run
def test_a_run_leaves_recipe_and_log(shell, tmp_path):
    done = shell("train SMALL --f16 --eval-every 2 --sample-every 4 --sample-tokens 3 --out run")
    assert done.exit_code == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 4 and sum(line.startswith("eval ") for line in lines) == 3
    assert sum(line.startswith("text ") for line in lines) == 1 and "scale 65536" in done.stdout
    assert "finished after 4 steps" in done.stdout
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        assert log.status().status == "finished" and log.steps()["step"] == [0, 1, 2, 3]
        assert log.evals()["step"] == [0, 2, 4] and len(log.samples()["text"]) == 1
        assert len(log.casts(3)) > 0 and log.sessions()[0]["versions"]["f16lab"] == __version__
        logged = from_dict(log.sessions()[0]["config"])
    assert logged == from_dict(tomllib.loads((tmp_path / "run" / "recipe.toml").read_text()))
    assert logged.profile == PRESETS["f16"]


def test_the_same_recipe_gives_the_same_losses(shell, tmp_path):
    first = shell("train SMALL --bf16-sr --out a").stdout
    second = shell("train a/recipe.toml --out b").stdout
    losses = [[line.split("norm")[0] for line in out.splitlines() if line.startswith("step")] for out in (first, second)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize("folder", ["runs", "data/runs"])
def test_runs_get_a_folder_by_time_and_profile(shell, tmp_path, folder):
    if folder == "data/runs":
        (tmp_path / "data").mkdir()
    assert shell("train SMALL --all-f16 --steps 1").exit_code == shell("train SMALL --all-f16 --steps 1").exit_code == 0
    names = sorted(p.name for p in (tmp_path / folder).iterdir())
    assert len(names) == 2 and all("-all_f16" in name for name in names)


def test_images_train_too(shell, tmp_path):
    pytest.importorskip("sklearn")
    assert "mlp" in shell("train --data digits --model mlp --f16 --steps 2 --out run").stdout


def test_lines_at_an_interval(shell):
    done = shell("train SMALL --steps 9 --every 4 --out run")
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == ["1/9", "4/9", "8/9", "9/9"]


HOPELESS = "train SMALL --profile f16,loss_scale=none --lr 1e18 --clip 0 --steps 60 --every 60 --out run"


def test_twenty_bad_steps_fail_with_a_readable_log(shell, tmp_path):
    done = shell(HOPELESS)
    said = complaint(done, 1)
    assert "20 steps in a row had a non-finite gradient" in said and "blocks.0" in said or "wte" in said or "ln_f" in said
    assert done.stdout.count("skipped: non-finite") >= 19
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        status = log.status()
        assert status.status == "failed" and "20 steps in a row" in status.message and status.step >= 19


def test_debug_shows_the_traceback(shell):
    assert "Traceback" not in shell("train SMALL --steps 0").stderr
    assert "Traceback" in shell("train SMALL --steps 0 --debug").stderr


def test_a_fault_of_the_program_is_one_line_too(shell, monkeypatch):
    def fall(*args, **more): raise ZeroDivisionError("division by zero")
    monkeypatch.setattr("f16lab.running.train_run", fall)
    said = complaint(shell("train SMALL"), 1)
    assert "ZeroDivisionError" in said and "--debug" in said


def test_settings_without_effect_are_one_line_warnings(shell):
    done = shell("train SMALL --precision-accum f16 --print-config")
    assert done.exit_code == 0 and done.stderr.startswith("warning: accum=f16 has no effect")
    assert done.stderr.count("\n") == 1


# ---------------------------------------------------------------- folders
@pytest.mark.parametrize("verb", ["train", "compare --profiles f32,f16"])
def test_a_folder_takes_one_run(shell, tmp_path, verb):
    assert shell("train SMALL --out run").exit_code == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    assert "holds a run already" in complaint(shell(f"{verb} SMALL --out run"))
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("out", ["file", "file/below", "/dev/null/run"])
@pytest.mark.parametrize("verb", ["train", "compare --profiles f32"])
def test_a_file_is_no_folder(shell, tmp_path, verb, out):
    (tmp_path / "file").write_text("mine")
    assert "file" in complaint(shell(f"{verb} SMALL --out {out}"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_in_use_is_refused(shell, tmp_path):
    with RunLog(tmp_path / "run" / "run.sqlite"):
        assert "alive" in complaint(shell("train SMALL --out run"))
        assert "alive" in complaint(shell("compare SMALL --profiles f32 --out run"))


def test_a_place_without_permission_is_refused(shell, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert "no permission" in complaint(shell("train SMALL --out run"))


# ---------------------------------------------------------------- compare, demo, report, doctor
def test_compare_judges_and_reports(shell, tmp_path):
    done = shell("compare SMALL --profiles f32,f16,torch_amp --profile mine:bf16,master=none --eval-every 2 --out out")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/4", "2/4", "3/4", "4/4"]
    assert all(name in next(line for line in lines if line.startswith("step ")) for name in ("f32", "f16", "torch_amp", "mine"))
    rows = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert {"profile", "f32", "f16", "torch_amp", "mine"} <= rows.keys()
    names = sorted(p.name for p in (tmp_path / "out").glob("*.sqlite"))
    assert names == ["00_f32.sqlite", "01_f16.sqlite", "02_torch_amp.sqlite", "03_mine.sqlite"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "torch_amp" in page and "out/report.html" in done.stdout
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["reference"] == "f32"


def test_compare_with_bands_gives_verdicts(shell):
    done = shell("compare SMALL --steps 8 --profiles f32,f16 --bands 1 --out out")
    assert done.exit_code == 0 and ("inside noise" in done.stdout or "leaves the band" in done.stdout), done.stdout


def test_a_contender_that_fails_fails_alone(shell):
    done = shell("compare SMALL --steps 25 --profiles f32 --profile hot:all_f16,state_scale=none,loss_scale=2^40 --out out")
    assert done.exit_code == 0 and "hot: failed at step" in done.stdout
    done = shell("compare SMALL --steps 25 --profiles , --profile hot:all_f16,state_scale=none,loss_scale=2^40 --out other")
    assert done.exit_code == 1


def test_demo_is_a_comparison(shell, tmp_path):
    done = shell("demo --steps 1 --profiles f32,f16 --out out")
    assert done.exit_code == 0 and (tmp_path / "out" / "report.html").exists()


def test_report_of_a_run_and_of_a_comparison(shell, tmp_path):
    shell("train SMALL --f16 --out run")
    shell("compare SMALL --profiles f32,f16 --out both")
    (tmp_path / "both" / "report.html").unlink()
    for run, page in (("run", "run/report.html"), ("run/run.sqlite", "run/run.html"), ("both", "both/report.html")):
        done = shell(f"report {run}")
        assert done.exit_code == 0 and page in done.stdout and (tmp_path / page).stat().st_size > 1000
    assert shell("report run --out elsewhere/page.html").exit_code == 0 and (tmp_path / "elsewhere" / "page.html").exists()


def test_report_of_foreign_and_empty_files(shell, tmp_path):
    (tmp_path / "empty.sqlite").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    assert "empty.sqlite is empty" in complaint(shell("report empty.sqlite"))
    assert "no run log" in complaint(shell("report folder"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.sqlite", "folder"]


def test_report_of_a_run_that_took_no_step(shell, tmp_path):
    with RunLog(tmp_path / "run.sqlite"):
        pass
    assert shell("report run.sqlite").exit_code == 0


def test_doctor(shell):
    table, plain = shell("doctor"), json.loads(shell("doctor --json").stdout)
    assert table.exit_code == 0 and "torch" in table.stdout
    assert all(f["status"] in ("ok", "missing", "problem", "info") for f in plain)
    assert {"python", "torch", "cuda", "cupy"} <= {f["subject"] for f in plain}
