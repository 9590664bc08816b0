"""The disk tier: what is read back is what was written, or nothing, whatever befell disk or writer."""

import errno
import os
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.cache.disk import HEADER, DiskTier
from megaspan.errors import UserError

PAGE_BYTES = 300
TOKENS = bytes(range(16))
FILE_BYTES = HEADER.size + len(TOKENS) + PAGE_BYTES


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload(number: int, size: int = PAGE_BYTES) -> bytes:
    return random.Random(number).randbytes(size)


def tier(folder, pages: int = 100, fingerprint: bytes = b"model") -> DiskTier:
    return DiskTier(folder, pages * FILE_BYTES, fingerprint, PAGE_BYTES)


def files(disk: DiskTier) -> set[str]:
    return {path.name for path in disk.folder.iterdir()}


def test_pages_are_there_for_the_next_process(tmp_path):
    first = tier(tmp_path)
    assert all(first.write(key(number), TOKENS, payload(number)) for number in range(5))
    disk = tier(tmp_path)
    assert set(disk.keys()) == {key(number) for number in range(5)}
    assert disk.nbytes == first.nbytes == sum(path.stat().st_size for path in disk.folder.iterdir())
    for number in range(5):
        assert disk.has(key(number))
        assert disk.read(key(number), TOKENS) == payload(number)
    assert disk.read(key(9), TOKENS) is None
    assert (disk.failures, disk.damaged) == (0, 0)


def test_what_another_model_wrote_is_neither_listed_nor_removed(tmp_path):
    other = tier(tmp_path, fingerprint=b"other")
    other.write(key(1), TOKENS, payload(1))
    disk = tier(tmp_path)
    assert disk.keys() == []
    assert disk.read(key(1), TOKENS) is None
    assert tier(tmp_path, fingerprint=b"other").read(key(1), TOKENS) == payload(1)


REGIONS = {
    "magic": 0,
    "version": 8,
    "token count": 12,
    "payload length": 16,
    "fingerprint": 24,
    "checksum": 40,
    "tokens": HEADER.size,
    "payload": HEADER.size + len(TOKENS),
    "last byte": FILE_BYTES - 1,
}


@pytest.mark.parametrize("offset", REGIONS.values(), ids=REGIONS.keys())
def test_a_flipped_bit_anywhere_drops_the_page(tmp_path, offset):
    disk = tier(tmp_path)
    disk.write(key(1), TOKENS, payload(1))
    path = disk.folder / f"{key(1).hex()}.page"
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)
    assert disk.read(key(1), TOKENS) is None
    assert not path.exists()
    assert not disk.has(key(1))
    assert (disk.nbytes, disk.damaged) == (0, 1)
    assert disk.write(key(1), TOKENS, payload(1))
    assert disk.read(key(1), TOKENS) == payload(1)


@settings(max_examples=60)
@given(st.data())
def test_any_damage_at_all_drops_the_page(tmp_path_factory, data):
    """Bytes cut off, added or overwritten anywhere."""
    disk = tier(tmp_path_factory.mktemp("disk"))
    disk.write(key(1), TOKENS, payload(1))
    path = disk.folder / f"{key(1).hex()}.page"
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    damaged = content[:start] + data.draw(st.binary(max_size=40)) + content[stop:]
    path.write_bytes(damaged)
    assert disk.read(key(1), TOKENS) == (payload(1) if damaged == content else None)


def test_a_page_is_served_only_for_its_own_tokens_and_name(tmp_path):
    """A hash is not proof: the token ids must agree; nor is a file's name, which anybody can change."""
    disk = tier(tmp_path)
    for number in (1, 2):
        disk.write(key(number), TOKENS, payload(number))
    assert disk.read(key(1), TOKENS[::-1]) is None
    assert not disk.has(key(1))
    (disk.folder / f"{key(2).hex()}.page").rename(disk.folder / f"{key(3).hex()}.page")
    assert tier(tmp_path).read(key(3), TOKENS) is None


def test_a_file_of_another_fingerprint_in_the_wrong_folder_is_dropped(tmp_path):
    other, disk = tier(tmp_path, fingerprint=b"other"), tier(tmp_path)
    other.write(key(1), TOKENS, payload(1))
    name = f"{key(1).hex()}.page"
    (other.folder / name).rename(disk.folder / name)
    assert disk.read(key(1), TOKENS) is None
    assert name not in files(disk)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("rw"), st.integers(0, 7)), max_size=40))
def test_the_least_recently_used_pages_go(tmp_path_factory, steps):
    """Against a plain model: reads and writes in any order, 3 pages allowed."""
    disk, model = tier(tmp_path_factory.mktemp("disk"), pages=3), OrderedDict()
    for action, number in steps:
        if action == "w":
            assert disk.write(key(number), TOKENS, payload(number))
            model.setdefault(number)
            if len(model) > 3:
                model.popitem(last=False)
        else:
            assert disk.read(key(number), TOKENS) == (payload(number) if number in model else None)
            if number in model:
                model.move_to_end(number)
        assert disk.keys() == [key(each) for each in model]
        assert files(disk) == {f"{key(each).hex()}.page" for each in model}
        assert disk.nbytes == len(model) * FILE_BYTES


