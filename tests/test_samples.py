"""``samples.png``: every pipeline draws one, of its evaluated weights, and no number depends on it."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import detection_cases
import numpy as np
import pytest
import segmentation_cases
import torch
from classification_toys import classification_job, finetune, make_pictures
from PIL import Image, ImageDraw
from test_pretraining_run import job as pretraining_job

import mae_bench
from mae_bench import cli, samples
from mae_bench.classification.run import run as run_classification
from mae_bench.data import drawing
from mae_bench.detection import samples as detection_samples
from mae_bench.detection.data import evaluation_examples, read_split
from mae_bench.detection.run import run as run_detection
from mae_bench.engine.job import Options, Outcome
from mae_bench.errors import UserError
from mae_bench.pretraining.run import run as run_pretraining
from mae_bench.segmentation.run import run as run_segmentation

HOSTILE = ("\u202egnp.exe", "a\nb\x1b[31m", "<script>alert(1)</script>", "n" * 5000, "\udcff\x00", "é🙂", "")


def _classification(folder: Path) -> Outcome:
    return run_classification(classification_job(folder, "run", finetune(epochs=1), make_pictures(folder / "data")))


def _detection(folder: Path) -> Outcome:
    settings = detection_cases.values(steps=1, ema=0.5)
    return run_detection(detection_cases.job(folder / "run", settings, detection_cases.write_data(folder / "data")))


def _segmentation(folder: Path) -> Outcome:
    return run_segmentation(segmentation_cases.job(folder / "run", segmentation_cases.values(steps=1)))


def _pretraining(folder: Path) -> Outcome:
    return run_pretraining(pretraining_job(folder / "run"))


ROOMS: dict[str, Callable[[Path], Outcome]] = {
    "classification": _classification,
    "detection": _detection,
    "segmentation": _segmentation,
    "pretraining": _pretraining,
}
# Width and height of each room's sheet: pictures, gaps, and lines of text.
SIZES = {
    "classification": (6 * 112 + 7 * 6, 6 + 2 * (6 + 112 + 28) + 14 + 6),  # eleven pictures of 8 x 8
    "detection": (4 * 160 + 5 * 6, 14 + 6 + 2 * (6 + 120 + 14) + 2 * 14 + 6),  # four of 40 x 30
    "segmentation": (3 * 192 + 4 * 6, 14 + 6 + 4 * (14 + 6 + 160) + 3 * 16 + 6),  # four of 96 x 80
    "pretraining": (4 * 128 + 5 * 6, 14 + 6 + 4 * (14 + 6 + 128) + 4 * 14 + 6),  # four of 32 x 32
}


@pytest.fixture(scope="module", params=ROOMS)
def room(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A pipeline's name and what draws its samples, after a run of a few steps."""
    outcome = ROOMS[request.param](tmp_path_factory.mktemp(request.param))
    return request.param, outcome.samples


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[union-attr,index]


