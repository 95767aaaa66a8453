"""What `tilewright.tune` refuses, and what it makes of a function and its arguments before anything is measured."""

import pytest
import torch
from tests.tuning.own_kernel import SPACE, Double

import tilewright
from tilewright.errors import InputError
from tilewright.tuning.own_kernels.agreement import difference
from tilewright.tuning.own_kernels.arguments import copied


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": {}}, "the space is empty"),
        ({"space": {"BLOCK": ()}}, r"BLOCK is \(\); needs a tuple"),
        ({"space": {"BLOCK": 64}}, "BLOCK is 64; needs a tuple"),
        ({"space": {"BLOCK": (object(),)}}, "a table holds int, float, str, bool and None"),
        ({"space": {"TILE": (1,)}}, "takes no keyword TILE"),
        ({"restore": ("y",)}, "restore names y, which is no argument: x, out"),
        ({"default": {"BLOCK": 3}}, "is not in the space"),
        ({"default": {"BLOCK": True}, "space": {"BLOCK": (1, 2)}}, "is not in the space"),
        ({"name": "a/b"}, "is to be a file's"),
    ],
)
def test_a_malformed_declaration_is_refused_at_once(options, message):
    with pytest.raises(InputError, match=message):
        Double(**options)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"M": 1.5}, "key M is 1.5, a float; needs an int or a string"),
        ({"M": True}, "key M is True, a bool"),
        ({"M": torch.float32}, "key M is torch.float32"),
        ({"M": "a=b"}, "',' and '=' separate"),
        ({1: 2}, "has the name 1"),
        ({}, "needs a dict of sizes"),
        (3, "key returned 3"),
    ],
)
def test_a_key_that_no_table_holds_is_refused(key, message):
    kernel = Double(key=lambda x, out: key)
    with pytest.raises(InputError, match=message):
        kernel.run(torch.randn(8, 16))


def test_a_call_without_tensors_names_what_is_missing():
    with pytest.raises(InputError, match="no argument is a tensor"):
        Double(key=lambda x, out: {"M": 1}).launch(3, 4)


def test_default_names_tell_functions_apart():
    def kernel(x, BLOCK):
        return x

    launch = tilewright.tune(space=SPACE, key=lambda x: {"N": 1})(kernel)
    assert launch.name == f"{__name__}.test_default_names_tell_functions_apart.kernel"


def test_copies_keep_strides_alignment_and_shared_memory():
    whole = torch.arange(4096.0)
    a, b, c = whole[1100:1300].view(10, 20).t(), whole[1200:1210], torch.ones(3)
    first, (second, third) = copied((a, [b, c]))
    assert [t.stride() for t in (first, second, third)] == [t.stride() for t in (a, b, c)]
    assert all(torch.equal(x, y) for x, y in zip((first, second, third), (a, b, c), strict=True))
    assert (first.data_ptr() - a.data_ptr()) % 64 == 0
    assert first.untyped_storage().nbytes() < 2048, "the span of the tensors, not all of their storage"
    second.zero_()
    assert first.eq(0).sum() == 10
    assert b.sum() > 0


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 2**-9), (torch.bfloat16, 2**-6)]
)
def test_the_stated_tolerance_is_the_one_that_holds(dtype, limit):
    """A row of ones: |first| + rms is 2, so twice the tolerance is allowed."""
    first = torch.ones(4, 8, dtype=torch.float64)
    for factor, right in ((1.6, True), (2.6, False)):
        ours = first.clone()
        ours[2, 3] += factor * limit
        exact = first.to(dtype), ours.to(dtype)
        step = float((exact[1] - exact[0]).abs().max()) / limit
        assert (step < 2) is right, "the rounded difference is on the same side"
        fault = difference([exact[0]], [exact[1]], None)
        assert (fault is None) is right, fault


def test_results_of_other_kinds_are_no_matter_of_tolerance():
    ones, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert difference([nan], [nan.clone()], None) is None
    assert "NaN or infinite elsewhere" in difference([ones], [nan], 10.0)
    assert "differs in 1 of 3" in difference([torch.arange(3)], [torch.tensor([0, 1, 3])], 10.0)
    assert "is (3,) torch.float64, not (3,) torch.float32" in difference([ones], [ones.double()], None)
    assert difference([ones], [], None) == "wrong: 0 results, not 1"
