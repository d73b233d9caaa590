"""MXFP8 from FP32 bits: the scale of a group, the factor of its elements, their rounding.

Scales and factors are integers until they multiply: a factor is a power of two, and a product with
it is exact unless it falls below the smallest element, whatever the target, as long as subnormals
are kept (the compile guard looks at that). NVIDIA rounds elements with its conversion to fp8
(nearest even, saturating, NaN to 0x7F); elsewhere the rounding is done on the bits. Both give the
same bits.
"""

import triton
import triton.language as tl
from kosmos_core.device.target import NVIDIA

# Elements that share a scale.
GROUP = tl.constexpr(32)

E4M3 = tl.constexpr(0)
E5M2 = tl.constexpr(1)

# How a group's largest magnitude becomes its scale.
RCEIL = tl.constexpr(0)  # the smallest power of two that keeps it within the format
FLOOR = tl.constexpr(1)  # its own power of two over that of the format's largest element

NAN_CODE = tl.constexpr(255)
INF_CODE = tl.constexpr(254)
NAN_ELEMENT = tl.constexpr(0x7F)  # in both formats


@triton.jit
def magnitude_bits(x):
    """Bits of |x|, int32, for fp32 x: ordered as the magnitudes are, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def group_scale(amax, FORMAT: tl.constexpr, SCALING: tl.constexpr):
    """(E8M0 code int32, what elements are multiplied by fp32) of groups.

    amax: fp32 bits of the group's largest magnitude.

    RCEIL: the least power of two not below amax / (largest element), where the quotient is rounded
        to fp32; both largest elements are 1.75 times a power of two. 254 for infinity.
    FLOOR: 2^floor(log2(amax)) over the power of two of the largest element.
    NaN gives 255. Source: cuBLAS documentation, "1D block scaling"; OCP MX 1.0, section 6.3.

    The factor is 2^(127 - code) but for the end codes, where it is as in torchao: 1 for code 0
    under RCEIL, so that such a group becomes zeros; 2^126 under FLOOR; NaN for code 255 under
    RCEIL; 0 under FLOOR, which keeps finite elements as zeros. Both in one, since every thread
    computes them for each of its columns: the comparisons are half of what a cast costs.
    """
    # Exponent of the largest element: 448 = 1.75 * 2^8, 57344 = 1.75 * 2^15.
    TOP: tl.constexpr = 8 if FORMAT == E4M3 else 15
    is_nan = amax > 0x7F800000
    if SCALING == RCEIL:
        # Carries into the exponent for mantissas above 1.75.
        carried = amax + 0x1FFFFF
        # The last one is the one quotient above 2^-127 that rounds to it in fp32.
        is_low = amax <= (TOP << 23) + 0x600001
        is_end = amax >= 0x7F800000
        code = tl.where(is_low, 0, (carried >> 23) - TOP)
        code = tl.where(is_end, tl.where(is_nan, NAN_CODE, INF_CODE), code)
        bits = (254 << 23) - ((carried & 0x7F800000) - (TOP << 23))
        bits = tl.where(is_low, 0x3F800000, bits)
        bits = tl.where(is_end, tl.where(is_nan, 0x7FC00000, 0x00400000), bits)
    else:
        exponent = (amax >> 23) - TOP
        code = tl.where(is_nan, NAN_CODE, tl.maximum(exponent, 0))
        bits = tl.where(is_nan, 0, (254 - tl.maximum(exponent, 1)) << 23)
    return code, bits.to(tl.float32, bitcast=True)


@triton.jit
def round_elements(y, FORMAT: tl.constexpr, TARGET: tl.constexpr):
    """fp32 to the format's bits, uint8: nearest even, saturating, NaN to 0x7F."""
    if TARGET == NVIDIA:
        if FORMAT == E4M3:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        BIAS: tl.constexpr = 7 if FORMAT == E4M3 else 15
        MANTISSA: tl.constexpr = 3 if FORMAT == E4M3 else 2
        LARGEST: tl.constexpr = 0x43E00000 if FORMAT == E4M3 else 0x47600000
        SHIFT: tl.constexpr = 23 - MANTISSA
        SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
        HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
        # A sum with this number has the unit of a subnormal element: the addition rounds.
        MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
        bits = y.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        size = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
        normal = (size - ((127 - BIAS) << 23) + HALF + ((size >> SHIFT) & 1)) >> SHIFT
        magic = tl.full([], MAGIC, tl.int32).to(tl.float32, bitcast=True)
        shifted = size.to(tl.float32, bitcast=True) + magic
        subnormal = shifted.to(tl.int32, bitcast=True) - MAGIC
        element = sign | tl.where(size >= SMALLEST_NORMAL, normal, subnormal)
        return tl.where(is_nan, NAN_ELEMENT, element).to(tl.uint8)
