"""Matrix products on the page: tables by M, classes by M and weight, one small plot."""

from dataclasses import replace
from pathlib import Path

from PIL import Image
from tests.bench.test_report import MACHINE, WON

from tilewright.bench.report import pages, report
from tilewright.bench.schema import Results, Row


def product(case: str, m: int, n: int, k: int, own: float, paused: float | None = None, **params: object) -> Row:
    return replace(
        WON,
        op="matmul",
        case=case,
        params={"M": m, "N": n, "K": k, **params},
        impls={"cuda": 20.0, "torch": 25.0},
        chosen="torch",
        peers={"cublas": 20.0 * own},
        floor_us=10.0,
        ratio_own=own,
        ratio_auto=own * 20 / 25,
        paused={} if paused is None else {"cuda": 20.0, "cublas": 20.0 * paused},
        ratio_own_paused=paused,
    )


ROWS = [
    product("big", 1, 28672, 4096, own=1.0),  # 235 MB
    product("mid", 1, 4096, 4096, own=2.0),  # 34 MB
    product("small", 1, 576, 7168, own=8.0),  # 8 MB
    product("gated", 1, 4096, 4096, own=3.0, activation="swiglu"),
    product("square", 4096, 4096, 4096, own=1.21, paused=1.5),
    product("square", 8192, 8192, 8192, own=1.0, paused=1.5),
    product("chunk", 512, 4096, 4096, own=0.9),
]


def page(folder: Path, rows: list[Row]) -> str:
    Results("gemm", MACHINE, rows=rows).save(folder / "results" / "gpu" / "gemm.json")
    return (report(folder / "results", folder / "performance").parent / "gemm.md").read_text()


def test_means_of_the_classes(tmp_path: Path) -> None:
    lines = page(tmp_path, ROWS).splitlines()
    means = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines if "|" in line
    }
    large = means["matmul, M >= 1024"]
    assert large[:4] == ["2", "1.100", "1.000", "1.500"]
    assert large[6:8] == ["50 %", "50 %"]
    assert large[8] == "54976, peer 54976"  # 2 * 8192**3 flops in 20 us; cuBLAS is as fast there
    assert means["matmul, 64 < M < 1024"][:3] == ["1", "0.900", "**0.900**"]
    assert means["matmul, M <= 64, weights of 64 MB and more"][:2] == ["1", "1.000"]
    assert means["matmul, M <= 64, weights under 64 MB"][:3] == ["2", "4.000", "2.000"]
    assert means["matmul, ... of them 30 to 64 MB"][:2] == ["1", "2.000"]
    assert means["matmul, other layouts and epilogues"][:2] == ["1", "3.000"]


def test_means_tell_widths_scalings_and_groups_apart(tmp_path: Path) -> None:
    """Weights of 4 bits and of many groups count as what they are in memory; flops are those of all groups."""
    rows = [
        product("half", 1, 16384, 7168, own=1.0),  # 235 MB
        product("int4", 1, 16384, 7168, own=2.0, bits=4),  # 59 MB
        replace(product("fine", 64, 4096, 4096, own=3.0, scaling="token_block"), dtype="float8_e4m3fn"),  # 17 MB
        replace(product("coarse", 64, 4096, 4096, own=4.0, scaling="row"), dtype="float8_e4m3fn"),
        product("groups", 16, 4096, 4096, own=5.0, G=8, split="random"),  # 268 MB
    ]
    text = page(tmp_path, rows)
    means = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| matmul")}
    assert "| 2 | 2.236 | 1.000 |" in means["matmul, M <= 64, weights of 64 MB and more"]
    assert "| 1 | 2.000 |" in means["matmul int4, ... of them 30 to 64 MB"]
    assert "| 1 | 3.000 |" in means["matmul float8_e4m3fn token_block, M <= 64, weights under 64 MB"]
    assert "| 1 | 4.000 |" in means["matmul float8_e4m3fn row, M <= 64, weights under 64 MB"]
    assert "| groups | 8 x 16 x 4096 x 4096 |" in text
    assert f"{2 * 8 * 16 * 4096 * 4096 / 20e6:.0f}, peer" in means["matmul, M <= 64, weights of 64 MB and more"]


def test_a_table_for_each_m_that_has_several_rows_and_one_for_the_rest(tmp_path: Path) -> None:
    text = page(tmp_path, ROWS)
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert headings == ["### matmul, M = 1", "### matmul, other M"]
    assert "| big | 1 x 28672 x 4096 | 10.00 | 50 % | 20.00 | **25.00** | 20.00 | 1.000 | **0.800** |" in text
    assert "| 1.210 | 1.500 | **0.968** |" in text  # own, paused, auto
    assert f"| {WON.err:.1e} | {100 * WON.spread:.1f} % |" in text  # how far a ratio may be trusted
    assert all(f"| {row.case} |" in text for row in ROWS)


def test_one_small_plot_for_a_hundred_rows(tmp_path: Path) -> None:
    many = [
        product(f"c{i}", m, 1024, 1024, own=0.8 + i / 10) for i in range(14) for m in (1, 8, 16, 64, 128, 512, 4096)
    ]
    text = page(tmp_path, many)
    plot = tmp_path / "plots" / "gpu-gemm-by-m.png"
    assert "plots/gpu-gemm-by-m.png" in text
    assert plot.stat().st_size < 15_000
    with Image.open(plot) as image:
        assert image.width > image.height


def test_products_and_other_ops_of_one_run_are_both_shown(tmp_path: Path) -> None:
    text = page(tmp_path, [*ROWS, WON])
    assert "rms_norm train bfloat16 fwd<br>M=8192, N=4096" in text
    assert "plots/gpu-gemm.png" in text and "plots/gpu-gemm-by-m.png" in text


def test_a_cpu_needs_no_plot(tmp_path: Path) -> None:
    Results("gemm", {**MACHINE, "arch": "cpu"}, rows=ROWS).save(tmp_path / "cpu" / "gemm.json")
    assert "plots/" not in pages(tmp_path)["gemm.md"]
