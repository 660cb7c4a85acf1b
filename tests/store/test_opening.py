"""The store that a URL names, and errors of URLs that name none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from hetero_pp.core.errors import ConfigError, StoreError
from hetero_pp.store.folder import FolderStore
from hetero_pp.store.objects import ObjectStore
from hetero_pp.store.opening import IN_PLACE_OF_THE_FILE, credentials_from_file, open_store
from hetero_pp.store.settings import StoreSettings

FILE = "[default]\naws_access_key_id = one\naws_secret_access_key = %two\n[work]\naws_access_key_id = three\n"


def test_a_path_is_a_folder() -> None:
    for url in ("/a/b c", "file:///a/b%20c"):
        store = open_store(url)
        assert isinstance(store, FolderStore)
        assert store.folder == Path("/a/b c")


def test_urls_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for url in ("s3://bucket/runs/one", "s3://bucket/runs/one/?region=eu-west-1&endpoint=http://127.0.0.1:1"):
        store = open_store(url)
        assert isinstance(store, ObjectStore)
        assert store.url("round-000001/record.json") == "s3://bucket/runs/one/round-000001/record.json"
    assert isinstance(open_store("gs://bucket"), ObjectStore)
    one, other = open_store("memory://"), open_store("memory://")
    one.put("key", b"1")
    assert (one.below(), other.below(), one.url("key")) == (["key"], [], "memory:/key")


def test_endpoint_and_region_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for store in (
        open_store("s3://bucket/runs", "http://127.0.0.1:1", "eu-west-1"),
        open_store("s3://bucket/runs?region=eu-west-1&endpoint=http://127.0.0.1:1"),
    ):
        signed = store.sign("PUT", "key", 60)
        assert signed is not None
        assert signed.startswith("http://127.0.0.1:1/bucket/runs/key?") and "eu-west-1" in signed


def test_a_url_that_is_wrong_or_lacks_something_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="found `secret`, expected endpoint or region after the question mark"):
        open_store("s3://bucket?secret=1")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreError, match=r"^az://bucket: cannot be used \(.*[Aa]ccount must be specified\)$"):
        open_store("az://bucket")


def test_without_the_extra_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "hetero_pp.store.objects")
    with pytest.raises(ConfigError, match=r"s3://bucket: .* pip install 'hetero-pp\[objects\]'"):
        open_store("s3://bucket")
    assert isinstance(open_store("runs"), FolderStore)


# ---- credentials ----


def _in_file(path: Path, **environment: str) -> dict[str, str]:
    return credentials_from_file({"AWS_SHARED_CREDENTIALS_FILE": str(path)} | environment)


def test_credentials_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text(FILE)
    assert _in_file(path) == {"access_key_id": "one", "secret_access_key": "%two"}
    assert _in_file(path, AWS_PROFILE="work") == {"access_key_id": "three"}
    for name in IN_PLACE_OF_THE_FILE:
        assert _in_file(path, **{name: "something"}) == {}


def test_a_file_of_credentials_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    with pytest.raises(ConfigError, match=f"AWS_SHARED_CREDENTIALS_FILE: found no file {path}"):
        _in_file(path)
    path.write_text(FILE)
    with pytest.raises(ConfigError, match=f"AWS_PROFILE: found `home`, which is no profile of {path}"):
        _in_file(path, AWS_PROFILE="home")
    path.write_text("secret")
    with pytest.raises(ConfigError, match=f"{path}: cannot be read, expected profiles") as raised:
        _in_file(path)
    assert "secret" not in str(raised.value)  # the contents of a file of secrets are not shown


def test_no_file_at_all_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert credentials_from_file({}) == {}
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(FILE)
    assert credentials_from_file({}) == {"access_key_id": "one", "secret_access_key": "%two"}


# ---- the `store` section of the YAML ----


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"url": "ftp://host/runs"}, "found `ftp:`, expected a path, or one of s3, gs, az, memory"),
        ({"url": "s3:///runs"}, "found no bucket, expected s3://BUCKET/FOLDER"),
        (
            {"url": "s3://key:secret@bucket"},
            "found credentials in a URL, expected them in environment variables or a file",
        ),
        ({"url": "runs", "endpoint": "http://127.0.0.1:1"}, "found `endpoint` with the url runs"),
        ({"region": "eu-central-1"}, "found `region` with the url None"),
    ],
)
def test_a_section_that_names_no_store_is_one_line(section: dict[str, str], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected) as raised:
        StoreSettings.model_validate(section)
    assert "secret" not in raised.value.errors()[0]["msg"]


def test_the_section_opens_the_store_of_a_run(tmp_path: Path) -> None:
    inside = StoreSettings().open("mine", tmp_path / "runs" / "mine" / "log")
    below = StoreSettings(url=str(tmp_path / "logs")).open("mine", tmp_path)
    assert (inside.url(), below.url()) == (str(tmp_path / "runs" / "mine" / "log"), str(tmp_path / "logs" / "mine"))
    assert StoreSettings(url="logs").with_absolute_paths().url == str(Path.cwd() / "logs")
    for url in ("s3://bucket", None):
        assert StoreSettings(url=url).with_absolute_paths().url == url
