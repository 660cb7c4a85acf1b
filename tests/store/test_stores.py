"""One contract for every store."""

from __future__ import annotations

import filecmp
import hashlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from started import Started

from hetero_pp.core.errors import StoreError
from hetero_pp.store.folder import FolderStore, reading, writing
from hetero_pp.store.objects import ObjectStore
from hetero_pp.store.opening import open_store
from hetero_pp.store.store import Store

LARGE = 64_000_000
TIMEOUT = 60.0


def test_what_is_put_is_read_and_replaced(store: Store) -> None:
    store.put("round-000001/dc/1/norm.blob", b"first")
    assert store.get("round-000001/dc/1/norm.blob") == b"first"
    store.put("round-000001/dc/1/norm.blob", b"")
    assert store.get("round-000001/dc/1/norm.blob") == b""


def test_a_copy_is_an_object_of_its_own(store: Store) -> None:
    store.put("here/first", b"content")
    store.copy("here/first", "there/second")
    store.put("here/first", b"")
    assert store.get("there/second") == b"content"
    assert (store.size("here/first"), store.size("there/second")) == (0, 7)
    for use in (store.size, partial(store.copy, to="copy")):
        with pytest.raises(FileNotFoundError, match=f"{re.escape(store.url('nothing'))}'$"):
            use("nothing")
    assert store.below() == ["here/first", "there/second"]


@pytest.mark.parametrize("key", ["nothing", "folder/nothing", "folder"])
def test_what_is_missing_is_named(store: Store, tmp_path: Path, key: str) -> None:
    store.put("folder/something", b"there")
    if key != "folder":  # a folder is no object: a file system has its own message
        with pytest.raises(FileNotFoundError, match=f"{re.escape(store.url(key))}'$"):
            store.get(key)
        with pytest.raises(FileNotFoundError, match=f"{re.escape(store.url(key))}'$"):
            store.get_to(key, tmp_path / "copy")
    else:
        with pytest.raises((FileNotFoundError, StoreError), match=re.escape(store.url(key))):
            store.get(key)
    assert not (tmp_path / "copy").exists()


def test_create_is_had_by_the_first(store: Store) -> None:
    assert store.create("record.json", b"first")
    assert not store.create("record.json", b"second")
    assert store.get("record.json") == b"first"
    store.delete(["record.json"])
    assert store.create("record.json", b"third")
    store.put("put", b"before")
    assert not store.create("put", b"after")


def test_of_many_that_race_one_has_created_it(store: Store) -> None:
    """All read the bytes of the winner."""
    racers, keys = 8, [f"round-{number:06d}/record.json" for number in range(25)]
    start = threading.Barrier(racers)

    def race(racer: int) -> list[bool]:
        start.wait()
        return [store.create(key, f"of {racer}".encode() * 1000) for key in keys]

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(race, range(racers)))
    for number, key in enumerate(keys):
        (winner,) = [racer for racer in range(racers) if won[racer][number]]
        assert store.get(key) == f"of {winner}".encode() * 1000
    assert store.below() == keys


def test_what_is_listed(store: Store) -> None:
    assert store.below() == store.names() == store.below("round-000001") == store.names("round-000001") == []
    for key in ("a", "round-000001/record.json", "round-000001/dc/1/norm.blob", "round-0000010/dc/1/norm.blob"):
        store.put(key, b"x")
    assert store.names() == ["a", "round-000001/", "round-0000010/"]
    assert store.names("round-000001") == ["dc/", "record.json"]
    assert store.below("round-000001") == ["round-000001/dc/1/norm.blob", "round-000001/record.json"]
    assert len(store.below()) == 4 and store.below() == sorted(store.below())


def test_more_than_a_page_of_a_list(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"many/{number:04d}", b""), range(1050)))
    assert store.below("many") == [f"many/{number:04d}" for number in range(1050)]
    assert store.names("many") == [f"{number:04d}" for number in range(1050)]
    store.delete(store.below("many"))
    assert store.below() == []


def test_what_is_deleted_is_gone_and_what_is_not_there_is_no_error(store: Store) -> None:
    for key in ("round-000001/a", "round-000001/b/c", "kept"):
        store.put(key, b"x")
    store.delete(["round-000001/b/c", "never", "round-000001/never", "round-000001/a"])
    assert store.below() == ["kept"]
    assert set(store.names()) - {"round-000001/"} == {"kept"}
    store.delete([])
    store.put("round-000001/a", b"again")
    assert store.get("round-000001/a") == b"again"


