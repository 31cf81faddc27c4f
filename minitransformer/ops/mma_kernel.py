"""The inner step of the tensor-core chain as vector code: 32 output columns at once, in registers.

LLVM vectors are written out here because Numba's own vectoriser keeps the accumulators in memory (0.5 to 1.15
billion multiply-adds a second; this gives several). Every instruction is exact or an IEEE operation, so LLVM may lower
it for AVX-512, AVX2 or anything else without moving a bit.

Fixed-point view of one step (mma.py has the spec): with E the largest exponent, a product times 2^(25 - E) is
truncated to int32 (its magnitude stays below 2^27), the integers are added, the sum is cut to 24 bits and scaled back.
Exponents are held as int16 with a bias of 127 an operand; ZERO and ODD mark operands without an exponent.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

STEP = 16  # k per step: the tensor core's
COLUMNS = 32  # output columns per panel
LANES = 16
ZERO = -4096  # "exponent" of a zero operand: any sum with it stays below NO_TERM
ODD = 8000  # "exponent" of NaN and infinity: any sum with it, even with ZERO, exceeds HIGHEST
NO_TERM = -2000
LOWEST, HIGHEST = 254 - 101, 254 + 125  # range of E (biased twice) in which FP32 holds every scale and every result

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


class Vec:
    """An LLVM vector value with operators; Python numbers become constants of every lane."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value):
        self.b, self.v, self.kind, self.lanes = builder, value, value.type.element, value.type.count

    def _lift(self, other) -> ir.Value:
        return other.v if isinstance(other, Vec) else ir.Constant(self.v.type, [other] * self.lanes)

    def _op(self, integer: str, floating: str | None, other) -> "Vec":
        name = integer if self.kind != F32 else floating
        return Vec(self.b, getattr(self.b, name)(self.v, self._lift(other)))

    def __add__(self, o):
        return self._op("add", "fadd", o)

    def __sub__(self, o):
        return self._op("sub", "fsub", o)

    def __mul__(self, o):
        return self._op("mul", "fmul", o)

    def __and__(self, o):
        return self._op("and_", None, o)

    def __or__(self, o):
        return self._op("or_", None, o)

    def __xor__(self, o):
        return self._op("xor", None, o)

    def __lshift__(self, o):
        return self._op("shl", None, o)

    def __rshift__(self, o):
        """Logical shift."""
        return self._op("lshr", None, o)

    def sar(self, o) -> "Vec":
        return self._op("ashr", None, o)

    def compare(self, sign: str, o) -> ir.Value:
        return self.b.icmp_signed(sign, self.v, self._lift(o))

    def where(self, mask: ir.Value, o) -> "Vec":
        """self where the mask holds, else o."""
        return Vec(self.b, self.b.select(mask, self.v, self._lift(o)))

    def max(self, o) -> "Vec":
        return self.where(self.compare(">", o), o)

    def min(self, o) -> "Vec":
        return self.where(self.compare("<", o), o)

    def cast(self, op: str, kind: ir.Type) -> "Vec":
        return Vec(self.b, getattr(self.b, op)(self.v, ir.VectorType(kind, self.lanes)))

    def shuffle(self, other: "Vec", lanes: list[int]) -> "Vec":
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return Vec(self.b, self.b.shuffle_vector(self.v, other.v, mask))

    def leading_zeros(self) -> "Vec":
        fn = cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(self.v.type, [self.v.type, ir.IntType(1)]), f"llvm.ctlz.v{self.lanes}i32"
        )
        return Vec(self.b, self.b.call(fn, [self.v, ir.Constant(ir.IntType(1), 0)]))


def _pointer(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: int | ir.Value = 0) -> ir.Value:
    """address + offset bytes, as a pointer to `kind`."""
    offset = ir.Constant(I64, offset) if isinstance(offset, int) else offset
    return b.inttoptr(b.add(address, offset), kind.as_pointer())


def _load(b, address, kind, lanes, offset=0) -> Vec:
    vector = ir.VectorType(kind, lanes)
    value = b.load(_pointer(b, address, vector, offset), typ=vector)
    value.align = 1
    return Vec(b, value)


def _store(vec: Vec, address, offset=0) -> None:
    vec.b.store(vec.v, _pointer(vec.b, address, vec.v.type, offset), align=1)


def _splat(b, scalar: ir.Value, lanes: int) -> Vec:
    vector = ir.VectorType(scalar.type, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return Vec(b, b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)))


def _exponents(bits: Vec) -> Vec:
    """int16 exponents of BF16 bit patterns: biased by 127, a subnormal as 1 (that is -126), ZERO and ODD marked."""
    field = (bits >> 7) & 255
    e = field.max(1).where((bits & 0x7FFF).compare("!=", 0), ZERO)
    return e.where(field.compare("!=", 255), ODD)


def _emit_unpack_row(b, bits: Vec, values, exponents, k: int) -> None:
    """Stores one k of the panel: 32 operands as FP32 and as exponents."""
    for half in range(2):
        part = bits.shuffle(bits, list(range(half * LANES, half * LANES + LANES)))
        wide = part.cast("zext", I32) << 16
        _store(wide.cast("bitcast", F32), values, (k * COLUMNS + half * LANES) * 4)
    _store(_exponents(bits), exponents, k * COLUMNS * 2)


