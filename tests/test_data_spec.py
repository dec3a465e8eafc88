"""`[data]` of a task recipe: what makes no sense is refused when the recipe is read, before anything is opened."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from mae_bench.recipes import index, load_task
from mae_bench.schema import DataSpec

FORMATS = get_args(DataSpec.model_fields["format"].annotation)
GIVEN: dict[str, Any] = {
    "made": "shapes",
    "train_annotations": "a",
    "val_annotations": "b",
    "zero_is_other": True,
    "repository": "./rows",
    "image_column": "photo",
    "label_column": "label",  # stated is stated, also where it is the default
}


def spec(form: str, **given: Any) -> DataSpec:
    needed = {"repository": "./rows"} if form == "hf" else {}
    return DataSpec(**({"format": form, "train": "train", "val": "val"} | needed | given))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("key", GIVEN)
def test_a_key_that_the_format_never_reads_is_refused(form: str, key: str) -> None:
    formats = DataSpec.READ_BY[key]
    if form in formats:
        assert getattr(spec(form, **{key: GIVEN[key]}), key) == GIVEN[key]
    else:
        with pytest.raises(ValueError, match=rf"{key} is read by {' and '.join(formats)}, not by '{form}'; leave it"):
            spec(form, **{key: GIVEN[key]})


@pytest.mark.parametrize("form", FORMATS)
def test_a_dump_is_read_again(form: str) -> None:
    assert DataSpec.model_validate(spec(form).model_dump()) == spec(form)


def test_every_other_key_is_every_formats() -> None:
    common = {"format", "folder", "train", "val", "classes", "expected"}
    assert set(DataSpec.model_fields) == common | set(DataSpec.READ_BY)


def test_a_folder_is_not_named_for_data_that_lie_in_none() -> None:
    with pytest.raises(ValueError, match="folder is not read where the data are made by code"):
        spec("coco", made="shapes", folder="coco")
    with pytest.raises(ValueError, match="folder is not read where the data are brought from the Hugging Face Hub"):
        spec("hf", repository="owner/photos", folder="photos")
    assert spec("hf", folder="photos").folder == "photos"


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "coco"])
@pytest.mark.parametrize(("train", "val"), [("val", "val"), ("val/", "./val"), ("a//b", "a/b")])
def test_training_and_validation_are_never_one(form: str, train: str, val: str) -> None:
    with pytest.raises(ValueError, match=f"train and val are both '{train}'; training and validation must differ"):
        spec(form, train=train, val=val)


@pytest.mark.parametrize("form", ["coco", "ade20k"])
def test_nor_are_their_annotations(form: str) -> None:
    with pytest.raises(ValueError, match=r"train_annotations and val_annotations are both 'a\.json'"):
        spec(form, train_annotations="a.json", val_annotations="./a.json")


def test_one_folder_may_hold_the_pictures_of_both_of_cocos_splits() -> None:
    assert spec("coco", train="images", val="images", train_annotations="a.json", val_annotations="b.json").hub is False


def test_every_shipped_recipe_is_still_one() -> None:
    assert all(load_task(name).data.train for name in index("task"))
