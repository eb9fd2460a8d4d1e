"""PTX's fundamental types: how wide they are, and the C++ type that holds their bits."""

BITS = {
    "pred": 1,
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 128,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "f16x2": 32,
    "bf16x2": 32,
    "f32x2": 64,
    "u16x2": 32,
    "s16x2": 32,
    "e2m1x2": 8,
    "e4m3x2": 16,
    "e5m2x2": 16,
    "ue8m0x2": 16,
}

UNSIGNED = {1: "bool", 8: "uint8_t", 16: "uint16_t", 32: "uint32_t", 64: "uint64_t", 128: "u128"}
SIGNED = {8: "int8_t", 16: "int16_t", 32: "int32_t", 64: "int64_t"}


def is_integer(name):
    return name[0] in "us" and name[1:].isdigit()


def is_signed(name):
    return name[0] == "s" and name[1:].isdigit()


def storage(name):
    """The C++ type of a register of this PTX type."""
    return UNSIGNED[BITS[name]]


def arithmetic(name):
    """The C++ integer type of its values: signed for s types, unsigned for all others."""
    return SIGNED[BITS[name]] if is_signed(name) else UNSIGNED[BITS[name]]
