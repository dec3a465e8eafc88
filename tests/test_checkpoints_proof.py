"""The fixed picture, fingerprints that change with everything that matters, and the lock beside a weight file."""

from __future__ import annotations

import hashlib
import json
import math
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import ARCHITECTURE, INPUT, backbone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mae_bench.checkpoints import proof
from mae_bench.encoders import Encoder
from mae_bench.errors import UserError
from mae_bench.schema import Architecture, Input

TODAY = datetime.now(UTC).date().isoformat()


def waves(architecture: Architecture = ARCHITECTURE, **options: Any) -> Encoder:
    """Weights by formula: the same on every machine and with every version of torch's generators."""
    encoder = Encoder(architecture, **options)
    with torch.no_grad():
        for number, parameter in enumerate(encoder.parameters()):
            at = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((torch.sin(at * at * 0.7 + number) * 0.5).view(parameter.shape))
    return encoder


def changed(**features: Any) -> Architecture:
    return Architecture.model_validate(ARCHITECTURE.model_dump() | features)


@pytest.mark.parametrize(
    ("size", "digest"), [(20, "6cf51f8057a87f19"), (224, "d664d52afdf6a0b1"), (518, "4d76c5db77985d73")]
)
def test_the_picture_is_fixed_for_ever(size: int, digest: str) -> None:
    """Fingerprints in recipes and locks are of this picture: with another one all of them are wrong."""
    picture = proof.picture(size)
    assert picture.shape == (1, 3, size, size) and picture.dtype == torch.float32
    values = (picture * 255).round()
    assert torch.equal(values / 255, picture)
    assert values.min() >= 0 and values.max() <= 255
    assert hashlib.sha256(values.to(torch.uint8).numpy().tobytes()).hexdigest()[:16] == digest


def test_the_picture_tells_channels_rows_and_columns_apart() -> None:
    picture = proof.picture(64)
    for other in (picture.flip(1), picture.flip(2), picture.flip(3), picture.transpose(2, 3), picture.roll(4, 3)):
        assert (picture - other).abs().mean() > 0.05


def test_a_fingerprint_is_fixed_for_ever() -> None:
    found = proof.fingerprint(waves(), INPUT)
    meant = [-0.181, -0.32541, -0.50359, -0.24169, -0.41876, -0.42985, -0.40705, -0.6009]
    meant += [-0.31056, 0.86373, 0.30408, -0.54579, -0.31158, 0.41823, 0.11596, -0.14528]
    assert proof.deviation(found, meant) < 1e-4
    assert found == [float(f"{number:.5g}") for number in found]


def test_what_must_not_matter_does_not() -> None:
    encoder = waves(drop_path=0.5)
    assert encoder.training
    found = proof.fingerprint(encoder, INPUT)
    assert encoder.training, "left as it was"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert proof.fingerprint(encoder.eval(), INPUT) == found
    assert not encoder.training
    torch.set_num_threads(2)
    try:
        assert proof.deviation(proof.fingerprint(encoder, INPUT), found) < 1e-5
    finally:
        torch.set_num_threads(1)


@torch.no_grad()
def _swap_queries_and_keys(encoder: Encoder) -> None:
    weight = encoder.get_parameter("blocks.1.attn.qkv.weight")
    q, k, v = weight.clone().chunk(3)
    weight.copy_(torch.cat([k, q, v]))


@torch.no_grad()
def _transpose_projection(encoder: Encoder) -> None:
    weight = encoder.get_parameter("blocks.0.attn.proj.weight")
    weight.copy_(weight.clone().T)


@torch.no_grad()
def _exchange_axes_of_positions(encoder: Encoder) -> None:
    table = encoder.get_parameter("pos_embed")
    table[:, 1:] = table[:, 1:].clone().view(1, 5, 5, -1).transpose(1, 2).flatten(1, 2)


@torch.no_grad()
def _lose_a_norm(encoder: Encoder) -> None:
    encoder.get_parameter("norm.weight").fill_(1)


@torch.no_grad()
def _bgr(encoder: Encoder) -> None:
    weight = encoder.get_parameter("patch_embed.proj.weight")
    weight.copy_(weight.clone().flip(1))


@pytest.mark.parametrize(
    "fault", [_swap_queries_and_keys, _transpose_projection, _exchange_axes_of_positions, _lose_a_norm, _bgr]
)
def test_a_tensor_that_is_read_wrongly_shows(fault: Any, tmp_path: Path) -> None:
    encoder = waves()
    meant = proof.fingerprint(encoder, INPUT)
    fault(encoder)
    found = proof.fingerprint(encoder, INPUT)
    assert proof.deviation(found, meant) > 10 * proof.TOLERANCE
    with pytest.raises(UserError, match="differ from the recipe's by"):
        proof.check_fingerprint(tmp_path / "w.pth", found, meant, "the recipe's")


