"""Result files survive the disk, refuse other schemas, and the page shows wins and losses alike."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tilewright.bench.report import report
from tilewright.bench.schema import Note, Results, Row, load
from tilewright.errors import InputError

WON = Row(
    op="rms_norm",
    case="train",
    params={"M": 8192, "N": 4096},
    dtype="bfloat16",
    direction="fwd",
    timing="sustained",
    l2="cold",
    impls={"triton": 33.0, "torch": 440.0},
    chosen="triton",
    peers={"liger": 36.3, "eager": 440.8},
    floor_us=32.0,
    ratio_own=1.1,
    ratio_auto=1.1,
    eager_us=8.5,
    graph_us=32.9,
    err=1.7e-3,
    err_peer=1.7e-3,
    spread=0.004,
)
LOST = replace(WON, case="decode", impls={"triton": 4.0}, peers={"liger": 3.0}, ratio_own=0.75, ratio_auto=0.75)
MACHINE = {
    "device": "Test GPU",
    "arch": "sm_90",
    "sm_count": 132,
    "driver": "1.2",
    "torch": "2.13",
    "triton": None,
    "python": "3.12",
    "date": "2026-01-02T03:04:05+00:00",
    "clocks": {"before": {"sm_mhz": 345.0}, "after": None},
    "ceilings": {"read_gb_s": 4300.0},
}


def results() -> Results:
    left_out = [Note("rms_norm", "train", "bfloat16", "fwd", "quack", "wrong before timing")]
    return Results("norm", MACHINE, rows=[WON, LOST], left_out=left_out)


def test_results_survive_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "gpu" / "norm.json"
    results().save(path)
    assert load(path) == results()


def test_the_file_has_one_line_a_row(tmp_path: Path) -> None:
    path = tmp_path / "norm.json"
    results().save(path)
    lines = path.read_text().splitlines()
    assert sum(line.startswith(('  ["train",{"triton":33.0', '  ["decode",{"triton":4.0')) for line in lines) == 2


def test_a_reason_is_written_once_for_all_cases_that_share_it(tmp_path: Path) -> None:
    path = tmp_path / "norm.json"
    found = results()
    found.left_out += [replace(found.left_out[0], case="decode"), replace(found.left_out[0], reason="refused")]
    found.save(path)
    assert path.read_text().count("wrong before timing") == 1
    assert load(path).left_out == found.left_out


@pytest.mark.parametrize("change", [{"schema": 99}, {"kind": "optimize"}])
def test_another_schema_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "norm.json"
    path.write_text(json.dumps({**json.loads(results().to_json()), **change}))
    with pytest.raises(InputError, match=r"norm\.json.*Measure it again"):
        load(path)


@pytest.mark.parametrize("row", [["rms_norm", "train"], {"op": "rms_norm"}, [0] * 99])
def test_a_row_with_other_fields_is_refused(tmp_path: Path, row: object) -> None:
    data = json.loads(results().to_json())
    data["rows"][1] = row
    path = tmp_path / "norm.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"norm\.json: row 1"):
        load(path)


def test_the_page_shows_wins_losses_means_and_who_was_left_out(tmp_path: Path) -> None:
    results().save(tmp_path / "results" / "gpu" / "norm.json")
    (tmp_path / "results" / "gpu" / "optimize.json").write_text('{"kind": "optimize"}')
    page = report(tmp_path / "results", tmp_path / "docs" / "performance.md").read_text()
    assert "1 of 2 rows: a peer beats what `auto` picks, in 1 of them" in page
    assert "| gpu | rms_norm decode bfloat16 fwd | triton | 4.00 | liger | 3.00 | 0.750 |" in page
    assert "| rms_norm | fwd | 2 | 0.908 | 0.908 |" in page  # sqrt(1.1 * 0.75)
    assert "- quack left out of rms_norm bfloat16 fwd, wrong before timing: train" in page
    assert "**0.750**" in page
    plot = tmp_path / "docs" / "plots" / "gpu-norm.png"
    assert "plots/gpu-norm.png" in page
    assert plot.stat().st_size < 60_000
    with Image.open(plot) as image:
        assert image.format == "PNG" and image.width > image.height


def test_rendering_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    results().save(tmp_path / "results" / "gpu" / "norm.json")
    out = tmp_path / "performance.md"
    report(tmp_path / "results", out)
    before = (out.read_bytes(), (tmp_path / "plots" / "gpu-norm.png").read_bytes())
    report(tmp_path / "results", out)
    assert (out.read_bytes(), (tmp_path / "plots" / "gpu-norm.png").read_bytes()) == before


def test_rows_without_any_ratio_need_no_plot(tmp_path: Path) -> None:
    alone = replace(
        WON, impls={"torch": 40.0}, chosen="torch", peers={}, ratio_own=None, ratio_auto=None, err_peer=None
    )
    Results("norm", MACHINE, rows=[alone]).save(tmp_path / "results" / "cpu" / "norm.json")
    page = report(tmp_path / "results", tmp_path / "performance.md").read_text()
    assert "plots/" not in page
    assert "0 of 1 rows" in page


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no bench results"):
        report(tmp_path, tmp_path / "performance.md")


def test_many_rows_share_lines_of_the_plot(tmp_path: Path) -> None:
    def height(count: int) -> int:
        rows = [replace(WON, case=f"case{i}") for i in range(count)]
        Results("norm", MACHINE, rows=rows).save(tmp_path / "results" / "gpu" / "norm.json")
        report(tmp_path / "results", tmp_path / "performance.md")
        with Image.open(tmp_path / "plots" / "gpu-norm.png") as image:
            return int(image.height)

    assert height(61) == height(1) < height(30)
