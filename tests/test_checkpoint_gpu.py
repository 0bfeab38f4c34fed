"""On a GPU: the copy is pinned and complete, and a run that is resumed has the bits of the one that was not."""
import pytest
import torch
from train_runs import small, source

from f16lab.resume import keep_in, resume
from f16lab.state import digest
from f16lab.train import Trainer, steps

pytestmark = pytest.mark.gpu


def trainer(profile: str, **changes) -> Trainer:
    return Trainer(small(profile, device="cuda", steps=12, save_every=5, dropout=0.1, **changes), source())


@pytest.mark.parametrize("profile", ["f16", "bf16", "all_f16", "f32"])
def test_resumed_on_a_gpu(profile, tmp_path):
    whole = trainer(profile)
    list(steps(whole))
    t = trainer(profile)
    keep_in(t, tmp_path)
    for _ in steps(t):
        if t.step_number == 7: t.stop("test")
    again = trainer(profile)
    assert resume(again, tmp_path).step == 7 and again.digest() == t.digest()
    list(steps(again))
    assert again.digest() == whole.digest()


def test_the_copy_is_pinned_and_is_not_moved_by_the_next_step(tmp_path):
    t = trainer("bf16")
    saver = keep_in(t, tmp_path)
    t.step()
    held, before = saver.copy(t.state()), t.digest()
    assert all(x.is_pinned() and x.device.type == "cpu" for x in held.tensors.values())
    t.step()
    assert digest(held) == before != t.digest() and torch.cuda.is_available()


def test_saved_on_a_gpu_and_resumed_on_the_cpu(tmp_path):
    """Weights and moments arrive with every bit; the machine is noted as another."""
    t = trainer("bf16")
    keep_in(t, tmp_path)
    for _ in range(5): t.step()
    t.saver.save(t.state(), "test"), t.saver.wait()
    again = Trainer(small("bf16", device="cpu", steps=12, save_every=5, dropout=0.1), source())
    resumed = resume(again, tmp_path)
    assert again.digest() == t.digest() and any(note.startswith("device was cuda") for note in resumed.notes)