@pytest.mark.parametrize("other", [changed(heads=2), changed(norm_eps=1.0)])
def test_another_architecture_of_the_same_shapes_shows(other: Architecture) -> None:
    encoder = Encoder(other)
    encoder.load_state_dict(waves().state_dict(), strict=True)
    meant = proof.fingerprint(waves(), INPUT)
    assert proof.deviation(proof.fingerprint(encoder, INPUT), meant) > 10 * proof.TOLERANCE


@pytest.mark.parametrize(
    "other", [Input(mean=[0.485, 0.456, 0.406], std=[0.25] * 3), Input(mean=[0.5] * 3, std=[0.229, 0.224, 0.225])]
)
def test_another_mean_or_std_shows(other: Input) -> None:
    encoder = waves()
    assert proof.deviation(proof.fingerprint(encoder, other), proof.fingerprint(encoder, INPUT)) > 5 * proof.TOLERANCE


def test_without_class_token_all_numbers_are_of_the_mean() -> None:
    encoder = waves(changed(class_token=False, class_position=False))
    mean_D = proof.features(encoder, proof.normalised(proof.picture(20), INPUT)).mean(dim=1)[0]
    found = proof.fingerprint(encoder, INPUT)
    assert len(found) == 16
    for channel, number in zip([0, 3, 6, 9, 12, 15, 18, 21, 1, 4, 7, 10, 13, 16, 19, 22], found, strict=True):
        assert number == pytest.approx(mean_D[channel].item(), rel=1e-4)


def test_the_norm_of_the_pooled_vector_counts() -> None:
    encoder = waves(changed(final_norm="pooled"))
    meant = proof.fingerprint(encoder, INPUT)
    rows = proof.features(encoder, proof.normalised(proof.picture(20), INPUT))
    assert rows.shape == (1, 1 + 25 + 1, 24)
    torch.testing.assert_close(rows[:, -1], encoder.pooled(rows[:, :-1], "mean"))
    with torch.no_grad():
        encoder.get_parameter("fc_norm.bias").add_(0.1)
    found = proof.fingerprint(encoder, INPUT)
    assert found[:8] == meant[:8], "the class token is not normed"
    assert proof.deviation(found[8:], meant[8:]) > 0.01


def test_registers_are_no_patches() -> None:
    encoder = waves(changed(registers=3))
    rows = proof.features(encoder, proof.normalised(proof.picture(20), INPUT))
    assert proof.fingerprint(encoder, INPUT)[8] == pytest.approx(rows[0, 4:, 1].mean().item(), rel=1e-4)


def test_tolerance(tmp_path: Path) -> None:
    meant = [2.0, -1.0, 0.0]
    proof.check_fingerprint(tmp_path, [2.0019, -1.0019, 0.0019], meant, "those meant")
    for found in ([2.0021, -1.0, 0.0], [2.0, -1.0], [2.0, -1.0, math.nan], [2.0, -1.0, math.inf]):
        with pytest.raises(UserError, match="differ from those meant by"):
            proof.check_fingerprint(tmp_path, found, meant, "those meant")
    with pytest.raises(UserError, match="are not finite; it is damaged"):
        proof.check_finite(tmp_path, [1.0, math.nan])


NUMBERS = [0.5, -0.25, 0.125]
HASH = "a" * 64


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "w.pth"
    file.write_bytes(b"weights")
    return file


def test_first_seen_then_compared(weights: Path) -> None:
    assert proof.read_lock(weights) is None
    assert proof.remember(weights, backbone(), HASH, NUMBERS) == f"first seen {TODAY}"
    lock = weights.with_name("w.pth.proof.json")
    written = json.loads(lock.read_text())
    assert written["sha256"] == HASH and written["size"] == 7 and written["date"] == TODAY
    assert written["url"] == "https://example.org/meant.pth" and written["fingerprint"] == NUMBERS
    assert sorted(path.name for path in weights.parent.iterdir()) == ["w.pth", "w.pth.proof.json"]

    lock.write_text(json.dumps(written | {"date": "2024-02-29"}))
    assert proof.remember(weights, backbone(), HASH, [0.5, -0.25, 0.1251]) == "first seen 2024-02-29"
    with pytest.raises(
        UserError, match=r"not the file first seen 2024-02-29: sha256 was a{12}….*fetch it again.*json$"
    ):
        proof.remember(weights, backbone(), "b" * 64, NUMBERS)
    with pytest.raises(UserError, match=r"differ from those first seen 2024-02-29 \(in w.pth.proof.json\)"):
        proof.remember(weights, backbone(), HASH, [0.5, -0.25, 0.2])
    with pytest.raises(UserError, match="not finite"):
        proof.remember(weights, backbone(), HASH, [math.nan] * 3)


