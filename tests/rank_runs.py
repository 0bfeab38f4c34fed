"""Runs on two ranks of which one goes wrong, each in its own way, all side by side: `python tests/rank_runs.py FOLDER`.

One process imports everything and then forks the ranks, since importing torch in each would take longer than the runs.
There is no launcher here: what ends the ranks are the ranks. `python tests/rank_runs.py FOLDER HOW` is one rank of the
case HOW, for a launcher. Prints JSON: for each case exit codes, seconds, and what each rank wrote to standard error."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from train_runs import small, source

import f16lab.train as engine
from f16lab.cli import run_command
from f16lab.rendezvous import joined
from f16lab.running import train_run

AT = 3  # the rank at fault is rank 1 (rank 0 in `lead`), in step 3
TIMEOUT = 5.0  # seconds
CASES = ("freeze", "hang", "raise", "midway", "lead", "short", "term", "tcp", "fs", "slow")


def spoil(grad: torch.Tensor) -> None:
    raise ValueError("a bad gradient")


def fault(how: str, rank: int, trainer: engine.Trainer) -> None:
    """What happens to a rank in step 3."""
    me = os.getpid()
    if how == "midway":  # rank 1 fails in backward while buckets of the last layers wait for rank 0
        if rank == 0:
            time.sleep(1)
        else:
            trainer.optimizer.params["wte.weight"].register_hook(spoil)
    if rank == 0 and how == "lead":
        raise ValueError("a bad page")
    if rank == 0:
        return
    if how in ("kill", "freeze", "term"):
        os.kill(me, {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM}[how])
    if how == "raise":
        raise ValueError("a bad batch")
    if how == "slow":
        time.sleep(TIMEOUT / 2)  # late, but it comes
    while how == "hang":
        pass


def train(how: str, folder: str) -> int:
    """A run into a folder, as the command line makes it."""
    rank, accumulate = int(os.environ["RANK"]), engine.accumulate

    def faulty(trainer):
        if trainer.step_number == AT:
            fault(how, rank, trainer)
        return accumulate(trainer)

    engine.accumulate = faulty
    steps = 6 if how in ("tcp", "fs", "slow") else 100_000
    place = {"tcp": f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", "fs": f"fs://{Path(folder).parent}"}.get(
        how, "env"
    )
    config = small(
        batch=1,
        accumulate=2,
        steps=steps,
        zero_stage=1,
        timeout=TIMEOUT,
        ledger=False,
        meters_every=0,
        rendezvous=place,
        layers=3,
        bucket=0.01,
    )
    return train_run(config, Path(folder), Console(width=150, highlight=False), every=100_000)


def loop() -> int:
    """Somebody's own loop, in which rank 1 has fewer batches."""
    with joined(timeout=TIMEOUT) as ranks:
        for step in range(AT if ranks.rank == 1 else AT + 2):
            ranks.watch.mark(step + 1)
            ranks.rows([step])
    return 0


def one_rank(how: str, folder: str) -> int:
    """The exit code of one rank."""
    return run_command(lambda *args, **more: loop() if how == "short" else train(how, folder), [])


def forked(how: str, rank: int, port: int, folder: Path) -> int:
    """Start a rank whose standard error is a file; its process number."""
    if pid := os.fork():
        return pid
    try:
        os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        for number, name in ((1, "out"), (2, "error")):
            os.dup2(os.open(folder / f"{how}.{name}{rank}", os.O_WRONLY | os.O_CREAT), number)
        code = one_rank(how, str(folder / how))
        sys.stdout.flush()
        os._exit(code)
    finally:
        os._exit(99)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def side_by_side(folder: Path) -> dict[str, dict]:
    """All cases; ranks that are still there after 60 s are killed and have the code None."""
    start = time.monotonic()
    ranks = {
        forked(how, rank, port, folder): (how, rank) for how in CASES for port in [free_port()] for rank in (0, 1)
    }
    codes, seconds = dict.fromkeys(ranks), {}
    while None in codes.values() and time.monotonic() - start < 60:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in codes:
            codes[pid], seconds[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - start
        if not pid:
            time.sleep(0.02)
    for pid, code in codes.items():
        if code is None:
            os.kill(pid, signal.SIGKILL)
    out = {how: dict(codes=[None, None], seconds=[60, 60], said=["", ""], shown=["", ""]) for how in CASES}
    for pid, (how, rank) in ranks.items():
        out[how]["codes"][rank], out[how]["seconds"][rank] = codes[pid], seconds.get(pid, 60)
        out[how]["said"][rank] = (folder / f"{how}.error{rank}").read_text()
        out[how]["shown"][rank] = (folder / f"{how}.out{rank}").read_text()
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        sys.exit(one_rank(sys.argv[2], str(Path(sys.argv[1]) / sys.argv[2])))
    source()
    print(json.dumps(side_by_side(Path(sys.argv[1]))))
