from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch

from lit_rlhf.checkpointing import AtomicCheckpointIO, atomic_file, atomic_folder
from lit_rlhf.errors import OutputError


def _write_half(path: Any, error: BaseException) -> None:
    path.write_text("half")
    raise error


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_its_place_at_the_end(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic_file(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert names(path.parent) == ["a.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_an_error_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(type(error)), atomic_file(path) as temporary:
        _write_half(temporary, error)
    assert path.read_text() == "before"
    assert names(tmp_path) == ["a.txt"]


def test_a_full_disk_is_said_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    writer, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    writer.save_checkpoint({"step": 1}, path)

    def full(content: Any, file: Any) -> None:
        with open(file, "wb") as stream:
            stream.write(b"PK")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OutputError, match=r"last\.ckpt cannot be written: No space left.*the one from before is whole"):
        writer.save_checkpoint({"step": 2}, path)
    monkeypatch.undo()
    assert writer.load_checkpoint(path, weights_only=True) == {"step": 1}
    assert names(tmp_path) == ["last.ckpt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_disk_that_is_really_full(tmp_path):
    """PyTorch's writer does not raise OSError."""

    def save(temporary: Any) -> None:
        temporary.symlink_to("/dev/full")
        torch.save({"weights": torch.zeros(2**20)}, temporary)

    with pytest.raises(OutputError, match=r"a\.ckpt cannot be written"), atomic_file(tmp_path / "a.ckpt") as temporary:
        save(temporary)
    assert names(tmp_path) == []


def test_leftovers_of_dead_processes_are_removed(tmp_path):
    dead, alive = tmp_path / "a[1].ckpt.partial-999999999", tmp_path / f"a[1].ckpt.partial-{os.getppid()}"
    other = tmp_path / "b.ckpt.partial-999999999"
    for path in (dead, alive, other):
        path.touch()
    with atomic_file(tmp_path / "a[1].ckpt") as temporary:
        temporary.touch()
    assert names(tmp_path) == sorted(["a[1].ckpt", alive.name, other.name])


def test_a_folder_appears_whole(tmp_path):
    target = tmp_path / "policy"
    with atomic_folder(target) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text("1")
        assert not target.exists()
    assert (target / "part" / "weights").read_text() == "1"
    assert names(tmp_path) == ["policy"]


def test_a_folder_that_is_there_keeps_its_other_files(tmp_path):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "weights").write_text("old")
    with pytest.raises(ValueError, match="half"), atomic_folder(tmp_path) as folder:
        _write_half(folder / "weights", ValueError("half"))
    assert (tmp_path / "weights").read_text() == "old"
    with atomic_folder(tmp_path) as folder:
        (folder / "weights").write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"notes": "mine", "weights": "new"}
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.partial-*"))


def test_the_export_is_whole_or_not_there(make_trainer, make_data, policy_dir, tmp_path, monkeypatch):
    from lit_rlhf import GRPOModule

    module = GRPOModule(policy_dir)
    make_trainer().fit(module, make_data())
    before = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    assert "model.safetensors" in before

    def dying(folder: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(module.tokenizer, "save_pretrained", dying)
    with torch.no_grad():
        next(module.policy.parameters()).zero_()
    with pytest.raises(MemoryError):
        module.save_pretrained(tmp_path / "policy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()} == before
