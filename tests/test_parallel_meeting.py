"""How ranks find each other, what they say when they do not, and how they judge who is at fault."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch.distributed as dist

from f16lab.parallel import Place, RankFailed, Ranks, in_threads
from f16lab.rendezvous import (
    Meeting,
    RendezvousError,
    host_hash,
    joined,
    local_device,
    meet_fs,
    meeting,
    opened,
    place_of,
    rank_and_world,
    roll_call,
)
from f16lab.watch import LOST, Board, Note, Watch, kill_silent, second_store, verdict

TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def soon(seconds: float = 10) -> float:
    return time.monotonic() + seconds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def in_two(work):
    """Results of work(0) and work(1) in two threads, or their errors."""
    out = [None, None]

    def one(rank):
        try:
            out[rank] = work(rank)
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (1, 0)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def meet(rendezvous: str, rank: int, seconds: float = 10, **environ: str):
    """The roll of two ranks, without a process group."""
    store, met = opened(meeting(rendezvous, {**TWO, **environ, "RANK": str(rank)}), soon(seconds))
    try:
        return roll_call(dist.PrefixStore(met.name, store), rank, 2, soon(seconds), f"m{rank}"), store
    finally:
        met.close()


# ---------------------------------------------------------------- who
@pytest.mark.parametrize(
    "environ, found",
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3)),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "5", "SLURM_NTASKS": "9"}, (0, 1)),
    ],
)
def test_rank_and_world(environ, found):
    assert rank_and_world(environ) == found


@pytest.mark.parametrize(
    "environ, said",
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "numbered from 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "at least 1"),
        ({"RANK": "0"}, "one is missing"),
    ],
)
def test_a_wrong_rank_is_told(environ, said):
    with pytest.raises(ValueError, match=said):
        rank_and_world(environ)


@pytest.mark.parametrize(
    "rendezvous, environ, said",
    [
        ("", TWO, "allowed are env"),
        ("tcp", TWO, "allowed are"),
        ("env://x", TWO, "allowed are"),
        ("file:///x", TWO, "allowed are"),
        ("tcp://host", TWO, "HOST:PORT"),
        ("tcp://:1", TWO, "HOST:PORT"),
        ("tcp://host:0", TWO, "HOST:PORT"),
        ("tcp://host:99999", TWO, "HOST:PORT"),
        ("fs:///no/such", TWO, "no folder that can be written"),
        ("env", {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ("env", {**TWO, "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ("tcp://host:1", {}, "needs RANK and WORLD_SIZE"),
        ("fs:///tmp", {}, "needs RANK"),
    ],
)
def test_a_meeting_that_makes_no_sense_is_told(rendezvous, environ, said):
    with pytest.raises(ValueError, match=said):
        meeting(rendezvous, environ)


def test_a_single_process_of_a_batch_job_is_alone_and_its_tasks_can_meet_by_address():
    job = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
    assert meeting("env", job) is None and meeting("tcp://node1:29500", job) == Meeting(1, 4, "node1", 29500)


def test_one_rank_meets_nobody():
    assert meeting("env", {}) is None and meeting("tcp://host:1", {"RANK": "0", "WORLD_SIZE": "1"}) is None


# ---------------------------------------------------------------- where
@pytest.mark.parametrize("way", ["env", "tcp", "fs"])
def test_two_ranks_meet(way, tmp_path):
    port = free_port()
    place = {"env": "env", "tcp": f"tcp://127.0.0.1:{port}", "fs": f"fs://{tmp_path}"}[way]
    for rank, (machines, _) in enumerate(in_two(lambda rank: meet(place, rank, MASTER_PORT=str(port)))):
        assert machines == ["m0", "m1"]
    assert not list(tmp_path.iterdir())


def address(port: int, nonce: str = "n1") -> str:
    """What rank 0 of some run has written."""
    return json.dumps(dict(host="127.0.0.1", machine=socket.gethostname(), port=port, nonce=nonce))


@pytest.mark.parametrize("left", ["", "{", "[]", '{"port": 1}', "dead"])
def test_a_leftover_of_an_earlier_run_is_replaced_and_never_joined(tmp_path, left):
    """Half a file, a file of something else, the address of a dead run."""
    (tmp_path / "f16lab-run.rendezvous").write_text(address(free_port()) if left == "dead" else left)
    for machines, _ in in_two(lambda rank: meet(f"fs://{tmp_path}", rank)):
        assert machines == ["m0", "m1"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("nonce", ["n1", "another"])
def test_a_live_store_behind_a_leftover_is_not_taken_over(tmp_path, nonce):
    """A run that is still gathering there, and a port that has gone to the store of somebody else."""
    file, server = (
        tmp_path / "f16lab-run.rendezvous",
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    )
    server.set("nonce", nonce)
    file.write_text(address(server.port))
    with pytest.raises(ValueError, match="a run is gathering there"):
        meet_fs(str(tmp_path), 0, 2, {})
    assert file.read_text() == address(server.port)
    if nonce == "n1":
        return
    with pytest.raises(RendezvousError, match="found no rank 0"):
        opened(meet_fs(str(tmp_path), 1, 2, {}), soon(0.5))


def test_two_jobs_in_one_folder_do_not_mix(tmp_path):
    found = in_two(lambda job: in_two(lambda rank: meet(f"fs://{tmp_path}", rank, F16LAB_RUN_ID=f"job{job}")))
    ports = [{store.port for _, store in ranks} for ranks in found]
    assert all(len(p) == 1 for p in ports) and ports[0] != ports[1] and not list(tmp_path.iterdir())


def test_a_file_is_removed_when_nobody_comes(tmp_path):
    with pytest.raises(RendezvousError, match="1 of 2 ranks came in time; missing rank 1"):
        meet(f"fs://{tmp_path}", 0, 0.3)
    assert not list(tmp_path.iterdir())


def test_a_missing_rank_0_and_a_taken_port_are_told():
    port = free_port()
    with pytest.raises(RendezvousError, match=f"rank 1 found no rank 0 at 127.0.0.1:{port}"):
        meet(f"tcp://127.0.0.1:{port}", 1, 0.3)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = s.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"cannot listen on 127.0.0.1:{taken}"):
            meet(f"tcp://127.0.0.1:{taken}", 0, 0.3)


def test_a_place_is_taken_once():
    """A second process of the same rank, or one that meets an earlier run's store, is refused."""
    store = dist.HashStore()
    in_two(lambda rank: roll_call(store, rank, 2, soon()))
    with pytest.raises(RendezvousError, match="two processes are rank 1"):
        roll_call(store, 1, 2, soon())