def test_the_order_of_use_and_a_smaller_limit_outlive_the_process(tmp_path):
    disk = tier(tmp_path)
    for number in range(4):
        disk.write(key(number), TOKENS, payload(number))
        os.utime(disk.folder / f"{key(number).hex()}.page", (number, number))
    disk.read(key(0), TOKENS)
    assert tier(tmp_path, pages=2).keys() == [key(3), key(0)]
    assert len(files(disk)) == 2


def test_a_page_over_the_limit_is_not_written(tmp_path):
    disk = DiskTier(tmp_path, FILE_BYTES - 1, b"model", PAGE_BYTES)
    assert not disk.write(key(1), TOKENS, payload(1))
    assert files(disk) == set()


def test_two_processes_on_one_folder_only_miss(tmp_path):
    """One makes room by removing what the other still lists; both write the same page."""
    one, two = tier(tmp_path), tier(tmp_path)
    one.write(key(1), TOKENS, payload(1))
    assert two.write(key(1), TOKENS, payload(1))
    three = tier(tmp_path, pages=1)
    three.write(key(2), TOKENS, payload(2))
    assert one.read(key(1), TOKENS) is None
    assert two.read(key(1), TOKENS) is None
    assert (one.failures, two.failures, one.damaged, two.damaged) == (0, 0, 0, 0)
    assert one.read(key(2), TOKENS) == payload(2)  # asked by name, a page of another process serves as well


def test_opening_removes_what_a_dead_writer_left_and_not_what_a_live_one_writes(tmp_path, monkeypatch):
    disk = tier(tmp_path)
    orphan = disk.folder / f"{key(1).hex()}.1-1.partial"
    orphan.write_bytes(b"half")
    replace, seen = os.replace, []

    def opened_meanwhile(source, target):
        tier(tmp_path)
        seen.append(orphan.exists())
        replace(source, target)

    monkeypatch.setattr(os, "replace", opened_meanwhile)
    assert disk.write(key(2), TOKENS, payload(2))
    assert seen == [False]
    assert files(disk) == {f"{key(2).hex()}.page"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_is_logged_once_and_done_without(tmp_path, monkeypatch, caplog, code):
    disk = tier(tmp_path)
    disk.write(key(1), TOKENS, payload(1))

    def refuse(*arguments):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        assert not disk.write(key(2), TOKENS, payload(2))
        assert not disk.write(key(3), TOKENS, payload(3))
        patch.setattr("pathlib.Path.read_bytes", refuse)
        assert disk.read(key(1), TOKENS) is None
    assert disk.failures == 3
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.text
    assert files(disk) == {f"{key(1).hex()}.page"}  # nothing half-written stays
    assert disk.nbytes == len(disk.keys()) * FILE_BYTES
    assert disk.write(key(2), TOKENS, payload(2))  # and it is tried again


def test_a_folder_that_is_gone_is_made_anew(tmp_path):
    disk = tier(tmp_path / "disk")
    disk.folder.rmdir()
    assert disk.read(key(1), TOKENS) is None
    assert disk.write(key(1), TOKENS, payload(1))
    assert disk.read(key(1), TOKENS) == payload(1)


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another folder"):
        tier(tmp_path / "file")


def test_foreign_files_are_left_alone(tmp_path):
    disk = tier(tmp_path)
    names = {"notes.txt", "zz.page", ".page", "AA.page"}
    for name in names:
        (disk.folder / name).write_text("mine")
    (disk.folder / "aa.page").mkdir()
    os.mkfifo(disk.folder / "bb.partial")  # to open it would be to wait for ever
    assert tier(tmp_path).keys() == []
    assert files(disk) == names | {"aa.page", "bb.partial"}


def test_a_cleared_tier_has_nothing_and_takes_what_comes_after(tmp_path):
    """What was on its way is refused; files go, those of other processes too, but not those written since."""
    disk = tier(tmp_path)
    before = disk.generation
    for number in range(3):
        disk.write(key(number), TOKENS, payload(number), before)
    tier(tmp_path).write(key(3), TOKENS, payload(3))
    disk.clear()
    assert (disk.keys(), disk.nbytes) == ([], 0)
    assert not disk.write(key(1), TOKENS, payload(1), before)
    assert disk.write(key(2), TOKENS, payload(2), disk.generation)
    disk.remove_unlisted()
    assert files(disk) == {f"{key(2).hex()}.page"}
    assert disk.read(key(2), TOKENS) == payload(2)
    assert disk.nbytes == FILE_BYTES


def test_pages_can_be_kept_from_making_room(tmp_path):
    disk = tier(tmp_path, pages=3)
    assert disk.capacity(len(TOKENS)) == 3
    for number in range(3):
        disk.write(key(number), TOKENS, payload(number))
    disk.touch([key(1), key(0), key(9)])
    assert disk.keys() == [key(2), key(1), key(0)]
    disk.write(key(4), TOKENS, payload(4))
    assert disk.keys() == [key(1), key(0), key(4)]
