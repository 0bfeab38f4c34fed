"""The benches: contenders take turns, groups add up, a wrong word is refused before work starts."""

import json
import re

import pytest
import torch
from click.testing import CliRunner

from f16lab.audit import WideTensors, audit, merged_casts, merged_wide
from f16lab.bench import (Case, Timing, bench_config, group_of, grouped, kernel_rows, noise_weights, random_tokens,
                          take_turns, train_row)
from f16lab.bench_cases import adamw_case
from f16lab.bench_run import SMALL, kernel_bench, train_bench
from f16lab.cli import command
from f16lab.config import TrainConfig
from f16lab.models import model_config

CPU = torch.device("cpu")
TINY = TrainConfig().with_(model="tiny", channels=16, heads=2, layers=1, context=16, batch=2, device="cpu", data="markov",
                           eval_every=0, meters_every=0)


def test_contenders_take_turns_and_warm_rounds_do_not_count():
    calls = []
    turns = take_turns({name: lambda name=name: calls.append(name) for name in "ab"}, CPU, rounds=3, warm=2)
    assert calls == list("ab" * 5) and [len(t.seconds) for t in turns.values()] == [3, 3]


def test_median_and_quartiles():
    t = Timing("x", (1.0, 2.0, 3.0, 4.0, 100.0))
    assert t.median == 3.0 and t.spread[0] < 3 < t.spread[1] and Timing("x", (5.0, 1.0)).spread == (1.0, 5.0)


def test_a_case_without_bytes_has_no_rate_and_the_yardstick_is_itself():
    x = torch.randn(1000)
    rows = kernel_rows([Case("g", "a", lambda: x + x), Case("g", "b", lambda: x * x, 12_000)], CPU, 2, yardstick=1000)
    assert rows[0].rate != rows[0].rate and rows[1].rate > 0 and rows[-1].share == 1.0


@pytest.mark.parametrize("kernel,group", [
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"), ("void cutlass::Kernel2<cutlass_80_simt_sgemm>", "matrix products"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"), ("void cross_entropy<BF16, BF16, 3, 8>", "cross entropy"),
    ("void adamw<BF16>", "optimizer"), ("void at::native::reduce_kernel<128, 4>", "sums"), ("Memcpy HtoD", "copies"), ("nonsense", "element-wise and other")])
def test_kernels_are_filed_by_name(kernel, group): assert group_of(kernel) == group


def test_groups_and_idle_time_add_up_to_the_clock():
    rows = grouped([("gemm", 3.0, 2), ("gemm2", 0.5, 1), ("adamw", 2.0, 1)], 10.0)
    assert sum(r.ms for r in rows) == 10 and rows[0].group == "idle" and rows[1].largest == "gemm" and rows[1].calls == 3


@pytest.mark.parametrize("name,each", [("f32", 28), ("bf16_llmc", 28), ("bf16", 30), ("all_f16", 14), ("f16", 24)])
def test_bytes_of_an_optimizer_step_are_those_of_its_profile(name, each):
    case = adamw_case(model_config("tiny", channels=64, layers=1), name, CPU)
    blocks = case.bytes / each / 1024
    assert blocks == int(blocks) > 50
    case.call()


def test_a_bench_is_quiet_and_leaves_the_recipe_alone():
    c = bench_config(TINY, "f16", 5)
    assert (c.run.steps, c.run.ledger, c.run.meters_every, str(c.profile)[:9]) == (5, False, 0, "param=f16")
    assert TINY.run.steps != 5 and (c.data, c.model) == (TINY.data, TINY.model)


def test_profiles_start_from_the_same_weights():
    source = random_tokens(64, 8, 32)
    weights = noise_weights(TINY, source)
    rows = [train_row(TINY, name, source, weights, 1)[0] for name in ("f32", "bf16")]
    assert abs(rows[0].loss - rows[1].loss) < 0.05 and all(r.tokens_per_second > 0 for r in rows)


def test_wrong_words_are_refused_before_work_starts():
    with pytest.raises(ValueError, match="no group 'cast'.*casts.*Did you mean"): kernel_bench(CPU, ["cast"], **SMALL)
    with pytest.raises(ValueError, match="f61"): next(train_bench(TINY, ["f32", "f61"], 1))


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    words = "bench train --model tiny --layers 1 --channels 16 --heads 2 --context 16 --batch 2 --device cpu --profiles f32,f16 --rounds 1"
    page = tmp_path / "out" / "train.json"
    result = CliRunner().invoke(command(), [*words.split(), "--out", str(page)], standalone_mode=False)
    assert result.exception is None and "tok/s" in result.output, result.output
    assert [row["profile"] for row in json.loads(page.read_text())["train"]] == ["f32", "f16"]


