"""`f16lab watch SCRIPT`: the script runs as by python, and what was seen is told even if it fails."""
import sys

import pytest
from click.testing import CliRunner

from f16lab.cli import command
from f16lab.scripts import watch_script

HELPER = """
import torch
class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
    def forward(self, x): return self.fc(x) + x
"""
SCRIPT = """
import sys, torch
from helper_of_watch import Tiny
model = Tiny()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
assert __name__ == "__main__" and sys.argv[0].endswith("train.py")
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16): loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
if "--fail" in sys.argv: raise RuntimeError("boom")
if "--exit" in sys.argv: sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper_of_watch.py").write_text(HELPER)
    (tmp_path / "train.py").write_text(SCRIPT)
    yield str(tmp_path / "train.py")
    sys.modules.pop("helper_of_watch", None)


def ran(*arguments):
    return CliRunner().invoke(command(), ["watch", *arguments])


def test_a_script_runs_as_it_is_and_its_casts_are_told(script):
    before = sys.argv[:], sys.path[:]
    result = ran("--format", "e4m3", script, "--epochs", "1")
    assert result.exit_code == 0, result.output
    assert "optimizer steps  2" in result.output and "Tiny.fc" in result.output
    assert "helper_of_watch.py:7" in result.output and "what e4m3 would do" in result.output
    assert (sys.argv, sys.path) == before


def test_what_was_seen_is_told_when_the_script_fails(script):
    result = ran(script, "--fail")
    assert result.exit_code == 1 and "until RuntimeError: boom" in result.output and "Tiny.fc" in result.output
    assert ran(script, "--exit", "0").exit_code == 0 and ran(script, "--exit", "3").exit_code == 1


def test_strict_stops_at_the_line(script):
    result = watch_script(script, strict=True)
    assert "helper_of_watch.py:7: add widens its bf16 operand" in str(result.error)


def test_models_are_chosen_by_class_name(script):
    assert not watch_script(script, only="GPT*").seen.histograms
    assert watch_script(script, only="T?ny").seen.find("Tiny.fc", "weight.grad")
    assert watch_script(script, histograms=False, every=2).seen.casts


def test_a_script_that_is_not_there_is_told_in_one_sentence():
    with pytest.raises(ValueError, match="nowhere.py: no such script"):
        watch_script("nowhere.py")
