"""A run on a GPU against the same run on a CPU: the same start, the same keys, losses within a stated bound, the same bits twice."""

import pytest
import torch

from f16lab.cast import assert_no_casts
from f16lab.config import TrainConfig
from f16lab.device import open_device
from f16lab.ops import transfer
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, F64, bits_of, convert
from f16lab.train import Trainer

pytestmark = pytest.mark.gpu
PRESETS = ("f32", "master_weights", "f16", "bf16", "bf16_llmc", "bf16_sr", "all_f16")
BOUND = {"f32": 1e-5, "master_weights": 3e-4, "f16": 3e-4, "bf16": 4e-3, "bf16_llmc": 4e-3, "bf16_sr": 4e-3, "all_f16": 1e-3}
STEPS = 20


def trainer(profile: str, device: str, **changes) -> Trainer:
    quiet = dict(data="markov", model="tiny", steps=STEPS, eval_every=0, batch=8, accumulate=2, threads=8)
    return Trainer(TrainConfig(profile).with_(device=device, **{**quiet, **changes}))


@pytest.mark.parametrize("profile", PRESETS)
def test_cpu_and_gpu_start_alike_and_stay_together(profile):
    a, b = trainer(profile, "cpu"), trainer(profile, "cuda")
    for name, t in a.state().tensors.items():
        assert torch.equal(bits_of(t), bits_of(b.state().tensors[name].cpu())), name
    apart = [abs(b.step().loss - a.step().loss) / 2.5 for _ in range(STEPS)]  # losses are some 2.5 here
    print(f"{profile}: first loss apart by {apart[0]:.1e}, largest of {STEPS} steps {max(apart):.1e}")
    assert max(apart) <= BOUND[profile]


@pytest.mark.parametrize("profile", PRESETS)
def test_a_gpu_run_repeats_itself_bit_for_bit(profile):
    digests = []
    for _ in range(2):
        run = trainer(profile, "cuda", meters_every=3)
        for _ in range(6): run.step()
        digests.append(run.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("profile", ("f16", "bf16_llmc"))
def test_looking_changes_nothing_on_a_gpu(profile):
    digests = []
    for look in (dict(ledger=True, meters_every=1), dict(ledger=False, meters_every=0)):
        run = trainer(profile, "cuda", **look)
        for _ in range(5): run.step()
        digests.append(run.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("profile", ("f32", "f16", "bf16_llmc"))
def test_a_run_that_need_not_repeat_itself_stays_near(profile):
    sure, free = trainer(profile, "cuda"), trainer(profile, "cuda", deterministic=False)
    assert max(abs(sure.step().loss - free.step().loss) for _ in range(10)) <= 2.5 * BOUND[profile]
    from f16lab.device import table_for
    assert table_for("cuda").deterministic  # and the switch was put back


@pytest.mark.parametrize("p", (F16, BF16, F32, F64, E4M3, E5M2), ids=str)
def test_transfers_move_bytes(p):
    x = convert(torch.randn(1001), p) if p is not F64 else torch.randn(1001, dtype=torch.float64)
    with assert_no_casts(): back = transfer(transfer(x, "cuda"), "cpu")
    assert torch.equal(bits_of(back), bits_of(x))


def test_a_step_takes_at_most_two_looks_at_the_device(monkeypatch):
    run, seen = trainer("f16", "cuda", meters_every=0, accumulate=4), []
    run.step()
    def allowed(name):
        original = getattr(torch.Tensor, name)
        def look(self):
            if self.is_cuda: seen.append(name)
            torch.cuda.set_sync_debug_mode("default")
            try: return original(self)
            finally: torch.cuda.set_sync_debug_mode("error")
        monkeypatch.setattr(torch.Tensor, name, look)
    for name in ("item", "tolist"): allowed(name)
    torch.cuda.set_sync_debug_mode("error")
    try: run.step()  # micro-steps and the update may not wait for the GPU; loss and norm may
    finally: torch.cuda.set_sync_debug_mode("default")
    assert len(seen) <= 2, seen


def test_boundary_everywhere_trains_too(monkeypatch):
    from f16lab.device import ALL_BOUNDARY, using_table
    open_device("cuda")
    with using_table(ALL_BOUNDARY, "cuda"):
        forced = trainer("f16", "cuda")
        losses = [forced.step().loss for _ in range(5)]
    free = trainer("f16", "cuda")
    assert max(abs(a - free.step().loss) for a in losses) <= 2.5 * BOUND["f16"]


@pytest.mark.parametrize("profile", ("f32", "all_f16", "bf16_llmc"))
def test_a_traced_step_on_a_gpu_has_the_bits_of_eager(profile):
    digests = []
    for how in ("none", "aot_eager"):
        run = trainer(profile, "cuda", compile=how, layers=2)
        for _ in range(3): run.step()
        digests.append({name: t.cpu().clone() for name, t in run.state().tensors.items()})
    assert all(torch.equal(bits_of(t), bits_of(digests[1][name])) for name, t in digests[0].items())


def test_kernels_can_be_captured_in_a_cuda_graph():
    from f16lab.column_kernels import column_sums
    from f16lab.loss_kernels import cross_entropy_losses
    from f16lab.row_kernels import gelu_forward
    open_device("cuda")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    targets = torch.arange(64, device="cuda")
    work = lambda: (gelu_forward(x, torch.bfloat16), column_sums(x), *cross_entropy_losses(x, targets, 256, -100))  # noqa: E731
    work()  # compiled beforehand
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): seen = work()
    for seed in (1, 2):
        x.copy_(torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)).to(x))
        right = [t.clone() for t in work()]
        graph.replay()
        assert all(map(torch.equal, seen, right))


def test_out_of_memory_names_the_knob_and_the_size(tmp_path):
    from click.testing import CliRunner

    from f16lab.cli import command
    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        words = f"train --f16 --model d12 --batch 32 --data markov --steps 1 --device cuda --eval-every 0 --out {tmp_path / 'r'}"
        result = CliRunner().invoke(command(), words.split(), standalone_mode=False)
    finally: torch.cuda.set_per_process_memory_fraction(1.0)
    said = f"{result.output} {result.exception}"
    assert "memory" in said and "--batch" in said, said[-2000:]
