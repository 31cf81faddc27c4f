"""Machine code of attention in CUDA C++, for sm_90a: the arithmetic of the spec, and when it reads."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

import triton

from alignment_tests.gpu.test_compiles import sass
from minitransformer.ops.gpu import attention, attention_cluster, attention_fold, attention_prefill, attention_warp


def _registers(folder) -> int:
    """Of a thread, when the kernel that `sass` has looked at begins."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", folder / "code"], capture_output=True, text=True).stdout
    return int(re.search(r"REG:(\d+)", text).group(1))


def _innermost(text: str, name: str) -> str:
    """The instructions of the shortest loop that has this one, a line each."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
    place = {int(at, 16): i for i, (at, _) in enumerate(found)}
    loops = []
    for i, (at, what) in enumerate(found):
        to = re.search(r"\bBRA (?:!?U?P\d, )?(0x[0-9a-f]+)", what)
        if to and int(to.group(1), 16) < int(at, 16):
            loops.append([line for _, line in found[place[int(to.group(1), 16)] : i + 1]])
    return "\n".join(min((loop for loop in loops if any(name in line for line in loop)), key=len))


@pytest.mark.parametrize("schedule", [s for s in attention.CANDIDATES if isinstance(s, attention.Prefill)], ids=str)
@pytest.mark.parametrize(
    ("group", "head", "keys"), [(8, 128, 64), (8, 128, 16), (3, 64, 64), (3, 64, 8), (1, 128, 32)]
)
def test_attention_of_many_queries_compiles_to_the_arithmetic_of_the_spec(group, head, keys, schedule, tmp_path):
    """Machine code. FFMA is the division's: quick, of every element (4 each, twice in the text), and step by step."""
    text = sass(attention_prefill.SOURCE, attention_prefill.defines(group, head, *schedule, keys), tmp_path)
    # Who asks for more registers waits until so many are given up of those that a block begins with.
    given, taken = (int(re.search(rf"USETMAXREG\.{what}\S* .*?(0x\w+)", text).group(1), 16) for what in ("DE", "TRY"))
    begun = _registers(tmp_path) * (schedule.groups + 1)
    assert schedule.groups * taken + given <= begun, f"{taken} and {given} registers of {begun}: it would wait forever"
    found = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|MNMX|SETP|SET)2?\b[.\w]*)", text))
    names = {name.split(".")[0] for name in found}
    assert {"FMUL", "FADD", "FMNMX"} <= names <= {"FMUL", "FADD", "FMNMX", "FFMA", "FSETP"}, found
    assert set(re.findall(r"MUFU\.\w+", text)) >= {"MUFU.EX2"}
    assert text.count("FFMA") <= 8 * (head // 2) + 64
    assert {"HGMMA.64x64x16.F32.BF16", f"HGMMA.64x{head}x16.F32.BF16"} <= set(re.findall(r"HGMMA\.\S+", text))
    # The assembler waits for each product by itself if it finds a register of one touched too early.
    assert 3 * text.count("WARPGROUP.DEPBAR") < text.count("HGMMA.64"), "products one after another"
    # A program's last store, which stands behind the loops, has too few registers, and a piece's start one.
    loop = _innermost(text, "HGMMA")
    assert loop.count("HGMMA") == head // 16 + 4 and not re.search(r"\b(STL|LDL)\b", loop), "spills"
    late = loop[loop.rindex("MUFU.EX2") : loop.rindex("F2FP")]
    assert "BRA" not in late, "weights are packed behind a segment's fold, not beside the last exp2: 3 % slower"
    assert "BRA.DIV" not in text, "the compiler no longer sees that a warp stays together: a quarter slower"


def _attends_as_the_spec_says(text: str) -> None:
    """Machine code of one warp's products. FFMA, and FADD.FTZ, are the division's."""
    found = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|MNMX|SETP|SET)2?\b[.\w]*)", text))
    names = {name.split(".")[0] for name in found}
    assert {"HMMA", "FMUL", "FADD", "FMNMX"} <= names <= {"HMMA", "FMUL", "FADD", "FMNMX", "FFMA", "FSETP"}, found
    assert {name for name in found if name.startswith("HMMA")} == {"HMMA.16816.F32.BF16"}
    assert "MUFU.EX2" in text
    assert "STL" not in text, "spills"
    assert "BRA.DIV" not in text, "the compiler no longer sees that a warp stays together"


@pytest.mark.parametrize("blocks", [s.blocks for s in attention.CANDIDATES if isinstance(s, attention.Cluster)])
@pytest.mark.parametrize(("longest", "group", "head"), [(1, 8, 128), (2, 8, 128), (5, 3, 64), (1, 1, 128)])
def test_attention_by_clusters_compiles_to_the_arithmetic_of_the_spec(longest, group, head, blocks, tmp_path):
    if not attention_cluster.fits(longest, group, head, blocks):
        pytest.skip("a block would have too few columns")
    text = sass(attention_cluster.SOURCE, attention_cluster.defines(longest, group, head, blocks), tmp_path)
    _attends_as_the_spec_says(text)
    assert text.index("ACQBULK") < re.search(r"\bLDG", text).start(), "it reads before the kernel in front has ended"


@pytest.mark.parametrize("slots", [s.slots for s in attention.CANDIDATES if isinstance(s, attention.Alone)])
@pytest.mark.parametrize(("longest", "group", "head"), [(1, 8, 128), (2, 8, 128), (5, 3, 64), (1, 1, 128)])
def test_attention_by_single_warps_compiles_to_the_arithmetic_of_the_spec(longest, group, head, slots, tmp_path):
    """Before the kernel in front has ended it may only bring lines to the L2 cache, and read past the L1 cache, which
    would keep what is old."""
    text = sass(attention_warp.SOURCE, attention_warp.defines(longest, group, head, slots), tmp_path)
    _attends_as_the_spec_says(text)
    early = text[: text.index("ACQBULK")]
    assert set(re.findall(r"\bLDG\.E(?:\.64)?(\S*)", early)) == {".STRONG.GPU"} and "CCTL" in early
    assert not re.search(r"\b(STG|LDGSTS|LDG\.E\.128|ATOM|RED)", early)


@pytest.mark.parametrize("head", attention_fold.WIDTHS)
def test_the_fold_asks_for_all_segments_before_it_uses_one(head, tmp_path):
    text = sass(attention_fold.SOURCE, attention_fold.defines(head), tmp_path)
    names = re.findall(r"\b((?:[FD](?:MUL|ADD|FMA|MNMX|SETP|SET)|MUFU|SHFL|LDG|STL)\b[.\w]*)", text)
    assert {name.split(".")[0] for name in names} <= {"FMUL", "FADD", "FFMA", "FMNMX", "FSETP", "MUFU", "SHFL", "LDG"}
    at_once = max(len(list(run)) for asks, run in itertools.groupby(names, lambda name: "LDG" in name) if asks)
    assert at_once >= 32 and "MUFU.EX2" in names