# ---------------------------------------------------------------- the census
def test_new_wide_tensors_count_and_views_numbers_and_in_place_results_do_not():
    x, half = torch.randn(6), torch.randn(6).half()
    with WideTensors() as seen:
        x.view(2, 3), x.add_(1), x.sum(), half * half
    assert seen.rows() == ()
    with WideTensors() as seen: half.float(), x * 2, x.double()
    assert sorted((r.op, r.bytes, r.dtype) for r in seen.rows()) == [
        ("aten._to_copy.default", 24, "float32"), ("aten._to_copy.default", 48, "float64"), ("aten.mul.Tensor", 24, "float32")]


def test_backward_is_part_of_the_census_and_lines_of_the_package_are_named():
    found = audit(TINY.with_(profile="f16"))
    where = {r.where.partition(":")[0] for r in found.wide}
    assert {"operators", "losses"} <= where and any("backward" in r.where for r in found.wide)
    assert found.cast_count == sum(n for *_, n, _ in merged_casts(found.casts)) > 0
    assert found.wide_count == sum(n for *_, n, _ in merged_wide(found.wide))


def test_a_census_changes_nothing():
    from f16lab.train import Trainer
    plain, looked = Trainer(TINY.with_(profile="f16")), Trainer(TINY.with_(profile="f16"))
    for _ in range(2): plain.step()
    looked.step()
    with WideTensors(): looked.step()
    assert plain.state().tensors.keys() == looked.state().tensors.keys()
    assert all(torch.equal(a, b) for a, b in zip(plain.state().tensors.values(), looked.state().tensors.values()))


def test_running_out_of_memory_before_the_first_step_is_said_in_words(monkeypatch):
    from f16lab import running
    def no_room(*args, **more): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has …")
    monkeypatch.setattr(running, "Trainer", no_room)
    with pytest.raises(running.RunFailed, match=r"asked for 3.00 GiB more.*--model tiny"): running.built_trainer(TINY)
    assert "asked for 3.00 GiB more" in running.failure(torch.OutOfMemoryError("Tried to allocate 3.00 GiB."), TINY)


def test_bench_says_what_is_wrong_before_it_measures():
    from click.testing import CliRunner

    from f16lab.cli import command

    for words, said in (
        (["train", "--only", "AdamW"], "--only would have no effect"),
        (["train", "--profiles", " , "], "give at least one"),
        (["train", "--profiles", "f32,nonsense"], "unknown preset 'nonsense'"),
    ):
        done = CliRunner().invoke(command(), ["bench", *words], standalone_mode=False)
        assert done.exit_code == 2 and said in done.stderr and done.stdout == ""


@pytest.mark.parametrize("words,said", [
    ("bench kernels --model d12 --batch 4", "--model, --batch would have no effect"), ("bench train --data markov", "No such option.*--data"),
    ("bench train --steps 5", "No such option.*--steps"), ("bench train --probe-every 1", "No such option.*--probe-every")])
def test_a_setting_that_a_bench_would_ignore_is_refused(words, said):
    result = CliRunner().invoke(command(), words.split())
    assert result.exit_code == 2 and re.search(said, result.output), result.output


def test_settings_that_a_bench_leaves_out_exist():
    from f16lab.bench_run import NOT_BENCHED
    from f16lab.config import settings_of
    assert set(NOT_BENCHED) <= {name for name, _, _ in settings_of()}


# ---------------------------------------------------------------- run logs
def test_a_log_is_measured_and_its_row_is_what_lies_on_disk():
    from f16lab.bench_log import busy_steps, log_row
    few, many = log_row(120, looks=20), log_row(1200, looks=20)
    assert few.steps == 120 and few.kept_histograms == 120 and many.kept_histograms < 1200  # old ones thin out
    assert 0 < few.poll_ms <= few.poll_ms_95 and few.bytes == pytest.approx(120 * few.bytes_per_step)
    assert many.bytes_per_step <= 6000
    assert [r.loss for r in busy_steps(5)] == [r.loss for r in busy_steps(9)][:5]


@pytest.mark.parametrize("words", ["log --only AdamW", "log --batch 4", "log --profiles f16", "log --rounds 3", "log --device cpu",
                                   "kernels --profiles f16", "kernels --log-steps 200", "train --log-steps 200", "looks --only AdamW"])
def test_a_bench_refuses_options_of_other_benches(words):
    result = CliRunner().invoke(command(), ["bench", *words.split()])
    assert result.exit_code == 2 and f"{words.split()[1]} would have no effect: bench {words.split()[0]}" in result.output


# ---------------------------------------------------------------- probes
def test_looks_are_measured_beside_a_step_without_one(tmp_path):
    small = "--layers 1 --channels 16 --heads 2 --context 16 --batch 2 --device cpu --profiles f32,f16 --rounds 2"
    result = CliRunner().invoke(command(), ["bench", "looks", *small.split(), "--out", str(tmp_path / "looks.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "looks.json").read_text())["looks"]
    assert [r["profile"] for r in rows] == ["f32"] * 3 + ["f16"] * 3 and all(r["ms"] > 0 and r["added"] > -1 for r in rows)
    assert "none, once more" in result.output and "(the default)" in result.output
