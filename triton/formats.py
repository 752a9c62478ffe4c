"""Numbers in the formats of tensor cores as numpy arrays of bits, and back.

A `Tensor` is a shape, a type's name as `strata probe` spells it, and the bits; `values` are exact in f64 (integers: in i64).
Rounding is to nearest, ties to even, as the conversions of the hardware do; 8-bit floats saturate.
"""

from dataclasses import dataclass

import numpy as np

# Type name of `strata probe` -> (type name in a Triton signature, numpy type of the bits).
TYPES = {
    "f64": ("fp64", np.float64),
    "f32": ("fp32", np.float32),
    "f16": ("fp16", np.float16),
    "bf16": ("bf16", np.uint16),
    "e4m3": ("fp8e4nv", np.uint8),
    "e5m2": ("fp8e5", np.uint8),
    "i64": ("i64", np.int64),
    "i32": ("i32", np.int32),
    "i16": ("i16", np.int16),
    "i8": ("i8", np.int8),
    "u8": ("u8", np.uint8),
    "u32": ("u32", np.uint32),
}


def _minifloat_table(exponent_bits, mantissa_bits, ieee):
    """The values of all 256 codes of an 8-bit float; without `ieee`, only all ones is NaN and there is no infinity."""
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(256)
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    top = exponent == (1 << exponent_bits) - 1
    if ieee:
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where(top & (mantissa == 1 - 1 / (1 << mantissa_bits)), np.nan, value)
    return sign * value


TABLES = {"e4m3": _minifloat_table(4, 3, False), "e5m2": _minifloat_table(5, 2, True)}


def _encode_minifloat(values, table):
    finite = np.flatnonzero(np.isfinite(table[:128]))
    grid = table[finite]
    magnitude = np.clip(np.abs(values), 0, grid[-1])
    above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    nearer_high = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (above % 2 == 0))
    code = np.where(nearer_high, above, above - 1)
    code = np.where(np.isnan(values), 127, code)
    return (code | (np.signbit(values) << 7)).astype(np.uint8)


def _encode_bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    # A double rounding through f32 is harmless for the inputs here, which start as f32.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


@dataclass
class Tensor:
    """An array of one type; `bits` in the numpy type of TYPES."""

    dtype: str
    bits: np.ndarray

    @property
    def values(self):
        """The exact values in f64, or i64 for integers."""
        if self.dtype == "bf16":
            return (self.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.dtype in TABLES:
            return TABLES[self.dtype][self.bits]
        return self.bits.astype(np.float64 if self.dtype[0] == "f" else np.int64)

    @property
    def shape(self):
        return self.bits.shape

    @property
    def triton(self):
        """The element type in a Triton signature."""
        return TYPES[self.dtype][0]


def tensor(dtype, values):
    """`values` rounded to the type."""
    values = np.asarray(values)
    if dtype in TABLES:
        return Tensor(dtype, _encode_minifloat(np.asarray(values, np.float64), TABLES[dtype]))
    if dtype == "bf16":
        return Tensor(dtype, _encode_bf16(values))
    return Tensor(dtype, np.ascontiguousarray(values).astype(TYPES[dtype][1]))
