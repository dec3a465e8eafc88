"""`fetch` from recipe to file: what is refused, verified and said, and real processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fetch_toys import BODY, OTHER, ROOT, SHA, Answer, machine, recipe, refused, serve, toy

from mae_bench.errors import UserError
from mae_bench.fetch import fetch
from mae_bench.recipes import load_backbone

GOOD = Answer(BODY)


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return machine(tmp_path, monkeypatch)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if not path.name.endswith(".lock"))


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, "verified: sha256\n"),
        ({"sha256": SHA[:8]}, "verified: sha256 prefix\n"),
        ({"sha256": "", "md5_prefix": hashlib.md5(BODY).hexdigest()[:6]}, "verified: md5 prefix\n"),
        ({"sha256": ""}, f"unverified: the publisher states no hash; sha256 {SHA}, locked when it is first loaded\n"),
    ],
)
def test_the_file_arrives_under_its_name(
    weights: Path, capsys: pytest.CaptureFixture[str], stated: dict[str, str], said: str
) -> None:
    umask = os.umask(0o027)
    try:
        with serve(GOOD) as server:
            path = fetch(toy(weights, server, file="sub/toy.pth", **stated), quiet=False)
    finally:
        os.umask(umask)
    assert path == weights / "sub" / "toy.pth" and path.read_bytes() == BODY
    assert path.stat().st_mode & 0o777 == 0o640
    assert names(weights / "sub") == ["toy.pth"]
    assert capsys.readouterr() == ("", f"toy: CC-BY-NC-4.0, {server.url}/file\n{said}")


def test_a_bar_is_drawn_on_a_terminal_only(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for quiet in (False, True):
        with serve(GOOD) as server:
            fetch(toy(weights, server, file=f"{quiet}.pth"), quiet=quiet)
        assert (f"{quiet}.pth" in capsys.readouterr().err) is not quiet


def test_a_file_that_is_there_is_checked_and_left_alone(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights.mkdir()
    (weights / "toy.pth").write_bytes(BODY)
    with serve(GOOD) as server:
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
        assert "verified: sha256" in capsys.readouterr().err
        (weights / "toy.pth").write_bytes(OTHER)
        message = refused(toy(weights, server))
        for part in (str(weights / "toy.pth"), hashlib.sha256(OTHER).hexdigest(), SHA, "delete it and fetch again"):
            assert part in message
        assert (weights / "toy.pth").read_bytes() == OTHER
        (weights / "toy.pth").unlink()
        (weights / "toy.pth").symlink_to("nowhere")
        assert "is no file" in refused(toy(weights, server))
    assert not server.asked
    assert [path.name for path in weights.iterdir()] == ["toy.pth"]  # no lock: the folder may be read-only


def test_a_file_that_appears_meanwhile_is_left_alone(weights: Path) -> None:
    go = threading.Event()
    with serve(Answer(BODY, send=100, hold=go)) as server:

        def appear() -> None:
            server.sent.wait(20)
            (weights / "toy.pth").write_bytes(b"mine")
            go.set()

        thread = threading.Thread(target=appear)
        thread.start()
        assert "put there meanwhile" in refused(toy(weights, server))
        thread.join()
    assert (weights / "toy.pth").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["/etc/toy.pth", "../toy.pth", "a/../../toy.pth", "", ".", "a\u0000b", "a\nb", "a//b"])
def test_no_file_escapes_the_folder(weights: Path, tmp_path: Path, name: str) -> None:
    """The schema refuses such a recipe, for every command that joins the name to the weights folder."""
    path = recipe(tmp_path, "https://example.org/toy.pth", file="FILE")
    path.write_text(path.read_text().replace('"FILE"', json.dumps(name)))
    with pytest.raises(UserError, match=r"weights\.file: String should match pattern"):
        load_backbone(str(path))


def test_backbones_without_a_file_say_what_to_do(weights: Path) -> None:
    assert "`python -m mae_bench pretrain --backbone vit_t_mae`" in refused(load_backbone("vit_t_mae"))
    assert "nothing to fetch" in refused(load_backbone("vit_l_scratch"))
    kept = load_backbone("vit_b_mae").model_copy(update={"refused": "it was withdrawn"})
    assert refused(kept) == "backbone 'vit_b_mae' cannot be run: it was withdrawn"
    assert not weights.exists()


# Hugging Face, local files, no network, no room


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("hf://owner/repo/model.safetensors", "/owner/repo/resolve/main/model.safetensors"),
        ("hf://owner/repo.x@v1.0/sub/a%b.bin", "/owner/repo.x/resolve/v1.0/sub/a%25b.bin"),
        ("hf://owner/repo@refs%2Fpr%2F1/m.bin", "/owner/repo/resolve/refs%2Fpr%2F1/m.bin"),
    ],
)
def test_hugging_face_addresses(weights: Path, monkeypatch: pytest.MonkeyPatch, url: str, path: str) -> None:
    with serve(**{path[1:]: [GOOD]}) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
        assert fetch(toy(weights, url), quiet=True).read_bytes() == BODY
    assert server.header("Authorization") == [None]


def test_a_token_stays_with_its_host(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the host it follows a renamed repository; the store that the file is sent from never sees it."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    broken = Answer(BODY, send=99)
    with serve(broken, GOOD) as store:
        away = Answer(status=302, headers={"Location": store.url.replace("127.0.0.1", "localhost") + "/file"})
        here = Answer(status=307, headers={"Location": "/new/name"})
        with serve(**{"o/r/resolve/main/m.bin": [here], "new/name": [away]}) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            assert fetch(toy(weights, "hf://o/r/m.bin"), quiet=True).read_bytes() == BODY
    assert hub.header("Authorization") == ["Bearer hf_secret"] * 4
    assert store.header("Authorization") == [None, None]
    assert store.header("Range") == [None, "bytes=99-"]


def test_a_token_does_not_come_back_from_another_host(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve() as other, serve(back=[GOOD]) as hub:
        hub.paths["/o/r/resolve/main/m.bin"] = [Answer(status=302, headers={"Location": f"{other.url}/file"})]
        other.paths["/file"] = [Answer(status=302, headers={"Location": f"{hub.url}/back"})]
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        fetch(toy(weights, "hf://o/r/m.bin"), quiet=True)
    assert hub.header("Authorization") == ["Bearer hf_secret", None]


def test_hugging_face_refusals(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "expected hf://owner/repository[@revision]/path" in refused(toy(weights, "hf://owner/m.bin"))
    backbone = toy(weights, "hf://owner/repo/m.bin")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example.org")
    assert "use an https address" in refused(backbone)
    with serve(**{"owner/repo/resolve/main/m.bin": [Answer(status=401)]}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        message = refused(backbone)
        for part in (f"{server.url}/owner/repo", "401 (Unauthorized)", "accept its terms", "$HF_TOKEN"):
            assert part in message
        monkeypatch.setenv("HF_TOKEN", "a\nb")
        assert "$HF_TOKEN holds characters" in refused(backbone)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "$HF_HUB_OFFLINE is set" in refused(backbone)
    assert len(server.asked) == 1


def test_a_local_file_is_copied(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "a b.pth"
    source.write_bytes(BODY)
    url = source.as_uri()
    assert "%20" in url
    assert fetch(toy(weights, url), quiet=True).read_bytes() == BODY
    assert fetch(toy(weights, url.replace("file://", "file://localhost"), file="2.pth"), quiet=True).is_file()
    source.write_bytes(OTHER)
    assert SHA in refused(toy(weights, url, file="other.pth"))
    source.write_bytes(b"<html>")
    assert "web page" in refused(toy(weights, url, file="other.pth"))
    for absent in ("file:///no/such.pth", "file://a%20b.pth", tmp_path.as_uri(), "file://[/x", "file:///a%00b"):
        assert "no such file" in refused(toy(weights, absent, file="other.pth"))
    assert names(weights) == ["2.pth", "toy.pth"]


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "a..b"])
def test_without_a_network_one_line_says_what_to_do(weights: Path, host: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening: nobody else takes the port, and it refuses
        url = f"https://{host.format(port=closed.getsockname()[1])}/toy.pth"
        message = refused(toy(weights, url))
    start = f"cannot reach {host.partition(':')[0]}: "
    end = (
        f"; fetch {url} on a machine that is online and put the file at {weights / 'toy.pth'} "
        "(licence CC-BY-NC-4.0), or name a copy with --weights FILE"
    )
    assert message.startswith(start) and message.endswith(end)


def test_the_proxy_of_the_environment_is_asked(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve() as proxy:
        proxy.paths["http://localhost:9/file"] = [GOOD]
        monkeypatch.setenv("http_proxy", proxy.url)
        assert fetch(toy(weights, "http://localhost:9/file"), quiet=True).read_bytes() == BODY


@pytest.mark.parametrize("url", ["http://example.org/m.pth", "http://127.0.0.1.example.org/m.pth"])
def test_plain_http_is_for_this_machine_only(weights: Path, url: str) -> None:
    assert f"'{url}': what does not come over https can be changed" in refused(toy(weights, url))


@pytest.mark.parametrize("url", ["https://user:secret@example.org/m", "https://[x/m", "https:///m", "https://h:x/m"])
def test_addresses_that_are_none(weights: Path, url: str) -> None:
    assert "no address to fetch from" in refused(toy(weights, url))


def test_a_disk_without_room_is_one_line(weights: Path) -> None:
    with serve(Answer(BODY, headers={"Content-Length": str(10**18)}), GOOD) as server:
        message = refused(toy(weights, server))
        assert f"{weights} has room for " in message and "the file has 1.0 EB" in message
        (weights / "toy.pth.part").unlink()
        (weights / "toy.pth.part").symlink_to("/dev/full")
        message = refused(toy(weights, server))
    assert message.startswith(f"cannot write {weights / 'toy.pth.part'}: No space left on device; ")


# Real processes

FETCH = "from mae_bench import fetch, recipes; print(fetch.fetch(recipes.load_backbone(sys.argv[2]), quiet=True))"
# A shell's background job ignores Ctrl-C, and so would what it starts.
COMMAND = "import signal; signal.signal(2, signal.default_int_handler); from mae_bench import cli; sys.exit(cli.main())"


def _process(code: str, path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", f"import sys; {code}", "fetch", str(path)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_the_command_brings_a_file_that_loads(weights: Path, tmp_path: Path) -> None:
    from checkpoint_files import save_pth, timm_state

    body = save_pth(tmp_path / "small.pth", timm_state()).read_bytes()
    with serve(Answer(body)) as server:
        path = recipe(tmp_path, f"{server.url}/file", sha256=hashlib.sha256(body).hexdigest())
        text = path.read_text(encoding="utf-8")
        small = "[architecture]\npatch = 4\nwidth = 24\ndepth = 2\nheads = 3\nimage_size = 20\n\n"
        path.write_text(text[: text.index("[architecture]")] + small + text[text.index("[input]") :], encoding="utf-8")
        words = [sys.executable, "-m", "mae_bench", "fetch", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, f"toy: CC-BY-NC-4.0, {server.url}/file\nverified: sha256\n")
    assert done.stdout.startswith(f"{weights / 'toy.pth'}\nloaded ")


def test_two_at_once_download_once(weights: Path, tmp_path: Path) -> None:
    go = threading.Event()
    with serve(Answer(BODY, send=100, hold=go)) as server:
        path = recipe(tmp_path, f"{server.url}/file")
        with _process(FETCH, path) as first:
            assert server.sent.wait(20)
            with _process(FETCH, path) as second:
                assert second.stderr and second.stderr.readline().startswith("toy: ")
                time.sleep(0.2)  # from here to the lock, or to the server, is a moment
                go.set()
                assert second.communicate()[0] == first.communicate()[0] == f"{weights / 'toy.pth'}\n"
    assert (first.returncode, second.returncode, len(server.asked)) == (0, 0, 1)
    assert (weights / "toy.pth").read_bytes() == BODY


def test_after_ctrl_c_the_same_command_goes_on(weights: Path, tmp_path: Path) -> None:
    end = threading.Event()
    with serve(Answer(BODY, send=5000, hold=end), GOOD) as server:
        path = recipe(tmp_path, f"{server.url}/file")
        part = weights / "toy.pth.part"
        with _process(COMMAND, path) as stopped:
            deadline = time.monotonic() + 20
            while not (part.is_file() and part.stat().st_size > 16) and time.monotonic() < deadline:
                time.sleep(0.01)
            stopped.send_signal(signal.SIGINT)
            _, error = stopped.communicate()
        end.set()
        assert stopped.returncode == 130 and "Traceback" not in error
        assert part.read_bytes() == BODY[:5000] and not (weights / "toy.pth").exists()
        assert fetch(load_backbone(str(path)), quiet=True).read_bytes() == BODY
    assert server.header("Range") == [None, "bytes=5000-"]