# ---------------------------------------------------------------- MPI
def test_mpi_is_optional_and_its_absence_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="pip install mpi4py, or use env, tcp"):
        meeting("mpi", {})


def test_mpi_tells_rank_size_and_address(monkeypatch):
    """With a stand-in whose broadcast goes through a queue; asked twice, it is called once."""
    letters, calls, who = [], [], threading.local()

    class Comm:
        def Get_rank(self):
            return who.rank

        def Get_size(self):
            return 2

        def bcast(self, value):
            calls.append(who.rank)
            if who.rank == 0:
                letters.append(("127.0.0.1", value[1]))
            while not letters:
                time.sleep(0.01)
            return letters[0]

    module = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(COMM_WORLD=Comm())
    monkeypatch.setitem(sys.modules, "mpi4py", module)

    def work(rank):
        who.rank = rank
        return meet("mpi", rank)[0]

    assert in_two(work) == [["m0", "m1"]] * 2 and sorted(calls) == [0, 1]


def test_local_ranks_by_the_hash_of_the_machine():
    h = 5381
    for c in b"node1":
        h = (33 * h ^ c) & (2**64 - 1)
    assert host_hash("node1.cluster.org") == host_hash("node1") == h != host_hash("node2")
    machines = ["a.x", "b.x", "a.y", "b.x", "a"]
    assert [place_of(r, machines, {}) for r in range(5)] == [
        Place(0, 5, 0, 3),
        Place(1, 5, 0, 2),
        Place(2, 5, 1, 3),
        Place(3, 5, 1, 2),
        Place(4, 5, 2, 3),
    ]
    assert place_of(0, machines, {"LOCAL_RANK": "1"}).local_rank == 1


def test_each_rank_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert local_device("auto", Place(3, 4, 1, 2)) == local_device("cuda", Place(3, 4, 1, 2)) == "cuda:1"
    assert local_device("cpu", Place(3, 4, 1, 2)) == "cpu" and local_device("cuda:1", Place()) == "cuda:1"
    with pytest.raises(ValueError, match="number 2 on its machine, which has 2 GPUs"):
        local_device("cuda", Place(2, 4, 2, 3))
    with pytest.raises(ValueError, match="each rank takes the GPU of its own number"):
        local_device("cuda:0", Place(0, 2, 0, 2))


# ---------------------------------------------------------------- who is at fault
def note(rank, doing="computes", step=3, seconds=0.5, age=0.5):
    return Note(rank, doing, step, seconds, 1000.0 - age)


