"""Mistakes in saving, locking, loading and resharding."""

from tests.tools.mutant_table.mutant import Mutant

FIND, LOCK, SAVE = (f"megafp8/checkpoint/{name}.py" for name in ("find", "lock", "save"))
SAVER, LOAD, RANKS = (
    f"megafp8/checkpoint/{name}.py" for name in ("background", "load", "rank_scales")
)
TEST_LOCK, TEST_SAVER = "checkpoint/test_folder_lock.py", "checkpoint/test_saver.py"
TEST_SAVE = "checkpoint/test_save_faults.py"

CHECKPOINT = (
    Mutant(
        "another job's lock is removed",
        LOCK,
        '.get("token") == self._token:\n                self.path.unlink',
        '.get("token"):\n                self.path.unlink',
        "a job whose lock was taken away frees the folder of its successor",
        (f"{TEST_LOCK}::test_a_lock_that_was_taken_away_is_noticed",),
    ),
    Mutant(
        "every owner is dead",
        LOCK,
        "if not here and self._moves(owner, sign):",
        "if False:",
        "two jobs on hosts that locks do not reach write one folder",
        (f"{TEST_LOCK}::test_an_owner_on_another_host_is_judged_by_its_signs",),
    ),
    Mutant(
        "a lock is given up at once",
        LOCK,
        "self._file.acquire(timeout=0)",
        "self._file.acquire(timeout=0).lock.release()",
        "two jobs write one folder",
        (f"{TEST_LOCK}::test_the_second_is_refused_until_the_first_lets_go",),
    ),
    Mutant(
        "lock released before the run",
        "megafp8/train/folders.py",
        "        lock.append(taken)\n",
        "        taken.release()\n",
        "two jobs write one folder",
        ("train/test_folders.py::test_a_folder_is_held_for_the_whole_run",),
    ),
    Mutant(
        "the record follows the rename",
        SAVE,
        "    write_atomically(temporary / RECORD_NAME, record.to_json())\n"
        "    _replace(temporary, final)\n",
        "    _replace(temporary, final)\n"
        "    write_atomically(final / RECORD_NAME, record.to_json())\n",
        "a kill between the two leaves a checkpoint without its record",
        (f"{TEST_SAVE}::test_killed_at_any_step",),
    ),
    Mutant(
        "one checkpoint too many is kept",
        SAVE,
        "older[keep_last - 1 :]",
        "older[keep_last:]",
        "the disk fills",
        (f"{TEST_SAVE}::test_keep_last",),
    ),
    Mutant(
        "checkpoints of later iterations are deleted",
        SAVE,
        "iteration is not None and iteration < current and is_complete(path)",
        "iteration is not None and iteration != current and is_complete(path)",
        "a run that was set back deletes what it may go back to",
        (f"{TEST_SAVE}::test_keep_last",),
    ),
    Mutant(
        "deleted while it is loaded",
        SAVE,
        "            if not free:\n",
        "            if False:\n",
        "--keep-last takes a checkpoint away from a job that starts from it",
        (f"{TEST_SAVER}::test_keep_last_spares_what_is_being_loaded",),
    ),
    Mutant(
        "live tensors are written beside training",
        "megafp8/checkpoint/snapshot.py",
        "        data = _copy(data, buffers)\n",
        "        pass\n",
        "--async-save stores a mixture of two iterations",
        (f"{TEST_SAVER}::test_what_is_saved_is_the_state_at_the_call",),
    ),
    Mutant(
        "two saves in flight",
        SAVER,
        "        self.wait()\n        self._iteration = iteration",
        "        self._iteration = iteration",
        "the second save writes over the first one's copies",
        (f"{TEST_SAVER}::test_the_next_save_waits_for_the_one_in_flight",),
    ),
    Mutant(
        "shards are not compared with their checksums",
        LOAD,
        "shares = _share_files(files, [one.files for one in inspections]) if verify else {}",
        "shares: dict = {}",
        "flipped bits train on",
        (
            "checkpoint/test_load_errors.py::"
            "test_damage_is_named_with_the_checkpoint_to_use_instead",
        ),
    ),
    Mutant(
        "a tensor of another dtype is loaded",
        LOAD,
        "if saved.properties.dtype != tensor.dtype:",
        "if False:",
        "weights are cast in silence",
        ("checkpoint/test_load_errors.py::test_weights_must_match",),
    ),
    Mutant(
        "latest is not asked",
        FIND,
        "    if wanted in complete:\n",
        "    if False:\n",
        "--load takes the newest where `latest` was set back",
        ("checkpoint/test_find_checkpoint.py::test_latest_decides",),
    ),
    Mutant(
        "a record's own checksum is not compared",
        "megafp8/checkpoint/record.py",
        "stored, found = content.pop(CHECKSUM), content_crc32(content)",
        "stored = found = content.pop(CHECKSUM)",
        "a damaged megafp8.json is believed",
        ("checkpoint/test_record.py",),
    ),
    Mutant(
        "the checksum of a file's last part",
        "megafp8/checkpoint/files.py",
        "checksum = crc32(chunk[:count], checksum)",
        "checksum = crc32(chunk[:count])",
        "damage in all but the last MiB of a file is not found",
        ("checkpoint/test_find_checkpoint.py::test_a_checksum_is_of_the_whole_file",),
    ),
    Mutant(
        "tensors begin where their storage does",
        "megafp8/checkpoint/reader.py",
        "first = start + stored.storage_offset() * stored.itemsize",
        "first = start",
        "a part of a larger storage is read from its beginning",
        ("checkpoint/test_tensor_file.py::test_any_tensor_is_read_back",),
    ),
    Mutant(
        "scales of ranks merge by maximum",
        RANKS,
        'merge = torch.amin if name.endswith(".scale") else torch.amax',
        "merge = torch.amax",
        "fewer ranks saturate what more ranks could hold",
        ("checkpoint/test_rank_scales.py",),
    ),
    Mutant(
        "a share of ranks is rounded down",
        RANKS,
        "-(-(index + 1) * others // parts)",
        "(index + 1) * others // parts",
        "a change from 2 to 3 ranks loses scales",
        ("checkpoint/test_rank_scales.py",),
    ),
)
