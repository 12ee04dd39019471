"""Checkpoints that are whole or not there, say which run they belong to, and are refused where they do not fit."""

from lit_rlhf.checkpointing.atomic import AtomicCheckpointIO, atomic_file, atomic_folder, write_json_lines
from lit_rlhf.checkpointing.fingerprint import fingerprint
from lit_rlhf.checkpointing.places import check_folders, check_room, find_last, output_folders
from lit_rlhf.checkpointing.reading import FORMAT, STATE_KEY, read_content, read_summary, summary_of
from lit_rlhf.checkpointing.weights import read_weights

__all__ = [
    "FORMAT",
    "STATE_KEY",
    "AtomicCheckpointIO",
    "atomic_file",
    "atomic_folder",
    "check_folders",
    "check_room",
    "find_last",
    "fingerprint",
    "output_folders",
    "read_content",
    "read_summary",
    "read_weights",
    "summary_of",
    "write_json_lines",
]
