"""Two processes do what one does: the same steps, and the same counts, each image once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from classification_toys import classification_job, linear, make_pictures
from engine_processes import LONG, losses
from engine_toys import Noise, make_job, make_values, train, weight_sum
from two_processes import in_two_processes

from mae_bench.classification.run import run
from mae_bench.engine import distributed, resume, sharding
from mae_bench.engine.job import Options
from mae_bench.errors import UserError


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """What two processes have seen alike, and the folder with their runs."""
    folder = tmp_path_factory.mktemp("together")
    first, second = in_two_processes("engine_processes.py", folder)
    assert first == second
    return folder, first


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicated", "accumulated", "sharded"])
def test_pretraining_loses_alike_however_a_batch_is_split(
    together: tuple[Path, Any], alone: list[float], way: str
) -> None:
    """1 x 64, 2 x 32, 2 x 4 x 8, and 2 x 32 with sharded weights: twenty steps in float32."""
    assert len(alone) == 20
    assert alone[-1] < alone[0]
    assert together[1][way] == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_processes_stop_and_go_back_together(together: tuple[Path, Any], tmp_path: Path, way: str) -> None:
    seen = together[1]
    assert seen[way]["line"] == "stopped by SIGTERM after step 13; the same command with --resume goes on"
    assert seen[way]["effective"].get("fsdp", False) == (way == "fsdp")
    values = make_values(**LONG)
    for name in ("whole", "back"):
        (tmp_path / name).mkdir()
    _, fitted = train(make_job(tmp_path / "whole", values), noisy=False)
    for mine, theirs in zip(fitted.history, seen[way]["history"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    # Steps without the broken picture, as one process has it; a note names no picture of the other process.
    back = make_job(tmp_path / "back", make_values(**(LONG | {"on_nonfinite": "rewind"})))
    model, fitted = train(back, noisy=False, dataset=Noise(broken=7))
    assert seen[way]["skipped"] == fitted.effective["skipped_steps"] != []
    assert seen[way]["notes"][0].count("(loss is nan, images picture 7)") == len(seen[way]["skipped"])
    assert seen[way]["sum"] == pytest.approx(weight_sum(model), rel=1e-5)


@pytest.mark.slow
def test_sharded_processes_hold_a_part_each(together: tuple[Path, Any]) -> None:
    first, second, whole = together[1]["shares"]
    assert first + second == whole
    assert max(first, second) < 0.6 * whole


@pytest.mark.slow
def test_the_state_of_sharded_processes_goes_on_in_one(together: tuple[Path, Any], tmp_path: Path) -> None:
    """It is whole: the same tensors under the same names as those of one process."""
    folder, seen = together
    shutil.copytree(folder / "fsdp/cut/checkpoints", tmp_path / "checkpoints")
    job = make_job(tmp_path, make_values(**LONG), resume=True)
    newest = sorted(resume.folder(job).iterdir())[-1]
    newest.unlink()
    assert (state := resume.load(job)) is not None
    assert state["step"] == 29
    _, fitted = train(job, noisy=False)
    for mine, theirs in zip(fitted.history, seen["fsdp"]["history"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_sharding_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is one; start several with torchrun"):
        train(make_job(tmp_path, make_values(), fsdp=True))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(UserError, match="precision=bf16 or fp32"):
        sharding.check(make_values(), "fp16")
    with pytest.raises(UserError, match="LARS"):
        sharding.check(make_values(optimizer="lars"), "fp32")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    dataset = make_pictures(tmp_path / "data")  # 11 pictures to evaluate: the shards are uneven
    short = linear(epochs=1, warmup_epochs=0, eval_every_epochs=0.0)  # some pictures are still taken for others
    alone = run(classification_job(tmp_path, "alone", short, dataset))
    for name in ("toy", "probe", "measured", "single"):
        (tmp_path / name).mkdir()
    first, second = in_two_processes("engine_two_processes.py", tmp_path)
    assert first == second
    assert (first["sum"], first["ranks"]) == ([3], [0, 1])
    assert first["odd"] == ["odd training pictures: 3 grey (repeated in three channels)"]
    assert (first["effective"]["world_size"], first["effective"]["accumulation"]) == (2, 2)
    assert (tmp_path / "probe/model.safetensors").is_file()
    # The same trained model: identical counts, and so identical percentages.
    metrics, per_class, images = first["measured"]
    assert (metrics["top1"], metrics["top5"], per_class) == (
        alone.metrics["top1"],
        alone.metrics["top5"],
        alone.per_class,
    )
    assert alone.images is not None
    assert images == list(alone.images)  # every picture once and in the data set's order, none padded
    assert 0 < sum(images[1]) < len(images[1]) == 11
    assert metrics["val_loss"] == pytest.approx(alone.metrics["val_loss"], rel=1e-6)
    # The same training, where nothing depends on how a batch is split.
    model, fitted = train(make_job(tmp_path / "single", make_values(eval_every_epochs=1, ema=0.5)), noisy=False)
    for mine, theirs in zip(model.parameters(), first["parameters"], strict=True):
        torch.testing.assert_close(mine.data, torch.tensor(theirs), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(fitted.history, first["history"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_single_process_needs_no_group() -> None:
    distributed.init(Options(device="cpu"))
    assert (distributed.rank(), distributed.world_size(), distributed.main_process()) == (0, 1, True)
    assert distributed.gather_objects("x") == ["x"]
    assert distributed.sum_over_processes(torch.tensor([2])).tolist() == [2]
    distributed.barrier()
    distributed.shutdown()


def test_what_processes_must_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for values in (["a" * 64], ["a" * 64] * 3):
        monkeypatch.setattr(distributed, "gather_objects", lambda _, values=values: [(v, "node") for v in values])
        distributed.check_same("data set", "a" * 64, "mend it")
    monkeypatch.setattr(distributed, "gather_objects", lambda _: [("a" * 64, "one"), ("a" * 64, "one"), ("b", "two")])
    message = r"^process 2 on two has another data set \(b\) than process 0 on one \(aaaaaaaa\); mend it$"
    with pytest.raises(UserError, match=message):
        distributed.check_same("data set", "a" * 64, "mend it")


def test_devices() -> None:
    assert distributed.device(Options(device="cpu")) == torch.device("cpu")
    if torch.cuda.is_available():
        assert distributed.device(Options()).type == "cuda"
    else:
        assert distributed.device(Options()) == torch.device("cpu")
        with pytest.raises(UserError, match="torch sees no GPU"):
            distributed.device(Options(device="cuda"))
