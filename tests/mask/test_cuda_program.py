"""The C++ type of a program: operators nest as they do in the text, leaves name their place and what they depend on."""

import pytest

from tilewright.errors import BackendError
from tilewright.mask.cuda_program import cuda_type


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "BandOnly"),
        ("band:0", "MaskBand<0>"),
        ("band:0 doc.b:2 &", "MaskBoth<MaskBand<0>, MaskDocument<2, true>>"),
        ("doc:4 ~", "MaskNot<MaskDocument<4, false>>"),
        ("band:0 seq:2 &", "MaskBoth<MaskBand<0>, MaskSequences<2, false>>"),
        ("seq.b:0", "MaskSequences<0, true>"),
        ("prefix:0 prefix.t:1 prefix.b:2 | |",
         "MaskEither<MaskPrefix<0, false, false>, MaskEither<MaskPrefix<1, true, false>, MaskPrefix<2, true, true>>>"),
        ("global:0 dilated:1 & strided:2 |", "MaskEither<MaskBoth<MaskGlobal<0>, MaskDilated<1>>, MaskStrided<2>>"),
        ("block:0 block.b:6 | block.h:12 | block.bh:18 |",
         "MaskEither<MaskEither<MaskEither<MaskBlock<0, false, false>, MaskBlock<6, true, false>>, "
         "MaskBlock<12, false, true>>, MaskBlock<18, true, true>>"),
    ],
)  # fmt: skip
def test_types(text, expected):
    assert cuda_type(text).replace("tilewright::", "") == expected


def test_a_leaf_that_is_not_written_is_told():
    with pytest.raises(BackendError, match="leaf 'hexagonal'"):
        cuda_type("band:0 hexagonal:2 &")
