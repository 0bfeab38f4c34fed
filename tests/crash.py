"""Kill −9 at random moments of training and of saving, go on, and compare every bit with the run that was not killed.

    python tests/crash.py --kills 200 [--seconds 600] [--seed 0] [--profiles f16,bf16,all_f16]

Each run trains a tiny model in a forked child, with a checkpoint after every few steps. Half of the kills come after a
random time, wherever the child then is; the other half from within, before a random step of a save (a piece of a file,
a force to disk, a rename). After each kill the newest checkpoint must be intact and hold the bits of the unbroken run
after as many steps, and the run log must hold each step up to it once. Nothing here needs pytest.
"""
import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from train_runs import RICH, load, rich_source, save, small  # noqa: E402

from f16lab import checkpoint  # noqa: E402
from f16lab.checkpoint import done_steps, newest, step_of  # noqa: E402
from f16lab.keeping import Keeper
from f16lab.resume import resume  # noqa: E402
from f16lab.runlog import RunReader  # noqa: E402
from f16lab.running import LOG, begin, follow, opened_log  # noqa: E402
from f16lab.snapshot import read_saved  # noqa: E402
from f16lab.state import State, digest, tensor_bytes  # noqa: E402
from f16lab.train import Trainer, evaluate  # noqa: E402

STEPS, SAVE_EVERY, EVAL_EVERY = 40, 3, 5
PROFILES = ("f16", "bf16", "all_f16")


def made(profile: str) -> Trainer:
    """The run: dropout, two micro-steps, short epochs, windows that are soon full, a loss scale that soon changes."""
    changes = {**RICH, "steps": STEPS, "eval_every": EVAL_EVERY, "save_every": SAVE_EVERY}
    t = Trainer(small(profile, **changes), rich_source())
    short = {name: replace(getattr(t.gate, name), window=4) for name in ("loss_outlier", "norm_outlier")}
    t.gate = replace(t.gate, **short, loss_scale=replace(t.gate.loss_scale, interval=4))
    return t


# ---------------------------------------------------------------- children
def in_child(work: Callable[[], None]) -> int:
    """Fork a process that does `work` and ends; its id. (This process takes no backward pass, so that children can.)"""
    sys.stdout.flush()
    if pid := os.fork(): return pid
    code = 1
    try:
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def reference(folder: Path, profile: str) -> None:
    """The unbroken run: its state after each step as files, its losses, its evaluations."""
    t, rows, evals = made(profile), [], {0: evaluate(made(profile)).loss}
    for step in range(STEPS + 1):
        save(t.state(), folder, str(step))
        if step == STEPS: break
        record = t.step()
        rows.append([record.loss, record.grad_norm, record.loss_scale, record.skipped, record.lr])
        if t.step_number % EVAL_EVERY == 0: evals[t.step_number] = evaluate(t).loss
    (folder / "log.json").write_text(json.dumps([rows, evals]), encoding="utf-8")


def go_on(folder: Path, profile: str, ready: int, kill_after: int) -> None:
    """Train to the end from what is in the folder; kill this process at its operation on files number `kill_after`."""
    if kill_after: kill_within_saves(kill_after)
    t = made(profile)
    resumed = resume(t, folder)
    with opened_log(folder, t.config, going_on=True) as log:
        os.write(ready, b"x")
        begin(t, folder, log, resumed)
        for _ in follow(t, log, Keeper(t, folder)): pass
        t.saver.close()


def kill_within_saves(countdown: int) -> None:
    """From now on each piece of a file, each force to disk and each rename counts; the last one is not done."""
    left = [countdown]

    def count() -> None:
        left[0] -= 1
        if left[0] <= 0: os.kill(os.getpid(), signal.SIGKILL)

    def counted(f: Callable) -> Callable:
        def call(*args, **more):
            count()
            return f(*args, **more)
        return call

    class Os:
        fsync, replace = staticmethod(counted(os.fsync)), staticmethod(counted(os.replace))
        def __getattr__(self, name: str): return getattr(os, name)
    checkpoint.os = Os()
    checkpoint.byte_view = counted(checkpoint.byte_view)


# ---------------------------------------------------------------- what must hold after each kill
@dataclass
class Tally:
    """What was seen so far."""

    kills: int = 0
    ends: int = 0              # runs that came to their end
    bits: int = 0              # differing bits, over all comparisons
    compared: int = 0          # states that were compared
    where: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def words(self) -> str:
        where = ", ".join(f"{n} {name}" for name, n in sorted(self.where.items()))
        return (f"{self.kills} kills ({where}), {self.ends} runs finished, {self.compared} states compared, "
                f"{self.bits} differing bits, {len(self.wrong)} faults")


def differing_bits(a: State, b: State) -> int:
    """Bits in which two states differ; whole tensors that only one has count in full, other values as 1."""
    bits = 0
    for name in {**a.tensors, **b.tensors}:
        x, y = (tensor_bytes(s.tensors[name]) if name in s.tensors else b"" for s in (a, b))
        if len(x) != len(y): bits += 8 * max(len(x), len(y))
        else: bits += (int.from_bytes(x, "little") ^ int.from_bytes(y, "little")).bit_count()
    values = [{k: v for k, v in json.loads(json.dumps(s.values)).items() if k != "times"} for s in (a, b)]
    return bits + sum(values[0].get(k) != values[1].get(k) for k in {**values[0], **values[1]})


