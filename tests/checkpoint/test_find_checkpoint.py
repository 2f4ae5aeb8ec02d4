"""What `--load` means, over folders in every state that a kill can leave behind."""

import errno
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import megafp8.checkpoint.find as find
from megafp8.checkpoint import find_checkpoint, read_record, save_checkpoint, verify_files
from megafp8.checkpoint.files import CHUNK_BYTES, crc32_of, is_being_read, remove_directory, unread
from megafp8.checkpoint.kinds import found_instead
from megafp8.errors import CheckpointError
from tests.checkpoint.sharded import record


def save(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        save_checkpoint(root, iteration, {"a": torch.ones(2) * iteration}, record(iteration))


def test_missing_and_empty_folders_start_fresh(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "none") is None
    assert find_checkpoint(tmp_path) is None
    (tmp_path / "notes.txt").write_text("nothing to do with it")
    assert find_checkpoint(tmp_path) is None


@pytest.mark.parametrize("moment", ["found", "being deleted"])
def test_what_is_found_is_kept_until_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A run with `--keep-last 1` saves while another one starts from its folder."""
    save(tmp_path, 1)
    found: list[Path | None] = []
    look, deletion = find.find_checkpoint, ExitStack()

    def found_and_replaced(folder: Path) -> Path | None:
        found.append(look(folder))
        if len(found) == 1:
            save(tmp_path, 2)
            if moment == "found":
                remove_directory(tmp_path / "iter_0000001")
            else:
                assert deletion.enter_context(unread(tmp_path / "iter_0000001"))
        return found[-1]

    monkeypatch.setattr(find, "find_checkpoint", found_and_replaced)
    newer = tmp_path / "iter_0000002"
    with deletion, ExitStack() as held:
        assert find.find_to_read(tmp_path, held) == newer
        assert found == [tmp_path / "iter_0000001", newer] and is_being_read(newer)
        save_checkpoint(tmp_path, 3, {"a": torch.ones(2)}, record(3), keep_last=1)
        assert newer.is_dir()
    assert not is_being_read(newer)
    save_checkpoint(tmp_path, 4, {"a": torch.ones(2)}, record(4), keep_last=1)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004"]


def test_latest_decides(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    assert (tmp_path / "latest").read_text() == "iter_0000010\n"
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    # Killed between the rename and the update of `latest`.
    (tmp_path / "latest").write_text("iter_0000005\n")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000005"


def test_exactly_that_one(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    assert find_checkpoint(tmp_path / "iter_0000005") == tmp_path / "iter_0000005"
    (tmp_path / "iter_0000005" / "megafp8.json").unlink()
    with pytest.raises(CheckpointError, match="is partial .* use --load .*/iter_0000010 instead"):
        find_checkpoint(tmp_path / "iter_0000005")
    with pytest.raises(CheckpointError, match="iter_0000007 does not exist; use --load"):
        find_checkpoint(tmp_path / "iter_0000007")
    copy = tmp_path / "iter_0000010"
    copy.rename(tmp_path / "best")
    assert find_checkpoint(tmp_path / "best") == tmp_path / "best"


def test_partial_ones_are_skipped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 5, 10)
    (tmp_path / "iter_0000010" / "megafp8.json").unlink()
    (tmp_path / "tmp_iter_0000015.0123abcd").mkdir()
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        assert find_checkpoint(tmp_path) == tmp_path / "iter_0000005"
    assert "iter_0000010 is partial" in caplog.text
    assert "tmp_iter_0000015.0123abcd is partial" in caplog.text
    assert "latest names 'iter_0000010', which is no complete checkpoint" in caplog.text
    caplog.clear()
    assert find_checkpoint(tmp_path, to_load=False) == tmp_path / "iter_0000005"
    assert "is partial" not in caplog.text  # a run asks this after the other


def test_only_an_unfinished_first_save_starts_fresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tmp_iter_0000005.0123abcd").mkdir()
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        assert find_checkpoint(tmp_path) is None
    assert "tmp_iter_0000005.0123abcd is partial" in caplog.text


def test_checkpoints_of_which_none_is_usable_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005").mkdir()
    with pytest.raises(CheckpointError, match="no usable checkpoint, found iter_0000005"):
        find_checkpoint(tmp_path)
    (tmp_path / "iter_0000005").rmdir()
    (tmp_path / "latest").write_text("iter_0000005\n")
    with pytest.raises(CheckpointError, match="no usable checkpoint, found latest, which names"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "iter_5", "../iter_0000005", "\x00\xff", "iter_0000099"])
def test_damaged_latest_falls_back_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    save(tmp_path, 5, 10)
    (tmp_path / "latest").write_text(text)
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert "taking" in caplog.text


def test_missing_latest_takes_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 9999999, 10000000)
    (tmp_path / "latest").unlink()
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        assert find_checkpoint(tmp_path) == tmp_path / "iter_10000000"
    assert "latest is missing" in caplog.text


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, expected a directory"):
        find_checkpoint(tmp_path / "file")


def test_a_file_of_a_checkpoint_is_refused_with_its_folder(tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoint = tmp_path / "iter_0000005"
    shard = next(checkpoint.glob("*.distcp"))
    for file in (tmp_path / "latest", checkpoint / "megafp8.json", shard):
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(file)
        wrong = f"{file} is a file, expected a directory; give its folder: {file.parent}"
        assert str(caught.value) == wrong
        assert find_checkpoint(file.parent) == checkpoint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "config.json",
            "no checkpoint: it is a model of Hugging Face; convert it: .* --from hf --load",
        ),
        ("model-00001-of-00002.safetensors", "it is a model of Hugging Face; convert it"),
        (
            "latest_checkpointed_iteration.txt",
            "it is a checkpoint of Megatron; convert it: .* --from megatron",
        ),
        (".metadata", r"found \.metadata and no megafp8.json; copy it again, whole"),
        ("__0_0.distcp", "found __0_0.distcp and no megafp8.json"),
        (
            "checkpoints/iter_0000005/megafp8.json",
            "holds no checkpoint; folders in it do, give one of them: [^ ]*/checkpoints$",
        ),
    ],
)
def test_a_folder_that_holds_something_else_is_no_fresh_start(
    tmp_path: Path, name: str, message: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("5\n")
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path)
    save(tmp_path, 7)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000007"


def test_the_only_one_is_replaced_while_the_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5)
    iterdir, listed = Path.iterdir, []

    def listing(folder: Path) -> Iterator[Path]:
        paths = list(iterdir(folder))
        if not listed:
            listed.append(folder)
            save_checkpoint(tmp_path, 10, {"a": torch.ones(2)}, record(10), keep_last=1)
        return iter(paths)

    monkeypatch.setattr(Path, "iterdir", listing)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"


@pytest.mark.parametrize("kind", ["nowhere", "outside", "partial", "folder"])
def test_latest_as_something_else_falls_back_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    root, other = tmp_path / "mine", tmp_path / "other"
    save(root, 5, 10)
    save(other, 7)
    latest = root / "latest"
    latest.unlink()
    if kind == "folder":
        latest.mkdir()
    else:
        (root / "iter_0000011").mkdir()
        targets = {"nowhere": "iter_0000099", "outside": other / "iter_0000007"}
        latest.symlink_to(targets.get(kind, "iter_0000011"))
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        assert find_checkpoint(root) == root / "iter_0000010"
    assert "taking" in caplog.text


def test_the_set_aside_copy_stands_in_for_a_lost_iteration(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    old = tmp_path / "old_iter_0000010.0123abcd"
    (tmp_path / "iter_0000010").rename(old)
    assert find_checkpoint(tmp_path) == old
    save(tmp_path, 15)  # gives it its name back
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000005",
        "iter_0000010",
        "iter_0000015",
        "latest",
    ]


def test_latest_as_a_link(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("iter_0000005")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000005"
    save(tmp_path, 12)  # which replaces the link, not what it names
    assert (tmp_path / "latest").read_text() == "iter_0000012\n"


@pytest.mark.parametrize("text", ["", "{"])
def test_a_damaged_record_names_the_checkpoint_to_use(tmp_path: Path, text: str) -> None:
    save(tmp_path, 5, 10)
    (tmp_path / "iter_0000010" / "megafp8.json").write_text(text)
    with pytest.raises(
        CheckpointError, match="not valid JSON.* use --load .*/iter_0000005 instead"
    ):
        read_record(tmp_path / "iter_0000010")


@pytest.mark.parametrize(
    "name",
    ["iter_00000010", "iter_" + "9" * 200, "iter_\u0660\u0660\u0660\u0660\u0660\u0661\u0660"],
)
def test_another_spelling_names_no_iteration(tmp_path: Path, name: str) -> None:
    save(tmp_path, 10)
    (tmp_path / name).mkdir()
    (tmp_path / name / "megafp8.json").write_text("{}")
    (tmp_path / "latest").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_latest_that_is_no_file_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    save(tmp_path, 5)
    latest = tmp_path / "latest"
    latest.unlink()
    make = {
        "pipe": lambda: os.mkfifo(latest),
        "folder": latest.mkdir,
        "link": lambda: latest.symlink_to("nowhere"),
    }
    make[kind]()
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        assert find_checkpoint(tmp_path) == tmp_path / "iter_0000005"
    assert "latest is no file: taking" in caplog.text


def test_a_folder_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5)

    def denied(folder: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CheckpointError) as raised:
        find_checkpoint(tmp_path)
    assert str(raised.value) == f"{tmp_path} cannot be read: Permission denied"
    # What is wrong with one is not hidden by the others'.
    with pytest.raises(CheckpointError, match="iter_0000007 does not exist$"):
        find_checkpoint(tmp_path / "iter_0000007")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_shard_that_is_no_file(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 5)
    shard = tmp_path / "iter_0000005" / "__0_0.distcp"
    size = shard.stat().st_size
    shard.unlink()
    if kind == "folder":
        shard.mkdir()
    else:
        os.mkfifo(shard)
    with pytest.raises(CheckpointError, match=f"is no file, expected one of {size} bytes"):
        verify_files(shard.parent, read_record(shard.parent))


@pytest.mark.parametrize("wanted", ["megafp8", "hf", "megatron"])
def test_other_programs_are_named_in_the_same_words(tmp_path: Path, wanted: str) -> None:
    names = {"hf": "config.json", "megatron": "latest_checkpointed_iteration.txt"}
    words = {"hf": "a model of Hugging Face", "megatron": "a checkpoint of Megatron"}
    for kind, name in names.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / name).write_text("{}")
        if kind != wanted:
            tool = f"tools/convert_checkpoint.py --from {kind} --load {folder} --to {wanted}"
            expected = f": it is {words[kind]}; convert it: {tool} --save NEW_FOLDER"
            assert found_instead(folder, wanted) == expected
            if wanted == "megafp8":
                with pytest.raises(CheckpointError) as raised:
                    find_checkpoint(folder)
                assert str(raised.value) == f"{folder} holds no checkpoint{expected}"


def test_a_checksum_is_of_the_whole_file(tmp_path: Path) -> None:
    """However many parts it is read in."""
    for size in (0, 7, CHUNK_BYTES, 2 * CHUNK_BYTES + 7):
        content = os.urandom(size)
        (tmp_path / "file").write_bytes(content)
        assert crc32_of(tmp_path / "file") == f"{zlib.crc32(content):08x}"
