"""The kernels' bench at tiny shapes: every case runs, and what is wrong gives no figure."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from megaspan.bench import kernels
from megaspan.bench.device_time import Stopwatch
from megaspan.bench.kernels import index_loss, index_topk, linear, sparse_mla
from megaspan.bench.kernels.measure import Measured, Run
from megaspan.bench.kernels.published import GOALS
from megaspan.bench.kernels.registry import OPERATIONS, SCALES, Case, NotHere, Scale, Trial, cases
from megaspan.cli import app
from megaspan.errors import UserError

CPU = torch.device("cpu")
TINY = SCALES["tiny"]


@pytest.fixture
def quick(monkeypatch):
    """One call of each case."""
    monkeypatch.setattr(Stopwatch, "cold", lambda self, calls: self.once(calls[0]))


def run(only: str | None) -> Run:
    return kernels.run(only, "tiny", "cpu", lambda said: None)


@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - {"write_rows"}))
def test_every_case_is_right_and_timed(quick, operation):
    require_figures(run(operation))


def test_rows_are_written_right(kernel_device):
    for _, case in cases(replace(TINY, tokens=7), "write_rows"):
        case.make(torch.device(kernel_device)).check()


def require_figures(seen: Run) -> None:
    assert seen.failures == []
    for one in seen.measured:
        assert one.floor > 0
        assert one.seconds is not None
        assert one.seconds > 0


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_cases_have_names_of_their_own_and_floors(scale):
    found = [case for _, case in cases(scale)]
    assert len({case.name for case in found}) == len(found)
    assert all(case.nbytes > 0 for case in found)
    assert all(case.flops > 0 for case in found if case.unit == "TFLOP/s")


def test_every_goal_is_that_of_a_case():
    assert set(GOALS) <= {case.name for _, case in cases(SCALES["real"])}


def test_the_floors_at_real_shapes_are_those_of_the_arithmetic():
    by_name = {case.name: case for _, case in cases(SCALES["real"])}
    prefill = by_name["index_topk prefill, 4096 queries x 1M"]
    assert prefill.flops == pytest.approx(2 * 32 * 128 * 4096 * (2**20 - 2048), rel=1e-3)
    decode = by_name["index_topk decode, batch 32 at 1M"]
    assert decode.nbytes == pytest.approx(32 * 2**20 * 132, rel=1e-3)
    attention = by_name["sparse_mla prefill, 4096 queries, 1M bf16 rows"]
    assert attention.flops == 2 * 4096 * 64 * 2048 * (576 + 512)
    experts = by_name["moe, 8192 tokens, bf16 weights"]
    assert experts.flops == 6 * 8192 * 8 * 6144 * 2048


# --- what is wrong -----------------------------------------------------------------------------------------


def wrong_choice(*operands, **known):
    """The lowest positions instead of the best."""
    positions = torch.arange(operands[6], dtype=torch.int32)
    return positions.where(positions < operands[5][:, None].int(), -1)


def shifted_choice(*operands, **known):
    return (index_topk_of_ours(*operands, **known) + 1).int()


index_topk_of_ours = index_topk.index_topk


@pytest.mark.parametrize(
    ("broken", "reason"), [(wrong_choice, "not the best"), (shifted_choice, "sight|best")]
)
def test_a_wrong_choice_is_refused(quick, monkeypatch, broken, reason):
    monkeypatch.setattr(index_topk, "index_topk", broken)
    seen = run("index_topk decode, batch 3 at 200")
    (one,) = seen.measured
    assert one.seconds is None
    with pytest.raises(UserError, match=reason):
        kernels.refuse(seen)


def test_choices_out_of_order_are_refused(quick, monkeypatch):
    monkeypatch.setattr(index_topk, "index_topk", lambda *a, **k: index_topk_of_ours(*a, **k).flip(1))
    assert "out of order" in run("index_topk decode, batch 1 at 200").failures[0]


def test_missing_positions_are_refused(quick, monkeypatch):
    def short(*operands, **known):
        chosen = index_topk_of_ours(*operands, **known)
        chosen[:, -1] = -1
        return chosen

    monkeypatch.setattr(index_topk, "index_topk", short)
    assert "another number of positions" in run("index_topk decode, batch 1 at 200").failures[0]


def test_a_wrong_output_is_refused_and_nothing_is_recorded(quick, monkeypatch, tmp_path):
    ours = sparse_mla.sparse_mla
    monkeypatch.setattr(sparse_mla, "sparse_mla", lambda *operands: ours(*operands) * 1.05)
    seen = run("sparse_mla prefill, 24 queries, 64 bf16 rows")
    with pytest.raises(UserError, match=r"1 of the cases give no figures: .*differs from the reference by 5"):
        kernels.record(seen, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wrong_gradients_are_refused(quick, monkeypatch):
    ours = sparse_mla.sparse_mla
    monkeypatch.setattr(sparse_mla, "sparse_mla", lambda query, *others: ours(query * 1.2, *others))
    assert "differs from the reference" in run("forward and backward").failures[0]


def test_a_wrong_loss_is_refused(quick, monkeypatch):
    ours = index_loss.index_loss
    monkeypatch.setattr(index_loss, "index_loss", lambda *operands: 1.1 * ours(*operands))
    seen = run("index_loss")
    assert len(seen.failures) == len(seen.measured) == 2
    assert "differs from the reference by 1.0e-01" in seen.failures[0]


def test_a_result_of_nan_is_refused(quick, monkeypatch):
    ours = linear.linear
    monkeypatch.setattr(linear, "linear", lambda *a, **k: ours(*a, **k) * torch.nan)
    assert "differs from the reference by nan" in run("linear q_a_proj, 1 token").failures[0]


def test_what_breaks_is_a_failure_and_the_others_go_on(quick, monkeypatch):
    def breaking(states, *others, **known):
        if len(states) == 1:
            raise RuntimeError("no such kernel\nand more")
        return others[0].new_zeros(0)

    monkeypatch.setattr(linear, "linear", breaking)
    seen = run("linear q_a_proj")
    assert len(seen.measured) == 2
    assert seen.failures[0] == "linear q_a_proj, 1 token: RuntimeError: no such kernel"


def test_the_command_ends_with_one_line_where_something_is_wrong(quick, monkeypatch):
    monkeypatch.setattr(linear, "linear", lambda states, *others, **known: states)
    arguments = ["bench", "kernels", "--scale", "tiny", "--device", "cpu", "--only", "q_a_proj, 1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(
        "megaspan: 1 of the cases give no figures: linear q_a_proj"
    )


# --- figures -----------------------------------------------------------------------------------------------


def case(unit="ms", name="index_topk prefill, 4096 queries x 1M", **others) -> Case:
    return Case(name=name, make=lambda device: Trial([], lambda: None), unit=unit, nbytes=4e9, **others)


def figures(one: Measured, scale: str = "real", only: str | None = "index_topk"):
    return kernels.figures(Run(SCALES[scale], only, 4e12, [one]))


def test_figures_have_units_targets_floors_and_peers():
    measured = Measured(case(), 0.039, 0.02, 2**29, {"slow": 0.05, "fast": 0.045, "absent": "TypeError: no"})
    time, memory = figures(measured)
    assert (time.value, time.unit, time.target, time.floor, time.met) == (39, "ms", 40, 20, True)
    assert time.peer is not None
    assert time.peer.startswith("fast: 45 ms; DeepGEMM")
    assert time.note == "1.95 times the floor"
    assert (memory.value, memory.target, memory.met) == (0.5, 1, True)
    assert time.command == "megaspan bench kernels --only index_topk"
    assert figures(measured, only="batch 1")[0].command == "megaspan bench kernels --only 'batch 1'"


def test_rates_are_better_when_higher():
    (row,) = figures(Measured(case("TFLOP/s", "moe, 8192 tokens, bf16 weights", flops=4e12), 0.01, 0.005))
    assert (row.value, row.floor, row.better, row.met) == (400, 800, "higher", False)
    (row,) = figures(Measured(case("GB/s", "any"), 0.01, 0.005))
    assert (row.value, row.better, row.target) == (400, "higher", None)


def test_goals_are_those_of_real_shapes():
    (row,) = figures(Measured(case(), 0.03, 0.02), "tiny")
    assert (row.target, row.peer) == (None, None)


def test_only_real_shapes_are_recorded(tmp_path):
    one = Measured(case(), 0.039, 0.02)
    with pytest.raises(UserError, match="leave --scale out"):
        kernels.record(Run(TINY, None, 1.0, [one]), tmp_path)
    kernels.record(Run(SCALES["real"], None, 1.0, [one]), tmp_path)
    (row,) = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert (row["name"], row["value"]) == (one.case.name, 39)


def test_what_is_not_here_is_a_note_and_no_failure():
    def absent(device):
        raise NotHere("needs another device")

    one = kernels.measure(Case(name="any", make=absent, unit="ms", nbytes=1), Stopwatch(CPU))
    assert (one.seconds, one.note, one.failed) == (None, "needs another device", False)
    (row,) = figures(one)
    assert (row.value, row.note) == (None, "needs another device")


# --- arguments ---------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused():
    with pytest.raises(UserError, match="no scale 'huge'; there are real, tiny"):
        kernels.run(None, "huge", "cpu", lambda said: None)
    with pytest.raises(UserError, match="no case has 'nothing' in its name"):
        kernels.run("nothing", "tiny", "cpu", lambda said: None)
    with pytest.raises(UserError, match="too large for a CPU: give --scale tiny"):
        kernels.run(None, "real", "cpu", lambda said: None)
    with pytest.raises(UserError, match="--device gpu: figures are taken on cuda and on cpu"):
        kernels.run(None, "tiny", "gpu", lambda said: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_the_default_says_what_to_do():
    with pytest.raises(UserError, match="no CUDA device here: --device cpu --scale tiny"):
        kernels.run(None, "real", "cuda", lambda said: None)


def test_operands_are_in_rotation_until_no_cache_holds_them():
    assert TINY.copies(1 << 12) == 4
    assert TINY.copies(1 << 20) == 1
    trial = next(each for _, each in cases(TINY, "decode, batch 1, FP8 rows")).make(CPU)
    assert len(trial.calls) == TINY.copies(8 * 52) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_every_case_at_real_widths_runs_on_a_gpu(monkeypatch):
    config = SCALES["real"].config.replace(n_routed_experts=16)
    some = Scale("some", config, (4096, 16384), 256, 512, (1, 2), 64, 1 << 26)
    monkeypatch.setitem(SCALES, "some", some)
    require_figures(kernels.run(None, "some", "cuda", lambda said: None))