def test_another_recipe_of_the_same_file_has_other_features(weights: Path) -> None:
    proof.remember(weights, backbone(), HASH, NUMBERS)
    other = backbone().model_copy(update={"input": Input(mean=[0.4] * 3, std=[0.25] * 3)})
    told = proof.remember(weights, other, HASH, [9.0, 9.0, 9.0])
    assert told == f"first seen {TODAY} under another architecture, mean or std"
    renamed = backbone().model_copy(update={"name": "same_thing"})
    with pytest.raises(UserError, match="differ from those first seen"):
        proof.remember(weights, renamed, HASH, [9.0, 9.0, 9.0])


def test_a_lock_can_be_read_by_whoever_reads_new_files(weights: Path) -> None:
    proof.remember(weights, backbone(), HASH, NUMBERS)
    assert stat.S_IMODE(proof.lock_file(weights).stat().st_mode) == stat.S_IMODE(weights.stat().st_mode)


@pytest.mark.skipif(not Path("/proc/version").is_file(), reason="needs a folder that not even root can write to")
def test_a_folder_that_takes_no_lock_is_no_fault() -> None:
    assert proof.remember(Path("/proc/version"), backbone(), HASH, NUMBERS) == "not locked: its folder takes no lock"


def test_those_who_come_at_the_same_time_agree(weights: Path) -> None:
    """The lock is linked into place whole: whoever is slower reads the faster one's, and its other hash is an error."""
    count = 8
    barrier = threading.Barrier(count)

    def seen(number: int) -> str:
        barrier.wait()
        try:
            return proof.remember(weights, backbone(), f"{number % 2}" * 64, NUMBERS)
        except UserError as error:
            return str(error).partition(" is not the ")[2][:15]

    with ThreadPoolExecutor(count) as pool:
        results = sorted(pool.map(seen, range(count)))
    assert results == ["file first seen"] * (count // 2) + [f"first seen {TODAY}"] * (count // 2)
    assert sorted(path.name for path in weights.parent.iterdir()) == ["w.pth", "w.pth.proof.json"]


GOOD: dict[str, Any] = {
    "sha256": HASH,
    "size": 7,
    "date": "2024-02-29",
    "url": "",
    "recipe": "c" * 64,
    "fingerprint": NUMBERS,
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"sha256": 1',
        b"[" * 9000,
        b'{"a": ' + b"9" * 9000 + b"}",
        *(
            json.dumps(GOOD | wrong).encode()
            for wrong in (
                {"sha256": "A" * 64},
                {"size": -1},
                {"size": "7"},
                {"date": "\x1b[31m"},
                {"date": "2024-02-29\n"},
                {"fingerprint": []},
                {"fingerprint": [math.nan]},
                {"fingerprint": [0.0] * 65},
                {"more": 1},
                {"url": "x" * 5000},
            )
        ),
        json.dumps(GOOD).encode() + b" " * (1 << 14),
    ],
)
def test_a_damaged_lock_is_named(weights: Path, content: bytes) -> None:
    lock = proof.lock_file(weights)
    lock.write_bytes(json.dumps(GOOD).encode())
    assert proof.read_lock(weights) is not None
    lock.write_bytes(content)
    with pytest.raises(UserError, match=r"w\.pth\.proof\.json is damaged, .* delete it$"):
        proof.remember(weights, backbone(), HASH, NUMBERS)


def test_a_folder_in_the_place_of_a_lock_is_named(weights: Path) -> None:
    proof.lock_file(weights).mkdir()
    with pytest.raises(UserError, match=r"cannot read .*w\.pth\.proof\.json: Is a directory; delete it"):
        proof.read_lock(weights)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.recursive(st.none() | st.floats() | st.text(max_size=5), st.lists).map(json.dumps))
def test_no_content_of_a_lock_raises_anything_else(weights: Path, content: bytes | str) -> None:
    proof.lock_file(weights).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match="delete it"):
        proof.read_lock(weights)
