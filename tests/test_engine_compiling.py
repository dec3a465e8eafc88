"""``--compile``: the same losses, evaluations and files as without it, from every pipeline."""

from __future__ import annotations

from pathlib import Path

import classification_toys
import detection_cases
import pytest
import segmentation_cases
import torch
from engine_processes import pretraining_job
from engine_toys import Model
from torch._dynamo.utils import counters
from two_processes import in_two_processes

from mae_bench.classification.run import run as classify
from mae_bench.detection.run import run as detect
from mae_bench.engine import compiling
from mae_bench.engine.job import Job, Outcome
from mae_bench.errors import UserError
from mae_bench.pretraining.run import run as pretrain
from mae_bench.segmentation.run import run as segment

# While torch.compile looks at a tensor of the graph; torch means to hide it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def job_of(engine: str, folder: Path, **options: bool) -> Job:
    """A few steps of two forward passes each, with an averaged model; random paths where that adds few variants."""
    folder.mkdir(exist_ok=True)
    if engine == "pretraining":
        return pretraining_job(folder, "ema=0.5", "decoder_depth=3", micro_batch=32, **options)
    if engine == "classification":
        data = classification_toys.make_pictures(folder / "data")
        settings = classification_toys.finetune(epochs=1, warmup_epochs=0, batch=8)
        return classification_toys.classification_job(folder, "run", settings, data, micro_batch=4, **options)
    if engine == "detection":
        data = detection_cases.write_data(folder / "data")
        settings = detection_cases.values(batch=4, drop_path=0.2, ema=0.5)
        return detection_cases.job(folder / "run", settings, data, micro_batch=2, **options)
    settings = segmentation_cases.values(ema=0.5)
    return segmentation_cases.job(folder / "run", settings, micro_batch=2, **options)


PIPELINES = {"pretraining": pretrain, "classification": classify, "detection": detect, "segmentation": segment}


def losses(outcome: Outcome) -> list[float]:
    return [point["loss"] for point in outcome.history if "lr" in point]


@pytest.mark.slow
@pytest.mark.parametrize("engine", PIPELINES)
def test_losses_are_those_of_a_plain_run(engine: str, tmp_path: Path) -> None:
    plain = PIPELINES[engine](job_of(engine, tmp_path / "plain"))
    counters.clear()
    fast = PIPELINES[engine](job_of(engine, tmp_path / "fast", compile=True))
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    assert len(losses(plain)) > 1
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-5)
    assert fast.effective == plain.effective | {"compile": True}
    assert fast.parameters == plain.parameters


@pytest.mark.slow
def test_a_run_goes_on_with_or_without_it(tmp_path: Path) -> None:
    ends = {}
    for name, before in (("plain", False), ("fast", True)):
        pretrain(job_of("pretraining", tmp_path / name, compile=before))
        newest = sorted((tmp_path / name / "checkpoints").iterdir())[-1]
        state = torch.load(newest, weights_only=True)
        assert not [key for key in state["model"] if "_orig_mod" in key]
        newest.unlink()  # the last step is taken again, the other way
        ends[name] = losses(pretrain(job_of("pretraining", tmp_path / name, resume=True, compile=not before)))
    assert ends["fast"] == pytest.approx(ends["plain"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
def test_what_cannot_be_compiled_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    model = Model(noisy=False)
    message = r"^--compile needs a C\+\+ compiler .*leave out --compile.*no-such"
    with pytest.raises(UserError, match=message) as caught, compiling.compiled(model, wanted=True):
        model(torch.randn(2, 4))
    assert "\n" not in str(caught.value)
    assert model(torch.randn(2, 4)).shape == (2, 3)  # and nothing of it is left


def test_models_without_blocks_are_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="Linear has no blocks"), compiling.compiled(torch.nn.Linear(2, 2), True):
        pass


@pytest.mark.slow
def test_processes_compute_alike_with_it(tmp_path: Path) -> None:
    first, second = in_two_processes("engine_compiled_processes.py", tmp_path)
    assert first == second
    for way in ("replicated", "sharded"):
        assert first[way] == pytest.approx(first["plain"], rel=1e-5)