@pytest.mark.parametrize(
    "notes, broken, said",
    [
        ([note(0), note(1), note(2)], False, ""),
        (
            [note(0, "waits", seconds=39), note(1, seconds=60), note(2, "waits", seconds=39)],
            False,
            "",
        ),  # slow, not too slow
        (
            [note(0, "waits", seconds=41), note(1, seconds=60), note(2, "waits", seconds=41)],
            False,
            "rank 1 did not come",
        ),
        ([note(0), note(1, seconds=500), note(2)], False, ""),  # nobody waits for it
        ([note(0), note(1, age=LOST + 1), note(2)], False, ""),  # late notes alone prove nothing
        ([note(0), note(1, age=LOST + 1), note(2)], True, "rank 1 stopped answering"),
        ([note(0), note(1, age=41), note(2)], False, "rank 1 stopped answering"),
        ([note(0), note(1, "left", step=2, age=500), note(2)], False, ""),
        (
            [note(0, "waits", seconds=LOST + 1), note(1, "left", step=2, age=500), note(2)],
            False,
            "rank 1 ended after 2 steps",
        ),
        ([note(0), note(1, "left", step=2, age=500), note(2)], True, "rank 1 ended after 2 steps"),
        (
            [note(0, "waits", seconds=41), note(1, "waits", seconds=45), note(2, "waits", seconds=44)],
            False,
            "all ranks wait for each other",
        ),
        (
            [note(0, "waits", seconds=41), note(1, "waits", age=5), note(2, "waits", seconds=44)],
            False,
            "",
        ),  # it may be dead
        ([note(0, age=500), note(1), note(2)], False, ""),  # one's own age is no matter
    ],
)
def test_verdicts(notes, broken, said):
    words = verdict(0, notes, 1000.0, 40.0, broken)
    assert words.startswith(said) and bool(words) is bool(said)


def test_the_first_failure_is_everyones():
    store = dist.HashStore()
    watches = [Watch(store, rank, 3, interval=0.05) for rank in range(3)]
    for w in watches:
        w.note()
    watches[2].mark(7)
    watches[2].fail(OSError("disk full"))
    watches[1].fail(RuntimeError("connection closed"))
    watches[0].fail(RankFailed("a consequence"))
    assert {w.judge() for w in watches} == {"rank 2 failed in step 7: OSError: disk full"}


def test_waits_are_held_to_the_longer_time_out_until_the_first_step_is_done():
    w = Watch(dist.HashStore(), 0, 2, timeout=1, start=100)
    Board(w.board.store, 1, 2).write("computes", 0, time.monotonic() - 50)
    w.state = ("waits", 0, time.monotonic() - 50)
    assert w.judge() == ""
    w.mark(0)
    w.state = ("waits", 0, time.monotonic() - 50)
    assert w.judge() == ""
    w.mark(1)
    w.state = ("waits", 1, time.monotonic() - 50)
    Board(w.board.store, 1, 2).write("computes", 1, time.monotonic() - 50)
    assert "rank 1 did not come to the exchange of step 1 within 1 s" in w.judge()


def test_only_silent_processes_of_this_machine_are_killed():
    board, now, killed = Board(dist.HashStore(), 0, 5), time.monotonic(), []
    here = board.process[0]
    notes = [
        Note(0, "waits", 1, 0, now - 99, (here, 10)),
        Note(1, "computes", 1, 0, now - 99, (here, 11)),
        Note(2, "computes", 1, 0, now, (here, 12)),
        Note(3, "left", 1, 0, now - 99, (here, 13)),
        Note(4, "computes", 1, 0, now - 99, ("elsewhere", 14)),
    ]
    kill_silent(notes, board, 40, lambda pid, sig: killed.append(pid))
    assert killed == [11]


def test_an_orphan_ends_by_itself(tmp_path):
    """A rank whose launcher dies ends within seconds, with words on its standard error."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, sys, time\nimport torch.distributed as dist\nfrom f16lab.watch import Watch\n"
        "w = Watch(dist.HashStore(), 0, 1, interval=0.1, grace=0.1, parent=os.getppid())\n"
        "w.last_words = lambda words: open(sys.argv[1], 'w').write(words)\nw.start()\n"
        "open(sys.argv[1] + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    said = tmp_path / "said"
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])",
            str(child),
            str(said),
        ],
        cwd=Path(__file__).parent.parent,
        start_new_session=True,
    )
    pid, until = Path(f"{said}.pid"), soon(30)
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    until = soon(15)
    while not said.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert said.read_text() == "the launcher is gone"
    while os.path.exists(f"/proc/{pid.read_text()}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid.read_text()}")


def test_a_watch_of_its_own_connection_hears_of_a_store_that_is_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    w = Watch(second_store("127.0.0.1", server.port, "x", 5), 1, 2, interval=0.05)
    w.note()
    del server
    assert "the store where the ranks meet is gone" in str(w.explain(RuntimeError("reset")))


def test_alone_everything_is_quiet():
    with joined(environ={}) as ranks:
        assert ranks.world == 1 and type(ranks.watch).__name__ == "Unwatched"
    assert str(Ranks().watch.explain(RuntimeError("x"))) and in_threads(1, lambda r: r.rows([2.0])) == [[[2.0]]]


def test_a_meeting_that_fails_is_one_sentence_from_the_shell():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        there = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
        words = [sys.executable, "-m", "f16lab", "train", "--data", "markov", "--steps", "2", "--start-timeout", "2"]
        done = subprocess.run(words, env={**os.environ, **there}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("f16lab: rank 0 cannot listen on") and done.stderr.count("\n") == 1