def test_a_large_file_comes_back(store: Store, tmp_path: Path) -> None:
    data = b"".join(hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(1000))
    path = tmp_path / "large"
    path.write_bytes(data * (LARGE // len(data)))
    store.put_file("checkpoint-000001.safetensors", path)
    store.get_to("checkpoint-000001.safetensors", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_files_for_as_long_as_a_block_runs(store: Store) -> None:
    with writing(store, "round/file") as path:
        path.write_bytes(b"content")
        assert store.below() == []
    with reading(store, "round/file") as path:
        assert path.read_bytes() == b"content"
    with pytest.raises(RuntimeError), writing(store, "round/torn") as path:
        path.write_bytes(b"cont")
        raise RuntimeError
    assert store.below() == ["round/file"]
    with pytest.raises(FileNotFoundError), reading(store, "never") as path:
        path.read_bytes()


def test_keys_that_lead_elsewhere_are_none(store: Store) -> None:
    calls: list[Callable[[str], object]] = [
        store.get,
        lambda key: store.put(key, b""),
        lambda key: store.create(key, b""),
        lambda key: store.delete([key]),
    ]
    for key in ("../above", "a/../../above", "/absolute", "a//b", "", "."):
        for call in calls:
            with pytest.raises(ValueError, match="no key of a store"):
                call(key)


def test_a_writer_that_is_killed_leaves_the_old_the_new_or_nothing(lasting: str, tmp_path: Path) -> None:
    """The writer overwrites one object over and over, and creates a new object each time.

    It is killed at any moment.
    """
    contents = [tmp_path / "a", tmp_path / "b"]
    for path in contents:
        path.write_bytes(path.name.encode() * 5_000_000)
    store = open_store(lasting)
    for kill in range(3):
        writer = Started(Path(__file__).with_name("writer.py"), [lasting, str(kill), *map(str, contents)])
        try:
            while f"begun/{kill}" not in store.below("begun"):
                assert writer.poll() is None, writer.communicate()
        finally:
            writer.kill()
            writer.wait(TIMEOUT)
        for key in store.below("files"):
            store.get_to(key, tmp_path / "copy")
            assert any(filecmp.cmp(tmp_path / "copy", path, shallow=False) for path in contents), key


# ---- a folder ----


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = FolderStore(tmp_path / "file")
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match=rf"^{tmp_path}/file/key: cannot be written \(Not a directory\)$"):
            write("key", b"data")


def test_what_a_kill_left_is_no_object(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("round-000001/record.json", b"whole")
    (tmp_path / "round-000001" / "record.json.0123abcd.part").write_bytes(b"wh")
    assert store.below() == ["round-000001/record.json"]
    assert store.names("round-000001") == ["record.json"]
    store.forget_parts()
    assert [path.name for path in (tmp_path / "round-000001").iterdir()] == ["record.json"]


# ---- objects ----


def test_a_service_that_cannot_be_reached_is_one_line(free_port: int) -> None:
    where = f"http://127.0.0.1:{free_port}"
    store = ObjectStore("s3://runs/mine", {"endpoint": where, "access_key_id": "a", "secret_access_key": "b"}, 0.1)
    for call in (
        store.get,
        store.names,
        store.below,
        lambda key: store.put(key, b""),
        lambda key: store.create(key, b""),
    ):
        with pytest.raises(StoreError, match=r"^s3://runs/mine/key: cannot be \w+ \(Connection refused\)$"):
            call("key")


class _Starting(BaseHTTPRequestHandler):
    """A service that is not ready for its first dozen of requests."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(500 if self.asked <= 12 else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def test_a_service_that_is_not_ready_is_asked_again() -> None:
    """Requests are repeated until the time limit, however many that are."""
    service = ThreadingHTTPServer(("127.0.0.1", 0), _Starting)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    options = {"endpoint": f"http://127.0.0.1:{service.server_port}", "access_key_id": "a", "secret_access_key": "b"}
    try:
        with pytest.raises(FileNotFoundError):
            ObjectStore("s3://runs/mine", options).get("key")
    finally:
        service.shutdown()
        service.server_close()
    assert _Starting.asked == 13