@contextmanager
def _texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every text that is drawn meanwhile."""
    seen: list[str] = []
    write = ImageDraw.ImageDraw.text

    def spy(self: ImageDraw.ImageDraw, xy: Any, text: str, *args: Any, **options: Any) -> None:
        seen.append(text)
        write(self, xy, text, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ImageDraw.ImageDraw, "text", spy)
        yield seen


def test_a_small_picture_of_the_expected_size(room: tuple[str, Any]) -> None:
    name, draw = room
    content = drawing.encoded(draw())
    assert len(content) <= drawing.LIMIT
    with Image.open(io.BytesIO(content)) as sheet:
        sheet.load()
        assert (sheet.format, sheet.size) == ("PNG", SIZES[name])
        assert not sheet.info  # no date, no names
    assert drawing.encoded(draw()) == content


def test_other_weights_give_another_picture(room: tuple[str, Any]) -> None:
    _, draw = room
    model = copy.deepcopy(draw.args[0])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
    other = partial(draw.func, model, *draw.args[1:])
    assert drawing.encoded(other()) != drawing.encoded(draw())


@pytest.mark.parametrize("training", [True, False])
def test_it_changes_neither_model_nor_random_state(room: tuple[str, Any], training: bool) -> None:
    _, draw = room
    model = draw.args[0].train(training)
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = _random_state()
    draw()
    assert _random_state() == before
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_names_are_escaped_and_shortened(room: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, draw = room
    model, source, *classes = draw.args
    if name == "classification":
        monkeypatch.setattr(source, "classes", HOSTILE[: len(source.classes)])
    elif name == "segmentation":
        monkeypatch.setattr(source, "names", (*HOSTILE, "x"))
    elif name == "detection":
        classes = [HOSTILE]
    else:
        monkeypatch.setattr(source.pictures, "name", lambda index: f"folder/{HOSTILE[index]}")
    with _texts(monkeypatch) as texts:
        assert draw.func(model, source, *classes).size == SIZES[name]
    assert texts
    for text in texts:
        assert text.isascii() and (text.isprintable() or not text)
        assert drawing.FONT.getlength(text) <= SIZES[name][0]
    if name != "detection":  # whose few objects have the first classes
        assert any("n...n" in text for text in texts)
    assert any("\\u202e" in text for text in texts)


def test_detections_are_drawn_from_the_score_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = detection_cases.write_data(tmp_path).coco("val")
    examples = evaluation_examples(read_split(split), detection_cases.values())
    for share, drawn in ((1.0, True), (0.5, False)):
        oracle = detection_cases.Oracle(split, lambda rows, share=share: rows * torch.tensor([1, 1, 1, 1, 1, share]))
        with _texts(monkeypatch) as texts:
            sheet = detection_samples.draw(oracle, examples, split.names)
        assert ("colour 3 0.90" in texts) == drawn
        assert ("2 of 2 detections" in texts) == drawn
        assert ("0 of 2; best colour 3 0.450" in texts) != drawn
        # The second picture: its two objects are outlined on the left, and on the right where they were found.
        left = 6 + 2 * (160 + 6)
        truth, found = (
            np.array(sheet.crop((x, 20, x + 160, 140)))[:-1, :-1].reshape(-1, 3) for x in (left, left + 166)
        )
        assert (truth == drawing.colour(1)).all(axis=1).any()
        assert (found == drawing.colour(1)).all(axis=1).any() == drawn


def test_a_crowd_region_is_outlined_in_grey(tmp_path: Path) -> None:
    split = detection_cases.write_data(tmp_path).coco("val")
    examples = evaluation_examples(read_split(split), detection_cases.values())
    sheet = detection_samples.draw(detection_cases.Oracle(split), examples, split.names)
    below = 20 + 6 + 120 + 14
    edges = [sheet.getpixel((x, below + 119)) == drawing.IGNORED for x in (6, 6 + 15, 6 + 17, 6 + 166, 6 + 2 * 166)]
    assert edges == [True, True, False, False, False]  # four of forty columns, on the left of the third picture


def test_what_is_not_pixels_has_no_samples(tmp_path: Path) -> None:
    short = ("batch=4", "steps=1", "warmup_steps=0", "target=pca", "pca=4", "norm_pix=false")
    assert run_pretraining(pretraining_job(tmp_path, *short)).samples is None


def _smoke(out: Path, **options: Any) -> mae_bench.runs.Run:
    chosen = Options(smoke=True, quiet=True, workers=0, out=out, **options)
    (one,) = mae_bench.run("tiny_linear", "vit_t_scratch", options=chosen)
    return one


def test_a_run_and_its_evaluation_alone_leave_the_same_picture(tmp_path: Path) -> None:
    one = _smoke(tmp_path)
    again = _smoke(tmp_path, eval_only=True, weights=one.folder / "model.safetensors")
    assert (one.folder / samples.FILE).read_bytes() == (again.folder / samples.FILE).read_bytes()
    assert one.record.metrics["top1"] == again.record.metrics["top1"]


@pytest.mark.parametrize(
    "fault", [ValueError("bad\npixels"), MemoryError(), OSError("gone"), Image.DecompressionBombError("a bomb")]
)
def test_whatever_drawing_raises_ends_in_one_line(
    fault: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw() -> Image.Image:
        raise fault

    samples.write(Outcome({}, samples=draw), tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"no samples.png in {tmp_path}")
    assert type(fault).__name__ in line
    assert not list(tmp_path.iterdir())


def test_no_number_depends_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _smoke(tmp_path)
    monkeypatch.setattr(samples, "write", lambda outcome, folder: None)
    plain = _smoke(tmp_path)
    assert not (plain.folder / samples.FILE).exists()
    own = {"run_id", "created", "times"}
    assert drawn.record.model_dump(exclude=own) == plain.record.model_dump(exclude=own)
    first, second = ((run.folder / "model.safetensors").read_bytes() for run in (drawn, plain))
    assert first == second


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), UserError("a picture\nhas gone")])
def test_a_picture_that_cannot_be_written_costs_no_number(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Path, content: bytes) -> int:
        raise fault

    monkeypatch.setattr(Path, "write_bytes", full)
    words = ["run", "--task", "tiny_linear", "--backbone", "vit_t_scratch", "--smoke", "--quiet"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    (record,) = tmp_path.rglob("record.json")
    assert sorted(path.name for path in record.parent.iterdir()) == [
        "log.txt",
        "model.safetensors",
        "record.json",
        "run.lock",
    ]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"no samples.png in {record.parent}")
    assert str(fault).split()[-1] in line
