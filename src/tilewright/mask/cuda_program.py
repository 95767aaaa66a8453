"""A mask program inside a CUDA C++ kernel: a C++ type, see `mask_program.cuh` of the attention kernels."""

from functools import partial

from tilewright.errors import BackendError
from tilewright.mask.elements import walk
from tilewright.mask.program import flags, offset, root

BAND_ONLY = "tilewright::BandOnly"
"""The type of the empty text: the kernel itself knows a band."""

_LEAVES = {
    "band": "MaskBand",
    "doc": "MaskDocument",
    "seq": "MaskSequences",
    "prefix": "MaskPrefix",
    "global": "MaskGlobal",
    "dilated": "MaskDilated",
    "strided": "MaskStrided",
    "block": "MaskBlock",
}


def cuda_type(program: str) -> str:
    """The C++ type of a program's text, "tilewright::MaskNot<tilewright::MaskBand<0>>" for "band:0 ~".

    BackendError for a leaf that C++ does not have.
    """
    if not program:
        return BAND_ONLY
    return walk(program, _leaf, *(partial(_node, name) for name in ("Not", "Both", "Either")))


def _leaf(word: str) -> str:
    kind, leaf_flags = root(word), flags(word)
    if kind not in _LEAVES:
        raise BackendError(f'the mask\'s leaf {kind!r} is not written in CUDA C++. Try backend="triton".')
    depends = {
        "doc": ("b" in leaf_flags,),
        "seq": ("b" in leaf_flags,),
        "prefix": (leaf_flags != "", "b" in leaf_flags),
        "block": ("b" in leaf_flags, "h" in leaf_flags),
    }.get(kind, ())
    values = ", ".join((str(offset(word)), *(str(flag).lower() for flag in depends)))
    return f"tilewright::{_LEAVES[kind]}<{values}>"


def _node(name: str, *operands: str) -> str:
    return f"tilewright::Mask{name}<{', '.join(operands)}>"
