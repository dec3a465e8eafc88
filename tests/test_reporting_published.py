"""Published numbers are data with a schema: every row, its mapping to our protocols, and its citation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean, pstdev, stdev

import pytest

from mae_bench.errors import UserError
from mae_bench.recipes import index, load_backbone, load_task
from mae_bench.reporting.published import COLUMNS, SPREAD, headline, load_published, read_published

FOLDER = Path(__file__).resolve().parent.parent / "results" / "published"
HEADER = ",".join(COLUMNS)
ROWS = load_published()


def test_every_file_is_read_and_cited() -> None:
    files = sorted(FOLDER.glob("*.csv"))
    assert sum(len(read_published(path)) for path in files) == len(ROWS) == 537
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in files:
        line = next(line for line in readme.splitlines() if line.startswith(f"| `{path.name}` |"))
        _, _, source, licence, _ = line.split("|")
        assert source.strip(), path.name
        assert licence.strip(), path.name
    assert readme.count(".csv` |") == len(files)


def test_protocols_and_backbones_are_ours() -> None:
    protocols = {load_task(name).protocol: load_task(name).metric for name in index("task")}
    for row in ROWS:
        assert row.protocol_id == "none" or row.protocol_id in protocols, row
        assert not row.ours or row.ours in index("backbone"), row
    used = Counter(row.protocol_id for row in ROWS)
    assert set(used) == {
        "none", "in1k-linear-lars-90ep@1", "in1k-finetune-mae@1", "coco-vitdet-maskrcnn-1024@1",
        "ade20k-upernet-512-160k@1",
    }  # fmt: skip
    for protocol in set(used) - {"none"}:  # the primary metric is named as the pipelines name it
        assert protocols[protocol] in {row.metric for row in ROWS if row.protocol_id == protocol}


def test_a_backbone_of_ours_has_the_weights_that_the_row_is_about() -> None:
    for row in ROWS:
        if not row.ours:
            continue
        backbone = load_backbone(row.ours)
        assert row.backbone.lower().startswith(f"vit-{backbone.size}/{backbone.architecture.patch}"), row
        if backbone.init == "mae":
            assert (row.method, row.pretrain_data, row.pretrain_epochs) == ("MAE", "IN1K", 1600), row
        else:
            assert (row.pretrain_data, row.pretrain_epochs) == ("none", 0), row


def test_what_was_not_read_in_the_source_is_marked() -> None:
    doubtful = [row for row in ROWS if "UNVERIFIED" in row.source_locator or "NEAR-PRIMARY" in row.source_locator]
    assert doubtful == [row for row in ROWS if not row.verified]
    assert len(doubtful) == 21


@pytest.mark.parametrize(
    ("protocol", "backbone", "metric", "value", "locator"),
    [
        ("in1k-linear-lars-90ep@1", "vit_b_mae", "top1", 68.0, "Table 12"),
        ("in1k-linear-lars-90ep@1", "vit_h_mae", "top1", 76.6, "Table 12"),
        ("in1k-finetune-mae@1", "vit_b_mae", "top1", 83.6, "Table 3"),
        ("in1k-finetune-mae@1", "vit_l_mae", "top1", 85.9, "Table 3"),
        ("in1k-finetune-mae@1", "vit_h_mae", "top1", 86.9, "Table 3"),
        ("in1k-finetune-mae@1", "vit_l_scratch", "top1", 82.6, "Table 3"),
        ("coco-vitdet-maskrcnn-1024@1", "vit_b_mae", "box_AP", 51.6, "Table 5"),
        ("coco-vitdet-maskrcnn-1024@1", "vit_l_mae", "mask_AP", 49.2, "Table 5"),
        ("ade20k-upernet-512-160k@1", "vit_b_mae", "mIoU", 48.15, "README / released log"),
    ],
)
def test_the_number_that_stands_beside_ours(
    protocol: str, backbone: str, metric: str, value: float, locator: str
) -> None:
    row = headline(ROWS, protocol, backbone, metric)
    assert row is not None
    assert (row.value, row.source_locator) == (value, locator)
    assert row.verified


@pytest.mark.parametrize(
    ("protocol", "backbone"),
    [
        ("ade20k-upernet-512-160k@1", "vit_l_mae"),  # the paper's 53.6 is another schedule, with unpublished rates
        ("coco-vitdet-maskrcnn-1024@1", "vit_b_scratch"),  # ViTDet's Table 4 is without relative positions
        ("in1k-finetune-mae@1", "vit_b_supervised"),
        ("none", "vit_b_mae"),
    ],
)
def test_no_number_where_the_protocol_differs(protocol: str, backbone: str) -> None:
    comparable = [row for row in ROWS if row.protocol_id != "none"]
    assert all(headline(comparable, protocol, backbone, metric) is None for metric in ("top1", "box_AP", "mIoU"))


def test_a_published_spread_is_that_of_its_trials() -> None:
    """FINETUNE.md prints the four runs; its own 0.08 and 0.07 divide by n, a sample's deviation by n - 1."""
    fair = [row for row in ROWS if row.source == "facebookresearch/mae@efb2a80"]
    for backbone, printed in (("vit_b_mae", 0.08), ("vit_l_mae", 0.07)):
        trials = [row.value for row in fair if row.ours == backbone and "trial=" in row.protocol]
        (mean,) = [row for row in fair if row.ours == backbone and "mean_of_4" in row.protocol]
        (std,) = [row for row in fair if row.ours == backbone and "std_of_4" in row.protocol]
        assert (len(trials), mean.n, mean.std_n) == (4, 4, 4)
        assert mean.value == pytest.approx(fmean(trials), abs=0.006)
        assert mean.std == pytest.approx(stdev(trials), abs=0.0005)
        assert std.value == printed == round(pstdev(trials), 2)