def check_log(folder: Path, known: Path, at: int, tally: Tally) -> None:
    """Each step once, with the numbers of the unbroken run, and all up to the checkpoint."""
    if not (folder / LOG).exists(): return
    rows, evals = json.loads((known / "log.json").read_text(encoding="utf-8"))
    with RunReader(folder / LOG) as reader:
        found, evaluated = reader.steps(), reader.evals()
    if found["step"] != list(range(len(found["step"]))): tally.wrong.append(f"steps in the log: {found['step']}")
    if len(found["step"]) < at: tally.wrong.append(f"the log has {len(found['step'])} steps, the checkpoint {at}")
    names = ("loss", "grad_norm", "loss_scale", "skipped", "lr")
    seen = [[float(found[name][i]) for name in names] for i in range(len(found["step"]))]  # text: NaN equals NaN
    other = [i for i, (a, b) in enumerate(zip(seen, rows)) if json.dumps(a) != json.dumps(list(map(float, b)))]
    if other: tally.wrong.append(f"the log of step {other[0]} is {seen[other[0]]}, not {rows[other[0]]}")
    due = [step for step in range(0, at + 1, EVAL_EVERY)] if at else []
    if missing := set(due) - set(evaluated["step"]): tally.wrong.append(f"evaluations {missing} are missing at {at}")
    for step, loss in zip(evaluated["step"], evaluated["loss"]):
        if loss != evals[str(step)]: tally.wrong.append(f"evaluation {step} is {loss}, not {evals[str(step)]}")


def check(folder: Path, known: Path, before: int, tally: Tally) -> int:
    """The step of the newest checkpoint, after all that must hold was checked."""
    found, refused = newest(folder)
    at = found.step if found else 0
    if refused: tally.wrong.append(f"a kill damaged a finished checkpoint: {refused}")
    if at < before: tally.wrong.append(f"checkpoint {before} was there and is gone, the newest is {at}")
    if found:
        saved, whole = read_saved(found).state, load(known, str(at))
        bits = differing_bits(saved, whole)
        tally.compared, tally.bits = tally.compared + 1, tally.bits + bits
        if bits or digest(saved) != digest(whole): tally.wrong.append(f"{bits} bits differ after {at} steps")
    check_log(folder, known, at, tally)
    return at


def moment(folder: Path, began: bool) -> str:
    """Where a kill hit, judged from what it left behind."""
    names = [p.name for p in folder.iterdir()]
    unfinished = {step_of(name) for name in names} - {None, *done_steps(folder)}
    if unfinished or any(name.endswith(".tmp") for name in names): return "in a save"
    return "between saves" if began else "while starting"


# ---------------------------------------------------------------- the loop
def one_kill(folder: Path, profile: str, rng: random.Random, pace: float, tally: Tally) -> bool:
    """Start or go on, and kill. False if the run came to its end first."""
    readable, ready = os.pipe()
    within = rng.random() < 0.5
    countdown = rng.randrange(1, 150) if within else 0
    pid = in_child(lambda: go_on(folder, profile, ready, countdown))
    os.close(ready)
    began = False
    if not within:
        if rng.random() < 0.9: began = os.read(readable, 1) == b"x"
        time.sleep(rng.random() * pace)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    began = began or os.read(readable, 1) == b"x"
    os.close(readable)
    if os.WIFSIGNALED(status):
        tally.kills += 1
        tally.where[moment(folder, began)] += 1
        return True
    if os.WEXITSTATUS(status): tally.wrong.append(f"a child ended with exit code {os.WEXITSTATUS(status)}")
    return False


def crash(kills: int, seconds: float, seed: int = 0, profiles: tuple[str, ...] = PROFILES, pace: float = 0.6,
          told: Callable[[str], None] = lambda text: None) -> Tally:
    """Kill until there were so many kills, or the time is over; stops at the first fault."""
    rng, tally, until = random.Random(seed), Tally(), time.monotonic() + seconds
    place = Path(tempfile.mkdtemp(prefix="crash-"))
    try:
        for profile in profiles:
            (place / "known" / profile).mkdir(parents=True)
            _, status = os.waitpid(in_child(lambda: reference(place / "known" / profile, profile)), 0)
            if status: raise RuntimeError(f"the unbroken run of {profile} failed")
        number = 0
        while tally.kills < kills and time.monotonic() < until and not tally.wrong:
            profile = profiles[number % len(profiles)]
            folder, at, number = place / f"run{number}", 0, number + 1
            folder.mkdir()
            while tally.kills < kills and time.monotonic() < until and not tally.wrong:
                going = one_kill(folder, profile, rng, pace, tally)
                at = check(folder, place / "known" / profile, at, tally)
                if not going: break
            else: continue  # time is over
            if at != STEPS: tally.wrong.append(f"a run ended with its last checkpoint after {at} steps")
            tally.ends += 1
            told(f"{profile}: {tally.words()}")
            shutil.rmtree(folder)
        return tally
    finally:
        if tally.wrong: told(f"files are left in {place}")
        else: shutil.rmtree(place)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profiles", default=",".join(PROFILES))
    given = parser.parse_args()
    result = crash(given.kills, given.seconds, given.seed, tuple(given.profiles.split(",")),
                   told=lambda text: print(text, flush=True))
    print(result.words())
    for text in result.wrong: print("FAULT:", text)
    sys.exit(1 if result.wrong or result.kills < given.kills else 0)
