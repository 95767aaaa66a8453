"""Result files survive the disk, refuse other schemas, and a family's page shows wins and losses alike."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tilewright.bench.report import family, pages, report
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
    index = report(tmp_path / "results", tmp_path / "docs" / "performance")
    assert "| [norm](norm.md#gpu-norm) | 2 | 0.908 | 0.908 | 1 | **0.750** | rms_norm decode bfloat16 fwd |" in (
        index.read_text()
    )
    page = (index.parent / "norm.md").read_text()
    assert "1 of 2 rows: a peer beats what `auto` picks, in 1 of them" in page
    assert "| gpu | rms_norm decode bfloat16 fwd | triton | 4.00 | liger | 3.00 | 0.750 |" in page
    assert "| rms_norm | fwd | 2 | 0.908 | 0.908 |" in page  # sqrt(1.1 * 0.75)
    assert "- quack left out of rms_norm bfloat16 fwd, wrong before timing: train" in page
    assert "**0.750**" in page
    plot = tmp_path / "docs" / "plots" / "gpu-norm.png"
    assert "(../plots/gpu-norm.png)" in page
    assert plot.stat().st_size < 60_000
    with Image.open(plot) as image:
        assert image.format == "PNG" and image.width > image.height


def test_rendering_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    results().save(tmp_path / "results" / "gpu" / "norm.json")

    def rendered() -> dict[Path, bytes]:
        report(tmp_path / "results", tmp_path / "performance")
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    first = rendered()
    assert tmp_path / "plots" / "gpu-norm.png" in first
    assert rendered() == first


def test_rows_without_any_ratio_need_no_plot(tmp_path: Path) -> None:
    alone = replace(
        WON, impls={"torch": 40.0}, chosen="torch", peers={}, ratio_own=None, ratio_auto=None, err_peer=None
    )
    Results("norm", MACHINE, rows=[alone]).save(tmp_path / "results" / "cpu" / "norm.json")
    page = pages(tmp_path / "results")["norm.md"]
    assert "plots/" not in page
    assert "0 of 1 rows" in page


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no bench results"):
        report(tmp_path, tmp_path / "performance")


def test_many_rows_share_lines_of_the_plot(tmp_path: Path) -> None:
    def height(count: int) -> int:
        rows = [replace(WON, case=f"case{i}") for i in range(count)]
        Results("norm", MACHINE, rows=rows).save(tmp_path / "results" / "gpu" / "norm.json")
        report(tmp_path / "results", tmp_path / "performance")
        with Image.open(tmp_path / "plots" / "gpu-norm.png") as image:
            return int(image.height)

    assert height(61) == height(1) < height(30)


def test_a_family_has_one_page_for_all_machines(tmp_path: Path) -> None:
    for machine in ("gpu", "cpu"):
        results().save(tmp_path / machine / "norm.json")
    Results("softmax", MACHINE, rows=[replace(WON, op="softmax")]).save(tmp_path / "gpu" / "softmax.json")
    made = pages(tmp_path)
    assert list(made) == ["README.md", "norm.md", "softmax.md"]
    assert "## gpu: norm" in made["norm.md"] and "## cpu: norm" in made["norm.md"]
    assert "softmax" not in made["norm.md"]


def test_the_newest_run_of_a_row_is_shown(tmp_path: Path) -> None:
    """Of two files of one machine; another machine's row of the same case is another row."""
    later = {**MACHINE, "date": "2026-02-02T00:00:00+00:00"}
    Results("norm", MACHINE, rows=[replace(WON, floor_us=11.25), LOST]).save(tmp_path / "gpu" / "b.json")
    Results("norm", later, rows=[replace(WON, floor_us=22.25)]).save(tmp_path / "gpu" / "a.json")
    Results("norm", MACHINE, rows=[replace(WON, floor_us=33.25)]).save(tmp_path / "other" / "b.json")
    page = pages(tmp_path)["norm.md"]
    assert "| 11.25 |" not in page
    assert "| 22.25 |" in page and "| 33.25 |" in page
    assert "of 3 rows" in page


def test_a_page_says_at_which_commits_its_rows_were_measured(tmp_path: Path) -> None:
    Results("norm", MACHINE, rows=[replace(WON, commit="0123456789ab"), LOST]).save(tmp_path / "gpu" / "norm.json")
    assert "Commit, of rows: 0123456789ab 1, not recorded 1." in pages(tmp_path)["norm.md"]


@pytest.mark.parametrize("params", [{"M": 8192, "N": 4096}, {"M": 64, "N": 64, "K": 64}], ids=["rows", "products"])
def test_a_long_page_keeps_every_lost_row_and_drops_those_that_win_most(params: dict[str, int]) -> None:
    won = [replace(WON, case=f"won{i:03}", params=params, ratio_auto=1 + i / 100) for i in range(100)]
    losses = [replace(LOST, case=f"lost{i}", params=params) for i in range(10)]
    found = {Path("gpu/norm.json"): Results("norm", MACHINE, rows=[*won, *losses])}
    limit = 12_000
    page = family.page("norm", found, limit)
    assert limit - 400 < len(page.encode()) <= limit  # no row less than need be
    tables = page[page.index("## gpu: norm") :]
    assert all(row.case in tables for row in losses)
    shown = [row.case for row in won if row.case in tables]
    assert 0 < len(shown) < 100
    assert shown == [row.case for row in won[: len(shown)]]
    assert f"{100 - len(shown)} rows that win most are left out" in page
    assert "| rms_norm | fwd | 110 |" in page  # means are those of all rows
    assert "left out" not in family.page("norm", found)
    with pytest.raises(InputError, match="the 10 rows of 'norm' that a peer wins make a page of more than 900 bytes"):
        family.page("norm", found, 900)
