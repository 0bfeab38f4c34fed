"""Kill −9 at random moments, for some seconds; `tests/crash.py --kills N` does it for as long as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crash import Tally, crash, differing_bits

from f16lab.state import State


def test_kills_cost_no_bit():
    script = Path(__file__).with_name("crash.py")
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "24", "--seconds", "45", "--seed", "1"], capture_output=True, text=True
    )
    last = [line for line in done.stdout.splitlines() if "kills" in line][-1]
    kills = int(last.split()[0])
    assert "FAULT" not in done.stdout and ", 0 differing bits, 0 faults" in last, done.stdout + done.stderr[-3000:]
    assert kills >= 5, f"too few kills to say anything: {done.stdout}"
    print(last)


def test_the_harness_sees_one_bit():
    a = State({"w": torch.ones(4), "b": torch.zeros(2)}, {"step": 1, "times": 3.0})
    b = State({"w": torch.ones(4), "b": torch.zeros(2)}, {"step": 1, "times": 4.0})
    assert differing_bits(a, b) == 0
    b.tensors["w"].view(torch.int32)[2] ^= 5
    assert differing_bits(a, b) == 2
    assert differing_bits(a, State({"w": torch.ones(4)}, {"step": 2})) == 8 * 8 + 1
    assert "0 kills" in Tally().words() and callable(crash)


@pytest.mark.slow
def test_many_kills_cost_no_bit():
    tally = crash(1000, 3600)
    assert tally.kills == 1000 and tally.bits == 0 and not tally.wrong
