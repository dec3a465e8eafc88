"""Every layout: a file of the original implementation loads key by key, and gives the original's features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_cases import CASES, SIDE, VITDET_OPTIONS

from mae_bench.checkpoints.load import build_encoder

pytestmark = pytest.mark.filterwarnings(
    "ignore:Fail to import ``MultiScaleDeformableAttention``:UserWarning",  # mmcv without compiled operations
    "ignore:torch.meshgrid:UserWarning",  # mmseg
)


@pytest.mark.parametrize("name", CASES)
def test_features_equal_the_original(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    options = VITDET_OPTIONS if case.layout == "vitdet" else {}
    encoder, report = build_encoder(case.backbone, case.path, seed=0, **options)
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = encoder.eval().tokens(images), case.features(images)
    if case.layout == "mmseg":  # its maps lack the class token
        ours = ours[:, encoder.prefix :]
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert report.matched == report.total == len(encoder.state_dict())
    assert not report.new
    assert set(report.unused) == case.unused and all(report.unused.values())
    assert report.line().isprintable()
