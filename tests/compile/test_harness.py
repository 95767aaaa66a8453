"""The fake driver compiles what a launch would run, for each target, and the faults we forbid are seen."""

import pytest
import torch

pytestmark = pytest.mark.compile

ALL = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")


@pytest.fixture
def kernels():
    from tests.harness import kernels

    return kernels


@pytest.fixture
def driver():
    from tests.harness import fake_driver

    return fake_driver


@pytest.fixture
def resources():
    from tests.harness.resources import resources

    return resources


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("arch", ALL)
def test_a_launch_on_meta_tensors_compiles_for_the_target(arch, kernels, driver, resources):
    with driver.target(arch) as compiled:
        kernels.row_sum(meta(8, 4096), BLOCK_N=1024)
    (kernel,) = compiled
    assert ("hsaco" if arch.startswith("gfx") else "cubin") in kernel.asm
    found = resources(kernel)
    assert found.registers > 0
    assert found.faults() == []
    assert not found.multiplies


def test_every_block_records_its_kernels_again(kernels, driver):
    for _ in range(2):
        with driver.target("sm_90") as compiled:
            kernels.row_sum(meta(8, 4096), BLOCK_N=1024)
        assert [k.name for k in compiled] == ["row_sum_kernel"]


def test_autotune_compiles_every_configuration(kernels, driver):
    kernels.tuned_row_sum_kernel.cache.clear()
    with driver.target("gfx942") as compiled:
        kernels.row_sum(meta(8, 4096), kernels.tuned_row_sum_kernel)
    assert {k.metadata.num_warps for k in compiled} == {2, 8}


@pytest.mark.parametrize("arch", ALL)
def test_a_dot_in_bf16_uses_the_matrix_units(arch, kernels, driver, resources):
    with driver.target(arch) as compiled:
        kernels.matmul_kernel[(1,)](meta(64, 64), meta(64, 64), meta(64, 64, dtype=torch.float32), 64, "ieee")
    found = resources(compiled[0])
    assert found.multiplies
    assert found.matrix_instructions
    assert found.faults() == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_lost_matrix_instructions_are_a_fault(arch, kernels, driver, resources):
    """NVIDIA's matrix units have no exact fp32 product: the compiler falls back to scalar multiplications."""
    a, b, c = (meta(32, 32, dtype=torch.float32) for _ in range(3))
    with driver.target(arch) as compiled:
        kernels.matmul_kernel[(1,)](a, b, c, 32, "ieee")
    assert any("no matrix instruction" in fault for fault in resources(compiled[0]).faults())


@pytest.mark.parametrize("arch", ALL)
def test_spills_are_a_fault(arch, kernels, driver, resources):
    # of 255 registers in a thread of NVIDIA's, 512 in one of AMD's: 384, and 640 in a wave of twice the width
    tiles = 12 if arch.startswith("sm_") else 40
    x = meta(tiles * 1024, dtype=torch.float32)
    with driver.target(arch) as compiled:
        kernels.many_live_values_kernel[(1,)](x, torch.empty_like(x), 1024, tiles, num_warps=1)
    assert any("spills" in fault for fault in resources(compiled[0]).faults())


def test_too_much_shared_memory_is_refused_as_on_the_real_gpu(kernels, driver):
    from triton.runtime.errors import OutOfResources

    a, b, c = (meta(256, 256) for _ in range(3))
    with driver.target("gfx942"), pytest.raises(OutOfResources, match="shared memory"):
        kernels.matmul_kernel[(1,)](a, b, c, 256, "ieee", num_warps=8)


def test_an_impossible_grid_is_refused(kernels, driver):
    with driver.target("sm_90"), pytest.raises(ValueError, match="grid"):
        kernels.row_sum_kernel[(8, 70000)](meta(8, 64), meta(8, dtype=torch.float32), 64, BLOCK_N=64)


def test_the_real_driver_is_back_after_the_block(driver):
    import triton

    before = triton.runtime.driver._active
    with pytest.raises(RuntimeError, match="on purpose"), driver.target("sm_90"):
        raise RuntimeError("on purpose")
    assert triton.runtime.driver._active is before


def test_an_unknown_target_is_named(driver):
    with pytest.raises(ValueError, match="sm_75"), driver.target("sm_75"):
        pass


SET = """
        /*0010*/                   USGXT.U32 UR10, UR4, 0xe ;
        /*0020*/                   UIADD3.64 UR30, UR6, 0x7e, URZ ;
        /*0030*/              @!P0 HGMMA.64x16x16.F32.BF16 R88, R24, gdesc[UR28].tnspB, R88 ;
"""


def test_a_descriptor_from_a_register_that_nothing_wrote_is_found():
    from tests.harness.uniform_registers import unset

    head = "        /*0000*/  UMOV UR4, 0x10 ;\n        /*0008*/  ULDC.64 UR6, c[0x0][0x208] ;"
    assert unset(head + SET) == []
    assert unset(SET) == ["USGXT.U32 UR10, UR4, 0xe", "UIADD3.64 UR30, UR6, 0x7e, URZ"]
    both_from_memory = SET.replace("R88, R24, gdesc", "R88, gdesc")
    assert unset(head + both_from_memory) == ["HGMMA.64x16x16.F32.BF16 R88, gdesc[UR28].tnspB, R88"]
    assert unset(head + SET + "        /*0040*/  UIADD3 UR42, UP0, UR42, 0x20, URZ ;") == [
        "UIADD3 UR42, UP0, UR42, 0x20, URZ"
    ]


PLACED = """
        /*0000*/                   UMOV UR8, 0x400 ;
        /*0010*/                   USHF.R.U32.HI UR24, URZ, 0x4, UR8 ;
        /*0020*/                   USGXT.U32 UR24, UR24, 0xe ;
        /*0030*/                   UMOV UR25, 0x40000040 ;
        /*0040*/                   UIADD3 UR26, UP1, UR24, 0x2, URZ ;
        /*0050*/                   UMOV UR4, URZ ;
        /*0060*/                   UIADD3.X UR27, UR4, 0x40000040, URZ, UP1, !UPT ;
.L_x_1:
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], R24, gsb0 ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
"""


def test_a_descriptor_that_describes_no_tile_is_found():
    from tests.harness.matrix_descriptors import wrong

    assert wrong(PLACED) == []
    (instruction,) = [line.split("*/")[1].strip(" ;") for line in PLACED.splitlines() if "HGMMA" in line]
    # As ptxas computed one from the base of the shared memory, where a part of it was to be 0
    of_the_base = PLACED.replace("UP1, UR24, 0x2", "UP1, UR8, 0x2").replace("UR27, UR4,", "UR27, UR8,")
    assert wrong(of_the_base) == [instruction]
    assert wrong(PLACED.replace("UMOV UR25, 0x40000040", "UMOV UR26, 0x40000040")) == [instruction]
    in_the_loop = "        /*0078*/                   UIADD3 UR25, UR25, 0x1, URZ ;\n        /*0080*/"
    assert wrong(PLACED.replace("        /*0080*/", in_the_loop)) == []  # no constant any more
    from_registers = PLACED.replace("R24, gdesc", "R24, R20, gdesc").replace("UMOV UR25", "UMOV UR5")
    assert wrong(from_registers) == []  # of A nothing is read then
