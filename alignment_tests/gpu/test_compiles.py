"""Every Triton kernel compiles for sm_90a on any machine, to the arithmetic that the specs name and no other."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

import triton

from alignment_tests.gpu.compile_all import Case, resources, row_cases, tensor_core_cases
from minitransformer.errors import UnsupportedDevice
from minitransformer.ops.gpu import (
    attention,
    attention_tiles,
    cuda,
    few_rows,
    linear,
    pair_product,
    sha256,
)
from minitransformer.plugins.sglang import checksums

# FP32 arithmetic in PTX that an operator may contain beside the tensor core's; an FMA only where tl.fma stands.
PLAIN = {"mul.rn.f32", "add.rn.f32", "sub.rn.f32", "max.f32", "setp.num.f32", "setp.nan.f32"}
ALLOWED = {
    "linear": PLAIN,
    "grouped_linear": PLAIN,
    "quantised_linear": PLAIN | {"mul.bf16x2"},  # code * scale, exact
    # div.rn is the IEEE divide at the end; ex2.approx.ftz is exp2_hw of rounding.py.
    "attention": PLAIN | {"div.rn.f32", "ex2.approx.ftz.f32"},
    "backward": PLAIN | {"ex2.approx.ftz.f32"},
    "fold": PLAIN | {"div.rn.f32", "ex2.approx.ftz.f32"},
}
CONVERSIONS = {"cvt.rn.bf16x2.f32", "cvt.rn.bf16.f32", "cvt.f32.bf16"}
SHARED_LIMIT = 232448  # bytes of shared memory that a CTA of Hopper may have

# Row-wise operators: what each may contain beside PLAIN, comparisons and signs.
EXP = {"fma.rn.f32", "div.rn.f32"}
ROWS = {
    "rms_norm": {"div.rn.f32", "sqrt.rn.f32"}, "rope": set(), "router": EXP, "qkv": {"div.rn.f32", "sqrt.rn.f32"},
    "plan": set(), "combine": set(), "gather": set(),
    "nvfp4": set(), "mxfp8": {"cvt.rn.satfinite.e4m3x2.f32"}, "refuse": set(), "schedule": set(),
    "combine_weighted": {"fma.rn.f32"}, "copy": set(), "spread": set(), "embedding": set(), "swiglu": EXP,
    "logprob": EXP | {"cvt.rn.f32"}, "adamw": {"div.rn.f32", "sqrt.rn.f32"},
    "backward": {"div.rn.f32", "cvt.f64.f32", "add.rn.f64", "mul.rn.f64", "fma.rn.f64"},
    "sample": EXP | {f"{op}.rn.f64" for op in ("add", "sub", "mul", "fma", "div", "cvt")}
    | {"cvt.f64.f32", "cvt.rn.f32", "cvt.rn.f32.f64", "cvt.rzi.s64.f32", "max.f64", "min.f32"},
}  # fmt: skip


def float_operations(ptx: str) -> set[str]:
    found = set(re.findall(r"^\s*(?:@%?\w+\s+)?([a-z0-9]+\.[a-z0-9_.]*\b(?:f32|bf16|bf16x2|f64))\b", ptx, re.M))
    return {op for op in found if not op.startswith(("mov.", "ld.", "st.", "selp.", "shfl."))}


def waits_first(ptx: str) -> bool:
    """Whether a kernel that may be launched early touches memory only after griddepcontrol.wait; a prefetch is free."""
    first = re.search(r"\b(ld|st|red|atom|cp)\.\S*(global|bulk|async)", ptx)
    return 0 <= ptx.find("griddepcontrol.wait") < first.start()


@pytest.mark.parametrize("case", tensor_core_cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_compiles_to_the_arithmetic_of_the_spec(case: Case):
    compiled = case.compile()
    ptx, layouts = compiled.asm["ptx"], compiled.asm["ttgir"]
    ours = {op for op in float_operations(ptx) if not op.startswith(("mma.", "wgmma."))}
    assert ours <= ALLOWED[case.name.split()[0]] | CONVERSIONS, f"unexpected arithmetic {ours}"
    assert case.name.startswith("fold") or re.search(
        r"\b(wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+k16\S*\.f32\.bf16\.bf16", ptx
    ), "no tensor core"
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert "in_turn()" not in case.kernel.src or waits_first(ptx) or case.name.startswith("fold")
    # Another kWidth would give a step of the chain other elements than 16 consecutive ones.
    assert set(re.findall(r"kWidth = (\d+)", layouts)) <= {"2"}
    if case.kernel is attention_tiles.attention_kernel:
        # tl.sum is the quad sum only while a row belongs to one warp.
        assert set(re.findall(r"warpsPerCTA = \[(\d+, \d+)\], instrShape", layouts)) == {f"{case.warps}, 1"}
    if "swap=True" in case.name and "linear" in case.name:
        assert "wgmma.mma_async" in ptx


@pytest.mark.parametrize("case", row_cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_row_operator_compiles_to_the_arithmetic_of_the_spec(case: Case):
    compiled = case.compile()
    ours = {op for op in float_operations(compiled.asm["ptx"]) if not re.match(r"(setp|abs|neg)\.", op)}
    allowed = PLAIN | CONVERSIONS | ROWS[case.name.split()[0]]
    if "backward" in case.name and case.name.startswith("combine_weighted"):
        allowed -= {"fma.rn.f32"}
    assert ours <= allowed, f"unexpected arithmetic {ours - allowed}"
    assert ".ftz" not in compiled.asm["ptx"], "subnormals would be flushed"
    assert "in_turn()" not in case.kernel.src or waits_first(compiled.asm["ptx"])
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert " 0 B stack" in resources(compiled), "spills"


def cubin(file: str, defines: tuple[tuple[str, int], ...], folder: Path, architecture: str = "sm_90a") -> bytes:
    """By NVRTC as on a GPU, or by nvcc; skipped where this machine has neither."""
    try:
        return cuda.compile_source(file, defines, architecture)
    except UnsupportedDevice:
        if shutil.which("nvcc") is None:
            pytest.skip("neither NVRTC nor nvcc is installed")
    source, out = Path(cuda.__file__).with_name(file), folder / "out.cubin"
    options = [*cuda.OPTIONS, f"-arch={architecture}", "-cubin", *(f"-D{name}={value}" for name, value in defines)]
    subprocess.run(["nvcc", *options, "-o", out, source], check=True)
    return out.read_bytes()


def sass(file: str, defines: tuple[tuple[str, int], ...], folder: Path) -> str:
    (folder / "code").write_bytes(cubin(file, defines, folder))
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    return subprocess.run([tool, "-sass", folder / "code"], capture_output=True, text=True).stdout


def test_the_checksum_is_integers_in_registers(tmp_path):
    text = sass(sha256.SOURCE, sha256.defines(checksums.PIECE), tmp_path)
    assert not re.findall(r"\b[HFD](?:MMA|MUL|ADD|FMA|SETP|SET)2?\b", text) and "STL" not in text


@pytest.mark.parametrize("tile", [t for t in linear.CANDIDATES if t.whole], ids=str)
def test_the_product_of_few_rows_is_the_tensor_core_and_one_rounding(tile, tmp_path):
    for fp32 in (False, True):
        text = sass(few_rows.SOURCE, few_rows.defines(tile, fp32), tmp_path)
        assert set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|SETP|SET)2?\b[.\w]*)", text)) == {"HMMA.16816.F32.BF16"}
        assert ("F2F.BF16.F32" in text or "F2FP.BF16" in text) == (not fp32)
        assert "STL" not in text, "spills"


@pytest.mark.parametrize("weighted", [False, True])
def test_the_experts_dx_is_the_tensor_core_and_what_its_end_says(weighted, tmp_path):
    """Machine code: it looks for NaN; with routing weights it multiplies, and adds up their gradient."""
    text = sass(pair_product.SOURCE, pair_product.defines(weighted), tmp_path)
    names = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|MNMX|SETP|SET)2?)\b", text))
    assert names == {"FSETP"} | ({"FMUL", "FADD"} if weighted else set())
    assert len(set(re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16", text))) == text.count("HGMMA.64") / 8
    # The assembler waits for each product by itself if it finds a register of one touched too early.
    assert 3 * text.count("WARPGROUP.DEPBAR") < text.count("HGMMA.64"), "products one after another"
    assert "STL" not in text, "spills"


@pytest.mark.parametrize("longest", [1, 2, 8, 512])
@pytest.mark.parametrize(("group", "head"), [(8, 128), (3, 64), (2, 48)])
def test_the_chosen_attention_schedules_do_not_spill(longest, group, head):
    counts = ((1, 1), (1, 500), (8, 500))  # segments, programs
    chosen = {attention.choose(longest, group, head, flat, *n) for flat in (False, True) for n in counts}
    others = attention.Prefill | attention.Alone | attention.Cluster  # test_compiles_attention.py
    chosen = {s for s in chosen if not isinstance(s, others)}
    cases = [c for c in tensor_core_cases() if any(c.name.startswith("attention") and str(s) in c.name for s in chosen)]
    cases = [c for c in cases if f" {head} " in c.name]
    assert len(cases) >= len(chosen)
    for case in cases:
        assert " 0 B stack" in resources(case.compile()), case.name


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("longest", [1, 2, 5, 9, 17, 300])
@pytest.mark.parametrize("head", [16, 48, 64, 128])
def test_the_chosen_attention_schedules_fit(longest, group, head):
    for contiguous, (segments, programs) in itertools.product((False, True), ((1, 1), (1, 500), (8, 100), (8, 500))):
        schedule = attention.choose(longest, group, head, contiguous, segments, programs)
        assert schedule in attention.CANDIDATES and attention.fits(schedule, longest, group, head)


@pytest.mark.parametrize(
    ("head", "segments", "pieces", "chosen"),
    [
        (128, 1, 4, attention.Cluster(8)), (128, 1, 16, attention.Cluster(4)),
        (128, 4, 16, attention.Decode(4)), (64, 1, 3, attention.Cluster(4)),
        (128, 1, 17, attention.Decode(4)), (128, 8, 512, attention.Alone(7)), (128, 1, 256, attention.Decode(2)),
        (128, 1, 1024, attention.Alone(7)), (128, 7, 560, attention.Alone(5)), (128, 7, 700, attention.Alone(4)),
        (48, 1, 1, attention.Schedule(64, 4, 1)),
    ],
)  # fmt: skip
def test_a_decode_step_takes_the_schedule_that_was_the_fastest(head, segments, pieces, chosen):
    """pieces: segments of all sequences and key/value heads. Tuples of equal numbers are equal, whatever their type."""
    found = attention.choose(1, 8, head, False, segments, pieces)
    assert type(found) is type(chosen) and found == chosen
    assert any(type(found) is type(one) and found == one for one in attention.CANDIDATES)


@pytest.mark.parametrize("head", [80, 256, 520])
def test_heads_of_other_sizes_have_a_schedule(head):
    assert isinstance(attention.choose(1, 8, head, False, 4, 1000), attention.Schedule)


def test_a_smaller_gpu_is_full_with_fewer_programs():
    few, many = (1, 8, 128, False, 1, 100), (528, 8, 128, True, 1, 4)
    assert attention.choose(*few) == attention.Decode(4) and attention.choose(*few, 66) == attention.Decode(2)
    assert {attention.choose(*many, n).groups for n in range(60, 133)} == {2, 3}


@pytest.mark.parametrize(("N", "K"), [(5120, 2048), (2048, 4096), (128, 2048), (2048, 768), (151936, 2048), (7, 9)])
def test_the_chosen_linear_schedules_are_candidates(N, K):
    """So they were compiled here and checked on the GPU, for every number of rows."""
    chosen = {linear.choose(M, N, K, 132) for M in (*range(1, 600), 1024, 2048, 4096, 16384)}
    assert chosen <= set(linear.CANDIDATES)
    assert not (K % 8 and any(tile.tma or tile.pingpong or tile.whole for tile in chosen))
    slices = {linear.choose(M, N, K, 132, aligned=False) for M in (1, 16, 100, 5000)}
    assert slices <= set(linear.CANDIDATES) and not any(tile.tma or tile.pingpong or tile.whole for tile in slices)