def test_only_what_a_source_states_is_a_spread() -> None:
    stated = [(row.task, row.backbone, row.metric, row.std) for row in ROWS if row.std is not None]
    assert stated == [
        ("COCO", "ViT-B/16", "box_AP", 0.1),
        ("COCO", "ViT-B/16", "mask_AP", 0.1),
        ("LVIS v1", "ViT-B/16", "box_AP", 0.3),
        ("LVIS v1", "ViT-B/16", "mask_AP", 0.3),
        ("ImageNet-1K", "ViT-B/16", "top1", 0.094),
        ("ImageNet-1K", "ViT-L/16", "top1", 0.079),
    ]


def test_a_headline_comes_with_the_spread_of_its_protocol() -> None:
    row = headline(ROWS, "coco-vitdet-maskrcnn-1024@1", "vit_b_mae", "box_AP")
    assert row is not None
    assert (row.value, row.source_locator, row.std, row.std_n, row.n) == (51.6, "Table 5", 0.1, 5, None)
    assert row.spread.startswith("facebookresearch/detectron2@02b5c4e, projects/ViTDet/README.md: ")
    other = headline(ROWS, "coco-vitdet-maskrcnn-1024@1", "vit_l_mae", "box_AP")
    assert other is not None
    assert (other.std, other.spread) == (None, "")


WIDE = f"{HEADER},{','.join(SPREAD)}"
ROW = "MAE,ViT-B/16,ImageNet-1K,finetune,none,top1,83.6,IN1K,1600,a paper,Table 3,true,"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER[:-1], ROW], "expected the columns method,"),
        ([HEADER + ",std", ROW + ",0.1"], "or these and std,std_n,n,spread"),
        ([WIDE, ROW], "line 2: expected 17 cells"),
        ([WIDE, ROW + ",0.1,,,seeds"], "line 2: std, std_n and spread are given together"),
        ([WIDE, ROW + ",0.1,3,,"], "line 2: std, std_n and spread are given together"),
        ([WIDE, ROW + ",0,3,,seeds"], "line 2: std: "),
        ([WIDE, ROW + ",0.1,1,,seeds"], "line 2: std_n: "),
        ([HEADER, ROW + ",more"], "line 2: expected 13 cells"),
        ([HEADER, ROW, "MAE,ViT-B/16"], "line 3: expected 13 cells"),
        ([HEADER, ROW.replace("83.6", "83,6")], "line 2: expected 13 cells"),
        ([HEADER, ROW.replace("83.6", "about 84")], "line 2: value: "),
        ([HEADER, ROW.replace("83.6", "nan")], "line 2: value: "),
        ([HEADER, ROW.replace("true", "maybe")], "line 2: verified: "),
        ([HEADER, ROW.replace("none", "MAE fine-tuning")], "line 2: protocol_id: "),
        ([HEADER, ROW.replace("Table 3", "")], "line 2: key 'source_locator' is missing"),
        ([HEADER, '"' + ROW], "cannot read"),
        (["\x00"], "expected the columns"),
    ],
)
def test_faults_name_the_line_and_the_column(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=message) as caught:
        read_published(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_users_add_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results" / "published"
    folder.mkdir(parents=True)
    (folder / "mine.csv").write_text(f"{HEADER}\n{ROW}\n")
    (folder / "with_spread.csv").write_text(f"{WIDE}\n{ROW},0.1,3,3,over seeds\n")
    monkeypatch.setenv("MAE_BENCH_PATH", str(tmp_path))
    *others, plain, spread = load_published()
    assert others == ROWS
    assert (plain.source, plain.std, plain.n) == ("a paper", None, None)
    assert (spread.std, spread.std_n, spread.n, spread.spread) == (0.1, 3, 3, "over seeds")
