"""Ranks as processes: whatever happens to one of them, all end soon, the first says why, and nothing is left behind."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import repo

from f16lab.config import TrainConfig
from f16lab.runlog import RunReader
from f16lab.train import Trainer

SCRIPT = Path(repo.ROOT) / "tests" / "rank_runs.py"
TRAIN = (
    "train --data markov --device cpu --layers 1 --heads 2 --channels 32 --context 16 --batch 2 --accumulate 4 "
    "--steps 6 "
    "--eval-every 3 --eval-batches 3 --every 1 --dropout 0.1 --profile bf16"
).split()
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # as the launcher sets it: no talk of sockets
    "PYTHONPATH": str(repo.ROOT),
    "COLUMNS": "150",
}
KILLED = """
import sys
from f16lab.launcher import launch_ranks
print(launch_ranks(sys.argv[2:], 2, [sys.executable, sys.argv[1]]))
"""

ENDS = {  # how it goes wrong → exit codes of both ranks, what rank 0 says, how the run log ends
    "freeze": ([1, -9], "rank 1 stopped answering (last heard of in step ", "failed"),
    "hang": (
        [1, 1],
        "rank 1 did not come to the exchange of step 3 within 5 s: it hangs, or is much slower than the others",
        "failed",
    ),
    "raise": ([1, 2], "rank 1 failed in step 3: ValueError: a bad batch", "failed"),
    "midway": ([1, 2], "rank 1 failed in step 3: ValueError: a bad gradient", "failed"),
    "lead": ([1, 1], "the run failed at step 3: ValueError: a bad page", "failed"),
    "short": ([1, 0], "rank 1 ended after 3 steps while others go on", ""),
    "term": ([143, 143], "", "stopped"),
    "tcp": ([0, 0], "", "finished"),
    "fs": ([0, 0], "", "finished"),
    "slow": ([0, 0], "", "finished"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Every process of this file, side by side: name → (process, folder)."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "f16lab-run.rendezvous").write_text('{"host": "x", "machine": "y", "port": 9, "nonce": "old"}')
    words = {
        "cases": [SCRIPT, folder],
        "kill": ["-c", KILLED, SCRIPT, folder, "kill"],
        "nproc": ["-m", "f16lab", *TRAIN, "--nproc", "2", "--zero-stage", "1", "--out", "nproc"],
        "torchrun": [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "-m",
            "f16lab",
            *TRAIN,
            "--out",
            "torchrun",
        ],
    }
    found = {
        name: subprocess.Popen(
            [sys.executable, *map(str, w)],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, w in words.items()
    }
    try:
        yield found, folder
    finally:
        for process in found.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cases(started):
    out, error = started[0]["cases"].communicate(timeout=90)
    assert out, error
    return json.loads(out)


@pytest.mark.parametrize("how", ENDS)
def test_both_ranks_end_soon_by_themselves_and_rank_0_says_why(started, cases, how):
    codes, words, end = ENDS[how]
    found, folder = cases[how], started[1]
    assert found["codes"] == codes and max(found["seconds"]) < 60, found
    assert words in found["said"][0] and found["said"][1] == "" and "Traceback" not in found["said"][0], found["said"]
    assert found["said"][0].count("f16lab:") == bool(words) and found["shown"][1] == ""
    if not end:
        return
    with RunReader(folder / how / "run.sqlite") as log:
        status = log.status()
    assert (
        status.status == end
        and words.removeprefix("the run failed at step 3: ") in status.message
        and not status.live
    ), status
    if how == "term":
        assert status.message == "SIGTERM on rank 1" and status.step in (3, 4)


def test_a_shared_folder_is_clean_afterwards(started, cases):
    assert not list(started[1].glob("*.rendezvous*"))  # the leftover of a dead run was there at the start


def test_a_killed_rank_under_a_launcher(started):
    process, folder = started[0]["kill"], started[1]
    out, error = process.communicate(timeout=90)
    assert out.splitlines()[-1] == "(1, 'rank 1 was ended by SIGKILL')" and process.returncode == 0
    assert error.count("rank 1 stopped answering (last heard of in step ") == 1, error
    with RunReader(folder / "kill" / "run.sqlite") as log:
        assert log.status().status == "failed"


@pytest.mark.parametrize("how", ["nproc", "torchrun"])
def test_the_command_line(started, how):
    """Only rank 0 writes and prints; the first loss is that of one process with the same batches."""
    out, error = started[0][how].communicate(timeout=90)
    folder = started[1] / how
    assert started[0][how].returncode == 0 and out.count("finished after 6 steps") == 1, (out, error)
    assert len(re.findall(r"^step +1/6 ", out, re.M)) == 1 and re.search(
        r"^memory +rank 0 .*, rank 1 \S+ MB$", out, re.M
    )
    assert (
        "stage 1 (each keeps" if how == "nproc" else "stage 0 (all optimizer state on each"
    ) in out and error == ""
    with RunReader(folder / "run.sqlite") as log:
        loss, memory = log.series("loss").values, log.series("rank1.memory").values
        assert log.status().status == "finished" and len(loss) == 6 and memory[-1] > 1e7
    assert {p.name for p in folder.iterdir()} >= {"recipe.toml", "run.sqlite"} and len(
        list(folder.glob("*.sqlite"))
    ) == 1
    config = TrainConfig("bf16").with_(
        data="markov",
        device="cpu",
        layers=1,
        heads=2,
        channels=32,
        context=16,
        batch=2,
        accumulate=4,
        steps=6,
        dropout=0.1,
    )
    assert loss[0] == Trainer(config).step().loss


def test_no_process_is_left(started, cases):
    for process in started[0].values():
        process.wait(timeout=90)
    until = time.monotonic() + 10
    while (left := processes_about(str(started[1]))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def processes_about(text: str) -> list[str]:
    """Command lines that hold `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


@pytest.mark.parametrize(
    "words, said",
    [
        (
            "--nproc 2 --accumulate 3",
            "--accumulate 3 with --nproc 2: the ranks share the micro-batches of a step; give a multiple "
            "of 2, such as --accumulate 4",
        ),
        ("--nproc 0", "--nproc"),
        ("--zero-stage 2", "allowed are 0 and 1, or zero_fallback=true"),
        ("--rendezvous tcp://node1:29500", "needs RANK and WORLD_SIZE"),
        ("--rendezvous ftp://x", "allowed are env, tcp://HOST:PORT, fs:///FOLDER or mpi"),
    ],
)
def test_bad_options_are_said_before_anything_starts(tmp_path, monkeypatch, words, said):
    from click.testing import CliRunner

    from f16lab.cli import command

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(command(), [*TRAIN, "--out", "x", *words.split()])
    assert done.exit_code == 2 and said in done.stderr and not list(tmp_path.iterdir()), done.stderr


def test_zero_fallback_takes_stage_1_and_says_so():
    with pytest.warns(UserWarning, match="zero_stage=3 is not built: stage 1 is used"):
        assert TrainConfig().with_(zero_stage=3, zero_fallback=True).parallel.stage == 1


# ---------------------------------------------------------------- two GPUs
NCCL = """
import sys
from f16lab.config import TrainConfig
from f16lab.rendezvous import joined
from f16lab.train import Trainer
stage, profile, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
c = TrainConfig(profile).with_(data='markov', device='cuda', layers=4, channels=256, heads=4, batch=2, accumulate=4,
                               zero_stage=stage, bucket=1.0, ledger=False)
with joined(device='cuda') as ranks:
    t = Trainer(c, ranks=ranks)
    for _ in range(8): r = t.step()
    said = ranks.texts(t.digest() + f' {r.loss} {r.grad_norm}')
    assert len(set(said)) == 1, said
    if ranks.rank == 0: open(path, 'w').write(said[0])
"""


@pytest.mark.gpu2
@pytest.mark.parametrize("profile", ["f32", "bf16_llmc", "all_f16"])
def test_nccl_replicas_agree_and_both_stages_have_the_same_bits(tmp_path, profile):
    """Two ranks prove nothing about the order of sums; they do about streams, shards and the gather of weights."""
    from f16lab.launcher import launch_ranks

    for name, stage in (("a", 0), ("b", 1), ("c", 1)):
        assert launch_ranks([str(stage), profile, str(tmp_path / name)], 2, [sys.executable, "-c", NCCL]) == (0, "")
    assert len({(tmp_path / name).read_text() for name in "abc"}) == 1