@intrinsic
def unpack_columns(typingctx, source, stride, values, exponents):
    """Operand stored [k, n]: 16 rows of 32 BF16, `stride` bytes apart -> values and exponents [16, 32]."""

    def codegen(context, b, signature, args):
        source, stride, values, exponents = args
        for k in range(STEP):
            row = b.add(source, b.mul(stride, ir.Constant(I64, k)))
            _emit_unpack_row(b, _load(b, row, I16, COLUMNS), values, exponents, k)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def unpack_rows(typingctx, source, stride, values, exponents):
    """Operand stored [n, k]: 32 rows of 16 BF16 at `source` -> the same panel, transposed in registers."""

    def codegen(context, b, signature, args):
        source, stride, values, exponents = args
        rows = [_load(b, b.add(source, b.mul(stride, ir.Constant(I64, n))), I16, STEP) for n in range(COLUMNS)]
        halves = []
        for half in (rows[:LANES], rows[LANES:]):
            # Four rounds of interleaving row i with row i + 8 transpose a 16 x 16 block.
            low = [i for j in range(LANES // 2) for i in (j, j + LANES)]
            high = [i + LANES // 2 for i in low]
            for _ in range(4):
                half = [half[i // 2].shuffle(half[i // 2 + 8], high if i % 2 else low) for i in range(LANES)]
            halves.append(half)
        for k in range(STEP):
            _emit_unpack_row(b, halves[0][k].shuffle(halves[1][k], list(range(COLUMNS))), values, exponents, k)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _largest_exponent(b, a_exponents, exponents) -> list[Vec]:
    """max over the step's 16 k of e(a) + e(b), for 2 x 16 columns, as int32."""
    top = None
    for k in range(STEP):
        # An exponent of `a` is stored twice in an int32: a 32-bit broadcast is one load.
        pair = b.load(_pointer(b, a_exponents, I32, k * 4), typ=I32)
        e = _splat(b, pair, LANES).v
        e = Vec(b, b.bitcast(e, ir.VectorType(I16, COLUMNS))) + _load(b, exponents, I16, COLUMNS, k * COLUMNS * 2)
        top = e if top is None else top.max(e)
    return [top.shuffle(top, list(range(h * LANES, (h + 1) * LANES))).cast("sext", I32) for h in range(2)]


def _exponent_of_accumulator(c: Vec) -> Vec:
    bits = c.cast("bitcast", I32)
    field = (bits >> 23) & 255
    e = (field.max(1) + 127).where((bits << 1).compare("!=", 0), ZERO)
    return e.where(field.compare("!=", 255), ODD)


def _finish(low: Vec, high: Vec, unit: Vec) -> Vec:
    """Adds two int32 partial sums and truncates toward zero to 24 bits: FP32 in units of 2^(E - 25)."""
    total = low + high
    # |sum| may reach 2^31 + 2^26: where int32 wrapped, its sign bit is the wrong one and the magnitude fits uint32.
    wrapped = (low ^ total) & (high ^ total)
    sign = (total ^ wrapped).sar(31)
    size = (total ^ sign) - sign
    excess = (Vec(size.b, size._lift(8)) - size.leading_zeros()).max(0)
    size = (size >> excess) << excess
    value = (size.cast("uitofp", F32) * unit).cast("bitcast", I32)
    return (value | (sign & -(2**31))).cast("bitcast", F32)


@intrinsic
def step_row(typingctx, a, a_exponents, values, exponents, c):
    """One K = 16 step of one row: c [32] FP32 at address c becomes the next accumulator.

    a: 16 FP32, a_exponents: 16 int32 (each an int16 twice), values and exponents: the unpacked panel.
    Returns nonzero where E left the range that FP32 arithmetic covers; c is then worthless and the caller must
    recompute the row with the scalar definition.
    """

    def codegen(context, b, signature, args):
        a, a_exponents, values, exponents, c = args
        odd = None
        tops = _largest_exponent(b, a_exponents, exponents)
        for half in range(2):
            acc = _load(b, c, F32, LANES, half * LANES * 4)
            top = tops[half].max(_exponent_of_accumulator(acc))
            outside = b.or_(top.compare(">", HIGHEST), b.and_(top.compare("<", LOWEST), top.compare(">", NO_TERM)))
            odd = outside if odd is None else b.or_(odd, outside)
            top = top.max(LOWEST).min(HIGHEST)
            scale = ((Vec(b, top._lift(127 + 25 + 254)) - top) << 23).cast("bitcast", F32)
            unit = ((top - (254 - 127 + 25)) << 23).cast("bitcast", F32)
            sums = [None, (acc * scale).cast("fptosi", I32)]
            for k in range(STEP):
                scalar = b.load(_pointer(b, a, F32, k * 4), typ=F32)
                product = _load(b, values, F32, LANES, (k * COLUMNS + half * LANES) * 4) * _splat(b, scalar, LANES)
                term = (product * scale).cast("fptosi", I32)  # the truncation toward zero
                side = k // 8
                sums[side] = term if sums[side] is None else sums[side] + term
            _store(_finish(sums[0], sums[1], unit), c, half * LANES * 4)
        return b.zext(b.bitcast(odd, I16), I64)

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64), codegen
